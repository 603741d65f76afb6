"""When a node tells of the ends of asynchronous collectives: of several in one reply, and none later than it must."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from limits import HANG
from msgspec.structs import replace
from node_kit import FULL, Node

from disttensor.runtime.channel import get_channel
from disttensor.runtime.channel.base import ChannelContext, PeerInfo
from disttensor.runtime.node.streams import scheduler
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c

FLOATS = codec.dtype_id(torch.float32)


class Told(Node):
    """A node of which one waits for replies."""

    def __init__(self) -> None:
        super().__init__()
        self._came = threading.Condition()
        self.executor.emit = self._take

    def _take(self, reply: c.Reply) -> None:
        with self._came:
            self.replies.append(reply)
            self._came.notify_all()

    def come(self, *kinds: type[c.Reply]) -> list[c.Reply]:
        """Waits until there is a reply of each of these kinds; gives all of these kinds."""
        with self._came:
            assert self._came.wait_for(lambda: {*map(type, self.replies)} >= {*kinds}, HANG), self.replies
            return [reply for reply in self.replies if isinstance(reply, kinds)]


@pytest.fixture
def node() -> Iterator[Told]:
    made = Told()
    made.do(FULL, *(c.Call(1, ref, (float(ref),)) for ref in (1, 2, 3)))
    yield made
    made.close()


def reduced(ref: int, request: int, ranks: tuple[int, ...] = (0,), numel: int = 4) -> c.Collective:
    told = c.RankList(ranks)
    return c.Collective(
        "all_reduce", ref, told, (ref,), (ref,), (numel, numel), FLOATS, 0, 0, "", 0, 0, -1, c.RankList(()), request
    )


def arrive(node: Told) -> None:
    """Has tensor 9 come, for which the first collective waits."""
    node.master.isend(torch.ones(4), 0, 1 << 60 | 1)


RECV = c.Recv(1 << 60 | 1, 9, -1, (4,), FLOATS, "cpu")


def test_what_ends_in_a_row_is_told_by_one_reply(node: Told) -> None:
    node.do(RECV, reduced(9, 11), reduced(1, 12), reduced(1, 13), reduced(2, 14))
    assert not [reply for reply in node.replies if isinstance(reply, c.TookPart)]
    arrive(node)
    assert node.come(c.TookPart) == [c.TookPart((11, 12, 13, 14))]


def test_one_alone_is_told_at_once(node: Told) -> None:
    node.do(reduced(1, 11))
    assert node.come(c.TookPart) == [c.TookPart((11,))]


def test_it_is_told_before_a_wait_for_another_rank(node: Told) -> None:
    """The script may wait for the first, and do only then what the other rank waits for."""
    other = get_channel("inproc")(ChannelContext(1, "another", "127.0.0.1"))
    node.channel.connect({1: PeerInfo(1, other.address(), bytes(32))})
    node.do(RECV, reduced(9, 11), reduced(1, 12, (0, 1)))
    arrive(node)
    assert node.come(c.TookPart) == [c.TookPart((11,))]
    node.executor.channels.mark_lost(1, "its cable was cut")
    (failed,), (poisoned,) = node.come(c.Failed), node.come(c.Poisoned)
    assert isinstance(failed, c.Failed)
    assert poisoned == c.Poisoned(12, 0, failed.seq)
    assert node.replies.index(failed) < node.replies.index(poisoned)
    other.close()


def test_it_is_told_before_one_that_may_take_long(node: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "BRIEF", 16)
    node.do(RECV, reduced(9, 11), reduced(1, 12), reduced(2, 13))
    arrive(node)
    node.do(c.Sync(7))
    node.come(c.Done)
    assert [reply for reply in node.replies if isinstance(reply, c.TookPart)] == [
        c.TookPart((11,)), c.TookPart((12,)), c.TookPart((13,))
    ]  # fmt: skip


def test_it_is_told_before_one_whose_tensor_is_not_there(node: Told) -> None:
    second = c.Recv(1 << 60 | 2, 8, -1, (4,), FLOATS, "cpu")
    node.do(RECV, second, reduced(9, 11), reduced(8, 12))
    arrive(node)
    assert node.come(c.TookPart) == [c.TookPart((11,))]
    node.master.isend(torch.ones(4), 0, 1 << 60 | 2)
    node.do(c.Sync(7))
    node.come(c.Done)
    assert node.come(c.TookPart) == [c.TookPart((11,)), c.TookPart((12,))]


def test_poison_is_told_with_what_has_ended_before(node: Told) -> None:
    node.do(RECV, c.Call(1, 5, ("no number",)), reduced(9, 11), reduced(5, 12), reduced(1, 13))
    (failed,) = node.come(c.Failed)
    assert isinstance(failed, c.Failed)
    arrive(node)
    node.do(c.Sync(7))
    node.come(c.Done)
    answers = [reply for reply in node.replies if isinstance(reply, c.TookPart | c.Poisoned)]
    assert answers == [c.TookPart((11,)), c.Poisoned(12, 0, failed.seq), c.TookPart((13,))]


@pytest.mark.parametrize("request_id", [11, 0])
def test_a_collective_that_cannot_be_queued_is_answered_once(node: Told, request_id: int) -> None:
    """One for which nobody waits is not answered."""
    node.do(c.MakeStream(50, "cpu", 0), replace(reduced(1, request_id), dtype=255), c.Sync(7))
    node.come(c.Done)
    (failed,) = node.come(c.Failed)
    assert isinstance(failed, c.Failed)
    answers = [reply for reply in node.replies if isinstance(reply, c.TookPart | c.Poisoned)]
    assert answers == ([c.Poisoned(11, 0, failed.seq)] if request_id else [])
