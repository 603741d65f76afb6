"""The first replay of a graph beside the eager program: both from the same tensors, with the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..dispatch.call_site import here
from ..dispatch.rng_states import keep, restore
from ..proxy.meta import Handle, meta_told, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.master.failures import line_of
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import GraphError
from ..session.places import Place
from .recorder import Log, Recorder

#: What engines other than the interpreter may differ by: more than torch.testing allows for one operation.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4


def verified(replay: Callable[[], Any], eager: Callable[[], Any], recorder: Recorder, given: dict[int, int]) -> Any:
    """The eager result, after a replay that gave the same. ``given``: ref of an input -> the tensor's of this call.

    Raises GraphError that lists what differs.
    """
    touched = [
        (log, at, given.get(ref, ref)) for log in recorder.logs.values() for ref, at in recorder.writers(log).items()
    ]
    before = [_clone(log, ref) for log, _, ref in touched]
    states = [(place, keep(place)) for log in recorder.logs.values() for place in _places(log)]
    replayed = [leaf for leaf in tree_leaves(replay()) if isinstance(leaf, DistributedTensor)]
    # those that the program gives back as they are have the values of the end, so copies are compared
    replayed = [leaf.detach().clone() for leaf in replayed]
    after = [_clone(log, ref) for log, _, ref in touched]
    for (log, _, ref), value in zip(touched, before, strict=True):
        _set(log, ref, value)
    for place, value in states:
        restore(place, value)
    result = eager()
    expected = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, DistributedTensor)]
    exact = recorder.engine == "interpreter"
    told = [
        f"result {i}: {text}"
        for i, (a, b) in enumerate(zip(replayed, expected, strict=True))
        if (text := _difference(a, b, exact))
    ]
    for (log, at, ref), value in zip(touched, after, strict=True):
        if text := _difference(value, _clone(log, ref), exact):
            told.append(f"what {recorder.name(log, at)} writes at {line_of(log.sites[at])}: {text}")
    if told:
        raise GraphError("the first replay and eager differ:\n  " + "\n  ".join(told))
    return result


def _places(log: Log) -> list[Place]:
    session = log.state.session
    names = session.link.hellos[log.state.rank].devices
    return [session.places.at(log.state.rank, name) for name in names if name == "cpu" or not _simulated(log)]


def _simulated(log: Log) -> bool:
    return log.state.session.link.hellos[log.state.rank].simulated


def _clone(log: Log, ref: int) -> DistributedTensor:
    """A copy of what lies under a ref, whose metadata the node tells."""
    node = log.state
    template = node.define("aten::clone", (c.Hole(True),), (), 1, None)
    out = new_ref()
    place = node.session.places.at(node.rank, "cpu")
    call = c.Call(template, out, (out - ref,))
    g = node.session.ask(place, c.Shapes, lambda id: c.Ask(id, call), here()).outs[0]
    assert g is not None
    if g.device.startswith("cuda"):
        place = node.session.places.at(node.rank, g.device)
    return proxy(Handle(out, meta_told(g, place)))


def _set(log: Log, ref: int, value: DistributedTensor) -> None:
    template = log.state.define("aten::copy_", (c.Hole(True), c.Hole(True)), (), 0, None)
    log.state.outbox.add(c.Call(template, ref, (0, ref - value._h.ref)), here())


def _difference(a: torch.Tensor, b: torch.Tensor, exact: bool) -> str:
    """ "" for tensors that are equal, as far as their engine makes them so."""
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
