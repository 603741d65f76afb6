"""Users' functions on nodes: ``dt.run(fn, *args, node=k)``."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import cloudpickle
import torch

from . import state
from .context import current_node
from .meta import Handle, meta_of, new_ref
from .placement import Place, one_session
from .runtime import codec
from .runtime import command as c
from .runtime.errors import DisttensorError
from .runtime.failure import line_of
from .runtime.functions import MAX_PICKLE, decode_result, key_of
from .runtime.interrupts import whole
from .site import here
from .tensor import DistributedTensor, proxy
from .transfer import move, upload

_serial = count()

#: Bytes per piece, well under a message's limit.
PIECE = 512 << 10


def run(fn: Callable[..., Any], *args: Any, node: int | None = None, **kwargs: Any) -> Any:
    """Runs ``fn(*args, **kwargs)`` on a node (the current one by default) and gives its result.

    The function goes there with cloudpickle, once. Tensors among the arguments (at any depth) arrive as ordinary local
    tensors: proxies of that node as they are, others are sent first. Tensors in the result come back as proxies;
    everything else must be plain data (None, numbers, text, bytes, lists, tuples, sets, dicts of it).

    Raises what the function raised, with the node's traceback as a note, TypeError for other results, NodeLost.
    """
    session = state.session()
    place = session.places.at(current_node() if node is None else node)
    sent = _known(session)
    keep: list[DistributedTensor] = []
    function = _pickled(fn, place, keep)
    holds_tensors = bool(keep)
    # what is used once has a name of its own; the unpickler doesn't read so far
    once = next(_serial).to_bytes(8, "big")
    function_key = key_of(function := function + once if holds_tensors else function)
    arguments = _pickled((args, kwargs), place, keep) + once
    # simulated devices are one memory, so the node can't tell which of them a result is on: where an argument is
    beside = next((t._place for t in keep), place) if session.link.hellos[place.node].simulated else place
    site = here()
    arguments_key = key_of(arguments)
    session.link.interrupts.look()
    _send(place, None if holds_tensors else sent, (function_key, function), (arguments_key, arguments), site)
    request_id = 0

    def command(id: int) -> c.Command:
        nonlocal request_id
        request_id = id
        return c.Run(id, function_key, arguments_key, not holds_tensors, line_of(site), tuple(t._h.ref for t in keep))

    try:
        reply = session.ask(place, c.Result, command, site)
        tensors = [_adopted(g, beside) for g in reply.tensors]
        if tensors:
            place.outbox.add(c.Adopt(request_id, tuple(t._h.ref for t in tensors)), site)
    except BaseException:  # Ctrl-C too
        sent.discard((place.node, function_key))  # it may not have got as far as being kept
        if request_id and place.outbox.lost is None:
            place.outbox.add(c.Adopt(request_id, ()), site)  # nobody will adopt what it returns
        raise
    finally:
        keep.clear()  # now, and not when the collector finds the pickler, which is in a cycle
    return decode_result(reply.data, tensors)


def _known(session: Any) -> set[tuple[int, bytes]]:
    """Which functions which nodes have. Bounded well below what a node keeps."""
    known: set[tuple[int, bytes]] = session.__dict__.setdefault("functions", set())
    if len(known) > 512:
        known.clear()
    return known


def _pickled(value: Any, place: Place, keep: list[DistributedTensor]) -> bytes:
    """Pickles with tensors replaced by refs; ``keep`` holds those that were sent for it."""
    buffer = io.BytesIO()
    _Pickler(buffer, place, keep).dump(value)
    data = buffer.getvalue()
    if len(data) > MAX_PICKLE:
        raise ValueError(
            f"arguments of {len(data)} bytes exceed {MAX_PICKLE >> 20} MiB when pickled; pass them as tensors"
        )
    return data


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, place: Place, keep: list[DistributedTensor]) -> None:
        super().__init__(file)
        self._place = place
        self._keep = keep

    def persistent_id(self, value: Any) -> int | None:
        from .lazy import materialise

        if not isinstance(value, torch.Tensor):
            return None
        tensor: Any = value.detach()
        if not isinstance(tensor, DistributedTensor):
            tensor = upload(tensor, self._place)
        elif tensor._place.node != self._place.node:
            tensor = move(tensor, self._place)
        else:
            one_session(tensor._place, self._place)
        self._keep.append(tensor)
        return int(tensor._h.ref or materialise(tensor._h))


@whole
def _send(
    place: Place,
    sent: set[tuple[int, bytes]] | None,
    function: tuple[bytes, bytes],
    arguments: tuple[bytes, bytes],
    site: Any,
) -> None:
    """Queues (key, data) of a function, unless it was ``sent``, and of its arguments; nobody else's pieces between."""
    with place.session.pieces:
        if sent is None or (place.node, function[0]) not in sent:
            _pieces(place, *function, site)
            if sent is not None:
                sent.add((place.node, function[0]))
        _pieces(place, *arguments, site)


def _pieces(place: Place, key: bytes, data: bytes, site: Any) -> None:
    for start in range(0, max(len(data), 1), PIECE):
        place.outbox.add(c.Piece(key, data[start : start + PIECE], start + PIECE >= len(data)), site)


def _adopted(geometry: c.Geometry, place: Place) -> DistributedTensor:
    session = place.session
    name = geometry.device if geometry.device.startswith("cuda") else "cpu"
    where = place if session.link.hellos[place.node].simulated else session.places.at(place.node, name)
    meta = meta_of(geometry.shape, geometry.stride, geometry.offset, codec.dtype_of(geometry.dtype), where)
    return proxy(Handle(new_ref(), meta))


def nodes_info() -> Sequence[dict[str, Any]]:
    """The nodes: for each its rank, host, pid, devices, and whether it is alive."""
    link = state.session().link
    return [
        {
            "rank": rank,
            "host": hello.host,
            "pid": hello.pid,
            "devices": list(hello.devices),
            "alive": link.outboxes[rank].lost is None,
        }
        for rank, hello in sorted(link.hellos.items())
    ]


__all__ = ["DisttensorError", "nodes_info", "run"]
