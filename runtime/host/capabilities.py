"""The abilities by which this process's torch chooses kernels, beside operands. A node tells them in its Hello."""

from __future__ import annotations

import msgspec
import torch

from ..protocol.commands import Abilities


def own(simulated: int = 0) -> Abilities:
    """Returns the abilities of this process, with so many simulated CUDA devices in place of real ones.

    A simulated device has the capability (0, 0): it computes as a CPU does, without a library of CUDA's.
    """
    if simulated or not torch.cuda.device_count():
        return msgspec.structs.replace(cpu(), capabilities=((0, 0),) * simulated)
    built = torch.version.cuda or "0.0"  # no version where torch is built for ROCm
    return msgspec.structs.replace(
        cpu(),
        cudnn=(torch.backends.cudnn.version() or 0) if torch.version.cuda else 0,
        cuda=tuple(map(int, built.split(".")[:2])),
        flash=torch.backends.cuda.is_flash_attention_available(),
        capabilities=tuple(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())),
    )


def cpu() -> Abilities:
    """Returns the abilities of this process without its CUDA devices, which are left alone.

    Torch is asked, not the machine: a CPU's instructions may be taken away by ``ONEDNN_MAX_CPU_ISA`` and the like.
    """
    onednn = torch.backends.mkldnn.is_available()
    return Abilities(
        cpu=torch.backends.cpu.get_cpu_capability(),
        onednn=onednn,
        bfloat16=onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        float16=onednn and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    )
