"""The memory that this process and its children may take, and how many processes were killed for want of it.

Both are told by the control group (cgroup) that the process is in, v2 or v1: its limit, and a count of kills.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

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
        found, folder = [], self.folder
        while True:
            with contextlib.suppress(OSError, ValueError):  # "max" is none
                found.append(int((folder / ("memory.max" if self.v2 else "memory.limit_in_bytes")).read_text()))
            if folder == self.top or folder == folder.parent:
                return found
            folder = folder.parent


def memory_group(proc: Path = Path("/proc")) -> MemoryGroup | None:
    """Returns the control group that limits the memory of this process; None where there is none in sight."""
    try:
        memberships = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    paths = {name: path for _, names, path in memberships for name in names.split(",")}
    # a system may have both: v1's controller counts there, as one controller is in one of the two only
    for v2, kind, name in ((False, "cgroup", "memory"), (True, "cgroup2", "")):
        for fields in mounts:
            root, point, rest = fields[3], fields[4], fields[fields.index("-") + 1 :]
            if rest[0] == kind and name in paths and (v2 or name in rest[2].split(",")):
                path, base = paths[name], root.rstrip("/")
                if f"{path}/".startswith(f"{base}/") and not path.startswith("/.."):  # else it is not in sight
                    return MemoryGroup(Path(point + path[len(base) :].rstrip("/")), Path(point), v2)
    return None


class MemoryKills:
    """Tells whether children that were ended by SIGKILL have ended for want of memory."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self.begin()

    def begin(self) -> None:
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
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = (self._proc / "meminfo").read_text().splitlines()
            limits.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:")))
        return min(limits, default=None)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
