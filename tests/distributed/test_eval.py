"""Evaluation as a user starts it: inside a run, of a run's checkpoints in one process and in two, and of a HF folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_calclip.hf import character_tokenizer

CHECK = launching.HERE / "check_eval.py"
TIMEOUT_SECONDS = 200  # a hang is a failure
NUM_STEPS, NUM_PROBLEMS, NUM_SAMPLES = 3, 6, 4
ALPHABET = "0123456789+-*="


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of problems in MATH's layout, one of them without an answer."""
    folder = tmp_path_factory.mktemp("eval")
    rows = [{"problem": f"{i}+{i}=", "answer": str(2 * i) if i != 3 else ""} for i in range(NUM_PROBLEMS + 1)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run of three steps in two processes, evaluated at each, that keeps its newest checkpoint and its best."""
    launching.run(
        launching.ROOT / "examples" / "grpo_fp8.py",
        str(launching.ROOT / "conf" / "tiny_cpu.yaml"),
        *("model.warm_start.num_steps=6", "model.warm_start.batch_size=16", "optimizer.lr=3e-3"),
        *("reward.name=share_of_digits.share_of_digits", "data.bad_rows=skip", 'data.instruction=""'),
        *(f"train.num_steps={NUM_STEPS}", "train.prompts_per_step=4", "train.samples_per_prompt=4"),
        *("algorithm.num_epochs=2", "calibration.enabled=false", "tracking.samples_per_step=3"),
        *(f"eval.sets=[arithmetic, math={folder}/sums.jsonl]", "eval.every=1", f"eval.num_prompts={NUM_PROBLEMS}"),
        *(f"eval.samples_per_prompt={NUM_SAMPLES}", "eval.max_new_tokens=5"),
        *("checkpoint.save_every=0", "checkpoint.keep=1", f"run_dir={folder}/run"),
        num_processes=2,
        timeout=TIMEOUT_SECONDS,
        env={"MEGATRON_CALCLIP_CACHE": str(folder / "cache")},
    )
    return folder / "run"


@pytest.fixture(scope="module")
def hf_model(folder: Path) -> Path:
    """A random model with its tokenizer, as transformers saves them."""
    tokenizer = character_tokenizer(ALPHABET)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")
    return folder / "hf"


def evaluate(folder: Path, *commands: list[str], num_processes: int = 1) -> str:
    """Run `megatron-calclip` with these arguments; what they print."""
    file = folder / "commands.json"
    file.write_text(json.dumps(commands))
    return launching.run(CHECK, str(file), num_processes=num_processes, timeout=TIMEOUT_SECONDS)


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def completions_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_inside_a_run(run: Path) -> None:
    for step, row in enumerate(metrics_of(run)):
        report = report_of(run / "eval" / f"step_{step}")
        names = {one["name"]: one for one in report["sets"]}
        assert list(names) == ["arithmetic", "math"]
        assert report["mean"]["avg@4"]["value"] == pytest.approx(row["eval/score"])
        assert names["arithmetic"]["estimates"]["avg@4"]["value"] == row["eval/arithmetic/score"] > 0
        assert names["arithmetic"]["reward"] == "share_of_digits.share_of_digits" and names["math"]["reward"] == "math"
        assert names["math"]["data"]["left_out"] == {"field 'answer' is empty": ["line 4"]}
        completions = completions_of(run / "eval" / f"step_{step}")
        assert len(completions) == 2 * NUM_PROBLEMS * NUM_SAMPLES
        assert max(one["num_tokens"] for one in completions) == 5  # eval.max_new_tokens, one less than training's


def test_the_best_checkpoint_stays(run: Path) -> None:
    scores = {row["step"]: row["eval/score"] for row in metrics_of(run)[1:]}
    best = max(scores, key=lambda step: scores[step])
    assert json.loads((run / "best_checkpoint.json").read_text()) == {"step": best, "score": scores[best]}
    assert sorted(path.name for path in run.glob("step_*")) == sorted({f"step_{best}", f"step_{NUM_STEPS}"})
    assert json.loads((run / f"step_{NUM_STEPS}" / "state.json").read_text())["best"]["step"] == best


def test_samples_of_a_run(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    for row in rows:
        assert len(row["tokens"]) == len(row["ratio"]) == len(row["clipped"]) == len(row["old_log_probs"])
        assert "".join(row["tokens"]).removesuffix("<eos>") == row["completion"]
        # Every token was scored, on whichever rank; after two passes over four mini-batches its ratio has moved.
        assert all(ratio > 0 for ratio in row["ratio"])
        assert row["policy_version"] == row["step"] - 1
    assert any(ratio != 1 for row in rows for ratio in row["ratio"])
    clipped = {letter for row in rows for letter in row["clipped"]}
    assert clipped <= set(".lh")
    for row in rows:
        lower, upper = row["bounds"]
        for ratio, letter in zip(row["ratio"], row["clipped"], strict=True):
            below, above = row["advantage"] < 0 and ratio <= lower, row["advantage"] > 0 and ratio >= upper
            assert letter == ("l" if below else "h" if above else ".")


def test_of_a_run_and_its_checkpoint(folder: Path, run: Path) -> None:
    one, two, page = folder / "of_run", folder / "of_step", folder / "samples.html"
    options = ["--num-prompts", str(NUM_PROBLEMS)]
    output = evaluate(
        folder,
        ["eval", str(run), *options, "--out", str(one)],
        ["eval", str(run / f"step_{NUM_STEPS}"), *options, "--sets", f"math={folder}/sums.jsonl", "--out", str(two)],
        ["samples", str(run), "--html", str(page)],
    )
    assert "left out: field 'answer' is empty (line 4)" in output and "avg@4" in output
    # The weights that were evaluated at the end of the run, by the same random numbers.
    trained = run / "eval" / f"step_{NUM_STEPS}"
    assert completions_of(one) == completions_of(trained)
    assert report_of(one)["sets"] == report_of(trained)["sets"] and report_of(one)["mean"] == report_of(trained)["mean"]
    assert report_of(one)["model"]["step"] == NUM_STEPS
    # A set's completions do not depend on the sets around it.
    assert completions_of(two) == [row for row in completions_of(one) if row["set"] == "math"]
    assert page.read_text().count("<article>") == 9


def test_in_two_processes(folder: Path, run: Path) -> None:
    out = folder / "two_processes"
    evaluate(folder, ["eval", str(run), "--num-prompts", str(NUM_PROBLEMS), "--out", str(out)], num_processes=2)
    trained = run / "eval" / f"step_{NUM_STEPS}"
    assert completions_of(out) == completions_of(trained)
    assert report_of(out)["sets"] == report_of(trained)["sets"]


def test_of_a_hf_folder(folder: Path, hf_model: Path) -> None:
    (folder / "aime24.jsonl").write_text('{"problem": "1+1=", "answer": "002"}\n{"problem": "2*3=", "answer": 6.0}\n')

    def command(out: str, *options: str) -> list[str]:
        sets = ["--sets", f"aime24={folder}/aime24.jsonl", f"math={folder}/sums.jsonl"]
        return ["eval", str(hf_model), *sets, "--set", 'data.instruction=""', *options, "--out", str(folder / out)]

    evaluate(
        folder,
        command("first", "--n", "8", "--max-new-tokens", "4", "--top-p", "0.9"),
        command("again", "--n", "8", "--max-new-tokens", "4", "--top-p", "0.9"),
        command("other", "--n", "8", "--max-new-tokens", "4", "--top-p", "0.9", "--seed", "1"),
        command("greedy", "--n", "2", "--max-new-tokens", "4", "--temperature", "0"),
    )
    first = report_of(folder / "first")
    assert first["sampling"]["top_p"] == 0.9 and first["sampling"]["max_new_tokens"] == 4
    assert [(one["name"], one["num_problems"]) for one in first["sets"]] == [("aime24", 2), ("math", NUM_PROBLEMS)]
    assert set(first["mean"]) == {"avg@8", "pass@2", "pass@4", "pass@8", "maj@8", "response_length", "truncated"}
    assert completions_of(folder / "again") == completions_of(folder / "first")
    assert report_of(folder / "again") == first
    assert completions_of(folder / "other") != completions_of(folder / "first")
    greedy = [row["completion"] for row in completions_of(folder / "greedy")]
    assert greedy[0::2] == greedy[1::2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}"], "MODEL: '{folder}' is no HF folder, run or checkpoint"),
        (["{hf}"], "--sets: the configuration names no evaluation sets; give some, such as math500"),
        (["{hf}", "--sets", "math500", "--n", "0"], "eval.samples_per_prompt: "),
        (["{hf}", "--sets", "math500", "--temperature", "-1"], "eval.temperature: "),
        (["{hf}", "--sets", "math500", "--set", "eval.nonsense=1"], "eval.nonsense: no such setting"),
    ],
)
def test_usage_errors(
    folder: Path, hf_model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    from megatron_calclip import cli

    places = {"folder": str(folder), "hf": str(hf_model)}
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", *(argument.format(**places) for argument in arguments), "--out", str(folder / "never")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith(f"error: {message.format(**places)}") and error.count("\n") == 1
    assert not (folder / "never").exists()


def test_a_report_is_not_overwritten(folder: Path, hf_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_calclip import cli

    (folder / "taken").mkdir()
    (folder / "taken" / "report.json").write_text("{}")
    with pytest.raises(SystemExit):
        cli.main(["eval", str(hf_model), "--sets", "math500", "--out", str(folder / "taken")])
    assert "holds the report of another evaluation" in capsys.readouterr().err
    assert (folder / "taken" / "report.json").read_text() == "{}"
