"""Fingerprints of tensors: both ends of a weight sync compute them, and compare a number in place of the bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_calclip.rollout.counter_random import splitmix64

_CHUNK_NUMEL = 1 << 20  # int64 temporaries of 8 MiB


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit sum over the bits of all elements, each times a number of its position; alike on every device.

    Args:
        tensor: of any floating dtype of 2 or 4 bytes.
    """
    integer = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.detach().reshape(-1).view(integer)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), _CHUNK_NUMEL):
        chunk = bits[start : start + _CHUNK_NUMEL].long()
        position = torch.arange(start, start + len(chunk), device=tensor.device)
        total += (chunk * splitmix64(position)).sum()
    return int(total)
