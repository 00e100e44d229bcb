"""Fingerprints of tensors: both ends of a weight sync compute them, and compare a number in place of the bytes.

Every byte of every tensor goes through here after each sync, so it has to be about as fast as memory: one product and
one sum for 8 bytes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_calclip.counter_random import splitmix64

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 16
"""Words that share one set of keys; keys and products of a chunk stay in a core's cache."""

_CUDA_CHUNKS = 256  # a device wants few kernels, and has memory for 128 MiB of products


@functools.lru_cache(maxsize=2)
def _keys(device: torch.device) -> Tensor:
    """Odd int64 numbers for the positions in a chunk: modulo 2^64 a product with them loses no bit."""
    return splitmix64(torch.arange(_CHUNK_WORDS, device=device)) | 1


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit sum over all words of 8 bytes, each times numbers of its position; alike on every device.

    A word at position p of chunk c counts as word * key(p) * key'(c) modulo 2^64, so that any change of one word, and with
    it any exchange of two, shows, as does a change of the length.

    Args:
        tensor: of any type.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    num_bytes = data.numel()
    if num_bytes % _WORD_BYTES or data.storage_offset() % _WORD_BYTES:
        data = torch.nn.functional.pad(data, (0, -num_bytes % _WORD_BYTES)).clone()
    words = data.view(torch.int64)
    keys = _keys(tensor.device)
    whole = len(words) // _CHUNK_WORDS * _CHUNK_WORDS
    chunks_at_once = 1 if tensor.device.type == "cpu" else _CUDA_CHUNKS
    sums = [(block * keys).sum(1) for block in words[:whole].view(-1, _CHUNK_WORDS).split(chunks_at_once)]
    rest = words[whole:]
    sums.append((rest * keys[: len(rest)]).sum().view(1))
    chunk_sums = torch.cat(sums)
    chunk_keys = splitmix64(torch.arange(1, len(chunk_sums) + 1, device=tensor.device)) | 1
    return int((chunk_sums * chunk_keys).sum() + splitmix64(torch.tensor(num_bytes, device=tensor.device)))
