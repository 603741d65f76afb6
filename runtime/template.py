"""L4: templates: an operator with its static arguments, turned once into a closure that runs it on a store's entries.

What could be computed per call is computed here per template: which entries go where, what is constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import codec
from . import command as c
from .errors import ProtocolError
from .ops import AllowList
from .store import Entry

Entries = dict[int, Entry]
Run = Callable[[int, tuple[c.Plain, ...]], Any]


class Template:
    """``run(out, args)`` executes and stores the outputs; ``call(out, args)`` executes and returns the result."""

    __slots__ = ("call", "holes", "mutated", "name", "outs", "run")

    def __init__(
        self, define: c.Define, allow: AllowList, entries: Entries, device_of: Callable[[str], torch.device]
    ) -> None:
        """Raises ProtocolError for an operator or argument that this node doesn't take."""
        op = allow.resolve(define.op)
        self.name = define.op
        self.outs = define.outs
        positional = [_Slot(s, device_of) for s in define.args]
        keyword = [(k, _Slot(s, device_of)) for k, s in define.kwargs]
        #: for each of a Call's arguments, whether it is a tensor
        self.holes = tuple(hole for slot in (*positional, *(s for _, s in keyword)) for hole in slot.holes)
        #: indices into a Call's arguments of the tensors that the operator writes
        self.mutated = tuple(_mutated(op, positional, dict(keyword)))
        self.call = _caller(op._op, positional, keyword, entries)
        returns = op._schema.returns
        single = len(returns) == 1 and str(returns[0].type) == "Tensor"  # and not a list of one
        holes = "".join("T" if h else "N" for h in self.holes)
        self.run = self._store(entries, holes, keyword, positional, op._op, single)

    def _store(
        self, e: Entries, holes: str, keyword: list[tuple[str, _Slot]], positional: list[_Slot], op: Any, single: bool
    ) -> Run:
        """``call`` and what stores its outputs; the shapes that make up most programs have closures of their own."""
        call = self.call
        plain = single and not keyword and all(s.kind == "hole" for s in positional)
        if self.outs == 1 and plain and holes == "T":

            def run(out: int, args: Any) -> None:
                e[out] = op(e[out - args[0]])
        elif self.outs == 1 and plain and holes == "TT":

            def run(out: int, args: Any) -> None:
                e[out] = op(e[out - args[0]], e[out - args[1]])
        elif self.outs == 1 and plain and holes == "TN":

            def run(out: int, args: Any) -> None:
                e[out] = op(e[out - args[0]], args[1])
        elif self.outs == 1:

            def run(out: int, args: Any) -> None:
                result = call(out, args)
                if type(result) is not torch.Tensor:
                    (result,) = tensors_of(result)
                e[out] = result
        elif self.outs == 0:
            return call
        else:
            count, first = self.outs, len(self.holes)

            def run(out: int, args: Any) -> None:
                results = tensors_of(call(out, args))
                if len(results) != count:
                    raise ProtocolError(f"{self.name} gave {len(results)} tensors where the master expects {count}")
                e[out] = results[0]
                for result, distance in zip(results[1:], args[first:], strict=True):
                    e[out - distance] = result

        return run

    def operands(self, out: int, args: tuple[c.Plain, ...]) -> list[int]:
        """The refs that a call reads or writes."""
        return [out - int(args[i]) for i, hole in enumerate(self.holes) if hole]  # type: ignore[arg-type]

    def results(self, out: int, args: tuple[c.Plain, ...]) -> list[int]:
        """The refs that a call makes."""
        return [out, *(out - int(d) for d in args[len(self.holes) :])] if self.outs else []  # type: ignore[arg-type]


class Broken(Template):
    """A template that this node refused. Each call of it raises why."""

    __slots__ = ()

    def __init__(self, define: c.Define, why: Exception) -> None:
        self.name, self.outs, self.mutated = define.op, define.outs, ()
        self.holes = tuple(_holes((*define.args, *(s for _, s in define.kwargs))))

        def refuse(out: int, args: tuple[c.Plain, ...]) -> Any:
            raise why.with_traceback(None)

        self.run = self.call = refuse


def _holes(specs: tuple[c.Spec, ...]) -> Iterator[bool]:
    for spec in specs:
        if isinstance(spec, c.Hole):
            yield spec.tensor
        elif isinstance(spec, c.Items):
            yield from _holes(spec.items)


class _Slot:
    """One argument: a constant, a hole, or a list with holes in it."""

    __slots__ = ("holes", "kind", "parts", "value")

    def __init__(self, spec: c.Spec, device_of: Callable[[str], torch.device]) -> None:
        self.holes: list[bool] = []
        self.parts: list[_Slot] = []
        self.value: Any = None
        if isinstance(spec, c.Hole):
            self.kind = "hole"
            self.holes = [spec.tensor]
        elif isinstance(spec, c.Items):
            self.parts = [_Slot(s, device_of) for s in spec.items]
            self.holes = [h for p in self.parts for h in p.holes]
            self.kind = "list" if self.holes else "constant"
            self.value = [p.value for p in self.parts]
        else:
            self.kind = "constant"
            self.value = constant(spec, device_of)


def constant(spec: c.Spec, device_of: Callable[[str], torch.device]) -> object:
    """A wire argument as Python has it. Raises ProtocolError for an unknown dtype, layout, format or device."""
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


def _caller(op: Any, positional: list[_Slot], keyword: list[tuple[str, _Slot]], e: Entries) -> Run:
    """A closure that fills the holes and calls. Positions are found once, here."""
    base = [s.value for s in positional]
    kwbase = {k: s.value for k, s in keyword}
    tensors: list[tuple[int, int]] = []
    numbers: list[tuple[int, int]] = []
    lists: list[tuple[int, int, _Slot]] = []
    named: list[tuple[str, int, _Slot]] = []
    at = 0
    for i, slot in enumerate(positional):
        if slot.kind == "hole":
            (tensors if slot.holes[0] else numbers).append((i, at))
        elif slot.kind == "list":
            lists.append((i, at, slot))
        at += len(slot.holes)
    for k, slot in keyword:
        if slot.holes:
            named.append((k, at, slot))
        at += len(slot.holes)
    nested = bool(lists or named)  # one look for most operators, which have neither

    def call(out: int, args: Any) -> Any:
        values = base.copy()
        for i, a in tensors:
            values[i] = e[out - args[a]]
        for i, a in numbers:
            values[i] = args[a]
        if nested:
            for i, a, slot in lists:
                values[i] = _fill(slot, iter(args[a:]), out, e)
            if named:
                return op(*values, **kwbase | {k: _fill(slot, iter(args[a:]), out, e) for k, a, slot in named})
        return op(*values, **kwbase)

    return call


def _fill(slot: _Slot, args: Iterator[Any], out: int, e: Entries) -> Any:
    if slot.kind == "hole":
        return e[out - next(args)] if slot.holes[0] else next(args)
    if slot.kind == "list":
        return [_fill(p, args, out, e) for p in slot.parts]
    return slot.value


def _mutated(op: torch._ops.OpOverload, positional: list[_Slot], keyword: dict[str, _Slot]) -> Iterator[int]:
    at = 0
    starts: dict[str, tuple[int, _Slot]] = {}
    for argument, slot in zip(op._schema.arguments, positional, strict=False):
        starts[argument.name] = (at, slot)
        at += len(slot.holes)
    for k, slot in keyword.items():
        starts[k] = (at, slot)
        at += len(slot.holes)
    for argument in op._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in starts:
            start, slot = starts[argument.name]
            yield from (start + i for i, hole in enumerate(slot.holes) if hole)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of an operator's result, flat and in order; None and plain values have no place in it."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [t for r in result for t in tensors_of(r)]
    return []
