"""Convert a Megatron-Core distributed checkpoint, saved by any layout, into a Hugging Face checkpoint.

    python tools/convert/megatron_to_hf.py RUN_DIR/step_200                  # into RUN_DIR/step_200_hf
    python tools/convert/megatron_to_hf.py --megatron-path iter_0000100 --hf-model Qwen2.5-32B --hf-path out

Checkpoints of this project's runs and of `hf_to_megatron.py` carry configuration and tokenizer; for others `--hf-model`
names a folder that has them. Where a checkpoint holds FP32 masters they are what is converted: cast to the type of the
weights they are the weights, and behind FP8 parameters they are the better values.
"""

from __future__ import annotations

import argparse

from megatron_calclip.convert import bridge
from megatron_calclip.convert.command_line import add_shared_options, folder, progress_bar, run, torch_dtype
from megatron_calclip.convert.conversion import megatron_to_hf
from megatron_calclip.errors import UserError
from megatron_calclip.weights.save import DEFAULT_SHARD_BYTES

GIGABYTE = 10**9


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("checkpoint", nargs="?", type=folder, metavar="MEGATRON_PATH", help="the Megatron checkpoint")
    source.add_argument("--megatron-path", type=folder, metavar="FOLDER", help="the same, as an option")
    parser.add_argument("--hf-path", type=folder, metavar="FOLDER", help="where it goes; default: MEGATRON_PATH_hf")
    parser.add_argument(
        "--hf-model", type=folder, metavar="FOLDER", help="HF folder with configuration and tokenizer; default: its own"
    )
    add_shared_options(
        parser,
        dtype_help="type of all tensors; default: the checkpoint's; float32 gives the masters where there are any",
    )
    parser.add_argument(
        "--fp8-recipe",
        choices=("blockwise",),
        help="quantise linears to FP8, 128 x 128 blocks (weight_scale_inv), as vLLM reads it; not yet loaded by a GPU vLLM",
    )
    parser.add_argument(
        "--fp8-scales",
        choices=("power_of_two", "fp32"),
        default="power_of_two",
        help="power_of_two: as TransformerEngine's blockwise recipe; fp32: as DeepSeek-V3",
    )
    parser.add_argument(
        "--max-shard-gb", type=float, default=DEFAULT_SHARD_BYTES / GIGABYTE, help="most GB of tensors in a file"
    )
    return parser.parse_args()


def main() -> None:
    """Convert as the command line says."""
    arguments = parse()
    megatron_path = arguments.checkpoint or arguments.megatron_path
    hf_path = arguments.hf_path or megatron_path.with_name(megatron_path.name + "_hf")
    if arguments.max_shard_gb <= 0:
        raise UserError("--max-shard-gb", f"is {arguments.max_shard_gb}; give a positive number")
    if arguments.backend == "bridge":
        if arguments.hf_model is None:
            raise UserError("--hf-model", "is missing; --backend bridge needs a HF checkpoint of the architecture")
        if arguments.fp8_recipe or arguments.torch_dtype:
            raise UserError(
                "--backend", "bridge writes the checkpoint's own type; leave out --fp8-recipe and --torch-dtype"
            )
        bridge.megatron_to_hf(
            megatron_path,
            hf_path,
            hf_model=arguments.hf_model,
            overwrite=arguments.overwrite,
            verify=arguments.verify != "none",
        )
    else:
        with progress_bar() as progress:
            megatron_to_hf(
                megatron_path,
                hf_path,
                hf_model=arguments.hf_model,
                dtype=torch_dtype(arguments.torch_dtype),
                fp8_power_of_two=arguments.fp8_scales == "power_of_two" if arguments.fp8_recipe else None,
                max_shard_bytes=int(arguments.max_shard_gb * GIGABYTE),
                overwrite=arguments.overwrite,
                verify=arguments.verify,
                progress=progress,
            )
    print(f"{hf_path}: written, verification: {arguments.verify}")


if __name__ == "__main__":
    run(main)
