"""The other views of what an asynchronous collective is writing, which can't be used until its ``wait()``.

A node does such a collective beside what it is given next. What uses the tensor itself waits there; what uses another
view of its memory, which is another tensor to the node, does not, so the script refuses it at its line. It gives these
views handles that have no ref (``Busy``): whatever uses one asks for it (``materialise``), and nothing else looks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..dispatch.call_site import here
from ..futures.listening import GroupEnd
from ..futures.work import Work
from ..proxy.meta import APART, Busy, Handle, Lazy, Meta, Shared, live_proxies, minted_refs
from ..proxy.proxy import DistributedTensor
from ..runtime.master.failures import Site, line_of
from ..runtime.protocol.errors import DisttensorError

#: Elements up to which it is found out which memory a view with gaps covers; a larger one covers all between its ends.
_EXACTLY = 1 << 22


class Writing:
    """One asynchronous collective, and the views that can't be used before its end has been waited for."""

    def __init__(self, work: Work[Any], ended: GroupEnd, site: Site | None) -> None:
        """``ended`` tells when the collective has ended. It must not hold the tensors, nor this object the handles that
        hold it: the collector does not know handles, so it would never free such a cycle."""
        self._work, self._text, self._ended = weakref.ref(work), work._text, ended
        self._session = work._session
        self._site, self._epoch = site, work._session.synchronized
        self._views: list[weakref.ref[Any]] = []
        self._over = False

    def busy(self, view: DistributedTensor) -> None:
        """Has a view not be used until the end."""
        view._h = Busy(0, view._h.meta, view._h, self)
        self._views.append(weakref.ref(view))

    def end(self) -> None:
        """Gives the views back: the script has waited."""
        self._over = True
        for view in self._views:
            found = view()
            if found is not None and isinstance(found._h, Busy) and found._h.writing is self:
                found._h = found._h.owner
        self._views.clear()

    def check(self) -> None:
        """Returns once the collective has ended, if the script has waited for that, or can't any more. Raises
        RuntimeError where it still has to."""
        if self._over or self._session.synchronized != self._epoch:
            self.end()
            return
        if self._work() is None:  # nobody can wait for it but this line
            with suppress(DisttensorError):  # the session, or a node, is gone: what uses the view says so
                self._ended.wait_for_all(None)
            self.end()
            return
        raise RuntimeError(
            f"this is a view of what {self._text} is writing, since {line_of(self._site)}: nothing orders the two. "
            "Call wait() on its Work first"
        )


def guard(written: Sequence[Any], work: Work[Any], ended: GroupEnd) -> Writing | None:
    """Refuses uses of the other views of what a collective writes, until a wait for its end, which ``ended`` tells of.
    It looks at each tensor for such views, and returns None where there are none. Called below the user's line.

    A view that was not used yet holds the tensor's handle, others hold the tensor as ``_base``.
    """
    count = sys.getrefcount
    shared = [
        tensor
        for tensor in written
        if tensor._is_view() or count(tensor._h) > 2 or (tensor._use_count() > 1 and _has_views(tensor))
    ]
    if not shared:
        return None
    writing = Writing(work, ended, here())
    names = [(each, set(_names(each))) for each in _used()]
    mine = {id(tensor._h) for tensor in written}
    for tensor in shared:
        for view in _relatives(tensor, names):
            if id(_origin(view._h)) not in mine and _overlap(tensor._h.meta, view._h.meta):
                writing.busy(view)
    return writing


def _used() -> list[Any]:
    """Returns the script's remote tensors."""
    return [each for each in live_proxies() if "_h" in each.__dict__]


#: The number of refs that were minted when it was last looked for tensors that have views, and their ids then.
_with_views: tuple[int, frozenset[int]] = (-1, frozenset())


def _has_views(tensor: Any) -> bool:
    """Returns whether a tensor that others hold has views.

    A parameter of which it is the gradient holds it, too, and autograd: so all tensors are looked at, once for as long
    as no view is made on a node, which mints a ref. A loop over gradients looks once.
    """
    global _with_views
    minted = minted_refs()
    if _with_views[0] != minted:
        bases = (each._base for each in _used())
        _with_views = minted, frozenset(id(base) for base in bases if base is not None)
    return id(tensor) in _with_views[1]


def _origin(handle: Handle) -> Handle:
    """Returns the handle that owns what another one names."""
    while isinstance(handle, Shared):
        handle = handle.owner
    return handle


def _names(tensor: Any) -> Iterable[int]:
    """Yields what shows that tensors share memory: torch's base of a view, and handles."""
    yield id(tensor if tensor._base is None else tensor._base)
    handle = tensor._h
    while handle is not None:
        yield id(handle)
        handle = handle.owner if isinstance(handle, Shared) else handle.base if isinstance(handle, Lazy) else None


def _relatives(tensor: Any, proxies: Sequence[tuple[Any, set[int]]]) -> list[Any]:
    """Returns those of ``proxies``, given with their names, that are in the same memory as a tensor."""
    known, found = set(_names(tensor)), {id(tensor)}
    relatives: list[Any] = []
    more = True
    while more:
        more = False
        for each, names in proxies:
            if id(each) not in found and not known.isdisjoint(names):
                known |= names
                found.add(id(each))
                relatives.append(each)
                more = True
    return relatives


def _span(meta: Meta) -> tuple[int, int]:
    """Returns the first byte of a tensor in its memory, and the one after the last."""
    if not meta.numel:
        return 0, 0
    last = meta.offset + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride, strict=True))
    return meta.offset * meta.dtype.itemsize, (last + 1) * meta.dtype.itemsize


def _overlap(one: Meta, other: Meta) -> bool:
    """Returns whether two tensors in one memory have bytes in common."""
    if max(one.offset, other.offset) >= APART:  # where these start, differs between ranks
        return bool(one.numel and other.numel)
    (a, b), (start, end) = _span(one), _span(other)
    if max(a, start) >= min(b, end):
        return False
    if max(b, end) > _EXACTLY:
        return True
    covered = [torch.zeros(max(b, end), dtype=torch.bool, device="cpu") for _ in range(2)]
    for meta, bytes_ in zip((one, other), covered, strict=True):
        size = meta.dtype.itemsize
        strides = (*(step * size for step in meta.stride), 1)
        bytes_.as_strided((*meta.shape, size), strides, meta.offset * size).fill_(True)
    return bool((covered[0] & covered[1]).any())
