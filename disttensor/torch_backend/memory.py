"""The memory of nodes, as torch.cuda tells that of GPUs: the functions of ``torch.node`` about memory.

Each asks the node, in one round trip, after all that was issued. A node's CPU has no allocator that counts, so the node
counts its tensors itself (docs/MEMORY.md); of a CUDA device it tells what torch's own allocator counts there.

``device`` is a device ("node:1"), a node's number, or None for the current node. Functions raise ValueError or
RuntimeError for a node or device that does not exist, NodeLost, DisttensorError without a session; and for a mesh's
device where they return numbers.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any, TypeAlias

import torch

from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError
from ..session import current
from ..session.holdings import amounts_held, by_line, size
from ..session.places import MeshPlace, NodePlace, Place

Where: TypeAlias = torch.device | str | int | None

_BYTES, _RESERVED = "allocated_bytes.all", "reserved_bytes.all"
#: The most tensors that a node is asked to name for a summary.
_NAMED = 1000


def memory_allocated(device: Where = None) -> int:
    """Returns the bytes that tensors hold on a device. Memory that tensors share is counted once."""
    return _figures(device, "memory_allocated")[f"{_BYTES}.current"]


def max_memory_allocated(device: Where = None) -> int:
    """Returns the most bytes that tensors have held on a device since ``reset_peak_memory_stats``.

    A CPU counts from the first call of this or ``reset_peak_memory_stats`` on, as counting costs something: a first
    call of this returns what is held now, and warns. What an operator takes and gives back is not counted on a CPU.
    """
    told = _ask(_place(device, "max_memory_allocated"), "count")
    if not told.counted:
        warnings.warn(
            "a node's CPU counts the peak of its memory from now on: torch.node.reset_peak_memory_stats(device) at the "
            "beginning has it count from there",
            stacklevel=2,
        )
    return dict(told.figures)[f"{_BYTES}.peak"]


def memory_reserved(device: Where = None) -> int:
    """Returns the bytes that a CUDA device's allocator has reserved; for a CPU those that the node's process has in
    memory, with Python, torch and all else."""
    return _figures(device, "memory_reserved")[f"{_RESERVED}.current"]


def max_memory_reserved(device: Where = None) -> int:
    """Returns the peak of ``memory_reserved`` since ``reset_peak_memory_stats``, or since the node's start.

    For a CPU it is the kernel's own figure, which has the insides of operators, too.
    """
    return _figures(device, "max_memory_reserved")[f"{_RESERVED}.peak"]


def reset_peak_memory_stats(device: Where = None) -> None:
    """Has the peaks of a device begin anew; of a mesh's device those of all its nodes."""
    for place in _places(device):
        _ask(place, "reset")


def reset_accumulated_memory_stats(device: Where = None) -> None:
    """Has the sums of what was allocated and freed begin anew; of a mesh's device those of all its nodes."""
    for place in _places(device):
        _ask(place, "accumulated")


def memory_stats(device: Where = None) -> dict[str, int]:
    """Returns all statistics of a device's memory, by torch.cuda's names.

    A CPU has "allocated_bytes.all" and "allocation.all" (tensors), each with ".current", ".peak", ".allocated" and
    ".freed", which it counts from the first call on; "reserved_bytes.all" with ".current" and ".peak"; "num_ooms".
    """
    return OrderedDict(_ask(_place(device, "memory_stats"), "count").figures)


def memory_stats_as_nested_dict(device: Where = None) -> dict[str, Any]:
    """Returns ``memory_stats`` as nested dictionaries. (``torch.accelerator.memory_stats`` asks for them.)"""
    nested: dict[str, Any] = {}
    for name, figure in _ask(_place(device, "memory_stats"), "count").figures:
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = figure
    return nested


def mem_get_info(device: Where = None) -> tuple[int, int]:
    """Returns (free, total) bytes of a device; of a CPU those of its host, or of the node's control group where that
    has less."""
    told = _ask(_place(device, "mem_get_info")).holdings
    return told.free, told.total


def memory_summary(device: Where = None, abbreviated: bool = False) -> str:
    """Returns a text about a device's memory: how much tensors hold and held at their peak, and the largest tensors by
    the lines of the program that made them. For a mesh's device it has a part for each of its nodes.

    ``abbreviated`` leaves the tensors out. Lines are known of large tensors (512 KiB or more).
    """
    return "\n".join(_summary(place, abbreviated) for place in _places(device))


def empty_cache(device: Where = None) -> None:
    """Has a node give memory back to its system that it keeps and does not use, and waits for it: torch's on a CUDA
    device, malloc's on a CPU."""
    for place in _places(device):
        _ask(place, "trim")


def _summary(place: NodePlace, abbreviated: bool) -> str:
    told = _ask(place, largest=0 if abbreviated else _NAMED)
    figures, hello = dict(told.figures), place.hello
    peak = figures.get(f"{_BYTES}.peak")
    lines = [
        f"node {place.node} {place.name} (host {hello.host}, pid {hello.pid})",
        f"  tensors   {amounts_held(told.holdings)}",
        f"  peak      {'not counted: torch.node.reset_peak_memory_stats() begins' if peak is None else size(peak)}",
        f"  reserved  {size(figures[f'{_RESERVED}.current'])}, {size(figures[f'{_RESERVED}.peak'])} at its peak",
    ]
    if told.holdings.largest:
        node = place.session.nodes[place.node]
        makers = node.makers({each.ref for each in told.holdings.largest})
        lines += ["  the largest, by the lines that made them", *map(str, by_line(told.holdings, makers))]
    return "\n".join(lines)


def _figures(device: Where, what: str) -> dict[str, int]:
    return dict(_ask(_place(device, what)).figures)


def _ask(place: Place, first: str = "", largest: int = 0) -> c.MemoryFigures:
    place.session.link.sender.flush_all()  # frees ride at the end of messages: those of before come first
    return place.session.ask(place, c.MemoryFigures, lambda id: c.MemoryStats(id, place.name, first, largest), None)


def _places(device: Where) -> tuple[NodePlace, ...]:
    return current.session().places.at("node" if device is None else device).members


def _place(device: Where, what: str) -> NodePlace:
    """Returns the place of one node. Raises DisttensorError for a mesh's: its nodes differ, and none is all."""
    place = current.session().places.at("node" if device is None else device)
    # each node has figures of its own
    if isinstance(place, MeshPlace):
        raise DisttensorError(
            f"torch.node.{what} is about one node, and {place} has {len(place.ranks)}: "
            f"[torch.node.{what}(rank) for rank in {list(place.ranks)[:8]}{'...' if len(place.ranks) > 8 else ''}] are "
            "theirs, and torch.node.memory_summary(mesh.device) is a text about each"
        )
    return place
