"""The data channel "auto": the best there is for each pair of peers.

Shared memory where both see the same (a probe shows it), TCP between others: what "shm" does too, but this one is for
peers on several hosts as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from .base import Capabilities
from .shm import ShmChannel


class AutoChannel(ShmChannel):
    """See above."""

    name: ClassVar[str] = "auto"
    capabilities: ClassVar[Capabilities] = replace(ShmChannel.capabilities, same_host=False)
