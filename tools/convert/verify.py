"""Compare two checkpoints, each HF or Megatron: bit for bit, or the logits of their models.

    python tools/convert/verify.py Qwen2.5-0.5B qwen2.5-0.5b                  # every tensor, every bit
    python tools/convert/verify.py Qwen2.5-0.5B qwen2.5-0.5b --logits "The capital of France is"

Exit code 0 when they agree, 1 when not; then the first tensor that differs is printed with its statistics. `--logits`
runs a HF checkpoint in transformers and a Megatron one in Megatron, in FP32, so it also finds an error that a conversion
makes in both directions. Tokens come from the tokenizer of the first checkpoint that has one.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.convert.checkpoints import Checkpoint, open_checkpoint
from megatron_calclip.convert.command_line import folder, progress_bar, run
from megatron_calclip.convert.verification import first_difference
from megatron_calclip.errors import EXIT_FAILED, UserError

DEFAULT_TOLERANCE = 1e-5  # FP32 in another order of summation
_NUMBERS = re.compile(r"\d+(,\d+)*")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("expected", type=folder, metavar="EXPECTED", help="HF or Megatron checkpoint")
    parser.add_argument("actual", type=folder, metavar="ACTUAL", help="HF or Megatron checkpoint")
    parser.add_argument(
        "--hf-model",
        type=folder,
        metavar="FOLDER",
        help="HF folder with the configuration, for bare Megatron checkpoints",
    )
    parser.add_argument("--logits", metavar="TEXT", help="compare logits on this text, or on token ids such as 1,5,7")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=DEFAULT_TOLERANCE,
        help="largest |difference| of logits, as a share of the largest |logit| (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> int:
    """Compare as the command line says; 0 when the checkpoints agree."""
    arguments = parse()
    expected, actual = (
        open_checkpoint(path, hf_model=arguments.hf_model) for path in (arguments.expected, arguments.actual)
    )
    if arguments.logits is not None:
        return compare_logits(expected, actual, arguments.logits, tolerance=arguments.tolerance)
    with progress_bar() as progress:
        stream = progress(expected.source, "comparing").stream()
        difference = first_difference(stream, expected.source.specs, actual.source)
    num_bytes = sum(spec.nbytes for spec in expected.source.specs.values())
    print(difference or f"the same, bit for bit: {len(expected.source.specs)} tensors, {num_bytes:,} bytes")
    return 0 if difference is None else EXIT_FAILED


def compare_logits(expected: Checkpoint, actual: Checkpoint, text: str, *, tolerance: float) -> int:
    """Print how far the logits of two checkpoints are apart; 0 when within the tolerance."""
    tokens = encode(text, expected, actual)
    first, second = logits(expected, tokens), logits(actual, tokens)
    if first.shape != second.shape:
        print(f"logits are {list(second.shape)} instead of {list(first.shape)}")
        return EXIT_FAILED
    largest, scale = float((first - second).abs().max()), float(first.abs().max())
    verdict = largest <= tolerance * scale
    print(
        f"logits of {len(tokens)} tokens: largest |difference| {largest:.3g}, largest |logit| {scale:.4g}, "
        f"tolerance {tolerance:g} of it: {'the same' if verdict else 'NOT the same'}"
    )
    return 0 if verdict else EXIT_FAILED


def logits(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    """Logits [t, vocab_size] by the program that the checkpoint is for."""
    from megatron_calclip.learner.logits import megatron_logits, transformers_logits

    if checkpoint.weights_folder is None:
        return transformers_logits(checkpoint.folder, tokens)
    return megatron_logits(checkpoint.weights_folder, checkpoint.hf_folder, tokens)


def encode(text: str, *checkpoints: Checkpoint) -> Tensor:
    """Tokens int64 [t] of a text, or the given ids.

    Raises:
        UserError: when there are none, no tokenizer, or ids beyond the vocabulary.
    """
    if _NUMBERS.fullmatch(text):
        ids = [int(number) for number in text.split(",")]
    else:
        ids = _tokenizer([checkpoint.hf_folder for checkpoint in checkpoints])(text)["input_ids"]
    vocab_size = checkpoints[0].shape.vocab_size
    if not ids or max(ids) >= vocab_size:
        raise UserError("--logits", f"{text!r} gives no tokens below {vocab_size}; give another text")
    return torch.tensor(ids)


def _tokenizer(folders: list[Path]) -> Any:
    from transformers import AutoTokenizer

    for path in folders:
        if (path / "tokenizer_config.json").is_file() or (path / "tokenizer.json").is_file():
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
    raise UserError("--logits", "neither checkpoint has a tokenizer; give token ids such as 1,5,7")


if __name__ == "__main__":
    run(main)
