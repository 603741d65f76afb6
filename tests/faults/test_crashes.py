"""What is said of a node that has ended: how, in which function, by which line, and its last commands."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from aftermath import aftermath, probe, within

import disttensor as dt
from disttensor import testing


def leaves() -> None:
    os._exit(3)


def crashes() -> None:
    ctypes.string_at(0)


def ends_its_thread() -> None:
    ctypes.CDLL(None).pthread_exit(None)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FUNCTIONS = [(leaves, "exit code 3"), (crashes, "killed by SIGSEGV"), (is_killed, "killed by SIGKILL")]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A session with a node for each test to lose, and one that stays."""
    with dt.init_master_worker(nodes=8, threads=1):
        probe(7)  # connections are made at first use: have them before the tests look for leaks
        yield


def issued(function: Callable[..., object], line: int) -> str:
    """The place ``line`` lines below a function's first."""
    return f"{__file__}:{function.__code__.co_firstlineno + line} in {function.__qualname__}"  # type: ignore[attr-defined]


def lost(node: int) -> dt.NodeLost:
    """The error of a node that was killed."""
    with pytest.raises(dt.NodeLost) as caught:  # noqa: PT012 - the loss need not be known at once
        while True:
            torch.ones(1, device=f"node:{node}").sum().item()
    return caught.value


@pytest.mark.fault(3)
@pytest.mark.parametrize("node", range(3))
def test_a_function_that_ends_its_node(node: int) -> None:
    function, end = FUNCTIONS[node]
    x = torch.ones(3, device=f"node:{node}")
    x *= 2
    with aftermath(7), within(1.0), pytest.raises(dt.NodeLost) as caught:
        dt.run(function, node=node)
    error, name = caught.value, function.__name__
    line = issued(test_a_function_that_ends_its_node, 7)
    assert error.cause == f"{end} while it ran {name}(), issued at {line}"
    assert re.fullmatch(rf"\d+ on node:{node}: {name}\(\), issued at {re.escape(line)}", error.commands[-1])
    earlier = error.commands[-2]
    assert "aten::mul_.Tensor" in earlier
    assert earlier.endswith(issued(test_a_function_that_ends_its_node, 5) + " (done)")
    if function is crashes:
        assert any(re.search(rf"test_crashes.py.*, line \d+ in {name}", text) for text in error.tail)
    lines = str(error).splitlines()
    assert lines[0].startswith(f"node {node} (host {error.host}, pid {error.pid}) is lost: {error.cause}; ")
    assert [text.strip() for text in lines[-len(error.commands) :]] == list(error.commands)
    assert lines[-len(error.commands) - 1] == "the last commands that it was sent:"


def test_the_error_stays_whole() -> None:
    """Raised again, and pickled."""
    with pytest.raises(dt.NodeLost) as caught:
        dt.run(leaves, node=3)
    error = caught.value
    assert len(error.commands) == 1
    other = lost(3)
    assert other is not error
    for again in (other, pickle.loads(pickle.dumps(error))):
        assert (str(again), again.commands, again.cause) == (str(error), error.commands, error.cause)


def test_a_function_on_a_stream() -> None:
    """It is known to have run, as one that runs in its turn is."""
    stream = dt.Stream("node:4")
    with pytest.raises(dt.NodeLost) as caught, stream:
        dt.run(leaves, node=4)
    line = issued(test_a_function_on_a_stream, 4)
    assert caught.value.cause == f"exit code 3 while it ran leaves(), issued at {line}"
    assert " on a stream of node:4: leaves()" in caught.value.commands[-1]


def test_a_node_that_had_nothing_to_do() -> None:
    assert torch.ones(3, device="node:5").sum().item() == 3
    testing.kill(5)
    with pytest.raises(dt.NodeLost) as caught:
        dt.synchronize(5)
    assert caught.value.cause == "killed by SIGKILL"
    assert all(text.endswith(" (done)") for text in caught.value.commands)


def test_a_function_that_ends_the_main_thread() -> None:
    """The process goes on with its other threads, and does nothing of what it is sent."""
    work = dt.submit(ends_its_thread, node=6)
    while dt.nodes()[6]["alive"]:
        dt.seeing.status()
    with pytest.raises(dt.NodeLost) as caught:
        work.result()
    line = issued(test_a_function_that_ends_the_main_thread, 2)
    cause = "the main thread of its process has ended (pthread_exit) while it ran ends_its_thread()"
    assert caught.value.cause == f"{cause}, issued at {line}"
