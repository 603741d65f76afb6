"""The data channel "auto": the best way for each pair of peers.

Shared memory where both see the same (a probe shows it), of CUDA devices too, and TCP between others: like "shm", but
this one is for peers on several hosts. For collectives of GPUs the master may choose another channel
(``disttensor/session/channel_router.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from .base import Capabilities
from .shm.channel import ShmChannel


class AutoChannel(ShmChannel):
    """Shared memory for pairs of peers on one host, TCP for others, on any number of hosts."""

    name: ClassVar[str] = "auto"
    capabilities: ClassVar[Capabilities] = replace(ShmChannel.capabilities, same_host=False)
