"""Bounds of what crosses a wire: one less, as much, and one more, each way that there is. Either the value arrives, or
the line that has sent it gets an error; the connection goes on. tests/unit/test_bounds_table.py lists all bounds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bounds_kit import WAYS, Job
from limits import HANG

import disttensor as dt
from disttensor.errors import BrokenError, DisttensorError, NodeLost, RemoteError
from disttensor.runtime.channel.tcp import dial
from disttensor.runtime.channel.tcp.listener import Listener
from disttensor.runtime.endpoints import frames
from disttensor.runtime.protocol import codec, shared_objects
from disttensor.runtime.protocol.values import arrays, form, plain_types
from disttensor.tasks import Channel, Endpoint, Lock, SharedDict


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    file = tmp_path_factory.mktemp("job") / "file"
    with dt.init_master_worker(nodes=2, threads=1), Endpoint(file) as endpoint, dt.tasks.connect(file) as client:
        made = Job(Channel(), endpoint.clients(1, HANG)[0], client)
        made.check()  # opens what is opened when it is first needed
        yield made


# ---- values ----------------------------------------------------------------------------------------------------------


def nested(wrap: Callable[[Any], Any], n: int) -> Any:
    value: Any = 1
    for _ in range(n):
        value = wrap(value)
    return value


class Odd(Exception):
    """With as many attributes as are asked for."""


def arrives(job: Job, way: str, make: Callable[[int], Any], n: int) -> bool | None:
    """Whether a value arrives as it was; None where the line that sends it gets an error that is no connection's."""
    try:
        return bool(getattr(job, way)(make, n))
    except (BrokenError, NodeLost, RemoteError):
        raise
    except (ValueError, TypeError, RuntimeError):
        return None


@dataclass(frozen=True)
class Case:
    """A kind of value, and the largest one that crosses. ``ways``: those that have the bound."""

    make: Callable[[int], Any]
    most: int
    ways: tuple[str, ...] = WAYS


CASES = {
    "dims of a tensor": Case(lambda n: torch.ones([1] * n), codec.MAX_TENSOR_DIMS),
    "a size of a tensor": Case(
        lambda n: torch.ones(0, n), shared_objects.MAX_SIZE - 1, ("from_node", "to_node", "from_client", "to_client")
    ),
    "a size beside none": Case(lambda n: torch.ones(0, 1).expand(0, n), codec._COUNTABLE // 4, ("returned",)),
    "tensors": Case(lambda n: [torch.ones(1)] * n, frames.MAX_TENSORS, WAYS[-4:]),
    "depth of lists": Case(partial(nested, lambda x: [x]), form.MAX_DEPTH + 1),
    "depth of tuples": Case(partial(nested, lambda x: (x,)), form.MAX_DEPTH + 1),
    "depth of dicts": Case(partial(nested, lambda x: {"x": x}), form.MAX_DEPTH + 1),
    "depth of other dicts": Case(partial(nested, lambda x: {None: x}), form.MAX_DEPTH + 1),
    "depth of sets": Case(partial(nested, lambda x: frozenset([x])), form.MAX_DEPTH + 1),
    "bytes of a Fraction's number": Case(lambda n: Fraction(1 << 8 * n - 9), plain_types.MAX_FRACTION),
    "dims of an array": Case(lambda n: np.ones([1] * n), 32),
}


@pytest.mark.parametrize("name", CASES)
def test_a_value_at_its_bound(job: Job, name: str) -> None:
    case = CASES[name]
    for way in case.ways:
        for n in (case.most - 1, case.most, case.most + 1):
            assert arrives(job, way, case.make, n) in ((True,) if n <= case.most else (True, None)), (way, n)
        job.check()


# ---- values that are odd in another way ------------------------------------------------------------------------------

ODD = {
    "bytes as bools": lambda n: torch.tensor([0, 2, n], dtype=torch.uint8).view(torch.bool),
    "bytes as bools of numpy": lambda n: np.array([0, 2, n], np.uint8).view(np.bool_),
    "a scalar of them": lambda n: np.array([2], np.uint8).view(np.bool_)[0],
    "text of numbers that are none": lambda n: np.array([0x110000], np.uint32).view("<U1"),
    "a half of a pair": lambda n: ["\udcff", {"\udcff": 1}, b"\xff"],
    "a number of many bits": lambda n: 1 << 100_000,
    "not a number": lambda n: [math.inf, -0.0],
    "dates of numpy": lambda n: np.array(["NaT", "2026-01-01"], "M8[s]"),
    "no elements": lambda n: [torch.ones(0), np.ones((0, 3)), torch.ones(3, 0, 2)],
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_value(job: Job, name: str) -> None:
    """Bytes that the receiver takes for none of the dtype's are no reason to end a connection either."""
    for way in WAYS:
        arrived = arrives(job, way, ODD[name], 3)
        assert arrived is not False or name.startswith(("bytes as", "a scalar", "dates")), way  # other bits, as true
        job.check()


# ---- bounds that are not a value's -----------------------------------------------------------------------------------


def test_a_copy_that_is_too_large(job: Job) -> None:
    """Nothing that a node could send has so many elements; it has to be refused before the receiver is told of it."""
    x = torch.ones(1, device="node:0")
    for n in (codec.MAX_COPY // 4 + 1, 1 << 62):
        with pytest.raises(RuntimeError, match=r"can't copy a tensor to another process: .* is over the limit"):
            x.expand(n).to("node:1")
        job.check()
    with pytest.raises(TypeError, match="can't have a proxy"):
        dt.run(lambda: torch.ones(1).expand(1 << 62), node=1)
    job.check()


def test_a_receive_that_a_node_refuses_costs_the_transfer_only(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the script asks for it all the same, the bytes are dropped, and the connection goes on."""
    monkeypatch.setattr(codec, "check_copy", lambda *_: None)
    with pytest.raises(DisttensorError, match="65 dimensions"):
        torch.ones([1] * 65).to("node:1").cpu()
    with pytest.raises(DisttensorError, match="65 dimensions"):
        torch.ones(1, device="node:0").view([1] * 65).to("node:1").cpu()
    monkeypatch.undo()
    job.check()


def test_an_exception_with_attributes(job: Job) -> None:
    def raising(n: int) -> None:
        error = Odd("no")
        vars(error).update({f"a{i}": i for i in range(n)})
        raise error

    for n in (255, 256, 257):
        with pytest.raises(DisttensorError, match="no"):
            dt.run(raising, n, node=1)
        job.check()


@pytest.mark.parametrize("length", [199, 200, 201, 5000])
def test_a_tag(job: Job, tmp_path: Path, length: int) -> None:
    with Endpoint(file := tmp_path / "file") as endpoint:
        if length > 200:
            with pytest.raises(ValueError, match="a tag has"):
                dt.tasks.connect(file, tag="\u20ac" * length)
            return
        with dt.tasks.connect(file, tag="\u20ac" * length):
            assert [len(client.tag) for client in endpoint.clients(1, HANG)] == [length]


def test_a_key(job: Job) -> None:
    """Of text, what stands around it takes some bytes of it."""
    table = SharedDict()

    def set_it(table: SharedDict, n: int) -> bool:
        table["x" * n] = n
        return "x" * n in table

    refused = []
    for n in range(shared_objects.MAX_KEY - 12, shared_objects.MAX_KEY + 2):
        for ask in (set_it, partial(dt.run, set_it, node=1)):
            try:
                assert ask(table, n)  # type: ignore[operator]
            except ValueError:
                refused.append(n)
    assert refused == sorted(refused)
    assert len(refused) % 2 == 0
    assert 0 < len(refused) < 24
    job.check()


def test_select(job: Job) -> None:
    most = shared_objects.MAX_SELECTED
    channels = [Channel() for _ in range(most + 1)]

    def select(channels: list[Channel]) -> bool:
        channels[-1].put("last")
        return bool(dt.tasks.select(*channels)[1] == "last")

    for ask in (select, partial(dt.run, select, node=1)):
        assert ask(channels[:-2])  # type: ignore[operator]
        assert ask(channels[:-1])  # type: ignore[operator]
        with pytest.raises(ValueError, match="select takes 1 to"):
            ask(channels)  # type: ignore[operator]
    job.check()


def test_handles_of_actors_in_a_call(job: Job) -> None:
    class Count:
        def count(self, found: list[Any]) -> int:
            return len(found)

    def ask(actor: Any, number: int) -> int:
        return int(actor.count([actor] * number).result())

    most = shared_objects.MAX_HANDLES
    actor = dt.actor(Count, node=1)
    for number in (most - 1, most):
        assert dt.run(ask, actor, number, node=1) == number
    with pytest.raises(ValueError, match=f"its arguments have {most + 1} handles of actors, and may have {most}"):
        dt.run(ask, actor, most + 1, node=1)
    assert dt.run(ask, actor, 1, node=1) == 1
    job.check()


def test_names_in_what_is_shared(job: Job) -> None:
    """Names of functions, threads and exceptions, which tell who has a lock, may be long, and no text at all."""
    lock = Lock()

    def held(lock: Lock, name: str) -> str:
        with lock:
            done: list[bool] = []
            other = threading.Thread(target=lambda: done.append(lock.acquire(timeout=0)), name=name)
            other.start()
            other.join()
        return f"{done}"

    for name in ("\udcff", "\u20ac" * 299, "\u20ac" * 5000):
        held.__qualname__ = name if len(name) > 1 else "held"
        assert dt.run(held, lock, name, node=1) == held(lock, name) == "[False]"
        job.check()

    def failing(lock: Lock) -> None:
        lock.acquire()
        raise type("\udcff" * 400, (ValueError,), {})("no")

    with pytest.raises(Exception, match="no"):
        dt.run(failing, lock, node=1)
    assert lock.acquire(timeout=HANG)  # it has ended, and the script was told
    lock.release()
    job.check()


def test_a_node_offers_no_more_addresses_than_a_peer_takes() -> None:
    listener = Listener(["127.0.0.1"] * (dial.MOST_ADDRESSES + 8), 1.0, lambda *_: None, "test", lambda: None)
    try:
        assert len(listener.address.split(",")) == dial.MOST_ADDRESSES
        assert len(listener.address) <= codec.MAX_ADDRESS
    finally:
        listener.stop()


def test_arrays_are_made_to_be_read() -> None:
    """Bytes that were looked at as bools are not 0, and so true."""
    odd = np.array([[0, 2], [3, 1]], np.uint8).view(np.bool_)
    assert arrays.plain(odd).view(np.uint8).tolist() == [[0, 1], [1, 1]]
    even = np.array([True, False])
    assert arrays.plain(even) is even
    with pytest.raises(ValueError, match="no characters"):
        arrays.plain(np.array([[0x110000, 65]], np.uint32).view("<U2"))
