"""The watch over a run's nodes: when they are asked, and what is kept of what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from disttensor.runtime.protocol import side
from disttensor.seeing.run_watch import EVERY, LOOK, MEMORY, RunWatch
from disttensor.seeing.slow_watch import SlowNodes
from disttensor.seeing.status import SlowStatus


class Nodes:
    """A session with two nodes, of which only those answer that are told to."""

    def __init__(self) -> None:
        self.now, self.asked, self.answering = 100.0, list[float](), {0, 1}
        self.slow = SlowNodes()
        self.nodes = [
            SimpleNamespace(rank=rank, connection=SimpleNamespace(described=None, seen=None)) for rank in (0, 1)
        ]
        clock, calls = SimpleNamespace(now=lambda: self.now), SimpleNamespace(ask=self._ask, take_answers=self._take)
        self.link = SimpleNamespace(clock=clock, roll_call=calls, idle=SimpleNamespace(looks=[print]))

    def part(self, kind: type[Any]) -> SlowNodes:
        assert kind is SlowNodes
        return self.slow

    def _ask(self, nodes: Any) -> None:
        self.asked.append(self.now)

    def _take(self, nodes: Any) -> None:
        for rank in self.answering:
            held = (side.DeviceTensors("cpu", 1, round(10 * self.now)), side.DeviceTensors("cuda:0", 1, 5))
            at = self.nodes[rank].connection
            at.described = side.Described(1, 0, held, (), 0, 0.0)
            at.described_at, at.seen = self.now, SimpleNamespace(rss=7)


def test_nodes_are_asked_now_and_then() -> None:
    """What they say is of the moment at which they were asked; one that says nothing has nothing."""
    nodes = Nodes()
    nodes.now = 99.0
    nodes._take(nodes.nodes)  # somebody else has asked them
    nodes.now = 100.0
    watch = RunWatch(nodes)  # type: ignore[arg-type]
    watch.begin()
    assert nodes.link.idle.looks == [print, watch.look]
    nodes.answering = {0}
    for step in range(1, 30):
        nodes.now = 100.0 + step * EVERY / 8
        watch.look()
    assert nodes.asked == [100.0 + n * EVERY for n in range(4)]
    kept = watch._memory
    assert [(it.at, it.held, it.rss) for it in kept[0]] == [
        (asked, round(10 * (asked + EVERY / 8)) + 5, 7) for asked in nodes.asked
    ]
    assert kept[1] == []
    watch.stop()
    watch.stop()
    assert nodes.link.idle.looks == [print]


def test_a_long_run_is_asked_for_more_seldom() -> None:
    nodes = Nodes()
    watch = RunWatch(nodes)  # type: ignore[arg-type]
    for _ in range(8 * MEMORY):
        nodes.now += EVERY
        watch.look()
        nodes.now += 2 * LOOK
        watch.look()
    assert 0 < len(watch._memory[0]) <= 2 * MEMORY
    assert nodes.asked[-1] - nodes.asked[-2] >= 2 * EVERY
    assert watch._memory[0][-1].at - watch._memory[0][0].at > 3 * MEMORY * EVERY


def test_nodes_that_were_slow_stay_known() -> None:
    nodes = Nodes()
    watch = RunWatch(nodes)  # type: ignore[arg-type]
    for rows in ((SlowStatus(1, "dp=1", "a", 0.5, "it swaps", "", ""),), ()):
        nodes.slow.rows = rows
        nodes.now += EVERY
        watch.look()
        nodes.now += 2 * LOOK
        watch.look()
    assert [str(row) for row in watch._slow.values()] == ["node 1 (dp=1, host a) is 50% behind its mesh: it swaps"]
