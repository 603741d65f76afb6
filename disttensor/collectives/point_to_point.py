"""Messages in batches, and a barrier that names who is missing: ``torch.distributed``'s, called once for all nodes.

ops = []
for k, (x, y) in enumerate(zip(xs, ys)):                        # a ring; x and y are on node k
    ops += [P2POp(isend, x, (k + 1) % n), P2POp(irecv, y, (k - 1) % n)]
for work in dt.collectives.batch_isend_irecv(ops):
    work.wait()
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch

from ..errors.argument_checks import seconds, seconds_of, spelled, whole_number
from ..futures.work import Work
from ..runtime.master.failures import line_of
from ..session.current import session as current_session
from ..session.current import session_of
from ..session.places import MeshPlace, one_session
from .groups import Group, given_group
from .issue import CollectiveCall, CollectivePart, named, same_shape, written
from .tensor_collectives import send

#: Seconds that ``monitored_barrier`` waits by default: torch's half an hour is for programs that nobody watches.
PATIENCE = 300.0


def isend(tensor: torch.Tensor, target: torch.Tensor) -> Work[torch.Tensor]:
    """Begins to copy ``tensor`` into ``target``, on another node: ``send(tensor, target, async_op=True)``."""
    return cast(Work[torch.Tensor], send(tensor, target, async_op=True))


def irecv(target: torch.Tensor, tensor: torch.Tensor) -> Work[torch.Tensor]:
    """Begins to copy ``tensor``, on another node, into ``target``: ``recv(target, tensor, async_op=True)``."""
    return isend(tensor, named(target, "irecv: the target"))


@dataclass(frozen=True)
class P2POp:
    """One end of a message, for ``batch_isend_irecv``: the node of ``tensor`` sends it to node ``peer``, or receives it
    from there.

    ``op`` is ``isend`` or ``irecv`` (these functions, torch.distributed's, or the names). Of several messages from one
    node to another with one ``tag`` the first that is sent is the first that is received.
    """

    op: Any
    tensor: torch.Tensor
    peer: int
    tag: int = 0

    @property
    def sends(self) -> bool:
        """Returns whether it is the message's beginning. Raises ValueError for an ``op`` that is neither."""
        name = self.op if isinstance(self.op, str) else getattr(self.op, "__name__", "")
        if name not in ("isend", "irecv"):
            raise ValueError(f"a P2POp's op is isend or irecv, not {self.op!r}")
        return bool(name == "isend")


@spelled
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work[torch.Tensor]]:
    """Begins all messages of a batch, in whichever order their ends are listed, and returns a Work for each op at once.

    The two ends of a message are two ops, as each rank of torch.distributed lists its own: one that sends from node a
    to node b, and one that receives at b from a. The Works of both are the same object; its ``result()`` is the tensor
    that was received. What uses that tensor later waits on its node.

        >>> x, y = torch.ones(2, device="node:0"), torch.zeros(2, device="node:1")
        >>> isend, irecv, P2POp = dt.collectives.isend, dt.collectives.irecv, dt.collectives.P2POp
        >>> works = dt.collectives.batch_isend_irecv([P2POp(irecv, y, 0), P2POp(isend, x, 1)])
        >>> works[0].result()[0].item()
        1.0

    Raises, before anything is sent, TypeError for what is no list of P2POps, local tensors, or ends of other dtypes;
    ValueError for an empty list, an end without the other one, a message from a node to itself, shapes that differ, or
    a node that does not exist; NodeLost.
    """
    if isinstance(p2p_op_list, P2POp) or not isinstance(p2p_op_list, Sequence):
        raise TypeError(f"batch_isend_irecv takes a list of P2POps, not {type(p2p_op_list).__name__}")
    if not p2p_op_list:
        raise ValueError("batch_isend_irecv takes at least one P2POp")
    messages = _messages(p2p_op_list)
    session = session_of(named(p2p_op_list[0].tensor, "P2POp 0")._place)
    for node in {node for each in messages for node in each.nodes}:
        session.link.check(session.nodes[node].outbox)
    works: list[Any] = [None] * len(p2p_op_list)
    for each in _in_rounds(messages):
        works[each.first] = works[each.second] = isend(p2p_op_list[each.first].tensor, p2p_op_list[each.second].tensor)
    return works


@dataclass(frozen=True)
class _Message:
    """A message of a batch: the indices of the ops that send and receive it, and their nodes."""

    first: int
    second: int
    nodes: tuple[int, int]


def _messages(ops: Sequence[P2POp]) -> list[_Message]:
    """Returns the messages whose ends these are. Raises TypeError or ValueError where they are none."""
    waiting: dict[bool, defaultdict[tuple[int, int, int], deque[int]]] = {
        True: defaultdict(deque),
        False: defaultdict(deque),
    }
    messages = []
    for i, op in enumerate(ops):
        if not isinstance(op, P2POp):
            raise TypeError(f"batch_isend_irecv takes P2POps; op {i} is a {type(op).__name__}")
        place = named(op.tensor, f"P2POp {i}: its tensor")._place
        # a message has one sender and one receiver
        if isinstance(place, MeshPlace):
            raise ValueError(f"P2POp {i}: its tensor is on {place}; x.at(...) is one rank's")
        mine, peer = place.node, session_of(place).places.at(op.peer).one.node
        if mine == peer:
            raise ValueError(f"P2POp {i}: from node {mine} to itself; y.copy_(x) copies there")
        tag = whole_number(f"P2POp {i}: tag", op.tag)
        key = (mine, peer, tag) if op.sends else (peer, mine, tag)
        if not waiting[not op.sends][key]:
            waiting[op.sends][key].append(i)
            continue
        other = waiting[not op.sends][key].popleft()
        first, second = (i, other) if op.sends else (other, i)
        one_session(ops[first].tensor._place, ops[second].tensor._place)  # type: ignore[attr-defined]
        same_shape(ops[second].tensor, ops[first].tensor, f"P2POps {first} (isend) and {second} (irecv)")
        written(ops[second].tensor)
        messages.append(_Message(first, second, key[:2]))
    for sends, those in waiting.items():
        for (source, target, tag), left in those.items():
            if left:
                absent = f"P2POp(irecv, y, {source})" if sends else f"P2POp(isend, x, {target})"
                raise ValueError(
                    f"P2POp {left[0]} is one end of a message from node {source} to node {target}"
                    f"{f' with tag {tag}' if tag else ''}, and the list has no other end: {absent} with a tensor on "
                    f"node {target if sends else source}"
                )
    return messages


def _in_rounds(messages: list[_Message]) -> list[_Message]:
    """Returns the messages in another order, in which neighbours have no node in common where that can be: a node does
    one after the other, so that along a ring in its own order each would wait for the one before."""
    free: defaultdict[int, int] = defaultdict(int)  #: the first round in which a node has nothing to do
    rounds: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        number = max(free[node] for node in message.nodes)
        rounds.append((number, i))
        for node in message.nodes:
            free[node] = number + 1
    return [messages[i] for _, i in sorted(rounds)]


@spelled
def monitored_barrier(group: Group | None = None, timeout: float | timedelta | None = None) -> None:
    """Waits until each node of the group (default: all) has done everything that was issued to it before.

    ``barrier`` has the nodes wait for each other, and says nothing of who is late. This has the script wait, at most
    ``timeout`` seconds (default: 300), and raises TimeoutError that names each node that has not come, and the line
    that it is at. The nodes go on, and the session stays usable. Raises NodeLost, GraphError while a graph is recorded.
    """
    group = given_group(group, "monitored_barrier")
    limit = PATIENCE if timeout is None else seconds_of(timeout)
    seconds("timeout", limit)
    session = current_session()
    deadline = time.monotonic() + (limit or 0.0)
    alone = [Group((node,)) for node in group]
    works = [CollectiveCall("barrier", each, [CollectivePart()]).issue(session, async_op=True) for each in alone]
    late = []
    for node, work in zip(group, works, strict=True):
        try:
            if work is not None:
                work.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            late.append(node)
    if late:
        raise TimeoutError(
            f"monitored_barrier: {len(late)} of {len(group)} nodes did not arrive within {limit:g} s; the others wait "
            "for nothing:\n" + "\n".join(f"  {_at(session, node)}" for node in late)
        )


def _at(session: Any, node: int) -> str:
    """Returns which node that is, and the line that it is at, or behind."""
    there = session.nodes[node]
    site = there.outbox.running()
    at = f"at what was issued at {line_of(site)}, or behind that" if site is not None else "at nothing that is known"
    return f"node {node} (host {there.hello.host}, pid {there.hello.pid}) is {at}"
