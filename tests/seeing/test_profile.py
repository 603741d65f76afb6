"""``dt.seeing.profile``: what its file has of real nodes, and what becomes of it when something goes wrong."""

from __future__ import annotations

import os
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
from disttensor import testing
from disttensor.seeing.recording import EventRing, MessageRing, SentMessage
from disttensor.session import current

HERE = os.path.basename(__file__)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with connected(2):
        yield


def line(function: Any, after: int) -> str:
    """The line of a function of this file, as rows have it."""
    return f"{HERE}:{function.__code__.co_firstlineno + after}"


def work() -> None:
    x, y = torch.ones(8, 8, device="node:0"), torch.ones(300, 300).to("node:1")
    (x @ x).to("node:1").sum().item()
    y.cpu()
    dt.all_reduce([x, x.to("node:1")])
    dt.run(abs, -1, node=1)
    stream = dt.Stream(0)
    with dt.stream(stream):
        x.mul_(1)
    stream.synchronize()


def is_watched() -> bool:
    """Whether anything listens at the script's end, except the flight record to losses."""
    points = current.session().link.seam.points()
    return any(point.listeners for name, point in points.items() if name != "lost") or len(points["lost"].listeners) > 1


@pytest.mark.usefixtures("cluster")
def test_a_timeline(tmp_path: Path) -> None:
    """A job that runs is recorded twice: what it does before, between and afterwards is in no file."""
    work()
    traces = []
    for number in range(2):
        torch.ones(3, device="node:0").neg_()
        dt.synchronize()
        with dt.seeing.profile(tmp_path / f"{number}.json.gz"):
            work()
        assert not is_watched()
        traces.append(read(tmp_path / f"{number}.json.gz"))
    for trace in traces:
        (script, one, other) = tracks(trace).items()
        assert script[0] == "script"
        assert {"issue", "waits", "uploads", "downloads"} <= script[1]
        assert [name.partition(" (")[0] for name, _ in (one, other)] == ["node 0", "node 1"]
        assert one[0].endswith(", cpu)")
        assert {"default stream", "send", "receive"} <= one[1]
        assert any(name.startswith("stream ") for name in one[1])
        assert {"default stream", "send", "receive", "functions"} <= other[1]
        assert trace["distributedInfo"] == {"rank": 0, "world_size": 2, "backend": "auto"}
        assert trace["disttensor"]["dropped"] == dict.fromkeys(
            ("issued", "sent", "waits", "transfers", "losses", "regions"), 0
        )
        for node in trace["disttensor"]["nodes"].values():
            assert (node["dropped"], node["missing"]) == (0, "")
            assert (node["clock"], node["clock_ahead_s"], node["clock_within_s"]) == ("the script's", 0, 0)
        products = slices(trace, name="aten::mm")  # two, where the thread that receives gives it to a stream
        assert {(each["pid"], each["args"]["line"]) for each in products} == {(2, line(work, 2))}
        assert [each["args"] for each in slices(trace, name=line(work, 2), cat="issue")]
        copied = next(each for each in slices(trace, name="Recv") if each["args"]["line"] == line(work, 1))
        assert (copied["args"]["shape"], copied["args"]["dtype"]) == ([300, 300], "float32")
        (upload,) = (each for each in slices(trace, name="to node 1", pid=1) if each["args"]["bytes"] == 360_000)
        assert upload["args"]["use"] == "transfers"
        assert len(slices(trace, name="abs()", cat="function")) == 1
        assert len(slices(trace, name="all_reduce", cat="collective")) == 2
        assert not slices(trace, name="aten::neg_")
        assert line(work, 2) in waits_that_arrows_meet(trace)


def waits_that_arrows_meet(trace: dict[str, Any]) -> set[str]:
    """The lines of the script's waits at which arrows end."""
    ends = [each for each in trace["traceEvents"] if each["ph"] == "f" and each["pid"] == 1]
    waits = slices(trace, cat="wait")
    return {it["args"]["line"] for it in waits if any(each["tid"] == it["tid"] and within(each, it) for each in ends)}


def resume_when_the_script_waits() -> None:
    for _ in range(int(HANG / 0.05)):
        if dt.seeing.status(timeout=0.05).script.waits:
            break
    testing.resume(1)


@pytest.mark.usefixtures("cluster")
def test_an_arrow_ends_at_the_wait_for_a_copy() -> None:
    """The node is stopped, so that the script does wait."""
    x = torch.ones(4, device="node:1")
    dt.synchronize()
    with dt.seeing.profile() as prof:
        testing.stop(1)
        resumed = threading.Thread(target=resume_when_the_script_waits)
        resumed.start()
        x.cpu()
        resumed.join()
    assert line(test_an_arrow_ends_at_the_wait_for_a_copy, 9) in waits_that_arrows_meet(prof.to_dict())


def within(point: dict[str, Any], it: dict[str, Any]) -> bool:
    return bool(it["ts"] - 1e-3 <= point["ts"] <= it["ts"] + it["dur"] + 1e-3)


@pytest.mark.usefixtures("cluster")
def test_regions_steps_and_tables() -> None:
    x = torch.ones(8, 8, device="node:0")
    with dt.seeing.profile() as prof:
        for _ in range(2):
            with dt.seeing.region("forward"), dt.seeing.region("first"):
                y = x @ x
            y.sum().item()
            prof.step()
    prof.step()  # outside of the block it is none
    trace = prof.to_dict()
    check_trace(trace)
    parts = slices(trace, cat="user_annotation")
    assert sorted(each["name"] for each in parts) == [
        "ProfilerStep#0", "ProfilerStep#1", "first", "first", "forward", "forward",
    ]  # fmt: skip
    forward = [each for each in parts if each["name"] == "forward"]
    for it in slices(trace, name=line(test_regions_steps_and_tables, 6), cat="issue"):
        assert sum(each["tid"] == it["tid"] and within(it, each) for each in forward) == 1
    shown = prof.table().splitlines()
    assert [row.split()[0] for row in shown[2:5]] == ["node", "0", "1"]
    assert any(f"{line(test_regions_steps_and_tables, 7)}  y.sum()" in row for row in shown[6:]), shown


@pytest.mark.usefixtures("cluster")
def test_a_command_is_in_the_part_that_has_issued_it() -> None:
    """However few a part issues, and wherever among the lines that are noted it begins."""
    x, parts = torch.ones(8, device="node:0"), [n % 23 for n in range(1, 300, 7)]
    x.add_(1)  # with the first one the node is told of the operator, too
    with dt.seeing.profile() as prof:
        for index, commands in enumerate(parts):
            with dt.seeing.region(f"{index}"):
                for _ in range(commands):
                    x.add_(1)
            x.mul_(0.5)
    trace, line_of_parts = prof.to_dict(), line(test_a_command_is_in_the_part_that_has_issued_it, 9)
    issues = slices(trace, name=line_of_parts, cat="issue")
    found = [0] * len(parts)
    for part in slices(trace, cat="user_annotation"):
        inside = [it for it in issues if within(it, part) and it["tid"] == part["tid"]]
        found[int(part["name"])] = sum(it["args"]["commands"] for it in inside)
    assert found == parts


def scripted(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("scripted"):
        return x + 1


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
@pytest.mark.usefixtures("cluster")
def test_torchscript_compiles_parts_that_have_names() -> None:
    with dt.seeing.profile():
        pass
    assert torch.jit.script(scripted)(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.usefixtures("cluster")
def test_parts_that_torch_names() -> None:
    """By ``record_function`` of the script's, and of torch's own in its steps; those that are under way at either end
    of the profile are in none."""
    with dt.seeing.profile():  # from the first one on they are heard of
        pass
    x = torch.ones(8, 8, device="node:0", requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    before, after = torch.profiler.record_function("before"), torch.profiler.record_function("after")
    with before:
        prof = dt.seeing.profile().__enter__()
    with torch.profiler.record_function("forward"):
        (x @ x).sum().backward()
    with pytest.raises(KeyError), torch.profiler.record_function("failed"):
        raise KeyError
    optimizer.step()
    with after:
        prof.__exit__(None, None, None)
    trace = prof.to_dict()
    check_trace(trace)
    parts = slices(trace, cat="user_annotation")
    assert {"forward", "failed", "Optimizer.step#SGD.step"} <= {each["name"] for each in parts}
    assert not {"before", "after"} & {each["name"] for each in parts}
    (forward,) = (each for each in parts if each["name"] == "forward")
    issued = slices(trace, name=line(test_parts_that_torch_names, 12), cat="issue")
    assert issued
    assert all(within(it, forward) for it in issued)


@pytest.mark.usefixtures("cluster")
def test_one_at_a_time(tmp_path: Path) -> None:
    with dt.seeing.profile() as outer:
        since = line(test_one_at_a_time, 2)
        with pytest.raises(dt.DisttensorError, match=f"is recorded already, begun at {since}: .* leave the inner"):
            dt.seeing.profile(tmp_path / "inner.json").__enter__()
        with pytest.raises(dt.DisttensorError, match="nothing is recorded yet"):
            outer.to_dict()
    check_trace(outer.to_dict())
    with pytest.raises(FileNotFoundError):
        dt.seeing.profile(tmp_path / "missing" / "t.json").__enter__()
    with dt.seeing.profile(tmp_path / "next.json"):
        pass
    read(tmp_path / "next.json")


def stand() -> None:
    threading.Event().wait(HANG)


@pytest.mark.usefixtures("cluster")
def test_an_interrupt_in_the_block(tmp_path: Path) -> None:
    """What a node is at is not waited for; the file has all the same what was done, and what is not done."""
    with pytest.raises(KeyboardInterrupt), dt.seeing.profile(tmp_path / "t.json"):  # noqa: PT012
        torch.ones(3, device="node:0").neg_().cpu()
        held = dt.submit(stand, node=1)
        raise KeyboardInterrupt
    held.cancel()
    assert not is_watched()
    assert slices(read(tmp_path / "t.json"), name="aten::neg_")
    with pytest.raises(dt.errors.CancelledError):
        held.result()


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.usefixtures("cluster")
def test_readers_of_others_open_the_file(tmp_path: Path) -> None:
    why = "`pip install HolisticTraceAnalysis torch-tb-profiler`, whose readers this test has open the file"
    for module in ("hta", "torch_tb_profiler"):
        pytest.importorskip(module, reason=why)
    from hta.trace_analysis import TraceAnalysis
    from torch_tb_profiler.profiler.data import RunProfileData

    path = tmp_path / "traces" / "t.json.gz"
    path.parent.mkdir()
    with dt.seeing.profile(path) as prof:
        for _ in range(3):
            work()
            prof.step()
    read(path)
    run = RunProfileData.parse("worker", None, str(path), str(tmp_path))
    run.process()
    assert (run.distributed_info, run.steps_names) == ({"rank": 0, "world_size": 2, "backend": "auto"}, ["0", "1", "2"])
    assert "aten::mm" in {each.name for each in run.events}
    traces = TraceAnalysis(trace_dir=str(path.parent)).t
    assert "aten::mm" in traces.symbol_table.get_sym_table()
    assert {0, 1} <= {*traces.get_trace(0)["iteration"]}  # it leaves the last step out


# ---- rings -----------------------------------------------------------------------------------------------------------


def test_a_ring_keeps_the_last_events() -> None:
    ring = EventRing[int](room=3)
    for number in range(5):
        ring.append(number)
    assert ring.kept_events() == ([2, 3, 4], 2)


def test_messages_are_kept_by_their_commands_and_bytes() -> None:
    def sent(number: int, commands: int, size: int) -> SentMessage:
        return SentMessage(0.0, 0, number, (None,) * commands, bytes(size))

    ring = MessageRing(room=5, most=100)
    ring.append(sent(0, 3, 10))
    ring.append(sent(3, 2, 10))
    assert ring.kept_events() == ([sent(0, 3, 10), sent(3, 2, 10)], 0)
    ring.append(sent(5, 1, 10))
    assert ring.kept_events() == ([sent(3, 2, 10), sent(5, 1, 10)], 3)
    ring.append(sent(6, 1, 95))
    assert ring.kept_events() == ([sent(6, 1, 95)], 6)
    ring.append(sent(7, 1, 101))
    assert ring.kept_events() == ([], 8)
