"""A plan as tables for people, as plain values for programs, and as two lines for `--dry-run`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from megatron_calclip.config import Config
from megatron_calclip.planning.advice import advise
from megatron_calclip.planning.devices import GIB
from megatron_calclip.planning.model import PlannedModel, find_folder, planned_model
from megatron_calclip.planning.plan import Plan, make_plan

# Terms of `RankMemory` as the table names them, in its order.
TERMS = {
    "weights": "weights",
    "gradients": "gradients, FP32",
    "optimizer": "optimizer (masters, moments)",
    "fp8_weights": "FP8 copies of weights",
    "activations": "activations kept for backward",
    "head": "logits and their buffers",
    "head_backward": "backward pass of the output layer",
    "layer_backward": "backward pass of one layer",
    "layer_forward": "forward pass of one layer",
    "shadow": "BF16 weights of the shadow pass",
    "weight_sync": "weights on their way to the sampler",
    "sampler": "sampler on the same device",
    "kv_cache": "sampler's cache, while it samples",
}


def layout(config: Config, plan: Plan) -> str:
    """The learner's layout in words."""
    p = config.parallel
    parts = [f"{name} {size}" for name, size in (("tp", p.tp), ("pp", p.pp), ("cp", p.cp), ("dp", plan.dp)) if size > 1]
    vpp = f", {p.vpp} chunks a rank" if p.vpp else ""
    return f"{plan.num_ranks} ranks = {' x '.join(parts) or 'dp 1'}{vpp}"


def verdict(plan: Plan) -> str:
    """Whether it fits, in a line."""
    peak, usable, rank = plan.fattest.peak / GIB, plan.usable / GIB, plan.fattest
    where = f"{peak:.1f} of {usable:.1f} usable GiB on {plan.device.name} (stage {rank.stage}, {rank.peak_phase})"
    if rank.peak > plan.usable:
        return f"does NOT fit: {where}"
    if plan.concurrent_sequences < 1:
        return "does NOT fit: a sampler has no room for the cache of one sequence of full length"
    return f"fits: {where}"


def _unit(largest: float, units: dict[str, float]) -> tuple[str, float]:
    """The largest unit that a number reaches."""
    return next(((name, size) for name, size in units.items() if largest >= size), list(units.items())[-1])


def _memory_table(plan: Plan) -> Table:
    unit, size = _unit(plan.fattest.peak, {"GiB": GIB, "MiB": 2.0**20})

    def amount(value: float) -> str:
        return f"{value / size:.2f}" if value else "-"

    table = Table(title=f"{unit} on each rank of a pipeline stage", title_justify="left")
    table.add_column("")
    for rank in plan.ranks:
        table.add_column(f"stage {rank.stage}", justify="right")
    table.add_row("parameters", *(f"{rank.num_parameters:,}" for rank in plan.ranks))
    for term, title in TERMS.items():
        values = [rank.terms()[term] for rank in plan.ranks]
        if any(values):
            table.add_row(title, *(amount(value) for value in values))
    table.add_section()
    for phase in plan.ranks[0].phases:
        table.add_row(f"peak: {phase}", *(amount(rank.phases[phase]) for rank in plan.ranks))
    return table


def _step_table(plan: Plan) -> Table:
    whole_flops = sum(plan.flops.values())
    unit, size = _unit(whole_flops, {"PFLOP": 1e15, "TFLOP": 1e12, "GFLOP": 1e9})
    table = Table(title="One step", title_justify="left")
    for name in ("", unit, "seconds", "share"):
        table.add_column(name, justify="right" if name else "left")
    seconds, total = plan.seconds or {}, plan.step_seconds
    for stage in {**plan.flops, **seconds}:
        time = seconds.get(stage)
        table.add_row(
            "shadow, spread over the interval" if stage == "shadow" else stage,
            f"{plan.flops[stage] / size:,.1f}" if stage in plan.flops else "-",
            "-" if time is None else f"{time:,.1f}",
            "-" if time is None or not total else f"{time / total:.1%}",
        )
    table.add_section()
    whole = "whole step, rollouts beside training" if plan.overlaps else "whole step"
    table.add_row(whole, f"{whole_flops / size:,.1f}", "-" if total is None else f"{total:,.1f}", "")
    return table


def _samplers(plan: Plan) -> str:
    s = plan.servers
    return (
        f"samplers: {s.count} x {s.gpus_each} device(s), {s.weight_bytes / GIB:.1f} GiB of weights on each; "
        f"{plan.concurrent_sequences:,} sequences of {plan.max_sequence_length:,} tokens at once in each"
    )


def print_plan(console: Console, config: Config, model: PlannedModel, plan: Plan, advice: list[str]) -> None:
    """Print all of it."""
    console.print(f"{model.describe(config)}, {plan.num_parameters:,} parameters; {layout(config, plan)}", style="bold")
    console.print(Group(_memory_table(plan), "", _step_table(plan), ""))
    console.print(
        f"largest micro-batch {plan.micro_tokens:,} tokens a rank; {plan.num_microbatches} micro-batch(es) of a "
        "mini-batch on a rank"
    )
    console.print(_samplers(plan))
    if plan.host_bytes:
        console.print(f"host memory of rank 0's machine for copies of weights: {plan.host_bytes / GIB:.1f} GiB")
    if plan.calibration_share is not None:
        console.print(f"calibration: {plan.calibration_share:.2%} of the seconds")
    for line in plan.assumptions:
        console.print(f"assumed: {line}", style="dim")
    console.print(verdict(plan), style="bold" if plan.fits else "bold red")
    for line in advice:
        console.print(f"change: {line}" if "=" in line else line)


def as_dict(config: Config, model: PlannedModel, plan: Plan, advice: list[str]) -> dict[str, Any]:
    """The plan as plain values, bytes and FLOPs unrounded."""
    values = asdict(plan)
    for rank, values_of_rank in zip(plan.ranks, values["ranks"], strict=True):
        values_of_rank |= {"phases": rank.phases, "peak": rank.peak}
    return {
        "model": model.describe(config),
        "layout": layout(config, plan),
        "fits": plan.fits,
        "verdict": verdict(plan),
        "advice": advice,
        "usable_bytes": plan.usable,
        "fattest_stage": plan.fattest.stage,
        "concurrent_sequences": plan.concurrent_sequences,
        "step_seconds": plan.step_seconds,
        "calibration_share": plan.calibration_share,
        **values,
    }


def dry_run_lines(config: Config) -> list[str]:
    """What `--dry-run` says of a configuration with a pretrained model: layout, memory, and what to change.

    Raises:
        UserError: for a model whose configuration cannot be used or does not fit the layout.
    """
    assert config.model.hf is not None
    if find_folder(config.model.hf) is None:
        return [f"model.hf: {config.model.hf!r} is not here, so that neither its layout nor its memory is checked"]
    model = planned_model(config)
    plan = make_plan(config, model.shape)
    advice = advise(config, model.shape, plan.workload, plan)
    return [f"{model.describe(config)}; {layout(config, plan)}", f"memory: {verdict(plan)}", *advice]
