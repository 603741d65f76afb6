"""Profiles of sessions that end, lose nodes, or can't be recorded."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import elsewhere
import msgspec
import pytest
import torch
from limits import HANG
from slow_wire import Wire, Wires
from trace_schema import read, slices

import disttensor as dt
from disttensor import testing
from disttensor.runtime.launch.starters.server_launcher import ServerLauncher
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


@pytest.mark.netns
@pytest.mark.parametrize("back", [0.005, 0.0], ids=["both ways", "one way"])
def test_the_clock_of_another_host_is_measured_by_slow_connections(
    back: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a millisecond where both ways take as long, and else within the bound that the file has."""
    elsewhere.register()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    start = ServerLauncher.start
    with Wires(Wire(delay=0.005, back=back)) as wires:

        def far(self: ServerLauncher, bundles: Any) -> None:
            there = [
                msgspec.structs.replace(it, side_addresses=tuple(wires.to("side", at) for at in it.side_addresses))
                for it in bundles
            ]
            start(self, there)

        monkeypatch.setattr(ServerLauncher, "start", far)
        with dt.init_master_worker(launcher=elsewhere.NAME, hosts=elsewhere.AHEAD, threads=1):
            deadline = time.monotonic() + HANG
            while True:  # until an answer comes that only the wires have made slow
                with dt.seeing.profile(tmp_path / "t.json"):
                    torch.ones(3, device="node:0").neg_().cpu()
                trace = read(tmp_path / "t.json")
                clock = trace["disttensor"]["nodes"]["0"]
                if clock["clock_within_s"] < (0.005 + back) / 2 + 0.001:
                    break
                assert time.monotonic() < deadline, clock
        assert wires.passed("side")
    wrong = clock["clock_ahead_s"] - elsewhere.SECONDS
    assert clock["clock"] == "measured"
    assert abs(wrong) <= clock["clock_within_s"]
    assert abs(wrong - (back - 0.005) / 2) < 0.001
    waits, done = slices(trace, cat="wait"), slices(trace, name="aten::neg_", pid=2)
    assert done
    for executed in done:
        assert any(it["ts"] - 1e4 < executed["ts"] < it["ts"] + it["dur"] + 1e4 for it in waits)


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
