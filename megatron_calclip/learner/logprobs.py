"""Token log-probabilities and entropy that never copy the [tokens, vocabulary] matrix in FP32.

At a vocabulary of 152k the plain `log_softmax(logits.float())` is the largest allocation of a learner: several
FP32 copies of the logits, each read and written from main memory. Here the logits are reduced tile by tile with
an online logsumexp (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): two FP32 work
buffers of one tile, allocated once per call and small enough for the cache, replace those copies. The backward
pass rebuilds each tile of the softmax from the logits and the saved row maximum and log-sum.

* `token_log_probs` takes logits that exist already.
* `linear_token_log_probs` takes the hidden states and the output weight, and multiplies tile by tile (the idea of
  Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024): the logits never exist.

Rules shared by both forms:

* Every reduction is FP32, whatever the type of the logits: a log-prob reduced in BF16 is wrong by several
  hundredths, which is coarser than the clip bounds of a policy-gradient loss.
* With tensor parallelism each rank holds an equal, consecutive shard of the vocabulary. Ranks exchange one MAX
  and one SUM all-reduce of a few floats per token in the forward pass, and nothing in the backward pass.
* The row maximum is subtracted before the temperature divides, so large logits lose no digits.

Left out on purpose: label smoothing and z-loss (no policy-gradient loss uses them), dropping of masked tokens
(select the rows before the call), a bias of the output linear (Megatron models have none), and device kernels.
A CUDA device runs the same code with larger tiles; a fused library kernel for it (Triton, Liger) belongs in
`_forward` and in the two `backward` methods, behind the same two functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Tiles of existing logits on a CPU: 2^18 FP32 values are 1 MiB, so both work buffers fit in a 2 MiB L2 cache.
CPU_TILE_ELEMENTS = 2**18
CPU_TILE_COLUMNS = 8192
# Tiles of the fused linear on a CPU: large enough that the matrix products run at full speed.
CPU_LINEAR_TILE_ROWS = 1024
CPU_LINEAR_TILE_COLUMNS = 512
# A CUDA device wants few, large kernels: 2^25 FP32 values are 128 MiB for each work buffer.
CUDA_TILE_ELEMENTS = 2**25
CUDA_TILE_COLUMNS = 8192

# Maximum of a row of which nothing has been read. Finite, so that its difference to a real maximum times an
# empty sum is 0 and not NaN.
NOTHING_READ = -1e30


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
    pass, equal upstream gradients; all receive equal results, and each receives the gradient of its own shard.

    Args:
        logits: [tokens, local vocabulary], FP32, BF16 or FP16, any strides. Values must be finite where entropy
            is asked for.
        targets: [tokens], int64, global token ids. Masked tokens need a valid id too; mask the result.
        temperature: The softmax is over `logits / temperature`.
        vocab_size: True size of the global vocabulary; columns beyond it are padding: they take no part in the
            softmax and their gradient is zero. None means that no column is padding.
        group: Tensor-parallel group over which the vocabulary is sharded; None means that it is not.
        with_entropy: Return the entropy too, in nats, of the distribution at `temperature`.
        entropy_grad: Let gradients flow through the entropy, for an entropy bonus; otherwise it is detached.
        inplace_backward: Write the gradient over the logits, which saves a matrix of their size. Only for a
            caller that owns the logits and reads them no more, as in Megatron's vocab-parallel cross entropy;
            a second backward pass then raises autograd's in-place error.

    Returns:
        Log-probabilities, [tokens] FP32, and entropy, [tokens] FP32, or None.

    Raises:
        ValueError: If shapes, dtypes, options or target ids are invalid. The check of the ids costs one
            synchronisation with a CUDA device.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; flatten them to [tokens, vocabulary]")
    if inplace_backward and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward would overwrite a leaf tensor; pass logits computed by a model")
    num_columns = min(logits.shape[1], CPU_TILE_COLUMNS if logits.device.type == "cpu" else CUDA_TILE_COLUMNS)
    elements = CPU_TILE_ELEMENTS if logits.device.type == "cpu" else CUDA_TILE_ELEMENTS
    spec = _make_spec(
        logits,
        targets,
        logits.shape[1],
        temperature=temperature,
        vocab_size=vocab_size,
        group=group,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        tile_rows=elements // max(num_columns, 1),
        tile_columns=max(num_columns, 1),
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

    The gradient of `weight` is summed over tokens in FP32 and rounded once to the dtype of `weight`, so a hook
    that adds it to an FP32 main gradient adds one rounding per call and not one per tile.

    Under tensor parallelism the gradient of `hidden` is PARTIAL: it is the contribution of the vocabulary shard
    of this rank, and the sum over `group` is left to the caller. Pass hidden states through Megatron's
    `copy_to_tensor_model_parallel_region` (or the sequence-parallel gather), whose backward pass sums.

    Args:
        hidden: [tokens, hidden size], FP32, BF16 or FP16.
        weight: [local vocabulary, hidden size], same dtype.
        targets: [tokens], int64, global token ids. Masked tokens need a valid id too; mask the result.
        temperature: See `token_log_probs`.
        vocab_size: See `token_log_probs`; rows of `weight` beyond it are padding.
        group: See `token_log_probs`.
        with_entropy: See `token_log_probs`.
        entropy_grad: See `token_log_probs`.
        tile_rows: Tokens of one tile; None chooses by device.
        tile_columns: Vocabulary entries of one tile; None chooses by device.

    Returns:
        Log-probabilities, [tokens] FP32, and entropy, [tokens] FP32, or None.

    Raises:
        ValueError: As for `token_log_probs`, or if `hidden` and `weight` do not fit together.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; "
            "pass [tokens, hidden size] and [vocabulary, hidden size]"
        )
    if hidden.dtype != weight.dtype or hidden.device != weight.device:
        raise ValueError("hidden and weight differ in dtype or device; convert one of them")
    on_cpu = hidden.device.type == "cpu"
    columns = tile_columns or (CPU_LINEAR_TILE_COLUMNS if on_cpu else CUDA_TILE_COLUMNS)
    rows = tile_rows or (CPU_LINEAR_TILE_ROWS if on_cpu else max(1, CUDA_TILE_ELEMENTS // columns))
    spec = _make_spec(
        hidden,
        targets,
        weight.shape[0],
        temperature=temperature,
        vocab_size=vocab_size,
        group=group,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        tile_rows=rows,
        tile_columns=columns,
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

    def row_tiles(self, num_rows: int) -> Iterator[slice]:
        return (slice(i, min(i + self.tile_rows, num_rows)) for i in range(0, num_rows, self.tile_rows))

    def column_tiles(self) -> Iterator[slice]:
        step = self.tile_columns
        return (slice(i, min(i + step, self.num_columns)) for i in range(0, self.num_columns, step))


def _make_spec(
    inputs: Tensor,
    targets: Tensor,
    stored_columns: int,
    *,
    temperature: float,
    vocab_size: int | None,
    group: dist.ProcessGroup | None,
    with_entropy: bool,
    entropy_grad: bool,
    tile_rows: int,
    tile_columns: int,
) -> _Spec:
    """Check what both forms have in common and locate the vocabulary shard of this rank."""
    if inputs.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"dtype {inputs.dtype} is not supported; use FP32, BF16 or FP16")
    if targets.shape != inputs.shape[:1] or targets.dtype != torch.int64 or targets.device != inputs.device:
        raise ValueError(f"targets must be int64 of shape ({inputs.shape[0]},) on {inputs.device}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}; it must be positive and finite")
    if entropy_grad and not with_entropy:
        raise ValueError("entropy_grad needs with_entropy=True")
    if tile_rows < 1 or tile_columns < 1:
        raise ValueError(f"a tile of {tile_rows} x {tile_columns} is empty; use positive sizes")
    world_size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    vocab_size = stored_columns * world_size if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= stored_columns * world_size:
        raise ValueError(f"vocab_size is {vocab_size}; the logits have {stored_columns * world_size} columns")
    if targets.numel() and bool(((targets < 0) | (targets >= vocab_size)).any()):
        raise ValueError(f"targets hold ids outside 0..{vocab_size - 1}; give masked tokens a valid id too")
    return _Spec(
        inverse_temperature=1.0 / temperature,
        first_id=rank * stored_columns,
        num_columns=min(max(vocab_size - rank * stored_columns, 0), stored_columns),
        group=group if world_size > 1 else None,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
    )


class _Scratch:
    """Memory for one tile, allocated once per call and viewed in the shape of each tile."""

    def __init__(self, spec: _Spec, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        tile_elements = min(spec.tile_rows, num_rows) * min(spec.tile_columns, spec.num_columns)
        self._memory = torch.empty(tile_elements, dtype=dtype, device=device)

    def view(self, rows: slice, columns: slice) -> Tensor:
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        return self._memory[: shape[0] * shape[1]].view(shape)


@dataclass
class _RowStatistics:
    """Running reduction of each row over the columns read so far; with x = (logit - maximum) / temperature."""

    spec: _Spec
    maximum: Tensor  # [rows] largest logit
    sums: Tensor  # [2, rows] sum of exp(x); sum of exp(x) * x, which stays 0 where no entropy is asked for

    @classmethod
    def create(cls, num_rows: int, spec: _Spec, device: torch.device) -> _RowStatistics:
        maximum = torch.full((num_rows,), NOTHING_READ, device=device)
        return cls(spec, maximum, torch.zeros(2, num_rows, device=device))

    def rows(self, rows: slice) -> _RowStatistics:
        """The statistics of some rows, sharing memory."""
        return _RowStatistics(self.spec, self.maximum[rows], self.sums[:, rows])

    def raise_maximum(self, maximum: Tensor) -> None:
        """Express the sums relative to a maximum that is at least the present one."""
        shift = (self.maximum - maximum).mul_(self.spec.inverse_temperature)
        self.sums[1].addcmul_(shift, self.sums[0])
        self.sums.mul_(shift.exp_())
        self.maximum.copy_(maximum)

    def add_tile(self, logits: Tensor, shifted: Tensor, weights: Tensor) -> None:
        """Read one tile, [rows, any number of columns]; `shifted` and `weights` are work buffers."""
        # Converting first is faster than reducing BF16: the later passes find FP32 values in the cache.
        values = logits if logits.dtype == torch.float32 else shifted.copy_(logits)
        self.raise_maximum(torch.maximum(self.maximum, values.amax(-1)))
        _shift(values, self.maximum, self.spec, out=shifted)
        if not self.spec.with_entropy:
            self.sums[0].add_(shifted.exp_().sum(-1))
            return
        torch.exp(shifted, out=weights)
        self.sums[0].add_(weights.sum(-1))
        # Not a dot product: `sum` adds in a tree, while a BLAS dot of 152k FP32 terms is off by up to 1e-3.
        self.sums[1].add_(weights.mul_(shifted).sum(-1))

    def finish(self, target_logits: Tensor, owned: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Merge the shards of the group; `owned` marks the rows whose target this rank holds.

        Returns:
            Log-probabilities, entropy (meaningless unless asked for), maximum and log of the sum, all [rows].
        """
        group = self.spec.group
        if group is not None:
            maximum = self.maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            self.raise_maximum(maximum)
        target = torch.where(owned, (target_logits - self.maximum) * self.spec.inverse_temperature, 0.0)
        totals = torch.cat([self.sums, target.unsqueeze(0)])
        if group is not None:
            dist.all_reduce(totals, op=dist.ReduceOp.SUM, group=group)
        sum_exp, weighted, target = totals
        log_sum = sum_exp.log()
        return target - log_sum, log_sum - weighted / sum_exp, self.maximum, log_sum


def _locate(local_targets: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Column of each target, [rows, 1] and clamped into the columns, and whether it is one of them, [rows]."""
    inside = (local_targets >= 0) & (local_targets < num_columns)
    return local_targets.clamp(0, num_columns - 1).unsqueeze(1), inside


def _shift(logits: Tensor, maximum: Tensor, spec: _Spec, *, out: Tensor) -> None:
    """out = (logits - maximum) / temperature, FP32; `out` may be `logits`."""
    torch.sub(logits, maximum.unsqueeze(1), out=out)
    if spec.inverse_temperature != 1.0:
        out.mul_(spec.inverse_temperature)


def _reduce(
    read_tile: Callable[[slice, slice, Tensor], Tensor], num_rows: int, spec: _Spec, device: torch.device
) -> _RowStatistics:
    """Reduce all tiles of the local shard; `read_tile` may place an FP32 tile in the buffer it is given."""
    statistics = _RowStatistics.create(num_rows, spec, device)
    shifted = _Scratch(spec, num_rows, torch.float32, device)
    weights = _Scratch(spec, num_rows, torch.float32, device) if spec.with_entropy else shifted
    # Columns outside: a weight of [vocabulary, hidden size] is then read from memory once.
    for columns in spec.column_tiles():
        for rows in spec.row_tiles(num_rows):
            buffer = shifted.view(rows, columns)
            tile = read_tile(rows, columns, buffer)
            statistics.rows(rows).add_tile(tile, buffer, weights.view(rows, columns))
    return statistics


class _TileGradient:
    """Gradient of the loss by the logits, tile by tile.

    With p the softmax, g and h the upstream gradients of log-prob and entropy H, t the target and T the
    temperature, it is ((j == t) g - p_j (g + h (log p_j + H))) / T. As p_j = exp(x_j) / S and
    log p_j = x_j - log S, the second term is exp(x_j) (constant + slope x_j) with two numbers per row.
    """

    def __init__(self, ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> None:
        self.spec: _Spec = ctx.spec
        targets, self.maximum, log_sum, entropy = ctx.saved_tensors[-4:]
        num_rows, device = targets.shape[0], targets.device
        self.local_targets = targets - self.spec.first_id
        g = torch.zeros(num_rows, device=device) if grad_log_probs is None else grad_log_probs
        self.target_grad = g * self.spec.inverse_temperature
        scale = (-self.spec.inverse_temperature) * (-log_sum).exp()
        self.constant, self.slope = scale * g, None
        if grad_entropy is not None:
            self.constant = scale * (g + grad_entropy * (entropy - log_sum))
            self.slope = scale * grad_entropy
        self._shifted = _Scratch(self.spec, num_rows, torch.float32, device)
        self._weights = _Scratch(self.spec, num_rows, torch.float32, device)

    def tile(self, logits: Tensor, rows: slice, columns: slice) -> Tensor:
        """FP32 gradient of one tile of logits, in a work buffer that the next call overwrites."""
        shifted, weights = self._shifted.view(rows, columns), self._weights.view(rows, columns)
        values = logits if logits.dtype == torch.float32 else shifted.copy_(logits)
        _shift(values, self.maximum[rows], self.spec, out=shifted)
        torch.exp(shifted, out=weights)
        constant = self.constant[rows].unsqueeze(1)
        if self.slope is None:
            weights.mul_(constant)
        else:
            weights.mul_(shifted.mul_(self.slope[rows].unsqueeze(1)).add_(constant))
        column, inside = _locate(self.local_targets[rows] - columns.start, logits.shape[1])
        target_grad = torch.where(inside, self.target_grad[rows], 0.0)
        return weights.scatter_add_(1, column, target_grad.unsqueeze(1))


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, spec: _Spec, inplace_backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        statistics = _reduce(lambda rows, columns, _: logits[rows, columns], len(targets), spec, logits.device)
        column, owned = _locate(targets - spec.first_id, logits.shape[1])
        target_logits = logits.gather(1, column).squeeze(1).float()
        log_probs, entropy, maximum, log_sum = statistics.finish(target_logits, owned)
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
        for rows in ctx.spec.row_tiles(logits.shape[0]):
            for columns in ctx.spec.column_tiles():
                grad[rows, columns] = gradient.tile(logits[rows, columns], rows, columns)
        grad[:, ctx.spec.num_columns :].zero_()
        return grad, None, None, None


class _LinearTokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, spec: _Spec
    ) -> tuple[Tensor, Tensor | None]:
        in_fp32 = hidden.dtype == torch.float32
        product = _Scratch(spec, 0 if in_fp32 else hidden.shape[0], hidden.dtype, hidden.device)
        local_targets = targets - spec.first_id
        target_logits = torch.zeros(hidden.shape[0], device=hidden.device)

        def read_tile(rows: slice, columns: slice, buffer: Tensor) -> Tensor:
            out = buffer if in_fp32 else product.view(rows, columns)
            logits = torch.mm(hidden[rows], weight[columns].t(), out=out)
            column, inside = _locate(local_targets[rows] - columns.start, logits.shape[1])
            target_logits[rows] += torch.where(inside, logits.gather(1, column).squeeze(1), 0.0)
            return logits

        statistics = _reduce(read_tile, hidden.shape[0], spec, hidden.device)
        _, owned = _locate(local_targets, weight.shape[0])
        log_probs, entropy, maximum, log_sum = statistics.finish(target_logits, owned)
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
        scratch = _Scratch(spec, hidden.shape[0], hidden.dtype, hidden.device)
        grad_hidden = torch.zeros(hidden.shape if want_hidden else (0,), device=hidden.device)
        grad_weight = torch.zeros_like(weight) if want_weight else None
        # Columns outside: the FP32 sums are then one tile of the weight and all of the (much smaller) hidden.
        for columns in spec.column_tiles():
            column_weight = weight[columns]
            column_sum = torch.zeros(column_weight.shape if want_weight else (0,), device=hidden.device)
            for rows in spec.row_tiles(hidden.shape[0]):
                logits = torch.mm(hidden[rows], column_weight.t(), out=scratch.view(rows, columns))
                # The products below run in the dtype of the model, as those of an output linear would.
                grad_logits = logits.copy_(gradient.tile(logits, rows, columns))
                if want_hidden:
                    _add_product(grad_hidden[rows], grad_logits, column_weight)
                if want_weight:
                    _add_product(column_sum, grad_logits.t(), hidden[rows])
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
