"""Runs collectives as commands: the node's inputs come from its store, and its outputs are written there.

A node whose operands are poison takes part all the same (collective/exchange.py), or the others would wait for it: with
tensors of the right lengths and arbitrary contents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from .. import collective
from ..collective import IDS, NATIVE, Exchange, ReduceOp, Way, shares
from ..process import page
from ..process.flight import COUNT
from ..process.observing import CollectiveDone
from ..process.page import COLLECTIVE
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import NonFiniteError, PoisonedError, ProtocolError
from ..protocol.failure_ids import Poison, earliest
from ..protocol.rank_lists import own_group, ranks_of
from ..protocol.transfer_ids import COLLECTIVES
from .state import NodeState
from .store import Value

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class CollectiveRun:
    """A collective that a rank runs: the command, the rank's end of it, and the algorithm, if one was named."""

    command: c.Collective
    wire: Exchange
    way: Way | None

    @property
    def op(self) -> ReduceOp:
        return ReduceOp(self.command.op)

    @property
    def root(self) -> int:
        return self.command.root

    @property
    def hosts(self) -> tuple[int, ...] | None:
        return ranks_of(self.command.hosts) or None


def _shift(call: CollectiveRun, inputs: Tensors, outs: Tensors) -> None:
    me, size = call.wire.me, call.wire.size
    collective.sendreceive(call.wire, inputs[0], outs[0], (me + call.root) % size, (me - call.root) % size)


#: What runs each kind of collective where every rank has one tensor, or one for each rank.
RUNNERS: dict[str, Callable[[CollectiveRun, Tensors, Tensors], None]] = {
    "all_reduce": lambda it, ins, outs: collective.all_reduce(it.wire, ins[0], outs[0], it.op, it.way, it.hosts),
    "reduce": lambda it, ins, outs: collective.reduce(it.wire, ins[0], next(iter(outs), None), it.root, it.op, it.way),
    "broadcast": lambda it, ins, outs: collective.broadcast(it.wire, (ins or outs)[0], it.root, it.way, it.hosts),
    "all_gather": lambda it, ins, outs: collective.all_gather(it.wire, ins[0], outs, it.way),
    "gather": lambda it, ins, outs: collective.gather(it.wire, ins[0], outs, it.root),
    "scatter": lambda it, ins, outs: collective.scatter(it.wire, ins, outs[0], it.root),
    "reduce_scatter": lambda it, ins, outs: collective.reduce_scatter(it.wire, ins, outs[0], it.op, it.way),
    "all_to_all": lambda it, ins, outs: collective.all_to_all(it.wire, ins, outs),
    "shift": _shift,
    "barrier": lambda it, ins, outs: collective.barrier(it.wire),
}

Between = Callable[[Tensors, Tensors], None]


def _reduce_shares(call: CollectiveRun, inputs: Tensors, outs: Tensors, between: Between) -> None:
    shares.reduced(call.wire, call.op, inputs, outs, sum(call.command.shares), between)


def _gather_shares(call: CollectiveRun, inputs: Tensors, outs: Tensors, between: Between) -> None:
    if len(outs) == 1:
        shares.gathered_into(inputs, outs[0], call.command.shares, between)
    else:
        shares.gathered(call.wire, inputs, outs, call.command.shares, between)


#: What runs each kind of collective for which a rank may have several tensors, by ``between``, which runs it for one.
SHARES: dict[str, Callable[[CollectiveRun, Tensors, Tensors, Between], None]] = {
    "all_reduce": _reduce_shares,
    "reduce": _reduce_shares,
    "broadcast": lambda it, ins, outs, between: shares.broadcast(ins, outs, between),
    "all_gather": _gather_shares,
}


def _run(command: c.Collective, wire: Exchange, inputs: Tensors, outs: Tensors) -> None:
    """Runs a collective, also one for which ranks have several tensors.

    Raises what ``Exchange.close`` does, ProtocolError for an unknown kind.
    """
    run = RUNNERS.get(command.kind)
    if run is None:
        raise ProtocolError(f"there is no collective {command.kind!r}")
    call = CollectiveRun(
        command, wire, Way(command.algorithm, command.base, command.chunk) if command.algorithm else None
    )

    def between(ins: Tensors, into: Tensors) -> None:
        if command.algorithm == NATIVE:
            collective.native(wire, command.kind, ins, into, call.op, call.root, command.transfer)
        else:
            run(call, ins, into)

    if command.shares and (several := SHARES.get(command.kind)) is not None:
        several(call, inputs, outs, between)
    else:
        between(inputs, outs)


def join(
    node: NodeState,
    number: int,
    command: c.Collective,
    values: Mapping[int, Value],
    stream: str = "",
    before_wait: Callable[[], None] | None = None,
) -> None:
    """Does this node's part of a collective.

    ``values``: its operands by ref. ``number`` is the command's own, for failures; ``stream`` the one that does it;
    ``before_wait`` is called before it waits for another rank. Raises PoisonedError, NonFiniteError, and what the
    collectives raise; the other ranks have been told.
    """
    dtype = codec.dtype_of(command.dtype)

    def tensor(ref: int, length: int) -> torch.Tensor:
        value = values[ref]
        return value if isinstance(value, torch.Tensor) else torch.empty(length, dtype=dtype)

    refs = (*command.inputs, *command.outs)
    tensors = [tensor(ref, length) for ref, length in zip(refs, command.lengths, strict=True)]
    given = len(command.inputs)
    poison = earliest(value for ref in command.inputs if isinstance(value := values[ref], Poison))
    ranks = own_group(command.ranks, command.sizes, node.rank)
    wire = Exchange(
        node.channels.collective[command.channel],
        ranks,
        ranks.index(node.rank),
        COLLECTIVES + command.transfer * IDS,
        blame=(node.rank, number),
        poison=None if poison is None else (poison.rank, poison.seq),
        carry=None if command.carry < 0 else codec.dtype_of(command.carry),
        before_wait=before_wait,
    )
    began, ring = time.monotonic(), page.mine.ring
    try:
        if command.carry < 0 and not command.hosts.starts and not command.algorithm:
            wire.shared_pages = node.shared_pages
        run, seam = partial(_run, command, wire, tensors[:given], tensors[given:]), node.seam
        if seam.collective.listeners:
            size = sum(tensor.nbytes for tensor in tensors)
            named = stream, number, command.kind, command.algorithm, tuple(ranks), size
            run = partial(seam.notify_end_of, seam.collective, CollectiveDone, run, *named)
        run()
        if node.check is not None:
            node.check.look_at(command.kind, tensors[given:], tensors[:given])
    except (PoisonedError, NonFiniteError):
        raise
    except Exception:
        node.channels.nodes.update(rank for rank in ranks if rank != node.rank)  # one of which may have told of a loss
        raise
    finally:
        nbytes = sum(command.lengths) * dtype.itemsize
        ring.write(ring.slot(), began, number, nbytes, time.monotonic() - began, len(ranks) & COUNT, COLLECTIVE)


def take_part(node: NodeState, command: c.Collective) -> None:
    """Does a collective at once, in the calling thread."""
    values: dict[int, Value] = {}
    for ref in {*command.inputs, *command.outs}:
        try:
            values[ref] = node.entry(ref)
        except Exception as error:  # the other ranks wait for this one all the same
            values[ref] = node.report_failure(command.kind, error)
    store = node.store
    if store.sending:
        store.wait_for_sends([t for ref in command.outs if isinstance(t := values[ref], torch.Tensor)])
    try:
        join(node, node.number, command, values)
    except PoisonedError as error:
        poison = Poison(error.rank, error.seq)
    except Exception as error:
        poison = node.report_failure(command.kind, error)
    else:
        return
    for ref in command.outs:
        node.spoil(ref, poison)
