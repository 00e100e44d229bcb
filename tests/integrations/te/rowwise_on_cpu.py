"""Our quantiser under TransformerEngine's own custom-recipe code, on a CPU: run by `test_te_recipes.py` beside the wheel.

TransformerEngine's compiled part is not there. Stubs stand in for it while its Python is imported: any name exists, and
calling one fails. What runs then is the real `custom_gemm`, the real recipe state that calls the factory for each role, the
real high-precision gather, and the real usage flags, in the order in which TransformerEngine's linear sets them.
"""

from __future__ import annotations

import enum
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TransformerEngine then loads no shared libraries
os.environ["NVTE_TORCH_COMPILE"] = "0"

COMPILED = "transformer_engine_torch"
HOLLOW = ("transformer_engine.pytorch", "transformer_engine.pytorch.module", "transformer_engine.pytorch.tensor.triton")
"""Packages whose own imports are for a GPU; the modules in them are imported one by one."""
UNUSED = ("onnx", "onnx_ir", "onnxscript", "onnxscript.onnx_types")
"""Imported by its export."""


class _Anything(type):
    """A class of which every attribute is 0, as far as enumerations of the compiled part are read at import."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class _Compiled(types.ModuleType):
    """The compiled part."""

    class DType(enum.IntEnum):
        """Its numbers of types, which Python code looks up in both directions."""

        kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = 0, 2, 4, 5, 6, 7, 8, 10

    class NVTE_Fused_Attn_Backend(enum.IntEnum):
        """As `DType`."""

        NVTE_No_Backend, NVTE_F16_arbitrary_seqlen, NVTE_FP8 = -1, 1, 2

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return _Anything(name, (), {})

        def call(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{name} needs a GPU")

        return call


def import_transformer_engine() -> None:
    """Import its Python part over stubs."""
    sys.modules[COMPILED] = _Compiled(COMPILED)
    for name in UNUSED:
        sys.modules[name] = mock.MagicMock(__spec__=ModuleSpec(name, None))
    import transformer_engine.common

    for name in HOLLOW:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(transformer_engine.__path__[0], *name.split(".")[1:]))]
        sys.modules[name] = package
    import transformer_engine.pytorch.tensor  # first: its modules import each other in a circle


def quantizers(factory: Any, mode: str, roles: list[str]) -> dict[str, Any]:
    """What TransformerEngine makes of a factory for a linear."""
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.quantization import CustomRecipeState, QuantizerRole

    state = CustomRecipeState(
        CustomRecipe(qfactory=factory),
        mode=mode,
        num_quantizers=len(roles),
        device=torch.device("cpu"),
        roles=[QuantizerRole(module_type="linear", tensor_type=role) for role in roles],
    )
    return dict(zip(roles, state.make_quantizers(), strict=True))


def check_linear(format: str, *, tokens: int, dtype: torch.dtype) -> None:
    """All three GEMMs of a linear in the order of TransformerEngine's, equal to those of our `scaled_mm` backend."""
    from transformer_engine.pytorch.custom_recipes.gemm import custom_gemm

    from megatron_calclip.config import PrecisionConfig
    from megatron_calclip.precision import te_rowwise
    from megatron_calclip.precision.linear import Fp8Gemms
    from megatron_calclip.precision.recipes import resolve

    torch.manual_seed(tokens)
    x = torch.randn(tokens, 64, dtype=dtype) * torch.logspace(-3, 3, tokens)[:, None].to(dtype)
    weight, dy = torch.randn(96, 64, dtype=dtype), 1e-4 * torch.randn(tokens, 96, dtype=dtype)
    factory = {"e4m3": te_rowwise.e4m3_factory, "hybrid": te_rowwise.hybrid_factory}[format]
    made = quantizers(factory, "forward", ["input", "weight", "output"]) | quantizers(
        factory, "backward", ["grad_output"]
    )

    qx, qw = made["input"](x), made["weight"](weight)
    y = custom_gemm(qw, qx, None, out_dtype=dtype, layout="TN")[0]
    qx.update_usage(rowwise_usage=False, columnwise_usage=True)  # saved for the weight's gradient only
    qx, saved = (lambda tensors, storage: (storage, tensors))(*qx.prepare_for_saving())
    assert qx.restore_from_saved([*saved]) == []
    qdy = made["grad_output"](dy)
    qw.update_usage(columnwise_usage=True)
    dx = custom_gemm(qw, qdy, None, out_dtype=dtype, layout="NN", grad=True)[0]
    dw = custom_gemm(qx, qdy, None, out_dtype=dtype, layout="NT", grad=True)[0]

    recipe = resolve(PrecisionConfig(recipe="rowwise", format=format))
    assert recipe is not None
    ours_x, ours_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    ours = Fp8Gemms(recipe, backend="scaled_mm")(ours_x, ours_weight)
    ours.backward(dy)
    for name, theirs, expected in (("y", y, ours), ("dx", dx, ours_x.grad), ("dw", dw, ours_weight.grad)):
        assert theirs.dtype == dtype and torch.equal(theirs, expected), (format, tokens, name)
    print(f"ok   {format}, {tokens} tokens, {dtype}: y, dx and dw equal")


def check_traps() -> None:
    """What would go wrong without an error."""
    from transformer_engine.pytorch.module._common import (
        can_reconstruct_wgrad_input_from_original,
        set_quantizer_amax_reduction_group,
    )
    from transformer_engine.pytorch.tensor.utils import is_custom

    from megatron_calclip.precision.te_rowwise import e4m3_factory

    quantizer = e4m3_factory(None)
    assert is_custom(quantizer) and can_reconstruct_wgrad_input_from_original(quantizer)
    assert not quantizer.supports_only_rowwise_all_gather()
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    before = quantizer(x)
    # Under sequence parallelism TransformerEngine names a group; rows are whole, so nothing is reduced over it.
    set_quantizer_amax_reduction_group(quantizer, object())
    assert torch.equal(quantizer(x).scale, before.scale)
    quantizer.set_usage(rowwise=True, columnwise=False)
    half = quantizer(x)
    assert half.data_t is None and half.scale_t is None
    try:
        half.update_usage(columnwise_usage=True)
    except RuntimeError as error:
        assert "cannot be transposed" in str(error)
    else:
        raise AssertionError("codes along one dimension passed for codes along the other")
    print("ok   usages")


def main() -> None:
    """All checks."""
    import_transformer_engine()
    for tokens in (32, 48):
        check_linear("e4m3", tokens=tokens, dtype=torch.bfloat16)
    check_traps()
    # A CPU multiplies E5M2 by E4M3, too, where its kernel has that; a GPU always does.
    check_linear("hybrid", tokens=32, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
