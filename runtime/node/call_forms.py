"""Call forms: closures, made once per template, that find a call's arguments among a store's entries.

Work that could be done per call is done here per template: which entries fill which holes, which arguments are
constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import ProtocolError
from .store import Entry

Entries = dict[int, Entry]
Run = Callable[[int, Any], Any]  #: called with a Call's ``out`` and ``args``


class ArgumentSlot:
    """One argument: a constant, a hole, or a list with holes in it."""

    __slots__ = ("holes", "kind", "parts", "value")

    @property
    def letter(self) -> str:
        """The slot's letter in a form.

        T and N for the hole of a tensor or a number, L for a list with holes, c for a constant.
        """
        return ("T" if self.holes[0] else "N") if self.kind == "hole" else "L" if self.kind == "list" else "c"

    def __init__(self, spec: c.Spec, device_of: Callable[[str], torch.device]) -> None:
        self.holes: list[bool] = []
        self.parts: list[ArgumentSlot] = []
        self.value: Any = None
        if isinstance(spec, c.Hole):
            self.kind = "hole"
            self.holes = [spec.tensor]
        elif isinstance(spec, c.Items):
            self.parts = [ArgumentSlot(s, device_of) for s in spec.items]
            self.holes = [h for p in self.parts for h in p.holes]
            self.kind = "list" if self.holes else "constant"
            self.value = [p.value for p in self.parts]
        else:
            self.kind = "constant"
            self.value = _constant(spec, device_of)


def _constant(spec: c.Spec, device_of: Callable[[str], torch.device]) -> object:
    """Converts a wire argument to Python. Raises ProtocolError for an unknown dtype, layout, format or device."""
    match spec:
        case c.DType():
            return codec.dtype_of(spec.id)
        case c.Device():
            return device_of(spec.name)
        case c.Complex():
            return complex(spec.real, spec.imag)
        case c.Layout() if 0 <= spec.id < len(codec.LAYOUTS):
            return codec.LAYOUTS[spec.id]
        case c.MemoryFormat() if 0 <= spec.id < len(codec.FORMATS):
            return codec.FORMATS[spec.id]
        case c.Layout() | c.MemoryFormat():
            raise ProtocolError(f"{spec} is unknown")
        case _:
            return spec


def caller(
    op: Callable[..., Any], positional: list[ArgumentSlot], keyword: list[tuple[str, ArgumentSlot]], e: Entries
) -> Run:
    """Returns a closure that fills the holes and calls ``op``. The most frequent forms have a closure of their own."""
    form = "".join(s.letter for s in positional)
    head = form.rstrip("c")
    tail = tuple(s.value for s in positional[len(head) :])
    if form == "TTT" and [(k, s.letter) for k, s in keyword] == [("value", "N")]:

        def call(out: int, args: Any) -> Any:
            return op(e[out - args[0]], e[out - args[1]], e[out - args[2]], value=args[3])

        return call
    if any(s.holes for _, s in keyword) or head not in _FORMS:
        return _general(op, positional, keyword, e)
    if keyword:
        op = partial(op, **{k: s.value for k, s in keyword})
    return _FORMS[head](op, tail, e)


def _t(op: Callable[..., Any], tail: tuple[Any, ...], e: Entries) -> Run:
    if tail:
        return lambda out, args: op(e[out - args[0]], *tail)
    return lambda out, args: op(e[out - args[0]])


def _tt(op: Callable[..., Any], tail: tuple[Any, ...], e: Entries) -> Run:
    if tail:
        return lambda out, args: op(e[out - args[0]], e[out - args[1]], *tail)
    return lambda out, args: op(e[out - args[0]], e[out - args[1]])


def _ttt(op: Callable[..., Any], tail: tuple[Any, ...], e: Entries) -> Run:
    return lambda out, args: op(e[out - args[0]], e[out - args[1]], e[out - args[2]], *tail)


def _tn(op: Callable[..., Any], tail: tuple[Any, ...], e: Entries) -> Run:
    if tail:
        return lambda out, args: op(e[out - args[0]], args[1], *tail)
    return lambda out, args: op(e[out - args[0]], args[1])


def _ttn(op: Callable[..., Any], tail: tuple[Any, ...], e: Entries) -> Run:
    return lambda out, args: op(e[out - args[0]], e[out - args[1]], args[2], *tail)


#: Closures by the arguments before the last constants: T a tensor, N a number.
_FORMS: dict[str, Callable[[Any, tuple[Any, ...], Entries], Run]] = {
    "T": _t,
    "TT": _tt,
    "TTT": _ttt,
    "TN": _tn,
    "TTN": _ttn,
}


def _general(op: Any, positional: list[ArgumentSlot], keyword: list[tuple[str, ArgumentSlot]], e: Entries) -> Run:
    """Returns a closure that fills the holes and calls ``op``, for any form. Positions are found once, here."""
    base = [s.value for s in positional]
    kwbase = {k: s.value for k, s in keyword}
    tensors: list[tuple[int, int]] = []
    numbers: list[tuple[int, int]] = []
    lists: list[tuple[int, int, ArgumentSlot]] = []
    whole: list[tuple[int, range]] = []  # lists of tensors, all of them holes
    named: list[tuple[str, int, ArgumentSlot]] = []
    single: list[tuple[str, int]] = []  # named numbers
    at = 0
    for i, slot in enumerate(positional):
        if slot.kind == "hole":
            (tensors if slot.holes[0] else numbers).append((i, at))
        elif slot.kind == "list" and all(p.kind == "hole" and p.holes[0] for p in slot.parts):
            whole.append((i, range(at, at + len(slot.parts))))
        elif slot.kind == "list":
            lists.append((i, at, slot))
        at += len(slot.holes)
    for k, slot in keyword:
        if slot.letter == "N":
            single.append((k, at))
        elif slot.holes:
            named.append((k, at, slot))
        at += len(slot.holes)
    nested = bool(lists or named or single)  # one test for most operators, which have none of them

    def call(out: int, args: Any) -> Any:
        values = base.copy()
        for i, a in tensors:
            values[i] = e[out - args[a]]
        for i, a in numbers:
            values[i] = args[a]
        for i, places in whole:
            values[i] = [e[out - args[a]] for a in places]
        if nested:
            for i, a, slot in lists:
                values[i] = _fill(slot, iter(args[a:]), out, e)
            if single or named:
                given = kwbase.copy()
                for k, a in single:
                    given[k] = args[a]
                for k, a, slot in named:
                    given[k] = _fill(slot, iter(args[a:]), out, e)
                return op(*values, **given)
        return op(*values, **kwbase)

    return call


def _fill(slot: ArgumentSlot, args: Iterator[Any], out: int, e: Entries) -> Any:
    if slot.kind == "hole":
        return e[out - next(args)] if slot.holes[0] else next(args)
    if slot.kind == "list":
        return [_fill(p, args, out, e) for p in slot.parts]
    return slot.value
