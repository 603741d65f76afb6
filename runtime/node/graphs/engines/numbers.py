"""Calls operators with tensors in place of numbers that change between replays: a compiled graph has no such numbers.

A Python number and a tensor of no dimension take part in an operation alike, as long as the other operand is a
floating-point tensor; so an operator's scalar form is replaced by the arithmetic that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .listing import NotCompilable

Named = dict[str, Any]


def call(op: OpOverload, args: tuple[Any, ...], kwargs: Named) -> Any:
    """Calls ``op``, also with a plain number where its schema has a tensor.

    For instance, ``x.mul_(0.9)`` is a call of ``mul_.Tensor``.
    """
    for value, argument in zip(args, op._schema.arguments, strict=False):
        if isinstance(value, (int, float, complex)) and str(argument.type) == "Tensor":
            return op.overloadpacket(*args, **kwargs)
    return op(*args, **kwargs)


def call_with_tensors(op: OpOverload, args: tuple[Any, ...], kwargs: Named, numbers: frozenset[int]) -> Any:
    """Calls ``op`` with tensors for the Python numbers whose ``id`` is in ``numbers``. Raises NotCompilable."""
    named: Named = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    named |= dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    base = op.name().partition(".")[0].removeprefix("aten::")
    writes = base.endswith("_") and not base.startswith("__")
    plain = base.removesuffix("_") if writes else base
    if plain.startswith("_foreach_"):
        return _foreach(plain.removeprefix("_foreach_"), writes, named, numbers, op)
    formula = FORMULAS.get(plain)
    if formula is None:
        raise NotCompilable(f"{op.name()} takes a number that changes")
    _prepare(named, numbers, op)
    result = formula(named)
    return named["self"].copy_(result) if writes else result


def _prepare(named: Named, numbers: frozenset[int], op: OpOverload) -> None:
    """Checks that tensors may stand where they do; beside an operand without dimensions, they get its dtype."""
    x = named.get("self")
    if numbers and isinstance(x, Tensor) and not x.dtype.is_floating_point:
        raise NotCompilable(f"{op.name()} takes a number that changes beside {x.dtype}")
    for name, value in named.items():
        if id(value) in numbers:
            if name not in TAKES:
                raise NotCompilable(f"{op.name()} takes its {name} from a number that changes")
            if isinstance(x, Tensor) and not x.dim() and x is not value:
                named[name] = value.to(x.dtype)


def _foreach(base: str, writes: bool, named: Named, numbers: frozenset[int], op: OpOverload) -> Any:
    """Does an operator on lists, tensor by tensor, by its formula for single tensors."""
    formula = FORMULAS.get(base)
    if formula is None:
        raise NotCompilable(f"{op.name()} takes a number that changes")
    results = []
    for i, tensor in enumerate(named["self"]):
        one: Named = {"self": tensor, "alpha": 1, "value": 1}
        for name, value in named.items():
            if name == "self":
                continue
            if name == "scalars":
                name = "value" if base in ("addcmul", "addcdiv") else "other"
            if name == "scalar":
                name = "other"
            one[_SINGULAR.get(name, name)] = value[i] if isinstance(value, list) else value
        if base == "lerp" and "other" in one:
            one["weight"] = one.pop("other")
        if base == "pow" and "other" in one:
            one["exponent"] = one.pop("other")
        _prepare(one, numbers, op)
        result = formula(one)
        results.append(tensor.copy_(result) if writes else result)
    return None if writes else results


_SINGULAR = {"tensors1": "end", "end": "end", "tensor1": "tensor1", "tensor2": "tensor2"}

#: Arguments that a tensor may stand for, by their names in torch's schemas.
TAKES = frozenset({"other", "alpha", "beta", "value", "weight", "exponent", "min", "max", "fill_value", "self"})


def _clamp(n: Named) -> Tensor:
    x = n["self"]
    if n.get("min") is not None:
        x = torch.maximum(x, _as(n["min"], x))
    return x if n.get("max") is None else torch.minimum(x, _as(n["max"], x))


def _div(n: Named) -> Tensor:
    if n.get("rounding_mode") is not None:
        raise NotCompilable("a rounding division by a number that changes")
    return torch.true_divide(n["self"], n["other"])


def _as(value: Any, like: Tensor) -> Tensor:
    return value.to(like.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype)


def _full(size: Any, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype or torch.get_default_dtype()).expand(size).clone(memory_format=torch.contiguous_format)


FORMULAS: dict[str, Callable[[Named], Any]] = {
    "add": lambda n: n["self"] + n["alpha"] * n["other"],
    "sub": lambda n: n["self"] - n["alpha"] * n["other"],
    "rsub": lambda n: n["other"] - n["alpha"] * n["self"],
    "mul": lambda n: n["self"] * n["other"],
    "div": _div,
    "pow": lambda n: n["self"] ** n["exponent"],
    "addcmul": lambda n: n["self"] + n["value"] * (n["tensor1"] * n["tensor2"]),
    "addcdiv": lambda n: n["self"] + n["value"] * (n["tensor1"] / n["tensor2"]),
    "addmm": lambda n: n["beta"] * n["self"] + n["alpha"] * (n["mat1"] @ n["mat2"]),
    "lerp": lambda n: n["self"] + n["weight"] * (n["end"] - n["self"]),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "fill": lambda n: _as(n["value"], n["self"]).expand(n["self"].shape),
    "masked_fill": lambda n: torch.where(n["mask"], _as(n["value"], n["self"]), n["self"]),
    "full": lambda n: _full(n["size"], n["fill_value"], n.get("dtype")),
    "full_like": lambda n: _as(n["fill_value"], n["self"]).expand(n["self"].shape) + torch.zeros_like(n["self"]),
}
