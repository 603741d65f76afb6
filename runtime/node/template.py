"""Templates: an operator with its static arguments, turned once into a closure that runs it on a node's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from ..protocol import commands as c
from ..protocol.allow_list import AllowList
from ..protocol.arguments import holes
from ..protocol.errors import ProtocolError
from . import geometry
from .call_forms import ArgumentSlot, Entries, Run, caller
from .op_fast_path import fast_path, plain_path
from .warned import dropping

#: Operators that write these arguments though their schemas do not say so: in training, by the argument of that name.
HIDDEN_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}


class Template:
    """``run(out, args)`` executes and stores the outputs; ``call(out, args)`` executes and returns the result."""

    __slots__ = (
        "aloud", "call", "foreseen", "holes", "keyword", "loud", "mutated", "name", "op", "outs", "over", "positional",
        "run", "single", "unchecked", "views",
    )  # fmt: skip

    def __init__(
        self, define: c.Define, allow: AllowList, entries: Entries, device_of: Callable[[str], torch.device]
    ) -> None:
        """Raises ProtocolError for an operator or argument that this node doesn't take."""
        self.op = op = allow.resolve(define.op)
        self.name = define.op
        self.outs = define.outs
        known = {a.name for a in op._schema.arguments}
        for name, _ in define.kwargs:
            if name not in known:
                raise ProtocolError(f"{define.op} has no argument {name!r}; it has {', '.join(sorted(known))}")
        positional = [ArgumentSlot(s, device_of) for s in define.args]
        keyword = [(k, ArgumentSlot(s, device_of)) for k, s in define.kwargs]
        #: for each of a Call's arguments, whether it is a tensor
        self.holes = tuple(hole for slot in (*positional, *(s for _, s in keyword)) for hole in slot.holes)
        #: indices into a Call's arguments of the tensors that the operator writes
        self.mutated = tuple(_mutated(op, positional, dict(keyword)))
        self.positional, self.keyword = positional, keyword
        #: makes another ``call``, for other entries
        way = fast_path(op, bool(positional) and positional[0].letter == "T")
        self.foreseen = define.foreseen  #: the master warns of its calls
        self.loud = False  #: the first call has warned of what the master has not foreseen
        self.over: Callable[[Entries], Run] = partial(caller, way, positional, keyword)
        #: as ``over``, for a call whose warnings are heard
        self.aloud: Callable[[Entries], Run] = partial(caller, plain_path(op), positional, keyword)
        if self.foreseen:
            self.over = self.aloud = partial(_dropping, self.aloud)
        #: ``over`` and ``aloud`` without the check of what they give, while there is one (finite.py)
        self.unchecked: tuple[Callable[[Entries], Run], ...] | None = None
        self.call = self.over(entries)
        returns = op._schema.returns
        self.single = len(returns) == 1 and str(returns[0].type) == "Tensor"  # not a list of one tensor
        #: whether a result may lie in the memory of an operand
        self.views = any(r.alias_info is not None for r in returns)
        self.run = self.storing(entries)

    def storing(self, e: Entries, call: Run | None = None) -> Run:
        """Returns a function that does ``call``, or the given one, and stores the outputs."""
        call = self.call if call is None else call
        if self.outs == 0:
            return call
        if self.outs == 1 and self.single:

            def run(out: int, args: Any) -> None:
                e[out] = call(out, args)
        else:
            count, first = self.outs, len(self.holes)

            def run(out: int, args: Any) -> None:
                results = tensors_of(call(out, args))
                if len(results) != count:
                    raise self.miscounted(len(results))
                e[out] = results[0]
                for result, distance in zip(results[1:], args[first:], strict=True):
                    e[out - distance] = result

        return run

    def miscounted(self, results: int) -> ProtocolError:
        """Returns the error for a result of another number of tensors than the master has refs for."""
        return ProtocolError(f"{self.name} gave {results} tensors where the master expects {self.outs}")

    def compare(self, first: c.First, entries: Entries) -> None:
        """Raises GeometryError if a signature's first call has given a tensor of an unexpected geometry.

        The master takes each output and each written argument to have a geometry; where it is wrong, each proxy would
        be.
        """
        ways = ((self.results, first.gives, False), (self.written, first.keeps, True))
        for refs, kinds, written in ways:
            # the master knows nothing of what is written unsaid, which comes last
            for ref, kind in zip(refs(first.out, first.args), kinds, strict=not written):
                tensor, expected = entries[ref], first.kinds[kind]
                # a nested tensor has a proxy of another shape (dispatch/meta_inference.py)
                if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
                    continue
                found = geometry.of(tensor)
                if written:  # while torch writes to a lazy conjugate, its proxy is not one
                    found = replace(found, bits=expected.bits)
                if found != expected:
                    raise geometry.wrong(self.name, found, expected)

    def operands(self, out: int, args: tuple[c.Plain, ...]) -> list[int]:
        """Returns the refs that a call reads or writes."""
        return [out - int(args[i]) for i, hole in enumerate(self.holes) if hole]  # type: ignore[arg-type]

    def written(self, out: int, args: tuple[c.Plain, ...]) -> list[int]:
        """Returns the refs of the operands that a call writes."""
        return [out - int(args[i]) for i in self.mutated]  # type: ignore[arg-type]

    def results(self, out: int, args: tuple[c.Plain, ...]) -> list[int]:
        """Returns the refs that a call makes."""
        return [out, *(out - int(d) for d in args[len(self.holes) :])] if self.outs else []  # type: ignore[arg-type]


class Broken(Template):
    """A template that this node refused. Each call of it raises the reason."""

    __slots__ = ()

    def __init__(self, define: c.Define, why: Exception) -> None:
        self.name, self.outs, self.mutated = define.op, define.outs, ()
        self.foreseen = self.loud = self.views = False
        self.unchecked = None
        self.holes = tuple(holes((*define.args, *(s for _, s in define.kwargs))))

        def refuse(out: int, args: tuple[c.Plain, ...]) -> Any:
            raise why.with_traceback(None)

        self.run = self.call = refuse
        self.over = self.aloud = lambda entries: refuse

    def storing(self, e: Entries, call: Run | None = None) -> Run:
        return self.call


def _dropping(over: Callable[[Entries], Run], e: Entries) -> Run:
    return dropping(over(e))


def _mutated(
    op: torch._ops.OpOverload, positional: list[ArgumentSlot], keyword: dict[str, ArgumentSlot]
) -> Iterator[int]:
    at = 0
    starts: dict[str, tuple[int, ArgumentSlot]] = {}
    for argument, slot in zip(op._schema.arguments, positional, strict=False):
        starts[argument.name] = (at, slot)
        at += len(slot.holes)
    for k, slot in keyword.items():
        starts[k] = (at, slot)
        at += len(slot.holes)
    declared = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    training = starts.get("training")
    frozen = training is not None and training[1].kind == "constant" and not training[1].value
    for name in (*declared, *(() if frozen else HIDDEN_WRITES.get(op._schema.name, ()))):
        if name in starts:
            start, slot = starts[name]
            yield from (start + i for i, hole in enumerate(slot.holes) if hole)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Returns the tensors of an operator's result, flat and in order; None and plain values are left out."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [t for r in result for t in tensors_of(r)]
    return []
