"""The study's second part: its reward and prompts, replays of dumps by hand, and tables of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from jinja2 import Environment

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.study import smollm2  # noqa: E402
from examples.study.__main__ import main  # noqa: E402
from examples.study.gsm8k_reward import numbers, reward  # noqa: E402
from examples.study.replays import FIXED, at_references, entropy_table, replay_table, replays  # noqa: E402
from examples.study.smollm2_tables import SETTINGS, at_interval, over_clipping, summarise, write_tables  # noqa: E402
from examples.study.tables import Run  # noqa: E402
from megatron_calclip.algorithms.bounds import ClipBounds  # noqa: E402
from megatron_calclip.algorithms.calibration_settings import CalibrationSettings  # noqa: E402
from megatron_calclip.algorithms.replay import CalibrationDump  # noqa: E402
from megatron_calclip.commands.replay import AS_RUN  # noqa: E402
from megatron_calclip.config_file import load_config  # noqa: E402
from megatron_calclip.prompt import Prompt  # noqa: E402
from megatron_calclip.rewards import RewardSample  # noqa: E402

QUESTION = "Nan sold 48 clips in April, and half as many in May. How many in all?"
SOLUTION = "In May she sold 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72 clips.\n#### 72"


def score(completion: str) -> dict[str, float]:
    prompt = Prompt(id=0, token_ids=(1,), text=QUESTION, answer=SOLUTION, metadata={})
    return reward(RewardSample(prompt, completion, num_tokens=9, finished=True))


@pytest.mark.parametrize(
    ("completion", "right", "steps", "near"),
    [
        ("48/2 = 24, so 48 + 24 = 72.\n#### 72", 1.0, 1.0, 1.0),
        ("The answer is 72.0", 1.0, 0.5, 1.0),  # 24 is not stated
        ("48/2 = 24, 48 - 24 = 24", 0.0, 0.5, 1 / 3),
        ("72 in all, and 48 in April", 0.0, 0.5, 2 / 3),  # the last number is another; 48 stands in the question
        ("I do not know.", 0.0, 0.0, 0.0),
        ("#### -72", 0.0, 0.0, 0.0),
        ("#### 7,200", 0.0, 0.0, 0.01),
    ],
)
def test_reward_by_hand(completion: str, right: float, steps: float, near: float) -> None:
    value = right / 2 + steps / 4 + near / 4
    assert score(completion) == pytest.approx({"reward": value, "right": right, "steps": steps, "near": near})


def test_numbers() -> None:
    assert numbers("1,200.50 or -3, 7.0 and 100.") == ["1200.5", "-3", "7", "100"]


def test_problems_and_template() -> None:
    row = {"question": QUESTION, "answer": SOLUTION}
    short = {"question": "1 + 1?", "answer": "<<1+1=2>>2\n#### 2"}
    long = {"question": "word " * 31, "answer": SOLUTION}
    hard = [
        "<<1+1=2>> <<2+1=3>> <<3+1=4>> #### 4", "#### 4", "<<1/2=0.5>> #### 2", "<<1-2=-1>> #### 2", "<<1+1=2>> #### 101", "<<1+1=2>> #### x", 3
    ]  # fmt: skip
    rows = [
        row,
        long,
        *({"question": QUESTION, "answer": one} for one in hard),
        {"prompt": 1},
        ValueError("line 8"),
        short,
    ]
    assert smollm2.easy_problems(rows) == [short, row]
    text = smollm2.with_shots("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", [row])
    shown = Environment().from_string(text).render(messages=[{"role": "user", "content": "What?"}])
    solved = "In May she sold 48/2 = 24.\nIn all 48+24 = 72 clips.\n#### 72"
    assert shown == f"user: {QUESTION}\nassistant: {solved}\nuser: What?\n"


def test_sizes_are_valid_configurations(tmp_path: Path) -> None:
    for size in smollm2.SIZES.values():
        assert set(size.trained) <= {name.partition(":")[0] for name in smollm2.DEFAULT_RECIPES}
        for recipe in size.trained:
            config = load_config(smollm2.CONFIG, smollm2.train_overrides(size, recipe, smollm2.COMMON))
            assert config.calibration.dump and config.calibration.interval == 1 and config.algorithm.num_minibatches > 1
            assert config.train.num_steps == size.steps and config.precision.recipe == recipe


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--part", "smollm2", "--runs", str(tmp_path / "runs")]
    for more, message in (
        (["--model", str(tmp_path / "none")], "error: --model: no model in"),
        (
            ["--model", str(model_folder(tmp_path)), "--gsm8k", "nowhere.jsonl"],
            "error: --gsm8k: no file 'nowhere.jsonl'",
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, *more])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and message in error and error.count("\n") == 1
    main([*arguments, "--tables-only"])  # tables of nothing are tables
    assert "SmolLM2" in capsys.readouterr().out


def model_folder(folder: Path) -> Path:
    folder = folder / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


REFERENCE = ClipBounds(0.8, 1.24)


def dump_of(
    step: int, ratio8: list[float], ratio16: list[float], advantages: list[float], entropy: list[float]
) -> CalibrationDump:
    """Answers of two tokens each, of the second mini-batch."""
    count = len(ratio8) // 2
    return CalibrationDump(
        step=step,
        bounds=ClipBounds(0.6, 1.8),
        settings=CalibrationSettings.robust(reference=REFERENCE, interval=1, start_step=1),
        weight_scale=1.0,
        ratio8=torch.tensor(ratio8),
        ratio16=torch.tensor(ratio16),
        advantages=torch.tensor(advantages),
        importance_weights=torch.ones(2 * count),
        loss_weights=torch.ones(2 * count),
        entropy=torch.tensor(entropy).half(),
        sequence_ids=torch.arange(count),
        lengths=torch.full((count,), 2),
        minibatches=torch.ones(count, dtype=torch.int64),
        updates=torch.ones(count, dtype=torch.int64),
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two dumps. Of A < 0 the second has four tokens: clipped by both, by FP8 alone (0.7 and 0.5), by none; of A > 0 two, one of
    them clipped by FP8 alone (1.5)."""
    folder = tmp_path / "tensorwise"
    (folder / "dumps").mkdir(parents=True)
    first = dump_of(1, [1.0] * 4, [1.0] * 4, [-1.0, -1.0, 1.0, 1.0], [0.1] * 4)
    second = dump_of(
        2,
        [0.5, 0.7, 0.5, 0.9, 1.5, 1.0],
        [0.6, 1.0, 1.0, 1.0, 1.0, 1.0],
        [-1.0] * 4 + [1.0] * 2,
        [2.5, 0.1, 0.9, 0.2, 0.3, 0.3],
    )
    for dump in (first, second):
        dump.save(folder / "dumps" / f"step_{dump.step}.safetensors")
    rows = [
        {"step": step, "reward/mean": 0.25, "reward/right": 0.125, "reward/equal_groups": 0.25, "timing/step": 50.0}
        for step in (1, 2)
    ]
    rows[-1] |= {"ledger/shadow_seconds": 20.0, "ledger/shadow_share": 0.2}
    bounds = {"lower_before": 0.6, "lower_after": 0.6, "upper_before": 1.8, "upper_after": 1.8, "upper_status": "held"}
    reports = [{"step": step, "report": bounds | {"lower_status": one}} for step, one in ((1, "held"), (2, "edge"))]
    (folder / "calibration.jsonl").write_text("".join(json.dumps(line) + "\n" for line in reports))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run("tensorwise", "calibrated", 0, folder)


def test_clips_at_the_references_by_hand(run: Run) -> None:
    found = at_references([run.folder])
    assert found["clips"]["clip_fp8/num_low"] == 3 and found["clips"]["clip_bf16/num_low"] == 1
    assert found["answers"] == [1, 2]  # of the false clips 0.7 (a mean of 1.3 nats in its answer) and 0.5 (0.55)
    over = over_clipping(found)
    assert (over["fp8"], over["bf16"], over["multiple"]) == (4, 1, 4)
    assert over["lower"] == pytest.approx(2 / 3)  # 2 of 3 clips too many
    assert over["tokens above 1"] == 0.0  # 0.7 at 0.1 nats, 0.5 at 0.9


def test_replays_by_hand(run: Run) -> None:
    """In the first dump BF16 clips nothing, so its calibration holds both bounds: the second dump is judged at 0.6 and 1.8."""
    rows = replays([run.folder], SETTINGS)
    assert list(rows)[:4] == [FIXED, AS_RUN, "paper", "robust"] and "grid_lower=0.2:0.9:0.02" in rows
    assert rows[FIXED]["clips"] | {} == {
        "lower8": 3, "lower16": 1, "lower_false": 2, "lower_kept16": 3,
        "upper8": 1, "upper16": 0, "upper_false": 1, "upper_kept16": 2,
    }  # fmt: skip
    own = rows[AS_RUN]
    assert (own["clips"]["lower8"], own["clips"]["lower_false"], own["clips"]["upper8"]) == (2, 1, 0)
    assert own["lower_statuses"] == {"held": 2} and own["lower"] == [0.6]
    assert rows["start=0.8:1.24"]["clips"] == rows[FIXED]["clips"]
    # Buckets of entropy: 0.1 and 0.2 in the first, 0.9 in the third, 2.5 in the last; false clips at 0.1 and 0.9.
    assert [bucket[0] for bucket in rows[FIXED]["by_entropy"]] == [1, 0, 1, 0, 0, 0]
    lines = entropy_table({name: rows[FIXED]["by_entropy"] for name in ("a", "b")}, side="low")
    assert lines[-1] == "| a; b | 50%, 500‰ | 0%, - | 50%, 1000‰ | 0%, - | 0%, - | 0%, 0‰ | 2, 500‰ |"
    assert (
        f"| {AS_RUN} | 0.60 | 2 held | 2.00 (2 / 1) | 333‰ | 1.70 | 1 held, 1 moved | - (0 / 0) | 0‰ |"
        in replay_table(rows)
    )


def test_tables(run: Run, tmp_path: Path) -> None:
    assert at_interval(run.rows(), 20) == pytest.approx(1 / 81)  # 20 of 100 s at every step: 1 of 80 + 1
    shares = dict.fromkeys(("low_negative", "low_positive", "high_negative", "high_positive", "outside"), 0.25)
    update = {"lr": 2e-6, "nmae_p": 0.1, "nmae_r": 0.2, "amplification": 2.0, "fp8": shares, "bf16": shares}
    recipe = {"recipe": "rowwise", "unmoved": {"mean_abs_dlogp": 0.2, "p95_abs_dlogp": 0.7}, "updates": [update]}
    diagnosis = {"num_sequences": 4, "num_tokens": 44, "bounds": [0.8, 1.24], "recipes": [recipe]}
    text = write_tables(summarise(diagnosis, [run]), tmp_path / "tables.md")
    assert "| rowwise | 0.200, 0.70 | 10% | 20% | 2 | 2.08 | 25% | 25% | 25% |" in text
    assert "12.5% of the answers are right, and 75% of the groups differ in reward" in text
    assert "FP8 / BF16 clips at the references: 4.00 (4 / 1) (paper 6.68)" in text
    assert "A < 0 on the dumps that follow a calibration: 3.00 (3 / 1) without it, 2.00 (2 / 1) with it" in text
    assert "BF16 clips, FP8 keeps 0% at the same bound" in text
    assert (
        "of 2 calibrations L was at the edge of its grid in 1 and held in 1, H at the edge in 0 and held in 2" in text
    )
    assert "| FP8 / BF16 clips at the references, both bounds | 4.00 (4 / 1) | 6.68 |" in text
    assert (tmp_path / "tables.md").read_text() == text + "\n"
