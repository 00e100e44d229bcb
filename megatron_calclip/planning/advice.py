"""What to change when a run does not fit: single settings, cheapest first, until it does.

Every change is planned like the run itself, so that what is advised fits by the same arithmetic, and is a valid
configuration. Left out on purpose: changes of what is learned (lengths, batch sizes, the model).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_calclip.config import Config, ShapeConfig
from megatron_calclip.config_check import check, check_shape
from megatron_calclip.errors import UserError
from megatron_calclip.planning.devices import GIB
from megatron_calclip.planning.flops import Workload
from megatron_calclip.planning.plan import Plan, make_plan
from megatron_calclip.weights.mapping import ModelShape

Setting = tuple[str, Any]


def _changed(part: Any, name: str, value: Any) -> Any:
    """A configuration, or a part of it, with one setting replaced by its dotted name."""
    first, _, rest = name.partition(".")
    return replace(part, **{first: _changed(getattr(part, first), rest, value) if rest else value})


def candidates(config: Config) -> Iterator[Setting]:
    """Settings that save memory, roughly in the order of what they cost."""
    p, t, longest = config.parallel, config.train, config.model.max_sequence_length
    if p.tp > 1 and not p.sequence_parallel:
        yield "parallel.sequence_parallel", True
    if config.precision.fp8_param and not config.precision.shadow_streamed:
        yield "precision.shadow_streamed", True
    if t.tokens_per_microbatch > longest:
        yield "train.tokens_per_microbatch", longest
    if p.recompute == "none":
        yield "parallel.recompute", "selective"
    if not t.fused_head:
        yield "train.fused_head", True
    if p.recompute != "full":
        yield "parallel.recompute", "full"
    if config.rollout.engine == "local":
        yield "rollout.max_batch_size", max(config.rollout.max_batch_size // 4, 1)
    elif config.rollout.vllm.launch and not config.rollout.vllm.colocated:
        yield "rollout.vllm.colocated", True
    tp = p.tp
    while 2 * tp <= config.cluster.gpus_per_node:
        tp *= 2
        yield "parallel.tp", tp
    for pp in (2, 4, 8):
        yield "parallel.pp", p.pp * pp
    for nodes in (2, 4, 8):
        yield "cluster.num_nodes", config.cluster.num_nodes * nodes


def _planned(config: Config, settings: Mapping[str, Any], shape: ModelShape, workload: Workload) -> Plan | None:
    """The plan with some settings replaced; None where they do not pass the checks of a launch."""
    for name, value in settings.items():
        config = _changed(config, name, value)
    sizes = ShapeConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    try:
        check(config, world_size=config.cluster.num_nodes * config.cluster.gpus_per_node)
        check_shape(sizes, config)
    except UserError:
        return None
    return make_plan(config, shape, workload)


def advise(config: Config, shape: ModelShape, workload: Workload, plan: Plan) -> list[str]:
    """What to change, one line a setting, and where that leads; empty for a plan that fits.

    Args:
        config: the run.
        shape: its model.
        workload: assumed lengths.
        plan: of that configuration.
    """
    if plan.fits:
        return []
    taken: dict[str, Any] = {}
    best = plan
    for name, value in candidates(config):
        planned = _planned(config, taken | {name: value}, shape, workload)
        if planned is not None and _shortfall(planned) < _shortfall(best):
            taken[name], best = value, planned
        if best.fits:
            break
    for name in list(taken)[:-1] if best.fits else ():  # a later change may have made an earlier one needless
        fewer = {other: value for other, value in taken.items() if other != name}
        planned = _planned(config, fewer, shape, workload)
        if planned is not None and planned.fits:
            taken, best = fewer, planned
    lines = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in taken.items()]
    peak = f"{best.fattest.peak / GIB:.1f} of {best.usable / GIB:.1f} GiB"
    return [*lines, f"then it fits: {peak}" if best.fits else f"not enough: still {peak}; use more or larger GPUs"]


def _shortfall(plan: Plan) -> float:
    """Bytes that are missing: on the fattest rank, and for a sampler's first sequence."""
    servers = plan.servers
    cache = servers.cache_bytes_per_token * plan.max_sequence_length - servers.cache_bytes
    return max(plan.fattest.peak - plan.usable, 0.0) + max(cache, 0.0)
