"""``torch.node``: the device module. Mirrors ``torch.cuda`` where the words mean something for nodes."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..dispatch import rng_states
from ..dispatch.call_site import here
from ..runtime.protocol import commands as c
from ..session import current
from ..session import current_node as context
from ..session.current_node import current_node
from ..session.places import Place
from ..streams.streams import Event, Stream, StreamContext, current_stream, default_stream, set_stream, stream
from ..tasks import functions

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]


def is_available() -> bool:
    """Whether a session is running."""
    return current.current() is not None


def is_initialized() -> bool:
    """Whether a session is running."""
    return current.current() is not None


def _lazy_init() -> None:
    """torch asks for it before the first tensor on a node. Raises DisttensorError without a session."""
    current.session()


def __getattr__(name: str) -> bool:
    if name == "_initialized":  # how torch.utils.checkpoint asks whether there are generators to save
        return is_initialized()
    raise AttributeError(f"module 'torch.node' has no attribute {name!r}")


def device_count() -> int:
    """The number of nodes; ``"node:0"`` to ``"node:N-1"`` are their default devices."""
    session = current.current()
    return 0 if session is None else len(session.states)


def current_device() -> int:
    """The current node, as ``disttensor.current_node()``."""
    return current_node()


def set_device(device: torch.device | str | int) -> None:
    """Makes a node the current one of this thread or asyncio task; ``with torch.node.device(1):`` is for a while.

    A ``with`` block that it is called in ends as if it had not been. Raises as ``torch.node.device``.
    """
    context.use(_place(device).node)


def _exchange_device(index: int) -> int:
    """Sets the current node, and gives the one of before. Nothing is set for a negative index."""
    before = current_node()
    if index >= 0:
        set_device(index)
    return before


_maybe_exchange_device = _exchange_device


class device(context.node):
    """``with torch.node.device(1):`` makes a node the current one, as ``disttensor.node(1)``. Takes devices as well."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        super().__init__(current_node() if device is None else _place(device).node)


def _is_in_bad_fork() -> bool:
    return False


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Waits for one node (a device, or its number), or for all. Raises the earliest error not raised yet."""
    session = current.session()
    session.synchronize(None if device is None else _place(device).node)


def empty_cache() -> None:
    """Has the current node's torch give memory back that no tensor has. For CPUs there is nothing to do."""
    place = _place("node")
    if place.kernels != "cpu":
        functions.run(torch.cuda.empty_cache, node=place.node)


def _empty_host_cache() -> None:
    """Nothing: no memory is pinned for nodes."""


def memory_stats_as_nested_dict(device: torch.device | str | int = "node") -> NoReturn:
    """``torch.accelerator.memory_stats`` and what reads it (peaks, reserved). Raises NotImplementedError."""
    raise NotImplementedError(
        "a node keeps no statistics of its memory: torch.node.memory_allocated(device) says what its tensors hold"
    )


def manual_seed_all(seed: int) -> None:
    """Seeds every node; ``torch.manual_seed`` calls it."""
    session = current.current()
    if session is None:
        return
    for node in session.states:
        if node.outbox.lost is None:
            node.outbox.add(c.Seed(_signed(seed)), here())


def _signed(seed: int) -> int:
    """A seed as torch takes it, from -2**63 to 2**64 - 1, in 64 bits with a sign. Raises RuntimeError for others."""
    seed = int(seed)
    if not -(1 << 63) <= seed < 1 << 64:
        raise RuntimeError(f"Overflow when unpacking long long: a seed has 64 bits, and {seed} doesn't fit")
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def manual_seed(seed: int) -> None:
    """Seeds the current node."""
    current.session().states[current_node()].outbox.add(c.Seed(_signed(seed)), here())


def get_rng_state(device: torch.device | str | int | Place = "node") -> torch.Tensor:
    """The state of a node's default generator, as a local uint8 tensor. One round trip.

    Of a Place (what ``torch.utils.checkpoint`` passes), a tensor that stays on the node, and no round trip.
    """
    if isinstance(device, Place):
        return rng_states.keep(device)
    place = _place(device)
    reply = place.session.ask(place, c.Answer, lambda id: c.Random(id, place.name, b""), here())
    return torch.frombuffer(bytearray.fromhex(str(reply.value)), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int | Place = "node") -> None:
    """Sets it. Raises ValueError for what is no uint8 tensor."""
    if isinstance(device, Place):
        return rng_states.restore(device, new_state)  # type: ignore[arg-type]
    if new_state.dtype != torch.uint8:
        raise ValueError(f"a generator's state is a uint8 tensor, not {new_state.dtype}")
    place = _place(device)
    data = new_state.cpu().numpy().tobytes()
    place.session.ask(place, c.Done, lambda id: c.Random(id, place.name, data), here())


def memory_allocated(device: torch.device | str | int = "node") -> int:
    """Bytes that a node's tensors hold (all its devices). One round trip."""
    return usage(_place(device))[1]


def usage(place: Place) -> tuple[int, int]:
    """(live tensors, bytes of their storages) on the place's node."""
    place.session.link.flush(place.outbox)  # frees ride at the end of a message: those of before come first
    reply = place.session.ask(place, c.Answer, lambda id: c.Memory(id, ""), None)
    count, held = str(reply.value).split()
    return int(count), int(held)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def _place(device: torch.device | str | int) -> Place:
    return current.session().places.at(device)
