"""The flight record of a job: what it has, when it is written by itself, and where."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from began import Began, tell
from limits import HANG
from thread_nodes import thread_nodes
from virtual_time import VirtualClock

import disttensor as dt
from disttensor import testing
from disttensor.runtime.host.socket_folder import NotOurs
from disttensor.runtime.master.waiting import RECORDED
from disttensor.runtime.process import flight, page
from disttensor.runtime.process.flight import REPORTED, SENDING, SENT, WAITED, FlightRecord
from disttensor.runtime.process.observing import NodeGone
from disttensor.runtime.process.page import COLLECTIVE, COMMANDS, FUNCTION, RECEIVE, Page
from disttensor.runtime.protocol.errors import NodeLost
from disttensor.seeing import flight as seeing_flight
from disttensor.seeing import flight_files
from disttensor.seeing.flight import AGAIN, COMES, LONG, LOOK, FlightRecorder, lines_of, record_of
from disttensor.seeing.flight_files import FLIGHT, KEPT, FlightFolder, flight_folder
from disttensor.session import current


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FLIGHT, str(tmp_path / "flights"))
    return tmp_path / "flights"


# ---- what it has -----------------------------------------------------------------------------------------------------


def by_name(events: Sequence[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for event in events:
        found.setdefault(type(event).__name__, []).append(event)
    return found


def seven() -> int:
    return 7


def test_it_has_what_observers_at_the_seam_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[Any]()
    monkeypatch.setattr(page, "mine", Page())
    with thread_nodes(2) as made:
        for worker in made:
            for point in worker.seam.points().values():
                if point is not worker.seam.commands:
                    point.add(events.append)
        link = current.session().link
        dt.synchronize()
        before = [len(node.outbox.trail.records()) for node in link.nodes]
        ring_before = len(flight.own(page.mine.ring))
        seam = link.seam
        with link.lock:
            events.clear()
            for point in (seam.sent, seam.reported, seam.waited, seam.transferred):
                point.add(events.append)
        x = torch.ones(4, device="node:0")
        y = x.to("node:1") * 2
        dt.all_reduce([x, y])
        assert y.cpu().tolist() == [3.0] * 4
        assert dt.run(seven, node=1) == 7
        dt.synchronize()
        with link.lock:
            heard = list(events)
            trails = [
                [it for it, _ in node.outbox.trail.records()][n:] for node, n in zip(link.nodes, before, strict=True)
            ]
        plain = record_of(current.session(), "a test")
    ring = flight.own(page.mine.ring)[ring_before:]
    script, told = by_name(heard), by_name(events)

    def had(kind: int, records: list[FlightRecord]) -> list[tuple[int, int, int]]:
        return sorted((it.number, it.bytes, it.figure) for it in records if it.kind == kind)

    for rank, trail in enumerate(trails):
        sent = [event for event in script["MessageSent"] if event.node == rank]
        assert had(SENT, trail) == [(it.number, len(it.message), len(it.sites)) for it in sent]
        reported = [event for event in script["ReportTaken"] if event.node == rank]
        assert had(REPORTED, trail) == [(it.done, len(it.message), 0) for it in reported]
        waits = sorted(it.request for it in script["WaitEnded"] if it.node == rank and it.at - it.began >= RECORDED)
        assert [number for number, _, _ in had(WAITED, trail)] == waits
    applied = sorted((it.number, it.bytes, it.commands) for it in told["BatchApplied"])
    found = had(COMMANDS, ring)
    assert set(applied) <= set(found)
    assert len(found) - len(applied) <= 2  # of the end, when nobody listens to the nodes any more
    assert had(FUNCTION, ring) == [(it.number, 0, 0) for it in told["FunctionDone"]]
    assert had(COLLECTIVE, ring) == sorted((it.number, it.bytes, len(it.ranks)) for it in told["CollectiveDone"])
    moved = [it for it in told["TransferDone"] if it.use == "transfers"]
    for kind, is_sent in ((SENDING, True), (RECEIVE, False)):
        expected = sorted((it.transfer, it.bytes, it.peer & flight.COUNT) for it in moved if it.sent is is_sent)
        assert had(kind, ring) == expected != []
    lines = [it["line"] for node in plain["nodes"] for it in node["sent"] if it.get("line")]
    assert {line.partition(":")[0] for line in lines} == {Path(__file__).name}
    assert json.loads(json.dumps(plain)) == plain


def test_lines_say_who_did_what_and_when() -> None:
    sent = [{"at": 100.0 + k, "kind": "sent", "first": k, "last": k, "bytes": 2048, "line": "t.py:3"} for k in range(9)]
    applied = [
        {"at": 108.5, "kind": "receive", "transfer": 5, "peer": -1, "bytes": 8, "seconds": 0.25},
        {"at": 109.0, "kind": "function", "first": 9, "what": "step()", "line": "t.py:4", "under way": True},
    ]
    shown = lines_of({"rank": 1, "sent": sent, "applied": applied}, 110.0).splitlines()
    assert len(shown) == 1 + seeing_flight.SHOWN
    assert [row.split() for row in (shown[0], *shown[-3:])] == [
        ["ago", "who", "what", "commands", "bytes", "took", "line"],
        ["2.0", "s", "script", "sent", "8", "2.00", "KiB", "t.py:3"],
        ["1.5", "s", "node", "1", "receive", "from", "-1", "8", "bytes", "0.2", "s"],
        ["1.0", "s", "node", "1", "function", "step()", "9", "under", "way", "t.py:4"],
    ]
    assert lines_of({"rank": 1, "sent": [], "applied": []}, 110.0) == ""


# ---- of losses -------------------------------------------------------------------------------------------------------


def step(port: int) -> None:
    tell(port)
    threading.Event().wait(HANG)


def in_a_function() -> Any:
    there = threading.Event()
    with Began(there.set) as port:
        work = dt.submit(step, port, node=1)
    assert there.wait(HANG)
    return work.result


def in_a_collective() -> Any:
    x, y = torch.ones(1 << 20, device="node:0"), torch.ones(1 << 20, device="node:1")
    dt.synchronize()
    testing.stop(0)
    dt.all_reduce([x, y])
    until = time.monotonic() + HANG
    while dt.seeing.status(timeout=0.1).nodes[1].state != "waiting":
        assert time.monotonic() < until
    return y.cpu


@pytest.mark.parametrize("act", [in_a_function, in_a_collective])
def test_a_node_that_is_killed_leaves_what_it_was_at(act: Callable[[], Any], folder: Path) -> None:
    with dt.init_master_worker(nodes=2, threads=1):
        torch.ones(4, device="node:0").sum().item()
        result, pid = act(), dt.nodes()[1].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(NodeLost, match="killed by SIGKILL") as raised:
            result()
        testing.resume(0)
        told = raised.value
    (file,) = folder.iterdir()
    assert file.name.endswith("-lost.json")
    if told.rank == 1:
        assert f"flight record: {file}" in told.__notes__
        assert "flight record" not in str(told)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, file)] == [0o700, 0o600]
    found = json.loads(file.read_text())
    assert found["why"].startswith("node 1 is lost: killed by SIGKILL")
    assert found["script"]["pid"] == os.getpid()
    lost, other = found["nodes"]
    assert (lost["rank"], lost["pid"], lost["state"], other["rank"]) == (1, pid, "lost", 0)
    last = lost["applied"][-1]
    assert last["under way"]
    assert last["line"].startswith(f"{Path(__file__).name}:")
    if act is in_a_function:
        assert (last["kind"], last["what"]) == ("function", "step()")
    else:
        assert (last["kind"], last["what"], last["waits for"]) == ("collective", "all_reduce", 0)
    assert "message" in {it["kind"] for it in other["applied"]}
    assert lost["sent"][-1]["kind"] == "lost"
    numbers = [it["last"] for it in lost["sent"] if it["kind"] == "sent"]
    assert numbers[-1] + 1 == lost["commands sent"]


def test_a_session_that_loses_nobody_writes_nothing(folder: Path) -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        torch.ones(4, device="node:0").sum().item()
    assert not folder.exists()


def test_none_is_written_where_none_is_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLIGHT, "0")
    with dt.init_master_worker(nodes=1, threads=1):
        testing.kill(0)
        with pytest.raises(NodeLost) as raised:
            torch.ones(4, device="node:0").sum().item()
        assert "flight record" not in "".join(getattr(raised.value, "__notes__", ()))
    assert not folder.exists()


# ---- of waits --------------------------------------------------------------------------------------------------------


class Job:
    """A session without nodes' processes, whose time a test lets pass."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.waits = VirtualClock(), dict[Any, tuple[int, float]]()
        self.asked: list[int] = []
        nodes = [SimpleNamespace(rank=rank, life=None, connection=SimpleNamespace(ended=False, flight_at=0.0))
                 for rank in range(2)]  # fmt: skip
        link = SimpleNamespace(
            clock=self.clock,
            lock=nullcontext(),
            nodes=nodes,
            is_forked=False,
            seam=SimpleNamespace(lost=SimpleNamespace(remove=lambda listener: None)),
            waiting=SimpleNamespace(under_way=self.waits),
            losses=SimpleNamespace(
                sees=True, recall=lambda node: self.asked.append(node.rank), ask_launcher=lambda seconds: False
            ),
        )
        self.nodes = nodes
        self.session: Any = SimpleNamespace(link=link, flight="")
        self.folder = folder
        monkeypatch.setattr(seeing_flight, "record_of", lambda session, why: {"why": why})
        self.recorder = FlightRecorder(self.session, FlightFolder(str(folder), False))

    def wait(self, node: int) -> Any:
        request = _Request(node)
        self.waits[request] = 0, self.clock.now()
        return request

    def pass_time(self, seconds: float) -> list[str]:
        """Why files are written meanwhile."""
        before = set(self.folder.glob("*"))
        end = self.clock.now() + seconds
        while (left := end - self.clock.now()) > 0:
            self.clock.sleep(min(LOOK, left))
            self.recorder.look()
        new = sorted(set(self.folder.glob("*")) - before)
        return [json.loads(path.read_text())["why"] for path in new]


class _Request:
    def __init__(self, node: int) -> None:
        self.node = node


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path / "flights", monkeypatch)


def test_a_wait_is_recorded_once(job: Job) -> None:
    request = job.wait(1)
    assert job.pass_time(LONG - 0.1) == []
    (why,) = job.pass_time(2 * LOOK + COMES)
    assert re.fullmatch(r"the script has waited 1\d s for node 1", why)
    assert job.asked == [0, 1]
    assert job.pass_time(3 * AGAIN) == []
    del job.waits[request]
    job.wait(1)
    assert len(job.pass_time(LONG + 2 * LOOK + COMES)) == 1


def test_waits_for_one_node_are_recorded_once_a_minute(job: Job) -> None:
    first = job.wait(1)
    assert len(job.pass_time(LONG + 2 * LOOK + COMES)) == 1
    del job.waits[first]
    job.wait(1)
    assert job.pass_time(AGAIN - 10) == []
    other = job.wait(0)
    told = job.pass_time(LONG + 10)
    assert [text.partition("for ")[2] for text in told] == ["node 1", "node 0"]
    del job.waits[other]


def test_names_of_files_are_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a second their numbers are what tells them apart: the oldest are removed by their names."""
    monkeypatch.setattr(flight_files, "_numbers", count(8))
    names = [FlightFolder(str(tmp_path), False).name("wait") for _ in range(4)]
    assert names == sorted(names)


def test_it_is_written_as_soon_as_nodes_have_told(job: Job) -> None:
    job.wait(1)
    job.pass_time(LONG)
    assert list(job.folder.glob("*")) == []
    for node in job.nodes:
        node.connection.flight_at = job.clock.now()
    job.recorder.look()
    assert len(list(job.folder.glob("*"))) == 1
    assert job.session.flight == str(next(job.folder.iterdir()))


def test_a_loss_in_a_long_wait_is_one_record(job: Job) -> None:
    job.wait(1)
    job.pass_time(LONG)
    one, two = NodeLost(0, cause="killed"), NodeLost(1, cause="killed, too")
    job.recorder.note_loss(NodeGone(job.clock.now(), 0, one))
    job.recorder.note_loss(NodeGone(job.clock.now(), 1, two))
    job.recorder.end()
    (file,) = job.folder.iterdir()
    assert json.loads(file.read_text()) == {"why": "node 0 is lost: killed"}
    assert one.record == two.record == str(file)
    assert two.fresh_copy().__notes__ == [f"flight record: {file}"]
    assert two.fresh_copy().fresh_copy().__notes__ == [f"flight record: {file}"]


def test_an_error_while_it_is_written_is_one_warning(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.folder.write_text("in the way")
    for rank in range(2):
        job.recorder.note_loss(NodeGone(job.clock.now(), rank, NodeLost(rank)))
        job.clock.sleep(COMES)
        job.recorder.look()
    (told,) = [it for it in caplog.records if it.levelno == logging.WARNING]
    assert str(job.folder) in told.message
    assert "DISTTENSOR_FLIGHT=0 writes none" in told.message


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlightFolder:
    """The default folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = flight_folder({})
    assert made is not None
    assert made.path == str(tmp_path / "disttensor" / "flight")
    return made


def test_the_newest_files_are_kept_of_each_kind(own: FlightFolder) -> None:
    kept = []
    for kind in ("wait", "lost"):
        for _ in range(KEPT + 3):
            kept.append(own.name(kind))
            own.write(kept[-1], b"{}")
        if kind == "wait":
            Path(own.path, "flight-of-mine.json").touch()
            Path(own.path, "flight-20200101-000000-1-1-lost.json").symlink_to("/etc/passwd")
    assert {*map(str, Path(own.path).iterdir())} == {
        *kept[3 : KEPT + 3], *kept[-KEPT:], f"{own.path}/flight-of-mine.json"
    }  # fmt: skip
    assert kept == sorted(kept[: KEPT + 3]) + sorted(kept[KEPT + 3 :])


@pytest.mark.parametrize("how", ["link", "mode", "above", "owner", "file"])
def test_a_folder_of_others_is_refused(own: FlightFolder, how: str, tmp_path: Path) -> None:
    path, elsewhere = Path(own.path), tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if how != "above":
        path.parent.mkdir(mode=0o700)
    match how:
        case "link":
            path.symlink_to(elsewhere)
        case "mode":
            path.mkdir()
            path.chmod(0o777)
        case "above":
            path.parent.symlink_to(elsewhere)
        case "owner":
            if os.getuid():
                pytest.skip("only root can give a folder away")
            path.mkdir(mode=0o700)
            os.chown(path, 65534, 65534)
        case _:
            path.touch()
    with pytest.raises(OSError) as refused:  # noqa: PT011 - which one, the kernel says
        own.write(own.name("lost"), b"{}")
    assert isinstance(refused.value, NotOurs) == (how in ("mode", "above", "owner"))
    assert list(elsewhere.iterdir()) == []


def test_nothing_is_written_through_a_link(own: FlightFolder, tmp_path: Path) -> None:
    mine, path = tmp_path / "mine", own.name("lost")
    mine.write_text("mine")
    own.write(own.name("wait"), b"{}")
    Path(own.path, f".{os.path.basename(path)}").symlink_to(mine)
    with pytest.raises(FileExistsError):
        own.write(path, b"{}")
    assert mine.read_text() == "mine"
    Path(path).symlink_to(mine)  # in whose place the file comes
    own.write(path, b"{}")
    assert (mine.read_text(), Path(path).read_text(), Path(path).is_symlink()) == ("mine", "{}", False)


@pytest.fixture
def small() -> Iterator[None]:
    """No file of this process is longer than 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small")
def test_a_file_that_finds_no_room_leaves_nothing(own: FlightFolder) -> None:
    with pytest.raises(OSError, match="File too large"):
        own.write(own.name("lost"), b"x" * 10_000)
    assert os.listdir(own.path) == []
    own.write(own.name("lost"), b"x" * 1000)
    assert len(os.listdir(own.path)) == 1


def test_no_records_where_zero_is_said(tmp_path: Path) -> None:
    assert flight_folder({FLIGHT: "0"}) is None
    named = flight_folder({FLIGHT: str(tmp_path)})
    assert named is not None
    tmp_path.chmod(0o755)  # a folder of the user's own choice
    named.write(named.name("lost"), b"{}")
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600]
