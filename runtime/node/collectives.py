"""Runs collectives as commands: the node's inputs come from its store, and its outputs are written there.

A node whose operands are poison takes part all the same (collective/exchange.py), or the others would wait for it: with
tensors of the right lengths and arbitrary contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from .. import collective
from ..channel.base import MASTER, DataChannel
from ..collective import IDS, NATIVE, Exchange, ReduceOp, Way, shares
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import PoisonedError, ProtocolError
from ..protocol.failure_ids import Poison, earliest
from ..protocol.transfer_ids import COLLECTIVES
from .state import NodeState
from .store import Value

Tensors = list[torch.Tensor]


def _run(command: c.Collective, wire: Exchange, inputs: Tensors, outs: Tensors) -> None:
    """Runs a collective, also one for which ranks have several tensors.

    Raises what ``Exchange.end`` does, ProtocolError.
    """
    if not command.shares:
        _run_one_each(command, wire, inputs, outs)
        return
    between = partial(_run_one_each, command, wire)
    match command.kind:
        case "all_reduce" | "reduce":
            shares.reduced(wire, ReduceOp(command.op), inputs, outs, sum(command.shares), between)
        case "broadcast":
            shares.broadcast(inputs, outs, between)
        case "all_gather" if len(outs) == 1:
            shares.gathered_into(inputs, outs[0], command.shares, between)
        case "all_gather":
            shares.gathered(wire, inputs, outs, command.shares, between)
        case _:
            between(inputs, outs)


def _run_one_each(command: c.Collective, wire: Exchange, inputs: Tensors, outs: Tensors) -> None:
    op, root = ReduceOp(command.op), command.root
    if command.algorithm == NATIVE:
        collective.native(wire, command.kind, inputs, outs, op, root, command.transfer)
        return
    way = Way(command.algorithm, command.base, command.chunk) if command.algorithm else None
    match command.kind:
        case "all_reduce":
            collective.all_reduce(wire, inputs[0], outs[0], op, way, command.hosts or None)
        case "reduce":
            collective.reduce(wire, inputs[0], next(iter(outs), None), root, op, way)
        case "broadcast":
            collective.broadcast(wire, (inputs or outs)[0], root, way, command.hosts or None)
        case "all_gather":
            collective.all_gather(wire, inputs[0], outs, way)
        case "gather":
            collective.gather(wire, inputs[0], outs, root)
        case "scatter":
            collective.scatter(wire, inputs, outs[0], root)
        case "reduce_scatter":
            collective.reduce_scatter(wire, inputs, outs[0], op, way)
        case "all_to_all":
            collective.all_to_all(wire, inputs, outs)
        case "shift":
            collective.sendreceive(wire, inputs[0], outs[0], (wire.me + root) % wire.size, (wire.me - root) % wire.size)
        case "barrier":
            collective.barrier(wire)
        case _:
            raise ProtocolError(f"there is no collective {command.kind!r}")


def join(node: NodeState, number: int, command: c.Collective, values: Mapping[int, Value]) -> None:
    """Does this node's part of a collective.

    ``values``: its operands by ref. ``number`` is the command's own, for failures. Raises PoisonedError, and what the
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
    ranks = next((group for group in command.groups if node.rank in group), command.ranks)
    wire = Exchange(
        node.channels.collective[command.channel],
        ranks,
        ranks.index(node.rank),
        COLLECTIVES + command.transfer * IDS,
        blame=(node.rank, number),
        poison=None if poison is None else (poison.rank, poison.seq),
        carry=None if command.carry < 0 else codec.dtype_of(command.carry),
    )
    try:
        if command.carry < 0 and not command.hosts and not command.algorithm:
            wire.shared_pages = node.shared_pages
        _run(command, wire, tensors[:given], tensors[given:])
    except PoisonedError as error:
        _tell_master(node.channel, command, Poison(error.rank, error.seq))
        raise
    except Exception:
        _tell_master(node.channel, command, Poison(node.rank, number))
        raise
    _tell_master(node.channel, command, None)


def _tell_master(channel: DataChannel, command: c.Collective, poison: Poison | None) -> None:
    if command.done and poison is None:
        channel.isend(torch.empty(0, dtype=torch.uint8), MASTER, command.done)
    elif command.done and poison is not None:
        channel.refuse(MASTER, command.done, poison.rank, poison.seq)


def take_part(node: NodeState, command: c.Collective) -> None:
    """Does a collective at once, in the calling thread."""
    values: dict[int, Value] = {}
    for ref in {*command.inputs, *command.outs}:
        try:
            values[ref] = node.entry(ref)
        except Exception as error:  # the other ranks wait for this one all the same
            values[ref] = node.tell(command.kind, error)
    store = node.store
    if store.sending:
        store.settle([t for ref in command.outs if isinstance(t := values[ref], torch.Tensor)])
    try:
        join(node, node.number, command, values)
    except PoisonedError as error:
        poison = Poison(error.rank, error.seq)
    except Exception as error:
        poison = node.tell(command.kind, error)
    else:
        return
    for ref in command.outs:
        node.spoil(ref, poison)
