"""How measurements of whole runs and of tests read in the documentation; the others are in `tables.py`.

What: the noisy regime, the study, the tiny run, diagnoses of a real model, killed runs, the planner, and the short table of the
README. Left out on purpose: what the figures mean, which the pages say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import examples.study.search as search_module
import examples.study.smollm2_tables as smollm2_module
import examples.study.tables as study_module
from benchmarks.results import Result, read_results
from benchmarks.tables import Report, asked, measured, number, page, percent, table, verdict
from examples.study.replays import FIXED
from megatron_calclip.commands.diagnose import FP32_SCALES
from megatron_calclip.commands.replay import AS_RUN

RECIPE_NAMES = {f"{name}:{FP32_SCALES}": f"{name}, FP32 scales" for name in ("rowwise", "blockwise")}
MIDDLE_LR = 4e-7
"""The update that the main tables show."""


def tiny_run(report: Report) -> str:
    """Scores and seconds of every seed."""
    rows = [
        (
            str(row["seed"]),
            *(f"{row[end]['score']:.3f} +- {row[end]['stderr']:.3f}" for end in ("start", "end")),
            f"{row['gain']:.3f} ({row['standard_errors']:.1f} standard errors)",
            f"{row['seconds_to_first_step']:.0f}",
            f"{row['seconds']:.0f}",
        )
        for row in report["seeds"]
    ]
    steps = report["seeds"][0]["steps"]
    header = ("seed", "start", f"after {steps} steps", "gain", "s to the end of the first RL step", "s to the end")
    return page(report, table(header, rows), verdict(read_results(report)))


def regime(report: Report) -> str:
    """Clips of FP8 and BF16 in every arm of the noisy regime."""
    arms = report["arms"]
    vanilla, calibrated, bf16 = arms["vanilla"], arms["calibrated"], arms["bf16"]

    def clips(arm: Mapping[str, Any]) -> str:
        return f"{arm['low_fp8']} / {arm['low_bf16']}"

    def seeds(arm: Mapping[str, Any]) -> str:
        return ", ".join(
            number(value) for name, value in arm.items() if name.startswith("low_multiple, seed") and value
        )

    header = ("arm", "FP8 / BF16 clips of A < 0", "multiple", "by seed")
    rows = [
        ("FP8, bounds fixed at the references", clips(vanilla), f"{vanilla['low_multiple']:.2f}", seeds(vanilla)),
        (
            "FP8, calibrated, after L has settled",
            clips(calibrated),
            f"{calibrated['low_multiple']:.2f}",
            seeds(calibrated),
        ),
        *(
            (f"the calibrated runs' tokens, {title}", "", f"{calibrated[f'low_multiple, replayed {name}']:.2f}", "")
            for title, name in (
                ("replayed at the references", AT_REFERENCES),
                ("replayed on the paper's grid", "on the paper's grid"),
            )
        ),
    ]
    status = ", ".join(f"{name} in {count}" for name, count in calibrated["L by status on the paper's grid"].items())
    held = ", ".join(f"{name} in {count}" for name, count in calibrated["H by status"].items())
    steps = [value for name, value in calibrated.items() if name.startswith("settled after step")]
    ends = ", ".join(f"{values[-1]:.2f}" for name, values in calibrated.items() if name.startswith("L, seed"))
    exactly = "exactly 1" if bf16["all_exactly_one"] else "NOT always 1"
    sentences = (
        f"L settled in {len(steps) - steps.count(None)} of {len(steps)} seeds, which alone count above, and ended at {ends}; on the paper's grid it was {status} calibrations. H was {held}. At the bounds in force the balance lies within "
        f"{percent(calibrated['balance at the new bounds, largest error'])} of BF16's. Without FP8 all {bf16['multiples']} "
        f"multiples are {exactly}."
    )
    return page(report, table(header, rows), sentences, verdict(read_results(report)))


STUDY_COLUMNS = {
    "eval/score": "held-out score",
    "entropy": "entropy, last third",
    "clip/low_negative": "clipped of A < 0, %",
    "overclip low": "FP8 / BF16 clips, A < 0",
    "nmae/amplification": "amplification",
    "clip/lower": "L, end",
}
"""Those columns of the study's own tables that fit a page."""


def study(report: Report) -> str:
    """The arms of the first recipe: means over seeds and half of their 95% intervals."""

    def cell(name: str, value: Mapping[str, Any] | None) -> str:
        if value is None:
            return "-"
        factor = 100 if name == "clip/low_negative" else 1
        half = "" if value["half"] is None else f" ± {value['half'] * factor:.2g}"
        return number(value["mean"] * factor) + half

    recipe, arms = next(iter(report["arms"].items()))

    def seeds(arm: Mapping[str, Any]) -> str:
        return str(max(value["seeds"] for value in arm.values() if value))

    title = f"{recipe}, means over seeds ± half of their 95% intervals:"
    rows = [
        (name, seeds(arm), *(cell(column, arm.get(column)) for column in STUDY_COLUMNS)) for name, arm in arms.items()
    ]
    return page(report, title, table(("arm", "seeds", *STUDY_COLUMNS.values()), rows))


def study_tables(report: Report) -> str:
    """All tables of the study, by its own hand."""
    return page(report, _deeper(study_module.markdown(dict(report))))


def search_table(report: Report) -> str:
    """Oracle against vanilla in harsher settings."""
    return page(report, search_module.markdown(dict(report)))


def smollm2_tables(report: Report) -> str:
    """All tables of the study's second part."""
    return page(report, _deeper(smollm2_module.markdown(dict(report))))


def _deeper(text: str) -> str:
    """Headings a level lower, as parts of a page."""
    return re.sub(r"^##(?= )", "###", text, flags=re.MULTILINE).strip()


def _updates(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The update of the middle size."""
    return next(update for update in recipe["updates"] if update["lr"] == MIDDLE_LR)


def _name(recipe: Mapping[str, Any]) -> str:
    return RECIPE_NAMES.get(recipe["recipe"], recipe["recipe"])


def diagnose_recipes(report: Report) -> str:
    """Errors and clips of every recipe, one process."""
    found = report["layouts"]["TP 1"]
    low, high = found["bounds"]
    bf16 = _updates(found["recipes"][0])["bf16"]
    shares = ("outside", "clipped", "low_negative", "high_positive")
    rows = [("BF16", "", "", "", "", "", *(percent(bf16[share]) for share in shares))]
    for recipe in found["recipes"]:
        update, noise = _updates(recipe), recipe["unmoved"]
        paper = smollm2_module.PAPER_DIAGNOSED.get(recipe["recipe"])
        rows.append(
            (
                _name(recipe),
                f"{noise['mean_abs_dlogp']:.3f} / {noise['p95_abs_dlogp']:.2f}",
                percent(update["nmae_p"]),
                percent(update["nmae_r"]),
                f"{update['amplification']:.2f}",
                "" if paper is None else f"{paper:.2f}",
                *(percent(update["fp8"][share]) for share in shares),
            )
        )
    header = (
        *("recipe", "mean / p95 of dlogp", "NMAE p", "NMAE r", "amplification", "paper's"),
        *(f"r outside [{low:g}, {high:g}]", "clipped", "lower, A < 0", "upper, A > 0"),
    )
    time = next(result for result in read_results(report) if result.unit == "s")
    sizes = (
        f"{found['num_sequences']} texts, {found['num_tokens']:,} tokens, update at learning rate {MIDDLE_LR:g}. All recipes, sizes "
        f"and layers took {measured(time)}, asked {asked(time)}."
    )
    return page(report, sizes, table(header, rows))


def diagnose_updates(report: Report) -> str:
    """Amplification over the update's size."""
    recipes = report["layouts"]["TP 1"]["recipes"]
    rows = [
        (
            f"{update['lr']:g}",
            *(f"{recipe['updates'][index]['amplification']:.2f}" for recipe in recipes),
            percent(update["bf16"]["outside"]),
        )
        for index, update in enumerate(recipes[0]["updates"])
    ]
    return table(("update size", *map(_name, recipes), "BF16 outside"), rows)


def diagnose_layouts(report: Report) -> str:
    """Noise and amplification on every layout."""
    names = [recipe["recipe"] for recipe in report["layouts"]["PP 2"]["recipes"]]
    rows = []
    for layout, found in report["layouts"].items():
        recipes = [recipe for recipe in found["recipes"] if recipe["recipe"] in names]
        cells = [
            f"{recipe['unmoved']['mean_abs_dlogp']:.4f}, {_updates(recipe)['amplification']:.2f}" for recipe in recipes
        ]
        rows.append((layout, *cells, percent(_updates(recipes[0])["bf16"]["outside"])))
    titles = [RECIPE_NAMES.get(name, name) for name in names]
    return table(("layout", *(f"{title}: dlogp, ampl." for title in titles), "BF16 outside"), rows)


def diagnose_floor(report: Report) -> str:
    """Ratios at learning rate 0, and what BF16 edges gain."""
    found = report["layouts"]["TP 1"]
    rows = [("BF16", "", percent(found["bf16_floor"]["outside"]), "", "")]
    for recipe in found["recipes"]:
        layers = recipe["layers"]
        worst = sorted(range(len(layers["one_layer"])), key=lambda index: -layers["one_layer"][index])[:3]
        rows.append(
            (
                _name(recipe),
                percent(recipe["repeated"]["outside"]),
                percent(recipe["floor"]["outside"]),
                percent(1 - layers["edges_bf16"] / layers["mean_abs_dlogp"], 0),
                ", ".join(f"{index + 1}: {layers['one_layer'][index]:.3f}" for index in worst),
            )
        )
    header = (
        "recipe",
        "outside at lr 0",
        "in other micro-batches",
        "gain of BF16 edges",
        "noisiest layers alone, dlogp",
    )
    return table(header, rows)


def dlogp_of(recipe: str) -> Callable[[Report], str]:
    """A cell: mean |dlogp| of a recipe on the real model."""

    def render(report: Report) -> str:
        recipes = {found["recipe"]: found for found in report["layouts"]["TP 1"]["recipes"]}
        return f"{recipes[recipe]['unmoved']['mean_abs_dlogp']:.3f}"

    return render


def tests_in(report: Report, name: str) -> list[Mapping[str, Any]]:
    """The tests of one function."""
    return [row for row in report["tests"] if re.search(rf"::{name}(\[|$)", row["test"])]


def faults(report: Report) -> str:
    """Killed ranks, and how long the other faults took."""
    killed = tests_in(report, "test_a_killed_rank_costs_nothing")
    equal = [row for row in killed if row["outcome"] == "passed"]
    seconds = [row["seconds_to_end"] for row in equal]
    stages = list(dict.fromkeys(row["stage"] for row in equal))
    rows = []
    for stage in stages:
        own = [row for row in equal if row["stage"] == stage]
        steps = ", ".join(str(row["step"]) for row in own)
        rows.append((stage, str(len(own)), steps, ", ".join(f"{row['seconds_to_end']:.0f}" for row in own)))
    passed = sum(row["outcome"] == "passed" for row in report["tests"])
    leave = [
        row["seconds_to_leave"]
        for row in tests_in(report, "test_a_signal_saves_and_leaves")
        if "seconds_to_leave" in row
    ]
    ends = [row["seconds_to_end"] for row in tests_in(report, "test_a_dead_rank_ends_all") if "seconds_to_end" in row]
    summary = (
        f"{len(equal)} of {len(killed)} killed runs went on by themselves and ended as the run that was not killed, in "
        f"{min(seconds):.0f} to {max(seconds):.0f} s, restart included; {passed} of {len(report['tests'])} tests passed."
    )
    others = (
        f"After one rank was killed all others had ended within {max(ends):.0f} s; after a signal the run had saved and left "
        f"within {max(leave):.0f} s."
        if ends and leave
        else ""
    )
    return page(report, summary, table(("stage", "kills", "in steps", "s to the end"), rows), others)


def plan(report: Report) -> str:
    """How far the planner's figures lie from real ones."""
    rows = [row for test in tests_in(report, "test_parameters_bytes_and_flops") for row in test["rows"]]
    asked_of = {"FLOPs": "within 5%"}
    titles = {"update": "bytes, update", "log-probs": "bytes, log-probs", "shadow": "bytes, shadow pass"}
    titles |= {"held": "bytes held between steps", "FLOPs": "FLOPs of an update"}
    cells = []
    for column, title in titles.items():
        least, most = (choose(rows, key=lambda row: row[column]) for choose in (min, max))
        ends = [f"{row[column]:.3f} ({row['case']})" for row in (least, most)]
        cells.append((title, *ends, asked_of.get(column, "within 10%")))
    parameters = [row["parameters"] for row in rows if row["rank"] == 0]
    sizes = (
        f"{len(rows)} ranks of {len({row['case'] for row in rows})} cases, {min(parameters) / 1e6:.1f}M to "
        f"{max(parameters) / 1e6:.1f}M parameters on rank 0, which are planned exactly."
    )
    return page(report, sizes, table(("planned over real", "smallest", "largest", "asked"), cells))


def recorded(report: Report) -> str:
    """Whatever tests handed over, a line for each figure; and how many passed."""
    rows = []
    for row in report["tests"]:
        for name, value in row.items():
            if name not in ("test", "outcome", "seconds"):
                values = value if isinstance(value, list) else [value]
                text = number(values[0]) if len(values) == 1 else f"{number(min(values))} to {number(max(values))}"
                rows.append((name, text))
    outcomes = [row["outcome"] for row in report["tests"]]
    seconds = sum(row["seconds"] for row in report["tests"])
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
    return page(report, f"{counts}, {seconds:.0f} s.", table(("what", "seen"), rows) if rows else "")


AT_REFERENCES = "at the references"
HEADLINES: Sequence[tuple[str, str, str, str, str]] = (
    (
        "regime",
        "clips at the lower bound, vanilla",
        "BF16",
        "tokens of A < 0 that FP8 clips, noisy regime, fixed bounds",
        "BF16",
    ),
    (
        "regime",
        AT_REFERENCES,
        "BF16",
        "the calibrated runs (longer, three times the prompts), at the fixed bounds, by replay",
        "BF16",
    ),
    (
        "regime",
        "clips at the lower bound, calibrated",
        "BF16",
        "the calibrated runs, at their bounds, once L has settled",
        "BF16",
    ),
    (
        "study_smollm2",
        FIXED,
        "BF16",
        "tokens of A < 0, SmolLM2-135M on GSM8K, no noise dialled in, fixed bounds",
        "BF16",
    ),
    ("study_smollm2", AS_RUN, "BF16", "the same tokens, calibrated on the paper's grid, L at its edge", "BF16"),
    (
        "tiny_run",
        "held-out score, gain of the worst seed",
        "the start",
        "FP8 run of two minutes, gain in held-out score, worst seed",
        "its start",
    ),
    (
        "calibration_run",
        "one calibration in 20 steps, token_fraction 1.0",
        "the whole run",
        "a calibration in 20 steps",
        "the run",
    ),
    (
        "calibration",
        "ours, no bootstrap",
        "quantile",
        "its statistics",
        "gather and torch.quantile, which find L alone",
    ),
    ("logprobs", "forward, bf16", "naive forward", "log-probs over 151,936 tokens", "naive FP32"),
    ("learner", "step, 1M fp32, spread", "trl", "learner's step, lengths 1:8", "TRL"),
    ("learner", "step, 1M fp32, spread", "transformers", "the same", "plain transformers loop"),
    ("learner", "step, 1M fp32, equal", "transformers", "the same, equal lengths", "plain transformers loop"),
    ("rollout", "sampling, full, batch 64", "generate", "embedded sampler", "transformers' generate"),
    ("rewards", "math rewards, ordinary", "math-verify", "math rewards", "math-verify"),
    (
        "checkpoint",
        "stall, saved in the background",
        "saved at once",
        "training stands still for a background save",
        "a save at once",
    ),
)
"""File, comparison and peer; what the README calls comparison and peer."""


def headlines(reports: Mapping[str, Report]) -> str:
    """The README's table: some comparisons of several files."""
    rows = []
    for file, what, peer, title, against in HEADLINES:
        if file in reports:
            result = _find(comparisons_of(file, reports[file]), what, peer)
            rows.append((title, against, measured(result), asked(result)))
        else:
            rows.append((title, against, "not measured yet", ""))
    return table(("what", "against", "measured", "asked"), rows)


def comparisons_of(file: str, report: Report) -> list[Result]:
    """A file's comparisons, and what replays of its runs found: A < 0 clipped by FP8 over those by BF16, by setting."""
    if file == "study_smollm2":
        clips = {name: row["clips"] for name, row in report["runs"]["tensorwise"]["replays"].items()}
        return [
            Result(name, "BF16", "x tokens", counts["lower8"] / counts["lower16"]) for name, counts in clips.items()
        ]
    results = read_results(report)
    if file == "regime":
        multiple = report["arms"]["calibrated"][f"low_multiple, replayed {AT_REFERENCES}"]
        results.append(Result(AT_REFERENCES, "BF16", "x tokens", multiple))
    return results


def _find(results: Sequence[Result], what: str, peer: str) -> Result:
    found = [result for result in results if (result.what, result.peer) == (what, peer)]
    assert found, f"no comparison of {what!r} with {peer!r}: there are {[(each.what, each.peer) for each in results]}"
    return found[0]
