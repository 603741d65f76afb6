"""The benchmarks over sizes run, and print and write what they say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types

import pytest
import torch
from checkout import ROOT

import disttensor as dt
from disttensor import testing

BENCH = ROOT / "tools" / "bench"


def load(name: str) -> types.ModuleType:
    """A program of the benchmarks as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sizes():
    contest = load("contest")
    assert contest.parse_sizes(["100", "4K", "64K-4M"]) == [100, 4096, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
    assert [contest.show_size(n) for n in (100, 4096, 256 << 20)] == ["100 B", "4 KiB", "256 MiB"]


@pytest.mark.row("M26")
def test_what_is_timed_is_done(monkeypatch):
    """As many bytes are moved, and operations issued, as the seconds are divided by."""
    monkeypatch.syspath_prepend(str(BENCH))
    bandwidth, dispatch = load("bandwidth"), load("dispatch")
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        here = torch.ones(1000)
        there = here.to("node:0")
        for way in bandwidth.WAYS:
            dt.synchronize()
            dt.channels.reset_stats()
            assert bandwidth.timed(*bandwidth.mover(way, here, there), 5) > 0
            dt.synchronize()
            assert sum(row.sent.bytes for row in dt.channels.stats()) == 5 * 4000, way
        x = torch.ones(4, 4, device="node:1")
        for name in dispatch.OPS.keys() - {"x.t()", "x[0]"}:  # views, of which none but the last is used
            with testing.MessageLog() as log:
                issued, done = dispatch.issue(dispatch.OPS[name], x, x, 7)
            assert 0 < issued < done
            assert sum(command.startswith("Call") for command in log[1].commands) == 7 + 1, name


@pytest.mark.slow
def test_checkpoints(tmp_path):
    command = [sys.executable, str(BENCH / "checkpoint.py"), "--mib", "1", "--rounds", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, cwd=BENCH.parent.parent)
    assert done.returncode == 0, done.stderr
    for what in ("dd  ", "save  ", "load  ", "async: pause", "save over dd: ", "of the save"):
        assert what in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.row("M26")
@pytest.mark.parametrize(
    ("name", "arguments", "column", "measured"),
    [
        ("bandwidth", [], "what", {"memcpy", "socket", "gloo", "shm up", "shm across", "shm down"}),
        ("collectives", ["--ranks", "2"], "who", {"gloo", "shm", "master"}),
    ],
)
def test_it_runs(name, arguments, column, measured, tmp_path):
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), "--sizes", "4K", "--rounds", "1", "--channels", "shm",
         "--json", str(out), "--plot", str(tmp_path / "plot.png"), *arguments],
        capture_output=True, text=True, timeout=290, cwd=BENCH.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 KiB" in done.stdout
    rows = json.loads(out.read_text())
    assert measured <= {row[column] for row in rows}
    assert all(row["bytes"] == 4096 and row["s"] > 0 for row in rows)
    assert list(tmp_path.glob("*.png")) or "matplotlib is not installed" in done.stdout
