"""FP8 training on every layout is that of one process: losses, and the codes that the first layer multiplies.

Part of `check_precision.py`. The trainings of one process run before the ranks join, each rank in a world of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fp8_learners import RECIPES, Training, check, precision_config, started
from precision_histories import compare_with_one_process, histories
from torch import Tensor

from megatron_calclip.precision.linear import Operand
from megatron_calclip.weights.mapping import find_tensor

NUM_STEPS = 5
# Largest differences to one process, by the dtype of parameters: of the first loss, and of all.
FIRST_LOSS = {"fp32": 1e-5, "bf16": 1e-3}
LOSS = 2e-3
OTHER_AMAXES = 5e-3  # where they are those of a shard, or delayed by another number of micro-batches
# Share of dequantised values that may differ where FP32 sums differ in their last bit, because a number lay at the border of
# two codes: of inputs such numbers themselves, of gradients whatever tokens they have reached through the layers behind.
MOVED = {"weight": 0.0, "input": 2e-3, "gradient": 0.1}


class FirstLayer:
    """Operands of the first decoder layer's linears in the first pass forward and backward, per micro-batch."""

    def __init__(self, training: Training) -> None:
        self.operands: dict[tuple[str, str], list[tuple[Operand, Operand]]] = {}
        self.names: dict[str, Any] = {}
        for chunk in training.bare:
            for name, module in chunk.named_modules():
                first = chunk.decoder.layers[0].layer_number == 1
                if first and name.startswith("decoder.layers.0.") and getattr(module, "fp8", None) is not None:
                    self.names[name] = module
                    for operand in ("weight", "input", "gradient"):
                        self._watch(name, module.fp8, operand)

    def _watch(self, name: str, gemms: Any, operand: str) -> None:
        original = getattr(gemms, f"quantize_{operand}")
        seen = self.operands.setdefault((name, operand), [])

        def quantize(*args: Any, **keywords: Any) -> Any:
            result = original(*args, **keywords)
            seen.append((result.forward, result.backward) if operand == "weight" else result)
            return result

        setattr(gemms, f"quantize_{operand}", quantize)

    def whole(self, training: Training, keys: list[Any]) -> dict[Any, Tensor]:
        """Dequantised operands, whole over tensor parallelism, and the scales that are one for all.

        Args:
            training: for its shape and groups.
            keys: a name for each micro-batch of this rank.
        """
        group = training.learner.groups.tp
        result: dict[Any, Tensor] = {}
        for (name, operand), pairs in self.operands.items():
            weight = find_tensor(training.learner.shape, f"{name}.weight")
            column = name.endswith(("linear_qkv", "linear_fc1"))
            for key, pair in zip(["all"] if operand == "weight" else keys, pairs, strict=False):
                for side, item in enumerate(pair):
                    values = item.values.float() if item.scale is None else item.values.float() * item.scale
                    values = values.t() if side else values
                    if group is not None:
                        shards = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(2)]
                        dist.all_gather(shards, values.contiguous(), group=group)
                        if operand == "weight":
                            values = weight.unshard(shards)
                        elif operand == "input":
                            values = values if column else torch.cat(shards, -1)
                        else:
                            values = weight.unshard([s.t() for s in shards]).t() if column else values
                    result[name, operand, side, key] = values.contiguous()
                    if item.scale is not None and item.scale.numel() == 1:
                        result[name, operand, "scale", key] = item.scale.clone()
        return result


def train(recipe: str, layout: str, *, capture: bool, **settings: Any) -> dict[str, Any]:
    """A training on the ranks that there are; its losses, and what the first layer multiplied."""
    config = precision_config(recipe, layout, **settings)
    with started(config) as runtime:
        training = Training.begin(config, runtime)
        after_warm_up = histories(training)
        first = FirstLayer(training) if capture else None
        training.update()
        operands: dict[Any, Tensor] = {}
        if first is not None:
            keys = training.batch.plan.minibatches[0][runtime.dp_rank]
            operands = first.whole(training, list(keys))
        training.update(NUM_STEPS - 1)
        return {"losses": training.losses, "operands": operands, "histories": after_warm_up}


def compare_losses(name: str, actual: list[float], expected: list[float], *, first: float, later: float) -> None:
    """Within tolerances, of the first loss and of all; and the training gets somewhere."""
    differences = [abs(a - b) for a, b in zip(actual, expected, strict=True)]
    check(f"{name}: losses", differences[0] <= first and max(differences) <= later, differences)
    check(f"{name}: learns", actual[0] - actual[-1] > 0.1, actual)


def compare_operands(name: str, actual: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    """Bit for bit where no sum over ranks came before, else all but borderline codes."""
    problems = []
    for key, values in actual.items():
        linear, operand, side, _ = key
        other = expected[key]
        exact = operand == "weight" or (operand == "input" and linear.endswith("linear_qkv"))
        differ = 1 - torch.isclose(values, other, rtol=0 if exact else 1e-5, atol=0).float().mean()
        if differ > (0 if exact or side == "scale" else MOVED[operand]):
            problems.append((key, float(differ)))
    check(f"{name}: codes of the first layer", not problems, problems[:3])


def layout_cases(every: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(recipe, layout, settings); by default each recipe on some layouts and each layout with some recipes."""
    layouts = ("TP2", "TP2 SP", "PP2", "DP2")
    few = {
        "tensorwise_delayed": ("TP2 SP", "DP2"),
        "tensorwise": ("TP2",),
        "rowwise": ("TP2 SP",),
        "blockwise": ("PP2",),
        "mxfp8": ("DP2",),
    }
    few_bf16 = {
        "tensorwise": "TP2",
        "rowwise": "PP2",
        "blockwise": "DP2",
        "mxfp8": "TP2 SP",
        "tensorwise_delayed": "TP2",
    }
    for recipe in RECIPES:
        for layout in layouts:
            if every or layout in few[recipe]:
                yield recipe, layout, {"dtype": "fp32"} | fp32_scales(recipe)
            if every or layout == few_bf16[recipe]:
                yield recipe, layout, {"fp8_param": True}
                if every or recipe == "tensorwise":
                    yield recipe, layout, {"fp8_param": False}
    for recipe in ("tensorwise", "rowwise"):
        yield recipe, "TP2", {"dtype": "fp32", "amax_group": "te"} | fp32_scales(recipe)


def fp32_scales(recipe: str) -> dict[str, Any]:
    """Powers of two shift exponents only: no loss, and hardly a code, would tell a scale from its double."""
    return {"power_of_two_scales": False} if recipe in ("rowwise", "blockwise") else {}


def of_one_process(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that make a difference where nothing is sharded."""
    return {key: value for key, value in settings.items() if key != "amax_group"}


def references(cases: list[tuple[str, str, dict[str, Any]]]) -> dict[Any, dict[str, Any]]:
    """The trainings of one process, shared out over the ranks; before they join."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wanted = {(recipe, *of_one_process(settings).items()) for recipe, _, settings in cases}
    mine = [key for index, key in enumerate(sorted(wanted)) if index % 2 == rank]
    own = {key: train(key[0], "TP1", capture=("dtype", "fp32") in key, **dict(key[1:])) for key in mine}
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, own)
    return gathered[0] | gathered[1]


def check_layouts(cases: list[tuple[str, str, dict[str, Any]]], expected: dict[Any, dict[str, Any]]) -> None:
    """FP8 training on every layout is that of one process."""
    for recipe, layout, settings in cases:
        dtype = settings.get("dtype", "bf16")
        delayed_over_dp = recipe == "tensorwise_delayed" and layout == "DP2"
        other_amaxes = delayed_over_dp or settings.get("amax_group") == "te"
        one = expected[recipe, *of_one_process(settings).items()]
        actual = train(recipe, layout, capture=dtype == "fp32" and not other_amaxes, **settings)
        name = " ".join([recipe, layout, *(f"{key}={value}" for key, value in settings.items())])
        first, later = (OTHER_AMAXES, OTHER_AMAXES) if other_amaxes else (FIRST_LOSS[dtype], LOSS)
        compare_losses(name, actual["losses"], one["losses"], first=first, later=later)
        compare_operands(name, actual["operands"], one["operands"])
        if settings.get("amax_group") == "te":
            moved = max(abs(a - b) for a, b in zip(actual["losses"], one["losses"], strict=True))
            check(f"{name}: shards have their own amaxes", moved > 1e-5, moved)
        if recipe == "tensorwise_delayed" and dtype == "fp32":
            compare_with_one_process(name, actual["histories"], one["histories"], over_dp=delayed_over_dp)
