"""The arrows of a timeline are those that a slow oracle finds in a log of its own, which it hears at the seam."""

from __future__ import annotations

import gc
import itertools
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from limits import HANG
from quick import inputs
from thread_nodes import thread_nodes
from trace_schema import check_trace

import disttensor as dt
from disttensor.runtime.master.looking_in import CommandTimes, NodeEvent, NodeEvents
from disttensor.runtime.node.gathering import Gathering
from disttensor.runtime.process.observing import (
    CommandDone,
    CommandIssued,
    MessageSent,
    NodeSeam,
    TransferDone,
    WaitEnded,
)
from disttensor.runtime.protocol import codec, side
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.transfer_ids import ORDERED
from disttensor.seeing.chrome_trace import ChromeTrace, pid_of
from disttensor.seeing.recording import Recording
from disttensor.session import current

SCRIPT = -1
NODES = 3
#: Seconds by which the nodes' clocks are ahead.
AHEAD = (0.0, 16.0, -0.5)


class Heard:
    """Fetches what nodes that are threads have gathered, in the place of side channels; as if clocks differed."""

    def __init__(self, seams: Iterable[NodeSeam]) -> None:
        self._gatherings = [Gathering(seam) for seam in seams]
        self._next = [0] * NODES

    def watch(self, ranks: Iterable[int], points: Iterable[Any], room: int = 100_000, commands: int = 0) -> None:
        for rank in ranks:
            self._gatherings[rank].watch(tuple(points), room, commands)

    def fetch(self, rank: int, timeout: float = 0.0) -> NodeEvents:
        found, times, ahead = list[NodeEvent](), list[CommandTimes](), AHEAD[rank]
        while True:
            answer = side.decode_answer(side.encode(self._gatherings[rank].gather(1, self._next[rank])))
            assert isinstance(answer, side.Gathered)
            self._next[rank] = answer.first + sum(map(side.events_in, answer.events))
            for it in answer.events:
                if it.moments:
                    moments = array("d", [moment + ahead for moment in side.moments_in(it)])
                    times.append(CommandTimes(it.number, moments, it.kind == "timed"))
            found += [
                NodeEvent(
                    rank, it.kind, it.at + ahead, it.began + ahead, it.stream, it.number, it.what, it.transfer,
                    it.peer, it.bytes, it.failed, None,
                )
                for it in answer.events
                if not it.moments
            ]  # fmt: skip
            if not answer.more:
                return NodeEvents(tuple(found), 0, ahead, 1e-5, False, tuple(times))


@pytest.fixture(scope="module")
def seams() -> Iterator[list[NodeSeam]]:
    with thread_nodes(NODES) as made:
        yield [worker.seam for worker in made]


# ---- the oracle ------------------------------------------------------------------------------------------------------

#: (process, moment) of each point.
Points = list[tuple[int, float]]


class Oracle:
    """All events as they are told, and the arrows that follow from them: each command is looked for in all of them."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.log if type(each) is kind]

    def messages(self) -> Iterator[tuple[int, int, c.Command]]:
        for sent in self.of(MessageSent):
            for number, command in enumerate(codec.decode_batch(sent.message).commands, sent.number):
                yield sent.node, number, command.command if isinstance(command, c.On) else command

    def not_done(self) -> set[tuple[int, int]]:
        """The commands that have left, and of whose end it was not told."""
        left = {(node, number) for node, number, command in self.messages()}
        return left - {(each.node, each.number) for each in self.of(CommandDone)}

    def arrows(self) -> dict[int, Points]:
        """The arrows of commands, by their numbers."""
        issued = [[each, {*each.nodes}] for each in self.of(CommandIssued)]
        done, moves, waits = self.of(CommandDone), self.of(TransferDone), self.of(WaitEnded)
        found = dict[int, Points]()
        for node, number, command in self.messages():
            points: Points = []
            for event, left in issued:
                if node in left and event.command == command and not isinstance(command, c.Free):
                    left.discard(node)
                    points.append((SCRIPT, event.at))
                    break
            executions = [each for each in done if (each.node, each.number) == (node, number)]
            for each in [each for each in executions if each.stream][-1:] or executions:
                points.append((node, each.began))
            request = 0
            if isinstance(command, c.Send) or (isinstance(command, c.Recv) and command.peer == SCRIPT):
                sender, receiver = (node, command.peer) if isinstance(command, c.Send) else (SCRIPT, node)
                of = [each for each in moves if each.transfer == command.transfer]
                send = [each for each in of if each.sent and (each.node, each.peer) == (sender, receiver)]
                receive = [each for each in of if not each.sent and (each.node, each.peer) == (receiver, sender)]
                assert len(send) == len(receive) == 1
                points += [(sender, send[0].began), (receiver, receive[0].at)]
                request = -command.transfer if SCRIPT in (sender, receiver) else 0
            else:
                request = getattr(command, "request", 0) if not isinstance(command, c.Adopt) else 0
            ended = [each.at for each in waits if request and (each.node, each.request) == (node, request)]
            points += [(SCRIPT, at) for at in ended[:1]]
            if len(points) > 1:
                found[node << 40 | number] = sorted(points, key=lambda each: each[1])
        return found

    def bounds(self, began: float, ended: float) -> dict[float, tuple[float, float]]:
        """By the time of an issue: those of the sixteenth before and after it on one of its nodes."""
        found = dict[float, tuple[float, float]]()
        for node in range(NODES):
            times = sorted(each.at for each in self.of(CommandIssued) if node in each.nodes)
            for index, at in enumerate(times):
                padded = [began] * 16 + times + [ended] * 16
                found.setdefault(at, (padded[index], padded[index + 32]))
        return found

    def transfers(self) -> list[Points]:
        """The arrows of transfers that commands do among others."""
        found = []
        moves = [each for each in self.of(TransferDone) if each.transfer < ORDERED or each.transfer >= 2 * ORDERED]
        for send in [each for each in moves if each.sent]:
            for receive in moves:
                if not receive.sent and (receive.transfer, receive.peer, receive.node) == (
                    send.transfer, send.node, send.peer,
                ):  # fmt: skip
                    ends = [(send.node, send.began), (receive.node, receive.at)]
                    found.append(sorted(ends, key=lambda each: each[1]))
        return sorted(found)


# ---- what is done ----------------------------------------------------------------------------------------------------


class Chance:
    """Random commands, transfers and waits."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tensors = [[torch.ones(4, device=f"node:{k}") for _ in range(3)] for k in range(NODES)]
        self.mesh = torch.ones(4, device=dt.mesh(dp=NODES).device)
        self.streams = [dt.Stream(k) for k in range(NODES)]
        self.graph = dt.Graph()
        with dt.graph(self.graph):
            self.tensors[0][0].copy_(self.tensors[1][0])
            self.tensors[0][0].mul_(0.5)
        self.acts: list[tuple[int, Callable[[int], object]]] = [
            (30, lambda k: self.any(k).mul_(1)),
            (20, self.add),
            (10, self.copy),
            (8, lambda k: self.any(k).cpu()),
            (8, lambda k: self.any(k).sum().item()),
            (6, lambda k: self.any(k).copy_(torch.ones(4))),
            (6, self.beside),
            (5, lambda k: self.mesh.mul_(1)),
            (3, lambda k: dt.all_reduce([each[0] for each in self.tensors], "max")),
            (3, lambda k: self.graph.replay()),
            (2, lambda k: dt.fetch(self.any(k)).result()),
            (1, lambda k: dt.run(abs, -1, node=k)),
            (1, lambda k: dt.synchronize()),
        ]

    def any(self, node: int) -> torch.Tensor:
        return self.random.choice(self.tensors[node])

    def add(self, node: int) -> None:
        self.tensors[node][self.random.randrange(3)] = self.any(node) + self.any(node)

    def copy(self, node: int) -> None:
        self.tensors[node][1] = self.any((node + 1) % NODES).to(f"node:{node}")

    def beside(self, node: int) -> None:
        with dt.stream(self.streams[node]):
            self.any(node).mul_(1)
        self.streams[node].synchronize()

    def act(self) -> None:
        (act,) = self.random.choices([act for _, act in self.acts], [weight for weight, _ in self.acts])
        act(self.random.randrange(NODES))


@pytest.mark.parametrize("several", [False, True], ids=["one thread", "several"])
def test_arrows_are_those_that_a_slow_oracle_finds(seams: list[NodeSeam], several: bool) -> None:
    """Where several threads issue each line is noted, else every sixteenth: then a command's issue is between those of
    the sixteenth before and after it on its node."""
    gc.collect()  # the graph of the run before: its nodes are told of its end at the collector's pleasure
    link, oracle, chance = current.session().link, Oracle(), Chance(1)
    for act in chance.acts:
        act[1](0)  # connections are made, and signatures are tried
    dt.synchronize()
    recording = Recording(link, Heard(seams))
    recording.begin()
    recording._issued.complete = several
    link.note_issued(recording._issued)
    points = [link.seam.issued, link.seam.sent, link.seam.waited, link.seam.transferred]
    points += [point for seam in seams for point in (seam.commands, seam.transferred)]  # type: ignore[list-item]
    with ExitStack() as stack:
        for point in points:
            stack.enter_context(point.heard_by(oracle.log.append))
        for _ in range(inputs(1000)):
            chance.act()
        dt.synchronize()
        until = time.monotonic() + HANG
        while oracle.not_done():  # a node answers first, and tells its observers then
            assert time.monotonic() < until, oracle.not_done()
    recording.stop()
    recording.collect()
    recording.end()
    record = recording.record()
    trace = ChromeTrace(record).to_dict(NODES, "inproc", {})
    check_trace(trace)

    base = record.began - (record.wall - trace["baseTimeNanoseconds"]) / 1e9
    found = defaultdict[tuple[str, int], Points](list)
    for each in trace["traceEvents"]:
        if each["ph"] in "stf":
            found[each["name"], each["id"]].append((each["pid"], base + each["ts"] / 1e6))
    arrows = oracle.arrows()
    bounds = {} if several else oracle.bounds(record.began, record.ended)
    compare({id: at for (kind, id), at in found.items() if kind == "command"}, arrows, bounds)
    transfers = sorted(at for (kind, _), at in found.items() if kind == "transfer")
    compare(dict(enumerate(transfers)), dict(enumerate(oracle.transfers())), {})
    assert not any(record.dropped.values())


def compare(found: dict[int, Points], expected: dict[int, Points], bounds: dict[float, tuple[float, float]]) -> None:
    """Compares arrows: the same ones, with the same points, to a microsecond; those of the script at ``bounds`` within
    these."""
    assert found.keys() == expected.keys()
    assert expected
    for id, points in expected.items():
        mine = found[id]
        assert [process for process, _ in mine] == [pid_of(process) for process, _ in points], (id, mine, points)
        for (_, at), (process, wanted) in zip(mine, points, strict=True):
            first, last = bounds.get(wanted, (wanted, wanted)) if process == SCRIPT else (wanted, wanted)
            assert first - 1e-6 < at < last + 1e-6, (id, mine, points, bounds.get(wanted))
    assert len({*itertools.chain(*expected.values())}) > 1
