"""Offline replay: calibrate again, with any settings, on the tokens that a run has dumped.

What: `CalibrationDump` keeps what a calibration step saw of its response tokens, in a compact safetensors
file; `replay` runs a calibrator over dumps and judges each pair of bounds on the next dump. Why: a shadow
pass costs a forward of the whole batch, a replay costs nothing, and only the same tokens make settings
comparable. A replay answers what the calibration would have chosen, not how training would have gone on.

Left out on purpose: the command line and plots (`commands/replay`), and the ratios of other bounds than the
run used: those do not exist, because bounds change the updates that produce the ratios.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_calclip.algorithms.bootstrap import sample_sequences
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration import ClipCalibrator
from megatron_calclip.algorithms.calibration_report import CalibrationReport, Status
from megatron_calclip.algorithms.calibration_settings import CalibrationSettings
from megatron_calclip.algorithms.gspo import SequenceLevel, sequence_level
from megatron_calclip.algorithms.statistics import RatioStatistics

_HEADER = "megatron_calclip.calibration_dump"
"""Key of the JSON header in the metadata of a file."""
_PER_TOKEN = ("ratio8", "ratio16", "advantages", "importance_weights", "loss_weights", "entropy")
_PER_SEQUENCE = ("sequence_ids", "lengths", "minibatches", "updates")


@dataclass(frozen=True)
class CalibrationDump:
    """The response tokens of one calibration step, sequence after sequence. T tokens, S sequences."""

    step: int
    """Training step."""
    bounds: ClipBounds
    """Bounds that the step's loss used."""
    settings: CalibrationSettings
    """Settings of the run."""
    weight_scale: float
    """What brings the mean of `loss_weights` near 1 (see `RatioStatistics`)."""
    ratio8: Tensor
    """float32 [T]: pi / pi_old in training precision."""
    ratio16: Tensor
    """float32 [T]: the same by the BF16 shadow."""
    advantages: Tensor
    """float32 [T]."""
    importance_weights: Tensor
    """float32 [T]: TIS weights."""
    loss_weights: Tensor
    """float32 [T]."""
    entropy: Tensor
    """float16 [T] nats: of the sampled distribution, for attribution; to 0.01 nats."""
    sequence_ids: Tensor
    """int64 [S]: global ids."""
    lengths: Tensor
    """int64 [S]: response tokens of each sequence, at least 1."""
    minibatches: Tensor
    """int64 [S]: the mini-batch, from 0, that each sequence belonged to."""
    updates: Tensor
    """int64 [S]: the update of the step, from 0, whose ratios these are; with several epochs a mini-batch has several."""

    @classmethod
    def pack(
        cls,
        *,
        step: int,
        bounds: ClipBounds,
        settings: CalibrationSettings,
        weight_scale: float,
        minibatch: int,
        update: int,
        ratio8: Tensor,
        ratio16: Tensor,
        advantages: Tensor,
        importance_weights: Tensor,
        loss_weights: Tensor,
        entropy: Tensor,
        response_mask: Tensor,
        sequence_ids: Tensor,
    ) -> Self:
        """A dump of some tokens of one update, without those outside the mask.

        The tensors are [T], as for `RatioStatistics.update`, on any device. Join the parts with `merge`.
        """
        inside = sequence_ids[response_mask].cpu()
        ids, lengths = torch.unique_consecutive(inside, return_counts=True)

        def kept(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
            return values[response_mask].to(device="cpu", dtype=dtype)

        return cls(
            step=step,
            bounds=bounds,
            settings=settings,
            weight_scale=weight_scale,
            ratio8=kept(ratio8),
            ratio16=kept(ratio16),
            advantages=kept(advantages),
            importance_weights=kept(importance_weights),
            loss_weights=kept(loss_weights),
            entropy=kept(entropy, torch.float16),
            sequence_ids=ids,
            lengths=lengths,
            minibatches=torch.full_like(ids, minibatch),
            updates=torch.full_like(ids, update),
        )

    @classmethod
    def merge(cls, parts: Sequence["CalibrationDump"]) -> "CalibrationDump":
        """One dump of all parts (mini-batches, ranks) of a step."""
        assert parts and all(part.step == parts[0].step for part in parts), "parts of one step"
        joined: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in _PER_TOKEN + _PER_SEQUENCE
        }
        return replace(parts[0], **joined)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.ratio8.numel()

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; nothing appears under the name before it is whole.

        Per-token values that are constant within every sequence are stored once per sequence.
        """
        tensors = {name: getattr(self, name).contiguous() for name in _PER_SEQUENCE}
        first = self.lengths.cumsum(0) - self.lengths
        for name in _PER_TOKEN:
            values = getattr(self, name)
            constant = torch.equal(values[first].repeat_interleave(self.lengths), values)
            tensors[name] = values[first] if constant else values.contiguous()
        header = {
            "step": self.step,
            "bounds": asdict(self.bounds),
            "settings": asdict(self.settings),
            "weight_scale": self.weight_scale,
        }
        path = Path(path)
        aside = path.with_name(path.name + ".part")
        save_file(tensors, aside, metadata={_HEADER: json.dumps(header)})
        os.replace(aside, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ValueError: when the file is missing, damaged, or something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {})[_HEADER])
                tensors = {name: file.get_tensor(name) for name in _PER_TOKEN + _PER_SEQUENCE}
            lengths = tensors["lengths"]
            for name in _PER_TOKEN:
                if tensors[name].numel() == lengths.numel():
                    tensors[name] = tensors[name].repeat_interleave(lengths)
            dump = cls(
                step=header["step"],
                bounds=ClipBounds(**header["bounds"]),
                settings=_settings_from_json(header["settings"]),
                weight_scale=header["weight_scale"],
                **tensors,
            )
            dump._check_sizes()
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{path}: not a calibration dump ({type(error).__name__}: {error}); "
                "name a file that a run with calibration.dump wrote"
            ) from None
        return dump

    def _check_sizes(self) -> None:
        """Refuse tensors that do not describe the same tokens."""
        sizes = {name: getattr(self, name).numel() for name in _PER_TOKEN + _PER_SEQUENCE}
        expected = dict.fromkeys(_PER_TOKEN, int(self.lengths.sum())) | dict.fromkeys(
            _PER_SEQUENCE, self.lengths.numel()
        )
        if sizes != expected or bool((self.lengths < 1).any()):
            raise ValueError(f"sizes {sizes} do not fit {expected['ratio8']} tokens of {expected['lengths']} sequences")

    def select(self, sequences: Tensor) -> "CalibrationDump":
        """The tokens of some sequences, given as bool [S]."""
        tokens = sequences.repeat_interleave(self.lengths)
        selected: dict[str, Any] = {name: getattr(self, name)[tokens] for name in _PER_TOKEN}
        selected |= {name: getattr(self, name)[sequences] for name in _PER_SEQUENCE}
        return replace(self, **selected)

    def sequence_level(self) -> "CalibrationDump":
        """Each sequence as one token, as GSPO sees it: its ratio is exp of the mean log-ratio.

        The rest is averaged or added up as `gspo.sequence_level` says; entropy is averaged.
        """
        num_sequences = self.lengths.numel()
        rows = torch.arange(num_sequences).repeat_interleave(self.lengths)
        tokens = {name: getattr(self, name) for name in SequenceLevel._fields}
        whole = sequence_level(**tokens, sequence_ids=rows, num_sequences=num_sequences)
        entropy = torch.zeros(num_sequences).index_add_(0, rows, self.entropy.float()) / self.lengths
        return replace(
            self,
            weight_scale=self.weight_scale * num_sequences / max(self.num_tokens, 1),
            entropy=entropy.half(),
            lengths=torch.ones_like(self.lengths),
            **whole._asdict(),
        )

    def prepared(self, settings: CalibrationSettings) -> "CalibrationDump":
        """The tokens (or sequences) that a calibration with these settings counts."""
        wanted = sample_sequences(self.sequence_ids, fraction=settings.token_fraction, seed=self.step)
        if settings.minibatches == "last":
            wanted &= self.minibatches == self.minibatches.max()
        selected = self.select(wanted)
        return selected.sequence_level() if settings.mode == "sequence" else selected

    def update(self, statistics: RatioStatistics) -> None:
        """Add all tokens to statistics."""
        for update in self.updates.unique().tolist():
            part = self.select(self.updates == update)
            statistics.update(
                part.ratio8,
                part.ratio16,
                advantages=part.advantages,
                importance_weights=part.importance_weights,
                loss_weights=part.loss_weights,
                response_mask=torch.ones(part.num_tokens, dtype=torch.bool),
                sequence_ids=part.sequence_ids.repeat_interleave(part.lengths),
                weights_unmoved=update == 0,
            )


class NextClips(NamedTuple):
    """Tokens that bounds clip on a dump which did not choose them. FP8 clips at the calibrated bounds, BF16 at
    the references; a clip of FP8 is false where BF16 keeps the token."""

    lower8: int = 0
    """A < 0, by FP8."""
    lower16: int = 0
    """A < 0, by BF16."""
    lower_false: int = 0
    """A < 0, by FP8 alone."""
    lower_kept16: int = 0
    """A < 0, kept by BF16."""
    upper8: int = 0
    """A > 0, by FP8."""
    upper16: int = 0
    """A > 0, by BF16."""
    upper_false: int = 0
    """A > 0, by FP8 alone."""
    upper_kept16: int = 0
    """A > 0, kept by BF16."""

    @classmethod
    def of(cls, dump: CalibrationDump, bounds: ClipBounds, reference: ClipBounds) -> Self:
        """Clips on one dump."""
        counts = []
        for side, clipped8, clipped16 in (
            (dump.advantages < 0, dump.ratio8 <= bounds.lower, dump.ratio16 <= reference.lower),
            (dump.advantages > 0, dump.ratio8 >= bounds.upper, dump.ratio16 >= reference.upper),
        ):
            masks = (side & clipped8, side & clipped16, side & clipped8 & ~clipped16, side & ~clipped16)
            counts += [int(mask.sum()) for mask in masks]
        return cls(*counts)


@dataclass(frozen=True)
class Replay:
    """What one setting made of the dumps."""

    reports: tuple[CalibrationReport, ...]
    """One for each calibration."""
    clips: NextClips
    """Clips of each calibration's bounds on the next dump, added up. The last bounds have no next dump."""

    def as_row(self) -> dict[str, float | int | None]:
        """Plain numbers for a table.

        Columns `next_...` judge bounds on tokens that did not choose them. `next_lower_multiple` is the number of
        A < 0 tokens that FP8 clips over those that BF16 clips, `next_lower_false_clips` the share P(FP8 clips |
        BF16 keeps); the same for A > 0 as `next_upper_...`. Calibration aims at a multiple of 1.
        """
        clips = self.clips
        row: dict[str, float | int | None] = {
            "num_calibrations": len(self.reports),
            "lower": self.reports[-1].lower.after,
            "upper": self.reports[-1].upper.after,
            "next_lower_multiple": clips.lower8 / clips.lower16 if clips.lower16 else None,
            "next_upper_multiple": clips.upper8 / clips.upper16 if clips.upper16 else None,
            "next_lower_false_clips": clips.lower_false / clips.lower_kept16 if clips.lower_kept16 else None,
            "next_upper_false_clips": clips.upper_false / clips.upper_kept16 if clips.upper_kept16 else None,
            "next_num_lower_bf16": clips.lower16,
            "next_num_upper_bf16": clips.upper16,
        }
        for side in ("lower", "upper"):
            statuses = Counter(getattr(report, side).status for report in self.reports)
            row |= {f"num_{side}_{status}": statuses[status] for status in get_args(Status)}
        return row


def replay(dumps: Sequence[CalibrationDump], settings: CalibrationSettings, *, follow_schedule: bool = False) -> Replay:
    """Calibrate on dumps in the order of their steps, from the settings' start bounds.

    Args:
        dumps: of one run, in any order.
        settings: what to calibrate with.
        follow_schedule: calibrate only at the steps that the settings' schedule asks for, to compare
            intervals on a run that dumped more often; otherwise on every dump.

    Raises:
        ValueError: when the schedule asks for none of the dumps.
    """
    calibrator = ClipCalibrator(settings)
    prepared = [dump.prepared(settings) for dump in sorted(dumps, key=lambda dump: dump.step)]
    reports, clips = [], NextClips()
    for index, dump in enumerate(prepared):
        if follow_schedule and not calibrator.due(dump.step):
            continue
        statistics = calibrator.new_statistics(weight_scale=dump.weight_scale)
        dump.update(statistics)
        reports.append(calibrator.calibrate(statistics, dump.step))
        if index + 1 < len(prepared):
            counted = NextClips.of(prepared[index + 1], calibrator.bounds, settings.reference)
            clips = NextClips(*map(sum, zip(clips, counted, strict=True)))
    if not reports:
        raise ValueError(f"calibrates on none of {len(dumps)} dumps; relax the schedule")
    return Replay(tuple(reports), clips)


def _settings_from_json(values: dict[str, Any]) -> CalibrationSettings:
    """Settings from `asdict` of them after JSON, which knows neither tuples nor dataclasses."""
    known = {field.name for field in fields(CalibrationSettings)}
    restored: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in known
    }
    for name in ("reference", "start"):
        restored[name] = ClipBounds(**restored[name])
    return CalibrationSettings(**restored)
