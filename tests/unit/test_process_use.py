"""What a process has used and waited for, on systems that are made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disttensor.runtime.host.control_groups import throttled_seconds
from disttensor.runtime.host.process_use import ProcessUse, use_of
from disttensor.runtime.process.page import WorkTally

PID = 77


def system(tmp_path: Path, v2: bool) -> tuple[Path, Path]:
    """/proc, and the folder of the process's group."""
    proc, mount = tmp_path / "proc", tmp_path / "cpu"
    group = mount / "job" / "node"
    group.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / f"{PID}" / "task").mkdir(parents=True)
    (proc / f"{PID}" / "cgroup").write_text("0::/job/node\n" if v2 else "2:cpu,cpuacct:/job/node\n0::/\n")
    kind = "cgroup2 cgroup2 rw" if v2 else "cgroup cgroup rw,cpu,cpuacct"
    (proc / "self" / "mountinfo").write_text(f"35 32 0:32 / {mount} rw,relatime shared:9 - {kind}\n")
    return proc, group


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("around", [True, False])
def test_a_group_that_was_throttled_is_told(tmp_path: Path, v2: bool, around: bool) -> None:
    """Its own one, or one around it."""
    proc, group = system(tmp_path, v2)
    assert throttled_seconds(proc, PID) == 0
    text = "nr_periods 9\nnr_throttled 4\n" + ("throttled_usec 2500000\n" if v2 else "throttled_time 2500000000\n")
    (group / "cpu.stat").write_text("usage_usec 5\n")
    ((group.parent if around else group) / "cpu.stat").write_text(text)
    assert throttled_seconds(proc, PID) == pytest.approx(2.5)


def test_the_times_are_those_of_the_thread_that_works(tmp_path: Path) -> None:
    proc, _ = system(tmp_path, True)
    for thread, text in (("77", "1000000000 900000000 1\n"), ("78", "2000000000 500000000 8\n"), ("79", "")):
        (proc / f"{PID}" / "task" / thread).mkdir()
        (proc / f"{PID}" / "task" / thread / "schedstat").write_text(text)
    (proc / f"{PID}" / "status").write_text("Name:\tx\nVmRSS:\t  900 kB\nVmSwap:\t  100 kB\n")
    tally = WorkTally(5.0, 3.0, 9, 0.5)
    assert use_of(PID, tally, 12, proc) == ProcessUse(tally, 2.0, 0.5, 0.0, 12, 100 << 10)


def test_a_process_that_is_gone_has_used_nothing_more(tmp_path: Path) -> None:
    assert use_of(PID, WorkTally(), 0, tmp_path) == ProcessUse()


def test_a_process_of_now_has_run() -> None:
    assert use_of(os.getpid(), WorkTally(), 0).ran > 0
