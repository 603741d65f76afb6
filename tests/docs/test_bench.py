"""The benchmarks over sizes run, and print and write what they say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from checkout import ROOT

BENCH = ROOT / "tools" / "bench"


def test_sizes():
    spec = importlib.util.spec_from_file_location("contest", BENCH / "contest.py")
    contest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contest)
    assert contest.parse_sizes(["100", "4K", "64K-4M"]) == [100, 4096, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
    assert [contest.show_size(n) for n in (100, 4096, 256 << 20)] == ["100 B", "4 KiB", "256 MiB"]


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
