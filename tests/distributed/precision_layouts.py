"""FP8 training on every layout is that of one process: losses, and the codes that the first layer multiplies.

Part of `check_precision.py`. The trainings of one process run before the ranks join, each rank in a world of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fp8_learners import RECIPES, Training, check, precision_config, started
from precision_histories import compare_with_one_process, histories
from precision_shards import linears_in_shards, vocabulary_in_shards
from torch import Tensor

from megatron_calclip.precision.linear import Operand
from megatron_calclip.weights.mapping import find_tensor

NUM_STEPS = 5
# Largest differences to one process, by the dtype of parameters: of the first loss, and of all.
FIRST_LOSS = {"fp32": 1e-5, "bf16": 1e-3}
LOSS = 2e-3
OTHER_AMAXES = 5e-3  # where they are those of a shard, or delayed by another number of micro-batches


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


def train(recipe: str, layout: str, *, capture: bool, in_shards: bool = False, **settings: Any) -> dict[str, Any]:
    """A training on the ranks that there are; its losses, and what the first layer multiplied.

    Args:
        recipe: see `RECIPES`.
        layout: see `LAYOUTS`.
        capture: whether to keep what the first layer multiplied.
        in_shards: adds in the order of two tensor-parallel ranks; see `precision_shards`.
        settings: see `precision_config`.
    """
    config = precision_config(recipe, layout, **settings)
    with started(config) as runtime, contextlib.ExitStack() as order_of_sums:
        training = Training.begin(config, runtime, warm_up=False)
        if in_shards:
            linears_in_shards(training)
            order_of_sums.enter_context(vocabulary_in_shards(training))
        training.learner.warm_up(training.batch)
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
    """Every value and every scale, exactly; of the ranks at least one has the first layer."""
    dist.all_reduce(compared := torch.tensor(len(actual)))
    different = {key: float((values != expected[key]).float().mean()) for key, values in actual.items()}
    problems = [(key, share) for key, share in different.items() if share > 0]
    check(f"{name}: codes and scales of the first layer", compared > 0 and not problems, problems[:3])


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


@dataclass(frozen=True, order=True)
class Reference:
    """A training of one process."""

    recipe: str
    settings: tuple[tuple[str, Any], ...]
    """Those that make a difference where nothing is sharded."""
    in_shards: bool = False
    """Whether it adds in the order of two tensor-parallel ranks."""

    @classmethod
    def of(cls, recipe: str, settings: dict[str, Any], *, in_shards: bool = False) -> Reference:
        """The training of one process with these settings."""
        return cls(recipe, tuple(item for item in settings.items() if item[0] != "amax_group"), in_shards)

    @property
    def captures(self) -> bool:
        """Only FP32 sums have an order that all layouts can share: a BF16 partial sum is rounded."""
        return ("dtype", "fp32") in self.settings

    def train(self, layout: str, **settings: Any) -> dict[str, Any]:
        """See `train`."""
        return train(self.recipe, layout, **dict(self.settings) | settings)


def reference_of_operands(recipe: str, layout: str, settings: dict[str, Any]) -> Reference | None:
    """The training of one process that multiplies the same, bit for bit; None where amaxes, or sums, are other ones."""
    own = Reference.of(recipe, settings, in_shards="TP2" in layout)
    return own if own.captures and not has_other_amaxes(recipe, layout, settings) else None


def has_other_amaxes(recipe: str, layout: str, settings: dict[str, Any]) -> bool:
    """Whether amaxes are those of a shard, or delayed by another number of micro-batches."""
    return settings.get("amax_group") == "te" or (recipe == "tensorwise_delayed" and layout == "DP2")


def references(cases: list[tuple[str, str, dict[str, Any]]]) -> dict[Reference | None, dict[str, Any]]:
    """The trainings of one process, shared out over the ranks; before they join."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    of_losses = {Reference.of(recipe, settings) for recipe, _, settings in cases}
    of_operands = {reference_of_operands(*case) for case in cases}
    wanted = sorted(of_losses | {reference for reference in of_operands if reference is not None})
    own = {r: r.train("TP1", capture=r.captures, in_shards=r.in_shards) for r in wanted[rank::2]}
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, own)
    return gathered[0] | gathered[1]


def check_layouts(cases: list[tuple[str, str, dict[str, Any]]], expected: dict[Any, dict[str, Any]]) -> None:
    """FP8 training on every layout is that of one process."""
    for recipe, layout, settings in cases:
        same_operands = reference_of_operands(recipe, layout, settings)
        one = expected[reference := Reference.of(recipe, settings)]
        actual = reference.train(layout, capture=same_operands is not None, **settings)
        name = " ".join([recipe, layout, *(f"{key}={value}" for key, value in settings.items())])
        first, later = FIRST_LOSS[settings.get("dtype", "bf16")], LOSS
        if has_other_amaxes(recipe, layout, settings):
            first = later = OTHER_AMAXES
        compare_losses(name, actual["losses"], one["losses"], first=first, later=later)
        if same_operands is not None:
            compare_operands(name, actual["operands"], expected[same_operands]["operands"])
        if settings.get("amax_group") == "te":
            moved = max(abs(a - b) for a, b in zip(actual["losses"], one["losses"], strict=True))
            check(f"{name}: shards have their own amaxes", moved > 1e-5, moved)
        if recipe == "tensorwise_delayed" and reference.captures:
            over_dp = layout == "DP2"
            compare_with_one_process(name, actual["histories"], one["histories"], over_dp=over_dp)
