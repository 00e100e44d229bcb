"""The trainer itself, whole, in several layouts: the same run, step by step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from checks import Checks, layout

from megatron_calclip.config_file import config_from_dict, launch_world_size
from megatron_calclip.metrics import METRICS
from megatron_calclip.trainer import Trainer

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": OVERLAP,
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2xVPP2": {"pp": 2, "vpp": 2} | OVERLAP,
    "CP2": {"cp": 2},
}
# Sequence-level importance weights and a reference policy: both need more of a sequence than one rank scores.
SETTINGS: dict[str, Any] = {
    "model": {
        "shape": {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "num_query_groups": 2},
        "tokenizer": "characters",
        "max_sequence_length": 24,
        "warm_start": {"num_steps": 4, "batch_size": 8},
    },
    "data": {"arithmetic": {"max_operand": 9}},
    "rollout": {"max_new_tokens": 12, "dtype": "fp32"},
    "algorithm": {
        "num_minibatches": 2,
        "num_epochs": 2,
        "importance": {"level": "sequence_geometric"},
        "kl": {"coefficient": 0.1},
        "entropy_bonus": 0.01,
        "dynamic_sampling": {"enabled": True},
    },
    # Random completions are never right: a reward that tells them apart is needed for a gradient.
    "reward": {"name": "share_of_digits.share_of_digits_of_some"},
    "precision": {"params_dtype": "fp32"},
    "optimizer": {"lr": 4e-3, "epsilon": 1e-4},
    "train": {"num_steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_microbatch": 60},
    "eval": {"num_prompts": 8},
    "tracking": {"tensorboard": False},
}


def repeatable(row: dict[str, float]) -> dict[str, float]:
    """A row of metrics without what a clock measured."""
    return {name: value for name, value in row.items() if not name.startswith(("timing/", "throughput/"))}


def check_trainer(checks: Checks, root: Path, _: Path) -> None:
    """Two RL steps in each layout; their metrics are those of the first one."""
    if launch_world_size() != 2:
        return
    os.environ["MEGATRON_CALCLIP_CACHE"] = str(root / "cache")  # the first layout trains, the others load
    rows: dict[str, list[dict[str, float]]] = {}
    for name, parallel in LAYOUTS.items():
        run_dir = root / name
        config = config_from_dict(SETTINGS | {"parallel": parallel, "run_dir": str(run_dir)})
        with layout(config) as runtime:
            Trainer(config, runtime).run()
        rows[name] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        checks.true(f"trainer {name}: steps", [row["step"] for row in rows[name]] == [0, 1, 2])
        checks.true(f"trainer {name}: named metrics", all(row.keys() <= METRICS.keys() for row in rows[name]))
        for actual, expected in zip(rows[name], rows["DP2"], strict=True):
            checks.close(
                f"trainer {name}: step {actual['step']}", repeatable(actual), repeatable(expected), tolerance=1e-5
            )
    check_without_fp8(checks, root)
    check_other_losses_without_fp8(checks, root)
    check_one_step_off_policy(checks, root, rows["DP2"])
    check_mismatched_old_log_probs(checks, root)
    last = rows["DP2"][-1]
    trains = last["grad_norm"] > 0 and last["updates/applied"] == 4 and last["clip/low_negative"] > 0
    checks.true("trainer: it trains", trains)
    # Of prompts 0-3 number 1 goes, so does 4, and 5 fills the batch; of 6-9 then 7, and 10.
    dropped = [row["rollout/dropped_groups"] for row in rows["DP2"][1:]]
    filled = all(row["reward/equal_groups"] == 0 for row in rows["DP2"][1:])
    checks.true("trainer: groups that teach nothing are replaced", dropped == [2, 2] and filled)


def check_without_fp8(checks: Checks, root: Path) -> None:
    """A BF16 learner is its own shadow: every ratio is the same, and no clip is one too many."""
    settings = SETTINGS | {
        "parallel": LAYOUTS["TP2+SP"],
        "precision": {"params_dtype": "bf16"},
        "calibration": {"measure": "every_step"},
        "run_dir": str(root / "bf16"),
    }
    config = config_from_dict(settings)
    with layout(config) as runtime:
        Trainer(config, runtime).run()
    measured = [json.loads(line) for line in (root / "bf16" / "metrics.jsonl").read_text().splitlines()][1:]
    sides = [(row[f"overclip/{side}"], row[f"clip_bf16/num_{side}"]) for row in measured for side in ("low", "high")]
    checks.true("trainer: without FP8 the ratios have no error", all(row["nmae/ratio"] == 0 for row in measured))
    clipped = [multiple for multiple, count in sides if count]
    checks.true(f"trainer: without FP8 multiples are 1 ({clipped})", bool(clipped) and set(clipped) == {1.0})


def check_other_losses_without_fp8(checks: Checks, root: Path) -> None:
    """GSPO clips sequences in both precisions; BAPO's own bounds are shown; the oracle clips every mini-batch."""
    rows = {}
    algorithm = SETTINGS["algorithm"] | {"num_epochs": 1, "num_minibatches": 4, "importance": {"level": "token"}}
    tight = {"measure": "every_step", "reference": [0.99, 1.01]}
    for name, changes, calibration in (
        ("gspo", {"loss": "gspo", "clip": {"lower": 1 - 3e-4, "upper": 1 + 4e-4}}, {"measure": "every_step"}),
        ("bapo", {"loss": "bapo"}, tight),
        ("oracle", {"loss": "oracle"}, tight),
        ("oracle-last", {"loss": "oracle"}, tight | {"minibatches": "last"}),
    ):
        settings = SETTINGS | {
            "algorithm": algorithm | changes,
            "precision": {"params_dtype": "bf16"},
            "calibration": calibration,
            "optimizer": {"lr": 2e-2, "epsilon": 1e-4},
            "train": SETTINGS["train"] | {"num_steps": 1},
            "eval": {"num_prompts": 8, "every": 0},
            "run_dir": str(root / name),
        }
        config = config_from_dict(settings)
        with layout(config) as runtime:
            Trainer(config, runtime).run()
        rows[name] = json.loads((root / name / "metrics.jsonl").read_text().splitlines()[-1])
    row = rows["gspo"]
    clips = [row[f"clip_bf16/num_{side}"] for side in ("low", "high")]
    wrong = {key: row[key] for key in row if key.startswith(("false_clip/", "missed_clip/")) and row[key] > 0}
    checks.true(f"trainer gspo: BF16 clips {clips}, {wrong}", sum(clips) > 0 and not wrong and row["nmae/ratio"] < 1e-6)
    bounds = rows["bapo"]["clip/lower"], rows["bapo"]["clip/upper"]
    checks.true(
        f"trainer bapo: its bounds {bounds}", bounds != (rows["oracle"]["clip/lower"], rows["oracle"]["clip/upper"])
    )
    one, other = (
        {key: rows[name][key] for key in ("loss", "grad_norm", "clip/low_negative", "clip/high_positive")}
        for name in ("oracle", "oracle-last")
    )
    checks.true("trainer oracle: it clips", one["clip/low_negative"] + one["clip/high_positive"] > 0)
    checks.close("trainer oracle: every mini-batch, whatever calibration.minibatches", other, one, tolerance=1e-6)


def check_one_step_off_policy(checks: Checks, root: Path, on_policy: list[dict[str, float]]) -> None:
    """Completions drawn ahead: the first step is the synchronous one, the others are one step old, the same everywhere."""
    rows = []
    for name in ("DP2", "TP2+SP"):
        settings = SETTINGS | {
            "parallel": LAYOUTS[name],
            "rollout": SETTINGS["rollout"] | {"max_staleness": 1},
            "train": SETTINGS["train"] | {"num_steps": 3},
            "eval": {"num_prompts": 8, "every": 1},
            "run_dir": str(root / f"ahead-{name}"),
        }
        config = config_from_dict(settings)
        with layout(config) as runtime:
            Trainer(config, runtime).run()
        lines = (root / f"ahead-{name}" / "metrics.jsonl").read_text().splitlines()
        rows.append([repeatable(json.loads(line)) for line in lines])
    first = {name: value for name, value in rows[0][1].items() if name in on_policy[1] and name != "lr"}
    expected = {name: on_policy[1][name] for name in first}
    checks.close("trainer ahead: the first step is on policy", first, expected, tolerance=1e-6)
    staleness = [row["rollout/staleness_max"] for row in rows[0][1:]]
    checks.true(f"trainer ahead: staleness {staleness}", staleness == [0, 1, 1])
    differs = rows[0][2]["mismatch/mean_abs_dlogp"] > 1.5 * on_policy[2]["mismatch/mean_abs_dlogp"]
    checks.true("trainer ahead: older weights show as a mismatch", differs)
    for index, (actual, wanted) in enumerate(zip(*rows, strict=True)):
        checks.close(f"trainer ahead: step {index} in both layouts", actual, wanted, tolerance=5e-5)


def check_mismatched_old_log_probs(checks: Checks, root: Path) -> None:
    """pi_old over other micro-batches: with per-tensor scales unmoved weights have ratios other than 1."""
    deviations = {}
    for kind in ("matched", "mismatched"):
        settings = SETTINGS | {
            "precision": {"params_dtype": "bf16", "recipe": "tensorwise", "backend": "emulated"},
            "algorithm": SETTINGS["algorithm"] | {"old_log_probs": kind, "num_epochs": 1},
            "optimizer": {"lr": 1e-12},
            "train": SETTINGS["train"] | {"num_steps": 1},
            "run_dir": str(root / kind),
        }
        config = config_from_dict(settings)
        with layout(config) as runtime:
            Trainer(config, runtime).run()
        row = json.loads((root / kind / "metrics.jsonl").read_text().splitlines()[-1])
        deviations[kind] = max(row["ratio/max"] - 1, 1 - row["ratio/min"])
    checks.true(f"trainer: matched pi_old {deviations}", deviations["matched"] == 0 and deviations["mismatched"] > 1e-3)
