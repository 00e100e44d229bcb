"""Tokens per second of one optimizer step: our learner against TRL's GRPOTrainer and a plain transformers loop.

    pip install -c constraints.txt -e '.[bench]'
    python -m benchmarks.learner                              # a quarter of an hour
    python -m benchmarks.learner --models 1M --dtypes fp32    # two minutes
    python -m benchmarks.learner --quick                      # 1M, three repetitions

Every arm takes the same weights and token lists (32 sequences with prompts of 16 tokens) through the same step:
forward, clipped GRPO loss as a mean over tokens, backward, gradient clipping, AdamW. Before anything is timed, the
arms must agree on the loss and the gradient norm of the first step. Only tokens of the sequences count, padding does
not. In `spread` the sequences have 32 to 256 tokens, evenly spread (1:8); in `equal` all have 144, the same mean.

* ours: `Learner.prepare` (packing) and `Learner.update`, a world of one on gloo. `bf16` is BF16 parameters with FP32
  masters and FP32 gradients.
* trl: `GRPOTrainer`'s own training step on batches that are padded beforehand, as its rollout would hand them over;
  then what the Trainer does: `accelerator.clip_grad_norm_` and its own optimizer (`adamw_torch_fused`). `bf16` is its
  autocast over FP32 parameters. SDPA attention, no gradient checkpointing. It has no padding-free mode for GRPO, and
  its token budget is a number of sequences.
* transformers: the shortest loop one would write. Right-padded micro-batches in the order of the batch, each padded to
  its own longest, log-softmax in FP32 of the response's logits only, no entropy, no metrics, fused AdamW, autocast for
  `bf16`.
* sorted: the same loop after sorting the sequences by length, so that it hardly pads. Shown, not asked to be beaten.

Each arm lives in a process of its own on one thread, and steps alternate between them, so that a load that comes and
goes hits all. Time is CPU time: for one thread equal to wall time on an idle machine, and still meaningful on a shared
one. The result is the median of the ratios within a repetition. The bound is the time of the step's matrix products
alone, bare, one `torch.mm` of the same shape and dtype for each linear's forward and two backward products over real
tokens; attention's own are not in it.

Left out on purpose: rollout, old log-probabilities (every arm gets them), CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.results import FOLDER, Result, write_report
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.batch import Completion, Prompt, TrainingBatch, Trajectories

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUM_SEQUENCES = 32
NUM_PROMPT_TOKENS = 16
SHORTEST, LONGEST = 32, 256
LENGTHS = {
    "spread": torch.linspace(SHORTEST, LONGEST, NUM_SEQUENCES).round().long().tolist(),
    "equal": [(SHORTEST + LONGEST) // 2] * NUM_SEQUENCES,
}
ASKED = {"spread": 1.5, "equal": 1.0}
CLIP = ClipBounds(0.8, 1.2)
LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-5, 0.01, 1.0
PAD_TOKEN = 0
# Arms round differently; a wrong mask, shift or denominator shows in the first digits.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
# Sequences of a peer's micro-batch: the fastest of 4, 8, 16 and 32 for both peers; see docs/performance.md.
PEER_MICRO_BATCH = 8

Step = Callable[[], tuple[float, float]]
"""One optimizer step; returns the loss and the norm of its gradient."""


def model_config(name: str) -> Qwen2Config:
    """The shape `1M` (0.9M parameters) or `5M` (5.0M)."""
    hidden_size, num_layers = {"1M": (128, 4), "5M": (256, 6)}[name]
    return Qwen2Config(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )


def make_model(name: str) -> Any:
    """The same random FP32 weights in every process."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(model_config(name), dtype=torch.float32)


def make_batch(name: str, lengths: Sequence[int]) -> TrainingBatch:
    """Random tokens in shuffled order of length, advantages of both signs, old log-probabilities near the model's own."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, 512, (count,), generator=generator).tolist())

    order = torch.randperm(len(lengths), generator=generator).tolist()
    sizes = [lengths[index] - NUM_PROMPT_TOKENS for index in order]
    prompts = [Prompt(index, draw(NUM_PROMPT_TOKENS), "", "") for index in range(len(sizes))]
    answers = [[Completion(draw(size), (0.0,) * size, finished=True, policy_version=0)] for size in sizes]
    trajectories = Trajectories.from_completions(prompts, answers)
    model, mask, old = make_model(name).eval(), trajectories.response_mask, []
    with torch.no_grad():
        for tokens in trajectories.tokens.split(trajectories.lengths.tolist()):
            every = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            old.append(torch.cat([torch.zeros(1), every.gather(1, tokens[1:, None])[:, 0]]))
    old_log_probs = torch.where(mask, torch.cat(old) + 0.1 * torch.randn(mask.shape, generator=generator), 0.0)
    rewards = torch.randn(len(sizes), generator=generator)
    return TrainingBatch(trajectories, rewards, rewards[trajectories.sequence_ids] * mask, old_log_probs)


def our_arm(name: str, batch: TrainingBatch, dtype: str) -> Step:
    """Our learner, packing included."""
    from megatron_calclip.config_file import config_from_dict
    from megatron_calclip.learner import runtime

    config = config_from_dict(
        {
            "model": {"shape": {}, "tokenizer": "characters"},
            "precision": {"recipe": "bf16", "params_dtype": dtype},
            "optimizer": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "clip_grad": MAX_GRAD_NORM},
            "algorithm": {"num_minibatches": 1, "aggregation": "token_mean"},
        }
    )
    runtime.stop()  # of the case before
    started = runtime.start(config)  # Megatron is imported after this
    from megatron_calclip.learner.learner import Learner
    from megatron_calclip.objective import policy_objective, policy_tokens
    from megatron_calclip.weights.load import HFSource

    learner = Learner(
        config,
        model_config(name),
        started,
        source=HFSource.from_tensors(make_model(name).state_dict()),
        lr=LEARNING_RATE,
        num_steps=1,
        warmup_steps=0,
        decay="constant",
        min_lr=0.0,
    )
    learner.begin_step()
    assert batch.old_log_probs is not None
    trajectories = batch.trajectories
    own = TrainingBatch(
        Trajectories(**{**vars(trajectories), "sampler_log_probs": batch.old_log_probs}),
        batch.rewards,
        batch.advantages,
        batch.old_log_probs,
    )
    tokens = policy_tokens(own, [list(range(NUM_SEQUENCES))], config.algorithm, LONGEST)
    objective = policy_objective(tokens, CLIP, config.algorithm)

    def step() -> tuple[float, float]:
        prepared = learner.prepare(trajectories, num_minibatches=1)
        result = learner.update(prepared, 0, objective)
        assert result.applied
        return float(result.loss), result.grad_norm

    return step


def pad(rows: Sequence[Tensor], *, left: bool = False) -> tuple[Tensor, Tensor]:
    """[b, longest] and the mask of what is no padding, from rows of any length."""
    side = "left" if left else "right"
    pad_rows = torch.nn.utils.rnn.pad_sequence
    ones = [torch.ones(len(row), dtype=torch.int64) for row in rows]
    values = pad_rows(list(rows), batch_first=True, padding_value=PAD_TOKEN, padding_side=side)
    return values, pad_rows(ones, batch_first=True, padding_side=side)


def trl_arm(name: str, batch: TrainingBatch, dtype: str) -> Step:
    """TRL's trainer on batches that its rollout would have left; the rollout itself never runs."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({"<pad>": PAD_TOKEN, "<eos>": 1}, unk_token="<pad>"))
    num_micro = NUM_SEQUENCES // PEER_MICRO_BATCH
    config = GRPOConfig(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        use_cpu=True,
        bf16=dtype == "bf16",
        gradient_checkpointing=False,
        per_device_train_batch_size=PEER_MICRO_BATCH,
        gradient_accumulation_steps=num_micro,
        num_generations=PEER_MICRO_BATCH,
        max_completion_length=LONGEST,
        loss_type="dapo",  # the mean over tokens
        beta=0.0,
        epsilon=0.2,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta2=0.95,
        max_grad_norm=MAX_GRAD_NORM,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=make_model(name),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )
    trajectories = batch.trajectories
    sizes = trajectories.lengths.tolist()
    assert batch.old_log_probs is not None
    rows = trajectories.tokens.split(sizes)
    prompt_ids, prompt_mask = pad([row[:NUM_PROMPT_TOKENS] for row in rows], left=True)
    completion_ids, completion_mask = pad([row[NUM_PROMPT_TOKENS:] for row in rows])
    old = [row[NUM_PROMPT_TOKENS:] for row in batch.old_log_probs.split(sizes)]
    whole = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": batch.rewards,
        "old_per_token_logps": torch.nn.utils.rnn.pad_sequence(old, batch_first=True),
    }
    micros = [
        {key: value.split(PEER_MICRO_BATCH)[index] for key, value in whole.items()}
        | {"num_items_in_batch": completion_mask.sum()}
        for index in range(num_micro)
    ]
    trainer.current_gradient_accumulation_steps = num_micro
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.create_optimizer_and_scheduler(num_training_steps=1_000_000)
    model = trainer.accelerator.prepare(trainer.model)
    trainer.model_wrapped = model

    def step() -> tuple[float, float]:
        loss = sum(float(trainer.training_step(model, micro, None)) for micro in micros)
        norm = trainer.accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss, float(norm)

    return step


def transformers_arm(name: str, batch: TrainingBatch, dtype: str, *, by_length: bool = False) -> Step:
    """A plain loop with padded micro-batches, in the order of the batch or sorted by length."""
    model = make_model(name)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    trajectories = batch.trajectories
    sizes = trajectories.lengths.tolist()
    assert batch.old_log_probs is not None
    rows, old_rows = trajectories.tokens.split(sizes), batch.old_log_probs.split(sizes)
    order = sorted(range(NUM_SEQUENCES), key=lambda index: -sizes[index] if by_length else index)
    num_scored = trajectories.num_response_tokens

    def step() -> tuple[float, float]:
        total = 0.0
        for start in range(0, NUM_SEQUENCES, PEER_MICRO_BATCH):
            chosen = order[start : start + PEER_MICRO_BATCH]
            tokens, attention_mask = pad([rows[index] for index in chosen])
            mask = attention_mask[:, NUM_PROMPT_TOKENS:]
            old = torch.nn.utils.rnn.pad_sequence([old_rows[index] for index in chosen], batch_first=True)
            keep = tokens.shape[1] - NUM_PROMPT_TOKENS + 1
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                logits = model(tokens, attention_mask=attention_mask, logits_to_keep=keep, use_cache=False).logits
            every = logits[:, :-1].float().log_softmax(-1)
            log_probs = every.gather(2, tokens[:, NUM_PROMPT_TOKENS:, None])[..., 0]
            ratio = (log_probs - old[:, NUM_PROMPT_TOKENS:]).exp()
            advantages = batch.rewards[chosen, None]
            clipped = ratio.clamp(CLIP.lower, CLIP.upper)
            loss = -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / num_scored
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total, float(norm)

    return step


def bound_arm(name: str, batch: TrainingBatch, dtype: str) -> Step:
    """The matrix products of the step alone: forward, and backward for input and weight, of every linear."""
    config, num_tokens = model_config(name), batch.trajectories.tokens.numel()
    hidden, ffn = config.hidden_size, config.intermediate_size
    kv = hidden * config.num_key_value_heads // config.num_attention_heads
    layer = [(num_tokens, hidden, hidden + 2 * kv), (num_tokens, hidden, hidden)]
    layer += [(num_tokens, hidden, 2 * ffn), (num_tokens, ffn, hidden)]
    shapes = layer * config.num_hidden_layers + [(batch.trajectories.num_response_tokens, hidden, config.vocab_size)]
    kind = DTYPES[dtype]
    operands = {
        shape: tuple(torch.randn(*size).to(kind) for size in (shape[:2], (shape[2], shape[1]), (shape[0], shape[2])))
        for shape in set(shapes)
    }
    outputs = {shape: tuple(torch.empty_like(each) for each in each_shape) for shape, each_shape in operands.items()}

    def step() -> tuple[float, float]:
        for shape in shapes:
            (x, weight, y), (grad_x, grad_weight, out) = operands[shape], outputs[shape]
            torch.mm(x, weight.t(), out=out)
            torch.mm(y, weight, out=grad_x)
            torch.mm(y.t(), x, out=grad_weight)
        return 0.0, 0.0

    return step


ARMS: dict[str, Callable[[str, TrainingBatch, str], Step]] = {
    "ours": our_arm,
    "trl": trl_arm,
    "transformers": transformers_arm,
    "sorted": functools.partial(transformers_arm, by_length=True),
    "bound": bound_arm,
}
PEERS = ("trl", "transformers")


@dataclass(frozen=True)
class Case:
    """One comparison."""

    model: str
    dtype: str
    lengths: str


def serve(arm: str, connection: Connection) -> None:
    """Process of one arm: prepares every `Case` it receives, and takes a step of the last one for every `None`.

    A step is answered with loss, gradient norm, CPU seconds.
    """
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    step: Step | None = None
    with contextlib.suppress(EOFError):  # the other end is closed
        while True:
            case = connection.recv()
            if case is not None:
                step = ARMS[arm](case.model, make_batch(case.model, LENGTHS[case.lengths]), case.dtype)
                connection.send("ready")
                continue
            assert step is not None
            began = time.process_time()
            loss, norm = step()
            connection.send((loss, norm, time.process_time() - began))


class Arms:
    """The processes of all arms, for cases of one dtype (accelerate fixes it once for a process)."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: dict[str, Any] = {}
        self._processes = []
        for arm in ARMS:
            self._connections[arm], far = context.Pipe()
            self._processes.append(context.Process(target=serve, args=(arm, far), daemon=True))
            self._processes[-1].start()
            far.close()  # a process that dies then raises EOFError here

    def _ask(self, arm: str, message: Case | None) -> Any:
        self._connections[arm].send(message)
        return self._connections[arm].recv()

    def measure(self, case: Case, num_repetitions: int) -> dict[str, list[float]]:
        """CPU seconds of every repetition by arm, after one uncounted step on which the arms must agree."""
        for arm in ARMS:
            self._ask(arm, case)
        first = {arm: self._ask(arm, None) for arm in ARMS}
        for peer in (*PEERS, "sorted"):
            for what, ours, theirs in zip(("loss", "gradient norm"), first["ours"], first[peer], strict=False):
                if abs(ours - theirs) > TOLERANCE[case.dtype] * max(abs(theirs), 0.1):
                    raise AssertionError(f"{case}: {what} is {ours:.6f} here and {theirs:.6f} in {peer}")
        rounds = [{arm: self._ask(arm, None)[2] for arm in ARMS} for _ in range(num_repetitions)]
        return {arm: [seconds[arm] for seconds in rounds] for arm in ARMS}

    def close(self) -> None:
        """End the processes."""
        for connection, process in zip(self._connections.values(), self._processes, strict=True):
            connection.close()
            process.join()


def compare(case: Case, seconds: dict[str, list[float]]) -> dict[str, Result]:
    """Our speed as a multiple of each other arm's."""
    goals = {peer: ASKED[case.lengths] for peer in PEERS}
    what = f"step, {case.model} {case.dtype}, {case.lengths}"
    names = {"sorted": "transformers, sorted", "bound": "bare products"}
    return {
        arm: Result.of(
            what,
            names.get(arm, arm),
            "x speed",
            [theirs / ours for theirs, ours in zip(seconds[arm], seconds["ours"], strict=True)],
            goal=goals.get(arm),
        )
        for arm in ARMS
        if arm != "ours"
    }


def summarize(case: Case, seconds: dict[str, list[float]], results: dict[str, Result]) -> dict[str, Any]:
    """Tokens per second of every arm, and our speed as a multiple of each other's, all medians."""
    num_tokens = sum(LENGTHS[case.lengths])
    ratios = {arm: result.ratio for arm, result in results.items()}
    rates = {arm: num_tokens / statistics.median(values) for arm, values in seconds.items()}
    met = all(results[peer].met for peer in PEERS)
    return {**asdict(case), "tokens": num_tokens, "tokens_per_second": rates, "speed_up": ratios, "met": met}


def print_row(row: dict[str, Any]) -> None:
    """One line of the table; `bound` is the share of the bare products' speed that the whole step reaches."""
    rates, ratios = row["tokens_per_second"], row["speed_up"]
    print(
        f"{row['model']:>5} {row['dtype']:>5} {row['lengths']:>7} {rates['ours']:8,.0f} {rates['trl']:8,.0f} "
        f"{rates['transformers']:8,.0f} {ratios['trl']:6.2f} {ratios['transformers']:8.2f} "
        f"{ASKED[row['lengths']]:6.1f} {ratios['sorted']:8.2f} {ratios['bound']:6.0%}  {'yes' if row['met'] else 'no'}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases, print the table, and write all numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="the smaller model and three repetitions")
    parser.add_argument("--models", nargs="+", choices=["1M", "5M"], default=["1M", "5M"])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path, default=FOLDER / "learner.json")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.models, arguments.repetitions = ["1M"], 3
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is missing; pip install -c constraints.txt -e '.[bench]'")
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    print(
        f"{'':19} {'ours t/s':>8} {'trl':>8} {'transf.':>8} {'x trl':>6} {'x transf':>8} "
        f"{'asked':>6} {'x sorted':>8} {'bound':>6}  met"
    )
    rows, runs = [], []
    results: list[Result] = []
    for dtype in arguments.dtypes:
        arms = Arms()
        for model in arguments.models:
            for lengths in arguments.lengths:
                case = Case(model, dtype, lengths)
                seconds = arms.measure(case, arguments.repetitions)
                compared = compare(case, seconds)
                results += compared.values()
                rows.append(summarize(case, seconds, compared))
                runs.append({**asdict(case), "cpu_seconds": seconds})
                print_row(rows[-1])
        arms.close()
    write_report(arguments.output, results, summary=rows, runs=runs)


if __name__ == "__main__":
    main()
