"""Asks a node for the geometry of what an operation makes or writes, by having it done.

That waits for one round trip: once per signature, or at each call where shapes depend on the data. What the node
refuses is raised at the user's line, and leaves the operands as local torch does.
"""

from __future__ import annotations

from typing import Any

from ..proxy.meta import Handle, Meta, Shared, meta_told, new_ref
from ..proxy.proxy import DistributedTensor, proxy, set_geometry
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError, RanksDiffer
from ..session.caches import drop_plans
from ..session.places import Place
from . import meta_inference
from .call_site import here
from .inplace_and_multi import check_write
from .op_plan import OpEntry, holes_of


def make_room(place: Place) -> None:
    """Bounds the templates of a node. Callers define a template whose arguments may vary only after this."""
    if place.home.generation_full:
        drop_plans()
        place.home.start_generation()


def ask(
    entry: OpEntry,
    args: Any,
    kwargs: Any,
    place: Place,
    call: list[Any],
    out: int,
    length: int | None = None,
    warned: bool = False,
) -> tuple[Any, Any]:
    """Runs the operation on the node, waits for its outputs' geometry, and returns (proxies, their metas).

    ``length``: that of the list which it returns, where it is known. ``warned``: the script warns of such calls.
    """
    returns = entry.op._schema.returns
    listed = any(str(r.type) != "Tensor" for r in returns)
    count = len(returns) if not listed else length or meta_inference.list_length(entry.name, args)
    refs = [out, *(new_ref() for _ in range(1, count))]
    metas = _geometries(entry, args, kwargs, place, call, refs, warned)
    proxies = [None if meta is None else proxy(Handle(ref, meta)) for ref, meta in zip(refs, metas, strict=True)]
    if listed:
        return proxies, metas
    return (proxies[0], metas[0]) if len(refs) == 1 else (tuple(proxies), tuple(metas))


#: The arguments that a call has given another geometry, by position or name, each with its new one.
Reshaped = tuple[tuple[int | str, Meta], ...]


def ask_written(
    entry: OpEntry, args: Any, kwargs: Any, place: Place, call: list[Any], out: int, warned: bool = False
) -> tuple[Any, Reshaped | None]:
    """Runs an operation that writes its arguments, waits, and has each ``out=`` know the geometry that it has then.
    ``warned``: the script warns of such calls.

    Returns what the operator returns, and which arguments have another geometry: None where these are in a list.
    """
    answered = entry.returned or entry.writes  # the node tells of what is returned, or of what was written
    values = [(w, kwargs.get(w) if isinstance(w, str) else args[w] if w < len(args) else None) for w in answered]
    targets = [(w, t) for w, v in values for t in (v if isinstance(v, (list, tuple)) else [] if v is None else [v])]
    for _, target in targets:
        if type(target._h) is Shared:
            check_write(target)
    aliases = [_alias(t, place) if isinstance(w, str) else None for w, t in targets]
    moved = {out - t._h.ref: out - a.ref for (_, t), a in zip(targets, aliases, strict=True) if a is not None}
    if moved:
        holes = [*holes_of(entry.specs(args, kwargs, DistributedTensor, place.name))]
        call = [moved.get(v, v) if hole else v for v, hole in zip(call, holes, strict=True)]
    refs = [out, *(new_ref() for _ in targets[1:])]
    metas = _geometries(entry, args, kwargs, place, call, refs, warned)
    reshaped: list[tuple[int | str, Meta]] = []
    for (where, target), ref, meta in zip(targets, refs, metas, strict=True):
        assert meta is not None
        handle = Handle(ref, meta)  # a second name of what was written, of which one is freed
        if meta is not target._h.meta:
            set_geometry(target, handle)
            reshaped.append((where, meta))
    results = [args[w] if isinstance(w, int) else kwargs[w] for w in entry.returned]
    result = results[0] if len(results) == 1 else tuple(results) if results else None
    listed = any(isinstance(v, (list, tuple)) for _, v in values)
    return result, None if listed and reshaped else tuple(reshaped)


def _alias(tensor: DistributedTensor, place: Place) -> Handle:
    """Issues an alias of a tensor that is about to get another geometry: a handle's never changes, and others may share
    the tensor's own."""
    handle = Handle(new_ref(), tensor._h.meta)
    same = place.define("aten::alias", (c.Hole(True),), (), 1, here())
    commands = place.outbox.commands
    commands += (c.Call(same, handle.ref, (handle.ref - tensor._h.ref,)), here())
    return handle


def _geometries(
    entry: OpEntry, args: Any, kwargs: Any, place: Place, call: list[Any], refs: list[int], warned: bool
) -> list[Meta | None]:
    """Runs the operation on the node, with ``refs`` for its results, and returns their metas."""
    specs = entry.specs(args, kwargs, DistributedTensor, place.name)
    site = here()
    make_room(place)
    template = place.define(entry.name, *specs, len(refs), site, warned)
    call = [*call, *(refs[0] - r for r in refs[1:])]
    place.outbox.free_dead()  # what is asked for may be large
    one = c.Call(template, refs[0], tuple(call))
    try:
        reply = place.session.ask(place, c.Shapes, lambda id: c.Ask(id, one), site)
    except BaseException as e:
        place.dead.extend(refs)  # nodes may have made them: of a mesh those that have not failed
        if not isinstance(e, RanksDiffer):
            raise
        raise RanksDiffer(
            f"{entry.name}: {e}; dt.run(function, node=mesh, distributed=True) runs what differs by rank"
        ) from None
    if len(reply.outs) != len(refs):
        raise DisttensorError(f"{entry.name}: {place} answered {reply} where {len(refs)} shapes were due")
    return [None if g is None else meta_told(g, place) for g in reply.outs]
