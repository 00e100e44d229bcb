"""The BF16 shadow pass on the Megatron-Core model and optimizer of another framework.

What: unwraps what trainers put around a `GPTModel`, and finds the FP32 masters of weights that live in FP8. Weights that
live in BF16 already equal their rounded masters, so no optimizer is needed for them. Left out on purpose: the pass itself
(`precision.shadow`), and how a framework computes log-probabilities inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from megatron_calclip.errors import UserError
from megatron_calclip.precision.shadow import MasterWeight, lives_in_fp8, shadow_pass


def bare_chunks(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """This rank's GPTModel chunks, without DistributedDataParallel, Float16Module and the like.

    Raises:
        UserError: for a model that has no `decoder.layers`, such as a multimodal or a non-Megatron one.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    bare = []
    for chunk in chunks:
        while isinstance(inner := getattr(chunk, "module", None), nn.Module):
            chunk = inner
        if not hasattr(getattr(chunk, "decoder", None), "layers"):
            raise UserError(
                "calclip",
                f"{type(chunk).__name__} is no Megatron-Core GPTModel, and shadow passes need one; set enabled: false",
            )
        bare.append(chunk)
    return bare


def master_weight(chunks: Sequence[nn.Module], optimizer: Any) -> MasterWeight:
    """Access to the masters of the weights that live in FP8.

    Args:
        chunks: bare chunks.
        optimizer: Megatron-Core's optimizer, or None where the framework uses another one.

    Raises:
        UserError: when some weights live in FP8 and their masters cannot be reached.
    """
    if any(lives_in_fp8(parameter) for chunk in chunks for parameter in chunk.parameters()):
        if optimizer is None:
            raise UserError(
                "fp8_param",
                "weights live in FP8, and their FP32 masters are not in Megatron-Core's distributed optimizer; "
                "keep the weights in BF16 (FP8 compute is not affected), or use that optimizer",
            )
        from megatron_calclip.learner.masters import MasterWeights

        return MasterWeights(optimizer).full

    def refuse(parameter: nn.Parameter) -> Any:
        raise AssertionError(f"no weight lives in FP8, yet one of shape {tuple(parameter.shape)} asks for its master")

    return refuse


@contextlib.contextmanager
def framework_shadow_pass(model: nn.Module | Sequence[nn.Module], optimizer: Any) -> Iterator[None]:
    """Inside the block, forward passes of the model are BF16 on the master weights; see `precision.shadow.shadow_pass`.

    Args:
        model: the framework's model or list of chunks, wrapped as it is.
        optimizer: Megatron-Core's optimizer; None is enough while all weights live in BF16.

    Raises:
        UserError: see `bare_chunks` and `master_weight`.
    """
    chunks = bare_chunks(model)
    with shadow_pass(chunks, master=master_weight(chunks, optimizer)):
        yield
