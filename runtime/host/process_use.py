"""The use that a worker's process has made of its host, and its waits there, as the kernel counts them."""

from __future__ import annotations

import contextlib
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ..process.page import WorkTally
from .control_groups import throttled_seconds
from .memory_limit import swapped

#: The most threads that are looked at.
THREADS = 64


class ProcessUse(NamedTuple):
    """The counts of a worker, each since its start. Two of them tell what there was between."""

    tally: WorkTally = WorkTally()
    ran: float = 0.0  #: seconds for which that of its threads that has worked most has run on a core
    delayed: float = 0.0  #: seconds for which that one could have run and had no core
    throttled: float = 0.0  #: seconds for which its control group was not let run
    faults: int = 0  #: pages that had to come from a disk
    swapped: int = 0  #: bytes that are in swap now


#: The counts of a worker of which nothing is known.
UNKNOWN = ProcessUse()


def use_of(pid: int, tally: WorkTally, faults: int, proc: Path = Path("/proc")) -> ProcessUse:
    """Returns the counts of a process. ``tally``: those of its own; ``faults``: its major page faults."""
    times = []
    with contextlib.suppress(OSError):
        for thread in islice((proc / f"{pid}/task").iterdir(), THREADS):
            with contextlib.suppress(OSError, ValueError):  # it has ended, or the kernel does not count
                ran, delayed, _ = map(int, (thread / "schedstat").read_text().split())
                times.append((ran * 1e-9, delayed * 1e-9))
    ran_most, delayed_most = max(times, default=(0.0, 0.0))
    return ProcessUse(tally, ran_most, delayed_most, throttled_seconds(proc, pid), faults, swapped(proc, pid))
