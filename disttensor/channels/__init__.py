"""The choice of data channels by operation: ``dt.channels.available()``, ``select(...)``, ``selected()``, ``reset()``.

    dt.channels.select("all_reduce", "gloo", min_bytes=1 << 20)
    dt.channels.select("send", "tcp", device="cpu")
    print(dt.channels.selected())

Operations that no rule selects a channel for go by the session's own channel, the ``backend`` of
``init_master_worker``. A channel is opened on all nodes as it is selected, so one that can't be used is an error of
that line. A graph keeps the channels that were chosen while it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..dispatch.call_site import here
from ..errors.argument_checks import spelled
from ..runtime.channel import channel_names, get_channel, register_channel
from ..runtime.channel.base import MASTER
from ..runtime.channel.registry import why_unusable
from ..runtime.collective import Way
from ..runtime.contracts.data_channel import check_data_channel
from ..runtime.process.spelling import shown
from ..runtime.process.tables import columns
from ..runtime.protocol.collective_kinds import ALGORITHMS
from ..session import current
from ..session.channel_router import COLLECTIVES, COPIES, OPS, SPANS, Rule
from .traffic import reset_stats, stats

DEVICES = ("cpu", "cuda")


@spelled
def select(
    op: str | Iterable[str],
    channel: str | None = None,
    *,
    device: str | None = None,
    min_bytes: int = 0,
    max_bytes: int | None = None,
    algorithm: str | Way | None = None,
    span: str | None = None,
    async_op: bool | None = None,
) -> None:
    """Has ``channel`` carry an operation from here on. A later selection counts more than an earlier one.

    Args:
        op: "upload" (master to node), "download", "send" (node to node), the name of a collective, "*" for all, or a
            list of names.
        channel: a name that ``available()`` knows. None leaves the channel as it is.
        device: "cuda" if all tensors concerned have to be on CUDA devices, "cpu" if not all are; None for both.
        min_bytes, max_bytes: the bytes of the tensor from which on, and below which, the channel is used (None: no
            upper limit). In a collective these are the bytes of the node that reads or writes most.
        span: "host" if all processes that take part have to be on one host, "hosts" if they have to be on several; None
            for both. The script takes part in uploads and downloads.
        async_op: only collectives that are called with ``async_op=True``, or only others; None for both and for copies.
        algorithm: for collectives that name none at their call: "ring", a ``Way`` (docs/COLLECTIVES.md).

    The first selection of a channel waits until all nodes have opened it. Raises ValueError for operations, channels,
    devices, sizes or algorithms that do not exist, or a channel that must not be used between these hosts
    (``trusted_network``); ImportError when its library is missing; the error that opening it on a node has raised;
    DisttensorError without a session. Nothing has changed then.
    """
    router = current.session().router
    ops = (op,) if isinstance(op, str) else tuple(op)
    for one in ops:
        if one not in (*OPS, "*"):
            raise ValueError(f"there is no operation {shown(one)}; there are {', '.join(OPS)}, and '*' for all")
    if device not in (None, *DEVICES):
        raise ValueError(f"device is 'cpu', 'cuda' or None for both, not {device!r}")
    if span not in (None, *SPANS):
        raise ValueError(f"span is 'host', 'hosts' or None for both, not {span!r}")
    if async_op is not None and type(async_op) is not bool:
        raise ValueError(f"async_op is True, False or None for both, not {shown(async_op)}")
    if async_op is not None and (copies := [one for one in ops if one in COPIES]):
        raise ValueError(f"async_op is what collectives have; {' and '.join(copies)} have none")
    if min_bytes < 0 or (max_bytes is not None and max_bytes <= min_bytes):
        raise ValueError(f"no size is at least {min_bytes} and below {max_bytes} bytes")
    if channel is None and algorithm is None:
        raise ValueError("name a channel, an algorithm, or both")
    way = _way(ops, algorithm)
    number = None if channel is None else router.open(channel, here())
    new = [Rule(one, device, min_bytes, max_bytes, number, channel or "", way, span, async_op) for one in ops]
    router.rules = (*reversed(new), *router.rules)


def _way(ops: Sequence[str], algorithm: str | Way | None) -> Way | None:
    if algorithm is None:
        return None
    way = algorithm if isinstance(algorithm, Way) else Way(algorithm)
    for op in ops:
        known = ALGORITHMS.get(op, ())
        if way.algorithm not in known:
            raise ValueError(f"{op} has no algorithm {shown(way.algorithm)}; it has {', '.join(known) or 'one only'}")
    return way


def reset() -> None:
    """Forgets all selections. Channels that were opened stay open until the end of the session. Does not wait.

    Raises DisttensorError without a session.
    """
    current.session().router.rules = ()


class Selected(tuple[Rule, ...]):
    """A tuple of the rules that were selected, the latest (which counts most) first. Prints as a table."""

    backend: str

    def __repr__(self) -> str:
        lines = [("op", "device", "bytes", "channel", "algorithm")]
        for rule in self:
            way = "" if rule.way is None else rule.way.algorithm
            lines.append((rule.op, _where(rule), _size(rule), rule.name or "as below", way or "by size"))
        lines.append(("*", "any", "any", self.backend, "by size"))
        return columns(lines)


def _where(rule: Rule) -> str:
    """Returns the devices that a rule is for, and what else it asks of an operation: "cuda, one host, async"."""
    more = {None: "", "host": ", one host", "hosts": ", several hosts"}[rule.span]
    return (rule.device or "any") + more + {None: "", True: ", async", False: ", sync"}[rule.async_op]


def _size(rule: Rule) -> str:
    if rule.most is None:
        return f"from {rule.least:,}" if rule.least else "any"
    return f"{rule.least:,} to {rule.most:,}" if rule.least else f"below {rule.most:,}"


def selected() -> Selected:
    """Returns the rules that were selected, and the session's channel for the rest. Does not wait.

        >>> dt.channels.select("all_reduce", algorithm="ring", min_bytes=1 << 20)
        >>> dt.channels.selected()
        op          device  bytes           channel   algorithm
        all_reduce  any     from 1,048,576  as below  ring
        *           any     any             auto      by size

    Raises DisttensorError without a session.
    """
    router = current.session().router
    found = Selected(router.rules)
    found.backend = next(iter(router.numbers))
    return found


class Entry(NamedTuple):
    """The support of a channel for one operation on one kind of device. True where the channel can be used.

    ``state``: "native" (the channel does it itself, straight from and to such memory), "available" (staged through the
    CPU; a collective is made of transfers), "unavailable" (``why`` says why not), "not implemented".
    """

    state: str
    why: str = ""

    def __bool__(self) -> bool:
        return self.state in ("native", "available")


class Availability(Mapping[tuple[str, str, str], Entry]):
    """A mapping (op, device, channel) -> Entry. Prints as a table."""

    def __init__(self, entries: dict[tuple[str, str, str], Entry]) -> None:
        self._entries = entries

    def __getitem__(self, key: tuple[str, str, str]) -> Entry:
        return self._entries[key]

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        names = list(dict.fromkeys(channel for _, _, channel in self))
        rows = list(dict.fromkeys((op, device) for op, device, _ in self))
        signs = {"native": "native", "available": "yes", "unavailable": "-", "not implemented": "no"}
        lines = [("op", "device", *names)]
        lines += [(op, device, *(signs[self[op, device, name].state] for name in names)) for op, device in rows]
        why: dict[str, None] = {}
        for (_, device, name), entry in self.items():
            if entry.why:
                why[f"{name}, {device}: {entry.why}"] = None
        return "\n".join([columns(lines), *why])


def available() -> Availability:
    """Returns what each channel can do with these nodes, or, without a session, on this machine.

    With a session this waits for one round trip to the nodes, the first time that a channel's name is asked about.
    """
    session = current.current()
    names = channel_names()
    if session is not None:
        session.router.look(names)
        cuda = any(len(node.devices) > 1 for node in session.nodes)
        none = "" if cuda else "no node has a CUDA device"
    else:
        none = "" if torch.cuda.is_available() else "this machine has no CUDA device"
    entries = {}
    for name in names:
        why = (
            session.router.unusable(name)
            if session is not None
            else why_unusable(name, MASTER) or why_unusable(name, 0)
        )
        for op in OPS:
            for device in DEVICES:
                entries[op, device, name] = _entry(name, op, device, why or (none if device == "cuda" else ""))
    order = {(op, device): i for i, (op, device) in enumerate((op, d) for d in DEVICES for op in OPS)}
    return Availability(dict(sorted(entries.items(), key=lambda item: order[item[0][:2]])))


def _entry(name: str, op: str, device: str, why: str) -> Entry:
    if why:
        return Entry("unavailable", why)
    can = get_channel(name).capabilities
    if not {device, "cpu"} & can.devices:
        return Entry("not implemented")
    if op in COPIES:
        if device in can.devices:
            return Entry("native")
    elif op in can.collectives and device in can.devices:
        return Entry("native")
    return Entry("available")


__all__ = [
    "COLLECTIVES",
    "Availability",
    "Entry",
    "Rule",
    "Selected",
    "available",
    "check_data_channel",
    "register_channel",
    "reset",
    "reset_stats",
    "select",
    "selected",
    "stats",
]
