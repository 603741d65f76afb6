"""The traits of each kind of command: its order, whether a graph can hold it, which tensors it reads and makes.

One row per command. Streams, graphs, early receives and poison go by these rows; tests/unit/test_traits.py holds them
against the commands that exist.
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
    c.Define: Traits(overtaken=True),
    c.Forget: Traits(overtaken=True),
    c.Free: Traits(overtaken=True),
    c.Ask: Traits(
        on_stream=True,
        routed=True,
        overtaken=True,
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
    c.Piece: Traits(overtaken=True),
    c.Run: Traits(
        on_stream=True,
        routed=True,
        overtaken=True,
        reads=lambda run, _: run.refs,
        makes=lambda run, _: (*run.outs, run.token) if run.token else run.outs,
    ),
    c.Adopt: Traits(overtaken=True),
    c.Seed: Traits(on_stream=True, routed=True, recordable=True, anywhere=True),
    c.Swap: Traits(on_stream=True, routed=True, recordable=True, anywhere=True),
    c.Random: Traits(on_stream=True, routed=True, anywhere=True),
    c.Keep: Traits(
        on_stream=True,
        routed=True,
        recordable=True,
        anywhere=True,
        reads=lambda keep, _: (keep.ref,) if keep.restore else (),
        makes=lambda keep, _: () if keep.restore else (keep.ref,),
    ),
    c.Sync: Traits(overtaken=True),
    c.Memory: Traits(overtaken=True),
    c.MemoryStats: Traits(overtaken=True),
    c.Storage: Traits(
        on_stream=True, routed=True, overtaken=True, anywhere=True, reads=lambda storage, _: (storage.ref,)
    ),
    c.Digest: Traits(on_stream=True, routed=True, overtaken=True, anywhere=True, reads=lambda digest, _: (digest.ref,)),
    c.Count: Traits(),
    c.Open: Traits(),
    c.Usable: Traits(),
    c.Peer: Traits(),
    c.Lost: Traits(),
    c.Default: Traits(),
    c.Switch: Traits(recordable=True),
    c.Stream: Traits(),
    c.Record: Traits(on_stream=True),
    c.Wait: Traits(on_stream=True),
    c.Signal: Traits(),
    c.Await: Traits(on_stream=True),
    c.Query: Traits(),
    c.Elapsed: Traits(),
    c.Join: Traits(),
    c.Collective: Traits(
        on_stream=True,
        routed=True,
        recordable=True,
        renumbered=True,
        reads=lambda collective, _: (*collective.inputs, *collective.outs),
        writes=lambda collective, _: collective.outs,
    ),
    c.On: Traits(),
    c.Part: Traits(),
    c.Graph: Traits(),
    c.Replay: Traits(on_stream=True, routed=True),
    c.Discard: Traits(),
    c.Engines: Traits(),
    c.Stop: Traits(),
}


def kinds(trait: str) -> frozenset[type[c.Command]]:
    """Returns the commands that have a trait."""
    return frozenset(kind for kind, traits in TRAITS.items() if getattr(traits, trait))
