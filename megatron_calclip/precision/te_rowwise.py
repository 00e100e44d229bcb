"""Rowwise FP8 in TransformerEngine's modules, which have no such recipe of their own. Not yet run on a GPU.

Megatron reaches the factories below by their dotted names (`fp8_recipe='custom'`, `fp8_quantizer_factory`; see
`recipes.megatron_fields`) and hands them to TransformerEngine's CustomRecipe. Every operand of a linear then comes to a
quantiser of ours, and every GEMM to its `qgemm`. Codes, scales and GEMMs are those of the `scaled_mm` backend: one scale
for each vector along the contracted dimension, from the BF16 source for each of the two dimensions, multiplied by
`torch._scaled_mm`.

Read against TransformerEngine 2.20.2, whose reference quantiser of current scaling these classes extend. Three of its
habits decide what Megatron is told beside the factory, and what `backend.check` refuses:

- The storage of a custom tensor hands its data over when it is saved for backward. A weight that is cached over
  micro-batches would be empty the second time, so Megatron must not cache (`disable_parameter_transpose_cache`).
- Weights that live in FP8 must be tensors, and such a storage is none: no `precision.fp8_param`.
- The gradient of a bias is fused with quantisation in a kernel that takes TransformerEngine's own quantisers only: no
  biases (Qwen2's query, key and value have some).

Importing this module needs TransformerEngine. Left out on purpose: fast accumulation in the forward GEMM, so that both
backends agree; FP8 all-gathers, since a shard's scales along the tokens are not those of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
    CurrentScalingQuantizerRef,
    CurrentScalingTensorRef,
)

from megatron_calclip.precision.linear import Operand, gemm
from megatron_calclip.precision.quantize import E4M3, E5M2, quantize
from megatron_calclip.precision.scaling import RowScaling


class RowwiseTensor(CurrentScalingTensorRef):
    """Codes of a matrix [M, K] along K (`data`, `scale` [M, 1]) and along M (`data_t` [K, M], `scale_t` [K, 1])."""

    def _create_transpose(self) -> None:
        """The base class would transpose the codes along K, whose scales are wrong along M.

        Raises:
            RuntimeError: always. A quantiser makes both, where both are asked for.
        """
        raise RuntimeError("rowwise FP8 codes cannot be transposed; quantise the source along its other dimension")


class RowwiseQuantizer(CurrentScalingQuantizerRef):
    """Quantises along both dimensions of a matrix, each from the source, by torchao's rowwise rule (`RowScaling`).

    Args:
        dtype: FP8 format of the codes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype=dtype, rowwise=True, columnwise=True, pow_2_scales=RowScaling().power_of_two)

    def _quantize(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Codes and inverse scales of a matrix, and those of its transpose; None for what is not used."""
        data = scale = data_t = scale_t = None
        if self.rowwise_usage:
            along_last = quantize(tensor, RowScaling(), self.dtype)
            data, scale = along_last.codes, along_last.inverse_scale
        if self.columnwise_usage:
            along_first = quantize(tensor, RowScaling(), self.dtype, dim=0)
            data_t, scale_t = along_first.codes.t().contiguous(), along_first.inverse_scale.t().contiguous()
        return data, scale, data_t, scale_t

    def quantize(self, tensor: Tensor, **_: Any) -> RowwiseTensor:
        """Quantise a tensor [..., K] for the usages that are set."""
        data, scale, data_t, scale_t = self._quantize(tensor.reshape(-1, tensor.shape[-1]))
        return RowwiseTensor(
            data=data,
            scale=scale,
            data_t=data_t,
            scale_t=scale_t,
            dtype=tensor.dtype,
            device=tensor.device,
            quant_dtype=self.dtype,
            original_shape=tensor.shape,
            _quantizer=self,
        )

    def qgemm(
        self,
        qx: Tensor,
        qw: Tensor,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: Tensor,
        sw: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
        **_: Any,
    ) -> Tensor:
        """qx @ qw.T with both operands' scales; TransformerEngine's contract.

        Args:
            qx: FP8 codes [rows, contracted].
            qw: FP8 codes [columns, contracted].
            m_params: TransformerEngine's choice of accumulation; not used.
            out_dtype: of the result.
            sx: float32 [rows, 1] inverse scales.
            sw: float32 [columns, 1] inverse scales.
            bias: [columns], or empty.
            out: where the result goes; None is a new tensor.
            accumulate: add to `out` instead.
        """
        result = gemm(Operand(qx, sx), Operand(qw, sw), dtype=out_dtype, backend="scaled_mm")
        if bias is not None and bias.numel():
            result = result + bias.to(out_dtype)
        if out is None:
            return result
        return out.add_(result) if accumulate else out.copy_(result)

    def transpose_qresult(self, qresult: CurrentScalingTensorRef) -> CurrentScalingTensorRef:
        """As `RowwiseTensor._create_transpose`: impossible."""
        return qresult._create_transpose()

    @property
    def supports_allgather_fp8(self) -> bool:
        """False: TransformerEngine gathers the source, and quantises the whole."""
        return False

    def is_requantization_safe(self) -> bool:
        """True: no state and no randomness, so an input may be saved as it was and quantised again in backward."""
        return True


def e4m3_factory(role: Any) -> RowwiseQuantizer:
    """E4M3 for every operand, as torchao's rowwise recipe has it.

    Args:
        role: TransformerEngine's QuantizerRole of the operand, or None.
    """
    return RowwiseQuantizer(E4M3)


def hybrid_factory(role: Any) -> RowwiseQuantizer:
    """E5M2 for gradients of outputs, E4M3 for everything else (`precision.format: hybrid`).

    Args:
        role: TransformerEngine's QuantizerRole of the operand, or None.
    """
    return RowwiseQuantizer(E5M2 if role is not None and role.tensor_type == "grad_output" else E4M3)
