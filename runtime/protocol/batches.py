"""Batches without their tensors: what a node says of a batch that it has read, and what the master makes of it.

A batch is described by plain data: lists whose first element says what they are. Tensors are in it by shape and dtype,
in the order in which they come.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import getattr_static
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from . import codec
from .errors import ProtocolError

_TENSOR, _PLAIN, _LIST, _TUPLE, _DICT, _NAMED = "tensor", "plain", "list", "tuple", "dict", "named"

#: The shape and the dtype of a tensor.
Geometry = tuple[tuple[int, ...], torch.dtype]
#: ``made(path, values)`` returns a leaf of a batch, of which each rank has a value.
Made = Callable[[str, Sequence[Any]], Any]

# ---- on a node -------------------------------------------------------------------------------------------------------


def describe(batch: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Returns a batch as plain data, and its tensors. Raises TypeError for what can't leave a node."""
    tensors: list[torch.Tensor] = []
    return _described(batch, tensors, "batch"), tensors


def _described(value: Any, tensors: list[torch.Tensor], path: str) -> list[Any]:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"{path} is a {value.layout} tensor, and batches on nodes are strided; x.to_dense()")
        number = codec.dtype_id(value.dtype)
        if why := codec.over(tuple(value.shape), value.dtype.itemsize, codec.MAX_COPY):
            raise TypeError(f"{path}: {why}")
        tensors.append(value)
        return [_TENSOR, list(value.shape), number]
    if isinstance(value, PackedSequence):
        raise TypeError(
            f"{path} is a PackedSequence, whose sizes the script has to know; pad_sequence, and the lengths"
        )
    if isinstance(value, Mapping):
        keys = list(value)
        if not all(isinstance(key, (str, int)) for key in keys):
            raise TypeError(f"{path} is a dict with other keys than texts and integers: {keys!r:.100}")
        return [_DICT, keys, [_described(value[key], tensors, f"{path}[{key!r}]") for key in keys]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind, fields = type(value), list(value._fields)
        inner = [_described(x, tensors, f"{path}.{name}") for name, x in zip(fields, value, strict=True)]
        return [_NAMED, kind.__module__, kind.__qualname__, fields, inner]
    if isinstance(value, (list, tuple)) and not is_plain(value):
        return [
            _LIST if isinstance(value, list) else _TUPLE,
            [_described(x, tensors, f"{path}[{i}]") for i, x in enumerate(value)],
        ]
    if not is_plain(value):
        raise TypeError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which can't leave a node; tensors, "
            "plain data (None, numbers, text, bytes), and lists, tuples, namedtuples and dicts of them can: let "
            "collate_fn return these (torch.from_numpy(x), x.item(), dataclasses.asdict(x))"
        )
    return [_PLAIN, value]


def is_plain(value: Any) -> bool:
    """Returns whether a value is plain data, in lists and tuples too: what is one leaf of a batch."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


# ---- at the master ---------------------------------------------------------------------------------------------------


def rebuild(described: Sequence[Any], tensor: Made, plain: Made) -> Any:
    """Returns a batch that several ranks have described, each its own. ``tensor`` gets each tensor's ``Geometry`` by
    rank, ``plain`` the values.

    Raises ValueError for ranks whose batches are built otherwise, ProtocolError for what describes nothing.
    """
    try:
        return _rebuilt(described, tensor, plain, "batch")
    except (RecursionError, IndexError) as e:
        raise ProtocolError(f"a node has described no batch: {type(e).__name__}: {e}") from None


def _rebuilt(each: Sequence[Any], tensor: Made, plain: Made, path: str) -> Any:
    for one in each:
        if not isinstance(one, list) or not one:
            raise ProtocolError(f"a node has described {path} as {one!r:.60}")
    first = each[0]
    kind, inner = first[0], first[-1]
    if any(one[0] != kind for one in each):
        raise ValueError(f"ranks have {', '.join(sorted({str(one[0]) for one in each}))} as {path}")
    if kind == _TENSOR:
        return tensor(path, [_geometry(one, path) for one in each])
    if kind == _PLAIN:
        return plain(path, [one[1] for one in each])
    if kind not in (_LIST, _TUPLE, _DICT, _NAMED):
        raise ProtocolError(f"a node has described {path} as {kind!r:.60}")
    if not all(isinstance(one[-1], list) for one in each):
        raise ProtocolError(f"a node has described {path} without what is in it")
    if any(one[1:-1] != first[1:-1] or len(one[-1]) != len(inner) for one in each):
        raise ValueError(f"ranks have {path} of other kinds or lengths: {', '.join(map(_shortly, each))}")
    keys: list[Any] = []
    names = [f"[{i}]" for i in range(len(inner))]
    if kind in (_DICT, _NAMED):
        keys = first[-2]
        if not isinstance(keys, list) or len(keys) != len(inner) or not all(isinstance(k, (str, int)) for k in keys):
            raise ProtocolError(f"a node has described {path} with the keys {keys!r:.60}")
        names = [f".{key}" if kind == _NAMED else f"[{key!r}]" for key in keys]
    values = [_rebuilt([one[-1][i] for one in each], tensor, plain, path + name) for i, name in enumerate(names)]
    if kind == _DICT:
        return dict(zip(keys, values, strict=True))
    if kind == _NAMED:
        if len(first) != 5 or not isinstance(first[1], str) or not isinstance(first[2], str):
            raise ProtocolError(f"a node has described {path} as {first[1:-1]!r:.60}")
        kind_of = _named(first[1], first[2], keys, path)
        return tuple.__new__(kind_of, values)  # no code of a class runs because a node names it
    return values if kind == _LIST else tuple(values)


def _geometry(described: list[Any], path: str) -> Geometry:
    _, shape, number = described if len(described) == 3 else (0, None, None)
    if type(shape) is not list or not all(type(n) is int for n in shape) or type(number) is not int:
        raise ProtocolError(f"a node has described {path} as {described!r:.60}")
    dtype = codec.dtype_of(number)
    codec.check_shape(tuple(shape), dtype.itemsize)
    return tuple(shape), dtype


def _shortly(described: list[Any]) -> str:
    return f"{described[0]} of {len(described[-1])}" if described[0] in (_LIST, _TUPLE) else f"{described[1:-1]}"


def _named(module: str, name: str, fields: list[str], path: str) -> Any:
    """Returns the namedtuple's class of this name that the script has imported. Nothing is imported, and no code of a
    module runs. Raises TypeError where there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # nothing that a module computes
    named = isinstance(found, type) and issubclass(found, tuple)
    if not named or getattr_static(found, "_fields", None) != tuple(fields):
        raise TypeError(
            f"{path} is a {module}.{name}, and the script has no namedtuple of this name with the fields "
            f"{', '.join(map(str, fields))}; define it at the top of a module, or let collate_fn return a dict"
        )
    return found
