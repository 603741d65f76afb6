"""A node that is slow beside the others of its mesh is named, with the cause; no other one is."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_hub import HELLO
from limits import HANG
from virtual_time import VirtualClock

import disttensor as dt
from disttensor.runtime.host.launcher import Sight
from disttensor.runtime.host.process_use import ProcessUse
from disttensor.runtime.master.connection import Life
from disttensor.runtime.master.looking_in import NodeEvent
from disttensor.runtime.master.node import Node
from disttensor.runtime.process.page import COMMANDS, FUNCTION, NOBODY, WorkTally
from disttensor.seeing import SlowStatus, slow_watch
from disttensor.seeing.slow import BEHIND, OF, RECOVERED, WINDOW, WINDOWS, Slow
from disttensor.seeing.slow_watch import AGAIN, SEEN, Longest, SlowNodes, SlowWatch, longest_of
from disttensor.session import current

#: The least seconds between two rounds of the thread that looks.
ROUND = 0.625
#: Within so many seconds a slow node is named.
NAMED = 15.0
MIB = 1 << 20


class Host:
    """A node's process as its host sees it: what it does in a second."""

    def __init__(self, work: float = 0.5, send: float = 20e-9) -> None:
        self.work, self.send, self.sends = work, send, 10 * MIB  #: seconds of a second; per byte; bytes a second
        self.delayed = self.throttled = self.stopped = 0.0
        self.faults = 0
        self.commands = 100  #: a second
        self.use = ProcessUse(WorkTally(1.0))

    def go_on(self, seconds: float, noise: Callable[[], float]) -> None:
        tally, use, n = self.use.tally, self.use, noise()
        self.use = ProcessUse(
            WorkTally(
                tally.at + seconds,
                tally.worked + seconds * min(1.0, self.work * n),
                tally.sent + round(seconds * self.sends),
                tally.sending + seconds * self.sends * self.send * noise(),
            ),
            use.ran + seconds * max(0.0, self.work - self.delayed - self.stopped),
            use.delayed + seconds * self.delayed * noise(),
            use.throttled + seconds * self.throttled,
            use.faults + round(seconds * self.faults),
            (300 << 20) if self.faults else 0,
        )


class Job:
    """A session of nodes of which nothing is there but what is seen of them, in a time that a test lets pass."""

    def __init__(self, count: int, noise: float = 0.0, seed: int = 0) -> None:
        self.clock, self.chance, self.noise = VirtualClock(), random.Random(seed), noise
        self.hosts = [Host() for _ in range(count)]
        self.nodes = [Node(rank) for rank in range(count)]
        self.slow, self.found = SlowNodes(), {rank: Longest("train.py:33", "aten::mm", 0.0) for rank in range(count)}
        for node in self.nodes:
            node.connection.hello = HELLO
            node.connection.become(Life.THERE)
        place = SimpleNamespace(ranks=tuple(range(count)), where=lambda i: f"dp={i}")
        link = SimpleNamespace(
            clock=self.clock, lock=nullcontext(), losses=SimpleNamespace(sees=True, glance=self._glance)
        )
        places = SimpleNamespace(meshes=[place])
        session: Any = SimpleNamespace(link=link, nodes=self.nodes, places=places, part=lambda make: self.slow)
        self.watch = SlowWatch(session, lambda session, it: self.found[it.rank])
        self.glances = 0

    def _glance(self, node: Node) -> None:
        self.glances += 1
        sight = Sight(
            node.rank, "S", False, 0, COMMANDS, NOBODY, 0.0, 0.0, 1, "", use=self.hosts[node.rank].use
        )  # it comes at once
        node.connection.see(sight, self.clock.now())

    def pass_time(self, seconds: float) -> tuple[SlowStatus, ...]:
        """Lets time pass; returns who is slow then."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.sleep(ROUND)
            for node, host in zip(self.nodes, self.hosts, strict=True):
                host.go_on(ROUND, lambda: max(0.0, self.chance.gauss(1.0, self.noise * (WINDOW / ROUND) ** 0.5)))
                node.outbox.sent = round(host.use.tally.at * host.commands)
            self.watch.look()
            if (thread := self.watch._thread) is not None:
                thread.join()
        return self.slow.rows


# ---- who ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_nobody_is_named_in_quiet_runs(noise: float, caplog: pytest.LogCaptureFixture) -> None:
    """In 100 of a minute for each noise, which is by how much the windows of a node differ."""
    for seed in range(100):
        assert Job(8, noise, seed).pass_time(60) == (), f"seed {seed}"
    assert caplog.messages == []


def test_nobody_is_named_where_all_nodes_differ(caplog: pytest.LogCaptureFixture) -> None:
    """As beside a load: one is the last of all then, for long, and no further off than others are."""
    job = Job(8)
    for rank, host in enumerate(job.hosts):
        host.work = 0.4 + 0.05 * rank
    assert job.pass_time(60) == ()
    for host in job.hosts[:-1]:
        host.work = 0.55
    assert [row.node for row in job.pass_time(20)] == [7]


@pytest.mark.parametrize("count", [2, 3, 8, 64])
@pytest.mark.parametrize("factor", [1.3, 1.8])
def test_a_slow_node_is_named_within_seconds(count: int, factor: float, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(5 if count < 10 else 1):
        job, rank = Job(count, 0.02, seed), count - 1
        job.pass_time(20)
        caplog.clear()
        job.hosts[rank].work *= factor
        (row,) = job.pass_time(NAMED)
        assert (row.node, row.place, row.host) == (rank, f"dp={rank}", "host"), f"seed {seed}"
        assert row.behind == pytest.approx(factor - 1, abs=0.1)
        text = rf"node {rank} \(dp={rank}, host host\) is \d\d% behind its mesh: its commands take longer; longest at "
        (message,) = caplog.messages
        assert re.fullmatch(rf"{text}train.py:33 aten::mm", message)


def test_a_node_a_little_behind_is_not_named() -> None:
    job = Job(8, 0.02)
    job.hosts[2].work *= 1 + BEHIND / 2
    assert job.pass_time(60) == ()


def test_nodes_that_mostly_rest_are_not_named() -> None:
    """Twice of nothing is nothing: the others hardly wait for that."""
    job = Job(8)
    for host in job.hosts:
        host.work = 0.02
    job.hosts[2].work = 0.05
    assert job.pass_time(60) == ()


def test_nodes_with_other_commands_are_not_compared() -> None:
    """Those of another stage of a pipeline do other work."""
    job = Job(8)
    for host in job.hosts[:4]:
        host.commands, host.work = 150, 0.9
    assert job.pass_time(60) == ()
    job.hosts[7].work = 0.7
    (row,) = job.pass_time(NAMED)
    assert row.node == 7


def test_windows_in_which_all_work_say_nothing() -> None:
    """In steps of several seconds all work most of the time, and then wait for one."""
    job = Job(4)
    for _ in range(WINDOWS):
        for host in job.hosts:
            host.work = 1.0
        job.pass_time(6)
        for host in job.hosts[1:]:
            host.work = 0.0
        rows = job.pass_time(3)
    assert [row.node for row in rows] == [0]


# ---- when it is told ------------------------------------------------------------------------------------------------


def test_a_slow_node_is_told_of_once_until_it_has_recovered(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(4)
    job.hosts[1].work = 0.8
    assert len(job.pass_time(120)) == 1
    assert len(caplog.messages) == 1
    job.hosts[1].work = 0.5
    assert job.pass_time((RECOVERED + OF) * (WINDOW + SEEN + ROUND)) == ()
    job.hosts[1].work = 0.8
    assert len(job.pass_time(20)) == 1
    assert len(caplog.messages) == 1, "it was told of a minute before"
    job.hosts[1].work = 0.5
    assert job.pass_time(AGAIN) == ()
    job.hosts[1].work = 0.8
    assert len(job.pass_time(20)) == 1
    assert len(caplog.messages) == 2


def test_who_does_nothing_is_not_looked_at() -> None:
    job = Job(4)
    job.pass_time(5)
    for host in job.hosts:
        host.commands = 0
    for node in job.nodes:
        node.outbox.sent = node.outbox.done = 0
    job.pass_time(2 * WINDOW)
    before = job.glances
    job.pass_time(60)
    assert job.glances == before


def test_a_node_with_functions_of_its_own_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(4)
    job.hosts[1].work = 0.8
    done = {rank: [SimpleNamespace(runs=False, operator="aten::mm")] * 9 for rank in range(4)}
    done[1] = [*done[1], SimpleNamespace(runs=True, operator="save()")]
    monkeypatch.setattr(Node, "last_commands", lambda node, most: done[node.rank])
    assert job.pass_time(30) == ()
    done[1] = [SimpleNamespace(runs=False, operator="aten::add")] * 9
    assert job.pass_time(30) == ()
    done[1] = done[0]
    assert [row.node for row in job.pass_time(30)] == [1]


def test_an_error_of_the_watch_ends_it_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(4)
    job.nodes.clear()
    job.watch.look()
    job.watch.look()
    assert caplog.messages == ["slow nodes are not told of any more"]


def test_a_node_whose_command_is_not_found_is_named_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(4)
    del job.found[1]
    job.hosts[1].work = 0.8
    (row,) = job.pass_time(20)
    assert str(row) == "node 1 (dp=1, host host) is 60% behind its mesh: its commands take longer"
    assert caplog.messages == [str(row)]


# ---- why ------------------------------------------------------------------------------------------------------------

CAUSES: Mapping[str, tuple[dict[str, Any], str]] = {
    "quota": ({"work": 0.8, "throttled": 0.31, "delayed": 0.31}, r"throttled by its cgroup for 31% of the time"),
    "nice": (
        {"work": 0.8, "delayed": 0.25},
        r"without a core for \d\d% of the time, as other processes run there",
    ),
    "stops": ({"work": 0.8, "delayed": 0.2, "stopped": 0.3}, r"its commands take longer"),
    "swap": (
        {"work": 0.8, "faults": 310},
        r"its memory comes from a disk: 3\d\d page faults a second, 300.00 MiB of it are in swap",
    ),
    "line": ({"send": 80e-9}, r"its transfers are slower: 1\d.\d\d MiB/s, those of the others [45]\d.\d\d MiB/s"),
    "work": ({"work": 0.8}, r"its commands take longer"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named(cause: str) -> None:
    numbers, expected = CAUSES[cause]
    for seed in range(5):
        job = Job(8, 0.03, seed)
        vars(job.hosts[3]).update(numbers)
        (row,) = job.pass_time(20)
        assert row.node == 3, f"seed {seed}"
        assert re.fullmatch(expected, row.cause), row.cause


def test_what_all_nodes_suffer_from_is_no_cause() -> None:
    job = Job(8, 0.03)
    for host in job.hosts:
        host.throttled, host.delayed, host.faults = 0.3, 0.3, 500
    job.hosts[3].work = 0.8
    (row,) = job.pass_time(20)
    assert row.cause == "its commands take longer"


def test_sends_to_a_node_that_works_too_long_are_not_slow_by_themselves() -> None:
    """Whoever sends to it waits until it takes what comes."""
    job = Job(8, 0.02)
    job.hosts[3].work, job.hosts[2].send = 0.8, 80e-9
    assert [row.node for row in job.pass_time(30)] == [3]


def test_the_last_nodes_of_hosts_are_not_slow_beside_those_within() -> None:
    """In a ring over two hosts these send by the network, and the others do not."""
    for seed in range(20):
        job = Job(8, 0.05, seed)
        for host in (job.hosts[3], job.hosts[7]):
            host.send = 80e-9
        assert job.pass_time(30) == (), f"seed {seed}"


def test_who_sends_more_is_not_slow() -> None:
    job = Job(8, 0.02)
    job.hosts[0].sends *= 4
    assert job.pass_time(30) == ()


def test_stalls_are_a_cause_and_named_with_their_line() -> None:
    job = Job(4)
    job.found[1] = Longest("train.py:40", "aten::relu", 0.0512)
    job.hosts[1].work = 0.8
    (row,) = job.pass_time(20)
    assert str(row).endswith(": stalls of 51 ms; longest at train.py:40 aten::relu")


def stand() -> None:
    while True:
        time.sleep(0.01)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def events(**durations: list[float]) -> list[NodeEvent]:
    """Commands that have been done, by operator."""
    code = events.__code__
    event = NodeEvent(0, "done", 0.0, 0.0, "", 0, "", -1, -1, 0, False, None)
    return [
        event._replace(at=100 + seconds, began=100.0, what=what, site=(code, line))
        for line, (what, its) in enumerate(durations.items())
        for seconds in its
    ]


def test_the_longest_command_is_the_one_by_which_the_node_is_behind() -> None:
    usual = events(mm=[0.10] * 5, conv=[0.30] * 5, all_reduce=[0.01])
    slow = events(mm=[0.30] * 5, conv=[0.31] * 5, all_reduce=[9.0])
    found = longest_of(slow, usual)
    assert found is not None
    assert (found[0].what, found[1]) == ("mm", 0.0)


def test_slow_sends_are_those_of_a_collective() -> None:
    slow = events(mm=[0.30] * 5, all_reduce=[0.2, 0.3], all_gather=[0.1])
    found = longest_of(slow, (), joint=True)
    assert found is not None
    assert (found[0].what, found[1]) == ("all_reduce", 0.0)


def test_single_commands_that_stand_still_are_stalls() -> None:
    usual = events(mm=[0.001] * 50, add=[0.002] * 50)
    slow = events(mm=[0.001] * 47 + [0.051] * 3, add=[0.0022] * 50)
    found = longest_of(slow, usual)
    assert found is not None
    assert (found[0].what, round(found[1], 3)) == ("mm", 0.05)


def test_of_a_node_that_has_done_nothing_no_command_is_known() -> None:
    assert longest_of([], events(mm=[1.0])) is None


# ---- real nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "freed"), [(True, False), (True, True), (False, False)], ids=["none", "Free", "no answer"]
)
def test_who_has_ended_no_command_is_named_with_what_it_is_at(
    monkeypatch: pytest.MonkeyPatch, answers: bool, freed: bool
) -> None:
    """As a node that gets no core, which may not even get to answer, or to do more than what no line has issued."""
    if freed:
        (free,) = events(Free=[0.1])
        monkeypatch.setattr(slow_watch, "longest_of", lambda *_: (free._replace(site=None, number=1 << 40), 0.0))
    monkeypatch.setattr(slow_watch, "WATCHED", 0.05)
    monkeypatch.setattr(slow_watch, "ANSWER", HANG if answers else 0.05)
    with dt.init_master_worker(nodes=2, threads=1):
        session, node = current.session(), dt.nodes()[0]
        watch = SlowWatch(session)
        work = dt.submit(stand if answers else stop, node=0)
        deadline = time.monotonic() + HANG
        wanted = FUNCTION, not answers
        while (seen := session.nodes[0].connection.seen) is None or (seen.kind, seen.state == "T") != wanted:
            assert time.monotonic() < deadline
            dt.seeing.status(timeout=0.2)
        longest = watch._find(session, Slow(0, 1.0, "", 1, "work"))
        assert longest is not None
        assert longest.line.startswith(f"{os.path.basename(__file__)}:")
        assert longest.what == ("stand()" if answers else "stop()")
        if answers:
            work.cancel()
        else:
            os.kill(node.pid, signal.SIGCONT)
            work.result()
        watch.end()


def test_real_nodes_say_what_they_have_worked_and_which_command_took_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_watch, "WATCHED", 0.3)
    found: list[Longest | None] = []
    with dt.init_master_worker(nodes=2, threads=1, backend="tcp"):
        session = current.session()
        mesh = dt.mesh(dp=2)
        x = torch.full((300, 300), 1 / 300, device=mesh.device)
        dt.all_reduce(x @ x, "avg", over="dp")[0, 0].item()  # so that nothing is defined while it is looked at
        watch = SlowWatch(session)
        thread = threading.Thread(target=lambda: found.append(watch._find(session, Slow(0, 1.0, "", 1, "work"))))
        thread.start()
        while thread.is_alive():
            y = x @ x
            dt.all_reduce(y, "avg", over="dp")[0, 0].item()
        thread.join()
        deadline = time.monotonic() + HANG
        while (seen := session.nodes[0].connection.seen) is None or not seen.use.tally.sent:
            assert time.monotonic() < deadline
            dt.seeing.status(timeout=HANG)
        assert session.link.looking.watched == set()
        watch.end()
    (longest,) = found
    assert longest is not None
    assert longest.line.startswith(f"{os.path.basename(__file__)}:")
    assert longest.what.startswith("aten::")
    assert seen.use.ran > 0
    assert 0 < seen.use.tally.worked < seen.lived
