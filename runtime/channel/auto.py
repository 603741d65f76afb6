"""The data channel "auto": the best there is for each pair of peers.

Shared memory where both see the same (a probe shows it), of CUDA devices too, and TCP between others: as "shm", but
this one is for peers on several hosts. For collectives of GPUs the master may choose another channel
(``disttensor/session/channel_router.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from .base import Capabilities
from .shm.channel import ShmChannel


class AutoChannel(ShmChannel):
    """See above."""

    name: ClassVar[str] = "auto"
    capabilities: ClassVar[Capabilities] = replace(ShmChannel.capabilities, same_host=False)
