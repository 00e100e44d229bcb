"""The shadow pass on a chunk of three tiny layers: what it computes, and that nothing is left behind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_calclip.precision.shadow import lives_in_fp8, shadow_pass

WIDTH = 8
NUM_LAYERS = 3


class Linear(nn.Module):
    """A weight that lives in FP8: codes, and a live value that is lossy."""

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.master = torch.randn(WIDTH, WIDTH, generator=generator)
        self.weight = nn.Parameter(self.master.to(torch.float8_e4m3fn).bfloat16())
        self.weight.fp8_codes = self.weight.detach().clone()

    @property
    def fp8_active(self) -> bool:
        return bool(self.config.fp8_active)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.fp8_codes if self.fp8_active else self.weight).t()


class Layer(nn.Module):
    """A linear in FP8 and a norm in BF16; draws random numbers, as dropout would."""

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__()
        self.config = config
        self.linear = Linear(config, seed)
        self.norm = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return self.linear(x) * self.norm


class Chunk(nn.Module):
    """Two configs: that of the chunk and of its first layers, and a copy, as heterogeneous layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(fp8="hybrid", fp8_active=True, width=WIDTH)
        own = SimpleNamespace(fp8="e4m3", fp8_active=True)
        self.decoder = nn.Module()
        configs = [self.config, self.config, own]
        self.decoder.layers = nn.ModuleList(Layer(config, seed) for seed, config in enumerate(configs))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.decoder.layers:
            x = layer(x)
        return x


class Masters:
    """Remembers which parameters were asked for, in order."""

    def __init__(self, chunk: Chunk) -> None:
        self.values = {id(layer.linear.weight): layer.linear.master for layer in chunk.decoder.layers}
        self.order = list(self.values)
        self.asked: list[int] = []

    def __call__(self, parameter: nn.Parameter) -> Tensor:
        self.asked.append(id(parameter))
        return self.values[id(parameter)]


X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9)).bfloat16()


def expected(chunk: Chunk) -> Tensor:
    """The forward in BF16 on the rounded masters, written out."""
    x = X
    for layer in chunk.decoder.layers:
        x = (x @ layer.linear.master.bfloat16().t()) * layer.norm
    return x


def snapshot(chunk: Chunk) -> dict[str, Any]:
    """All that a pass could disturb: values, identities, gradients, modes, hooks, configs, the random state."""
    modules = dict(chunk.named_modules())
    return {
        "values": {name: (id(p), p.detach().clone(), p.grad) for name, p in chunk.named_parameters()},
        "codes": {n: (id(p.fp8_codes), p.fp8_codes.clone()) for n, p in chunk.named_parameters() if lives_in_fp8(p)},
        "training": {name: module.training for name, module in modules.items()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in modules.items()},
        "configs": {n: dict(vars(m.config)) for n, m in modules.items() if hasattr(m, "config")},
        "grad_mode": torch.is_grad_enabled(),
        "random": torch.get_rng_state(),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.fixture
def chunk() -> Chunk:
    """With gradients, and one module in evaluation mode."""
    chunk = Chunk()
    chunk(X).sum().backward()
    for parameter in chunk.parameters():
        parameter.grad = torch.ones_like(parameter)
    chunk.decoder.layers[1].eval()
    return chunk


STREAMED = pytest.mark.parametrize("streamed", [False, True])


@STREAMED
def test_computes_in_bf16_on_the_rounded_masters(chunk: Chunk, streamed: bool) -> None:
    masters = Masters(chunk)
    live = chunk(X)
    with shadow_pass([chunk], master=masters, streamed=streamed):
        shadow = chunk(X)
    assert torch.equal(shadow, expected(chunk)) and not torch.equal(shadow, live)
    assert not shadow.requires_grad
    assert torch.equal(chunk(X), live)
    assert masters.asked == masters.order  # a collective: once each, in one order on every rank


@STREAMED
def test_leaves_nothing_behind(chunk: Chunk, streamed: bool) -> None:
    before = snapshot(chunk)
    with shadow_pass([chunk], master=Masters(chunk), streamed=streamed):
        chunk(X)
        chunk(X)
    assert same(snapshot(chunk), before)


@STREAMED
def test_leaves_nothing_behind_after_an_exception(chunk: Chunk, streamed: bool) -> None:
    """Raised by the second layer's linear, when a streamed pass has set just that layer's weights aside."""

    def fail(*_: Any) -> None:
        raise RuntimeError("device lost")

    before = snapshot(chunk)
    handle = chunk.decoder.layers[1].linear.register_forward_pre_hook(fail)
    with (
        pytest.raises(RuntimeError, match="device lost"),
        shadow_pass([chunk], master=Masters(chunk), streamed=streamed),
    ):
        chunk(X)
    handle.remove()
    assert same(snapshot(chunk), before)


@STREAMED
def test_leaves_nothing_behind_when_masters_cannot_be_had(chunk: Chunk, streamed: bool) -> None:
    before = snapshot(chunk)
    masters = Masters(chunk)
    masters.values.popitem()
    with pytest.raises(KeyError), shadow_pass([chunk], master=masters, streamed=streamed):
        chunk(X)
    assert same(snapshot(chunk), before)


@STREAMED
def test_damaged_live_weights_play_no_part(chunk: Chunk, streamed: bool) -> None:
    with torch.no_grad():
        for layer in chunk.decoder.layers:
            layer.linear.weight.fill_(float("nan"))
            layer.linear.weight.fp8_codes.fill_(float("nan"))
    with shadow_pass([chunk], master=Masters(chunk), streamed=streamed):
        shadow = chunk(X)
    assert torch.equal(shadow, expected(chunk))
    assert all(layer.linear.weight.isnan().all() for layer in chunk.decoder.layers)


def test_streaming_replaces_one_layer_at_a_time(chunk: Chunk) -> None:
    layers = chunk.decoder.layers
    live = [layer.linear.weight for layer in layers]
    seen: list[list[bool]] = []

    def look(*_: Any) -> None:
        seen.append([layer.linear.weight is not own for layer, own in zip(layers, live, strict=True)])

    handles = [layer.linear.register_forward_pre_hook(look) for layer in layers]
    with shadow_pass([chunk], master=Masters(chunk), streamed=True):
        look()
        chunk(X)
        look()
    with shadow_pass([chunk], master=Masters(chunk)):
        look()
    for handle in handles:
        handle.remove()
    none, every = [False] * NUM_LAYERS, [True] * NUM_LAYERS
    one = [[place == layer for place in range(NUM_LAYERS)] for layer in range(NUM_LAYERS)]
    assert seen == [none, *one, none, every]


@STREAMED
def test_bf16_weights_stay_where_they_are(chunk: Chunk, streamed: bool) -> None:
    """Without FP8 parameters live weights are the rounded masters already: no master is asked for."""
    masters = Masters(chunk)
    for layer in chunk.decoder.layers:
        del layer.linear.weight.fp8_codes
        layer.linear.weight.data.copy_(layer.linear.master)
    with shadow_pass([chunk], master=masters, streamed=streamed):
        assert torch.equal(chunk(X), expected(chunk))
    assert masters.asked == []


def test_fp8_that_stays_on_is_noticed(chunk: Chunk) -> None:
    """A layer that decides by itself, not by its config: what an outer autocast would miss."""
    linear = chunk.decoder.layers[2].linear
    linear.config = SimpleNamespace(**vars(linear.config))
    with pytest.raises(AssertionError, match="FP8 is on"), shadow_pass([chunk], master=Masters(chunk)):
        linear.config.fp8_active = True
        chunk(X)
    with shadow_pass([chunk], master=Masters(chunk)):
        chunk(X)  # a config of its own is no trouble


def test_several_chunks(chunk: Chunk) -> None:
    """Virtual pipeline stages: all of them are switched, whichever runs."""
    other = Chunk()
    masters, others = Masters(chunk), Masters(other)
    masters.values |= others.values
    before = snapshot(chunk), snapshot(other)
    with shadow_pass([chunk, other], master=masters):
        assert torch.equal(other(X), expected(other))
        assert torch.equal(chunk(X), expected(chunk))
    assert masters.asked == masters.order + others.order
    after = snapshot(chunk), snapshot(other)
    assert same(after, before)


def test_a_weight_that_two_modules_share(chunk: Chunk) -> None:
    first, last = (chunk.decoder.layers[index].linear for index in (0, 2))
    last.weight, last.master = first.weight, first.master
    with shadow_pass([chunk], master=Masters(chunk)):
        assert torch.equal(chunk(X), expected(chunk))
    assert last.weight is first.weight


def test_what_lives_in_fp8(chunk: Chunk) -> None:
    linear = chunk.decoder.layers[0].linear
    assert lives_in_fp8(linear.weight) and not lives_in_fp8(chunk.decoder.layers[0].norm)
    chunk.float()
    assert lives_in_fp8(linear.weight)  # moving a model keeps its parameters' attributes
    theirs = nn.Parameter(torch.zeros(1))
    theirs._quantizer = object()  # as TransformerEngine's tensors have
    assert lives_in_fp8(theirs)
