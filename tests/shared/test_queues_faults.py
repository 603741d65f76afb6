"""Channels when something ends: a node, a function, the session, the right to speak."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from everywhere import await_waits

import disttensor as dt
from disttensor.tasks import Channel, ShutDown


@pytest.fixture
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        yield


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def tell_and_wait(c: Channel, begun: Channel) -> object:
    begun.put(os.getpid())
    return c.get()


def test_a_node_is_killed_while_others_wait(session: None, pool: ThreadPoolExecutor) -> None:
    """Who waits is told, in the script and on another node; the channel goes on; what the node has put is there."""
    c, begun = Channel(), Channel()
    killed = pool.submit(dt.run, tell_and_wait, c, begun, node=1)
    pid = begun.get()
    left = Channel()

    def caught(c: Channel, begun: Channel) -> object:
        begun.put(0)
        try:
            return c.get()
        except dt.NodeLost as e:
            begun.put(e.rank)
            return c.get()

    other = pool.submit(dt.run, caught, left, begun, node=0)
    assert begun.get() == 0
    await_waits(left)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(dt.NodeLost, match="node 1"):
        begun.get()
    with pytest.raises(dt.NodeLost):
        killed.result()
    assert begun.get() == 1
    left.put("goes on")
    assert other.result() == "goes on"
    c.put("not for the dead")
    assert c.get() == "not for the dead"


def test_a_loss_that_nobody_waited_through_is_told_before_the_next_wait(session: None) -> None:
    c = Channel()
    dt.run(lambda c: c.put(1), c, node=1)
    with pytest.raises(dt.NodeLost):
        dt.run(lambda: os.kill(os.getpid(), signal.SIGKILL), node=1)
    assert c.get() == 1
    with pytest.raises(dt.NodeLost, match="node 1"):
        c.get()
    c.close()
    with pytest.raises(ShutDown):
        c.get()


@pytest.mark.parametrize("lane", [False, True])
def test_a_function_that_waits_is_cancelled_and_takes_nothing(
    session: None, pool: ThreadPoolExecutor, lane: bool
) -> None:
    c, begun = Channel(), Channel()

    def waiting() -> object:
        if lane:
            with dt.stream(dt.Stream(node=1)):
                return dt.run(tell_and_wait, c, begun, node=1)
        return dt.run(tell_and_wait, c, begun, node=1)

    one = pool.submit(waiting)
    begun.get()
    assert dt.tasks.interrupt(1) == 1
    with pytest.raises(dt.errors.CancelledError):
        one.result()
    c.put(7)
    assert c.get(timeout=30) == 7
    c.put(8)
    assert dt.run(tell_and_wait, c, begun, node=1) == 8


def test_ctrl_c_ends_a_wait_of_the_script(session: None) -> None:
    c = Channel()
    main = threading.get_ident()

    def strike() -> None:
        await_waits(c)
        signal.pthread_kill(main, signal.SIGINT)

    striking = threading.Thread(target=strike)
    striking.start()
    with pytest.raises(KeyboardInterrupt):
        c.get()
    striking.join()
    c.put(3)
    assert c.get() == 3


def test_the_end_of_the_session_ends_waits(pool: ThreadPoolExecutor) -> None:
    with dt.init_master_worker(nodes=1, threads=1):
        c = Channel()
        waiting = pool.submit(c.get)
        await_waits(c)
    with pytest.raises(dt.DisttensorError, match="the session has ended"):
        waiting.result()
    with pytest.raises(dt.DisttensorError, match="the session has ended"):
        c.put(1)
    with pytest.raises(dt.DisttensorError, match="no session"):
        Channel()


def test_a_function_makes_none(session: None) -> None:
    with pytest.raises(dt.DisttensorError, match="made by the script"):
        dt.run(lambda: Channel(), node=0)


def in_a_fork(c: Channel) -> object:
    """What a process that a node has forked is told."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            c.put(1)
        except dt.DisttensorError as e:
            os.write(writing, str(e).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading, "rb") as told:
        return told.read().decode()


@pytest.mark.parametrize("connected", [True, False])
def test_a_process_that_a_node_forks_has_none(session: None, connected: bool) -> None:
    """It shares the node's connection, or its keys: it would wait for ever, or the node would."""
    c = Channel()
    if connected:
        dt.run(c.qsize, node=1)
    assert "no node of a session" in str(dt.run(in_a_fork, c, node=1))
    dt.run(c.put, 2, node=1)
    assert c.get() == 2
