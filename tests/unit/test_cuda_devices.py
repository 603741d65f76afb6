"""What a node asks CUDA for about its devices and their streams, by stand-ins: the order that functions, actors and
replays have with other streams, and which device is short of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from node_kit import ALL, Node

from disttensor.runtime.host import cuda_devices
from disttensor.runtime.node import actors
from disttensor.runtime.protocol import commands as c

Log = list[tuple[Any, ...]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Three devices, of which this process has used the first and the last. Gives what CUDA is told."""
    log: Log = []

    class Stream:
        def __init__(self, index: int) -> None:
            self.index = index

        def wait_event(self, event: Any) -> None:
            log.append((self.index, "waits for", event.at))

    class Event:
        def record(self, stream: Stream) -> None:
            self.at = (stream.index, len(log))

    for name, function in {
        "is_initialized": lambda: True,
        "device_count": lambda: 3,
        "current_stream": Stream,
        "current_device": lambda: 0,
        "synchronize": lambda index: log.append(("synchronize", index)),
        "mem_get_info": lambda device: (device.index + 100, 1000),
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index != 1, raising=False)
    return log


@contextmanager
def a_node() -> Iterator[Node]:
    node = Node()
    try:
        yield node
    finally:
        node.channel.close()
        node.master.close()


def test_a_process_that_has_not_used_cuda_asks_for_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert cuda_devices.in_use() == []
    cuda_devices.follow(cuda_devices.ends())
    with a_node() as node:
        assert node.do(c.Sync(1)) == [c.Done(1)]
    assert log == []


def test_a_synchronization_has_all_devices_that_the_process_has_used(log: Log) -> None:
    """Also those that only a function of the user's has used, which no command names."""
    with a_node() as node:
        assert node.do(c.Sync(1)) == [c.Done(1)]
    assert log == [("synchronize", 0), ("synchronize", 2)]


def test_the_calls_of_an_actor_come_one_after_the_other_on_whatever_streams(log: Log) -> None:
    class Thing:
        def call(self, number: int) -> int:
            log.append(("call", number))
            return number

        def close(self) -> None:
            log.append(("close",))

    actor = actors.ActorInstance("Thing", 0, ("job", 1))
    actor.object = Thing()
    assert [actors.call_of(actor, "call", (k,), {}) for k in (1, 2)] == [1, 2]
    actor.close()

    def follows(at: int) -> Log:
        return [(device, "waits for", (of, at)) for of in (0, 2) for device in (0, 2)]

    assert log == [("call", 1), *follows(1), ("call", 2), *follows(6), ("close",)]


@pytest.mark.parametrize(
    ("said", "device"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 2 has a total capacity of 1.00 GiB", 2),
        ("CUDA out of memory", 0),
    ],
)
def test_the_device_that_is_short_of_memory_is_the_one_that_the_error_names(log: Log, said: str, device: int) -> None:
    """Not the current one, which is the first."""
    with a_node() as node:
        node.executor.cuda = True
        node.executor.report_failure("aten::empty", torch.OutOfMemoryError(said))
        (failed,) = node.replies
        assert isinstance(failed, c.Failed)
        assert failed.holdings is not None
        assert failed.holdings.free == 100 + device


def test_a_replay_takes_over_what_it_reads_and_what_it_has_written() -> None:
    """Beside lanes of a device: so that its default stream waits for theirs, and theirs for it."""
    taken: list[list[Any]] = []

    def take_over(tensors: Iterable[Any]) -> None:
        taken.append([None if t is None else t[0, 0].item() for t in tensors])

    with a_node() as node:
        node.do(*ALL, c.Call(1, 1, (2.0,)))
        part = c.GraphPart(1, (c.Call(3, 10, (9, 3.0)), c.Call(2, 11, (10, 10))), ())
        node.do(part, c.EndGraph(1, (), (11,), (), "interpreter"))
        node.executor.take_over = take_over
        for k in (1, 2):
            taken.clear()
            node.do(c.Replay(1, 0, (), (), ()))
            assert taken == [[2.0 * 3 ** (k - 1)], [2.0 * 3**k, 4.0 * 3**k]]
