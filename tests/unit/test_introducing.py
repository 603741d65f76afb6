"""The introductions of a thousand nodes, without any: what the script queues for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from disttensor.runtime.channel.base import MASTER, ChannelContext, Protection
from disttensor.runtime.channel.inproc import InprocChannel
from disttensor.runtime.channel.opened import Channels, maker
from disttensor.runtime.collective import Way
from disttensor.runtime.master.link import Link
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.arguments import Addresses
from disttensor.runtime.protocol.errors import BrokenError, NodeLost
from disttensor.runtime.protocol.keys import pair_key
from disttensor.runtime.transport.inproc import InprocHub
from disttensor.session.channel_router import ChannelRouter

MANY = 1000
JOB, SECRET = "introductions", bytes(range(32))
ALL = tuple(range(MANY))


class Stage:
    """A link and a router to ``MANY`` nodes that have told their addresses."""

    def __init__(self) -> None:
        self.link = Link(InprocHub(MANY), MANY, None, lambda error: None)
        self.channels = Channels(maker(ChannelContext(MASTER, JOB, "127.0.0.1")), "inproc", collective=False)
        self.router = ChannelRouter(
            self.link, self.channels, JOB, SECRET, "inproc", protection=Protection(), threads=True,
            failure=lambda rank, seq: Exception(),
        )  # fmt: skip
        self.router.take_addresses(0, {rank: Addresses(f"at {rank}", "") for rank in ALL}, Addresses("here", ""))

    def told(self) -> dict[int, list[c.Command]]:
        """Returns what each node was told since the last call."""
        found: dict[int, list[c.Command]] = {}
        for node in self.link.nodes:
            if node.outbox.queue:
                found[node.rank] = list(node.outbox.queue[::2])  # type: ignore[arg-type]
                node.outbox.queue.clear()
        return found


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    with made.link.lock:  # nothing leaves meanwhile
        yield made
    made.link.close()
    made.channels.close()


def test_the_start_costs_no_command(stage: Stage) -> None:
    assert stage.told() == {}


def test_a_pair_is_told_once_with_the_key_that_the_script_makes(stage: Stage) -> None:
    for a, b in ((7, 998), (998, 7), (7, 998)):
        stage.router.introduce(0, a, b)
    key = pair_key(SECRET, JOB, 7, 998)
    assert stage.told() == {
        7: [c.Peer(998, Addresses("at 998", ""), key, 0)],
        998: [c.Peer(7, Addresses("at 7", ""), key, 0)],
    }


def test_the_script_is_introduced_as_others_are(stage: Stage) -> None:
    with pytest.raises(ValueError, match="not a peer"):
        stage.channels.data[0].isend(torch.ones(1), 3, 1)
    stage.router.introduce(0, MASTER, 3)
    assert stage.told() == {3: [c.Peer(MASTER, Addresses("here", ""), pair_key(SECRET, JOB, MASTER, 3), 0)]}
    stage.channels.data[0].isend(torch.ones(1), 3, 1)


def test_a_ring_costs_two_commands_per_node(stage: Stage) -> None:
    for root, wanted in ((0, 2), (0, 0), (1, 0)):
        stage.router.introduce_groups(0, "all_reduce", Way("ring"), root, (ALL,), (), False)
        told = stage.told()
        assert sum(map(len, told.values())) == wanted * MANY
        assert all({command.rank for command in told[rank]} == {(rank + 1) % MANY, (rank - 1) % MANY} for rank in told)  # type: ignore[union-attr]


def test_a_loss_costs_a_command_for_each_that_knows_the_node_and_none_for_others(stage: Stage) -> None:
    stage.router.introduce(0, 5, 6)
    stage.router.introduce(0, 5, 7)
    stage.router.introduce(0, 6, 8)
    stage.told()
    stage.link.losses.lose(5, "its cable was cut")
    assert stage.told() == {rank: [c.Lost(5, "its cable was cut")] for rank in (6, 7)}
    stage.router.introduce(0, 5, 9)  # too late
    [peer, lost] = stage.told()[9]
    assert (type(peer), lost) == (c.Peer, c.Lost(5, stage.link.nodes[5].lost.cause))  # type: ignore[union-attr]


def test_the_script_meets_a_node_that_is_lost(stage: Stage) -> None:
    stage.link.losses.lose(5, "its cable was cut")
    stage.router.mark_lost(5, "its cable was cut")
    stage.router.introduce(0, MASTER, 5)
    assert stage.told() == {}
    with pytest.raises(BrokenError, match="its cable was cut"):
        stage.channels.data[0].isend(torch.ones(1), 5, 1).wait(1)
    assert isinstance(stage.link.nodes[5].lost, NodeLost)


def test_word_of_an_end_that_comes_before_the_introduction() -> None:
    """The side channel is faster than commands."""
    channels = Channels(maker(ChannelContext(0, JOB, "127.0.0.1")), "tcp")
    try:
        channels.expire(1, "it has ended")
        channels.connect(0, 1, Addresses("127.0.0.1:9", "127.0.0.1:9"), bytes(32))
        for channel in channels:
            with pytest.raises(BrokenError, match="it has ended"):
                channel.irecv(torch.ones(1), 1, 1).wait(5)
    finally:
        channels.close()


def test_peers_that_are_told_twice() -> None:
    """A receive that began before its turn has told of them: the command says so again."""
    told: list[int] = []

    class Counting(InprocChannel):
        def connect(self, peers: object) -> None:
            told.append(1)

    channels = Channels(lambda name, number, joint: Counting(ChannelContext(2 + joint, JOB, "")), "inproc")
    try:
        for _ in range(2):
            channels.connect(0, 1, Addresses("there", "there too"), bytes(32))
        assert len(told) == 2  # each channel once
        channels.connect(0, 1, Addresses("there", "elsewhere"), bytes(32))
        assert len(told) == 4
    finally:
        channels.close()
