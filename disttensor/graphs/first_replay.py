"""Compares the first replay of a graph with the eager program, from the same tensors and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..dispatch import seen_at
from ..dispatch.call_site import here
from ..dispatch.rng_states import keep, restore
from ..proxy.meta import Handle, meta_told, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.master.failures import line_of
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import GraphError
from ..session.places import Place, varied
from ..session.session import Session
from .recorder import GraphRecorder, Log

#: The tolerance for engines other than the interpreter: more than torch.testing allows for one operation.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4


def verified(
    replay: Callable[[], Any], eager: Callable[[], Any], recorder: GraphRecorder, given: dict[int, int]
) -> Any:
    """Replays, runs the eager program from the same state, and returns the eager result.

    ``given``: ref of a recorded input -> ref of this call's argument. Raises GraphError with a list of the differences.
    """
    touched = [
        (log, at, given.get(ref, ref)) for log in recorder.logs.values() for ref, at in recorder.writers(log).items()
    ]
    before = [_clone(recorder.session, log, ref) for log, _, ref in touched]
    states = [(place, along, _varying(along, keep, place)) for place, along in _drawing(recorder)]
    replayed = [leaf for leaf in tree_leaves(replay()) if isinstance(leaf, DistributedTensor)]
    # arguments that the program returns as they are get their final values later, so copies are compared
    replayed = [leaf.detach().clone() for leaf in replayed]
    after = [_clone(recorder.session, log, ref) for log, _, ref in touched]
    for (log, _, ref), value in zip(touched, before, strict=True):
        _set(log, ref, value)
    for place, along, value in states:
        _varying(along, restore, place, value)
    result = eager()
    expected = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, DistributedTensor)]
    exact = recorder.engine == "interpreter"
    told = [
        f"result {i}: {text}"
        for i, (whole, wanted) in enumerate(zip(replayed, expected, strict=True))
        for a, b in zip(_shards(whole), _shards(wanted), strict=True)
        if (text := _difference(a, b, exact))
    ]
    for (log, at, ref), value in zip(touched, after, strict=True):
        if text := _difference(value, _clone(recorder.session, log, ref), exact):
            told.append(f"what {recorder.name(log, at)} writes at {line_of(log.sites[at])}: {text}")
    if told:
        raise GraphError("the first replay and eager differ:\n  " + "\n  ".join(told))
    return result


def _drawing(recorder: GraphRecorder) -> list[tuple[Place, tuple[str, ...]]]:
    """Returns the places whose generators the program may draw from, with the dims along which the numbers vary."""
    if recorder.draws is not None:
        return list(dict.fromkeys((draw.place, draw.along) for draw in recorder.draws))
    places, nodes = recorder.session.places, [log.node for log in recorder.logs.values()]
    return [
        (places.at(node.rank, name), ())
        for node in nodes
        for name in node.devices
        if name == "cpu" or not node.hello.simulated
    ]


def _varying(along: tuple[str, ...], function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function where random numbers vary along dims."""
    token = varied.set(along)
    try:
        return function(*args)
    finally:
        varied.reset(token)


def _shards(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the tensors on single nodes that a tensor consists of."""
    place = tensor._place  # type: ignore[attr-defined]
    return [seen_at.alias(tensor, member) for member in place.members]


def _clone(session: Session, log: Log, ref: int) -> DistributedTensor:
    """Returns a copy of the tensor under a ref, with metadata that the node is asked for. One round trip."""
    node = log.node
    template = node.define("aten::clone", (c.Hole(True),), (), 1, None)
    out = new_ref()
    place = session.places.at(node.rank, "cpu")
    call = c.Call(template, out, (out - ref,))
    g = session.ask(place, c.Shapes, lambda id: c.Ask(id, call), here()).outs[0]
    assert g is not None
    if g.device.startswith("cuda"):
        place = session.places.at(node.rank, g.device)
    return proxy(Handle(out, meta_told(g, place)))


def _set(log: Log, ref: int, value: DistributedTensor) -> None:
    template = log.node.define("aten::copy_", (c.Hole(True), c.Hole(True)), (), 0, None)
    log.node.outbox.add(c.Call(template, ref, (0, ref - value._h.ref)), here())


def _difference(a: torch.Tensor, b: torch.Tensor, exact: bool) -> str:
    """Returns a text on how two tensors differ; "" if they are equal (``exact``), or within tolerance."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} in the replay, {tuple(b.shape)} {b.dtype} in eager"
    x, y = a.cpu(), b.cpu()
    both = (x == y) | ((x != x) & (y != y))
    if not exact and x.dtype.is_floating_point:
        both |= torch.isclose(x, y, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True)
    wrong = (~both).nonzero()
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    return (
        f"{len(wrong)} of {x.numel()} elements of {tuple(x.shape)} differ; at {list(at)} the replay has "
        f"{x[at].item()!r} and eager {y[at].item()!r}"
    )
