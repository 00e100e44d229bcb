"""Run by vLLM's interpreter: quantise given matrices by vLLM's own code.

    python vllm_codes.py INPUT.safetensors OUTPUT.safetensors

For each matrix `name`, float [M, K], writes `scheme/name/codes` (bytes of E4M3) and `scheme/name/scale`.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.online.fp8 import _fp8_channel_scale, _fp8_quant_per_channel, weight_amax
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.utils.deep_gemm import per_block_cast_to_fp8


def main() -> None:
    """Quantise everything."""
    results: dict[str, torch.Tensor] = {}

    def keep(scheme: str, name: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
        results[f"{scheme}/{name}/codes"] = codes.contiguous().view(torch.uint8)
        results[f"{scheme}/{name}/scale"] = scale.contiguous()

    with set_current_vllm_config(VllmConfig()):
        per_token = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
        per_group = QuantFP8(static=False, group_shape=GroupShape(1, 128))
        for name, x in load_file(sys.argv[1]).items():
            scale = _fp8_channel_scale(weight_amax(x, dim=-1, keepdim=True))
            keep("channel", name, _fp8_quant_per_channel(x, scale), scale)
            keep("block", name, *per_block_cast_to_fp8(x, [128, 128], use_ue8m0=False))
            keep("token", name, *per_token.forward_native(x))
            # On tiny groups vLLM's plain PyTorch fallback clamps the scale, its kernels (which ours follow) the amax.
            if x.shape[1] % 128 == 0 and name not in ("tiny", "zeros"):
                keep("group", name, *per_group.forward_native(x))
            if x.shape[1] % 32 == 0:
                keep("mx", name, *mxfp8_e4m3_quantize(x))
    save_file(results, sys.argv[2])


if __name__ == "__main__":
    main()
