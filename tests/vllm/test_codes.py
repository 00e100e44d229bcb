"""The emulated W8A8 schemes against vLLM's own quantisers, bit for bit: codes and scales.

Run by tools/test_vllm.sh, which makes vLLM's environment and names its interpreter.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_calclip.precision.quantize import E4M3, quantize
from megatron_calclip.precision.scaling import MXScaling
from megatron_calclip.rollout.fp8 import quantize_blocks, quantize_rows

pytestmark = pytest.mark.vllm

PYTHON = os.environ.get("MEGATRON_CALCLIP_VLLM_PYTHON")


def matrices() -> dict[str, Tensor]:
    """BF16 matrices: normal, outliers, log-normal, tiny, zero rows, a size that is no multiple of a block."""
    torch.manual_seed(0)
    outliers = torch.randn(128, 256)
    outliers[:, 7] *= 1000
    zeros = torch.randn(64, 256)
    zeros[3], zeros[:, 128:] = 0.0, 0.0
    cases = {
        "normal": torch.randn(128, 256),
        "outliers": outliers,
        "lognormal": torch.randn(128, 256) * (3 * torch.randn(128, 256)).exp(),
        "tiny": torch.randn(64, 256) * 1e-9,
        "zeros": zeros,
        "odd": torch.randn(130, 300),
    }
    return {name: x.to(torch.bfloat16) for name, x in cases.items()}


def mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and scales as bytes of E8M0."""
    quantized = quantize(x, MXScaling(), E4M3)
    return quantized.codes, (quantized.inverse_scale.view(torch.int32) >> 23).to(
        torch.uint8
    )  # E8M0: the exponent field


def tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """As our per-token inputs, but multiplied by the reciprocal scale.

    That is what vLLM does without a GPU; its kernel divides, as ours and its own weights do, and no CPU can run it.
    """
    _, scale = quantize_rows(x)
    return (x.float() * scale.reciprocal()).clamp(-448, 448).to(E4M3), scale


OURS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "channel": quantize_rows,
    "token": tokens,
    "block": lambda x: quantize_blocks(x, 128),
    "group": lambda x: quantize_blocks(x, 1),
    "mx": mx,
}


def test_codes_and_scales_are_vllms(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    if PYTHON is None:
        pytest.skip("MEGATRON_CALCLIP_VLLM_PYTHON names no interpreter with vLLM; run tools/test_vllm.sh")
    cases = matrices()
    save_file(cases, tmp_path / "matrices.safetensors")
    script = Path(__file__).with_name("vllm_codes.py")
    files = [str(tmp_path / "matrices.safetensors"), str(tmp_path / "codes.safetensors")]
    subprocess.run([PYTHON, str(script), *files], check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    theirs = load_file(tmp_path / "codes.safetensors")
    num_compared = 0
    for key in [key.removesuffix("/codes") for key in theirs if key.endswith("/codes")]:
        scheme, name = key.split("/")
        codes, scale = OURS[scheme](cases[name])
        expected = theirs[f"{key}/codes"]
        different = (codes.contiguous().view(torch.uint8) != expected).sum()
        assert different == 0, f"{key}: {different} of {expected.numel()} codes"
        assert torch.equal(scale.reshape(-1), theirs[f"{key}/scale"].reshape(-1).to(scale.dtype)), f"{key}: scales"
        num_compared += 1
    record_property("codes and scales equal to vLLM's own quantisers' bit for bit, matrices and schemes", num_compared)
    # `odd` is no multiple of 128 or 32; vLLM has two rules for tiny groups, and only a GPU runs the one that counts.
    assert num_compared == 5 * len(cases) - 4
