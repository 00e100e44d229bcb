"""Which amaxes tensor parallelism reduces, and that two shards then have the codes of the whole."""

from collections.abc import Callable

import pytest
import torch
from fp8_gemms import make_gemms, make_problem, run
from torch import Tensor

from megatron_calclip.config import PrecisionConfig
from megatron_calclip.precision.linear import Fp8Gemms, Operand
from megatron_calclip.precision.recipes import resolve


class Reducer:
    """Stands in for the group: remembers what was reduced."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, amax: Tensor) -> Tensor:
        self.shapes.append(tuple(amax.shape))
        return amax


# Recipe, linear -> shapes of the amaxes that `global` reduces, in the order weight, input, gradient.
M, K, N = 16, 32, 48
REDUCED = {
    ("tensorwise", "column"): [(1, 1), (1, 1)],  # weight, gradient
    ("tensorwise", "row"): [(1, 1), (1, 1)],  # weight, input
    ("rowwise", "column"): [(1, K), (M, 1)],  # weight along N, gradient along N
    ("rowwise", "row"): [(N, 1), (M, 1)],  # weight along K, input along K
    ("blockwise", "column"): [],
    ("blockwise", "row"): [],
    ("mxfp8", "column"): [],
    ("mxfp8", "row"): [],
}


@pytest.mark.parametrize("amax_group", ["te", "global"])
@pytest.mark.parametrize(("recipe", "kind"), REDUCED)
def test_which_amaxes_are_reduced(recipe: str, kind: str, amax_group: str) -> None:
    """Only scales whose tile is cut over ranks, and only if asked for."""
    reducer = Reducer()
    resolved = resolve(PrecisionConfig(recipe=recipe, amax_group=amax_group))
    assert resolved is not None
    gemms = Fp8Gemms(
        resolved,
        backend="emulated",
        input_sharded=kind == "row",
        output_sharded=kind == "column",
        reduce_amax=reducer,
    )
    run(gemms, make_problem(M, K, N, torch.bfloat16))
    assert reducer.shapes == (REDUCED[recipe, kind] if amax_group == "global" else [])


@pytest.mark.parametrize(("recipe", "power_of_two"), [("tensorwise", None), ("rowwise", None), ("rowwise", False)])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_two_shards_are_the_whole(recipe: str, power_of_two: bool | None, kind: str) -> None:
    """`global` on two simulated ranks, lock-step: their codes are slices of the whole matrix's codes."""
    problem = make_problem(M, K, N, torch.float32)
    whole = make_gemms(recipe, power_of_two, format="e4m3")
    x, w, dy = problem
    halves: dict[str, list[Tensor]] = {"x": [x, x], "w": list(w.chunk(2, 0)), "dy": list(dy.chunk(2, 1))}
    if kind == "row":
        halves = {"x": list(x.chunk(2, 1)), "w": list(w.chunk(2, 1)), "dy": [dy, dy]}
    log: list[list[Tensor]] = [[], []]

    def shard(rank: int, reduce_amax: Callable[[Tensor], Tensor]) -> dict[str, tuple[Operand, Operand]]:
        resolved = resolve(
            PrecisionConfig(
                recipe=recipe,
                power_of_two_scales=power_of_two,
                format="e4m3",
                amax_group="global",
            )
        )
        assert resolved is not None
        gemms = Fp8Gemms(
            resolved,
            backend="emulated",
            input_sharded=kind == "row",
            output_sharded=kind == "column",
            reduce_amax=reduce_amax,
        )
        codes = gemms.quantize_weight(halves["w"][rank])
        return {
            "w": (codes.forward, codes.backward),
            "x": gemms.quantize_input(halves["x"][rank]),
            "dy": gemms.quantize_gradient(halves["dy"][rank]),
        }

    for rank in range(2):  # first to learn each rank's amaxes, then with their maxima
        shard(rank, lambda amax, rank=rank: log[rank].append(amax) or amax)
    maxima = [torch.maximum(*pair) for pair in zip(*log, strict=True)]
    parts = []
    for _rank in range(2):
        waiting = iter(maxima)
        parts.append(shard(_rank, lambda _, waiting=waiting: next(waiting)))

    codes = whole.quantize_weight(w)
    expected = {
        "w": (codes.forward, codes.backward),
        "x": whole.quantize_input(x),
        "dy": whole.quantize_gradient(dy),
    }
    cut = {"column": {"w": 0, "dy": 1}, "row": {"x": 1, "w": 1}}[kind]
    for name, (along_last, along_first) in expected.items():
        for full, dim, index in ((along_last, 0, 0), (along_first, 1, 1)):  # the second is turned
            values = dequantised(full)
            for rank in range(2):
                own = dequantised(parts[rank][name][index])
                if name in cut:
                    axis = cut[name] if dim == 0 else 1 - cut[name]
                    assert torch.equal(own, values.chunk(2, axis)[rank]), (name, index)
                else:
                    assert torch.equal(own, values), (name, index)


def dequantised(operand: Operand) -> Tensor:
    values = operand.values.float()
    return values if operand.scale is None else values * operand.scale
