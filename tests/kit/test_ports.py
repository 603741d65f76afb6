"""Ports for tests: two runs side by side never get the same one."""

from __future__ import annotations

import subprocess
import sys

from checkout import search_path
from ports import free_port

OTHER = "import ports, sys; print(ports._first, ports.free_port(), flush=True); sys.stdin.read()"


def test_another_process_has_other_ports() -> None:
    command, found = [sys.executable, "-c", OTHER], list[int]()
    environment = {"PYTHONPATH": search_path()}
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **how) as one, subprocess.Popen(command, **how) as other:
        for process in (one, other):
            assert process.stdout is not None
            first, number = map(int, process.stdout.readline().split())
            assert first <= number < first + 100
            found.append(first)
        one.communicate()
        other.communicate()
    assert len({*found, free_port() // 100 * 100}) == 3
