"""Which nodes are said to have been killed for their memory, on systems that are made up."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from disttensor.runtime.host.memory_limit import (
    MemoryGroup,
    MemoryKills,
    memory_group,
    memory_left,
    resident,
)

GB = 10**9


class System:
    """A system with control groups in a folder, as /proc and /sys/fs/cgroup show them."""

    def __init__(
        self, tmp_path: Path, kind: str, mount_root: str = "/", path: str = "/job/step", name: str = "/job/step"
    ) -> None:
        """``kind``: "v2", "v1", "both" or "none"."""
        self.proc, self.mount, self.v2 = tmp_path / "proc", tmp_path / "sys" / "memory", kind == "v2"
        self.own = self.mount / name.lstrip("/")
        self.own.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        unified = tmp_path / "sys" / "unified"
        lines = {
            "v2": ["0::" + path],
            "v1": ["5:cpu,memory:" + path, "4:cpuset:/elsewhere"],
            "both": ["5:memory:" + path, "0::/elsewhere"],
            "none": ["4:cpuset:/elsewhere"],
        }[kind]
        mounts = ["22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw", "23 22 8:2 / /odd\udcff rw - ext4 /dev/sdb1 rw"]
        if kind in ("v1", "both"):
            mounts.append("36 32 0:31 /else /nowhere rw shared:9 - cgroup cgroup rw,cpuset")
            mounts.append(f"35 32 0:32 {mount_root} {self.mount} rw,relatime shared:9 - cgroup cgroup rw,cpu,memory")
        if kind in ("v2", "both"):
            mounts.append(f"41 32 0:38 {mount_root} {self.mount if self.v2 else unified} rw - cgroup2 cgroup2 rw")
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")
        (self.proc / "self" / "mountinfo").write_bytes(os.fsencode("\n".join(mounts) + "\n"))
        (self.proc / "meminfo").write_text(f"MemFree: 17 kB\nMemTotal:       {16 * GB // 1024} kB\n")

    def kills(self, count: int) -> None:
        if self.v2:
            (self.own / "memory.events").write_text(
                f"low 0\nhigh 3\nmax 9\noom 2\noom_kill {count}\noom_group_kill 0\n"
            )
        else:
            (self.own / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n")

    def limit(self, folder: Path, size: int | str) -> None:
        (folder / ("memory.max" if self.v2 else "memory.limit_in_bytes")).write_text(f"{size}\n")


@pytest.mark.parametrize("kind", ["v2", "v1", "both"])
def test_a_kill_that_was_counted_is_of_one_process(tmp_path: Path, kind: str) -> None:
    system = System(tmp_path, kind)
    system.kills(4)
    watch = MemoryKills(system.proc)
    assert watch.words(15 * GB) == ""  # somebody else killed it, however large it was
    system.kills(6)
    for _ in range(2):
        assert watch.words(21_312_000_000) == " (likely out of memory: 21.3 GB at its peak)"
    assert watch.words(15 * GB) == ""
    system.kills(7)
    watch.start_counting()
    assert watch.words(15 * GB) == ""


@pytest.mark.parametrize(
    ("kind", "limits", "peak", "says"),
    [
        ("v2", [], 9, "9.0 GB at its peak, where there is 16.0 GB"),
        ("v2", [], 7, ""),
        ("v2", [4, "max"], 3, "3.0 GB at its peak, where there is 4.0 GB"),
        ("v2", ["max", 4], 3, "3.0 GB at its peak, where there is 4.0 GB"),
        ("v1", [4, 2**63 - 4096], 3, "3.0 GB at its peak, where there is 4.0 GB"),
        ("v1", [8, 4], 1.9, ""),
        ("none", [], 9, "9.0 GB at its peak, where there is 16.0 GB"),
        ("none", [], 7, ""),
    ],
)
def test_where_nothing_counts_kills_the_size_tells(
    tmp_path: Path, kind: str, limits: list[int | str], peak: float, says: str
) -> None:
    system = System(tmp_path, kind)
    for folder, limit in zip((system.own, system.own.parent), limits, strict=False):
        system.limit(folder, limit * GB if isinstance(limit, int) and limit < GB else limit)
    assert MemoryKills(system.proc).words(int(peak * GB)) == (says and f" (perhaps out of memory: {says})")


@pytest.mark.parametrize(
    ("mount_root", "path", "name"),
    [
        ("/", "/", "/"),
        ("/", "/a/b", "/a/b"),
        ("/docker/17", "/docker/17/a", "/a"),
        ("/docker/17", "/docker/17", "/"),
        ("/docker/17", "/docker/170", ""),
        ("/", "/../other", ""),
    ],
)
def test_the_folder_of_a_group_in_a_container(tmp_path: Path, mount_root: str, path: str, name: str) -> None:
    system = System(tmp_path, "v1", mount_root, path, name or "/")
    assert memory_group(system.proc) == (MemoryGroup(system.own, system.mount, v2=False) if name else None)


def test_where_there_is_no_proc(tmp_path: Path) -> None:
    assert memory_group(tmp_path) is None
    assert MemoryKills(tmp_path).words(10**12) == ""


@pytest.mark.parametrize("kind", ["v2", "v1"])
def test_what_is_left_is_that_of_the_narrowest_limit(tmp_path: Path, kind: str) -> None:
    system = System(tmp_path, kind)
    with (system.proc / "meminfo").open("a") as file:
        file.write(f"MemAvailable:   {9 * GB // 1024} kB\n")
    assert [round(n / GB, 3) for n in memory_left(system.proc)] == [9, 16]
    for folder, limit, taken, dropped in ((system.own, 12, 7, 2), (system.own.parent, 8, 3, 1)):
        system.limit(folder, limit * GB)
        (folder / ("memory.current" if kind == "v2" else "memory.usage_in_bytes")).write_text(f"{taken * GB}\n")
        name = "inactive_file" if kind == "v2" else "total_inactive_file"
        (folder / "memory.stat").write_text(f"anon 5\n{name} {dropped * GB}\n")
    assert memory_left(system.proc) == (6 * GB, 8 * GB)
    (system.own / "memory.stat").write_text("no such line\n")
    assert memory_left(system.proc) == (5 * GB, 8 * GB)


def test_a_limit_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 60, 1 << 60))
    free, total = memory_left()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 20, 1 << 60))
    assert memory_left() == (0, 1 << 20)
    assert free < total < 1 << 60


def test_what_is_resident_where_the_system_does_not_say(tmp_path: Path) -> None:
    now, peak = resident()
    assert 0 < now <= peak
    assert resident(tmp_path) == (0, 0)
    assert memory_left(tmp_path / "none")[0] >= 0


def test_this_system_can_be_read() -> None:
    group = memory_group()
    assert group is None or group.folder.is_dir()
    MemoryKills().words(1)
