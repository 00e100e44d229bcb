"""Speed and memory of conversion, and speed of the weight stream, beside what the machine can copy.

    python -m benchmarks.weights            # a random checkpoint of 1 GB: some minutes, 4 GB of disk
    python -m benchmarks.weights --quick    # 0.2 GB, once

Each conversion is a process of its own, started as a user starts it. Its peak resident size (ru_maxrss) holds interpreter,
torch and everything that was read; the limit is 1.3 x twice the largest tensor + 1 GB. Its speed is that of the whole
command, imports and verification included, beside a plain copy of the weight file that is flushed to the disk; repetitions
alternate with the copy, and the result is the median of the ratios.

The stream runs between two processes (gloo, TP 2), each with half of the same model as plain modules that carry Megatron's
names; its speed is bytes of full tensors by wall time on rank 0. Beside it stands a copy of the same tensors in memory, in the
same process and repetition.

Left out on purpose: CUDA, and reading from a cold disk: the page cache holds the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.results import FOLDER, Result, write_report
from megatron_calclip.weights.mapping import ModelShape, hf_specs, mapped_tensors
from megatron_calclip.weights.save import save_hf
from megatron_calclip.weights.stream import ParallelGroups, stream_hf

ROOT = Path(__file__).resolve().parents[1]
GIGABYTE = 10**9
MEMORY_SHARE = 1.3 * 2  # of the largest tensor, beside 1 GB for the process
MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 50_000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
BYTES_OF_LAYER, BYTES_OF_EMBEDDINGS = 93_610_000, 307_200_000  # of that model, about


def random_tensors(specs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Random bits; whole numbers of them are numbers, too, so nothing here depends on the values."""
    generator = torch.Generator().manual_seed(0)
    for name, spec in specs.items():
        yield name, torch.randint(-(2**14), 2**14, spec.shape, dtype=torch.int16, generator=generator).view(spec.dtype)


def write_model(folder: Path, num_bytes: int) -> ModelShape:
    """A random HF checkpoint of at least about that size; layers come in pairs, for two pipeline stages."""
    quick = num_bytes < BYTES_OF_EMBEDDINGS
    config = MODEL | ({"vocab_size": 2_000} if quick else {})
    layers = (num_bytes - (0 if quick else BYTES_OF_EMBEDDINGS)) // BYTES_OF_LAYER
    config["num_hidden_layers"] = max(2, layers + 2 - layers % 2)
    shape = ModelShape.from_hf_config(config)
    specs = hf_specs(shape, torch.bfloat16)
    save_hf(random_tensors(specs), folder, specs=specs, hf_config=config)
    return shape


def run_tool(name: str, *arguments: str) -> dict[str, float]:
    """Run a converter; wall seconds and peak resident bytes."""
    command = [sys.executable, str(ROOT / "tools" / "convert" / name), *arguments, "--overwrite"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return {"seconds": time.perf_counter() - start, "peak_bytes": usage.ru_maxrss * 1024}


def copy_file(source: Path, target: Path) -> float:
    """Seconds of a copy that is on the disk at the end."""
    start = time.perf_counter()
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - start


def conversions(root: Path, hf: Path, *, repetitions: int) -> dict[str, list[dict[str, float]]]:
    """Both directions, each beside a copy."""
    megatron, again = root / "megatron", root / "again"
    runs: dict[str, Callable[[], dict[str, float]]] = {
        "hf_to_megatron --tp 2 --pp 2": lambda: run_tool(
            "hf_to_megatron.py", "--hf-model", str(hf), "--megatron-path", str(megatron), "--tp", "2", "--pp", "2"
        ),
        "megatron_to_hf": lambda: run_tool("megatron_to_hf.py", str(megatron), "--hf-path", str(again)),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            copy = copy_file(hf / "model.safetensors", root / "copy")
            results[name].append(run() | {"copy_seconds": copy})
    return results


def half_model(shape: ModelShape, rank: int) -> nn.Module:
    """One TP rank's parameters under Megatron's names."""
    root: Any = nn.Module()
    root.decoder = nn.Module()
    root.decoder.layers = nn.ModuleList(nn.Module() for _ in range(shape.num_layers))
    for number, layer in enumerate(root.decoder.layers):
        layer.layer_number = number + 1
    for tensor in mapped_tensors(shape):
        *parents, leaf = tensor.name.split(".")
        module = root
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        module.register_parameter(leaf, nn.Parameter(torch.zeros(tensor.shard_shape(2), dtype=torch.bfloat16)))
    assert isinstance(root, nn.Module)
    return root


def stream_worker(config: Path, *, repetitions: int) -> None:
    """One of two processes: times the stream and a copy of what came."""
    dist.init_process_group("gloo")
    shape = ModelShape.from_hf_config(json.loads(config.read_text()))
    chunk = half_model(shape, dist.get_rank())
    groups = ParallelGroups(tp=dist.group.WORLD)
    results = []
    for _ in range(repetitions + 1):
        dist.barrier()
        copied = copy_seconds = 0.0
        start = time.perf_counter()
        for _, tensor in stream_hf([chunk], shape, groups):
            begin = time.perf_counter()
            tensor.clone()
            copy_seconds += time.perf_counter() - begin
            copied += tensor.nbytes
        seconds = time.perf_counter() - start - copy_seconds
        results.append({"gb": copied / GIGABYTE, "seconds": seconds, "copy_seconds": copy_seconds})
    if dist.get_rank() == 0:
        print(json.dumps(results[1:]))  # the first one allocates
    dist.destroy_process_group()


def streams(hf: Path, *, repetitions: int) -> list[dict[str, float]]:
    """The stream between two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["-m", "benchmarks.weights", "--worker", str(hf / "config.json"), "--repetitions", str(repetitions)]
    output = subprocess.run(
        [*launcher, *worker],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout
    results: list[dict[str, float]] = json.loads(output.strip().splitlines()[-1])
    return results


def compare(converted: dict[str, Any], streamed: list[dict[str, float]], *, peak_limit: float) -> list[Result]:
    """Speed by that of a copy, and memory by its limit."""
    results = []
    for name, runs in converted.items():
        speed = [run["copy_seconds"] / run["seconds"] for run in runs]
        peak = max(run["peak_bytes"] for run in runs)
        results += [
            Result.of(name, "file copy, flushed", "x speed", speed),
            Result(name, "limit of resident memory", "x memory", peak / peak_limit, 1.0, "lower"),
        ]
    speed = [run["copy_seconds"] / run["seconds"] for run in streamed]
    return [*results, Result.of("stream TP2 (gloo)", "copy in memory", "x speed", speed)]


def report(
    shape: ModelShape, num_bytes: int, converted: dict[str, Any], streamed: list[dict[str, float]]
) -> dict[str, Any]:
    """Medians, printed as a table."""
    largest = max(spec.nbytes for spec in hf_specs(shape, torch.bfloat16).values())
    limit = MEMORY_SHARE * largest + GIGABYTE
    result: dict[str, Any] = {"bytes": num_bytes, "largest_tensor": largest, "peak_limit": limit}
    result["load_average"] = os.getloadavg()[0]
    print(
        f"{num_bytes / GIGABYTE:.2f} GB, largest tensor {largest / GIGABYTE:.3f} GB, load average {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':<32} {'GB/s':>7} {'copy':>7} {'ratio':>7} {'peak GB':>8} {'limit':>7}")
    for name, runs in converted.items():
        row = {
            "gb_per_second": statistics.median(num_bytes / GIGABYTE / run["seconds"] for run in runs),
            "copy_gb_per_second": statistics.median(num_bytes / GIGABYTE / run["copy_seconds"] for run in runs),
            "ratio": statistics.median(run["copy_seconds"] / run["seconds"] for run in runs),
            "peak_bytes": max(run["peak_bytes"] for run in runs),
        }
        result[name] = row
        print(
            f"{name:<32} {row['gb_per_second']:>7.3f} {row['copy_gb_per_second']:>7.3f} {row['ratio']:>7.3f} "
            f"{row['peak_bytes'] / GIGABYTE:>8.3f} {limit / GIGABYTE:>7.3f}  "
            f"{'ok' if row['peak_bytes'] <= limit else 'EXCEEDED'}"
        )
    row = {
        "gb_per_second": statistics.median(run["gb"] / run["seconds"] for run in streamed),
        "copy_gb_per_second": statistics.median(run["gb"] / run["copy_seconds"] for run in streamed),
        "ratio": statistics.median(run["copy_seconds"] / run["seconds"] for run in streamed),
    }
    result["stream TP2"] = row
    print(
        f"{'stream TP2 (gloo)':<32} {row['gb_per_second']:>7.3f} {row['copy_gb_per_second']:>7.3f} {row['ratio']:>7.3f}"
    )
    return result


def main() -> None:
    """Measure, print a table, and write all numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a checkpoint of a fifth of the size, once")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=FOLDER / "weights.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        stream_worker(arguments.worker, repetitions=arguments.repetitions)
        return
    if arguments.quick:
        arguments.repetitions = 1
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        hf = root / "hf"
        shape = write_model(hf, GIGABYTE // 10 if arguments.quick else GIGABYTE)
        num_bytes = (hf / "model.safetensors").stat().st_size
        converted = conversions(root, hf, repetitions=arguments.repetitions)
        streamed = streams(hf, repetitions=arguments.repetitions)
    summary = report(shape, num_bytes, converted, streamed)
    results = compare(converted, streamed, peak_limit=summary["peak_limit"])
    write_report(arguments.output, results, summary=summary)


if __name__ == "__main__":
    main()
