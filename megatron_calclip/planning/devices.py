"""What the planner knows of devices: memory and peak speeds, each with its source.

Memory is what a process sees (`torch.cuda.mem_get_info`), not the number on the box: of an H100's 80 GB, 79.1 GiB.
Speeds are the data sheets' dense figures (half of those "with sparsity"). What a kernel reaches of them is an
assumption of its own; see `timing.py`.

Left out on purpose: links between devices. What they cost is inside the assumed share of peak speed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One device."""

    name: str
    memory: float
    """Bytes."""
    bf16_flops: float | None = None
    """Peak dense BF16 FLOP/s; None: unknown, and no time is estimated."""
    fp8_flops: float | None = None
    """Peak dense FP8 FLOP/s."""
    bandwidth: float | None = None
    """Peak bytes/s of its memory."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is planned with CUDA's buffers and TransformerEngine's layers."""
        return self.name != "cpu"


# Memory: total capacity in out-of-memory messages (vllm-project/vllm#27508 for H100, pytorch/ao#4002 for B200, of whose
# 192 GB 180 GB are usable), and as reported for an H200. Speeds: NVIDIA's data sheets of the SXM modules; B200's
# bandwidth as measured in pytorch/ao#4002.
DEVICES = {
    "h100": Device("h100", 79.1 * GIB, 989e12, 1979e12, 3.35e12),
    "h200": Device("h200", 139.8 * GIB, 989e12, 1979e12, 4.8e12),
    "b200": Device("b200", 178.3 * GIB, 2250e12, 4500e12, 7.67e12),
}


def find_device(name: str, *, ranks_per_node: int) -> Device:
    """A device by its name in `cluster.device`; a rank's share of this machine's memory for `cpu`."""
    if name != "cpu":
        return DEVICES[name]
    return Device("cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_per_node)
