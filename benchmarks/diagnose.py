"""What FP8 does to the probabilities and ratios of a real model, on several layouts: `megatron-calclip diagnose` on SmolLM2-135M.

    python tools/fetch_smollm2.py smollm2
    MEGATRON_CALCLIP_SMOLLM2=smollm2 MEGATRON_CALCLIP_DATA=FOLDER python -m benchmarks.diagnose    # about half an hour

FOLDER holds `gsm8k_train.jsonl`, whose first questions with their answers are the text: each row is "Question:" and then the
question and its worked answer, cut to 110 tokens, all of which are scored. The first layout, one process, goes through all
recipes, three sizes of the update and every layer alone; the others (pipeline, data and tensor parallel) repeat four recipes at
one size. `docs/diagnose.md` says what each figure is.

Left out on purpose: what `diagnose` computes, and its tables, which it prints itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, ROOT, Result, write_report
from megatron_calclip.commands.diagnose import FP32_SCALES

MAX_SECONDS = 600.0
"""What all recipes of the first layout may take."""
NUM_TEXTS = 24
LR = "4e-7"
SETTINGS = {
    "model.max_sequence_length": "256",
    "rollout.max_new_tokens": "110",
    "train.tokens_per_microbatch": "1400",
    "train.num_steps": "1",
    "train.prompts_per_step": str(NUM_TEXTS),
    "algorithm.clip.upper": "1.2",
    "data.shuffle": "false",
    "eval.sets": "[]",
}


@dataclass(frozen=True)
class Layout:
    """One launch of `diagnose`."""

    num_processes: int
    options: tuple[str, ...]


FOUR_RECIPES = (
    *("--recipe", "tensorwise", "--recipe", "rowwise"),
    *("--recipe", f"rowwise:{FP32_SCALES}", "--recipe", f"blockwise:{FP32_SCALES}"),
    *("--layer-prompts", "0", "--lr", LR),
)
LAYOUTS = {
    "TP 1": Layout(1, ("--lr", f"4e-8,{LR},1.6e-6")),
    "PP 2": Layout(2, ("--set", "parallel.pp=2", *FOUR_RECIPES)),
    "DP 2": Layout(2, FOUR_RECIPES),
    "TP 3": Layout(3, ("--set", "parallel.tp=3", *FOUR_RECIPES)),
}
QUICK = {"TP 1": Layout(1, (*FOUR_RECIPES, "--num-prompts", "2"))}


def write_texts(problems: Path, target: Path) -> None:
    """The first GSM8K problems as plain text."""
    rows = [json.loads(line) for line in problems.read_text().splitlines()[:NUM_TEXTS]]
    texts = [{"prompt": "Question:", "answer": f" {row['question']}\nAnswer: {row['answer']}"} for row in rows]
    target.write_text("".join(json.dumps(text) + "\n" for text in texts))


def measure(layout: Layout, model: Path, texts: Path, output: Path) -> dict[str, Any]:
    """The JSON of one launch, and the seconds that it took."""
    program = [str(Path(sys.executable).with_name("megatron-calclip")), "diagnose", str(model), "--config", "tiny_cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    launcher = [*torchrun, "--nproc-per-node", str(layout.num_processes), "--"] if layout.num_processes > 1 else []
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    files = ["--prompts", str(texts), "--text", "--json", str(output)]
    command = [*launcher, *program, *files, *settings, *layout.options]
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    seconds = time.perf_counter() - began
    return {**json.loads(output.read_text()), "num_processes": layout.num_processes, "seconds": seconds}


def compare(layouts: dict[str, dict[str, Any]]) -> list[Result]:
    """Tokens outside the clip range by those of BF16, and the time of the first layout."""
    first = layouts["TP 1"]
    found = [
        Result(
            f"ratios outside [{first['bounds'][0]}, {first['bounds'][1]}], {recipe['recipe']}",
            "BF16",
            "x tokens",
            update["fp8"]["outside"] / update["bf16"]["outside"],
        )
        for recipe in first["recipes"]
        for update in recipe["updates"]
        if update["lr"] == float(LR) and update["bf16"]["outside"]
    ]
    return [*found, Result("all recipes, one process", "no peer", "s", first["seconds"], MAX_SECONDS, "lower")]


def find(variable: str, name: str, parser: argparse.ArgumentParser) -> Path:
    """A file or folder that an environment variable names."""
    path = Path(os.environ.get(variable, "")) / name
    if variable not in os.environ or not path.exists():
        parser.error(f"{variable}: {'not set' if variable not in os.environ else f'{path} is not there'}; see --help")
    return path.resolve()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all layouts, and write all numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two texts on one process, four recipes")
    parser.add_argument("--output", type=Path, default=FOLDER / "diagnose.json")
    arguments = parser.parse_args(argv)
    model = find("MEGATRON_CALCLIP_SMOLLM2", "config.json", parser).parent
    problems = find("MEGATRON_CALCLIP_DATA", "gsm8k_train.jsonl", parser)
    layouts = {}
    with tempfile.TemporaryDirectory() as temporary:
        texts = Path(temporary) / "text.jsonl"
        write_texts(problems, texts)
        for name, layout in (QUICK if arguments.quick else LAYOUTS).items():
            print(f"\n{name}, {layout.num_processes} processes", flush=True)
            layouts[name] = measure(layout, model, texts, Path(temporary) / "layout.json")
    write_report(arguments.output, compare(layouts), layouts=layouts)


if __name__ == "__main__":
    main()
