"""The traits of each kind of command: its order, whether a graph can hold it, which tensors it reads and makes, what
answers it.

One row per command. Streams, graphs, early receives, poison, the history of what was sent and the log of messages go by
these rows; tests/unit/test_traits.py holds them against the commands that exist. Rows of replies: replies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import commands as c


class Operator(Protocol):
    """The template of a Call, as rows see it: the refs that the Call reads, writes and makes."""

    def operands(self, out: int, args: tuple[c.Plain, ...]) -> Sequence[int]: ...

    def written(self, out: int, args: tuple[c.Plain, ...]) -> Sequence[int]: ...

    def results(self, out: int, args: tuple[c.Plain, ...]) -> Sequence[int]: ...


#: ``refs(command, operator)``. ``operator``: the template of the Call, or of the Call in an Ask; else not used.
Refs = Callable[[Any, Any], Sequence[int]]


def _none(command: Any, operator: Any) -> Sequence[int]:
    return ()


@dataclass(frozen=True)
class Traits:
    """The traits of one kind of command: a row of ``TRAITS``."""

    #: may be done on a stream (On), in its order; the other commands concern the node as a whole
    on_stream: bool = False
    #: follows the issuing thread's route: to its stream, into its recording
    routed: bool = False
    #: a graph can hold it. What is not routed is given to recorders by hand
    recordable: bool = False
    #: has a new ``transfer`` in each replay
    renumbered: bool = False
    #: a Recv that follows it may begin before it is applied
    overtaken: bool = False
    #: needs nothing but its operands, whichever thread does it (NodeState.effect)
    anywhere: bool = False
    #: only serves another command, which is issued at the same line: it is not what the line is about
    serves: bool = False
    #: the replies that answer it, if it is done: one of these, and Poisoned if it fails. Empty: nobody waits for one
    answers: tuple[type[c.Reply], ...] = ()
    #: refs of tensors that the command reads, or writes in place
    reads: Refs = _none
    #: refs of tensors that the command writes in place
    writes: Refs = _none
    #: refs that the command makes
    makes: Refs = _none


_CALL = Traits(
    on_stream=True,
    routed=True,
    recordable=True,
    overtaken=True,
    reads=lambda call, operator: operator.operands(call.out, call.args),
    writes=lambda call, operator: operator.written(call.out, call.args),
    makes=lambda call, operator: operator.results(call.out, call.args),
)

TRAITS: dict[type[c.Command], Traits] = {
    c.Call: _CALL,
    c.First: _CALL,
    c.Define: Traits(overtaken=True, serves=True),
    c.Forget: Traits(overtaken=True),
    c.Free: Traits(overtaken=True),
    c.Ask: Traits(
        on_stream=True,
        routed=True,
        overtaken=True,
        answers=(c.Answer, c.Shapes),
        reads=lambda ask, operator: operator.operands(ask.call.out, ask.call.args),
        writes=lambda ask, operator: operator.written(ask.call.out, ask.call.args),
        makes=lambda ask, operator: operator.results(ask.call.out, ask.call.args),
    ),
    c.Send: Traits(
        on_stream=True,
        routed=True,
        recordable=True,
        renumbered=True,
        overtaken=True,
        reads=lambda send, _: (send.ref,),
    ),
    c.Recv: Traits(on_stream=True, routed=True, recordable=True, renumbered=True, makes=lambda recv, _: (recv.out,)),
    c.Upload: Traits(
        on_stream=True, routed=True, overtaken=True, anywhere=True, makes=lambda upload, _: (upload.out,)
    ),  # a graph has it as a constant, sent when it is recorded
    c.Download: Traits(
        on_stream=True,
        routed=True,
        overtaken=True,
        anywhere=True,
        answers=(c.Downloaded,),
        reads=lambda download, _: (download.ref,),
    ),
    c.Piece: Traits(overtaken=True, serves=True),
    c.Run: Traits(
        on_stream=True,
        routed=True,
        overtaken=True,
        answers=(c.Result,),
        reads=lambda run, _: run.refs,
        makes=lambda run, _: (*run.outs, run.token) if run.token else run.outs,
    ),
    c.Adopt: Traits(overtaken=True, serves=True, makes=lambda adopt, _: tuple(filter(None, adopt.refs))),
    c.Seed: Traits(on_stream=True, routed=True, recordable=True, anywhere=True),
    c.Swap: Traits(on_stream=True, routed=True, recordable=True, anywhere=True),
    c.Random: Traits(on_stream=True, routed=True, anywhere=True, answers=(c.RngState, c.Done)),
    c.Keep: Traits(
        on_stream=True,
        routed=True,
        recordable=True,
        anywhere=True,
        reads=lambda keep, _: (keep.ref,) if keep.restore else (),
        makes=lambda keep, _: () if keep.restore else (keep.ref,),
    ),
    c.Sync: Traits(overtaken=True, answers=(c.Done,)),
    c.Memory: Traits(overtaken=True, answers=(c.MemoryUsage,)),
    c.MemoryStats: Traits(overtaken=True, answers=(c.MemoryFigures,)),
    c.Storage: Traits(
        on_stream=True,
        routed=True,
        overtaken=True,
        anywhere=True,
        answers=(c.StorageInfo,),
        reads=lambda storage, _: (storage.ref,),
    ),
    c.Digest: Traits(
        on_stream=True,
        routed=True,
        overtaken=True,
        anywhere=True,
        answers=(c.Digested,),
        reads=lambda digest, _: (digest.ref,),
    ),
    c.Count: Traits(answers=(c.TrafficCounts,)),
    c.Open: Traits(answers=(c.Opened,)),
    c.Usable: Traits(answers=(c.Unusable,)),
    c.Peer: Traits(),
    c.Lost: Traits(),
    c.Again: Traits(),
    c.Default: Traits(),
    c.Switch: Traits(recordable=True),
    c.MakeStream: Traits(),
    c.Record: Traits(on_stream=True),
    c.Wait: Traits(on_stream=True),
    c.Signal: Traits(),
    c.Await: Traits(on_stream=True),
    c.Query: Traits(answers=(c.Answer,)),
    c.Elapsed: Traits(answers=(c.Answer,)),
    c.Join: Traits(answers=(c.Done,)),
    c.Collective: Traits(
        on_stream=True,
        routed=True,
        recordable=True,
        renumbered=True,
        answers=(c.TookPart,),
        reads=lambda collective, _: (*collective.inputs, *collective.outs),
        writes=lambda collective, _: collective.outs,
    ),
    c.On: Traits(),
    c.GraphPart: Traits(),
    c.EndGraph: Traits(),
    c.Replay: Traits(on_stream=True, routed=True),
    c.Discard: Traits(),
    c.Engines: Traits(answers=(c.GraphEngines,)),
    c.StopNode: Traits(),
}


def kinds(trait: str) -> frozenset[type[c.Command]]:
    """Returns the commands that have a trait."""
    return frozenset(kind for kind, traits in TRAITS.items() if getattr(traits, trait))


def without_stream(command: c.Command) -> c.Command:
    """Returns the command itself, of one for a stream too."""
    return command.command if isinstance(command, c.On) else command


def request_of(command: c.Command) -> int:
    """Returns the number of the request that a command answers; -1 for one that is not answered."""
    asking = without_stream(command)
    return (TRAITS[type(asking)].answers and asking.request) or -1  # type: ignore[union-attr]
