"""``dt.views.put``, ``get`` and ``accumulate``: a copy into or from a part of a tensor on a node, or a sum there, for
which nothing is called there.

All are ordinary commands of the nodes concerned, in the order in which they are issued: a put is seen by all that is
issued after it, and a get has the values of all that was issued before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, cast, overload

import torch

from ..errors.argument_checks import flag, one_of, spelled
from ..futures.work import Work, fetch
from ..proxy.proxy import DistributedTensor, local_name
from ..runtime.channel.base import Arrival
from ..runtime.master.route import waits
from ..session.current import session_of


@overload
def put(view: torch.Tensor, value: Any, async_op: Literal[False] = False) -> None: ...


@overload
def put(view: torch.Tensor, value: Any, async_op: Literal[True]) -> Work[torch.Tensor]: ...


@overload
def put(view: torch.Tensor, value: Any, async_op: bool) -> Work[torch.Tensor] | None: ...


@spelled
def put(view: torch.Tensor, value: Any, async_op: bool = False) -> Work[torch.Tensor] | None:
    """Writes ``value`` into ``view``, a tensor on a node or any part of one, and returns at once.

        >>> table = torch.zeros(2, 3, device="node:1")
        >>> dt.views.put(table[:, ::2], torch.tensor([1, 2]))
        >>> dt.views.put(table[0], table[1])
        >>> table.tolist()
        [[1.0, 0.0, 2.0], [1.0, 0.0, 2.0]]

    Args:
        view: where to write: strided, transposed, of any dtype, as indexing and ``view`` give it.
        value: a local tensor, a tensor on any node (whose bytes do not come through the script), or what
            ``torch.as_tensor`` takes. It is expanded to the view's shape and converted to its dtype, as by ``copy_``.
            It may be changed at once. It may overlap ``view``: then it has the values from before.
        async_op: return a Work, whose ``result()`` is ``view`` once it is written, instead of None.

    Gradients are not recorded: it is a write to memory, as under ``torch.no_grad()``. Raises TypeError for a ``view``
    that is not on a node, RuntimeError for a value whose shape does not fit, or a view some of whose elements are one
    (``expand``); NodeLost.
    """
    target = _on_a_node(view, "put: the view")
    flag("async_op", async_op)
    if async_op:
        waits("dt.views.put with async_op=True")
    with torch.no_grad():
        target.detach().copy_(_operand(value, target))
    return _After(target, lambda: view) if async_op else None


#: What ``accumulate`` does, by name.
Into = Literal["sum", "product", "min", "max"]
_INTO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": lambda x, y: torch.minimum(x, y.expand(x.shape), out=x),
    "max": lambda x, y: torch.maximum(x, y.expand(x.shape), out=x),
}


@overload
def accumulate(view: torch.Tensor, value: Any, op: Into = "sum", async_op: Literal[False] = False) -> None: ...


@overload
def accumulate(view: torch.Tensor, value: Any, op: Into = "sum", *, async_op: Literal[True]) -> Work[torch.Tensor]: ...


@overload
def accumulate(
    view: torch.Tensor, value: Any, op: Into = "sum", async_op: bool = False
) -> Work[torch.Tensor] | None: ...


@spelled
def accumulate(view: torch.Tensor, value: Any, op: Into = "sum", async_op: bool = False) -> Work[torch.Tensor] | None:
    """Adds ``value`` to ``view``, a tensor on a node or any part of one, on that node, and returns at once.

        >>> table = torch.ones(2, 3, device="node:1")
        >>> dt.views.accumulate(table[:, ::2], torch.tensor([1, 2], device="node:0"))
        >>> table.tolist()
        [[2.0, 1.0, 3.0], [2.0, 1.0, 3.0]]

    Args:
        view: what to change: strided, transposed, of any dtype, as indexing and ``view`` give it.
        value: as for ``put``: its bytes go to the view's node, converted to the view's dtype, and nothing comes back.
        op: "sum", "product", "min" or "max", element by element.
        async_op: return a Work, whose ``result()`` is ``view`` once it is changed, instead of None.

    What one accumulates is there before the next one begins, whoever's it is: the node does them in the order of the
    script, so no two updates get lost in each other. Gradients are not recorded. Raises ValueError for another ``op``,
    and else as ``put``.
    """
    target = _on_a_node(view, "accumulate: the view")
    one_of("accumulate: op", op, tuple(_INTO))
    flag("async_op", async_op)
    if async_op:
        waits("dt.views.accumulate with async_op=True")
    with torch.no_grad():
        _INTO[op](target.detach(), _operand(value, target).to(target.device, target.dtype))
    return _After(target, lambda: view) if async_op else None


def _operand(value: Any, target: DistributedTensor) -> Any:
    """Returns what is written to ``target``, with the values from before where the two may overlap."""
    source: Any = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    source = source.detach()
    if isinstance(source, DistributedTensor) and source._place is target._place:
        return source.clone()  # torch's kernel would read what it has written
    return source


@overload
def get(
    view: torch.Tensor,
    into: torch.Tensor | None = None,
    node: int | str | torch.device | None = None,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def get(
    view: torch.Tensor,
    into: torch.Tensor | None = None,
    node: int | str | torch.device | None = None,
    *,
    async_op: Literal[True],
) -> Work[torch.Tensor]: ...


@spelled
def get(
    view: torch.Tensor,
    into: torch.Tensor | None = None,
    node: int | str | torch.device | None = None,
    async_op: bool = False,
) -> Any:
    """Reads ``view``, a tensor on a node or any part of one: returns a local tensor, one on ``node``, or writes
    ``into``.

        >>> table = torch.arange(6.0, device="node:1").view(2, 3)
        >>> dt.views.get(table[:, 1])
        tensor([1., 4.])
        >>> dt.views.get(table.t(), node=0)[2].tolist()
        [2.0, 5.0]

    Args:
        view: what to read: strided, transposed, of any dtype.
        into: a tensor to write, here or on any node, of any dtype, to whose shape the view is expanded. It may overlap
            ``view``: then it gets the values from before.
        node: a node, by number or as "node:1", on which a new tensor is made. The bytes do not come through the script.
        async_op: return a Work, whose ``result()`` is the tensor. A local ``into`` is written by ``wait`` or
            ``result``.

    Returns the tensor: new, or ``into``. It waits only for what comes to the script, and not if ``async_op``. Raises
    TypeError for a ``view`` that is not on a node, or ``into`` beside ``node``; RuntimeError for shapes that do not
    fit; the error that made the view fail; NodeLost.
    """
    source = _on_a_node(view, "get: the view")
    flag("async_op", async_op)
    if into is not None and node is not None:
        raise TypeError("get takes into= or node=: the tensor to write, or the node of a new one")
    if into is not None and not isinstance(into, torch.Tensor):
        raise TypeError(f"get: into is a tensor, not a {type(into).__name__}")
    if isinstance(into, DistributedTensor):
        work = put(cast(torch.Tensor, into), source, async_op)
        return into if work is None else work
    if node is not None:
        place = session_of(source._place).places.at(node)
        there = cast(DistributedTensor, source.detach().to(place.device, copy=True))
        if async_op:
            waits("dt.views.get with async_op=True")
        return _After(there, lambda: there) if async_op else there
    if into is not None and torch.broadcast_shapes(source.shape, into.shape) != into.shape:
        raise RuntimeError(f"get: the view has the shape {tuple(source.shape)}, into {tuple(into.shape)}")
    work = fetch(source) if into is None else _Into(source, into)
    return work if async_op else work.result()


class _After(Work[Any]):
    """A write on a node under way: it has ended when the written tensor could be read there. Brings one element."""

    def __init__(self, written: DistributedTensor, value: Callable[[], Any]) -> None:
        probe = written.detach()
        probe = probe.as_strided((min(probe.numel(), 1),), (1,))
        fetched = fetch(probe)
        super().__init__(fetched._session, written, cast(Arrival, fetched._transfer))
        self._result = value

    def _value(self) -> torch.Tensor:
        return self._result()  # type: ignore[no-any-return]


class _Into(Work[torch.Tensor]):
    """A tensor on its way into local memory, which is written once, by the first who waits."""

    def __init__(self, source: DistributedTensor, into: torch.Tensor) -> None:
        fetched = fetch(source)
        super().__init__(fetched._session, source, cast(Arrival, fetched._transfer))
        self._into: torch.Tensor = into
        self._written = False
        self._writing = threading.Lock()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        super().wait(timeout)
        self._write()
        return True

    def _write(self) -> None:
        with self._writing, torch.no_grad():
            if not self._written:
                self._into.detach().copy_(self._transfer.tensor)  # type: ignore[attr-defined]
                self._written = True

    def _value(self) -> torch.Tensor:
        self._write()
        return self._into


def _on_a_node(tensor: Any, what: str) -> DistributedTensor:
    """Returns ``tensor``. Raises TypeError for what is not on a node."""
    if not isinstance(tensor, DistributedTensor):
        raise TypeError(f"{what} has to be a tensor on a node, not {local_name(tensor)}")
    found: DistributedTensor = tensor
    return found
