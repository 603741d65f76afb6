"""The check whether what operators, functions and collectives give is finite: it runs while the script has switched it
on (``dt.seeing.check_finite``), and costs nothing otherwise.

    Switch --> NodeState.set_check: the templates have other closures, which look at what each call gives

A call that gives NaN or infinity fails with NonFiniteError, as one whose operator raises: so the error names the line,
and what depends on it is poison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ..protocol.errors import NonFiniteError
from .call_forms import Entries, Run
from .template import Broken, Template, tensors_of

#: Operators that make, or leave, memory as it was found: what is in it nobody has computed.
UNINITIALISED = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::empty_permuted", "aten::empty_strided", "aten::new_empty"),
        *("aten::new_empty_strided", "aten::resize_", "aten::resize_as_", "aten::set_"),
    }
)


class FiniteCheck:
    """The check of one node."""

    def __init__(self, infinities: bool) -> None:
        """``infinities``: whether they count, beside NaN."""
        self._infinities = infinities

    def __repr__(self) -> str:
        return f"<FiniteCheck infinities={self._infinities}>"

    def put_into(self, template: Template, entries: Entries) -> None:
        """Has the calls of a template looked at."""
        remove_from(template, entries)
        if isinstance(template, Broken) or template.op._schema.name in UNINITIALISED:
            return
        if template.mutated or (template.outs and not template.views):
            plain = template.over, template.aloud
            template.unchecked = plain
            template.over, template.aloud = (partial(self._checked, template, over) for over in plain)
            _renew(template, entries)

    def _checked(self, template: Template, over: Callable[[Entries], Run], e: Entries) -> Run:
        """Returns what does a template's call over these entries, and looks at what it has given."""
        plain, name = over(e), template.name

        def call(out: int, args: Any) -> Any:
            result = plain(out, args)
            written = [e[ref] for ref in template.written(out, args)]
            given = written if template.views else [*tensors_of(result), *written]
            for tensor in given:
                if isinstance(tensor, torch.Tensor) and not self._passes(tensor):
                    operands = [e[ref] for ref in template.operands(out, args)]
                    raise self._error(name, tensor, operands, written)
            return result

        return call

    def look_at(self, name: str, given: Iterable[torch.Tensor], operands: Sequence[torch.Tensor] = ()) -> None:
        """Raises NonFiniteError for the first of these tensors that is not finite. ``operands``: what they are of."""
        for tensor in given:
            if not self._passes(tensor):
                raise self._error(name, tensor, operands, [tensor])

    def _passes(self, tensor: torch.Tensor) -> bool:
        numbers = _numbers(tensor)
        if numbers is None or not numbers.numel():
            return True
        # the quickest look at all of them: one that is NaN or infinite makes their sum so
        if math.isfinite(numbers.sum(dtype=torch.float32 if numbers.element_size() < 4 else None).item()):
            return True
        nan, inf = _counts(tensor)  # finite ones may have too large a sum
        return not nan and not (inf and self._infinities)

    def _error(
        self, name: str, tensor: torch.Tensor, operands: Sequence[Any], written: Sequence[Any]
    ) -> NonFiniteError:
        nan, inf = _counts(tensor)
        inputs = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        finite = tuple(None if any(each is it for it in written) else sum(_counts(each)) == 0 for each in inputs)
        text = f"{name} has given {_described(tensor)} {_found(nan, inf)}"
        if inputs:
            text += f"; its operands: {', '.join(map(_operand, inputs[:NAMED], finite))}"
        if len(inputs) > NAMED:
            text += f" and {len(inputs) - NAMED} more"
        return NonFiniteError(text, nan, inf, tuple(tensor.shape), finite[:NAMED])


#: The number of operands that an error names.
NAMED = 8


def remove_from(template: Template, entries: Entries) -> None:
    """Has the calls of a template not be looked at."""
    if template.unchecked is not None:
        template.over, template.aloud = template.unchecked
        template.unchecked = None
        _renew(template, entries)


def _renew(template: Template, entries: Entries) -> None:
    template.call = template.over(entries)
    if not template.loud:  # else it asks for ``aloud`` at each call
        template.run = template.storing(entries)


def _numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the real numbers of a tensor's elements; None for one that can have no NaN."""
    if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
        return None
    if not tensor.is_floating_point() and not tensor.is_complex():
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().float() if tensor.element_size() == 1 else tensor.resolve_neg()


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns how many elements of a tensor are, or have, NaN and infinity."""
    numbers = _numbers(tensor)
    if numbers is None:
        return 0, 0
    found = torch.isnan(numbers), torch.isinf(numbers)
    nan, inf = (each.any(-1) if tensor.is_complex() else each for each in found)
    return int(nan.sum()), int(inf.sum())


def _operand(tensor: torch.Tensor, finite: bool | None) -> str:
    """Returns an operand in words; ``finite``: whether it was, None for one that the operation has written."""
    state = "written by it" if finite is None else "finite" if finite else _found(*_counts(tensor))
    return f"{_described(tensor)} {state}"


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _found(nan: int, inf: int) -> str:
    return f"with {nan} NaN and {inf} inf"
