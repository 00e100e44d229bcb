"""FP8 scales of every recipe: which elements share one, and how their largest magnitude (amax) becomes it.

A `Scaling` cuts a matrix into tiles and gives each tile a scale, exactly by the rule of the system that the recipe comes
from: TransformerEngine 2.x (`recipe_common.cuh`, `delayed_scaling.cu`, `ptx.cuh`) for per-tensor, delayed, blockwise and
MXFP8 scaling, torchao 0.18 (`float8_utils.py`) for rowwise scaling. What an element becomes under its scale is
`quantize.py`'s part.

Delayed scaling alone has state: the amaxes of earlier steps. Its scale is theirs, and a step ends with an update.

Left out on purpose: TransformerEngine's lower bound on amax (by default it has none), and when a step ends
(`learner/parallel_linear.py`).

Legend: a matrix (M, K) has m x k tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

ReduceAmax = Callable[[Tensor], Tensor]
"""Maps this rank's amaxes (float32, any shape) to the group's: a max all-reduce that returns its result."""

FP32_MAX = torch.finfo(torch.float32).max
FP32_MANTISSA_BITS = 23
FP32_MANTISSA_MASK = (1 << FP32_MANTISSA_BITS) - 1
E8M0_BIAS = 127
E8M0_NAN = 255
TWO_TO_MINUS_127 = 1 << 22  # bits of that FP32 number, a subnormal
TORCHAO_EPS = 1e-12  # torchao's lower bound on a row's amax


class Scaling(Protocol):
    """Which elements share a scale, and how an amax becomes one."""

    @property
    def power_of_two(self) -> bool:
        """Whether every scale is a power of two, so that dequantised codes are exact in BF16."""
        ...

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """Rows and columns of a tile, in a (rows, cols) matrix of which a GEMM contracts `dim`, -1 or 0."""
        ...

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scales and inverse scales, both (m, k) float32.

        Args:
            amax: (m, k) float32, largest magnitude per tile.
            dtype: FP8 format of the codes.
            source: dtype of the tensor that is quantised.
        """
        ...


def _scale_from_amax(amax: Tensor, largest: float, *, power_of_two: bool = False, overflow: float = FP32_MAX) -> Tensor:
    """largest / amax, or 1 where amax is 0, infinite or NaN (TransformerEngine's `compute_scale_from_amax`).

    `power_of_two` clears the mantissa, which rounds down; `overflow` stands in for a scale beyond FP32.
    """
    # A tensor numerator: torch computes number / tensor as number * reciprocal, often 1 ulp off.
    scale = torch.div(torch.full_like(amax, largest), amax)
    scale = torch.where(torch.isinf(scale), overflow, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & ~FP32_MANTISSA_MASK).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def _e8m0_from_amax(amax: Tensor, largest: float) -> Tensor:
    """Biased exponents of amax / largest rounded UP to a power of two (TransformerEngine's `float_to_e8m0`).

    They are int32: 0..254, or 255 where amax is NaN.
    """
    bits = (amax * (1.0 / largest)).view(torch.int32)
    # Any mantissa bit carries into the exponent, except in subnormals, where 0 stands for 2^-127.
    exponent = (bits + FP32_MANTISSA_MASK) >> FP32_MANTISSA_BITS
    exponent = torch.where(bits <= TWO_TO_MINUS_127, 0, exponent)
    return torch.where(torch.isnan(amax), E8M0_NAN, exponent.clamp(max=2 * E8M0_BIAS))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32 for int32 exponents in [-127, 127], built from bits: exact on every device."""
    bits = (exponent + E8M0_BIAS) << FP32_MANTISSA_BITS
    return torch.where(exponent == -E8M0_BIAS, TWO_TO_MINUS_127, bits).view(torch.float32)


@functools.cache
def _e8m0_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Scales and inverse scales [256] of all E8M0 bytes: see `MXScaling.scales`."""
    exponent = torch.arange(E8M0_NAN + 1, dtype=torch.int32, device=device)
    scale, inverse = _power_of_two(E8M0_BIAS - exponent), _power_of_two(exponent - E8M0_BIAS)
    scale[0] = 1.0
    scale[E8M0_NAN] = inverse[E8M0_NAN] = torch.nan
    return scale, inverse


@dataclass(frozen=True)
class TensorScaling:
    """One scale per tensor from its present amax (TransformerEngine's Float8CurrentScaling)."""

    power_of_two: bool = False

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """The whole matrix."""
        return rows, cols

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `_scale_from_amax`."""
        scale = _scale_from_amax(amax, torch.finfo(dtype).max, power_of_two=self.power_of_two)
        return scale, scale.reciprocal()


@dataclass(frozen=True)
class RowScaling:
    """One scale per vector along the contracted dimension (torchao's rowwise recipe).

    An infinite or NaN amax is not hidden: its vector dequantises to NaN, as in torchao.
    """

    power_of_two: bool = True

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """A row for `dim=-1`, a column for `dim=0`."""
        return (1, cols) if dim == -1 else (rows, 1)

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """Largest code / amax, then rounded down to a power of two.

        torchao divides in float64 and rounds to FP32, which gives the FP32 quotient.
        """
        scale = torch.div(torch.full_like(amax, torch.finfo(dtype).max), amax.clamp(min=TORCHAO_EPS))
        if self.power_of_two:
            # No mantissa mask: torchao's logarithm lifts a scale some ulp below a power of two up to it.
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return scale, scale.reciprocal()


@dataclass(frozen=True)
class BlockScaling:
    """One scale per block of B (TransformerEngine's Float8BlockScaling).

    1 x B for activations and gradients, B x B (`two_dimensional`) for weights. TransformerEngine wants sizes
    that are multiples of B; here the last block may be smaller, as if padded with zeros.
    """

    block_size: int = 128
    two_dimensional: bool = False
    power_of_two: bool = True

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """B x B, or a vector of B along the contracted dimension."""
        if self.two_dimensional:
            return self.block_size, self.block_size
        return (1, self.block_size) if dim == -1 else (self.block_size, 1)

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `_scale_from_amax`; a scale beyond FP32 becomes the largest number of the source's dtype."""
        largest, overflow = torch.finfo(dtype).max, torch.finfo(source).max
        scale = _scale_from_amax(amax, largest, power_of_two=self.power_of_two, overflow=overflow)
        return scale, scale.reciprocal()


@dataclass(frozen=True)
class MXScaling:
    """One E8M0 scale per 32 elements of the contracted dimension (TransformerEngine's MXFP8BlockScaling).

    The last block may be shorter, as if padded with zeros.
    """

    block_size: int = 32
    power_of_two: Literal[True] = True

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """A vector along the contracted dimension."""
        return (1, self.block_size) if dim == -1 else (self.block_size, 1)

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """2^(127 - e) and 2^(e - 127) for the biased exponent e of `_e8m0_from_amax`.

        Exponent 0 multiplies by 1, as in TransformerEngine's `exp2f_rcp` and torchao: a block whose amax is
        at most 448 * 2^-127 becomes zeros.
        """
        exponent = _e8m0_from_amax(amax, torch.finfo(dtype).max)
        scale, inverse = _e8m0_tables(amax.device)
        return scale[exponent], inverse[exponent]


class DelayedScaling(nn.Module):
    """One scale per tensor from the amaxes of earlier steps (TransformerEngine's DelayedScaling).

    Quantising takes the scale as it stands and records the tensor's amax; `update_delayed_scaling` ends a
    step. One object is one tensor's state: two buffers, saved and moved with the module that owns it.

    Args:
        dtype: FP8 format that the scale is for.
        history_length: number of steps whose amaxes are kept, this one included.
        amax_compute_algo: `max` of the history, or the `most_recent` amax.
        margin: the scale is 2^-margin of what would map amax to the largest code.

    Raises:
        ValueError: for a history that holds nothing or an unknown algorithm.
    """

    power_of_two: Literal[False] = False
    amax_history: Tensor
    """(history_length,) float32; slot 0 accumulates this step's amax."""
    scale: Tensor
    """() float32, 1 before the first update."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        history_length: int = 1024,
        amax_compute_algo: Literal["max", "most_recent"] = "max",
        margin: int = 0,
    ) -> None:
        super().__init__()
        if history_length < 1:
            raise ValueError(f"history_length is {history_length}; it must be at least 1")
        if amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo is {amax_compute_algo!r}; choose max or most_recent")
        self.amax_compute_algo = amax_compute_algo
        self.largest = torch.finfo(dtype).max * 2.0**-margin
        self.register_buffer("amax_history", torch.zeros(history_length))
        self.register_buffer("scale", torch.ones(()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedScaling:
        """Moves the buffers but keeps them FP32: `model.bfloat16()` must not round a scale."""
        self.amax_history = self.amax_history.to(fn(self.amax_history).device)
        self.scale = self.scale.to(fn(self.scale).device)
        return self

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """The whole matrix."""
        return rows, cols

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """Records `amax` and returns the scale of earlier steps. NaN is not recorded: it would rule the history's length of steps
        (TransformerEngine's kernels reduce amaxes with fmaxf, which drops NaN, too)."""
        self.amax_history[0] = torch.fmax(self.amax_history[0], amax.view(()))
        scale = self.scale.expand_as(amax)
        return scale, scale.reciprocal()

    def _update(self) -> None:
        """See `update_delayed_scaling`."""
        recorded = self.amax_history[0] != 0
        amax = self.amax_history.amax() if self.amax_compute_algo == "max" else self.amax_history[0]
        usable = recorded & torch.isfinite(amax) & (amax > 0)
        self.scale.copy_(torch.where(usable, _scale_from_amax(amax, self.largest), self.scale))
        rolled = self.amax_history.roll(-1)
        rolled[0] = 0
        self.amax_history.copy_(torch.where(recorded, rolled, self.amax_history))


@torch.no_grad()
def update_delayed_scaling(states: Sequence[DelayedScaling], *, reduce_amax: ReduceAmax | None = None) -> None:
    """Ends a step of delayed scaling: reduces the amaxes of all tensors at once, then updates every scale.

    The new scale is largest / amax; an amax that is 0, infinite or NaN keeps the old one. Then the history
    rolls. A tensor that recorded nothing keeps both. TransformerEngine does this when the outermost autocast
    exits with gradients enabled (inputs, weights), and after the backward pass (gradients).

    Args:
        states: the tensors' states, in the same order on every rank of the group.
        reduce_amax: max-reduces (len(states),) amaxes over a process group; None without one.
    """
    if reduce_amax is not None and states:
        reduced = reduce_amax(torch.stack([state.amax_history[0] for state in states]))
        for state, amax in zip(states, reduced, strict=True):
            state.amax_history[0] = amax
    for state in states:
        state._update()
