"""How waiting ends when something else ends first: the session, the thread, the transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from variants import variants

import disttensor as dt
from disttensor import testing

busy, release = threading.Event(), threading.Event()


def be_busy() -> None:
    busy.set()
    release.wait(30)


@pytest.fixture
def session_of_a_busy_node() -> Iterator[AbstractContextManager[object]]:
    """A session whose node 1, in this process, runs a function until ``release``."""
    busy.clear()
    release.clear()
    with dt.init_master_worker(nodes=2, launcher="inproc") as session:
        thread = in_thread(lambda: dt.run(be_busy, node=1))
        assert busy.wait(20)
        try:
            yield session
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


@pytest.mark.parametrize("name", variants(WAITS))
def test_the_end_of_the_session_ends_the_waiting_of_other_threads(
    name: str, session_of_a_busy_node: AbstractContextManager[object]
) -> None:
    x = torch.ones(3, device="node:1")
    polls, raised = threading.Event(), list[BaseException]()
    with testing.at("wait", polls.set):
        thread = in_thread(lambda: WAITS[name](x), raised)
        assert polls.wait(20)
    session_of_a_busy_node.__exit__(RuntimeError, RuntimeError(), None)  # as when one ends its block
    thread.join(20)
    assert not thread.is_alive()
    assert [type(e) for e in raised] == [dt.DisttensorError]
    assert "shut down" in str(raised[0])
