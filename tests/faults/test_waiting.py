"""How waiting ends when something else ends first: the session, the thread, the transfer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from variants import mostly_slow

import disttensor as dt
from disttensor import init, state
from disttensor.runtime.channel.base import Transfer
from disttensor.runtime.errors import BrokenError
from disttensor.runtime.outbox import Outbox
from disttensor.runtime.request import Request, Waker

busy, release = threading.Event(), threading.Event()


def be_busy() -> None:
    busy.set()
    release.wait(30)


@pytest.fixture
def busy_node() -> Iterator[None]:
    """Node 1 of an in-process session runs a function until ``release``."""
    busy.clear()
    release.clear()
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        thread = in_thread(lambda: dt.run(be_busy, node=1))
        assert busy.wait(20)
        try:
            yield
        finally:
            release.set()
            thread.join(20)


def in_thread(program: Callable[[], object], raised: list[BaseException] | None = None) -> threading.Thread:
    def run() -> None:
        try:
            program()
        except BaseException as e:
            if raised is not None:
                raised.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "fetch": lambda x: x.cpu(),
    "fetched later": lambda x: dt.fetch(x).wait(),
    "synchronize": lambda x: dt.synchronize(),
    "run": lambda x: dt.run(abs, x, node=1),
    "upload": lambda x: torch.ones(80 << 20, dtype=torch.uint8).to("node:1"),
}


@pytest.mark.usefixtures("busy_node")
@pytest.mark.parametrize("name", mostly_slow(WAITS, 3))
def test_the_end_of_the_session_ends_the_waiting_of_other_threads(name: str) -> None:
    x = torch.ones(3, device="node:1")
    polls, link, raised = threading.Event(), state.session().link, list[BaseException]()
    wait = link.wait

    def note(*args: object, **options: object) -> object:
        polls.set()
        return wait(*args, **options)  # type: ignore[arg-type]

    link.wait = note  # type: ignore[method-assign, assignment]
    thread = in_thread(lambda: WAITS[name](x), raised)
    assert polls.wait(20)
    init._end(report=False)
    thread.join(20)
    assert not thread.is_alive()
    assert [type(e) for e in raised] == [dt.DisttensorError]
    assert "shut down" in str(raised[0])


@pytest.mark.usefixtures("busy_node")
@pytest.mark.parametrize("flush", ["flush", "exchange"])
def test_the_end_of_the_session_overtakes_a_flush(flush: str) -> None:
    link, raised = state.session().link, list[BaseException]()
    checked, check = threading.Event(), link.check

    def note(outbox: Outbox) -> None:
        check(outbox)
        checked.set()

    x = torch.ones(3, device="node:1")
    link.check = note  # type: ignore[method-assign]
    with link._lock:
        thread = in_thread(lambda: link.flush(x._place.outbox) if flush == "flush" else x.sum().item(), raised)
        assert checked.wait(20)  # it is about to send
        link.close()
    thread.join(20)
    init._end(report=False)
    assert [type(e) for e in raised] == [dt.DisttensorError]
    assert "shut down" in str(raised[0])


class Broken(Transfer):
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        raise BrokenError("a broken cable")

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        fn()


@pytest.mark.usefixtures("busy_node")
def test_a_broken_transfer_is_told_though_the_node_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    session = state.session()
    sync = session._sync
    monkeypatch.setattr(session, "_sync", lambda node, timeout: sync(node, 0.01))
    with pytest.raises(BrokenError, match="a broken cable"):
        session.end_transfer(Broken(), 1)


def test_a_request_outlives_the_thread_that_waited() -> None:
    request = Request(1, 0)

    def wait() -> None:
        request.waker = Waker()

    in_thread(wait).join()
    assert request.waker is not None
    request.resolve()
    assert os.eventfd_read(request.waker.fd) == 1
