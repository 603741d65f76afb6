"""The control groups (cgroups) that processes are in, v2 or v1: where the files of a controller are."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """The group of a process as far as one controller goes."""

    folder: Path  #: its own
    top: Path  #: that of the outermost group in sight
    v2: bool

    def levels(self) -> list[Path]:
        """Returns its folder, and those of the groups around it."""
        found = [self.folder]
        while found[-1] not in (self.top, found[-1].parent):
            found.append(found[-1].parent)
        return found


def find_group(controller: str, proc: Path = Path("/proc"), pid: int | str = "self") -> ControlGroup | None:
    """Returns the group of a process; None where there is none in sight."""
    try:
        memberships = [line.split(":", 2) for line in _paths(proc / f"{pid}/cgroup")]
        mounts = [line.split() for line in _paths(proc / "self/mountinfo")]
    except OSError:
        return None
    paths = {name: path for _, names, path in memberships for name in names.split(",")}
    # a system may have both: v1's controller counts there, as one controller is in one of the two only
    for v2, kind, name in ((False, "cgroup", controller), (True, "cgroup2", "")):
        for fields in mounts:
            root, point, rest = fields[3], fields[4], fields[fields.index("-") + 1 :]
            if rest[0] == kind and name in paths and (v2 or name in rest[2].split(",")):
                path, base = paths[name], root.rstrip("/")
                if f"{path}/".startswith(f"{base}/") and not path.startswith("/.."):  # else it is not in sight
                    return ControlGroup(Path(point + path[len(base) :].rstrip("/")), Path(point), v2)
    return None


def throttled_seconds(proc: Path = Path("/proc"), pid: int | str = "self") -> float:
    """Returns for how long a process's groups have been kept from running because their share of the cores was used up;
    0 where nothing counts that."""
    group = find_group("cpu", proc, pid)
    if group is None:
        return 0.0
    name, unit = ("throttled_usec", 1e-6) if group.v2 else ("throttled_time", 1e-9)
    most = 0.0
    for folder in group.levels():
        with contextlib.suppress(OSError, ValueError):  # the outermost group of v2 counts nothing
            counts = dict(line.split(maxsplit=1) for line in (folder / "cpu.stat").read_text().splitlines())
            most = max(most, int(counts.get(name, 0)) * unit)
    return most


def _paths(file: Path) -> list[str]:
    """Returns the lines of a file that has paths, whose bytes may be no text."""
    return os.fsdecode(file.read_bytes()).split("\n")[:-1]
