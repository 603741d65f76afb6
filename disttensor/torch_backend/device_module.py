"""``torch.node``, the device module. It has the functions of ``torch.cuda`` that mean something for nodes.

``device`` arguments are a device ("node:1"), or a node's number. Functions that take one raise ValueError or
RuntimeError for a node or device that does not exist, and DisttensorError without a session.
"""

from __future__ import annotations

import torch

from ..dispatch import rng_states
from ..dispatch.call_site import here
from ..runtime.master.route import route
from ..runtime.protocol import commands as c
from ..session import current
from ..session.node_context import current_index, current_node, target
from ..session.node_context import node as node_context
from ..session.node_context import use as use_node
from ..session.places import Place, signed
from ..streams.streams import Event, Stream, StreamContext, current_stream, default_stream, set_stream, stream
from .cuda_names import MISSING
from .memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)

#: What ``torch.node`` has of torch.cuda's. (What begins with an underscore torch itself asks for.)
__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_rng_state",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def is_available() -> bool:
    """Returns whether a session is running."""
    return current.current() is not None


def is_initialized() -> bool:
    """Returns whether a session is running."""
    return current.current() is not None


def _lazy_init() -> None:
    """Raises DisttensorError without a session. Torch calls it before the first tensor on a node."""
    current.session()


def __getattr__(name: str) -> bool:
    if name == "_initialized":  # how torch.utils.checkpoint asks whether there are generators to save
        return is_initialized()
    why_not = f": {MISSING[name]}" if name in MISSING else ""
    raise AttributeError(f"module 'torch.node' has no attribute {name!r}{why_not}")


def device_count() -> int:
    """Returns the number of nodes, 0 without a session; ``"node:0"`` to ``"node:N-1"`` are their default devices."""
    session = current.current()
    return 0 if session is None else len(session.nodes)


def current_device() -> int:
    """Returns the number of the current node, as ``disttensor.session.current_node()``; of a mesh its device's
    index."""
    return current_index()


def set_device(device: torch.device | str | int) -> None:
    """Makes a node, or a mesh by its device, the current one of this thread or asyncio task.

    ``with torch.node.device(1):`` does so for a while.

    A ``with`` block in which it is called ends as if it had not been called. Raises as ``torch.node.device``.
    """
    use_node(target(device))


def _exchange_device(index: int) -> int:
    """Sets the current node, and returns the previous one. A negative index sets nothing."""
    before = current_index()
    if index >= 0:
        use_node(target(index), chosen=False)
    return before


_maybe_exchange_device = _exchange_device


class device(node_context):
    """A context manager that makes a node the current one, as ``disttensor.node(1)``: ``with torch.node.device(1):``.

    It takes devices as well; None leaves the current node as it is.
    """

    def __init__(self, device: torch.device | str | int | None) -> None:
        super().__init__(current_index() if device is None else device)


def _is_in_bad_fork() -> bool:
    return False


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Waits until one node (a device, or its number), or all nodes (None), have done everything.

    Raises the earliest error that nothing has raised yet, NodeLost: of all nodes, once.
    """
    session = current.session()
    for node in (None,) if device is None else _place(device).ranks:
        session.synchronize(node)


def _empty_host_cache() -> None:
    """Does nothing, as no memory is pinned for nodes."""


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of every node; ``torch.manual_seed`` calls it. Returns at once, except that it waits for
    nodes that are threads of the script's process, as they have one generator with it; does nothing without a session.

    Raises RuntimeError for a seed of more than 64 bits.
    """
    session = current.current()
    if session is None:
        return
    command = c.Seed(signed(seed), all=True)
    with session.places.lock:
        for node in session.nodes:
            if node.outbox.lost is None:
                node.outbox.add(command, here())
        if route.get().recorder is None:  # else each replay does it
            session.places.seeded(seed)
    session.settle_threads()  # else they would seed the script's generator while it draws


def manual_seed(seed: int) -> None:
    """Seeds the generators of the current node. Returns at once, except as ``manual_seed_all`` does.

    Raises RuntimeError for a seed of more than 64 bits, DisttensorError without a session.
    """
    session = current.session()
    with session.places.lock:
        for place in session.places.of_node(current_node()):
            session.places.draw(place)
        session.nodes[current_node()].outbox.add(c.Seed(signed(seed)), here())
    session.settle_threads()


def get_rng_state(device: torch.device | str | int | Place = "node") -> torch.Tensor:
    """Returns the state of a device's default generator as a local uint8 tensor. Waits for one round trip.

    For a Place (which ``torch.utils.checkpoint`` passes) it returns a uint8 tensor that stays on the node, without a
    round trip. Raises NodeLost.
    """
    if isinstance(device, Place):
        return rng_states.keep(device)
    place = _place(device)
    with place.session.places.turn(place):
        reply = place.session.ask(place, c.RngState, lambda id: c.Random(id, place.name, b""), here())
    return torch.frombuffer(bytearray(reply.state), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int | Place = "node") -> None:
    """Sets the state of a device's default generator: a uint8 tensor of ``get_rng_state``. Waits for one round trip.

    For a Place, and a tensor on its node, it returns at once. Raises ValueError for a tensor of another dtype,
    NodeLost.
    """
    if isinstance(device, Place):
        return rng_states.restore(device, new_state)  # type: ignore[arg-type]
    if new_state.dtype != torch.uint8:
        raise ValueError(f"a generator's state is a uint8 tensor, not {new_state.dtype}")
    place = _place(device)
    data = new_state.cpu().numpy().tobytes()
    with place.session.places.turn(place):
        place.session.ask(place, c.Done, lambda id: c.Random(id, place.name, data), here())


def usage(place: Place) -> tuple[int, int]:
    """Asks the place's node for (its live tensors, bytes of their storages). One round trip."""
    place.session.link.sender.flush_all()  # frees ride at the end of messages: those of before come first
    reply = place.session.ask(place, c.MemoryUsage, lambda id: c.Memory(id, ""), None)
    return reply.tensors, reply.bytes


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def _place(device: torch.device | str | int) -> Place:
    return current.session().places.at(device)
