"""The memory that this process and its children may take, how much of it is left, and how many processes were killed
for want of it.

All are told by the control group (cgroup) that the process is in, v2 or v1: its limit, what it takes, a count of kills.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

from .control_groups import find_group

#: The part of the limit above which a killed process may have been killed for its memory, where nothing counts kills.
LARGE = 0.5


@dataclass(frozen=True)
class MemoryGroup:
    """A control group as far as memory goes: ``folder`` is its own, ``top`` that of the outermost one in sight."""

    folder: Path
    top: Path
    v2: bool

    def kills(self) -> int | None:
        """Returns how many of its processes the kernel has killed for want of memory; None where nothing tells."""
        with contextlib.suppress(OSError, ValueError):
            text = (self.folder / ("memory.events" if self.v2 else "memory.oom_control")).read_text()
            counts = dict(line.split(maxsplit=1) for line in text.splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
        return None

    def limits(self) -> list[int]:
        """Returns the limits (bytes) that it is under, its own and those of the groups around it."""
        return [limit for limit, _ in self.levels()]

    def levels(self) -> list[tuple[int, int]]:
        """Returns each of these limits with the bytes that are left below it: files' pages that the kernel can drop at
        once count as left."""
        found, folder = [], self.folder
        while True:
            with contextlib.suppress(OSError, ValueError):  # "max" is none
                limit = int((folder / ("memory.max" if self.v2 else "memory.limit_in_bytes")).read_text())
                found.append((limit, max(0, limit - self._memory_taken(folder))))
            if folder == self.top or folder == folder.parent:
                return found
            folder = folder.parent

    def _memory_taken(self, folder: Path) -> int:
        with contextlib.suppress(OSError, ValueError):
            taken = int((folder / ("memory.current" if self.v2 else "memory.usage_in_bytes")).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            name = "inactive_file" if self.v2 else "total_inactive_file"
            return taken - next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
        return 0


def memory_group(proc: Path = Path("/proc")) -> MemoryGroup | None:
    """Returns the control group that limits the memory of this process; None where there is none in sight."""
    found = find_group("memory", proc)
    return None if found is None else MemoryGroup(*found)


class MemoryKills:
    """Tells whether children that were ended by SIGKILL have ended for want of memory."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self.start_counting()

    def start_counting(self) -> None:
        """Has kills until now count for nothing. To be called while there are no children."""
        self._group = memory_group(self._proc)
        self._explained = self._kills() or 0  #: of the kills that were counted, those that are known to be others

    def words(self, peak: int) -> str:
        """Returns what to add to "killed by SIGKILL", "" where memory is not known to matter.

        ``peak``: the most bytes that the child had in memory. The caller has not killed the child itself.
        """
        kills = self._kills()
        if kills is not None:
            if kills <= self._explained:
                return ""
            self._explained += 1  # each kill is of one process; several may have died by now
            return f" (likely out of memory: {_gb(peak)} at its peak)"
        limit = self._limit()
        if limit is None or peak <= LARGE * limit:
            return ""
        return f" (perhaps out of memory: {_gb(peak)} at its peak, where there is {_gb(limit)})"

    def _kills(self) -> int | None:
        return None if self._group is None else self._group.kills()

    def _limit(self) -> int | None:
        limits = [] if self._group is None else self._group.limits()
        if (total := _meminfo("MemTotal", self._proc)) is not None:
            limits.append(total)
        return min(limits, default=None)


def memory_left(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Returns the memory that this process could still take and all that it may take (bytes): of the host, its control
    group, or its own limit, whichever is least. (0, 0) where nothing tells."""
    total, free = _meminfo("MemTotal", proc), _meminfo("MemAvailable", proc)
    group = memory_group(proc)
    levels = [] if group is None else group.levels()
    if total is not None:
        levels.append((total, total if free is None else free))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        levels.append((limit, max(0, limit - _status(proc).get("VmSize", 0))))
    return min((left for _, left in levels), default=0), min((limit for limit, _ in levels), default=0)


def resident(proc: Path = Path("/proc"), pid: int | str = "self") -> tuple[int, int]:
    """Returns the bytes that a process, by default this one, has in memory, now and at their peak since ``begin_peak``,
    or since its start."""
    status = _status(proc, pid)
    now = status.get("VmRSS", 0)
    return now, max(now, status.get("VmHWM", 0))  # which the kernel brings up to date only now and then


def swapped(proc: Path = Path("/proc"), pid: int | str = "self") -> int:
    """Returns the bytes of a process that are in swap now."""
    return _status(proc, pid).get("VmSwap", 0)


def _status(proc: Path, pid: int | str = "self") -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        lines = [line.split() for line in (proc / f"{pid}/status").read_text().splitlines()]
        return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[2:] == ["kB"]}
    return {}


def begin_peak(proc: Path = Path("/proc")) -> None:
    """Has the peak of ``resident`` begin anew, where the kernel allows it."""
    with contextlib.suppress(OSError):
        (proc / "self/clear_refs").write_text("5")


def _meminfo(name: str, proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
    return None


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
