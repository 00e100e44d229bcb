"""Dumps survive the disk unchanged and compactly; a replay equals the calibration it replays."""

import json
from dataclasses import fields, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_calclip.algorithms.bootstrap import sample_sequences
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration import CalibrationSettings, ClipCalibrator
from megatron_calclip.algorithms.replay import CalibrationDump, NextClips, replay

SETTINGS = CalibrationSettings.robust(min_tail_tokens=3)
SCALE = 300.0
LOSS_INPUTS = ("ratio8", "ratio16", "advantages", "importance_weights", "loss_weights")


def minibatch(seed: int, *, num_sequences: int = 30, length: int = 20) -> dict[str, torch.Tensor]:
    """A mini-batch as the loop has it: with prompt tokens between the responses, and garbage in them."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = num_sequences * length
    noise = torch.randn(2, num_tokens, generator=random)
    rows = torch.arange(num_sequences).repeat_interleave(length)
    mask = torch.arange(num_tokens) % length >= torch.randint(1, 6, (num_sequences,), generator=random)[rows]
    batch = {
        "ratio8": (0.12 * noise[0] + 0.15 * noise[1]).exp(),
        "ratio16": (0.12 * noise[0]).exp(),
        "advantages": torch.randn(num_sequences, generator=random)[rows],
        "importance_weights": torch.rand(num_tokens, generator=random) + 0.5,
        "loss_weights": torch.full((num_tokens,), 1 / SCALE),
        "entropy": 3 * torch.rand(num_tokens, generator=random),
    }
    batch = {name: torch.where(mask, values, torch.nan) for name, values in batch.items()}
    return batch | {"response_mask": mask, "sequence_ids": 1000 * seed + rows}


def dump_of(step: int, *, num_minibatches: int = 2) -> CalibrationDump:
    parts = [
        CalibrationDump.pack(
            step=step,
            bounds=SETTINGS.start,
            settings=SETTINGS,
            weight_scale=SCALE,
            minibatch=index,
            update=index,
            **minibatch(100 * step + index),
        )
        for index in range(num_minibatches)
    ]
    return CalibrationDump.merge(parts)


def direct_report(calibrator: ClipCalibrator, step: int, minibatches=(0, 1)):
    statistics = calibrator.new_statistics(weight_scale=SCALE)
    for index in minibatches:
        batch = minibatch(100 * step + index)
        del batch["entropy"]
        ratios = batch.pop("ratio8"), batch.pop("ratio16")
        statistics.update(*ratios, **batch, weights_unmoved=index == 0)
    return calibrator.calibrate(statistics, step)


def assert_equal(dump: CalibrationDump, other: CalibrationDump) -> None:
    for field in fields(CalibrationDump):
        ours, theirs = getattr(dump, field.name), getattr(other, field.name)
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), field.name
        else:
            assert ours == theirs, field.name


def test_dump_holds_response_tokens_only():
    dump = dump_of(20)
    masks = [minibatch(2000 + index)["response_mask"] for index in range(2)]
    assert dump.num_tokens == sum(int(mask.sum()) for mask in masks) == int(dump.lengths.sum())
    assert dump.sequence_ids.tolist() == [*range(2_000_000, 2_000_030), *range(2_001_000, 2_001_030)]
    assert dump.minibatches.tolist() == [0] * 30 + [1] * 30
    assert bool(dump.ratio8.isfinite().all())
    assert dump.entropy.dtype == torch.float16


def test_round_trip_is_exact_and_compact(tmp_path):
    dump = dump_of(20)
    path = tmp_path / "step_20.safetensors"
    dump.save(path)
    assert_equal(CalibrationDump.load(path), dump)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    # Per token two ratios and a TIS weight in float32 and an entropy in float16; advantage and loss weight
    # only once per sequence, beside three integers.
    expected = dump.num_tokens * (3 * 4 + 2) + dump.lengths.numel() * (2 * 4 + 3 * 8)
    assert expected < path.stat().st_size < expected + 3_000
    # Values that vary within a sequence are kept per token.
    varied = dump_of(40)
    varied.advantages[5] += 1
    varied.save(path)
    assert_equal(CalibrationDump.load(path), varied)


@pytest.mark.parametrize("settings", [CalibrationSettings.paper("dapo"), CalibrationSettings.robust("gspo")])
def test_settings_survive_json(tmp_path, settings):
    part = CalibrationDump.pack(
        step=3, bounds=settings.start, settings=settings, weight_scale=1.0, minibatch=0, update=0, **minibatch(1)
    )
    part.save(tmp_path / "dump")
    assert CalibrationDump.load(tmp_path / "dump").settings == settings


def test_what_is_no_dump_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"missing: not a calibration dump"):
        CalibrationDump.load(tmp_path / "missing")
    (tmp_path / "text").write_text("step 20")
    with pytest.raises(ValueError, match=r"text: not a calibration dump"):
        CalibrationDump.load(tmp_path / "text")
    save_file({"weight": torch.ones(2)}, tmp_path / "model")
    with pytest.raises(ValueError, match=r"model: not a calibration dump .*calibration\.dump"):
        CalibrationDump.load(tmp_path / "model")
    whole = tmp_path / "whole"
    dump_of(20).save(whole)
    (tmp_path / "cut").write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut: not a calibration dump"):
        CalibrationDump.load(tmp_path / "cut")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"step": None}, "step"),
        ({"settings": {"interval": 0}}, "reference"),
        ({"bounds": {"lower": 2.0, "upper": 3.0}}, "enclose"),
    ],
)
def test_damaged_header_is_named(tmp_path, damage, problem):
    path = tmp_path / "dump"
    dump_of(20).save(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (key,) = metadata
    header = json.loads(metadata[key]) | damage
    header = {name: value for name, value in header.items() if value is not None}
    save_file(tensors, path, metadata={key: json.dumps(header)})
    with pytest.raises(ValueError, match=rf"dump: not a calibration dump .*{problem}"):
        CalibrationDump.load(path)
    tensors["lengths"] = tensors["lengths"] + 1
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"dump: not a calibration dump .*do not fit"):
        CalibrationDump.load(path)


def test_replay_equals_the_calibration_itself(tmp_path):
    calibrator = ClipCalibrator(SETTINGS)
    expected, dumps = [], []
    for step in (20, 40, 60):
        expected.append(direct_report(calibrator, step))
        path = tmp_path / str(step)
        dump_of(step).save(path)
        dumps.append(CalibrationDump.load(path))
    assert any(report.lower.status == "moved" for report in expected)
    assert replay(dumps[::-1], SETTINGS).reports == tuple(expected)


def test_replay_of_other_settings():
    dumps = [dump_of(step) for step in (20, 40)]
    last = CalibrationSettings.robust(min_tail_tokens=3, minibatches="last")
    calibrator = ClipCalibrator(last)
    expected = [direct_report(calibrator, step, minibatches=[1]) for step in (20, 40)]
    assert list(replay(dumps, last).reports) == expected

    half = CalibrationSettings.robust(min_tail_tokens=1, token_fraction=0.5)
    drawn = sample_sequences(dumps[0].sequence_ids, fraction=0.5, seed=20)
    report = replay(dumps, half).reports[0]
    kept = drawn.repeat_interleave(dumps[0].lengths)
    assert report.num_negative == int((dumps[0].advantages[kept] < 0).sum())
    assert 0 < int(drawn.sum()) < 60

    scheduled = CalibrationSettings.robust(interval=40)
    assert [report.step for report in replay(dumps, scheduled, follow_schedule=True).reports] == [40]
    with pytest.raises(ValueError, match="calibrates on none of 2 dumps"):
        replay(dumps, CalibrationSettings(start_step=1000), follow_schedule=True)


def test_sequence_level_by_hand():
    dump = CalibrationDump.pack(
        step=1,
        bounds=ClipBounds(0.8, 1.2),
        settings=SETTINGS,
        weight_scale=8.0,
        minibatch=0,
        update=0,
        # Geometric means: sqrt(0.5 * 2) = 1 and 0.25; sqrt(4 * 1) = 2 and 1.
        ratio8=torch.tensor([0.5, 2.0, 0.25]),
        ratio16=torch.tensor([4.0, 1.0, 1.0]),
        advantages=torch.tensor([-1.0, -1.0, 2.0]),
        importance_weights=torch.tensor([1.0, 2.0, 1.0]),
        loss_weights=torch.tensor([0.25, 0.25, 0.5]),
        entropy=torch.tensor([1.0, 2.0, 0.5]),
        response_mask=torch.ones(3, dtype=torch.bool),
        sequence_ids=torch.tensor([7, 7, 9]),
    ).sequence_level()
    assert dump.ratio8.tolist() == pytest.approx([1.0, 0.25])
    assert dump.ratio16.tolist() == pytest.approx([2.0, 1.0])
    assert dump.advantages.tolist() == [-1.0, 2.0]
    assert dump.importance_weights.tolist() == [1.5, 1.0]
    assert dump.loss_weights.tolist() == [0.5, 0.5]
    assert dump.entropy.tolist() == [1.5, 0.5]
    assert dump.lengths.tolist() == [1, 1]
    assert dump.sequence_ids.tolist() == [7, 9]
    # 3 tokens became 2: the mean loss weight rose by 3 / 2, so that its scale falls.
    assert dump.weight_scale == pytest.approx(16 / 3)


def test_next_clips_by_hand():
    part = CalibrationDump.pack(
        step=1,
        bounds=ClipBounds(0.8, 1.2),
        settings=SETTINGS,
        weight_scale=1.0,
        minibatch=0,
        update=0,
        # A < 0 at L = 0.6 (FP8) and 0.8 (BF16): both, only FP8 (at equality), only BF16, neither.
        # A > 0 at H = 1.5 and 1.2: only FP8, both, neither. A = 0 counts nowhere.
        ratio8=torch.tensor([0.5, 0.5, 0.7, 1.0, 1.5, 3.0, 1.0, 0.1]),
        ratio16=torch.tensor([0.8, 0.9, 0.7, 1.0, 1.1, 1.3, 1.0, 0.1]),
        advantages=torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 0.0]),
        importance_weights=torch.ones(8),
        loss_weights=torch.ones(8),
        entropy=torch.ones(8),
        response_mask=torch.ones(8, dtype=torch.bool),
        sequence_ids=torch.arange(8),
    )
    clips = NextClips.of(part, ClipBounds(0.5, 1.5), ClipBounds(0.8, 1.2))
    assert clips == NextClips(
        lower8=2, lower16=2, lower_false=1, lower_kept16=2, upper8=2, upper16=1, upper_false=1, upper_kept16=2
    )


def test_row_judges_bounds_on_the_next_dump():
    dumps = [dump_of(step) for step in range(20, 140, 20)]
    robust = replay(dumps, SETTINGS).as_row()
    frozen = replay(dumps, CalibrationSettings.robust(min_tail_tokens=10**6, start=ClipBounds(0.8, 1.24))).as_row()
    sequences = replay(dumps, CalibrationSettings.robust("gspo", min_tail_tokens=3)).as_row()
    for row in (robust, frozen, sequences):
        json.dumps(row)
        for side in ("lower", "upper"):
            counts = [row[f"num_{side}_{status}"] for status in ("moved", "unchanged", "edge", "held")]
            assert sum(counts) == row["num_calibrations"] == 6
    assert (frozen["lower"], frozen["num_lower_held"]) == (0.8, 6)
    # Bounds are judged on the next dump: steps 40 to 120, so without the first.
    negative = [dump.advantages < 0 for dump in dumps[1:]]
    clips8 = [side & (dump.ratio8 <= 0.8) for side, dump in zip(negative, dumps[1:], strict=True)]
    clips16 = [side & (dump.ratio16 <= 0.8) for side, dump in zip(negative, dumps[1:], strict=True)]
    num8, num16 = sum(int(clip.sum()) for clip in clips8), sum(int(clip.sum()) for clip in clips16)
    num_false = sum(int((a & ~b).sum()) for a, b in zip(clips8, clips16, strict=True))
    assert frozen["next_num_lower_bf16"] == num16
    assert frozen["next_lower_multiple"] == num8 / num16 > 2
    assert frozen["next_lower_false_clips"] == num_false / (sum(int(side.sum()) for side in negative) - num16)
    assert abs(robust["next_lower_multiple"] - 1) < 0.5
    assert 0.99 < sequences["lower"] < 1


def test_last_dump_alone_has_no_next():
    row = replay([dump_of(20)], SETTINGS).as_row()
    assert row["next_lower_multiple"] is None
    assert row["next_upper_false_clips"] is None


def test_only_the_first_update_has_unmoved_weights():
    """With several epochs the first mini-batch comes again, at weights that have moved."""
    epochs = [
        CalibrationDump.pack(
            step=1,
            bounds=SETTINGS.start,
            settings=SETTINGS,
            weight_scale=SCALE,
            minibatch=0,
            update=update,
            **{**batch, "ratio8": torch.ones_like(batch["ratio8"])} if update == 0 else batch,
        )
        for update, batch in ((0, minibatch(1)), (2, minibatch(1)))
    ]
    calibrator = ClipCalibrator(SETTINGS)
    statistics = calibrator.new_statistics(weight_scale=SCALE)
    CalibrationDump.merge(epochs).update(statistics)
    lines = calibrator.calibrate(statistics, 1).log_lines
    assert not any("although no weight has moved" in line for line in lines), lines
    moved = replace(epochs[1], updates=torch.zeros_like(epochs[1].updates))
    statistics = calibrator.new_statistics(weight_scale=SCALE)
    moved.update(statistics)
    assert any("although no weight has moved" in line for line in calibrator.calibrate(statistics, 2).log_lines)
