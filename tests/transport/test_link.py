"""The master's I/O when a node gets nothing any more, with in-process nodes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from handlers import TimeUp, handled, time_up
from spies import spy

import disttensor as dt
from disttensor import testing
from disttensor.runtime.channel.base import Transfer
from disttensor.runtime.host.launcher import Exited, Launcher, Started
from disttensor.runtime.master import outbox
from disttensor.runtime.master.connection import NodeConnection
from disttensor.runtime.master.link import Link
from disttensor.runtime.master.outbox import packed
from disttensor.runtime.master.requests import Request, Waker
from disttensor.runtime.process.observing import MessageSent
from disttensor.runtime.process.signals import uninterrupted
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.protocol.errors import BrokenError
from disttensor.runtime.transport.inproc import InprocHub
from disttensor.session import current, session
from disttensor.session.channel_router import ChannelRouter
from disttensor.startup import start

#: Seconds for what takes a moment; longer is a hang.
SOON = 20


@pytest.fixture
def link() -> Iterator[Link]:
    """The link of a session that the test may break."""
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        yield current.session().link


def cut(link: Link, rank: int, monkeypatch: pytest.MonkeyPatch, found: Callable[[], object] = int) -> None:
    """The next message to a node finds its connection broken, and calls ``found``."""

    def broken(to: int, message: bytes) -> None:
        if to == rank:
            found()
            raise BrokenError(f"node {rank} is gone")
        send(to, message)

    send = spy(monkeypatch, link.hub, "send", broken)


def use(x: torch.Tensor, until: type[Exception]) -> None:
    while True:
        try:
            x + 1
        except until:
            return


@pytest.mark.parametrize("end", ["lost", "shut down"])
def test_nothing_is_kept_for_a_node_that_gets_nothing(end: str, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    x, box = torch.ones(3, device="node:1"), link.nodes[1].outbox
    dt.synchronize()
    if end == "lost":
        cut(link, 1, monkeypatch)
    else:
        dt.shutdown()
    for _ in range(100):
        use(x, dt.NodeLost if end == "lost" else dt.DisttensorError)
    assert len(box.commands) <= 2
    assert len(box.dead) <= 2


#: CPython 3.11 keeps the attributes of an object in line up to this many; from the next one on each use is a look into
#: a dictionary, unless the class has slots.
IN_LINE = 29


def test_what_is_used_for_each_answer_has_its_attributes_in_line(link: Link) -> None:
    mesh = link.sender.fan_out((0, 1))
    for used in (link.nodes[0], link.hub, link.interrupts):
        assert len(vars(used)) <= IN_LINE, type(used)
    parts = [getattr(link, name) for name in Link.__slots__]
    for slotted in (link, *parts, link.nodes[0].outbox, mesh):
        assert not hasattr(slotted, "__dict__"), type(slotted)  # as of a class among its own without slots


def test_a_node_may_be_lost_before_the_session_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, when a host is not found."""

    def late(link: Link, *args: Any, **kwargs: Any) -> ChannelRouter:
        link.losses.lose(0, "its host was not found")
        return ChannelRouter(link, *args, **kwargs)

    monkeypatch.setattr(session, "ChannelRouter", late)
    with pytest.raises(dt.DisttensorError, match="its host was not found"):
        dt.init_master_worker(nodes=1, threads=1)


def test_a_wait_within_a_wait_leaves_no_descriptor(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer's or a signal handler's, which may come in the middle of any other."""
    x = torch.ones(3, device="node:0")
    assert x.sum().item() == 3
    gc.collect()  # what garbage of other tests has open, it closes by chance
    before = len(os.listdir("/proc/self/fd"))
    inner = list[float]()

    def within(*args: Any) -> bool:
        if not inner:
            inner.append(-1.0)
            inner.append((2 * x).sum().item())
        return poll(*args)

    poll = spy(monkeypatch, link.waiting, "_poll", within)
    assert x.sum().item() == 3
    assert inner == [-1.0, 6.0]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lost_node_is_said_to_those_who_use_it(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.ones(3, device="node:1"), torch.ones(3, device="node:0")
    dt.synchronize()
    fetches: list[Callable[[], object]] = [lambda: y.sum().item(), lambda: y.cpu().sum().item()]
    for fetch in fetches:
        link.nodes[1].outbox.add(c.Free(0, ()))  # to be flushed before the master blocks
        cut(link, 1, monkeypatch)
        assert fetch() == 3
    with pytest.raises(dt.NodeLost):
        use(x, KeyError)


def test_a_question_that_cannot_be_sent(link: Link) -> None:
    place = torch.ones(3, device="node:1")._place  # type: ignore[attr-defined]
    with pytest.raises(dt.DisttensorError, match="can't be sent"):
        place.session.ask(place, c.Answer, lambda id: c.Ask(id, c.Call(0, 1, (1 << 70,))), None)
    assert len(link.requests) == 0


started, release = threading.Event(), threading.Event()


def hold() -> None:
    """Keeps a node busy."""
    started.set()
    assert release.wait(SOON)


@pytest.fixture
def pool(link: Link) -> Iterator[ThreadPoolExecutor]:
    """For what has to wait; node 1 is busy until the end of the test."""
    started.clear()
    release.clear()
    with ThreadPoolExecutor(3) as pool:
        pool.submit(dt.run, hold, node=1)
        assert started.wait(SOON)
        yield pool
        release.set()


def test_synchronize_ends_in_time_at_a_full_window(pool: ThreadPoolExecutor) -> None:
    x, full = torch.zeros(1, device="node:1"), threading.Event()
    with testing.at("window", full.set):
        issuing = pool.submit(lambda: [x.add_(1) for _ in range(2 * int(testing.limit("window")))])
        assert full.wait(SOON)
        with pytest.raises(TimeoutError, match="node 1 has not answered"):
            pool.submit(current.session().synchronize, 1, 0.01).result(SOON)
        release.set()
        issuing.result(SOON)


def test_the_line_that_a_busy_node_is_at(link: Link, pool: ThreadPoolExecutor) -> None:
    assert link.nodes[1].outbox.running() is not None


@pytest.mark.parametrize("flush", ["flush", "exchange"])
def test_the_end_of_the_session_overtakes_a_flush(
    flush: str, link: Link, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = threading.Event()

    def sent(*args: Any) -> None:
        about.set()
        send(*args)

    x = torch.ones(3, device="node:1")
    send = spy(monkeypatch, link.sender, "send", sent)
    with link.lock:
        ending = pool.submit(lambda: link.sender.flush(link.nodes[1].outbox) if flush == "flush" else x.sum().item())
        assert about.wait(SOON)  # it is about to send
        link.close()
    with pytest.raises(dt.DisttensorError, match="shut down"):
        ending.result(SOON)
    start._end_session(report=False)


class Broken(Transfer):
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        raise BrokenError("a broken cable")

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        fn()


@pytest.mark.usefixtures("pool")
def test_a_broken_transfer_is_told_though_the_node_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    session = current.session()
    sync = session.transfers._sync
    monkeypatch.setattr(session.transfers, "_sync", lambda node, timeout: sync(node, 0.01))
    with pytest.raises(BrokenError, match="a broken cable"):
        session.transfers.wait_for_transfer(Broken(), 1)


def test_a_request_outlives_the_thread_that_waited() -> None:
    request = Request(1, 0)

    def wait() -> None:
        request.waker = Waker()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert request.waker is not None
    request.resolve()
    assert os.eventfd_read(request.waker.fd) == 1


def test_small_collectives_leave_with_what_follows_and_to_all_nodes_at_once() -> None:
    with dt.init_master_worker(nodes=4, launcher="inproc"):
        link = current.session().link
        xs = [torch.ones(3, device=f"node:{k}") for k in range(4)]
        dt.synchronize()
        sent: list[MessageSent] = []
        with link.lock, link.seam.sent.heard_by(sent.append):  # nothing else sends
            for box in (node.outbox for node in link.nodes):
                box.set_flush_threshold(100)
            dt.all_reduce(xs[1:])
            dt.all_reduce(xs[:2])
            assert not sent
            link.sender.flush(link.nodes[3].outbox)
            assert sorted(message.node for message in sent) == [0, 1, 2, 3]
        assert [x.tolist() for x in xs] == [[4.0] * 3, [4.0] * 3, [3.0] * 3, [3.0] * 3]


def test_what_no_safe_point_follows_arrives_again() -> None:
    @uninterrupted
    def finalizer() -> None:
        signal.raise_signal(signal.SIGALRM)

    with dt.init_master_worker(nodes=2, launcher="inproc"), handled(time_up):
        torch.ones(3, device="node:1").sum().item()
        with pytest.raises(TimeUp):  # noqa: PT012
            finalizer()
            threading.Event().wait(SOON)


def test_a_session_ends_though_a_window_is_full() -> None:
    """Of a node that is stopped: an exception has left the block, and nobody waits for what was issued."""
    with contextlib.suppress(ZeroDivisionError), dt.init_master_worker(nodes=2, threads=1):
        link = current.session().link
        x = torch.ones(3, device="node:1")
        dt.synchronize()
        testing.stop(1)
        link.patient = False
        while not link.nodes[1].outbox.full:
            x.add_(1)
        link.patient = True
        raise ZeroDivisionError
    assert not dt.session.is_initialized()


def test_a_loss_is_told_whole_beside_threads_that_ask() -> None:
    """They take their requests out without the lock."""
    hub = InprocHub(1)
    link = Link(hub, 1, None, lambda error: None)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            link.requests.withdraw(link.requests.new(0))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            for _ in range(3000):
                link.nodes[0].outbox.lost, link.nodes[0].connection = None, NodeConnection(0)
                link.losses.errors.clear()
                link.losses.lose(0, "its cable was cut")
        finally:
            over.set()
            sys.setswitchinterval(before)
        for one in asking:
            with contextlib.suppress(dt.NodeLost):
                one.result(SOON)
    link.close()


class SlowLauncher(Launcher):
    """Says why node 1 is gone when ``answer`` is set, and not before; meanwhile whoever asks waits."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0)
        self.broken, self.asked, self.answer = threading.Event(), threading.Event(), threading.Event()
        self.in_time: list[bool] = []

    def start(self, bundles: Sequence[Bundle]) -> None: ...

    def stop(self, grace: float) -> None: ...

    def fileno(self) -> int:
        return self.descriptor

    def events(self) -> list[Started | Exited]:
        if not self.broken.is_set() or self.in_time:
            return []
        self.asked.set()
        self.in_time.append(self.answer.wait(SOON))
        return [Exited(1, 5, "exit code 3", 3, ())]


def test_nobody_waits_for_a_launcher_that_is_asked_why_another_node_is_gone(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = torch.ones(3, device="node:0"), torch.ones(3, device="node:1")
    dt.synchronize()
    launcher = SlowLauncher()

    cut(link, 1, monkeypatch, launcher.broken.set)
    monkeypatch.setattr(link.losses, "launcher", launcher)
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(lambda: there.sum().item())
        assert launcher.asked.wait(SOON)
        for _ in range(100):
            here += 1
        assert here.sum().item() == 303
        assert not lost.done()
        launcher.answer.set()
        with pytest.raises(dt.NodeLost, match="exit code 3"):
            lost.result(SOON)
    assert launcher.in_time == [True]
    monkeypatch.setattr(link.losses, "launcher", None)
    os.close(launcher.descriptor)


class Finalized(SlowLauncher):
    """Has a finalizer run in the middle of a question, as the collector may, which waits for the node that is gone."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self.wait, self.said = wait, ""

    def events(self) -> list[Started | Exited]:
        if self.broken.is_set() and not self.asked.is_set():
            self.asked.set()
            try:
                self.wait()
            except dt.NodeLost as e:
                self.said = str(e)
        return []


@pytest.mark.parametrize("then", ["waits", "closes"])
def test_what_a_launchers_question_is_interrupted_by_does_not_wait_for_its_end(
    then: str, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3, device="node:1")
    dt.synchronize()
    launcher = Finalized(lambda: x.sum().item() if then == "waits" else link.close())

    cut(link, 1, monkeypatch, launcher.broken.set)
    monkeypatch.setattr(link.losses, "launcher", launcher)
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(lambda: x.sum().item())
        with pytest.raises(dt.errors.DisttensorError, match="node 1 is gone" if then == "waits" else "shut down"):
            lost.result(SOON)
    assert launcher.asked.is_set()
    assert ("node 1 is gone" in launcher.said) == (then == "waits")
    monkeypatch.setattr(link.losses, "launcher", None)
    os.close(launcher.descriptor)
    start._end_session(report=False)


released = threading.Event()


def until_released() -> bool:
    return released.wait(SOON)


def test_who_waits_does_not_spin_while_another_thread_asks_the_launcher(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor stays readable meanwhile: one look tells, and the next polls leave it out."""
    here, there = torch.ones(3, device="node:0"), torch.ones(3, device="node:1")
    dt.synchronize()
    launcher, looks = SlowLauncher(), 0

    def counted(*args: Any) -> bool:
        nonlocal looks
        looks += 1
        return readable(*args)

    os.eventfd_write(launcher.descriptor, 1)
    cut(link, 1, monkeypatch, launcher.broken.set)
    monkeypatch.setattr(link.losses, "launcher", launcher)
    readable = spy(monkeypatch, link.waiting, "_readable", counted)
    released.clear()
    with ThreadPoolExecutor(2) as pool:
        lost = pool.submit(lambda: there.sum().item())
        assert launcher.asked.wait(SOON)
        looks = 0
        waiting = pool.submit(lambda: dt.run(until_released, node=0))
        with contextlib.suppress(TimeoutError):
            waiting.result(1.5)
        seen = looks
        released.set()
        assert waiting.result(SOON)
        launcher.answer.set()
        with pytest.raises(dt.NodeLost):
            lost.result(SOON)
    assert seen < 50
    assert here.sum().item() == 3
    monkeypatch.setattr(link.losses, "launcher", None)
    os.close(launcher.descriptor)


def test_a_replay_of_a_graph_on_a_mesh_is_encoded_once(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def counting(first: int, commands: list[c.Command], *args: Any) -> Any:
        encoded.extend(type(command).__name__ for command in commands)
        return packed(first, commands, *args)

    x = torch.ones(3, device=dt.mesh(dp=2).device)
    x.add_(1).sum()
    with dt.graph(g := dt.Graph()):
        total = x.add_(1).sum()
    dt.synchronize()
    monkeypatch.setattr(outbox, "packed", counting)
    for _ in range(3):
        g.replay()
    link.sender.flush_all()
    assert encoded == ["Replay"] * 3
    monkeypatch.undo()
    assert [total.item(), *x.tolist()] == [15.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(("place", "small"), [("a node", [1, 2, 3, 6]), ("a mesh", [2, 3, 6])])
def test_a_replay_leaves_when_the_commands_that_it_stands_for_would(link: Link, place: str, small: list[int]) -> None:
    """Small ones leave together, more of them with each message, and one that is a message's commands at once."""
    x = torch.ones(3, device="node:0" if place == "a node" else dt.mesh(dp=2).device)
    x.add_(1)
    replayed = []
    for size in (3, testing.limit("message")):
        with dt.graph(g := dt.Graph()):
            for _ in range(int(size)):
                x.add_(1)
        with testing.MessageLog() as log, link.lock:  # so that nothing but replays has them leave
            for _ in range(20):
                g.replay()
            messages = [codec.decode_batch(data).commands for node, data in log.sent if node == 0]
        replayed.append([len(commands) for commands in messages])
        assert {type(command) for commands in messages for command in commands} == {c.Replay}
    assert replayed == [small, [1] * 20]
    assert x.tolist() == [2.0 + 20 * (3 + testing.limit("message"))] * 3
