"""Silences with their default times, 10, 15 and 60 s, on a clock that goes on by itself: nothing here takes seconds."""

from __future__ import annotations

import ast
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from fake_hub import HELLO, FakeHub
from sources import product, refuse
from virtual_time import VirtualClock

from disttensor.runtime.host.launcher import Exited, Launcher, Sight
from disttensor.runtime.host.silence import Silence
from disttensor.runtime.launch.tree import agent as agents
from disttensor.runtime.launch.tree.agent import EX_ROOT_GONE, Agent, agent_hello
from disttensor.runtime.launch.tree.control import AgentNews, Beat, Order, Pause, Stop
from disttensor.runtime.launch.tree.framed import FramedSocket
from disttensor.runtime.launch.tree.host_starter import Branch
from disttensor.runtime.launch.tree.root import Root
from disttensor.runtime.master.link_state import LinkState
from disttensor.runtime.master.losses import EXIT_CAUSE_TIMEOUT, Losses
from disttensor.runtime.master.patience import UNHEEDED, Cancelled
from disttensor.runtime.master.replies import Replies
from disttensor.runtime.master.requests import Requests
from disttensor.runtime.master.side_channels import SideChannels
from disttensor.runtime.master.waiting import Waiting
from disttensor.runtime.process.flight import WAITED
from disttensor.runtime.process.own_time import Unheard
from disttensor.runtime.process.page import FUNCTION, NOBODY
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.shared.objects import Objects
from disttensor.runtime.shared.service import Service

#: Seconds for what takes a moment; longer is a hang.
SOON = 20
SILENCE = Silence()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_the_defaults() -> None:
    assert (SILENCE.pause, SILENCE.lost, SILENCE.lease) == (10, 15, 60)


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_the_clock_goes_on_to_what_is_planned(clock: VirtualClock) -> None:
    began, event, seen = clock.now(), threading.Event(), list[float]()
    clock.plan(5, event.set)
    clock.plan(2, lambda: seen.append(clock.now() - began))
    assert clock.wait(event, 60)
    clock.sleep(3)
    assert (clock.now() - began, seen) == (8, [2])


def test_time_in_which_a_process_did_not_run_does_not_count(clock: VirtualClock) -> None:
    unheard = Unheard(4.0, clock)
    for _ in range(5):
        clock.sleep(2)
        unheard.look()
    clock.sleep(3600)  # Ctrl-Z
    assert unheard.look() == 14
    unheard.heard()
    assert unheard.look() == 0


#: Counts what only the kernel knows, beside what is counted by a clock.
BESIDE = "runtime/process/own_time.py"


def test_who_is_given_a_clock_asks_nothing_else_for_the_time() -> None:
    reads = ((file.name, node.value) for file in product() for node in file.nodes(ast.Attribute))
    given = {name for name, of in reads if isinstance(of, ast.Attribute) and of.attr in ("clock", "_clock")}
    asking = {file.name for file in product() for found in file.nodes(ast.Import) if found.names[0].name == "time"}
    refuse(sorted(given & asking - {BESIDE}), "what is given a clock has no other time")
    assert {"runtime/launch/tree/root.py", "runtime/shared/service.py", "runtime/master/waiting.py"} < given


# ---- the link --------------------------------------------------------------------------------------------------------


@pytest.fixture
def state(hub: FakeHub, clock: VirtualClock) -> Iterator[LinkState]:
    made = LinkState(hub, 2, clock=clock)
    for node in made.nodes:
        node.connection.hello = HELLO
    yield made
    made.interrupts.restore()


class SilentLauncher(Launcher):
    """Never says anything."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def start(self, bundles: Sequence[Bundle]) -> None: ...

    def stop(self, grace: float) -> None:
        os.close(self.descriptor)

    def fileno(self) -> int:
        return self.descriptor

    def events(self) -> Sequence[object]:  # type: ignore[override]
        return ()


def test_a_wait_is_explained_after_ten_seconds_and_each_time_that_it_has_taken_twice_as_long(
    state: LinkState, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    requests = Requests(state)
    losses = Losses(state, requests, SideChannels(clock), None, lambda error: None)
    waiting = Waiting(state, requests, losses, Replies(state, requests, losses))
    began = clock.now()
    with caplog.at_level(logging.WARNING, "disttensor"), pytest.raises(TimeoutError, match="within 60 s"):
        waiting.wait(requests.new(0, c.Answer), 60)
    said = [re.match(r"node 0 \(host host, pid 1\) has not answered for (\d+) s", text) for text in caplog.messages]
    assert [found and found[1] for found in said] == ["12", "26", "54"]  # with the look from outside, which never comes
    assert clock.now() - began == 60


def test_a_long_wait_is_told_of_at_its_end_though_messages_come_all_the_time(
    hub: FakeHub, state: LinkState, clock: VirtualClock
) -> None:
    requests, ends = Requests(state), list[float]()
    losses = Losses(state, requests, SideChannels(clock), None, lambda error: None)
    waiting = Waiting(state, requests, losses, Replies(state, requests, losses))
    waiting.on_long_wait = lambda: ends.append(clock.now())
    request, others, began = requests.new(0, c.Answer), [requests.new(1, c.Answer) for _ in range(9)], clock.now()
    for n, other in enumerate(others, 1):
        clock.plan(n / 4, partial(hub.say, 1, c.Answer(other.id, "7")))
    clock.plan(2.5, partial(hub.say, 0, c.Answer(request.id, "7")))
    for each in (request, others[0]):
        waiting.wait(each)
    assert ends == [began + 2.5]
    trails = [[it for it, _ in node.outbox.trail.records() if it.kind == WAITED] for node in state.nodes[:2]]
    assert [[(it.number, it.seconds) for it in trail] for trail in trails] == [[(request.id, 2.5)], []]  # none of 0 s


def test_a_function_that_heeds_no_cancel_is_named_after_five_seconds(
    state: LinkState, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled, asked, seconds = Cancelled(state.nodes[1], 7, clock), list[int](), 0
    with caplog.at_level(logging.WARNING, "disttensor"):
        while not cancelled.look(lambda node: asked.append(node.rank)):
            assert not caplog.messages
            clock.sleep(1)
            seconds += 1
    assert (asked, seconds) == ([1], UNHEEDED + 2)
    assert "a function, was cancelled 7 s ago and goes on" in caplog.text


def test_a_node_whose_launcher_says_nothing_is_lost_by_the_end_of_its_connection(
    state: LinkState, clock: VirtualClock
) -> None:
    launcher, began = SilentLauncher(), clock.now()
    losses = Losses(state, Requests(state), SideChannels(clock), launcher, lambda error: None)
    losses.disconnected(1, "its connection ended", 0)
    losses.explain()
    launcher.stop(0)
    assert [(error.rank, error.cause) for error in losses.errors] == [(1, "its connection ended")]
    assert EXIT_CAUSE_TIMEOUT <= clock.now() - began < EXIT_CAUSE_TIMEOUT + 0.1


@pytest.mark.parametrize("explained", [False, True])
def test_a_node_whose_main_thread_has_ended_is_lost(state: LinkState, clock: VirtualClock, explained: bool) -> None:
    """A process of which other threads are left is a zombie for good; another one until its launcher has its cause."""

    class Looks(SilentLauncher):
        def events(self) -> Sequence[object]:  # type: ignore[override]
            found, self.found = self.found, []
            return found

        def end_worker(self, rank: int) -> None: ...

    launcher, began = Looks(), clock.now()
    losses = Losses(state, Requests(state), SideChannels(clock), launcher, lambda error: None)
    launcher.found = [Sight(1, "Z", False, 0, FUNCTION, NOBODY, 9.0, 0.0, 0, "")]
    losses.ask_launcher()
    assert (list(losses.unexplained), losses.errors) == ([1], [])
    if explained:
        launcher.found = [Exited(1, 5, "exit code 3", 3, ())]
    losses.explain()
    launcher.stop(0)
    (error,) = losses.errors
    assert error.cause == ("exit code 3" if explained else "the main thread of its process has ended (pthread_exit)")
    assert explained == (clock.now() - began < EXIT_CAUSE_TIMEOUT)


def test_the_service_looks_for_connections_that_do_not_answer(hub: FakeHub, clock: VirtualClock) -> None:
    lost, told = list[tuple[int, float]](), threading.Event()
    began = clock.now()

    def lose(rank: int, why: str, incarnation: int) -> None:
        lost.append((rank, clock.now() - began))
        told.set()

    hub.deaf = [1]
    service = Service(hub, Objects(), lose, clock)
    assert told.wait(SOON)
    service.close()
    assert lost == [(1, 1)]


# ---- the tree of hosts -----------------------------------------------------------------------------------------------


@pytest.fixture
def signals() -> Iterator[None]:
    """Roots and agents have the signals of a process of their own."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


class Host(Branch):
    """An agent that answers until it falls silent."""

    def __init__(self, root: Root) -> None:
        super().__init__("a", 1)
        self.root, self.silent, self.beats_heard = root, False, 0

    def send_order(self, order: Order) -> None:
        if isinstance(order, Beat) and not self.silent:
            self.beats_heard += 1
            self.root.loop.later(0, lambda: self.root.heard(self, Beat(order.silence, 0.0)))

    def close(self) -> None: ...


@pytest.mark.usefixtures("signals")
def test_a_host_of_which_nothing_is_heard_is_lost_after_fifteen_seconds(clock: VirtualClock) -> None:
    ours, theirs = socket.socketpair()
    with ours, FramedSocket(Order, theirs.detach()) as wire:
        root = Root(wire, clock)
        root.add(host := Host(root))
        root.heard(host, agent_hello())
        until = clock.now() + 600
        while clock.now() < until:
            root.loop.turn()
        assert host.gone is None  # it has answered for ten minutes
        assert host.beats_heard > 600 / SILENCE.beat - 2
        host.silent = True
        while host.gone is None and clock.now() < until + 600:
            root.loop.turn()
        assert host.gone is not None
        assert SILENCE.lost < clock.now() - until <= SILENCE.lost + 2 * SILENCE.beat
        assert re.match(r"silent for 1\d s: a is stopped or gone", host.gone[0])


class Server:
    """Stands for the process of a fork server."""

    def wait(self, timeout: float | None = None) -> int:
        return 0


@pytest.mark.usefixtures("signals")
def test_an_agent_that_hears_nothing_stops_its_nodes_after_ten_seconds_and_ends_after_sixty(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    down, servers = socket.socketpair()
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(agents, "spawn_server", lambda preload, tied: (down, Server()))
    for name in ("adopt_orphans", "end_children"):  # this process is not an agent's
        monkeypatch.setattr(agents, name, lambda *args: None)
    with (
        FramedSocket(Order, servers.detach()) as server,
        FramedSocket(AgentNews, ours.detach()) as root,
    ):
        agent, began = Agent(FramedSocket(Order, theirs.detach()), agent_hello(), (), clock), clock.now()
        said: list[tuple[float, Order]] = []

        def look() -> None:
            said.extend((clock.now() - began, order) for order in server.hear() if isinstance(order, (Pause, Stop)))
            if not server.ended:
                clock.plan(0.25, look)

        def beat() -> None:
            root.send_message(Beat(SILENCE, clock.now()))

        clock.plan(0, look)
        clock.plan(8, beat)  # just in time
        clock.plan(
            25, lambda: root.send_message(Beat(SILENCE, clock.now() - SILENCE.lost))
        )  # it was on its way for long
        clock.plan(30, beat)  # after which they go on
        clock.plan(600, root.close)  # so that it ends even if it is not to
        assert agent.run() == EX_ROOT_GONE
        look()
    assert [order for _, order in said] == [Pause(True), Pause(False), Pause(True), Stop(0)]
    times = [seconds for seconds, _ in said]
    for seconds, due in zip(times, (8 + SILENCE.pause, 30, 30 + SILENCE.pause, 30 + SILENCE.lease), strict=True):
        assert due <= seconds <= due + SILENCE.beat
    assert "nothing was heard from the root for 60 s" in capfd.readouterr().err
