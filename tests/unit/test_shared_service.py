"""The service of objects against nodes that are taken over: each loses its own connection, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from disttensor.runtime.protocol import shared_objects as s
from disttensor.runtime.protocol import values
from disttensor.runtime.protocol.errors import ClosedError, ProtocolError
from disttensor.runtime.protocol.framing import PIECE
from disttensor.runtime.protocol.keys import curve_pair
from disttensor.runtime.shared import channel_handles, service
from disttensor.runtime.shared import objects as held
from disttensor.runtime.shared.callers import Local
from disttensor.runtime.shared.channels import ChannelState
from disttensor.runtime.shared.locks import LockState
from disttensor.runtime.shared.objects import SCRIPT, Objects
from disttensor.runtime.shared.service import Service
from disttensor.runtime.shared.values import pack, unpack
from disttensor.runtime.transport.zmq import ZmqHub, ZmqSpoke


class Node:
    """A node's end, which says what it likes."""

    def __init__(self, spoke: ZmqSpoke) -> None:
        self.spoke, self._joining = spoke, s.Joining()

    def say(self, *requests: s.Request) -> None:
        for request in requests:
            for piece in s.pieces(s.encode(request)):
                self.spoke.send(piece)

    def hear(self) -> s.ObjectAnswer:
        while True:
            piece = self.spoke.recv(30)
            assert piece is not None
            if (whole := self._joining.add(piece)) is not None:
                return s.decode_answer(whole)

    def is_cut(self) -> None:
        def to_the_end() -> None:
            while self.spoke.recv(30) is not None:
                pass

        with pytest.raises(ClosedError):
            to_the_end()


@pytest.fixture
def served() -> Iterator[tuple[Objects, list[Node]]]:
    server, keys = curve_pair(), [curve_pair() for _ in range(2)]
    hub = ZmqHub(server_keys=server, node_keys={rank: key[0] for rank, key in enumerate(keys)})
    objects = Objects()
    serving = Service(hub, objects, lambda rank, why, incarnation: objects.lost(rank, why))
    spokes = [ZmqSpoke(hub.address, server[0], *key, rank) for rank, key in enumerate(keys)]
    yield objects, [Node(spoke) for spoke in spokes]
    objects.close("over")
    serving.close()
    for spoke in spokes:
        spoke.close()


def test_a_loss_names_the_worker_whose_connection_has_ended() -> None:
    """The end of one may be noted while the script takes in another in its place, whose loss it is not."""
    server, keys = curve_pair(), [curve_pair() for _ in range(3)]
    hub = ZmqHub(server_keys=server, node_keys={0: keys[0][0]})
    lost, noted = list[tuple[int, int]](), threading.Semaphore(0)

    def lose(rank: int, why: str, incarnation: int) -> None:
        lost.append((rank, incarnation))
        noted.release()

    serving = Service(hub, Objects(), lose)
    try:
        serving.admit({0: keys[0][0]}, {0}, lambda rank: 0)
        for incarnation, key in enumerate(keys):
            serving.readmit(0, key[0], incarnation)  # the first is in already, by the same key
            spoke = ZmqSpoke(hub.address, server[0], *key, 0)
            Node(spoke).say(s.Inspect(1, (1,)))
            Node(spoke).hear()
            spoke.close()
            assert noted.acquire(timeout=30)
    finally:
        serving.close()
    assert lost == [(0, 0), (0, 1), (0, 2)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


ITEM = pack([1, "two"])


def goes_on(objects: Objects, node: Node) -> None:
    number = objects.make(ChannelState)
    objects.share(number)
    node.say(s.Put(1000, (number,), ITEM), s.Take(1001, (number,)))
    assert node.hear() == s.ObjectAnswer(1000, s.OK)
    assert unpack(node.hear().item or s.Item(b"")) == [1, "two"]


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "said",
    [b"", b"\2x", s.LAST, s.LAST + b"\xc1", s.LAST + s.encode(s.ObjectAnswer(0, 0)), s.LAST + s.encode([1, -1, 0])],
)
def test_nonsense_cuts_its_sender(served: tuple[Objects, list[Node]], said: bytes) -> None:
    objects, (bad, good) = served
    number = objects.make(ChannelState)
    objects.share(number)
    bad.say(s.Take(1, (number,)))
    bad.spoke.send(said)
    bad.is_cut()
    goes_on(objects, good)
    assert not objects._waits  # it waits for nothing any more


def test_a_message_without_an_end(served: tuple[Objects, list[Node]], monkeypatch: pytest.MonkeyPatch) -> None:
    objects, (bad, good) = served
    monkeypatch.setattr(s, "MAX_WHOLE", 1 << 20)
    for _ in range(5):
        bad.spoke.send(s.MORE + bytes(PIECE))
    bad.is_cut()
    goes_on(objects, good)


def test_one_that_does_not_read(served: tuple[Objects, list[Node]], monkeypatch: pytest.MonkeyPatch) -> None:
    objects, (bad, good) = served
    monkeypatch.setattr(service, "WINDOW", 1000)
    monkeypatch.setattr(service, "MAX_UNREAD", 50)
    number = objects.make(ChannelState)
    objects.share(number)
    bad.say(*(s.Inspect(call, (number,)) for call in range(200)))
    bad.is_cut()
    goes_on(objects, good)


def test_a_channel_that_it_was_not_given(served: tuple[Objects, list[Node]]) -> None:
    objects, (bad, good) = served
    number = objects.make(ChannelState)
    bad.say(
        s.Put(1, (number,), ITEM),
        s.Take(2, (number,)),
        s.Close(3, (number,)),
        s.Inspect(4, (77,)),
        s.Take(5, (1 << 40,)),
    )
    assert [bad.hear().said for _ in range(5)] == [s.REFUSED] * 5
    goes_on(objects, good)


def test_two_of_one_process_wait_side_by_side(pool: ThreadPoolExecutor) -> None:
    """The script, and functions on nodes that are its threads: a wait of one does not stand for another's."""
    objects = Objects()
    number = objects.make(ChannelState)
    callers = [Local(objects, lambda: None) for _ in range(3)]
    waiting = [pool.submit(one.ask, s.Take(one.number(), (number,))) for one in callers]
    try:
        while len(objects._objects[number].taking) < len(callers):  # type: ignore[attr-defined]
            assert not any(one.done() for one in waiting)
            time.sleep(0.001)
        assert len(objects._waits) == len(callers)
        for one in callers:
            one.ask(s.Put(one.number(), (number,), ITEM))
        assert [one.result(30).said for one in waiting] == [s.OK] * len(callers)
        assert not objects._waits
    finally:
        objects.close("the test is over")


def test_a_number_that_waits_already_is_refused() -> None:
    """Or its first wait would never be answered."""
    objects = Objects()
    number = objects.make(ChannelState)
    said: list[s.ObjectAnswer] = []
    for _ in range(2):
        objects.ask(SCRIPT, s.Take(1, (number,)), said.append)
    assert [(x.call, x.said) for x in said] == [(1, s.REFUSED)]
    objects.ask(SCRIPT, s.Put(2, (number,), ITEM), said.append)
    assert [x.said for x in said] == [s.REFUSED, s.OK, s.OK]


def test_what_a_node_may_hold(served: tuple[Objects, list[Node]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its share it waits, as in front of a full channel; others and the script do not."""
    objects, (bad, good) = served
    size = ITEM.nbytes + held.OVERHEAD
    monkeypatch.setattr(held, "MAX_HELD", 3 * size)
    monkeypatch.setattr(held, "MAX_WAITING", 2 * size)
    monkeypatch.setattr(held, "MAX_REQUESTS", 3)
    number = objects.make(ChannelState)
    objects.share(number)
    bad.say(*(s.Put(call, (number,), ITEM) for call in range(6)))
    assert [bad.hear() for _ in range(3)] == [s.ObjectAnswer(call, s.OK) for call in range(3)]
    refused = bad.hear()
    assert (refused.call, refused.said) == (5, s.REFUSED)
    bad.say(s.Put(7, (number,), ITEM, back=True), s.Put(8, (number,), ITEM, wait=False))
    assert [(x.call, x.said) for x in (bad.hear(), bad.hear())] == [(7, s.REFUSED), (8, s.FULL)]
    good.say(s.Put(1, (number,), ITEM))
    assert good.hear() == s.ObjectAnswer(1, s.OK)
    said: list[s.ObjectAnswer] = []
    objects.ask(SCRIPT, s.Put(1, (number,), ITEM), said.append)
    objects.ask(SCRIPT, s.Take(2, (number,)), said.append)
    assert [answer.said for answer in said] == [s.OK, s.OK]
    assert bad.hear() == s.ObjectAnswer(3, s.OK)  # there is room for one more
    bad.say(s.Withdraw(4))
    assert bad.hear() == s.ObjectAnswer(4, s.FULL)


@pytest.mark.parametrize(
    "flat",
    [
        s.Flat(9999, (1,), b"1234"),
        s.Flat(0, (2,), b"1234"),
        s.Flat(9, (1,), b"\2"),
        s.Flat(0, (0, 1 << 61, 1 << 61), b""),
        s.Flat(22, (4,), b"1234"),
    ],
)
def test_tensors_that_are_none(flat: s.Flat) -> None:
    item = s.Item(pack(torch.ones(1)).data, (flat,))
    with pytest.raises(ProtocolError):
        unpack(item)


@pytest.mark.parametrize(
    "told",
    [
        [], [1], ["Channel"], ["Channel", 1], ["Channel", 1, None], ["Channel", True, None, 0],
        ["Channel", 1, None, "x"], ["Channel", 1, None, False], ["Channel", 1, b"x", 0], ["Channel", 1, None, 0, 1],
        ["Channel", 7, None, 0], ["Channel", 0, None, 0], ["Channel", 2, None, 0], ["Lock", 1, None],
        ["Lock", 2, None, 0], ["Barrier", 2, None, 1],
        ["ObjectHandle", 1, None], ["select", 1, None], ["handles", 1, None],
        [["Channel"], 1, None, 0], [b"x", 1, None, 0],
    ],
)  # fmt: skip
def test_a_reference_to_what_is_no_channel_of_nodes(told: list[Any]) -> None:
    """A node may put any number; the script does not take it for what it has for itself, nor for another kind."""
    objects = Objects()
    mine, theirs, lock = (objects.make(kind) for kind in (ChannelState, ChannelState, LockState))
    for number in (theirs, lock):
        objects.share(number)
    channel = channel_handles.Channel.__new__(channel_handles.Channel)
    channel._holder = cast(Any, SimpleNamespace(caller=Local(objects, lambda: None)))
    channel._caller = channel._where = None

    def item(told: list[Any]) -> s.Item:
        return s.Item(values.encode(object(), [], refers=lambda _: told), ())

    assert unpack(item(["Channel", theirs, "x", 3]), channel._referred)._number == theirs
    assert unpack(item(["Lock", lock, None]), channel._referred)._number == lock
    with pytest.raises(ProtocolError):
        unpack(item(told), channel._referred)
    assert mine == 0
    assert lock == 2
