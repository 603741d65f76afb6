"""``dt.seeing.profile(torch=True)``: torch's profiler at each node, in the file of all and in one of its own."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG
from mesh_kit import connected
from trace_schema import check_trace, read, slices, tracks

import disttensor as dt
from disttensor.runtime.master.looking_in import NodeEvent
from disttensor.runtime.protocol.errors import ProtocolError
from disttensor.seeing import torch_profilers, torch_trace
from disttensor.seeing.chrome_trace import ChromeTrace
from disttensor.seeing.recording import NodeRecord, ProfileRecord
from disttensor.seeing.torch_profilers import file_of_node
from disttensor.seeing.torch_trace import TorchTrace, trace_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with connected(2):
        yield


def learn() -> None:
    """A backward in a function: torch draws an arrow from the forward to it."""
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()


def compute_elsewhere() -> None:
    thread = threading.Thread(target=lambda: torch.ones(5).cumsum(0), name="of the user")
    thread.start()
    thread.join()


def is_on() -> bool:
    return torch.autograd.profiler._is_profiler_enabled


def torchs(trace: dict[str, Any], node: int, name: str) -> list[dict[str, Any]]:
    """The slices of torch's with this name."""
    return [each for each in slices(trace, name=name, pid=node + 2) if "External id" in each["args"]]


@pytest.mark.usefixtures("cluster")
def test_a_timeline_has_what_torch_has_seen_at_nodes(tmp_path: Path) -> None:
    x = torch.ones(300, 300, device="node:0")
    with dt.seeing.profile(tmp_path / "t.json.gz", torch=True, record_shapes=True):
        y = x @ x
        stream = dt.Stream(0)
        with dt.stream(stream):
            z = x.exp()
        stream.synchronize()
        dt.run(compute_elsewhere, node=0)
        dt.run(learn, node=[0, 1])
        y.to("node:1").sum().item()
    del z
    trace = read(tmp_path / "t.json.gz")
    (theirs,) = torchs(trace, 0, "aten::mm")
    assert theirs["args"]["Input Dims"] == [[300, 300], [300, 300]]
    ours = [each for each in slices(trace, name="aten::mm", pid=2) if each not in (theirs,)]
    ended = theirs["ts"] + theirs["dur"]
    assert any(it["ts"] - 1e3 <= theirs["ts"] and ended <= it["ts"] + it["dur"] + 1e3 for it in ours)
    assert torchs(trace, 0, "aten::exp")
    assert torchs(trace, 0, "aten::cumsum")
    assert torchs(trace, 1, "aten::sum")
    _, of_node_0, _ = tracks(trace).values()
    # the main thread does the default stream's commands, except while there are others
    assert of_node_0 & {"torch: main thread", "torch: default stream"}
    assert any(name.startswith("torch: stream ") for name in of_node_0)  # its thread has ended by now
    assert any(name.startswith("torch: of the user, thread ") for name in of_node_0)
    assert not any(name.startswith("torch: thread ") for name in of_node_0)
    arrows = [each for each in trace["traceEvents"] if each["ph"] in "sf" and each["cat"] == "fwdbwd"]
    assert {each["pid"] for each in arrows} == {2, 3}
    numbers = [{each["id"] for each in arrows if each["pid"] == pid} for pid in (2, 3)]
    assert not numbers[0] & numbers[1]
    threads = {each["tid"] for each in torchs(trace, 0, "aten::mm") + torchs(trace, 1, "aten::sum")}
    assert not threads & {each["tid"] for each in slices(trace) if "number" in each["args"]}
    for node in range(2):
        assert trace["disttensor"]["nodes"][str(node)]["torch"]["missing"] == ""
        own = json.loads(gzip.decompress((tmp_path / f"t.node{node}.json.gz").read_bytes()))
        assert own["distributedInfo"] == {"rank": node, "world_size": 2, "backend": "auto"}
        assert len({each["pid"] for each in own["traceEvents"] if each.get("cat") == "cpu_op"}) == 1


@pytest.mark.usefixtures("cluster")
def test_off_it_is_off(tmp_path: Path) -> None:
    x = torch.ones(3, device="node:0")
    with dt.seeing.profile(torch=True) as prof:
        x.neg_()
    assert torchs(prof.to_dict(), 0, "aten::neg_")
    assert dt.run(is_on, node=[0, 1]) == [False, False]
    with dt.seeing.profile(tmp_path / "t.json") as plain:
        x.neg_()
    trace = plain.to_dict()
    assert not torchs(trace, 0, "aten::neg_")
    assert "torch" not in trace["disttensor"]["nodes"]["0"]
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def profile_here() -> int:
    with torch.profiler.profile() as prof:
        torch.ones(3).neg_()
    return len(prof.events())


@pytest.mark.usefixtures("cluster")
def test_a_function_with_a_profiler_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch has one at a time, and writes nothing of one that was ended so: that would end the process."""
    with dt.seeing.profile(tmp_path / "t.json", torch=True):
        torch.ones(3, device="node:0").neg_()
        assert dt.run(profile_here, node=1) > 0
    trace = read(tmp_path / "t.json")
    assert torchs(trace, 0, "aten::neg_")
    assert "a torch.profiler of its own" in trace["disttensor"]["nodes"]["1"]["torch"]["missing"]
    assert "node 1 is not in the timeline of torch's profiler: a function has used" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.node0.json"]
    assert dt.run(is_on, node=[0, 1]) == [False, False]


_kept: list[torch.profiler.profile] = []


def begin_own() -> None:
    _kept.append(torch.profiler.profile())
    _kept[0].start()


def end_own() -> None:
    _kept.pop().stop()


@pytest.mark.usefixtures("cluster")
def test_a_node_on_which_it_cant_start_is_named() -> None:
    dt.run(begin_own, node=1)
    with pytest.raises(dt.DisttensorError, match=r"can't start on node 1: a torch.profiler is on there"):
        dt.seeing.profile(torch=True).__enter__()
    dt.run(end_own, node=1)
    assert dt.run(is_on, node=[0, 1]) == [False, False]
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with pytest.raises(dt.DisttensorError, match="can't start on node 0: it has no activity CUDA; it has CPU"):
        dt.seeing.profile(torch=True, activities=cuda).__enter__()
    assert dt.run(is_on, node=[0, 1]) == [False, False]
    with dt.seeing.profile(torch=True, activities=[*cuda, torch.profiler.ProfilerActivity.CPU]) as prof:
        torch.ones(3, device="node:0").neg_()
    assert torchs(prof.to_dict(), 0, "aten::neg_")


def test_options() -> None:
    with pytest.raises(ValueError, match="with_stack is an option of torch's profiler, which is off: torch=True"):
        dt.seeing.profile(with_stack=True)
    with pytest.raises(ValueError, match="activities is an option"):
        dt.seeing.profile(activities=[])
    with pytest.raises(TypeError, match=r"has to be ProfilerActivity.CPU and the like, not 'CPU'"):
        dt.seeing.profile(torch=True, activities=["CPU"])  # type: ignore[list-item]


def stand() -> None:
    threading.Event().wait(HANG)


@pytest.mark.usefixtures("cluster")
def test_an_interrupt_in_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is at something is not waited for; when that has ended, its profiler does."""
    monkeypatch.setattr(torch_profilers, "FILES", 0.0)
    with pytest.raises(KeyboardInterrupt), dt.seeing.profile(tmp_path / "t.json", torch=True):  # noqa: PT012
        held = dt.submit(stand, node=1)
        raise KeyboardInterrupt
    held.cancel()
    assert "has not answered" in read(tmp_path / "t.json")["disttensor"]["nodes"]["1"]["torch"]["missing"]
    assert dt.run(is_on, node=[0, 1]) == [False, False]
    with pytest.raises(dt.errors.CancelledError):
        held.result()


# ---- files -----------------------------------------------------------------------------------------------------------


def file(*events: dict[str, Any], base: int = 5_000_000_000) -> bytes:
    labels = {"ph": "M", "name": "process_labels", "pid": 77, "tid": 0, "ts": 0, "args": {"labels": "CPU"}}
    content = {"traceEvents": [labels, *events], "baseTimeNanoseconds": base}
    return gzip.compress(json.dumps(content).encode())


def op(ts: float, dur: float, tid: int = 77, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 77, "tid": tid, "ts": ts, "dur": dur, "args": args}


def of_node(traces: list[TorchTrace], ahead: float) -> dict[str, Any]:
    """The file of a record that has one event of node 1, from second 10.0 to 10.5 by the script's clock."""
    event = NodeEvent(1, "done", 10.5 + ahead, 10.0 + ahead, "", 3, "aten::mm", -1, -1, 0, False, None)
    node = NodeRecord(1, "h", events=[event], ahead=ahead, missing="")
    record = ProfileRecord(9.0, 11.0, 10**18, (), (), (), (), (), (), {1: node}, {}, {})
    return ChromeTrace(record, traces).to_dict(2, "tcp", {})


def test_times_are_the_scripts() -> None:
    """The node's clock is 40 s ahead, and its calendar is corrected meanwhile: a second of it takes half of one."""
    moments = [(7_000_000_000, 49.0), (9_000_000_000, 50.0)]
    began = 2_000_000.0  # microseconds, so 7 s by the calendar
    told = (moments, {78: "disttensor-lane-1-4", 79: "x"})
    events = [op(began, 1e6), op(began + 1e6, 5e5, 78), op(began + 1e6, 5e5, 79)]
    trace = of_node([trace_of(1, file(*events), told)], 40.0)
    check_trace(trace)
    first, *others = slices(trace, name="aten::add")
    assert (first["ts"], first["dur"]) == (0.0, 5e5)
    assert [(each["ts"], each["dur"]) for each in others] == [(5e5, 2.5e5)] * 2
    (ours,) = slices(trace, name="aten::mm")
    assert ours["ts"] == 1e6
    assert {"torch: thread 77", "torch: stream 4", "torch: x, thread 79"} <= tracks(trace)["node 1 (h, cpu)"]


def test_an_arrow_needs_both_ends() -> None:
    point = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 77, "tid": 77}
    arrows = [
        {"ph": "s", "id": 1, "ts": 2_000_000, **point}, {"ph": "f", "id": 1, "ts": 2_000_010, "bp": "e", **point},
        {"ph": "s", "id": 2, "ts": 2_000_000, **point}, {"ph": "f", "id": 3, "ts": 2_000_000, "bp": "e", **point},
    ]  # fmt: skip
    moments = [(7_000_000_000, 9.0), (9_000_000_000, 11.0)]
    found = trace_of(1, file(op(2_000_000, 100), *arrows), (moments, {}))
    trace = of_node([found], 0.0)
    check_trace(trace)
    assert [each["id"] for each in trace["traceEvents"] if each["ph"] in "sf"] == [2 << 40 | 1] * 2


MOMENTS = [(7_000_000_000, 9.0), (9_000_000_000, 11.0)]
REFUSED: dict[str, tuple[bytes, Any, str]] = {
    "a file that is cut": (file()[:-9], (MOMENTS, {}), "not arrived as a whole"),
    "a file that is not compressed": (b"{}", (MOMENTS, {}), "arrived damaged"),
    "a file that is too long": (gzip.compress(bytes(2000)), (MOMENTS, {}), "more than 1,000 bytes"),
    "a file of something else": (gzip.compress(b'{"x": 1}'), (MOMENTS, {}), "are not a timeline of torch's profiler"),
    "a time that is none": (file(op(1e300, 1)), (MOMENTS, {}), "are not a timeline of torch's profiler"),
    "a calendar that was set back": (file(), (MOMENTS[::-1], {}), "was set back meanwhile"),
    "moments that are none": (file(), ([1, 2], {}), "beside a timeline"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_timeline_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_trace, "MOST", 1000)
    data, told, why = REFUSED[name]
    with pytest.raises(ProtocolError, match=why):
        trace_of(0, data, told)


def test_a_nodes_own_file() -> None:
    names = {"/a.b/t.json.gz": "/a.b/t.node1.json.gz", "t.json": "t.node1.json", "a/t": "a/t.node1", "t.x": "t.x.node1"}
    assert {path: file_of_node(path, 1) for path in names} == names
