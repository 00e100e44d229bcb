"""Convert a Hugging Face checkpoint into a Megatron-Core distributed checkpoint, in one process on a CPU.

    python tools/convert/hf_to_megatron.py --hf-model Qwen2.5-32B --megatron-path qwen2.5-32b --tp 8 --pp 2

writes `qwen2.5-32b/megatron` (the checkpoint) and `qwen2.5-32b/hf` (configuration, tokenizer). It can be loaded in any
layout: the vocabulary is padded to a multiple of 128 whatever TP is, so that `--tp`, `--pp`, `--vpp` and `--ep` only
set how files are cut. `--dry-run` lists what would be written, from the configuration alone.
"""

from __future__ import annotations

import argparse

from megatron_calclip.convert import bridge
from megatron_calclip.convert.command_line import add_shared_options, folder, progress_bar, run, torch_dtype
from megatron_calclip.convert.conversion import hf_to_megatron
from megatron_calclip.errors import UserError
from megatron_calclip.weights.dist_save import ShardLayout


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hf-model", required=True, type=folder, metavar="FOLDER", help="HF folder with safetensors")
    parser.add_argument("--megatron-path", type=folder, metavar="FOLDER", help="where the Megatron checkpoint goes")
    only_files = "; only sets how files are cut, any layout can load them"
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size" + only_files)
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size" + only_files)
    parser.add_argument("--vpp", type=int, default=1, help="virtual pipeline stages of each rank" + only_files)
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel size" + only_files)
    add_shared_options(parser, dtype_help="type of all tensors; default: the checkpoint's, BF16 for FP8 weights")
    parser.add_argument("--dry-run", action="store_true", help="list parameters, shard shapes and bytes; write nothing")
    return parser.parse_args()


def main() -> None:
    """Convert as the command line says."""
    arguments = parse()
    dtype = torch_dtype(arguments.torch_dtype)
    for name in ("tp", "pp", "vpp", "ep"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name}", f"is {getattr(arguments, name)}; give 1 or more")
    layout = ShardLayout(arguments.tp, arguments.pp, arguments.vpp, arguments.ep)
    if arguments.dry_run:
        from megatron_calclip.convert.plan import plan  # transformers takes seconds to import

        print("\n".join(plan(arguments.hf_model, layout=layout, dtype=dtype)))
        return
    if arguments.megatron_path is None:
        raise UserError("--megatron-path", "is missing; say where the checkpoint goes")
    if arguments.backend == "bridge":
        if layout != ShardLayout():
            raise UserError("--backend", "bridge sets how files are cut itself; leave out --tp, --pp, --vpp and --ep")
        bridge.hf_to_megatron(
            arguments.hf_model,
            arguments.megatron_path,
            dtype=dtype,
            overwrite=arguments.overwrite,
            verify=arguments.verify != "none",
        )
    else:
        with progress_bar() as progress:
            hf_to_megatron(
                arguments.hf_model,
                arguments.megatron_path,
                layout=layout,
                dtype=dtype,
                overwrite=arguments.overwrite,
                verify=arguments.verify,
                progress=progress,
            )
    print(f"{arguments.megatron_path}: written, verification: {arguments.verify}")


if __name__ == "__main__":
    run(main)
