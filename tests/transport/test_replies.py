"""What nodes may say: a reply that no honest node gives fails the node, and nothing else."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec
import pytest
import torch
from aftermath import within
from hostile_workers import BOMB
from msgspec.structs import replace

import disttensor as dt
from disttensor.errors import late_warnings
from disttensor.runtime.master.failures import MAX_FAILURES, MAX_TRACES, Failure, Failures
from disttensor.runtime.master.link import Link
from disttensor.runtime.master.replies import REPEATED
from disttensor.runtime.protocol import codec, side
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import ClosedError, ProtocolError
from disttensor.runtime.protocol.failure_ids import MAX_NAME, MAX_TEXT
from disttensor.runtime.transport.inproc import InprocHub, InprocSpoke


def hello(*devices: str) -> c.Hello:
    told = c.Abilities("AVX2", True, False, False, capabilities=((8, 0),) * (len(devices) - 1))
    return c.Hello(1, "job", 1, "host", "2.13.0", "3", devices, False, c.Addresses(""), told)


HELLO = hello("cpu", "cuda:0")
FAILED = c.Failed(0, "aten::add", "builtins.RuntimeError", "no", "")
HOLDINGS = c.Holdings(1, 24, 100, 200, (c.Held(7, 24, "float32 (2, 3)"),))


@dataclass
class Wire:
    """A link to one node, and the node's end of it."""

    link: Link
    spoke: InprocSpoke

    def say(self, *replies: c.Reply, done: int = 0) -> None:
        self.utter(codec.encode(c.Report(done, replies)))

    def utter(self, message: bytes) -> None:
        """The node says this; when this returns, the link has judged it, and lost the node if need be."""
        with within(1.0, "what comes of a message"):
            self.spoke.send(message)
            self.link.replies.drain()

    def issue(self, commands: int) -> None:
        """Sends the node so many commands, which may fail now."""
        outbox = self.link.nodes[0].outbox
        for _ in range(commands):
            outbox.add(c.Sync(0))
        self.link.sender.flush(outbox)

    def lost(self) -> str:
        return str(self.link.nodes[0].lost or "")


@pytest.fixture
def wire() -> Iterator[Wire]:
    hub = InprocHub(1)
    wire = Wire(Link(hub, 1, None, lambda error: None), hub.spoke(0))
    yield wire
    wire.link.interrupts.restore()
    wire.link.close()
    wire.spoke.close()


def geometry(
    shape: tuple[int, ...] = (2, 3),
    stride: tuple[int, ...] = (3, 1),
    offset: int = 0,
    dtype: int = 0,
    device: str = "cpu",
    bits: int = 0,
) -> c.Geometry:
    return c.Geometry(shape, stride, offset, dtype, device, bits)


#: What is asked for, and what doesn't answer it.
WRONG: dict[str, tuple[type[c.Reply], c.Reply]] = {
    "nothing": (c.Answer, c.Done(1)),
    "value for nothing": (c.Done, c.Answer(1, 2)),
    "value for shapes": (c.Shapes, c.Answer(1, 2)),
    "shapes for a result": (c.Result, c.Shapes(1, ())),
    "negative size": (c.Shapes, c.Shapes(1, (geometry((-2, 3)),))),
    "negative stride": (c.Shapes, c.Shapes(1, (None, geometry(stride=(3, -1))))),
    "unknown bits": (c.Shapes, c.Shapes(1, (geometry(bits=4),))),
    "conjugate of a real one": (c.Shapes, c.Shapes(1, (geometry(bits=1),))),
    "negative offset": (c.Result, c.Result(1, b"", (geometry(offset=-1),))),
    "strides of other rank": (c.Result, c.Result(1, b"", (geometry(stride=(1,)),))),
    "uncountable": (c.Result, c.Result(1, b"", (geometry((1 << 40, 1 << 40), (0, 0)),))),
    "uncountable though empty": (c.Result, c.Result(1, b"", (geometry((1 << 62, 1 << 62, 0), (1, 1, 1)),))),
    "memory beyond count": (c.Result, c.Result(1, b"", (geometry(stride=(1 << 63, 1)),))),
    "stride beyond count": (c.Result, c.Result(1, b"", (geometry((1, 3), stride=(1 << 63, 1)),))),
    "too many dimensions": (c.Result, c.Result(1, b"", (geometry((1,) * 65, (1,) * 65),))),
    "dtype": (c.Shapes, c.Shapes(1, (geometry(dtype=255),))),
    "device": (c.Shapes, c.Shapes(1, (geometry(device="cuda:zz"),))),
    "long device": (c.Shapes, c.Shapes(1, (geometry(device="x" * 100_000),))),
    "negative memory": (c.MemoryUsage, c.MemoryUsage(1, 2, -8)),
    "a negative peak": (c.MemoryFigures, c.MemoryFigures(1, (("peak", -1),), HOLDINGS, True)),
    "a figure whose name is no text for a terminal": (
        c.MemoryFigures,
        c.MemoryFigures(1, (("\033[2J", 1),), HOLDINGS, True),
    ),
    "more figures than there are": (c.MemoryFigures, c.MemoryFigures(1, (("peak", 1),) * 2000, HOLDINGS, True)),
    "less than no memory left": (c.MemoryFigures, c.MemoryFigures(1, (), replace(HOLDINGS, free=-1), True)),
    "tensors without end": (
        c.MemoryFigures,
        c.MemoryFigures(1, (), replace(HOLDINGS, largest=(c.Held(1, 1, ""),) * 2000), True),
    ),
    "a shape that is no text for a terminal": (
        c.Answer,
        replace(FAILED, holdings=replace(HOLDINGS, largest=(c.Held(1, 1, "\n"),))),
    ),
    "negative address": (c.StorageInfo, c.StorageInfo(1, 5, -4096, 8, 0, (1,))),
    "negative stride in a storage": (c.StorageInfo, c.StorageInfo(1, 5, 4096, 8, 0, (2, -1))),
    "empty state": (c.RngState, c.RngState(1, b"")),
    "text for a state": (c.RngState, c.Answer(1, "00ff")),
    "second hello": (c.Done, HELLO),
    "what nobody asked for": (c.Done, c.Done(2)),
    "the end of what nobody asked for": (c.TookPart, c.TookPart((2,))),
    "an end for a value": (c.Answer, c.TookPart((1,))),
    "done for an end": (c.TookPart, c.Done(1)),
    "the failure of what was not sent": (c.Answer, c.Failed(1, "op", "builtins.RuntimeError", "no", "")),
    "a warning of what was not sent": (c.Answer, c.Warned(1, "builtins.UserWarning", "beware")),
    "a warning without a number": (c.Answer, c.Warned(-1, "builtins.UserWarning", "beware")),
    "a failure without a number": (c.Answer, c.Failed(-1, "op", "builtins.RuntimeError", "no", "")),
    "a failure by the loss of no node": (c.Answer, msgspec.structs.replace(FAILED, lost=1)),
    "a failure by its own loss": (c.Answer, msgspec.structs.replace(FAILED, lost=0)),
    "a failure by the loss of the script": (c.Answer, msgspec.structs.replace(FAILED, lost=-2)),
    "the fault of what was not sent": (c.Answer, c.Poisoned(1, 0, 1)),
    "the fault of no node": (c.Answer, c.Poisoned(1, 1, 0)),
    "the fault of the master": (c.Answer, c.Poisoned(1, -1, 0)),
}


@pytest.mark.fault(34, 35)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reply_fails_the_node(name: str, wire: Wire) -> None:
    kind, reply = WRONG[name]
    wire.say(HELLO)
    wire.issue(1)
    request = wire.link.requests.new(0, kind)
    assert request.id == 1
    wire.say(reply)
    with pytest.raises(dt.NodeLost, match="broke the protocol") as e:
        wire.link.waiting.wait(request, 20)
    assert len(str(e.value)) < 4000  # the other nodes are told, in one message


#: What a node tells of a chunk of three items, of which it has told that the second is done.
ITEMS: dict[str, tuple[c.Reply, ...]] = {
    "one that is done twice": (c.Mapped(1, (1,), (b"",), (), 0.1),),
    "one that is done and given back": (c.Mapped(1, (0,), (b"",), (0,), 0.1),),
    "one that there is not": (c.Mapped(1, (), (), (3,), 0.1),),
    "one below none": (c.Mapped(1, (), (), (-1,), 0.1),),
    "results of none": (c.Mapped(1, (), (b"",), (), 0.1),),
    "no time": (c.Mapped(1, (), (), (), float("nan")),),
    "one result, for two": (c.Result(1, b"", ()),),
    "one result, for none": (c.Mapped(1, (0,), (b"",), (2,), 0.1), c.Result(1, b"", ())),
}


@pytest.mark.parametrize("name", ITEMS)
def test_items_that_cannot_be_fail_the_node(name: str, wire: Wire) -> None:
    wire.say(HELLO)
    request = wire.link.requests.new_items(0, 3, lambda: None)
    wire.say(c.Mapped(1, (1,), (b"x",), (), 0.1))
    for reply in ITEMS[name]:
        wire.say(reply)
    with pytest.raises(dt.NodeLost, match="broke the protocol"):
        wire.link.waiting.wait(request, 20)


def test_items_of_what_is_none_fail_the_node(wire: Wire) -> None:
    wire.say(HELLO)
    request = wire.link.requests.new(0, c.Result)
    wire.say(c.Mapped(request.id, (), (), (), 0.1))
    with pytest.raises(dt.NodeLost, match="broke the protocol: a Mapped where Result was asked for"):
        wire.link.waiting.wait(request, 20)


@pytest.mark.fault(34)
def test_pickles_on_the_side_channel_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of a node that is not an answer is dropped; it makes the connection known."""
    monkeypatch.chdir(tmp_path)
    hub, beside = InprocHub(2), InprocHub(2)
    link = Link(hub, 2, None, lambda error: None)
    link.side.hub = beside
    spoke = beside.spoke(1)
    spoke.send(BOMB)
    link.nodes[0].connection.knowing.add(1)
    link.losses.lose(0, "its cable was cut")
    assert side.decode(spoke.recv(1) or b"") == side.Gone(0, "its cable was cut")
    link.close()
    spoke.close()
    assert not list(tmp_path.iterdir())


#: Answers with reasons that no node gives to a question about two channels, and what is said of them.
REASONS: dict[str, tuple[c.Reply, str]] = {
    "too few": (c.Unusable(1, ("no",)), "1 reasons of node 0 where 2 were asked for"),
    "too many": (c.Unusable(1, ("", "", "no")), "3 reasons of node 0 where 2 were asked for"),
    "none": (c.Unusable(1, ()), "0 reasons of node 0 where 2 were asked for"),
    "a flood": (c.Unusable(1, ("", "x" * 100_000)), "4096 printable characters, not 100000"),
    "for the terminal": (c.Unusable(1, ("", "\x1b[2J")), r"4096 printable characters, not 4 as '\\x1b"),
    "for the terminal, of a graph": (c.GraphEngines(1, (("interpreter", "\x1b[2J"),)), "printable characters"),
    "for the terminal, of traffic": (
        c.TrafficCounts(1, (("\x1b[2J", "", 0, (0, 0, 0.0), (0, 0, 0.0)),)),
        "printable characters",
    ),
}


#: Traffic that no data channel has, as (calls, bytes, seconds).
FIGURES = {
    "calls below none": (-1, 0, 0.0),
    "bytes below none": (0, -1, 0.0),
    "seconds below none": (0, 0, -0.5),
    "no number": (0, 0, float("nan")),
    "without an end": (0, 0, float("inf")),
}


@pytest.mark.parametrize("figures", FIGURES.values(), ids=FIGURES)
def test_traffic_that_cannot_be_fails_the_node(figures: c.Figures, wire: Wire) -> None:
    """It would be summed with that of the other nodes."""
    wire.say(HELLO)
    for number, rows in enumerate([((1, 2, 0.5), figures), (figures, (1, 2, 0.5))], 1):
        with pytest.raises(ProtocolError, match=r"seconds, not|are not negative"):
            codec.check_reply(c.TrafficCounts(number, (("tcp", "transfers", 1, *rows),)))
    request = wire.link.requests.new(0, c.TrafficCounts)
    wire.say(c.TrafficCounts(request.id, (("tcp", "transfers", 1, (1, 2, 0.5), figures),)))
    with pytest.raises(dt.NodeLost, match="broke the protocol"):
        wire.link.waiting.wait(request, 20)


@pytest.mark.parametrize("name", REASONS)
def test_a_wrong_reason_fails_the_node(name: str, wire: Wire) -> None:
    reply, what = REASONS[name]
    wire.say(HELLO)
    request = wire.link.requests.new(0, type(reply), 2)
    wire.say(reply)
    with pytest.raises(dt.NodeLost, match=f"broke the protocol: .*{what}"):
        wire.link.waiting.wait(request, 20)


def test_reasons_of_honest_nodes_are_taken(wire: Wire) -> None:
    """Whatever an exception on them says."""
    wire.say(HELLO)
    said = [codec.one_line(text) for text in ("", "fine \t\n\ngr\u00fcn", "\x1b[2J\ud800", "x " * 100_000)]
    assert said[:3] == ["", "fine gr\u00fcn", "?[2J?"]
    request = wire.link.requests.new(0, c.Unusable, len(said))
    wire.say(c.Unusable(request.id, tuple(said)))
    assert wire.link.waiting.wait(request, 20) == c.Unusable(request.id, tuple(said))


def told(torch: str = "2.13.0", cpu: str = "AVX2", **abilities: Any) -> c.Hello:
    """A Hello of a node with one CUDA device and these abilities."""
    few = {"onednn": True, "bfloat16": False, "float16": False, "capabilities": ((8, 0),)}
    return msgspec.structs.replace(HELLO, torch=torch, abilities=c.Abilities(cpu, **{**few, **abilities}))


#: Abilities that no node has.
UNABLE = {
    "no version": told(torch="new"),
    "a long version": told(torch="2.13." + "0" * 200),
    "no cpu": told(cpu=""),
    "a long cpu": told(cpu="A" * 100_000),
    "a cpu in control characters": told(cpu="AVX2\n"),
    "too few capabilities": told(capabilities=()),
    "too many capabilities": told(capabilities=((8, 0),) * 100_000),
    "a negative capability": told(capabilities=((-8, 0),)),
    "a huge capability": told(capabilities=((8, 1 << 60),)),
    "a negative cudnn": told(cudnn=-1),
    "a huge cuda": told(cuda=(1 << 60, 0)),
    "a dtype of no library": told(onednn=False, bfloat16=True),
}


#: Hellos that no node says, and what would come of them.
STRANGE = {
    "a job's worth of devices": hello("cpu", *(f"cuda:{i}" for i in range(60_000))),
    "a long host": msgspec.structs.replace(HELLO, host="h" * 900_000),
    "a host that plays with the terminal": msgspec.structs.replace(HELLO, host="host\x1b[2J"),
    "a host of two lines": msgspec.structs.replace(HELLO, host="host\n[node 0] all is well"),
    "a host that is written backwards": msgspec.structs.replace(HELLO, host="host\u202e"),
    "a long python": msgspec.structs.replace(HELLO, python="3" * 900_000),
    "a long job": msgspec.structs.replace(HELLO, job="j" * 900_000),
    "a long reason": msgspec.structs.replace(HELLO, no_cipher="x" * 900_000),
    "a reason that plays with the terminal": msgspec.structs.replace(HELLO, no_cipher="no\x1b[2J"),
    "a negative pid": msgspec.structs.replace(HELLO, pid=-1),
    "a huge pid": msgspec.structs.replace(HELLO, pid=1 << 40),
    "many gpus": msgspec.structs.replace(HELLO, gpus=("gpu",) * 60_000),
    "a PCIe root that plays with the terminal": msgspec.structs.replace(HELLO, pcie_root="pci\x1b[2J"),
    "a NUMA node that no host has": msgspec.structs.replace(HELLO, numa=1 << 40),
    "memory of devices that it has not": msgspec.structs.replace(HELLO, memory=(1 << 30,) * 60_000),
    "less memory than none": msgspec.structs.replace(HELLO, memory=(-1,) * len(HELLO.devices)),
    "a gpu with a long name": msgspec.structs.replace(HELLO, gpus=("g" * 900_000,)),
    "a long address": msgspec.structs.replace(HELLO, addresses=c.Addresses("10.0.0.1:1," * 20_000)),
    "a long address for collectives": msgspec.structs.replace(HELLO, addresses=c.Addresses("", "1" * 5000)),
    "an address that plays with the terminal": msgspec.structs.replace(HELLO, addresses=c.Addresses("\x1b[2J:1")),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_hello_fails_the_node(name: str, wire: Wire) -> None:
    """It would be printed in every error, or have each peer open a socket for each address."""
    wire.say(STRANGE[name])
    assert "broke the protocol" in wire.lost()
    assert len(wire.lost()) < 1000
    assert "\n[node 0]" not in wire.lost()
    assert "\x1b" not in wire.lost()
    assert wire.link.nodes[0].said_hello is None


def test_addresses_of_a_further_channel_are_looked_at(wire: Wire) -> None:
    wire.say(HELLO)
    request = wire.link.requests.new(0, c.Opened)
    wire.say(c.Opened(request.id, c.Addresses("10.0.0.1:1," * 20_000)))
    assert "broke the protocol: an address of a data channel is at most 4096" in wire.lost()


@pytest.mark.parametrize("name", UNABLE)
def test_abilities_that_no_node_has_fail_it(name: str, wire: Wire) -> None:
    wire.say(UNABLE[name])
    lost = str(wire.link.nodes[0].outbox.lost)
    assert "broke the protocol" in lost
    assert len(lost) < 4000
    assert all(node.said_hello is None for node in wire.link.nodes)


def test_abilities_of_another_form_fail_a_node(wire: Wire) -> None:
    """Not what a struct of ours encodes to, but what a peer may send."""
    rest = msgspec.to_builtins(HELLO)
    assert codec.decode_report(msgspec.msgpack.encode([2, 0, [rest]])).replies == (HELLO,)
    for wrong in (None, [], ["AVX2"], ["AVX2", 1, False, False], ["AVX2", True, False, False, 0, [0], False, []]):
        hello = [*rest[:10], wrong, []]
        with pytest.raises(ProtocolError):
            codec.decode_report(msgspec.msgpack.encode([2, 0, [hello]]))


@pytest.mark.parametrize(
    "reply",
    [FAILED, c.Answer(1, 2), hello(), hello("cuda:0"), hello("cpu", "cuda:zz"), hello("cpu", "cuda:1")],
    ids=["failure", "answer", "no device", "no cpu", "no such device", "a gap"],
)
def test_a_wrong_first_word_fails_the_node(reply: c.Reply, wire: Wire) -> None:
    wire.say(reply)
    assert "broke the protocol" in str(wire.link.nodes[0].outbox.lost)
    assert all(node.said_hello is None for node in wire.link.nodes)


@pytest.mark.fault(35)
@pytest.mark.parametrize("done", [-1, 1, 1 << 40])
def test_a_node_cannot_have_done_what_it_was_not_sent(done: int, wire: Wire) -> None:
    """Its window would open, and lines of what may still fail would be forgotten."""
    wire.say(HELLO)
    wire.say(done=done)
    assert f"broke the protocol: node 0 reports {done} of 0 commands" in str(wire.link.nodes[0].outbox.lost)
    assert wire.link.nodes[0].outbox.done == 0


@pytest.mark.fault(37)
def test_a_node_cannot_answer_for_another() -> None:
    hub = InprocHub(2)
    link = Link(hub, 2, None, lambda error: None)
    spokes = [hub.spoke(rank) for rank in range(2)]
    for spoke in spokes:
        spoke.send(codec.encode(c.Report(0, (HELLO,))))
    link.replies.drain()
    request = link.requests.new(0, c.Answer)
    with within(1.0):
        for rank, value in ((1, "false"), (0, "true")):
            spokes[rank].send(codec.encode(c.Report(0, (c.Answer(request.id, value),))))
        assert link.waiting.wait(request, 20) == c.Answer(request.id, "true")
    assert "broke the protocol: node 1 answers a request to node 0" in str(link.nodes[1].outbox.lost)
    link.close()
    for spoke in spokes:
        spoke.close()


class Ends:
    """A launcher that notes whom it was to end."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.told = threading.Event()
        self._news, self._never = os.pipe()

    def fileno(self) -> int:
        return self._news

    def events(self) -> list[object]:
        return []

    def end_worker(self, rank: int) -> None:
        self.ended.append(rank)
        self.told.set()

    def close(self) -> None:
        os.close(self._news)
        os.close(self._never)


def test_a_lost_node_is_ended_and_the_others_are_told() -> None:
    """They may wait for its tensors; and it may only be cut off, and go on."""
    hub, launcher = InprocHub(3), Ends()
    link = Link(hub, 3, cast(Any, launcher), lambda error: None)
    spokes = [hub.spoke(rank) for rank in range(3)]
    for spoke in spokes:
        spoke.send(codec.encode(c.Report(0, (HELLO,))))
    link.replies.drain()
    link.nodes[1].connection.knowing.update((0, 2))
    link.losses.lose(1, "its cable was cut")
    link.sender.flush_all()
    told = [spokes[rank].recv(1) for rank in (0, 2)]
    assert [codec.decode_batch(message or b"").commands for message in told] == [(c.Lost(1, "its cable was cut"),)] * 2
    assert launcher.told.wait(20)  # by the thread that flushes, with no lock held
    assert launcher.ended == [1]
    link.close()
    for spoke in spokes:
        spoke.close()
    launcher.close()


def test_what_a_failed_node_still_says_is_dropped(wire: Wire) -> None:
    wire.say(HELLO)
    wire.issue(1)
    for reply in (HELLO, FAILED):
        wire.spoke.send(codec.encode(c.Report(0, (reply,))))
    wire.link.replies.drain()
    assert "a second hello" in wire.lost()
    assert not wire.link.failures
    with pytest.raises(ClosedError):  # its connection is cut: it can't go on without end
        wire.spoke.send(b"")


def test_a_report_that_says_nothing_fails_the_node(wire: Wire) -> None:
    """One after the other they would keep the master busy for good."""
    wire.say(HELLO)
    wire.issue(2)
    for done in (1, 2):  # these say something
        wire.say(done=done)
        assert wire.lost() == ""
    wire.say(done=2)
    assert "broke the protocol: a report that says nothing" in wire.lost()


def test_an_answer_that_nobody_waits_for_any_more_is_passed_over_once(wire: Wire) -> None:
    wire.say(HELLO)
    request, other = wire.link.requests.new(0, c.Answer), wire.link.requests.new(0, c.Answer)
    with pytest.raises(TimeoutError):
        wire.link.waiting.wait(request, 0.001)
    wire.link.requests.withdraw(request)
    wire.link.requests.withdraw(other)
    wire.say(c.Answer(request.id, 1))
    wire.say(c.Answer(other.id, 2))
    assert wire.lost() == ""
    wire.say(c.Answer(request.id, 1))
    assert f"broke the protocol: Answer {request.id}, which nobody has asked for" in wire.lost()


def test_a_flood_of_warnings_is_bounded(wire: Wire) -> None:
    site = (test_a_failure_is_told_once.__code__, 0)
    wire.link.failures.on_warning = lambda told, rank, _: late_warnings.keep_warning(told, rank, site)
    wire.say(HELLO)
    wire.issue(1)
    try:
        for _ in range(12):
            wire.say(*[c.Warned(0, "builtins.RuntimeWarning", "w" * 9_000)] * 100)
        wire.say(c.Warned(0, "os.system", "rm"), c.Warned(0, "builtins.OSError", "no"))
        waiting = list(late_warnings.pending)
        late_warnings.pending.clear()
        late_warnings.pending.extend(waiting[-2:])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            late_warnings.show_warnings(everything=True)
    finally:
        late_warnings.pending.clear()
    assert not wire.lost()
    assert len(waiting) == 1_000
    assert all((each.category, len(each.text)) == ("builtins.RuntimeWarning", 4_096) for each in waiting[:-2])
    assert [(each.category, str(each.message)) for each in found] == [
        (UserWarning, "os.system: rm"),
        (UserWarning, "builtins.OSError: no"),
    ]


class LikeCffis:
    """Says that it is a module, as what cffi puts in ``sys.modules`` for cryptography does, and has no names."""

    __slots__ = ()
    __class__ = ModuleType  # type: ignore[assignment]


def test_a_late_warning_finds_its_module_among_others_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {"like_cffis": LikeCffis(), **sys.modules})
    site = (test_a_failure_is_told_once.__code__, 0)
    try:
        late_warnings.keep_warning(c.Warned(0, "builtins.RuntimeWarning", "of a node"), 0, site)
        with pytest.warns(RuntimeWarning, match="of a node"):
            late_warnings.show_warnings(everything=True)
    finally:
        late_warnings.pending.clear()


def test_a_failure_is_told_once(wire: Wire) -> None:
    wire.say(HELLO)
    wire.issue(1)
    for _ in range(REPEATED + 1):
        wire.say(FAILED)
    assert (wire.lost(), len(wire.link.failures)) == ("", 1)
    wire.say(FAILED)
    assert "broke the protocol: 257 failures that it has told before" in wire.lost()


@pytest.mark.fault(35)
def test_right_replies_are_taken(wire: Wire) -> None:
    tensors = [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(3, 4).t()[1:],
        torch.zeros(1).expand(1 << 50),
        torch.zeros(1, dtype=torch.bool).as_strided((1, 1), (7, 9)),
        torch.zeros(2, 3, 4, 5, dtype=torch.complex128).to(memory_format=torch.channels_last),
        torch.empty(2, 3, device="meta"),
        torch.zeros((1,) * 64),
    ]
    told = tuple(
        c.Geometry(tuple(t.shape), t.stride(), int(t.storage_offset()), codec.dtype_id(t.dtype), str(t.device))
        for t in tensors
    )
    replies = [c.Result(1, b"", told), c.Shapes(2, (None, *told)), c.Poisoned(3, 0, 0), c.Answer(4, None), c.Done(5)]
    wire.say(HELLO)
    wire.issue(1)
    requests = [wire.link.requests.new(0, kind) for kind in (c.Result, c.Shapes, c.Answer, c.Answer, c.Done)]
    wire.say(*replies)
    assert [wire.link.waiting.wait(request, 20) for request in requests] == replies


# ---- failures --------------------------------------------------------------------------------------------------------


def failure(seq: int, observed: bool = False) -> Failure:
    return Failure(0, "host", 1, c.Failed(seq, "op", "kind", "message", "trace"), None, observed)


def test_failures_are_bounded() -> None:
    kept = Failures()
    for seq in range(3 * MAX_FAILURES):
        kept.keep(failure(seq))
        assert len(kept) <= MAX_FAILURES
    assert next(iter(kept)) == (0, 0)  # the earliest stays
    assert (0, 3 * MAX_FAILURES - 1) in kept
    assert sum(bool(f.told.traceback) for f in kept.values()) == MAX_TRACES


def test_an_error_after_many_that_were_raised_is_whole() -> None:
    kept = Failures()
    for seq in range(2 * MAX_TRACES):
        kept.keep(failure(seq))
        assert "trace" in kept[0, seq].exception().__notes__[-1]
    assert sum(bool(f.told.traceback) for f in kept.values()) == MAX_TRACES


def test_observed_failures_go_first() -> None:
    kept = Failures()
    for seq in range(MAX_FAILURES + 1):
        kept.keep(failure(seq, observed=seq % 3 > 0))
    assert all((0, seq) in kept for seq in range(0, MAX_FAILURES + 1, 3))
    assert (0, 1) not in kept
    assert (0, MAX_FAILURES - 2) in kept  # observed, and young


def test_what_a_node_tells_is_cut(wire: Wire) -> None:
    wire.say(HELLO)
    wire.issue(MAX_TRACES + 1)
    for seq in range(MAX_TRACES + 1):
        wire.say(c.Failed(seq, "o" * 99_000, "k" * 99_000, "m" * 99_000, "t" * 99_000))
    for seq, most in ((0, MAX_TEXT), (MAX_TRACES, MAX_NAME)):
        told = wire.link.failures[0, seq].told
        assert (len(told.op), len(told.kind), len(told.message)) == (MAX_NAME, MAX_NAME, most)
    assert told.traceback == ""
