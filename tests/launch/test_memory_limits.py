"""Nodes under a limit of memory that the kernel keeps. For root, with control groups: `make netns`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import search_path
from limits import HANG

pytestmark = [pytest.mark.netns, pytest.mark.cold]

#: Room for three processes with torch, and for what one of them takes beyond.
LIMIT = 1 << 30

PROGRAM = """
import os, select, signal, subprocess, sys, threading, torch, disttensor as dt
import aftermath
from disttensor.session import current

def grow():
    kept = []
    while True:
        kept.append(b"x" * (16 << 20))

def grow_beside():
    return subprocess.run([sys.executable, "-c", "k = []\\nwhile True: k.append(b'x' * (16 << 20))"]).returncode

def lost(node):
    try:
        while True:
            torch.ones(1, device=f"node:{node}").sum().item()
    except dt.NodeLost as e:
        print(e.cause)

if __name__ == "__main__":
    dt.init_master_worker(nodes=3, threads=1)
    for node in range(1, 3):
        aftermath.probe(node)
    with aftermath.aftermath(1, 2):
        ended, clock = os.pidfd_open(dt.nodes()[0]["pid"]), []
        def watch():  # the time counts from the kernel's kill
            select.select([ended], [], [])
            clock.append(aftermath.Clock())
        watching = threading.Thread(target=watch)
        watching.start()
        try:
            dt.run(grow, node=0)
        except dt.NodeLost as e:
            print(e.cause)
        watching.join()
        clock[0].check(2.0, "the loss")
        os.close(ended)
    os.kill(dt.nodes()[1]["pid"], signal.SIGKILL)
    lost(1)
    print(dt.run(grow_beside, node=2))
    current.session().launcher.kill(2)
    lost(2)
    dt.shutdown()
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with the limit."""
    top = Path("/sys/fs/cgroup")
    v1 = (top / "memory" / "memory.limit_in_bytes").exists()
    if not v1:
        (top / "cgroup.subtree_control").write_text("+memory")
    made = top / ("memory" if v1 else "") / f"disttensor-test-{os.getpid()}"
    made.mkdir()
    try:
        (made / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(LIMIT))
        with contextlib.suppress(OSError):  # where there is swap
            (made / ("memory.swappiness" if v1 else "memory.swap.max")).write_text("0")
        yield made
    finally:
        made.rmdir()


@pytest.mark.fault(8)
def test_a_node_that_was_killed_for_its_memory(group: Path, tmp_path: Path) -> None:
    """The kernel's kills are told from others, and from the launcher's own, though it has killed another process."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    into = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", into, "sh", sys.executable, str(program)], capture_output=True, text=True, timeout=HANG,
        env={**os.environ, "PYTHONPATH": search_path()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    starved, killed, beside, ended = done.stdout.splitlines()
    figure = re.fullmatch(
        r"killed by SIGKILL \(likely out of memory: (\d\.\d) GB at its peak\)"
        rf" while it ran grow\(\), issued at {re.escape(str(program))}:\d+ in <module>",
        starved,
    )
    assert figure is not None, starved
    assert 0.3 <= float(figure[1]) <= LIMIT / 1e9
    assert re.fullmatch(r"killed by SIGKILL(; not known to be done: .*)?", killed)
    assert beside == "-9"
    assert re.fullmatch(r"killed by SIGKILL(; not known to be done: .*)?", ended)
