"""Token log-probabilities and entropy that never copy the [tokens, vocabulary] matrix in FP32.

At a vocabulary of 152k the plain `log_softmax(logits.float())` is the largest allocation of a learner:
several FP32 copies of the logits, each written to and read from main memory. Here each tile of
the logits is reduced on its own and the tiles are merged by their maxima (the rule of the online softmax,
Milakov and Gimelshein 2018): two FP32 work buffers of one tile, allocated once per call and small enough for
the cache, replace those copies. The backward pass rebuilds each tile of the softmax from the logits and the
saved row maximum and log-sum.

* `token_log_probs` takes logits that exist already.
* `linear_token_log_probs` takes the hidden states and the output weight and multiplies tile by tile (the idea
  of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024): the logits never exist.

Rules shared by both forms:

* Every reduction is FP32, whatever the type of the logits: a log-prob reduced in BF16 is wrong by several
  hundredths, which is coarser than the clip bounds of a policy-gradient loss.
* With tensor parallelism each rank holds an equal, consecutive shard of the vocabulary. The ranks exchange
  one MAX and one SUM all-reduce, four floats per token in all, in the forward pass only.
* The row maximum is subtracted before the temperature divides, so that large logits lose no digits.

Left out on purpose: label smoothing and z-loss (no policy-gradient loss uses them), dropping of masked tokens
(select the rows before the call), a bias of the output linear (Megatron models have none), and device
kernels. A CUDA device runs the same code with larger tiles; a fused library kernel for it (Triton, Liger)
belongs in `_TokenLogProbs` and `_LinearTokenLogProbs`, behind the same two functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Elements of an FP32 work buffer. On a CPU 2^17 are 512 KiB: the logits of a chunk and both buffers fit then
# in an L2 cache of 2 MiB. A CUDA device wants few, large kernels instead.
CPU_CHUNK_ELEMENTS = 2**17
CUDA_CHUNK_ELEMENTS = 2**25
# Columns of a tile of existing logits: enough for long rows in memory, few enough for many rows in a chunk.
TILE_COLUMNS = 8192
# Tile of the fused linear, large enough that its matrix products run at full speed.
CPU_LINEAR_TILE = (1024, 2048)
CUDA_LINEAR_TILE = (4096, 8192)

# Maximum of a shard without columns. Finite, so that its difference to a real maximum times an empty sum is 0
# and not NaN.
EMPTY_MAXIMUM = -1e30


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target and, on request, the entropy of each row, from logits.

    Under tensor parallelism all ranks of `group` call it together, with equal `targets` and, in the backward
    pass, equal upstream gradients. All receive equal results, and each the gradient of its own shard.

    Args:
        logits: [tokens, local vocabulary], FP32, BF16 or FP16, any strides. The entropy is NaN in a row that
            holds an infinite logit.
        targets: [tokens], int64, global token ids. Masked tokens need a valid id too; mask the result.
        temperature: The softmax is over `logits / temperature`.
        vocab_size: True size of the global vocabulary; columns beyond it are padding: they take no part in
            the softmax and their gradient is zero. None means that no column is padding.
        group: Tensor-parallel group over which the vocabulary is sharded; None means that it is not.
        with_entropy: Return the entropy too, in nats, of the distribution at `temperature`.
        entropy_grad: Let gradients flow through the entropy, for an entropy bonus; else it is detached.
        inplace_backward: Write the gradient over the logits, which saves a matrix of their size. Only for a
            caller that owns the logits and reads them no more (the rule of Megatron's vocab-parallel cross
            entropy); a second backward pass then raises autograd's in-place error.

    Returns:
        Log-probabilities, [tokens] FP32, and entropy, [tokens] FP32, or None.

    Raises:
        ValueError: If shapes, dtypes, options or target ids are invalid. The check of the ids costs one
            synchronisation with a CUDA device.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; flatten them to [tokens, vocabulary]")
    if inplace_backward and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward would overwrite a leaf tensor; pass logits that a model computed")
    spec = _make_spec(
        logits,
        targets,
        stored_columns=logits.shape[1],
        tile=(max(len(logits), 1), TILE_COLUMNS),  # tiles of existing logits have all rows
        temperature=temperature,
        vocab_size=vocab_size,
        group=group,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
    )
    return _TokenLogProbs.apply(logits, targets, spec, inplace_backward)


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    tile_rows: int | None = None,
    tile_columns: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability and entropy of `hidden @ weight.T`, tile by tile: the logits never exist in full.

    The products have the dtype of `hidden`, so the results are those of `token_log_probs` behind an output
    linear of that dtype. The backward pass computes each tile of logits again (one more matrix product).

    The gradient of `weight` is summed over tokens in FP32 and rounded once to the dtype of `weight`: a hook
    that adds it to an FP32 main gradient sees one rounding per call, not one per tile.

    Under tensor parallelism the gradient of `hidden` is PARTIAL: it is the contribution of the vocabulary
    shard of this rank, and the sum over `group` is left to the caller. Pass hidden states through Megatron's
    `copy_to_tensor_model_parallel_region` (or its sequence-parallel gather), whose backward pass sums.

    Args:
        hidden: [tokens, hidden size], FP32, BF16 or FP16.
        weight: [local vocabulary, hidden size], same dtype.
        targets: [tokens], int64, global token ids. Masked tokens need a valid id too; mask the result.
        temperature: As in `token_log_probs`.
        vocab_size: As in `token_log_probs`; rows of `weight` beyond it are padding.
        group: As in `token_log_probs`.
        with_entropy: As in `token_log_probs`.
        entropy_grad: As in `token_log_probs`.
        tile_rows: Tokens of one tile; None chooses by device.
        tile_columns: Vocabulary entries of one tile; None chooses by device.

    Returns:
        Log-probabilities, [tokens] FP32, and entropy, [tokens] FP32, or None.

    Raises:
        ValueError: As in `token_log_probs`, or if `hidden` and `weight` do not fit together.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; "
            "pass [tokens, hidden size] and [vocabulary, hidden size]"
        )
    if hidden.dtype != weight.dtype or hidden.device != weight.device:
        raise ValueError("hidden and weight differ in dtype or device; convert one of them")
    default_tile = CPU_LINEAR_TILE if hidden.device.type == "cpu" else CUDA_LINEAR_TILE
    spec = _make_spec(
        hidden,
        targets,
        stored_columns=weight.shape[0],
        tile=(
            default_tile[0] if tile_rows is None else tile_rows,
            default_tile[1] if tile_columns is None else tile_columns,
        ),
        temperature=temperature,
        vocab_size=vocab_size,
        group=group,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
    )
    return _LinearTokenLogProbs.apply(hidden, weight, targets, spec)


@dataclass(frozen=True)
class _Spec:
    """What one call computes, the part of the vocabulary that this rank holds, and the shape of its tiles."""

    inverse_temperature: float
    first_id: int  # global id of local column 0
    num_columns: int  # local columns of the true vocabulary; stored columns beyond it are padding
    group: dist.ProcessGroup | None
    with_entropy: bool
    entropy_grad: bool
    tile_rows: int
    tile_columns: int
    chunk_rows: int  # rows of a tile that are in the work buffers together

    def row_tiles(self, num_rows: int) -> Iterator[slice]:
        return _slices(num_rows, self.tile_rows)

    def column_tiles(self) -> list[slice]:
        return list(_slices(self.num_columns, self.tile_columns))

    def work_buffers(self, device: torch.device) -> Tensor:
        """Memory for two FP32 chunks, allocated once per call; see `_view`."""
        return torch.empty(2, self.chunk_rows * self.tile_columns, dtype=torch.float32, device=device)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _view(memory: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """The front of flat memory, [..., elements], as [..., rows, columns]."""
    return memory[..., : num_rows * num_columns].view(*memory.shape[:-1], num_rows, num_columns)


def _make_spec(
    inputs: Tensor,
    targets: Tensor,
    *,
    stored_columns: int,
    tile: tuple[int, int],
    temperature: float,
    vocab_size: int | None,
    group: dist.ProcessGroup | None,
    with_entropy: bool,
    entropy_grad: bool,
) -> _Spec:
    """Check what both forms have in common and locate the vocabulary shard of this rank."""
    if inputs.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"dtype {inputs.dtype} is not supported; use FP32, BF16 or FP16")
    if targets.shape != inputs.shape[:1] or targets.dtype != torch.int64 or targets.device != inputs.device:
        raise ValueError(f"targets do not fit; pass int64 of shape ({inputs.shape[0]},) on {inputs.device}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}; it must be positive and finite")
    if entropy_grad and not with_entropy:
        raise ValueError("entropy_grad without an entropy; set with_entropy=True")
    if min(tile) < 1:
        raise ValueError(f"a tile of {tile[0]} x {tile[1]} is empty; use positive sizes")
    world_size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    num_stored = stored_columns * world_size
    vocab_size = num_stored if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= num_stored:
        raise ValueError(f"vocab_size is {vocab_size}; it must lie in 1..{num_stored}, the stored columns")
    if bool(((targets < 0) | (targets >= vocab_size)).any()):
        raise ValueError(f"targets hold ids outside 0..{vocab_size - 1}; give masked tokens a valid id too")
    first_id = rank * stored_columns
    num_columns = min(max(vocab_size - first_id, 0), stored_columns)
    tile_rows, tile_columns = min(tile[0], max(len(inputs), 1)), min(tile[1], max(num_columns, 1))
    chunk_elements = CPU_CHUNK_ELEMENTS if inputs.device.type == "cpu" else CUDA_CHUNK_ELEMENTS
    return _Spec(
        inverse_temperature=1.0 / temperature,
        first_id=first_id,
        num_columns=num_columns,
        group=group if world_size > 1 else None,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        chunk_rows=max(1, min(tile_rows, chunk_elements // tile_columns)),
    )


def _locate(local_targets: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Column of each target, clamped into the columns, [rows, 1], and whether it is one of them, [rows]."""
    inside = (local_targets >= 0) & (local_targets < num_columns)
    return local_targets.clamp(0, num_columns - 1).unsqueeze(1), inside


def _shift(logits: Tensor, maximum: Tensor, spec: _Spec, *, out: Tensor) -> None:
    """out = (logits - maximum) / temperature, all FP32; maximum is [rows, 1] and `out` may be `logits`."""
    torch.sub(logits, maximum, out=out)
    if spec.inverse_temperature != 1.0:
        out.mul_(spec.inverse_temperature)


class _TileReduction:
    """Reduces each tile of the local shard by itself, then merges them; no tile waits for the one before."""

    def __init__(self, spec: _Spec, num_rows: int, device: torch.device) -> None:
        self._spec = spec
        self._buffers = spec.work_buffers(device)
        # With x = (logit - maximum) / temperature in a tile: the maximum, the sum of exp(x), and the sum of
        # exp(x) x, which stays 0 where no entropy is asked for. Types are explicit, as model code may have
        # set a default type of BF16. A shard of padding only has a tile too: it takes part in the exchange.
        num_tiles = max(len(spec.column_tiles()), 1)
        self._partials = torch.zeros(num_tiles, 3, num_rows, dtype=torch.float32, device=device)
        self._partials[:, 0] = EMPTY_MAXIMUM

    def add(self, logits: Tensor, rows: slice, tile: int) -> None:
        """Reduce `logits`, the given rows of the given column tile."""
        step = self._spec.chunk_rows
        buffers = _view(self._buffers, min(step, len(logits)), logits.shape[1])
        partials = self._partials[tile, :, rows].split(step, dim=1)
        for values, (maximum, sum_exp, weighted) in zip(logits.split(step), partials, strict=True):
            shifted, weights = buffers[:, : len(values)]
            if values.dtype != torch.float32:
                # Faster than reducing BF16: all later passes find FP32 values in the cache.
                values = shifted.copy_(values)
            torch.amax(values, -1, out=maximum)
            _shift(values, maximum.unsqueeze(1), self._spec, out=shifted)
            torch.exp(shifted, out=weights)
            torch.sum(weights, -1, out=sum_exp)
            if self._spec.with_entropy:
                # Not a dot product: `sum` adds in a tree, a BLAS dot of 152k FP32 terms is off by up to 1e-3.
                torch.sum(weights.mul_(shifted), -1, out=weighted)

    def merge(self, target_logits: Tensor, owned: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Merge the tiles of all ranks; `owned` marks the rows whose target this rank holds.

        Returns:
            Log-probabilities, entropy (void unless asked for), maximum and log of the sum, all [tokens].
        """
        maxima, sums_exp, sums_weighted = self._partials.unbind(1)
        maximum = maxima.amax(0)
        if self._spec.group is not None:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self._spec.group)
        shift = (maxima - maximum) * self._spec.inverse_temperature
        scale = shift.exp()
        sum_exp = (scale * sums_exp).sum(0)
        weighted = (scale * (sums_weighted + shift * sums_exp)).sum(0)
        target = torch.where(owned, (target_logits - maximum) * self._spec.inverse_temperature, 0.0)
        totals = torch.stack([sum_exp, weighted, target])
        if self._spec.group is not None:
            dist.all_reduce(totals, op=dist.ReduceOp.SUM, group=self._spec.group)
        sum_exp, weighted, target = totals
        log_sum = sum_exp.log()
        return target - log_sum, log_sum - weighted / sum_exp, maximum, log_sum


class _TileGradient:
    """Gradient of the loss by the logits, tile by tile.

    With p the softmax, g and h the upstream gradients of log-prob and entropy H, t the target and T the
    temperature, it is ((j == t) g - p_j (g + h (log p_j + H))) / T. As p_j = exp(x_j) / S and
    log p_j = x_j - log S, the second term is exp(x_j) (constant + slope x_j) with two numbers per row.
    """

    def __init__(self, ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> None:
        self._spec: _Spec = ctx.spec
        targets, maximum, log_sum, entropy = ctx.saved_tensors[-4:]
        self._local_targets = targets - self._spec.first_id
        self._buffers = self._spec.work_buffers(targets.device)
        g = torch.zeros_like(maximum) if grad_log_probs is None else grad_log_probs
        h = torch.zeros_like(maximum) if grad_entropy is None else grad_entropy
        self._has_slope = grad_entropy is not None
        scale = (-self._spec.inverse_temperature) * (-log_sum).exp()
        constant = scale * (g + h * (entropy - log_sum))
        self._row_terms = torch.stack([maximum, constant, scale * h, g * self._spec.inverse_temperature])

    def write(self, logits: Tensor, rows: slice, columns: slice, *, out: Tensor) -> None:
        """Write the gradient of one tile of logits to `out`, which may be `logits`."""
        step = self._spec.chunk_rows
        buffers = _view(self._buffers, min(step, len(logits)), logits.shape[1])
        row_terms = self._row_terms[:, rows].unsqueeze(-1).split(step, dim=1)
        local_targets = (self._local_targets[rows] - columns.start).split(step)
        chunks = zip(logits.split(step), out.split(step), row_terms, local_targets, strict=True)
        for values, result, (maximum, constant, slope, target_grad), targets in chunks:
            shifted, weights = buffers[:, : len(values)]
            if values.dtype != torch.float32:
                values = shifted.copy_(values)
            _shift(values, maximum, self._spec, out=shifted)
            torch.exp(shifted, out=weights)
            weights.mul_(shifted.mul_(slope).add_(constant) if self._has_slope else constant)
            column, inside = _locate(targets, logits.shape[1])
            weights.scatter_add_(1, column, torch.where(inside.unsqueeze(1), target_grad, 0.0))
            result.copy_(weights)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, spec: _Spec, inplace_backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        all_rows = slice(0, logits.shape[0])
        reduction = _TileReduction(spec, logits.shape[0], logits.device)
        for tile, columns in enumerate(spec.column_tiles()):
            reduction.add(logits[:, columns], all_rows, tile)
        column, owned = _locate(targets - spec.first_id, logits.shape[1])
        target_logits = logits.gather(1, column).squeeze(1).float()
        log_probs, entropy, maximum, log_sum = reduction.merge(target_logits, owned)
        ctx.inplace_backward = inplace_backward
        ctx.save_for_backward(logits, targets, maximum, log_sum, entropy)
        return _outputs(ctx, spec, log_probs, entropy)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        logits = ctx.saved_tensors[0]
        grad = logits.detach() if ctx.inplace_backward else torch.empty_like(logits)
        gradient = _TileGradient(ctx, grad_log_probs, grad_entropy)
        for columns in ctx.spec.column_tiles():
            gradient.write(logits[:, columns], slice(0, logits.shape[0]), columns, out=grad[:, columns])
        grad[:, ctx.spec.num_columns :].zero_()
        return grad, None, None, None


class _LinearTokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, spec: _Spec) -> tuple[Tensor, Tensor | None]:
        num_rows = hidden.shape[0]
        local_targets = targets - spec.first_id
        target_logits = hidden.new_zeros(num_rows, dtype=torch.float32)
        reduction = _TileReduction(spec, num_rows, hidden.device)
        product = hidden.new_empty(spec.tile_rows * spec.tile_columns)
        # Columns outside: the weight, larger than the hidden states, is read from memory once.
        for tile, columns in enumerate(spec.column_tiles()):
            for rows in spec.row_tiles(num_rows):
                logits = _multiply(hidden[rows], weight[columns], product)
                reduction.add(logits, rows, tile)
                column, inside = _locate(local_targets[rows] - columns.start, logits.shape[1])
                target_logits[rows] += torch.where(inside, logits.gather(1, column).squeeze(1), 0.0)
        _, owned = _locate(local_targets, weight.shape[0])
        log_probs, entropy, maximum, log_sum = reduction.merge(target_logits, owned)
        ctx.save_for_backward(hidden, weight, targets, maximum, log_sum, entropy)
        return _outputs(ctx, spec, log_probs, entropy)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        spec: _Spec = ctx.spec
        hidden, weight = ctx.saved_tensors[:2]
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        gradient = _TileGradient(ctx, grad_log_probs, grad_entropy)
        product = hidden.new_empty(spec.tile_rows * spec.tile_columns)
        grad_hidden = hidden.new_zeros(hidden.shape if want_hidden else (0,), dtype=torch.float32)
        grad_weight = torch.zeros_like(weight) if want_weight else None
        # Columns outside: the FP32 sums are then one tile of the weight and all of the (much smaller) hidden.
        for columns in spec.column_tiles():
            column_weight = weight[columns]
            column_sum = weight.new_zeros(column_weight.shape if want_weight else (0,), dtype=torch.float32)
            for rows in spec.row_tiles(hidden.shape[0]):
                logits = _multiply(hidden[rows], column_weight, product)
                # Written in the dtype of the model, in which the products below run, as those of any linear.
                gradient.write(logits, rows, columns, out=logits)
                if want_hidden:
                    _add_product(grad_hidden[rows], logits, column_weight)
                if want_weight:
                    _add_product(column_sum, logits.t(), hidden[rows])
            if grad_weight is not None:
                grad_weight[columns] = column_sum
        return grad_hidden.to(hidden.dtype) if want_hidden else None, grad_weight, None, None


def _outputs(ctx: Any, spec: _Spec, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
    """Record what both backward passes read, and return what the caller asked for."""
    ctx.spec = spec
    ctx.set_materialize_grads(False)
    if not spec.entropy_grad:
        ctx.mark_non_differentiable(entropy)
    return log_probs, entropy if spec.with_entropy else None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in FP32 over the calls."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _multiply(hidden: Tensor, weight: Tensor, memory: Tensor) -> Tensor:
    """One tile of logits, in memory that the next call overwrites."""
    return torch.mm(hidden, weight.t(), out=_view(memory, len(hidden), len(weight)))
