"""The master's I/O when a node gets nothing any more, with in-process nodes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from handlers import TimeUp, handled, time_up

import disttensor as dt
from disttensor import testing
from disttensor.runtime.channel.base import Transfer
from disttensor.runtime.master.link import Link
from disttensor.runtime.master.outbox import Outbox
from disttensor.runtime.master.requests import Request, Waker
from disttensor.runtime.process.signals import whole
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import BrokenError
from disttensor.session import current
from disttensor.startup import start

#: Seconds for what takes a moment; longer is a hang.
SOON = 20


@pytest.fixture
def link() -> Iterator[Link]:
    """The link of a session that the test may break."""
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        yield current.session().link


def cut(link: Link, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next message to a node finds its connection broken."""
    send = link.hub.send

    def broken(to: int, message: bytes) -> None:
        if to == rank:
            raise BrokenError(f"node {rank} is gone")
        send(to, message)

    monkeypatch.setattr(link.hub, "send", broken)


def use(x: torch.Tensor, until: type[Exception]) -> None:
    while True:
        try:
            x + 1
        except until:
            return


@pytest.mark.parametrize("end", ["lost", "shut down"])
def test_nothing_is_kept_for_a_node_that_gets_nothing(end: str, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    x, box = torch.ones(3, device="node:1"), link.outboxes[1]
    dt.synchronize()
    if end == "lost":
        cut(link, 1, monkeypatch)
    else:
        dt.shutdown()
    for _ in range(100):
        use(x, dt.NodeLost if end == "lost" else dt.DisttensorError)
    assert len(box.commands) <= 2
    assert len(box.dead) <= 2


def test_a_lost_node_is_said_to_those_who_use_it(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.ones(3, device="node:1"), torch.ones(3, device="node:0")
    dt.synchronize()
    fetches: list[Callable[[], object]] = [lambda: y.sum().item(), lambda: y.cpu().sum().item()]
    for fetch in fetches:
        link.outboxes[1].add(c.Free(0, ()))  # to be flushed before the master blocks
        cut(link, 1, monkeypatch)
        assert fetch() == 3
    with pytest.raises(dt.NodeLost):
        use(x, KeyError)


def test_a_question_that_cannot_be_sent(link: Link) -> None:
    place = torch.ones(3, device="node:1")._place  # type: ignore[attr-defined]
    with pytest.raises(dt.DisttensorError, match="can't be sent"):
        place.session.ask(place, c.Answer, lambda id: c.Ask(id, c.Call(0, 1, (1 << 70,))), None)
    assert link._requests == {}


started, release = threading.Event(), threading.Event()


def hold() -> None:
    """Keeps a node busy."""
    started.set()
    assert release.wait(SOON)


@pytest.fixture
def pool(link: Link) -> Iterator[ThreadPoolExecutor]:
    """For what has to wait; node 1 is busy until the end of the test."""
    started.clear()
    release.clear()
    with ThreadPoolExecutor(3) as pool:
        pool.submit(dt.run, hold, node=1)
        assert started.wait(SOON)
        yield pool
        release.set()


def test_synchronize_ends_in_time_at_a_full_window(pool: ThreadPoolExecutor) -> None:
    x, full = torch.zeros(1, device="node:1"), threading.Event()
    with testing.at("window", full.set):
        issuing = pool.submit(lambda: [x.add_(1) for _ in range(2 * int(testing.limit("window")))])
        assert full.wait(SOON)
        with pytest.raises(TimeoutError, match="node 1 has not answered"):
            pool.submit(current.session().synchronize, 1, 0.01).result(SOON)
        release.set()
        issuing.result(SOON)


def test_the_line_that_a_busy_node_is_at(link: Link, pool: ThreadPoolExecutor) -> None:
    assert link.outboxes[1].running() is not None


@pytest.mark.parametrize("flush", ["flush", "exchange"])
def test_the_end_of_the_session_overtakes_a_flush(flush: str, link: Link, pool: ThreadPoolExecutor) -> None:
    checked, check = threading.Event(), link.check

    def note(outbox: Outbox) -> None:
        check(outbox)
        checked.set()

    x = torch.ones(3, device="node:1")
    link.check = note  # type: ignore[method-assign]
    with link._lock:
        ending = pool.submit(lambda: link.flush(link.outboxes[1]) if flush == "flush" else x.sum().item())
        assert checked.wait(SOON)  # it is about to send
        link.close()
    with pytest.raises(dt.DisttensorError, match="shut down"):
        ending.result(SOON)
    start._end(report=False)


class Broken(Transfer):
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        raise BrokenError("a broken cable")

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        fn()


@pytest.mark.usefixtures("pool")
def test_a_broken_transfer_is_told_though_the_node_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    session = current.session()
    sync = session._sync
    monkeypatch.setattr(session, "_sync", lambda node, timeout: sync(node, 0.01))
    with pytest.raises(BrokenError, match="a broken cable"):
        session.transfers.end(Broken(), 1)


def test_a_request_outlives_the_thread_that_waited() -> None:
    request = Request(1, 0)

    def wait() -> None:
        request.waker = Waker()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert request.waker is not None
    request.resolve()
    assert os.eventfd_read(request.waker.fd) == 1


def test_small_collectives_leave_with_what_follows_and_to_all_nodes_at_once() -> None:
    with dt.init_master_worker(nodes=4, launcher="inproc"):
        link = current.session().link
        xs = [torch.ones(3, device=f"node:{k}") for k in range(4)]
        dt.synchronize()
        with link._lock:  # nothing else sends
            for box in link.outboxes:
                box.urge(100)
            sent = [box.messages for box in link.outboxes]
            dt.all_reduce(xs[1:])
            dt.all_reduce(xs[:2])
            assert [box.messages for box in link.outboxes] == sent
            link.flush(link.outboxes[3])
            assert [box.messages for box in link.outboxes] == [n + 1 for n in sent]
        assert [x.tolist() for x in xs] == [[4.0] * 3, [4.0] * 3, [3.0] * 3, [3.0] * 3]


def test_what_no_safe_point_follows_arrives_again() -> None:
    @whole
    def finalizer() -> None:
        signal.raise_signal(signal.SIGALRM)

    with dt.init_master_worker(nodes=2, launcher="inproc"), handled(time_up):
        torch.ones(3, device="node:1").sum().item()
        with pytest.raises(TimeUp):  # noqa: PT012
            finalizer()
            threading.Event().wait(SOON)
