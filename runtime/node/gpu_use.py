"""The use of this process's CUDA devices, by whatever process: for the rows of a status."""

from __future__ import annotations

import torch

from ..host.cuda_devices import in_use
from ..protocol import side


def gpus() -> tuple[side.GpuUse, ...]:
    """Returns the use of the CUDA devices that this process has used. Another one would take memory to be asked."""
    return tuple(_use(index) for index in in_use())


def _use(index: int) -> side.GpuUse:
    free, total = torch.cuda.mem_get_info(index)
    try:
        busy = torch.cuda.utilization(index) / 100
    except Exception:  # pynvml is not installed, or does not know the device, and each says so in its own way
        busy = -1.0
    return side.GpuUse(f"cuda:{index}", total - free, total, busy)
