"""Profiles of sessions that end, lose nodes, or can't be recorded."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trace_schema import read, slices

import disttensor as dt
from disttensor import testing
from disttensor.runtime.process.clock import clock_name
from disttensor.session import current


@pytest.mark.netns
def test_a_container_with_times_of_its_own_has_another_clock() -> None:
    """Though it has this kernel, and this host's name."""
    code = (
        "import time\n"
        "from disttensor.runtime.process.clock import clock_name\n"
        "print(clock_name(), time.monotonic(), sep='|')"
    )
    names, moments = list[str](), list[float]()
    for around in ([], ["unshare", "--time", "--monotonic", "5000", "--fork"]):
        said = subprocess.run([*around, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        name, moment = said.split("|")
        names.append(name)
        moments.append(float(moment))
    assert names[0] == clock_name() != names[1]
    assert names[1]
    assert moments[1] - time.monotonic() > 4000


def test_a_node_that_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With torch's profiler on all nodes."""
    with caplog.at_level(logging.WARNING), dt.init_master_worker(nodes=2, threads=1):
        with dt.seeing.profile(tmp_path / "t.json", torch=True):
            torch.ones(3, device="node:0").neg_().cpu()
            testing.kill(1)
            with pytest.raises(dt.NodeLost):
                torch.ones(3, device="node:1").cpu()
        trace = read(tmp_path / "t.json")
        assert {"number", "External id"} <= {
            key for it in slices(trace, name="aten::neg_", pid=2) for key in it["args"]
        }
        (loss,) = (each for each in trace["traceEvents"] if each["ph"] == "i")
        assert (loss["name"], loss["pid"]) == ("node 1 is lost", 3)
        assert trace["disttensor"]["nodes"]["1"]["missing"]
        assert not trace["disttensor"]["nodes"]["0"]["missing"]
        assert "node 1" in trace["disttensor"]["nodes"]["1"]["torch"]["missing"]
        assert "node 1 is not in the timeline of torch's profiler: node 1" in caplog.text
        with dt.seeing.profile(tmp_path / "later.json"):
            torch.ones(3, device="node:0").neg_().cpu()
        assert slices(read(tmp_path / "later.json"), name="aten::neg_", pid=2)


def test_nodes_that_are_threads_are_not_recorded(tmp_path: Path) -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        points = current.session().link.seam.points().values()
        before = [point.listeners for point in points]
        for _ in range(2):
            with pytest.raises(dt.DisttensorError, match="launcher='inproc'"):
                dt.seeing.profile().__enter__()
            assert [point.listeners for point in points] == before


def test_a_whole_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By the variable that ``dtrun --trace`` sets. Where it can't be recorded the job runs, and says so."""
    monkeypatch.setenv("DISTTENSOR_TRACE", str(tmp_path / "t.json.gz"))
    with dt.init_master_worker(nodes=1, threads=1):
        torch.ones(3, device="node:0").neg_()
        with pytest.raises(dt.DisttensorError, match="recorded already, begun by DISTTENSOR_TRACE"):
            dt.seeing.profile().__enter__()
    assert slices(read(tmp_path / "t.json.gz"), name="aten::neg_", pid=2)
    with caplog.at_level(logging.WARNING), dt.init_master_worker(nodes=1, launcher="inproc"):
        torch.ones(3, device="node:0").neg_().cpu()
    assert "no timeline is recorded in DISTTENSOR_TRACE" in caplog.text
    assert "launcher='inproc'" in caplog.text
