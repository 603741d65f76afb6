"""What observers are told of a session with real nodes: each event of both ends, with all of its fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from thread_nodes import thread_nodes

import disttensor as dt
from disttensor.runtime.process.observing import (
    BatchApplied,
    CollectiveDone,
    CommandBegun,
    CommandDone,
    CommandIssued,
    FunctionDone,
    GraphReplayed,
    MessageBegun,
    MessageSent,
    NodeSeam,
    Point,
    ScriptSeam,
    Seam,
    TransferDone,
)
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.session import current


@dataclass
class World:
    """A session of two nodes, whose seams can be reached, and tensors there."""

    seams: list[NodeSeam]
    x: torch.Tensor
    y: torch.Tensor
    z: torch.Tensor  #: on a mesh
    messages: list[MessageSent] = field(default_factory=list)

    @property
    def script(self) -> ScriptSeam:
        return current.session().link.seam

    def numbers(self, node: int, kind: type[c.Command]) -> list[int]:
        """The numbers of the commands of a kind that a node has been sent, on whichever stream."""
        found = []
        for each in self.messages:
            for number, command in enumerate(codec.decode_batch(each.message).commands, each.number):
                inner = command.command if isinstance(command, c.On) else command
                if each.node == node and isinstance(inner, kind):
                    found.append(number)
        return found


@pytest.fixture(scope="module")
def session() -> Iterator[World]:
    with thread_nodes(2) as made:
        x, y = torch.ones(4, device="node:0"), torch.ones(4, device="node:1")
        z = torch.ones(4, device=dt.mesh(dp=2).device)
        world = World([worker.seam for worker in made], x, y, z)
        for act in (multiply, on_a_stream, spread, reduce, called, fetched, given, replayed):
            act(world)  # the first of each is another: templates are made, a signature is tried
        yield world


# ---- what is done ----------------------------------------------------------------------------------------------------


def multiply(world: World) -> None:
    world.x.mul_(1)


def on_a_stream(world: World) -> None:
    stream = dt.Stream(0)
    with dt.stream(stream):
        world.x.mul_(1)
    stream.synchronize()


def spread(world: World) -> None:
    world.z.mul_(1)


def reduce(world: World) -> None:
    dt.all_reduce([world.x, world.y], "max")


def answer() -> int:
    return 7


def fall() -> None:
    raise ValueError("it fell")


def called(world: World) -> None:
    assert dt.run(answer, node=0) == 7


def fallen(world: World) -> None:
    with pytest.raises(ValueError, match="it fell"):
        dt.run(fall, node=0)


def fetched(world: World) -> None:
    assert torch.equal(torch.ones(GIVEN // 4, device="node:0").cpu(), torch.ones(GIVEN // 4))


def given(world: World) -> None:
    torch.ones(GIVEN // 4).to("node:0")


def replayed(world: World) -> None:
    g = dt.Graph()
    with dt.graph(g):
        world.x.mul_(1)
    g.replay()


# ---- what is told ----------------------------------------------------------------------------------------------------


def issued(world: World, event: CommandIssued) -> dict[str, Any]:
    assert event.site is not None
    assert (event.site[0].co_filename, event.site[0].co_name) == (__file__, "multiply")
    return {"nodes": (0,), "stream": "", "command": c.Call, "site": event.site}


def issued_on_a_stream(world: World, event: CommandIssued) -> dict[str, Any]:
    assert event.site is not None
    assert event.site[0].co_name == "on_a_stream"
    assert int(event.stream) > 0
    return {"nodes": (0,), "stream": event.stream, "command": c.Call, "site": event.site}


def issued_to_a_mesh(world: World, event: CommandIssued) -> dict[str, Any]:
    return {"nodes": (0, 1), "stream": "", "command": c.Call, "site": event.site}


def issued_by_a_replay(world: World, event: CommandIssued) -> dict[str, Any]:
    assert event.site is not None
    assert event.site[0].co_name == "replayed"
    return {"nodes": (0,), "stream": "", "command": c.Replay, "site": event.site}


def begun(world: World, event: CommandBegun) -> dict[str, Any]:
    (number,) = world.numbers(0, c.Call)
    return {"node": 0, "stream": "", "number": number, "what": "aten::mul_.Tensor", "command": c.Call}


def begun_on_a_stream(world: World, event: CommandBegun) -> dict[str, Any]:
    (number,) = world.numbers(0, c.Call)
    assert int(event.stream) > 0
    return {"node": 0, "stream": event.stream, "number": number, "what": "aten::mul_.Tensor", "command": type(None)}


def applied(world: World, event: BatchApplied) -> dict[str, Any]:
    (message,) = [each for each in world.messages if each.number == event.number and each.node == 0]
    return {"node": 0, "number": event.number, "commands": len(message.sites), "bytes": len(message.message)}


def timed(world: World, event: MessageBegun) -> dict[str, Any]:
    (message,) = [each for each in world.messages if each.number == event.number and each.node == 0]
    assert len(event.moments) == len(message.sites) + 1
    assert [*event.moments] == sorted(event.moments)
    return {"node": 0, "number": event.number, "commands": len(message.sites), "moments": event.moments}


def collective(world: World, event: CollectiveDone) -> dict[str, Any]:
    (number,) = world.numbers(1, c.Collective)
    return {
        "node": 1, "stream": "", "number": number, "what": "all_reduce", "algorithm": "", "ranks": (0, 1), "bytes": 32,
        "failed": False,
    }  # fmt: skip


def function(world: World, event: FunctionDone) -> dict[str, Any]:
    (number,) = world.numbers(0, c.Run)
    what, request = "fall()" if event.failed else "answer()", event.request
    assert request > 0
    return {"node": 0, "stream": "", "number": number, "what": what, "request": request, "failed": event.failed}


def graph(world: World, event: GraphReplayed) -> dict[str, Any]:
    (number,) = world.numbers(0, c.Replay)
    return {"node": 0, "stream": "", "number": number, "graph": event.graph, "steps": 1, "failed": False}


#: Bytes of a copy, more than travel with commands and replies.
GIVEN = 80_000


def transfer(
    sent: bool, node: int, peer: int, use: str = "transfers", nbytes: int = 16
) -> Callable[[World, TransferDone], Any]:
    def expected(world: World, event: TransferDone) -> dict[str, Any]:
        assert event.transfer > 0
        return {
            "node": node, "peer": peer, "sent": sent, "transfer": event.transfer, "bytes": nbytes,
            "channel": "inproc", "use": use,
        }  # fmt: skip

    return expected


SCRIPT = -1
#: An action, the end whose observers are told, the name of the point, the event, and its fields except the times.
EVENTS: dict[str, tuple[Callable[[World], None], int, str, type[tuple[Any, ...]], Callable[[World, Any], Any]]] = {
    "issued": (multiply, SCRIPT, "issued", CommandIssued, issued),
    "issued on a stream": (on_a_stream, SCRIPT, "issued", CommandIssued, issued_on_a_stream),
    "issued to a mesh": (spread, SCRIPT, "issued", CommandIssued, issued_to_a_mesh),
    "issued by a replay": (replayed, SCRIPT, "issued", CommandIssued, issued_by_a_replay),
    "begun": (multiply, 0, "commands", CommandBegun, begun),
    "done": (multiply, 0, "commands", CommandDone, begun),
    "begun on a stream": (on_a_stream, 0, "commands", CommandBegun, begun_on_a_stream),
    "done on a stream": (on_a_stream, 0, "commands", CommandDone, begun_on_a_stream),
    "applied": (multiply, 0, "applied", BatchApplied, applied),
    "timed": (multiply, 0, "timed", MessageBegun, timed),
    "begun on a stream, for a timeline": (on_a_stream, 0, "timed", CommandBegun, begun_on_a_stream),
    "done on a stream, for a timeline": (on_a_stream, 0, "timed", CommandDone, begun_on_a_stream),
    "collective": (reduce, 1, "collective", CollectiveDone, collective),
    "function": (called, 0, "function", FunctionDone, function),
    "function that failed": (fallen, 0, "function", FunctionDone, function),
    "graph": (replayed, 0, "graph", GraphReplayed, graph),
    "received by the script": (fetched, SCRIPT, "transferred", TransferDone, transfer(False, -1, 0, nbytes=GIVEN)),
    "sent by the script": (given, SCRIPT, "transferred", TransferDone, transfer(True, -1, 0, nbytes=GIVEN)),
    "sent by a node": (fetched, 0, "transferred", TransferDone, transfer(True, 0, -1, nbytes=GIVEN)),
    "received by a node": (given, 0, "transferred", TransferDone, transfer(False, 0, -1, nbytes=GIVEN)),
    "sent in a collective": (reduce, 0, "transferred", TransferDone, transfer(True, 0, 1, "collectives")),
}
#: Events of what an action does besides.
BESIDES = {
    "issued": lambda event: type(event.command) is c.Call,
    "issued to a mesh": lambda event: type(event.command) is c.Call,
    "issued by a replay": lambda event: type(event.command) is c.Replay,
    "begun": lambda event: event.what.startswith("aten::mul"),
    "done": lambda event: event.what.startswith("aten::mul"),
    "begun on a stream": lambda event: event.what.startswith("aten::mul") and event.stream,
    "done on a stream": lambda event: event.what.startswith("aten::mul") and event.stream,
    "begun on a stream, for a timeline": lambda event: event.what.startswith("aten::mul"),
    "done on a stream, for a timeline": lambda event: event.what.startswith("aten::mul"),
    "issued on a stream": lambda event: type(event.command) is c.Call,
    "sent in a collective": lambda event: event.use == "collectives" and event.sent and event.peer == 1,
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event(session: World, name: str) -> None:
    action, end, at, kind, expected = EVENTS[name]
    seam: Seam = session.script if end == SCRIPT else session.seams[end]
    point: Point[Any] = seam.points()[at]
    seen = list[Any]()
    dt.synchronize()
    session.messages.clear()
    before = time.monotonic()
    with session.script.sent.heard_by(session.messages.append), point.heard_by(seen.append):
        action(session)
        dt.synchronize()
    after, told = time.monotonic(), len(seen)
    action(session)
    dt.synchronize()
    assert len(seen) == told
    wanted = BESIDES.get(name, lambda event: True)
    found = [each for each in seen if type(each) is kind and wanted(each)]
    event = found[0]
    fields = event._asdict()
    moments = [before, *(fields.pop(moment) for moment in ("began", "at") if moment in fields), after]
    assert moments == sorted(moments)
    if "command" in fields:
        fields["command"] = type(event.command)
    assert fields == expected(session, event)
    assert name in ("applied", "timed") or len(found) == 1, found


def test_what_is_issued_is_told_of_in_its_order(session: World) -> None:
    """To nodes and meshes in turn; a recording issues nothing."""
    seen, x, link = list[CommandIssued](), session.x, current.session().link
    with link.seam.issued.heard_by(seen.append):
        z = torch.zeros(4, device=dt.mesh(other=2).device)
        x.mul_(1)
        z.add_(1)
        g = dt.Graph()
        with dt.graph(g):
            x.add_(0)
        x.mul_(2)
    x.mul_(1)
    calls = [each for each in seen if isinstance(each.command, c.Call)]
    assert [each.nodes for each in calls][-3:] == [(0,), (0, 1), (0,)]
    assert all(type(queue.commands) is list for queue in link.queues)
