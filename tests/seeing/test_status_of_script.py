"""``dt.seeing.status()`` where nodes are threads: what the script knows by itself, and how it is shown."""

from __future__ import annotations

import html.parser
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from limits import HANG

import disttensor as dt
from disttensor import testing
from disttensor.seeing import CopyStatus, GpuStatus, JobStatus, LineStatus, NodeStatus, reading
from disttensor.seeing.status import phrase
from disttensor.seeing.summary import says
from disttensor.tasks import held

HERE = os.path.basename(__file__)


@pytest.fixture
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=4, launcher="inproc"):
        yield


class Gate:
    """What a function on a node waits at: it is a thread of this process."""

    def __init__(self) -> None:
        self.inner, self._outer = os.pipe()

    def open(self) -> None:
        os.write(self._outer, b"x")

    def close(self) -> None:
        os.close(self.inner)
        os.close(self._outer)

    def open_for_who_waits(self) -> None:
        """Opens it once a thread of the script waits for a node, and polls by now."""
        await_status(lambda status: any(wait.seconds > 0.02 for wait in status.script.waits))
        self.open()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


def await_status(until: Callable[[JobStatus], bool]) -> None:
    deadline = time.monotonic() + HANG
    while not until(dt.seeing.status()):
        assert time.monotonic() < deadline


def in_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run)
    thread.start()
    return thread


def lines() -> dict[str, LineStatus]:
    """The lines that have waited, by their code."""
    return {it.code: it for it in dt.seeing.status().lines}


@pytest.mark.usefixtures("session")
def test_the_waits_of_the_script_by_line(gate: Gate) -> None:
    """Of every kind, each with what the line waits by."""
    x = torch.ones(4, device="node:0")
    for _ in range(3):
        x.sum().item()
    x.cpu()
    held = dt.submit(os.read, gate.inner, 1, node=0)
    opener = in_thread(gate.open_for_who_waits)
    dt.synchronize()
    opener.join()
    assert held.result() == b"x"
    found = lines()
    assert (found["x.sum().item()"].waits, found["x.cpu()"].waits) == (3, 1)
    assert found["dt.synchronize()"].waits == 1
    assert found["dt.synchronize()"].seconds > 0.02
    assert {it.line.partition(":")[0] for it in found.values()} == {HERE}
    most = [it.seconds for it in dt.seeing.status().lines]
    assert most == sorted(most, reverse=True)


@pytest.mark.usefixtures("session")
def test_a_line_that_waits_for_room_is_counted(gate: Gate) -> None:
    x = torch.ones(4, device="node:1")
    held = dt.submit(os.read, gate.inner, 1, node=1)
    opener = in_thread(gate.open_for_who_waits)
    with testing.limits(window=2000):
        for _ in range(3000):
            x = x * 1
    opener.join()
    held.result()
    assert lines()["x * 1"].waits >= 1


class Reader:
    def read(self, descriptor: int) -> bytes:
        import os

        return os.read(descriptor, 1)


@pytest.mark.usefixtures("session")
def test_queues_and_actors(gate: Gate) -> None:
    assert (dt.seeing.status().queues, dt.seeing.status().actors) == ((), ())
    queue, work = dt.tasks.Channel(name="batches"), dt.tasks.WorkQueue()
    lock, table = dt.tasks.Lock(), dt.tasks.SharedDict(name="seen")
    queue.put(1)
    queue.put(2)
    table["a"] = 1
    full = dt.tasks.Channel(maxsize=1)
    full.put(0)
    putting = in_thread(lambda: full.put(1))
    taking = in_thread(work.get)
    waiting = {("Channel", ""): (1, 0, 1), ("WorkQueue", ""): (0, 1, 0)}
    idle = {("Channel", "batches"): (2, 0, 0), ("Lock", ""): (0, 0, 0), ("SharedDict", "seen"): (1, 0, 0)}

    def figures(status: JobStatus) -> dict[tuple[str, str], tuple[int, int, int]]:
        return {(it.kind, it.name): (it.items, it.taking, it.putting) for it in status.queues}

    await_status(lambda status: figures(status) == waiting | idle)
    assert "WorkQueue" in repr(dt.seeing.status())
    assert [full.get(), full.get()] == [0, 1]
    work.put(1)
    putting.join()
    taking.join()
    assert lock.acquire()
    lock.release()
    actor = dt.actor(Reader, node=2)
    works = [actor.read(gate.inner), actor.read(gate.inner)]
    await_status(lambda status: [(it.name, it.node, it.calls) for it in status.actors] == [("Reader", 2, 2)])
    gate.open()
    assert works[0].result() == b"x"
    await_status(lambda status: [it.calls for it in status.actors] == [1])
    gate.open()
    works[1].result()
    await_status(lambda status: [it.calls for it in status.actors] == [0])


@pytest.mark.usefixtures("session")
def test_nodes_that_are_threads_have_rows_of_what_the_script_knows(gate: Gate) -> None:
    dt.synchronize()
    status = dt.seeing.status()
    assert [(it.rank, it.state, it.age, it.tensors, it.cpu) for it in status.nodes] == [
        (k, "idle", None, None, None) for k in range(4)
    ]
    held = dt.submit(os.read, gate.inner, 1, node=3)
    x = torch.ones(2, device="node:3") + 1
    it = dt.seeing.status().nodes[3]
    assert it.state == "unseen"
    assert it.behind >= 2
    await_status(lambda status: status.nodes[3].oldest > 0)
    assert all(it.oldest == 0 for it in dt.seeing.status().nodes if not it.behind)
    gate.open()
    held.result()
    assert x.sum().item() == 4


@pytest.mark.usefixtures("session")
def test_a_mesh_is_one_row_and_smaller_ones_in_it_are_none() -> None:
    mesh = dt.mesh(dp=2, tp=2)
    half = mesh.slice(dp=0)
    status = dt.seeing.status()
    assert [(it.name, it.nodes, it.says) for it in status.meshes] == [("dp=2, tp=2", (0, 1, 2, 3), "all idle")]
    assert len(status.nodes) == 4
    assert sum(text.startswith(("0 ", "1 ", "2 ", "3 ")) for text in repr(status).splitlines()) == 0
    assert dt.seeing.status(half).coordinates == ("tp=0", "tp=1")
    assert dt.seeing.status(mesh).coordinates == ("dp=0, tp=0", "dp=0, tp=1", "dp=1, tp=0", "dp=1, tp=1")


@pytest.mark.usefixtures("session")
def test_a_lost_node_has_a_row() -> None:
    mesh = dt.mesh(dp=4)
    x = torch.ones(3, device=mesh.device) * 2
    dt.synchronize()
    dt.kill(1)
    status = dt.seeing.status()
    assert [it.state for it in status.nodes] == ["idle", "lost", "idle", "idle"]
    assert status.nodes[1].note.startswith("killed by disttensor.kill, at ")
    assert status.scalars()["nodes/lost"] == 1
    assert status.meshes[0].says.startswith("dp=1 lost: killed by disttensor.kill, at ")
    assert [it.state for it in dt.seeing.status(mesh).nodes] == ["idle", "lost", "idle", "idle"]
    origin = dt.seeing.whence(x)
    assert origin.failure.startswith("dp=1: node 1 is lost: killed by disttensor.kill, at ")
    assert [bool(each.failure) for each in origin.ranks] == [False, True, False, False]
    assert {each.made.operator for each in origin.ranks if each.made is not None} == {"aten::mul.Tensor"}


@pytest.mark.usefixtures("session")
def test_what_the_script_is_at(gate: Gate) -> None:
    results = dt.map(os.read, iter([gate.inner] * 3), [1] * 3, nodes=[0])
    gate.open()
    assert next(results) == b"x"
    (it,) = dt.seeing.status().script.undertakings
    assert (it.what, it.line) == (
        "map of read: 1 of 2 so far done, 1 under way",
        f"{HERE}:{test_what_the_script_is_at.__code__.co_firstlineno + 2}",
    )
    assert "the script is at\n" in repr(dt.seeing.status())
    gate.open()
    gate.open()
    assert list(results) == [b"x", b"x"]
    assert dt.seeing.status().script.undertakings == ()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the script's waits were for, in words."""
    found = list[str]()

    @contextmanager
    def during(words: Callable[[], str], is_wait: bool) -> Iterator[None]:
        assert is_wait
        found.append(words())
        yield

    monkeypatch.setattr(held.undertakings, "mine", SimpleNamespace(during=during))
    return found


@pytest.mark.usefixtures("session")
def test_a_wait_for_what_tasks_share_says_what_for(noted: list[str]) -> None:
    begun, full, work = dt.tasks.Channel(name="begun"), dt.tasks.Channel(1), dt.tasks.WorkQueue(name="work")
    lock, barrier, settings = (
        dt.tasks.Lock("log"),
        dt.tasks.Barrier(2, name="both"),
        dt.tasks.SharedDict(name="settings"),
    )
    full.put(1)
    work.put(1)
    work.get()
    has_lock, may_end = threading.Event(), threading.Event()
    holder = in_thread(lambda: (lock.acquire(), has_lock.set(), may_end.wait(HANG)))
    assert has_lock.wait(HANG)
    assert noted == []  # none of these has waited
    for wait in (
        lambda: begun.get(timeout=0.001),
        lambda: dt.tasks.select(begun, dt.tasks.Channel(), timeout=0.001),
        lambda: full.put(2, timeout=0.001),
        lambda: work.get(timeout=0.001),
        lambda: work.join(timeout=0.001),
        lambda: barrier.wait(timeout=0.001),
        lambda: settings.wait("rate", timeout=0.001),
    ):
        with pytest.raises((queue.Empty, queue.Full, threading.BrokenBarrierError, TimeoutError)):
            wait()
    assert not lock.acquire(timeout=0.001)
    may_end.set()
    holder.join()
    assert noted == [
        "an item of Channel begun",
        "an item of one of Channel begun, a Channel",
        "room in a Channel",
        "an item of WorkQueue work",
        "all of WorkQueue work to be done",
        "the others at Barrier both",
        "a key of SharedDict settings",
        "Lock log",
    ]


@pytest.mark.usefixtures("session")
def test_a_status_has_waits_for_what_tasks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a second on, of any thread."""
    begun = dt.tasks.Channel(name="begun")
    waiter = in_thread(lambda: begun.get())
    await_status(lambda status: status.queues[0].taking == 1)
    assert dt.seeing.status().script.undertakings == ()
    monkeypatch.setattr(reading, "OLD", 0.0)
    (it,) = dt.seeing.status().script.undertakings
    line = test_a_status_has_waits_for_what_tasks_share.__code__.co_firstlineno + 4
    assert (it.what, it.line) == ("waiting for an item of Channel begun", f"{HERE}:{line}")
    begun.put(1)
    waiter.join()
    assert dt.seeing.status().script.undertakings == ()


def test_without_a_session() -> None:
    with pytest.raises(dt.DisttensorError, match="init_master_worker"):
        dt.seeing.status()


# ---- how it is shown -------------------------------------------------------------------------------------------------

IDLE = NodeStatus(0, "a", 1, ("cpu",), "idle", "", "", 0.0, None, "", 0, 1, 4, 5, 0.5, 0.0, 0.0)
RUNNING = replace(IDLE, state="running", what="step()", line="train.py:33")
WAITING = replace(IDLE, state="waiting", what="all_reduce", waits_for=1)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (IDLE, "idle"),
        (RUNNING, "running step()"),
        (replace(RUNNING, seconds=3.21, note="it is in the kernel, for a device"),
         "running step() 3.2 s: it is in the kernel, for a device"),
        (replace(WAITING, seconds=75.0), "waiting for node 1 in all_reduce 1:15 min"),
        (replace(WAITING, what="", waits_for=-1), "waiting for the script"),
        (replace(RUNNING, state="stopped", seconds=2.0), "stopped in step() 2.0 s"),
        (replace(IDLE, state="lost", note="killed by SIGKILL"), "lost: killed by SIGKILL"),
        (replace(RUNNING, seconds=float("nan")), "running step()"),
    ],
)  # fmt: skip
def test_what_a_node_is_at_in_words(row: NodeStatus, expected: str) -> None:
    assert phrase(row) == expected


GPU = GpuStatus("cuda:0", 61 << 30, 80 << 30, 0.97)


@pytest.mark.usefixtures("session")
def test_the_columns_of_a_node() -> None:
    status = dt.seeing.status()
    row = replace(
        RUNNING, behind=1204, oldest=3.0, tensors=4, bytes=1 << 20, peak=2 << 20, rss=5 << 20, peak_rss=6 << 20, cpu=0.5
    )
    shown = repr(replace(status, nodes=(row, *status.nodes[1:])))
    head = r"node +host +state +line +behind +cpu +rss +peak +tensors +held +age\n"
    line = r"0 +a +running step\(\) +train.py:33 +1,204 \(3\.0 s\) +50% +5.00 MiB +6.00 MiB +4 "
    line += r"+1.00 MiB \(peak 2.00 MiB\) +0\.0 s\n"
    assert re.search(head + line, shown), shown
    shown = repr(replace(status, nodes=(replace(row, gpus=(GPU,)), *status.nodes[1:])))
    assert re.search(r" age +gpu +gpu memory\n.* 0\.0 s +97% +61.00 GiB of 80.00 GiB\n", shown), shown
    copy = CopyStatus("script", "node 0", "tcp", "transfers", 8 << 30, 3 << 30, 2.5, 1.0 * (1 << 30), 5.0, "train.py:9")
    shown = repr(replace(status, copies=(copy, replace(copy, done=None, rate=None, left=None, line=""))))
    figures = r"script +node 0 +tcp +transfers +3.00 GiB +8.00 GiB +2\.5 s +1.00 GiB/s +5\.0 s +train\.py:9 *\n"
    assert re.search(figures + r"script +node 0 +tcp +transfers +- +8.00 GiB +2\.5 s +- +- *\n", shown + "\n"), shown


def summed(*rows: NodeStatus) -> str:
    ranked = [replace(row, rank=rank) for rank, row in enumerate(rows)]
    return says([f"dp={rank}" for rank in range(len(rows))], ranked)


def test_what_a_mesh_is_at_in_words() -> None:
    assert summed(*[IDLE] * 64) == "all idle"
    assert summed(*[RUNNING] * 64) == "all running step() train.py:33"
    assert summed(RUNNING, IDLE, IDLE) == "dp=0 running step() train.py:33; 2 idle"
    assert summed(IDLE, RUNNING, *[WAITING] * 62) == (
        "dp=2, dp=3, dp=4 and 59 others waiting for dp=1; dp=0 idle; dp=1 running step() train.py:33"
    )
    assert summed(IDLE, replace(WAITING, waits_for=77)) == "dp=1 waiting for node 77; dp=0 idle"
    lost = replace(IDLE, state="lost", note="killed by SIGKILL")
    assert summed(IDLE, IDLE, lost) == "dp=2 lost: killed by SIGKILL; 2 idle"
    assert summed(IDLE) == "dp=0 idle"


class Cells(html.parser.HTMLParser):
    """The texts of a page, and its tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.usefixtures("session")
def test_it_is_shown_as_text_and_as_html_and_is_plain_data() -> None:
    status = dt.seeing.status()
    hostile = "<script>alert(1)</script>"
    mine = replace(status, nodes=(replace(RUNNING, what=hostile, host=hostile), *status.nodes[1:]))
    found = Cells(mine._repr_html_())
    assert hostile in found.texts
    assert f"running {hostile}" in found.texts
    assert found.tags == {"table", "caption", "tr", "th", "td"}
    assert f"running {hostile}" in repr(mine)
    long = replace(status, nodes=(replace(IDLE, state="lost", note="x" * 200), *status.nodes[1:]))
    assert f"lost: {'x' * 80} ...  " in repr(long)
    assert f"lost: {'x' * 200}" in Cells(long._repr_html_()).texts
    plain = json.loads(json.dumps(mine.to_dict()))
    assert plain["nodes"][0]["what"] == hostile
    assert plain["nodes"][0]["devices"] == ["cpu"]
    figures = mine.scalars()
    assert figures["nodes"] == 4
    assert (figures["node/0/behind"], figures["node/0/bytes"]) == (0, 4)
    assert "node/1/bytes" not in figures  # nobody knows them
    assert all(type(value) is float for value in figures.values())


#: The names of scalars.
SCALARS = re.compile(
    r"nodes|nodes/lost|script/(commands|rss|uploads|fetches|waiting)"
    r"|node/\d+/(behind|oldest|tensors|bytes|peak|rss|peak_rss|cpu|age|slow|cuda:\d/(used|busy))"
)


@pytest.mark.usefixtures("session")
def test_scalars_have_names_that_stay() -> None:
    """They say nothing of what the job is at, and there are ten of a node at most, and two of its devices."""
    status = dt.seeing.status()
    known = {"tensors": 1, "bytes": 4, "peak": 4, "rss": 4, "peak_rss": 4, "cpu": 0.5, "age": 0.1}
    gpus = tuple(GpuStatus(f"cuda:{index}", 3, 8, 0.25) for index in range(2))
    whole = replace(
        status,
        nodes=tuple(replace(it, gpus=gpus, **known) for it in status.nodes),
        slow=tuple(dt.seeing.SlowStatus(it.rank, "", "", 0.5, "", "", "") for it in status.nodes),
        lines=(LineStatus("train.py:3", "x.item()", 2, 1.5),),
    )
    busy = replace(whole, nodes=(replace(whole.nodes[0], state="running", what="step()"), *whole.nodes[1:]))
    for it in (status, whole, busy):
        assert [name for name in it.scalars() if not SCALARS.fullmatch(name)] == []
    assert whole.scalars().keys() == busy.scalars().keys()
    assert len(whole.scalars()) == 7 + 4 * (10 + 2 * len(gpus))
