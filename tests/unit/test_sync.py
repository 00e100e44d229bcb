"""Weight sync: fingerprints, the canary, and every kind of fault that must not reach a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_calclip.batch import Prompt
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.rollout import fp8
from megatron_calclip.rollout.engine import WeightsReceipt
from megatron_calclip.rollout.fingerprint import fingerprint
from megatron_calclip.rollout.local import LocalEngine
from megatron_calclip.rollout.sync import MAX_CANARY_TOKENS, Canary, WeightSync

CONFIG = Qwen2Config(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,  # q, k and v have one shape, so that swapping them is possible
    max_position_embeddings=96,
    initializer_range=0.3,
)
PROMPTS = [
    Prompt(id=i, token_ids=ids, text="", answer="", metadata={})
    for i, ids in enumerate([(5, 6, 7, 8), (9,), tuple(range(1, 31)) * 3])
]


class FakeLearner:
    """A transformers model in the learner's place, in one process."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).eval()
        self.config = SimpleNamespace(rollout=SimpleNamespace(temperature=0.5))
        self.runtime = SimpleNamespace(gather_objects=lambda value: [value])

    def stream_hf(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(dtype)

    def prepare(self, trajectories: Any, *, num_minibatches: int) -> Any:
        return trajectories

    def gather_tokens(self, values: Tensor) -> Tensor:
        return values

    @torch.no_grad()
    def log_probs(self, batch: Any) -> Any:
        scores = []
        for tokens in batch.tokens.split(batch.lengths.tolist()):
            logits = self.model(tokens[None]).logits[0, :-1].float() / 0.5
            scores += [torch.zeros(1), logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]]
        return SimpleNamespace(log_probs=torch.cat(scores))

    @torch.no_grad()
    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


class FaultyEngine(LocalEngine):
    """The embedded engine with a fault in its next `num_faults` loads."""

    def __init__(self, fault: Callable[[FaultyEngine], None], *, precision: Any = "bf16") -> None:
        super().__init__(CONFIG, device="cpu", dtype=torch.bfloat16, precision=precision)
        self.fault, self.num_faults, self.num_loads = fault, 0, 0

    def load_weights(self, stream: Iterator[tuple[str, Tensor]], *, policy_version: int) -> WeightsReceipt:
        self.num_loads += 1
        before = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        receipt = super().load_weights(stream, policy_version=policy_version)
        if self.num_faults == 0:
            return receipt
        self.num_faults -= 1
        self.before = before
        self.fault(self)
        state = self._model.state_dict()
        return WeightsReceipt(self._policy_version, {name: fingerprint(state[name]) for name in receipt.fingerprints})


LAYER = "model.layers.1.self_attn."


@torch.no_grad()
def stale_tensor(engine: FaultyEngine) -> None:
    engine._model.state_dict()[LAYER + "o_proj.weight"].copy_(engine.before[LAYER + "o_proj.weight"])


@torch.no_grad()
def swapped_tensors(engine: FaultyEngine) -> None:
    state = engine._model.state_dict()
    q, k = (state[f"{LAYER}{name}_proj.weight"] for name in "qk")
    kept = q.clone()
    q.copy_(k)
    k.copy_(kept)


def stale_version(engine: FaultyEngine) -> None:
    engine._policy_version = 0


def stale_scales(engine: FaultyEngine) -> None:
    """FP8 scales of other weights: fingerprints cannot see them."""
    for layer in engine._model.modules():
        if isinstance(layer, fp8.Fp8Linear) and layer.codes is not None and layer.codes.scale is not None:
            layer.codes = fp8.Operand(layer.codes.values, layer.codes.scale * 1.5)


FAULTS = {
    "stale tensor": (stale_tensor, "bf16", r"its model\.layers\.1\.self_attn\.o_proj\.weight is not the one"),
    "swapped q and k": (swapped_tensors, "bf16", r"its model\.layers\.1\.self_attn\.q_proj\.weight is not the one"),
    "stale version": (stale_version, "bf16", r"it holds policy version 0 instead of 1"),
    "stale FP8 scales": (stale_scales, "fp8_per_channel", r"the canary's log-probabilities differ by .* nats"),
}


def make_sync(fault: Callable[[FaultyEngine], None], precision: Any) -> tuple[WeightSync, FakeLearner, FaultyEngine]:
    learner, engine = FakeLearner(0), FaultyEngine(fault, precision=precision)
    sync = WeightSync(learner, engine, dtype=torch.bfloat16, canary=Canary.of_prompts(PROMPTS))  # type: ignore[arg-type]
    sync(0)
    learner.train()
    return sync, learner, engine


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_passes_is_mended_by_a_second_transfer(name: str) -> None:
    fault, precision, _ = FAULTS[name]
    sync, _, engine = make_sync(fault, precision)
    engine.num_faults = 1
    assert sync(1)["canary/mean_abs_dlogp"] <= 3 * sync.first_distance + 0.02  # type: ignore[operator]
    assert engine.num_loads == 3 and engine.policy_version == 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_stops_the_run(name: str) -> None:
    fault, precision, pattern = FAULTS[name]
    sync, _, engine = make_sync(fault, precision)
    engine.num_faults = 2
    with pytest.raises(UserError, match=rf"^rollout\.engine: does not sample .* step 1: {pattern}") as error:
        sync(1)
    assert error.value.exit_code == EXIT_FAILED


@pytest.mark.parametrize("precision", ["bf16", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"])
def test_training_raises_no_alarm(precision: Any) -> None:
    sync, learner, engine = make_sync(stale_tensor, precision)
    for version in range(1, 4):
        metrics = sync(version)
        learner.train()
        if precision == "bf16":
            assert metrics["canary/mean_abs_dlogp"] < 0.03  # padding and batching round differently
    assert engine.num_loads == 4


def test_without_a_canary_fingerprints_still_speak() -> None:
    learner, engine = FakeLearner(0), FaultyEngine(stale_tensor)
    sync = WeightSync(learner, engine, dtype=torch.bfloat16, canary=None)  # type: ignore[arg-type]
    assert sync(0) == {}
    learner.train()
    engine.num_faults = 2
    with pytest.raises(UserError, match="o_proj"):
        sync(1)


def test_canary_of_prompts() -> None:
    canary = Canary.of_prompts(PROMPTS)
    assert canary is not None  # the second prompt has one token, which nothing predicts; the third is cut
    assert canary.trajectories.lengths.tolist() == [4, MAX_CANARY_TOKENS]
    assert canary.trajectories.num_response_tokens == 3 + MAX_CANARY_TOKENS - 1
    assert Canary.of_prompts([PROMPTS[1]]) is None


def test_fingerprints() -> None:
    x = torch.randn(3, 700_000, generator=torch.Generator().manual_seed(0))  # several chunks
    assert fingerprint(x) == fingerprint(x.clone()) == fingerprint(x.t().contiguous().t())
    swapped = x.clone()
    swapped[:, [0, 5]] = swapped[:, [5, 0]]
    one_bit = x.clone()
    one_bit.view(torch.int32)[2, -1] ^= 1
    moved = torch.cat([x[1:], x[:1]])
    others = [swapped, one_bit, moved, -x, x.bfloat16(), x[:2]]
    assert len({fingerprint(other) for other in [x, *others]}) == len(others) + 1
    # Each byte counts, also in a tensor that starts or ends between two words, and so does the length.
    assert fingerprint(x[1:].flatten()[1:]) == fingerprint(x[1:].flatten()[1:].clone()) != fingerprint(x[1:].flatten())
    lengths = [fingerprint(torch.zeros(length, dtype=torch.bfloat16)) for length in range(9)]
    assert len(set(lengths)) == 9
    # By hand: 1.0 is 0x3F80 in BF16, the first word of the first chunk; its length is 2 bytes.
    from megatron_calclip.counter_random import splitmix64

    first, second, length = (splitmix64(torch.tensor(n)) for n in (0, 1, 2))
    assert fingerprint(torch.ones(1, dtype=torch.bfloat16)) == int(0x3F80 * (first | 1) * (second | 1) + length)
