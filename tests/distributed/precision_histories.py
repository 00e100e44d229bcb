"""Delayed scaling's histories: by the rule, on every layout, through checkpoints. Part of `check_precision.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fp8_learners import Training, check, precision_config, same, save, started, weights
from torch import Tensor

from megatron_calclip.errors import UserError
from megatron_calclip.learner import checkpoint
from megatron_calclip.precision.scaling import DelayedScaling

HISTORY_LENGTH = 6
FIRST_INPUT = "1.self_attention.linear_qkv.fp8.input_scaling"
AMAX_TOLERANCE = 1e-4  # FP32 sums over ranks; a few codes at the border of two


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
        from megatron.core.pipeline_parallel import schedules

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

        DelayedScaling.scales = scales
        schedules.forward_step, schedules.backward_step = ends("forward", forward), ends("backward", backward)
        try:
            yield
        finally:
            DelayedScaling.scales = quantise
            schedules.forward_step, schedules.backward_step = forward, backward

    def replay(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Histories and scales by the rule, in plain Python, from the amaxes of all ranks that hold the same layers."""
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, self.pieces, group=group)
        history = {name: [0.0] * HISTORY_LENGTH for name in self.names.values()}
        scale = dict.fromkeys(history, 1.0)
        for ranks in zip(*gathered, strict=True):
            assert len({kind for kind, _ in ranks}) == 1
            for name in ranks[0][1]:
                amax = max(piece[name] for _, piece in ranks)
                if amax == 0:
                    continue
                largest = 57344.0 if "gradient" in name else 448.0
                scale[name] = (torch.tensor(largest) / torch.tensor(max(amax, *history[name]))).item()
                history[name] = [0.0, *history[name][2:], amax]  # slot 0 goes last, the oldest is dropped
        for piece in self.open.values():  # recorded since, of this rank alone
            for name, amax in piece.items():
                history[name][0] = amax
        return {name: (torch.tensor(history[name]), torch.tensor(scale[name])) for name in history}


def check_histories(layout: str, **settings: Any) -> None:
    """Warm-up, updates and scoring leave the histories that the rule gives, the same on all ranks that share them."""
    config = precision_config("tensorwise_delayed", layout, amax_history_length=HISTORY_LENGTH, **settings)
    name = " ".join(["delayed", layout, *(f"{key}={value}" for key, value in settings.items())])
    with started(config) as runtime:
        training = Training.begin(config, runtime, warm_up=False)
        learner, recorder = training.learner, Recorder(training)
        # Weights that live in FP8 were quantised when the learner was built.
        recorder.open["forward"] = {
            n: s.amax_history[0].item() for n, s in states(training).items() if s.amax_history[0]
        }
        with recorder.recording():
            learner.warm_up(training.batch)
            untouched = [n for n, (_, scale) in histories(training).items() if scale == 1]
            check(f"{name}: warm-up sets every scale", not untouched, untouched)
            training.update(2)
            before = histories(training)
            training.log_probs()
            moved = [
                n
                for n, state in histories(training).items()
                if not same(without_slot_0(state), without_slot_0(before[n]))
            ]
            check(f"{name}: scoring does not move histories", not moved, moved)
            training.update()
        actual, expected = histories(training), recorder.replay()
        wrong = [(n, actual[n], expected[n]) for n in actual if not same(actual[n], expected[n])]
        check(f"{name}: histories and scales by the rule", not wrong, wrong[:1])
        if "PP2" not in layout:
            shared: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(shared, {n: without_slot_0(state) for n, state in actual.items()})
            check(f"{name}: equal on both ranks", all(same(shared[0], other) for other in shared))


def compare_with_one_process(
    name: str, actual: dict[str, tuple[Tensor, Tensor]], one: dict[str, tuple[Tensor, Tensor]], *, over_dp: bool
) -> None:
    """Histories after the same warm-up.

    Over data parallelism two ranks record two micro-batches at once, one process one after the other: the maxima agree, their
    places do not, and neither do scales after the first. Then only what no scale has touched can be compared: weights and what
    the first linear reads, to the bit.
    """
    if over_dp:
        actual = {n: s for n, s in actual.items() if n.endswith("weight_scaling") or n.startswith(FIRST_INPUT)}
        wrong = [n for n, (history, _) in actual.items() if history.max() != one[n][0].max()]
    else:
        wrong = [
            n
            for n, state in actual.items()
            if not all(torch.allclose(a, b, rtol=AMAX_TOLERANCE) for a, b in zip(state, one[n], strict=True))
        ]
    check(
        f"{name}: amaxes and scales of one process",
        len(actual) > 0 and not wrong,
        [(n, actual[n], one[n]) for n in wrong[:2]],
    )


def without_slot_0(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Slot 0 collects until the pass ends, on each rank by itself."""
    history, scale = state
    return history[1:], scale


def check_checkpoint(saved: str, loaded: str, root: Path, **settings: Any) -> None:
    """Histories come back, on any layout and with layers that have none; training goes on where it stopped."""
    name = " ".join(["delayed checkpoint", saved, "->", loaded, *(f"{key}={value}" for key, value in settings.items())])
    model = "four layers" if settings else "two layers"
    with started(config := precision_config("tensorwise_delayed", saved, **settings)) as runtime:
        training = Training.begin(config, runtime, model)
        training.update(2)
        folder = save(training, root / name.replace(" ", "_").replace(">", ""))
        before = all_layers(histories(training))
        training.update()
        next_loss = training.losses[-1]
    with started(config := precision_config("tensorwise_delayed", loaded, **settings)) as runtime:
        other = Training.begin(config, runtime, model, tensors=weights(model, seed=1))
        checkpoint.load(folder, other.learner)
        own = histories(other)
        wrong = [n for n in own if not same(without_slot_0(own[n]), without_slot_0(before[n]))]
        check(f"{name}: histories", not wrong, wrong[:1])
        other.update()
        difference = abs(other.losses[-1] - next_loss)
        check(f"{name}: next loss", difference <= (0 if saved == loaded else 2e-3), difference)
    for what, other in (
        ("another length", precision_config("tensorwise_delayed", loaded, **settings, amax_history_length=7)),
        ("none", None),
    ):
        if other is None:  # a checkpoint of another recipe
            with started(config := precision_config("rowwise", saved)) as runtime:
                training = Training.begin(config, runtime, model)
                training.update()
                folder = save(training, root / f"{name} without".replace(" ", "_").replace(">", ""))
            other = precision_config("tensorwise_delayed", loaded, **settings)
        with started(other) as runtime:
            problem = ""
            try:
                checkpoint.load(folder, Training.begin(other, runtime, model).learner)
            except UserError as error:
                problem = str(error)
            named = problem.startswith("precision.recipe: tensorwise_delayed goes on from amax histories")
            check(f"{name}: histories of {what} are an error", named, problem)


def all_layers(own: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of all ranks together."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered[0] | gathered[1]
