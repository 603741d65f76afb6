"""A root with agents on this host: nodes are dealt, heard, and ended with whoever is above them. Nodes are stubs."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path

import msgspec
import psutil
import pytest
from limits import HANG
from output_kit import unfolded
from processes import alive_after
from test_launch import STUBS, bundles, collect

from disttensor.runtime.host.launch_spec import Host, LaunchSpec
from disttensor.runtime.host.output_options import Output
from disttensor.runtime.host.silence import Silence
from disttensor.runtime.launch import Exited, Started
from disttensor.runtime.launch.starters.root_launcher import RootLauncher
from disttensor.runtime.launch.tree import root
from disttensor.runtime.launch.tree.control import Modules, Order
from disttensor.runtime.launch.tree.framed import FramedSocket
from disttensor.runtime.launch.tree.host_starter import Branch, HostStarter
from disttensor.runtime.launch.tree.loop import EventLoop
from disttensor.runtime.protocol.bundle import Bundle

pytestmark = pytest.mark.cold  # stubs import no torch, and some of this is about imports

Tree = Callable[..., RootLauncher]


def spec(*slots: int, silence: Silence = Silence(), **options: str) -> LaunchSpec:  # noqa: B008 - frozen
    hosts = tuple(Host(name, n) for name, n in zip("abcdefgh", slots, strict=False))
    return LaunchSpec("nearby", hosts=hosts, options={"preload": " ".join(STUBS)} | options, silence=silence)


def asked(*jobs: str) -> list[Bundle]:
    return [msgspec.structs.replace(bundle, nodes=len(jobs)) for bundle in bundles(*jobs)]


@pytest.fixture
def tree() -> Iterator[Tree]:
    with contextlib.ExitStack() as stack:

        def start(*slots: int, silence: Silence = Silence(), **options: str) -> RootLauncher:  # noqa: B008 - frozen
            launcher = RootLauncher(spec(*slots, silence=silence, **options), "stub_workers:act")
            stack.callback(launcher.stop, 0)
            return launcher

        yield start


def test_ranks_in_blocks(tree: Tree, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = tree(2, 1, 2)
    assert launcher.capacity == 5
    launcher.start(asked(*["place"] * 4))
    events = collect(launcher, 8)
    assert {e.rank: e.host for e in events if isinstance(e, Started)} == {0: "a", 1: "a", 2: "b", 3: "c"}
    ended = {e.rank: e for e in events if isinstance(e, Exited)}
    assert all(e.code == 0 for e in ended.values())
    places = ["0 of 2", "1 of 2", "0 of 1", "0 of 1"]
    assert [ended[k].tail for k in range(4)] == [(place,) for place in places]
    launcher.stop(0)
    assert sorted(unfolded(capfd.readouterr().out.splitlines())) == [
        f"[node {k}] {place}" for k, place in enumerate(places)
    ]


@pytest.mark.fault(44)
def test_a_root_raises_its_own_limit_where_it_may(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (14, highest))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=few))
        launcher = tree(1, 1, 1)
    launcher.start(asked("serve", "serve", "serve"))
    assert [type(event) for event in collect(launcher, 3)] == [Started] * 3


def test_a_node_killed(tree: Tree) -> None:
    launcher = tree(1, 1)
    launcher.start(asked("serve", "serve"))
    collect(launcher, 2)
    assert launcher.missing([0, 1]) == (
        "node 0 on a: it runs there, and has not reached the master at none\n"
        "node 1 on b: it runs there, and has not reached the master at none"
    )
    launcher.kill(1)
    [ended] = collect(launcher, 1)
    assert isinstance(ended, Exited)
    assert (ended.rank, ended.cause, ended.host) == (1, "killed by SIGKILL", "b")
    launcher.start(asked("serve", "serve")[1:])  # its seat is free again
    [began] = collect(launcher, 1)
    assert (began.rank, began.host) == (1, "b")


def test_hosts_that_are_of_no_use_before_anybody_asks() -> None:
    hosts = (Host("a", 1), Host("b", 2))
    launcher = RootLauncher(LaunchSpec("nearby", hosts=hosts, options={"preload": "no_such_module"}))
    try:
        while not launcher._server_pid or launcher.vacant:  # the root has begun, and both hosts are lost again
            assert select.select([launcher], [], [], HANG)[0]
            assert launcher.events() == []
        launcher.start(asked("serve", "serve"))
        for rank, event in enumerate(collect(launcher, 2)):
            assert isinstance(event, Exited)
            assert (event.rank, event.host, event.pid) == (rank, "ab"[rank], 0)
            assert "No module named 'no_such_module'" in event.cause
            assert event.tail[0] == "Traceback (most recent call last):"
    finally:
        launcher.stop(0)


def test_what_nodes_are_waiting_for(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("slow_to_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = tree(2, 1, preload="slow_to_import")
    launcher.start(asked("serve", "serve", "serve"))
    what = "its fork server has not imported torch yet"
    expected = f"nodes 0-1 on a: {what}\nnode 2 on b: {what}"
    while launcher.missing([0, 1, 2]) != expected:
        assert select.select([launcher], [], [], HANG)[0]
        launcher.events()


def test_log_directory_that_cannot_be_made(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    launcher = tree(1, 1)
    launcher.show(Output(log_dir=str(tmp_path / "file" / "logs")))
    launcher.start(asked("serve", "serve"))
    ends = collect(launcher, 2)
    assert all(isinstance(e, Exited) and "its log files cannot be made: [Errno 20]" in e.cause for e in ends)
    assert [(e.rank, e.host) for e in ends] == [(0, "a"), (1, "b")]


def test_rest(tree: Tree, capfd: pytest.CaptureFixture[str]) -> None:
    """Between sessions no node is left, and all that has imported torch is still there."""
    launcher = tree(2, 1)
    launcher.start(asked("serve", "stubborn", "serve"))
    first = collect(launcher, 3)
    servers = {event.rank: psutil.Process(event.pid).ppid() for event in first}
    assert launcher._rest(0)
    assert alive_after(0, [event.pid for event in first]) == []
    launcher.events()
    launcher.start(asked("serve", "serve"))
    second = collect(launcher, 2)
    assert {(type(e), e.rank, e.host) for e in second} == {(Started, 0, "a"), (Started, 1, "a")}
    assert all(psutil.Process(event.pid).ppid() == servers[0] for event in second)
    launcher.stop(0)
    assert alive_after(0, [event.pid for event in second]) == []


def test_a_root_whose_agents_never_come_ends_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent is there whose beats would end a turn of its loop: it has to look at the time by itself."""
    ours, theirs = socket.socketpair()
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(root, "PATIENCE", 0.1)
    monkeypatch.setattr(root, "LATE", 0.1)
    monkeypatch.setattr(root.EventLoop, "turn", partialmethod(turn_with_an_end, root.EventLoop.turn))
    try:
        with FramedSocket(Order, theirs.detach()) as wire:
            one = root.Root(wire)
            one._starter = Awaiting(one)
            ours.close()
            one.run()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)


class Awaiting(HostStarter):
    """A host starter whose agents are on the way."""

    def begin(self) -> None:
        pass

    def awaits(self) -> bool:
        return True


def turn_with_an_end(loop: EventLoop, turn: Callable[..., None], timeout: float | None = None) -> None:
    """A turn that would wait without an end fails."""
    assert timeout is not None or loop._times or select.select(list(loop._watched), [], [], 0)[0]
    turn(loop, timeout)


@pytest.mark.parametrize("pipes", [False, True], ids=["socket", "pipes"])
def test_a_wire_that_has_ended_is_not_waited_for(pipes: bool) -> None:
    """What has not left when the other end went has nobody to read it: the loop does not spin for room."""
    if pipes:
        (inn, their_out), (their_in, out) = os.pipe(), os.pipe()
        theirs = [their_in, their_out]
    else:
        ours, other = socket.socketpair()
        inn, out, theirs = ours.detach(), None, [other.detach()]
    loop = EventLoop()
    with FramedSocket(Order, inn, out) as wire:
        wire.send_message(Modules(bytes(4 << 20)))
        wire.watch_room(loop)
        assert wire.pending
        for fd in theirs:
            os.close(fd)
        assert wire.hear() == []
        assert wire.ended
        wire.watch_room(loop)
        assert not wire.pending
        assert not loop._full


def test_what_is_too_much_for_a_wire_at_once_goes_on_in_the_next_turn() -> None:
    """It does not wait for the next order, or beat."""
    ours, theirs = socket.socketpair()
    before = signal.getsignal(signal.SIGTERM)

    class Slow(Branch):
        def send_order(self, order: object) -> None:
            pass

        def push(self) -> None:
            ours.close()  # the end of the master ends the root

        def close(self) -> None:
            pass

    try:
        with FramedSocket(Order, theirs.detach()) as wire:
            one = root.Root(wire)
            one.add(Slow("a", 1))
            one.loop.later(0, lambda: None)
            one.run()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
