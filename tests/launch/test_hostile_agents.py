"""Agents that are broken or hostile lose their own nodes, for a cause in words. The root and all others go on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from join_kit import Agent, RelayedAgent, agent_hello, jobs
from limits import HANG
from test_launch import STUBS, bundles, collect

import disttensor as dt
from disttensor.runtime.host.launch_spec import LaunchSpec
from disttensor.runtime.host.silence import Silence
from disttensor.runtime.launch import Exited, Started
from disttensor.runtime.launch.output.lines import LONG
from disttensor.runtime.launch.output.printer import Printer
from disttensor.runtime.launch.rendezvous.credentials import Invitation, read_connection_file
from disttensor.runtime.launch.starters.join import JoinLauncher, JoinStarter, _JoinedAgent
from disttensor.runtime.launch.starters.mpi import MpiProcesses, Offer
from disttensor.runtime.launch.tree import framed
from disttensor.runtime.launch.tree.agent_check import LAST
from disttensor.runtime.launch.tree.control import (
    CREDIT,
    AgentHello,
    AgentNews,
    Beat,
    Began,
    Capacity,
    Ended,
    EndSession,
    Flush,
    Flushed,
    Kill,
    LaunchFailed,
    Listening,
    Look,
    Modules,
    NodeOutput,
    Order,
    OutputAck,
    Ready,
    Refuse,
    Seen,
    ServerNews,
    SessionEnded,
    Start,
    Status,
)
from disttensor.runtime.launch.tree.framed import FramedSocket, frame
from disttensor.runtime.launch.tree.root import Root
from disttensor.runtime.launch.tree.spawn import spawn_root, spawn_server

pytestmark = pytest.mark.cold  # stubs import no torch, and some of this is about imports


def framed_bytes(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


#: A frame whose text is no UTF-8.
BAD_TEXT = frame(LaunchFailed("xxxxxxxx")).replace(b"xxxxxxxx", b"\xff\xfe\xfd\xfc" * 2)
#: A frame that is nested too deep for anybody to read.
TOO_DEEP = framed_bytes(b"\x82\xa4type\xa5Knock\xa1z" + b"\x91" * 100_000)


# ---- nodes that are real ---------------------------------------------------------------------------------------------

ATTACKS = {
    "text that is no UTF-8": (BAD_TEXT, "a frame of .* bytes that says nothing: .*(?i:utf-8)"),
    "stream 9": (frame(NodeOutput(2, 9, b"stream nine\n")), "output of node 2 to stream 9; there are 1, 2"),
    "node 0's output": (frame(NodeOutput(0, 1, b"I AM NODE 0\n")), "NodeOutput of node 0, which is not one of its own"),
}


def use_for_ever(tensor: torch.Tensor) -> None:
    while True:
        tensor.sum().item()


def test_other_hosts_nodes_answer_to_the_bit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job"
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(RelayedAgent(path, f"host{k}", k)) for k in range(len(ATTACKS) + 1)]
        stack.enter_context(dt.init_master_worker(init_method=f"file://{path}", nodes=len(agents), timeout=HANG))
        local = torch.arange(1000.0).sin()
        there = [local.to(f"node:{k}") for k in range(len(agents))]
        for k, (data, cause) in enumerate(ATTACKS.values(), 1):
            assert torch.equal(there[k].cos().cpu(), local.cos())
            agents[k].inject(data)
            with pytest.raises(dt.NodeLost, match=rf"^node {k} \(.* is lost: what came was not an agent's: {cause}"):
                use_for_ever(there[k])
            for other in (0, *range(k + 1, len(agents))):
                assert torch.equal(there[other].cos().cpu(), local.cos())
        dt.run(print, "I am node 0", node=0)
    out, err = capfd.readouterr()
    assert "I am node 0" in out
    assert "I AM NODE 0" not in out + err
    assert "Traceback" not in err


# ---- what the root takes from an agent -------------------------------------------------------------------------------


@contextlib.contextmanager
def job(folder: Path) -> Iterator[tuple[JoinLauncher, Invitation]]:
    with jobs() as start:
        launcher = start(f"file://{folder}/job", 99, least=1)
        yield launcher, read_connection_file(folder / "job", HANG)


def ask(launcher: JoinLauncher, agent: Agent, rank: int) -> None:
    """Has the agent be asked for a node, as the only one that has room."""
    [bundle] = bundles("x")
    launcher.start([msgspec.structs.replace(bundle, rank=rank, nodes=1)])
    assert agent.hears(Start).bundle.rank == rank


def begin(launcher: JoinLauncher, agent: Agent, rank: int) -> None:
    ask(launcher, agent, rank)
    agent.wire.send_message(Began(rank, 100 + rank))
    assert [type(event) for event in collect(launcher, 1)] == [Started]


#: What the agent of node 1, which runs as process 101, says wrongly; and the cause of its loss.
WRONG: list[tuple[msgspec.Struct | bytes, str]] = [
    (BAD_TEXT, f"a frame of {len(BAD_TEXT) - 4} bytes that says nothing: "),
    (TOO_DEEP, "recursion"),
    (framed_bytes(b"\xc1"), "a frame of 1 bytes that says nothing"),
    (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes, the limit is"),
    (framed_bytes(msgspec.msgpack.encode({"type": "\x1b[2J\x9bevil" + "x" * 9999})), "Invalid value '\ufffdevilxxx"),
    (Status((0,), "x", "x"), "Invalid value 'Status'"),
    (Capacity(9), "Invalid value 'Capacity'"),
    (Listening(("tcp://1.2.3.4:5",)), "Invalid value 'Listening'"),
    (Kill(0, 9), "Invalid value 'Kill'"),
    (agent_hello("a"), "a second hello"),
    (NodeOutput(0, 1, b"as node 0\n"), "NodeOutput of node 0, which is not one of its own"),
    (NodeOutput(77, 1, b"as nobody\n"), "NodeOutput of node 77, which is not one of its own"),
    (NodeOutput(1, 9, b"x\n"), "output of node 1 to stream 9; there are 1, 2"),
    (NodeOutput(1, 0, b"x\n"), "output of node 1 to stream 0; there are 1, 2"),
    (Began(0, 5), "Began of node 0, which is not one of its own"),
    (Began(1, 101), "node 1 has begun twice"),
    (frame(Ready(1)) * 2, "a fork server that is ready twice"),
    (Ended(0, 100, 0, "said by another host", ()), "Ended of node 0, which is not one of its own"),
    (Ended(1, 102, 0, "x", ()), "the end of process 102, which is not that of node 1"),
    (Ended(1, 101, 1 << 40, "x", ()), "exit code=1099511627776; it is -128 to 255"),
    (SessionEnded(), "the end of a session that was not to end"),
    (frame(Beat()) * 50, "a beat that answers none"),
    (Seen(0, "R"), "Seen of node 0, which is not one of its own"),
    (Seen(1, "R"), "the sight of node 1, which it was not asked for"),
    (Flushed(-5), "an answer to Flush -5, which it was not asked, or has answered"),
]


def test_an_agent_may_answer_each_look(tmp_path: Path) -> None:
    """Two are on their way before the first answer; a third answer is one too many."""
    with job(tmp_path) as (launcher, invitation), Agent(invitation, agent_hello("good")) as good:
        begin(launcher, good, 0)
        launcher.glance(0)
        launcher.look(0)
        assert [good.hears(Look) for _ in range(2)] == [Look(0, False), Look(0, True)]
        good.wire.send_message(Seen(0, "R", stacks=False, cpu=2.0, lived=5.0))
        good.wire.send_message(Seen(0, "S", stack="a stack", last_line="\x1b[2Jepoch\r3"))
        first, second = collect(launcher, 2)
        assert (first.state, first.stacks, first.cpu, first.lived) == ("R", False, 2.0, 5.0)
        assert (second.state, second.stacks, second.stack) == ("S", True, "a stack")
        assert second.last_line == "epoch\ufffd3"
        good.wire.send_message(Seen(0, "R"))
        [event] = collect(launcher, 1)
        assert isinstance(event, Exited)
        assert "the sight of node 0, which it was not asked for" in event.cause


def test_what_no_agent_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with job(tmp_path) as (launcher, invitation), Agent(invitation, agent_hello("good")) as good:
        begin(launcher, good, 0)
        for said, cause in WRONG:
            with Agent(invitation, agent_hello("bad")) as bad:
                begin(launcher, bad, 1)
                os.write(bad.wire.fileno(), said if isinstance(said, bytes) else frame(said))
                bad.wire.send_message(Ended(1, 101, 0, "it was let pass", ()))
                [event] = collect(launcher, 1)
                assert isinstance(event, Exited), said
                assert (event.rank, event.host, event.pid, event.code) == (1, "bad", 101, os.EX_PROTOCOL)
                assert event.cause.startswith("what came was not an agent's: "), said
                assert cause in event.cause, said
                assert len(event.cause) < 400
                assert event.cause.isprintable()
                bad.ended()
                assert bad.hears(Refuse) == Refuse(f"cut off by the root: {event.cause}")
            launcher.kill(0, signal.SIGUSR1)
            assert good.hears(Kill) == Kill(0, signal.SIGUSR1)  # the root lives, and knows this one
        good.wire.send_message(NodeOutput(0, 1, b"node 0 itself\n"))
        good.wire.send_message(Ended(0, 100, 3, "exit code 3", ()))
        assert [event.cause for event in collect(launcher, 1)] == ["exit code 3"]
    out, err = capfd.readouterr()
    assert out == "[node 0] node 0 itself\n"
    assert "Traceback" not in err


@pytest.mark.parametrize("pid", [0, -1, 1 << 40])
def test_a_number_that_no_process_has(pid: int, tmp_path: Path) -> None:
    with job(tmp_path) as (launcher, invitation), Agent(invitation, agent_hello()) as agent:
        ask(launcher, agent, 0)
        agent.wire.send_message(Began(0, pid))
        [event] = collect(launcher, 1)
        assert isinstance(event, Exited)
        assert event.cause == f"what came was not an agent's: pid={pid}; it is 1 to {1 << 22}"


#: What is wrong with a first frame.
FIRST: list[tuple[msgspec.Struct | bytes, str]] = [
    (frame(agent_hello("evilhost")).replace(b"evilhost", b"\xff" * 8), "no UTF-8"),
    (Ready(1), "before its hello"),
    (NodeOutput(0, 1, b"x\n"), "before its hello"),
    (msgspec.structs.replace(agent_hello(), host="x" * 256), "a long name"),
    (msgspec.structs.replace(agent_hello(), host="a\x1b[2Jb"), "an order to a terminal"),
    (msgspec.structs.replace(agent_hello(), version="a\nb"), "two lines"),
    (msgspec.structs.replace(agent_hello(), python="x" * 101), "a long version"),
    (msgspec.structs.replace(agent_hello(), executable="a\x1b[2Jb"), "an order to a terminal"),
    (msgspec.structs.replace(agent_hello(), packages={"torch": "a\nb"}), "two lines"),
    (msgspec.structs.replace(agent_hello(), packages={"x" * 101: "1"}), "a long name"),
    (msgspec.structs.replace(agent_hello(), packages={str(k): "1" for k in range(100)}), "too many packages"),
    (msgspec.structs.replace(agent_hello(), pid=0), "no process"),
    (msgspec.structs.replace(agent_hello(), pid=1 << 40), "no process"),
    (msgspec.structs.replace(agent_hello(), slots=-1), "fewer than none"),
    (msgspec.structs.replace(agent_hello(), slots=1 << 40), "too many nodes"),
    (msgspec.structs.replace(agent_hello(), first_rank=-2), "no rank"),
    (msgspec.structs.replace(agent_hello(), first_rank=1 << 40), "no rank"),
    (msgspec.structs.replace(agent_hello(), local_rank=1 << 40), "no place"),
    (msgspec.structs.replace(agent_hello(), local_size=-1), "no number"),
    (msgspec.structs.replace(agent_hello(), cores=-1), "no number"),
    (msgspec.structs.replace(agent_hello(), gpus=1 << 40), "no number"),
]


def test_first_frames_that_let_nobody_in(tmp_path: Path) -> None:
    with job(tmp_path) as (launcher, invitation), Agent(invitation, agent_hello("good")) as good:
        begin(launcher, good, 0)
        for said, _ in FIRST:
            with Agent(invitation, None) as bad:
                os.write(bad.wire.fileno(), said if isinstance(said, bytes) else frame(said))
                if isinstance(said, Ready | NodeOutput):
                    bad.wire.send_message(agent_hello())
                bad.ended(let_in=False)
        launcher.kill(0, signal.SIGUSR1)
        good.hears(Kill)
        assert launcher.vacant == 0
        with Agent(invitation, agent_hello("b")) as other:  # there is room for those who are agents
            begin(launcher, other, 1)


def test_answers_that_were_asked_for_are_taken_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A second answer to a Flush, or to the end of a session, is nobody's."""
    with job(tmp_path) as (launcher, invitation):
        with Agent(invitation, agent_hello()) as agent:
            begin(launcher, agent, 0)
            launcher._wire.send_message(Flush(7))
            assert agent.hears(Flush) == Flush(7)
            agent.wire.send_message(Flushed(7))
            launcher._await(lambda: launcher._flushed == 7, HANG)
            assert launcher._flushed == 7
            agent.wire.send_message(Flushed(7))
            agent.wire.send_message(Ended(0, 100, 0, "it was let pass", ()))
            [event] = collect(launcher, 1)
            assert "an answer to Flush 7, which it was not asked, or has answered" in event.cause
        with Agent(invitation, agent_hello()) as agent:
            begin(launcher, agent, 0)
            launcher._wire.send_message(EndSession(0))
            agent.hears(EndSession)
            agent.wire.send_message(Ended(0, 100, 0, "exit code 0", ()))
            agent.wire.send_message(SessionEnded())
            launcher._await(lambda: launcher._rested, HANG)
            assert launcher._rested
            agent.wire.send_message(SessionEnded())
            agent.ended()
    cause = "what came was not an agent's: the end of a session that was not to end"
    assert capfd.readouterr().err == f"[a] disttensor: this host is cut off: {cause}\n"  # it has no node


@contextlib.contextmanager
def unread() -> Iterator[tuple[int, int]]:
    """A pipe that nobody reads, and that is full."""
    out, inn = os.pipe()
    os.set_blocking(inn, False)
    try:
        with contextlib.suppress(BlockingIOError):
            while os.write(inn, b"." * 4096):
                pass
        os.set_blocking(inn, True)
        yield out, inn
    finally:
        os.close(out)
        os.close(inn)


def test_an_agent_that_sends_output_without_end_is_cut_off(tmp_path: Path) -> None:
    """Nothing of it can be shown, and so the root would have to keep it. An honest one waits for the root then."""
    kept = os.dup(1)
    with unread() as (_, inn), contextlib.ExitStack() as undo:
        undo.callback(os.close, kept)
        undo.callback(os.dup2, kept, 1)
        os.dup2(inn, 1)
        with job(tmp_path) as (launcher, invitation), Agent(invitation, agent_hello("good")) as good:
            begin(launcher, good, 0)
            with Agent(invitation, agent_hello("bad")) as bad:
                begin(launcher, bad, 1)
                sent, piece = 0, NodeOutput(1, 1, b"x" * (LONG - 1) + b"\n")
                while not bad.wire.ended and sent < 2 * (CREDIT + LAST):
                    bad.wire.send_message(piece)
                    bad.wire.push(HANG)
                    bad.wire.hear()
                    sent += LONG
                [event] = collect(launcher, 1)
                assert isinstance(event, Exited)
                cause = f"more than {CREDIT + LAST} bytes of output before the root has taken any"
                assert event.cause == f"what came was not an agent's: {cause}"
            launcher.kill(0, signal.SIGUSR1)
            assert good.hears(Kill) == Kill(0, signal.SIGUSR1)  # the root lives, and hears the others


def test_output_that_is_shown_lets_an_agent_send_more(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with job(tmp_path) as (launcher, invitation), Agent(invitation, agent_hello()) as agent:
        begin(launcher, agent, 0)
        for text in (b"a" * 999 + b"\n", b"b\n"):
            agent.wire.send_message(NodeOutput(0, 1, text))
            assert agent.hears(OutputAck) == OutputAck(len(text))
    assert capfd.readouterr().out == "[node 0] " + "a" * 999 + "\n[node 0] b\n"


def test_what_a_host_writes_is_counted_while_nothing_can_be_shown() -> None:
    """As ssh's own stderr: who writes it can't be made to wait, for its nodes' lines come by the same connection."""
    with root_here() as (root, _), unread() as (out, inn):
        root._printer = Printer(fds=(inn, inn), environment={})
        for _ in range(100):
            root.remark("far", [b"x" * 999] * 100)
        os.set_blocking(out, False)
        shown = bytearray()
        while root._printer.waiting:
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(out, 1 << 20):
                    shown += piece
            root._printer.push()
        root._make_up()
        root._make_up()  # it is said once
        root.remark("far", [b"the end"])
        root._printer.push()
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(out, 1 << 20):
                shown += piece
        lines = shown.lstrip(b".").decode().splitlines()
        assert len(shown) < 1 << 20
        assert lines[:-2] == ["[far] " + "x" * 999] * len(lines[:-2])
        left = 10_000 - len(lines[:-2])
        assert lines[-2:] == [
            f"[far] disttensor: {left} lines of its own left out here, as nothing could be shown at that time",
            "[far] the end",
        ]


def test_reasons_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    with job(tmp_path) as (launcher, invitation):
        evil = "\x1b]0;title\x07\x1b[2Jx\x9b2J\u202ey\r"
        with Agent(invitation, agent_hello()) as agent:
            begin(launcher, agent, 0)
            agent.wire.send_message(Ended(0, 100, 3, evil + "z" * 100_000, (evil,) * 50))
            [event] = collect(launcher, 1)
            assert event.cause.startswith("x\ufffd2J\ufffdy\ufffdzzz")
            assert len(event.cause) == 4000
            assert event.tail == ("x\ufffd2J\ufffdy\ufffd",) * 20
            begin(launcher, agent, 0)
            agent.wire.send_message(LaunchFailed(f"two\nlines{evil}", (evil,) * 50))
            [event] = collect(launcher, 1)
            assert event.cause == "no node can be started there: two\nlinesx\ufffd2J\ufffdy\ufffd"
            assert event.tail == ("x\ufffd2J\ufffdy\ufffd",) * 20


# ---- the root itself -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def root_here() -> Iterator[tuple[Root, FramedSocket[Any]]]:
    """A root in this process, and its master's end."""
    ours, theirs = socket.socketpair()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with FramedSocket(Order, theirs.detach()) as wire, FramedSocket(Any, ours.detach()) as master:
            yield Root(wire), master
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)


def test_one_that_never_says_hello_is_hung_up_on() -> None:
    with root_here() as (root, _):
        root.spec = LaunchSpec("join", timeout=0)
        with joined(root) as (branch, wire):
            os.write(wire.fileno(), b"\0")  # of a frame that never ends
            root.loop.turn(HANG)
            root.loop.turn(0)
            assert branch.gone == ("its agent has not said hello", os.EX_UNAVAILABLE, ())


@contextlib.contextmanager
def joined(root: Root) -> Iterator[tuple[_JoinedAgent, FramedSocket[Order]]]:
    """A branch that has not said hello, and its agent's end."""
    here, there = socket.socketpair()
    starter = JoinStarter(root)
    starter.agents.append(branch := _JoinedAgent(starter, here))
    with contextlib.closing(branch), FramedSocket(Order, there.detach()) as wire:
        yield branch, wire


def test_what_the_root_itself_gets_wrong_loses_the_one_who_caused_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a defect")

    with root_here() as (root, _), joined(root) as (first, one), joined(root) as (second, two):
        for wire, name in ((one, "a"), (two, "b")):
            wire.send_message(agent_hello(name))
        root.loop.turn(HANG)
        for rank in range(2):
            root._seats.ask(Start(msgspec.structs.replace(bundles("x")[0], rank=rank), ""))
        root._deal()
        with monkeypatch.context() as patch:
            patch.setattr(Printer, "feed", fail)
            [rank] = root._seats.of(first)
            one.send_message(NodeOutput(rank, 1, b"x\n"))
            root.loop.turn(HANG)
        cause = "the root failed at what its agent has sent: KeyError: 'a defect'"
        assert first.gone == (cause, os.EX_SOFTWARE, ())
        assert second.gone is None
        assert root._seats.of(first) == ()
        assert len(root._seats.of(second)) == 1
    err = capfd.readouterr().err
    assert f"disttensor: host a is lost; {cause}" in err
    assert "in fail" in err  # the traceback


def test_an_agent_knows_before_its_first_node_how_long_it_may_hear_nothing() -> None:
    """Each one: what they do by themselves counts from the last word, and the next beat may never come."""
    with root_here() as (root, _), joined(root) as (_, one), joined(root) as (_, two):
        root.spec = LaunchSpec("join", silence=Silence(1, 2, 3))
        for wire, name in ((one, "a"), (two, "b")):
            wire.send_message(agent_hello(name))
        root.loop.turn(HANG)
        for rank in range(2):
            root._seats.ask(Start(msgspec.structs.replace(bundles("x")[0], rank=rank), ""))
        root._deal()
        for wire in (one, two):
            assert select.select([wire], [], [], HANG)[0]
            orders = wire.hear()
            assert [type(order) for order in orders] == [Beat, Start]
            assert orders[0].silence == root.spec.silence


def test_one_who_never_stops_does_not_keep_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = iter([frame(Ready(1)) * 10] * 100)
    ours, theirs = socket.socketpair()
    with FramedSocket(Ready, ours.detach()) as wire, theirs:
        monkeypatch.setattr(framed, "TURN", 1000)
        monkeypatch.setattr(framed.os, "read", lambda *_: next(pieces))
        heard = wire.hear()
    assert heard == [Ready(1)] * len(heard)
    assert len(frame(Ready(1))) * len(heard) < 1500


# ---- the others who hear ---------------------------------------------------------------------------------------------

AGENT = """
import socket, subprocess, sys
from disttensor.runtime.launch.tree import agent
from disttensor.runtime.launch.tree.control import Order
from disttensor.runtime.launch.tree.framed import FramedSocket
from disttensor.runtime.protocol.errors import ProtocolError
below, theirs = socket.socketpair()
agent.spawn_server = lambda *arguments, **more: (theirs, subprocess.Popen(["cat"], stdin=subprocess.PIPE))
up = FramedSocket(Order, int(sys.argv[1]))
it = agent.Agent(up, agent.agent_hello())
if sys.argv[2] == "below":
    below.sendall(bytes.fromhex(sys.argv[3]))
try:
    print("code", it.run())
except ProtocolError as e:
    print("refused", e)
print("ended", it._server.poll() is not None)
"""


def agent_that_hears(side: str, data: bytes) -> tuple[list[object], str]:
    """What an agent has told its root, and printed, when these bytes have come from one side."""
    ours, theirs = socket.socketpair()
    with FramedSocket(AgentNews, ours.detach()) as root, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(theirs.fileno()), side, data.hex()],
            stdout=subprocess.PIPE, pass_fds=[theirs.fileno()], text=True,
        )  # fmt: skip
        theirs.close()
        if side == "above":
            os.write(root.fileno(), data)
        printed = process.communicate(timeout=HANG)[0]
        return list(root.hear()), printed


@pytest.mark.parametrize(
    ("side", "data", "printed"),
    [
        ("below", BAD_TEXT, "code 1\n"),
        ("below", frame(agent_hello("another")), "code 1\n"),  # an agent says that, and not a fork server
        ("above", BAD_TEXT, "refused a frame of 38 bytes that says nothing: "),
        ("above", b"\xff" * 8, "refused a frame of 4294967295 bytes"),
    ],
    ids=["text of below", "a frame of no server's", "text of above", "a long frame of above"],
)
def test_an_agent_that_hears_nonsense_says_so_and_ends(side: str, data: bytes, printed: str) -> None:
    heard, out = agent_that_hears(side, data)
    assert isinstance(heard[0], AgentHello)
    whose = "fork server" if side == "below" else "root"
    assert isinstance(heard[-1], LaunchFailed)
    assert heard[-1].why.startswith(f"what came was not the {whose}'s: a frame of ")
    assert out.startswith(printed)
    assert out.endswith("ended True\n")


@pytest.mark.parametrize(
    "data", [BAD_TEXT, frame(Modules(b"nonsense")), b"\xff" * 8], ids=["text", "modules", "a long frame"]
)
def test_a_fork_server_that_hears_nonsense_says_so_and_ends(data: bytes) -> None:
    sock, process = spawn_server(STUBS)
    with FramedSocket(ServerNews, sock.detach()) as wire:
        os.write(wire.fileno(), data)
        heard: list[object] = []
        while not wire.ended:
            assert select.select([wire], [], [], HANG)[0]
            heard += wire.hear()
        assert process.wait(HANG) == os.EX_PROTOCOL
    assert isinstance(heard[-1], LaunchFailed)
    assert heard[-1].why.startswith("what came was not an order of this version's: ")


def test_a_root_whose_master_says_nonsense_ends_with_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    sock, process = spawn_root(LaunchSpec("nearby"))
    with sock:
        sock.sendall(BAD_TEXT)
        assert process.wait(HANG) == os.EX_PROTOCOL
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("disttensor: the root ends, as what came was not its master's: a frame of 38 bytes that")


def test_an_offer_of_mpi_that_is_none_is_as_none(capsys: pytest.CaptureFixture[str]) -> None:
    """So that its node is missing by its number, and others are not."""
    said = [b'{"public_key":"\xff"}', msgspec.json.encode(Offer("a key")), b"[" * 9]

    class Comm:
        def Iprobe(self, tag: int, status: Any) -> bool:
            status.source = len(said)
            return bool(said)

        def Recv(self, into: list[Any], source: int, tag: int) -> None:
            into[0][:] = said.pop()

    status = SimpleNamespace(source=0, tag=1, Get_count=lambda kind: len(said[-1]))
    processes = MpiProcesses.__new__(MpiProcesses)
    processes.offers = {}
    processes.world = SimpleNamespace(comm=Comm(), mpi=SimpleNamespace(Status=lambda: status, BYTE=None))
    assert processes.gather(range(3), 0.01) == [0, 2]
    assert processes.offers == {1: Offer("a key")}
    lines = [line.partition(":")[2].partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [f" node {k} has said {size} bytes that are no offer" for k, size in ((2, 9), (0, 18))]
