"""FP8 training and the BF16 shadow pass on two ranks.

    torchrun --nproc-per-node 2 tests/distributed/check_precision.py [--all]

Each check prints a line; the exit code is not 0 when one fails. One launch does them all, because starting processes costs
more than the checks. By default each recipe meets some layouts, with `--all` every one.

What is compared with one process: the same training before the ranks join (in a world of one each), so that no check
compares the learner with itself on the same layout. What the shadow pass is compared with: a learner without FP8 on the
rounded masters, put together here from the slices that Megatron hangs on each parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fp8_learners import (
    Training,
    precision_config,
    started,
)
from torch import Tensor

from megatron_calclip.precision.linear import Operand
from megatron_calclip.weights.mapping import find_tensor

NUM_STEPS = 5
# Largest differences to one process, by the dtype of parameters: of the first loss, and of all.
FIRST_LOSS = {"fp32": 1e-5, "bf16": 1e-3}
LOSS, LOSS_OF_SHARDED_AMAXES = 2e-3, 5e-3
# Share of FP8 codes that may differ where FP32 sums differ in their last bit: those at the border of two codes.
MOVED_CODES = 2e-3

failures: list[str] = []


def check(name: str, passed: bool, detail: object = "") -> None:
    """Record one check of this rank; all ranks must pass it."""
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, (bool(passed), str(detail)))
    good = all(verdict for verdict, _ in verdicts)
    if not good:
        failures.append(name)
    if dist.get_rank() == 0:
        print(f"{'ok  ' if good else 'FAIL'} {name} {'' if good else verdicts}", flush=True)


# Layouts


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

        def quantize(*args: Any) -> Any:
            result = original(*args)
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
        first = FirstLayer(training) if capture else None
        training.update()
        operands: dict[Any, Tensor] = {}
        if first is not None:
            keys = training.batch.plan.minibatches[0][runtime.dp_rank]
            operands = first.whole(training, list(keys))
        training.update(NUM_STEPS - 1)
        return {"losses": training.losses, "operands": operands}


def compare(name: str, actual: dict[str, Any], expected: dict[str, Any], *, dtype: str, loss: float) -> None:
    """Losses, and operands: bit for bit where no sum over ranks came before, else all but borderline codes."""
    differences = [abs(a - b) for a, b in zip(actual["losses"], expected["losses"], strict=True)]
    first = FIRST_LOSS[dtype] if loss == LOSS else loss
    check(f"{name}: losses", differences[0] <= first and max(differences) <= loss, differences)
    problems = []
    for key, values in actual["operands"].items():
        linear, operand, side, _ = key
        other = expected["operands"][key]
        exact = operand == "weight" or (operand == "input" and linear.endswith("linear_qkv"))
        close = torch.isclose(values, other, rtol=0 if exact else 1e-5, atol=0).float().mean()
        if close < (1 if exact or side == "scale" else 1 - MOVED_CODES):
            problems.append((key, float(close)))
    check(f"{name}: codes of the first layer", not problems, problems[:3])


def layout_cases(every: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(recipe, layout, settings); by default each recipe on some layouts and each layout with some recipes."""
    layouts = ("TP2", "TP2 SP", "PP2", "DP2")
    few = {
        "tensorwise_delayed": ("TP2 SP",),
        "tensorwise": ("TP2", "DP2"),
        "rowwise": ("TP2 SP", "PP2"),
        "blockwise": ("TP2",),
        "mxfp8": ("TP2 SP", "DP2"),
    }
    few_bf16 = {"tensorwise": "TP2", "rowwise": "PP2", "blockwise": "DP2", "mxfp8": "TP2 SP", "tensorwise_delayed": "TP2"}
    for recipe in RECIPES:
        for layout in layouts:
            delayed_over_dp = recipe == "tensorwise_delayed" and layout == "DP2"  # see `check_histories`
            if (every or layout in few[recipe]) and not delayed_over_dp:
                yield recipe, layout, {"dtype": "fp32"}
            if (every or layout == few_bf16[recipe]) and not delayed_over_dp:
                yield recipe, layout, {"fp8_param": True}
                if every or recipe == "tensorwise":
                    yield recipe, layout, {"fp8_param": False}
        if every or recipe in ("tensorwise", "rowwise"):
            yield recipe, "TP2", {"dtype": "fp32", "amax_group": "te"}


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
        sharded = settings.get("amax_group") == "te"
        actual = train(recipe, layout, capture=dtype == "fp32" and not sharded, **settings)
        name = " ".join([recipe, layout, *(f"{key}={value}" for key, value in settings.items())])
        one = expected[recipe, *of_one_process(settings).items()]
        compare(name, actual, one, dtype=dtype, loss=LOSS_OF_SHARDED_AMAXES if sharded else LOSS)
        fell = actual["losses"][0] - actual["losses"][-1]
        check(f"{name}: learns", fell > 0.1, fell)


# Delayed scaling

HISTORY_LENGTH = 6


def states(training: Training) -> dict[str, DelayedScaling]:
    """Delayed scaling's states of this rank, by global name."""
    found = {}
    for chunk in training.bare:
        for layer in chunk.decoder.layers:
            for name, module in layer.named_modules():
                if isinstance(module, DelayedScaling):
                    found[f"{layer.layer_number}.{name}"] = module
    return found


def histories(training: Training) -> dict[str, tuple[Tensor, Tensor]]:
    """Copies of histories and scales."""
    return {name: (s.amax_history.clone(), s.scale.clone()) for name, s in states(training).items()}


class Recorder:
    """What delayed scaling sees: amaxes by tensor, in pieces that end with a pass forward (kept apart) or backward."""

    def __init__(self, training: Training) -> None:
        self.names = {id(state): name for name, state in states(training).items()}
        self.pieces: list[tuple[str, dict[str, float]]] = []
        self.open: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Listens to the quantisers, and to Megatron's schedule for the ends of passes."""
        quantise, forward, backward = DelayedScaling.scales, schedules.forward_step, schedules.backward_step

        def scales(state: DelayedScaling, amax: Tensor, *args: Any, **keywords: Any) -> Any:
            name = self.names[id(state)]
            piece = self.open["backward" if "gradient" in name else "forward"]
            piece[name] = max(piece.get(name, 0.0), amax.item())
            return quantise(state, amax, *args, **keywords)

        def ends(kind: str, step: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **keywords: Any) -> Any:
                result = step(*args, **keywords)
                if torch.is_grad_enabled():
                    self.pieces.append((kind, self.open[kind]))
                    self.open[kind] = {}
                return result

            return wrapped

        DelayedScaling.scales = scales  # type: ignore[method-assign]
        schedules.forward_step, schedules.backward_step = ends("forward", forward), ends("backward", backward)
        try:
            yield
        finally:
            DelayedScaling.scales = quantise  # type: ignore[method-assign]
            schedules.forward_step, schedules.backward_step = forward, backward

    def replay(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Histories and scales by the rule, in plain Python, from the amaxes of all ranks."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (self.pieces, self.open))
        history = {name: [0.0] * HISTORY_LENGTH for name in self.names.values()}
        scale = dict.fromkeys(history, 1.0)
        for ranks in zip(*(pieces for pieces, _ in gathered), strict=True):
            assert len({kind for kind, _ in ranks}) == 1
            for name in ranks[0][1]:
                amax = max(piece[name] for _, piece in ranks)
                history[name] = [0.0, *history[name][2:], amax]
                largest = 57344.0 if "gradient" in name else 448.0
                scale[name] = (torch.tensor(largest) / torch.tensor(max(history[name]))).item()
        for piece in self.open.values():  # recorded since, of this rank alone
            for name, amax in piece.items():
                history[name][0] = amax
        return {name: (torch.tensor(history[name]), torch.tensor(scale[name])) for name in history}


def check_histories(layout: str, **settings: Any) -> None:
    """Warm-up, updates and scoring leave the histories that the rule gives, the same on all ranks that share them."""
    config = precision_config("tensorwise_delayed", layout, amax_history_length=HISTORY_LENGTH, **settings)
    name = " ".join(["delayed", layout, *(f"{key}={value}" for key, value in settings.items())])
    with started(config) as runtime:
        training = Training(learner := make_learner(config, runtime, "two layers"), prepare(learner))
        recorder = Recorder(training)
        # Weights that live in FP8 were quantised when the learner was built.
        recorder.open["forward"] = {n: s.amax_history[0].item() for n, s in states(training).items() if s.amax_history[0]}
        with recorder.recording():
            learner.warm_up(training.batch)
            untouched = [n for n, (_, scale) in histories(training).items() if scale == 1]
            check(f"{name}: warm-up sets every scale", not untouched, untouched)
            training.update(2)
            before = histories(training)
            training.log_probs()
            after = histories(training)
            moved = [n for n in before if not all(map(same, (before[n][0][1:], before[n][1]), (after[n][0][1:], after[n][1])))]
            check(f"{name}: scoring does not move histories", not moved, moved)
            training.update()
        actual, expected = histories(training), recorder.replay()
        wrong = [(n, actual[n], expected[n]) for n in actual if not same(actual[n], expected[n])]
        check(f"{name}: histories and scales by the rule", not wrong, wrong[:1])
        if "PP2" not in layout:
            shared: list[Any] = [None] * dist.get_world_size()
            moved_on = {n: (h[1:], s) for n, (h, s) in actual.items()}
            dist.all_gather_object(shared, moved_on)
            check(f"{name}: equal on both ranks", all(same(shared[0], other) for other in shared))
