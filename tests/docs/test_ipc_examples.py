"""The examples of examples/ipc do what torch-ipc's did, and print what their first lines say."""

from __future__ import annotations

import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from printed import as_shown
from test_patterns import told
from test_readme import python

import disttensor as dt

IPC = ROOT / "examples" / "ipc"


def prints_what_it_says(path: Path, folder: Path) -> None:
    assert as_shown(python(str(path), cwd=folder), told(path)) == told(path)


@pytest.mark.row("I34")
def test_map(tmp_path: Path) -> None:
    prints_what_it_says(IPC / "map.py", tmp_path)


@pytest.mark.row("I33")
def test_client_server(tmp_path: Path) -> None:
    prints_what_it_says(IPC / "client_server.py", tmp_path)


@pytest.mark.row("I36")
def test_a_pipeline_of_layers(tmp_path: Path) -> None:
    prints_what_it_says(IPC / "pipeline.py", tmp_path)


@pytest.mark.row("I21", "I35")
def test_a_queue_of_work(tmp_path: Path) -> None:
    prints_what_it_says(IPC / "workqueue.py", tmp_path)


@pytest.mark.row("S20")
def test_producers_and_consumers(tmp_path: Path) -> None:
    prints_what_it_says(IPC / "producers_consumers.py", tmp_path)


@pytest.mark.row("I37")
def test_a_benchmark_whose_sums_are_compared(tmp_path: Path) -> None:
    """Up to 32 KiB go through pages that all can read, 256 KiB do not."""
    options = "--nodes", "3", "--sizes", "4K", "256K", "--iterations", "3"
    head, *lines = python(str(IPC / "benchmark_all_reduce.py"), *options, cwd=tmp_path).splitlines()
    assert head == "3 devices, on 3 nodes of 1 host, 3 iterations"
    assert len(lines) == 2
    for line, size in zip(lines, ("4K", "256K"), strict=True):
        found = re.fullmatch(rf"{size} +error (\S+) +([\d.]+) ms +([\d.]+) GB/s", line)
        assert found, line
        assert float(found[1]) < 1e-6
        assert float(found[2]) > 0


@pytest.mark.row("I37")
def test_a_wrong_sum_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one element on one node, by a ten thousandth."""
    right = dt.all_reduce

    def wrong(xs: list[Any]) -> None:
        right(xs)
        xs[1][-1:].mul_(1.0001)

    monkeypatch.setattr(dt, "all_reduce", wrong)
    monkeypatch.setattr(dt, "init_master_worker", partial(dt.init_master_worker, launcher="inproc"))
    options = ["--nodes", "2", "--sizes", "4K", "--iterations", "1"]
    monkeypatch.setattr(sys, "argv", ["benchmark_all_reduce.py", *options])
    with pytest.raises(SystemExit, match=r"iteration 1: an error of 1\.0e-04 in the sum of 4K"):
        runpy.run_path(str(IPC / "benchmark_all_reduce.py"))
