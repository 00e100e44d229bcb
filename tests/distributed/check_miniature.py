"""All ranks of `conf/qwen25_32b.yaml`'s layout, TP8 x PP2, built and stepped in miniature: 16 processes on CPU.

    torchrun --nproc-per-node 16 tests/distributed/check_miniature.py

Everything of the shipped configuration stays (recipe, FP8 parameters, sequence parallelism, overlap, calibration) but for the
model, which keeps its numbers of heads and is a few layers deep and tiny, and the engine. One step is taken as the trainer takes
it: shadow and old log-probs, two updates with a shadow pass between. Shadow log-probs are compared with transformers' of
the same BF16 weights.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

PROMPT, RESPONSE, NUM_SEQUENCES = 4, 28, 8
# BF16 in another order of summation; a wrong shard or a wrong order of layers is off by whole nats.
LOG_PROB_TOLERANCE = 0.1
OVERRIDES = (
    "model.hf=null",
    "model.tokenizer=characters",
    "model.max_sequence_length=64",
    # 40 heads in 8 groups, as in the 32B model
    "model.shape={architecture: qwen2, num_layers: 4, hidden_size: 80, ffn_hidden_size: 192, num_attention_heads: 40, "
    "num_query_groups: 8, head_dim: 4, tie_embeddings: false}",
    "data.train=arithmetic",
    "data.chat_template=false",
    "eval.sets=[]",
    "reward.name=exact",
    "rollout.engine=local",
    "rollout.max_new_tokens=16",
    "algorithm.num_minibatches=2",
    "train.prompts_per_step=4",
    "train.samples_per_prompt=2",
    "train.tokens_per_microbatch=96",
    "optimizer.lr=1e-3",
    "cluster.num_nodes=2",
)


def check(checks: Any) -> None:
    """Build, score, update twice, compare."""
    import torch
    from checks import layout
    from transformers import AutoModelForCausalLM

    from megatron_calclip.batch import Completion, Prompt, ScoredTokens, Trajectories
    from megatron_calclip.config_file import load_config
    from megatron_calclip.hf import load_hf_config, load_tokenizer
    from megatron_calclip.learner.learner import Learner
    from megatron_calclip.planning.parameters import rank_parameters
    from megatron_calclip.weights.load import HFSource

    config = load_config("qwen25_32b", OVERRIDES, world_size=16)
    hf_config = load_hf_config(config, load_tokenizer(config.model))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, hf_config.vocab_size, (NUM_SEQUENCES, PROMPT + RESPONSE), generator=generator)
    with torch.no_grad():
        every = model(tokens[:, :-1]).logits.float().log_softmax(-1)
    expected = every.gather(2, tokens[:, 1:, None])[:, PROMPT - 1 :, 0]
    rows = tokens.tolist()
    trajectories = Trajectories.from_completions(
        [Prompt(index, tuple(row[:PROMPT]), "", "") for index, row in enumerate(rows)],
        [[Completion(tuple(row[PROMPT:]), (-1.0,) * RESPONSE, True, 0)] for row in rows],
    )

    def objective(scored: ScoredTokens) -> tuple[torch.Tensor, None]:
        return -scored.log_probs.sum() / (NUM_SEQUENCES * RESPONSE), None

    with layout(config) as runtime:
        learner = Learner(
            config,
            hf_config,
            runtime,
            source=HFSource.from_tensors(dict(model.state_dict())),
            lr=config.optimizer.lr,
            num_steps=4,
            warmup_steps=0,
            decay="constant",
            min_lr=0.0,
        )
        counted = sum(p.numel() for chunk in learner.chunks for p in chunk.parameters())
        planned = rank_parameters(learner.shape, config.parallel)[runtime.pp_rank]
        checks.true("parameters of every rank as planned", counted == planned.total)
        learner.begin_step()
        prepared = learner.prepare(trajectories, num_minibatches=2)
        micro_batches = [len(micros) for micros in prepared.minibatches]
        checks.true("several micro-batches", min(micro_batches) > 1, str(micro_batches))

        def gathered(log_probs: torch.Tensor) -> torch.Tensor:
            return learner.gather_tokens(log_probs)[trajectories.response_mask].view(NUM_SEQUENCES, RESPONSE)

        shadow = gathered(learner.shadow_log_probs(prepared).log_probs)
        error = float((shadow - expected).abs().max())
        checks.true("BF16 shadow passes are transformers'", error < LOG_PROB_TOLERANCE, f"{error:.3f} nats")
        old = gathered(learner.log_probs(prepared).log_probs)
        noise = float((old - shadow).abs().mean())
        checks.true("FP8 log-probs differ from BF16, a little", 0 < noise < 0.2, f"{noise:.4f} nats")
        results = [learner.update(prepared, index, objective) for index in range(2)]
        checks.true("both updates applied", all(result.applied and result.grad_norm > 0 for result in results))
        new = gathered(learner.shadow_log_probs(prepared).log_probs)
        gain = float((new - shadow).mean())
        checks.true("the updates raised what they should", gain > 0.05, f"{gain:.3f} nats")


def main() -> int:
    """The number of failures on this rank."""
    warnings.filterwarnings("ignore")
    # Imported here, because Megatron must not be imported before its view of torch is installed.
    from megatron_calclip.learner import cpu

    cpu.install()
    from checks import Checks

    checks = Checks()
    check(checks)
    return len(checks.failures)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
