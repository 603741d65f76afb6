"""Values on their way out of bytes."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from ..errors import UNDECODABLE, ProtocolError
from . import arrays, counting, form
from .announced import Announced, Unannounced
from .plain_types import UNPACK

#: The first bytes of a value that has no parts; and those that follow in one that is a number, text, bytes or None.
_NO_PARTS = bytes(4)
_ALONE = frozenset(
    (*range(0x80), *range(0xA0, 0xC1), 0xC2, 0xC3, 0xC4, 0xCB, *range(0xCC, 0xD4), 0xD9, *range(0xE0, 0x100))
)
_alone = msgspec.msgpack.Decoder[Any]()


def decode(
    data: bytes,
    tensors: Sequence[Any],
    classes: Iterable[type] = (),
    referred: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Decodes a value: what ``encode`` was given, with ``tensors`` in place of its tensors.

    Those that are parts of the value are brought here: ``.cpu()`` is called on them. ``classes``: those that are
    announced; objects of theirs are made without any of their code being run. ``referred`` returns the object that a
    reference stands for, or raises ValueError; without it there may be none.

    What it is going to be is counted before anything is made of it: a list without elements is one byte, and 74 bytes
    in memory.

    Raises ProtocolError; Unannounced, a TypeError, for an object of another class; what ``.cpu()`` raises.
    """
    if not tensors and 4 < len(data) < 256 and data[:4] == _NO_PARTS and data[4] in _ALONE:  # most results
        try:
            return _alone.decode(data[4:])
        except UNDECODABLE as e:
            raise ProtocolError(f"a value of {len(data)} bytes can't be read: {e}") from None
    announced = classes if isinstance(classes, Announced) else Announced(classes)
    places, body = _head(data)
    brought = _brought(tensors, places)
    rest = [x for i, x in enumerate(tensors) if i not in places] if places else tensors
    if not body and not brought:
        raise ProtocolError("a value of no bytes")
    whole: Any = body or brought.pop()
    if len(whole) > form.MAX_DATA:
        raise ProtocolError(f"a value has {len(whole)} bytes, which is over the limit of {form.MAX_DATA}")
    decoding = _Decoding(announced, rest, brought, referred)
    try:
        return decoding.value(whole)
    except Unannounced:
        raise
    except (*UNDECODABLE, IndexError, KeyError, TypeError, ArithmeticError, AttributeError) as e:
        raise ProtocolError(f"a value of {len(data)} bytes can't be read: {e}") from None
    finally:
        decoding.end()


def weight(data: bytes, tensors: Sequence[Any]) -> int:
    """Returns the bytes of memory that a value takes, about, its tensors apart. Raises ProtocolError."""
    places, body = _head(data)
    whole: Any = body
    if not body and places:
        last = next(reversed(places))
        found: Any = tensors[last] if last < len(tensors) else None
        _check_parts([found])
        whole = found.numpy()
    return len(whole) + counting.count(whole).nbytes


def _head(data: bytes) -> tuple[dict[int, None], bytes]:
    """Returns the places of tensors that are parts, and the value's own bytes. Raises ProtocolError."""
    count = int.from_bytes(data[:4], "little")
    end = 4 + 4 * count
    if end > len(data):
        raise ProtocolError(f"a value of {len(data)} bytes can't be read: it says that {count} tensors are parts of it")
    places = {int.from_bytes(data[at : at + 4], "little"): None for at in range(4, end, 4)}
    if len(places) != count:
        raise ProtocolError("a value names a tensor twice as a part")
    return places, data[end:]


def _brought(tensors: Sequence[Any], places: Iterable[int]) -> list[np.ndarray[Any, Any]]:
    """Returns the bytes of tensors that are parts. Raises ProtocolError."""
    if not places:
        return []
    found: list[Any] = [tensors[i] if i < len(tensors) else None for i in places]
    _check_parts(found)
    if (size := sum(one.numel() for one in found)) > form.MAX_BROUGHT:
        raise ProtocolError(f"a value has parts of {size} bytes, which is over the limit of {form.MAX_BROUGHT}")
    # of a local tensor a copy: whoever has it may write it, and so may who gets the value
    here = [one.detach().clone() if type(one) is torch.Tensor else one.detach().cpu() for one in found]
    return [one.contiguous().numpy() for one in here]


def _check_parts(tensors: Iterable[Any]) -> None:
    for one in tensors:
        if not isinstance(one, torch.Tensor) or one.dtype is not torch.uint8 or one.dim() != 1:
            raise ProtocolError("a value names something as a part that is no tensor of bytes")


class _Part:
    """An extension value whose parts are known, and which is to be made of them. It can't be a key."""

    __slots__ = ("code", "items")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, code: int, items: Any) -> None:
        self.code, self.items = code, items


class _Decoding:
    """One value on its way out of bytes."""

    def __init__(
        self,
        announced: Announced,
        tensors: Sequence[Any],
        brought: Sequence[np.ndarray[Any, Any]],
        referred: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._referred = referred
        self._announced, self._tensors, self._brought = announced, deque(tensors), deque(brought)
        self._parts = False
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._extension)

    def value(self, body: Any) -> Any:
        """Returns the value. Raises what is wrong with it."""
        if not counting.fits(body) and (why := counting.count(body).over):
            raise ValueError(f"it has {why}")
        found = self._decoder.decode(body)
        made = self._made(found, 0) if self._parts else found
        if self._tensors or self._brought:
            raise ValueError(f"{len(self._tensors) + len(self._brought)} tensors are left over")
        return made

    def end(self) -> None:
        """Lets go of all, also where this lives in a cycle with its decoder."""
        del self._decoder
        self._tensors.clear()
        self._brought.clear()

    def _extension(self, code: int, body: memoryview) -> Any:
        if code in (form.TENSOR, form.LARGE_BYTES) and body.nbytes:
            raise ValueError("what is beside a value has no bytes in it")  # none were counted
        if code == form.TENSOR:
            return self._tensors.popleft()
        if code == form.LARGE_BYTES:
            return self._brought.popleft().tobytes()
        items = self._decoder.decode(body)
        if code in UNPACK:
            return UNPACK[code](items)
        self._parts = True
        if code == form.LARGE_ARRAY:  # now, as they come in order
            return arrays.array_of(items, self._brought.popleft())
        return _Part(code, items)

    def _made(self, value: Any, depth: int, key: bool = False) -> Any:
        """Makes a value of its parts. ``key``: it is going to be hashed."""
        kind = type(value)
        if kind is not _Part and kind is not list and kind is not dict:
            return value
        if depth > form.MAX_DEPTH:
            raise ValueError(f"what came is more than {form.MAX_DEPTH} deep")
        if kind is list:
            return self._all(value, depth, key)
        if kind is dict:
            return {k: self._made(v, depth + 1) for k, v in value.items()}
        match value.code:
            case form.TUPLE:
                return tuple(self._all(value.items, depth, key))
            case form.SET:
                return set(self._all(value.items, depth, True))
            case form.FROZENSET:
                return frozenset(self._all(value.items, depth, True))
            case form.DICT:
                return dict(self._pairs(value.items, depth))
            case form.ORDERED:
                return collections.OrderedDict(self._pairs(value.items, depth))
            case form.COUNTER:
                counter: Any = collections.Counter()
                counter.update(dict(self._pairs(value.items, depth)))
                return counter
            case form.DEFAULT:
                factory, *pairs = value.items
                return collections.defaultdict(form.FACTORIES[factory], self._pairs(pairs, depth))
            case form.DEQUE:
                longest, *items = value.items
                return deque(self._all(items, depth), longest)
            case form.RETURN_TYPE:
                name, *items = value.items
                return form.RETURN_TYPES[name](self._all(items, depth, key))
            case form.ARRAY:
                *described, data = value.items
                return arrays.array_of(described, np.frombuffer(bytearray(data), np.uint8))
            case form.SCALAR:
                *described, data = value.items
                return arrays.array_of(described, np.frombuffer(bytearray(data), np.uint8))[()]
            case form.SCALAR_TEXT:
                return np.str_(value.items) if type(value.items) is str else np.bytes_(value.items)
            case form.REFERENCE if self._referred is not None and not key:
                return self._referred(self._all(value.items, depth))
            case form.OBJECT:
                kind, name, parts = value.items
                return self._object(kind, name, parts, depth, key)
        raise ValueError(f"{value.code} is no kind of value")

    def _all(self, values: Any, depth: int, key: bool = False) -> list[Any]:
        if type(values) is not list:
            raise TypeError(f"a list was to come, not {values!r:.100}")
        return [self._made(x, depth + 1, key) for x in values]

    def _pairs(self, pairs: Any, depth: int) -> Iterable[tuple[Any, Any]]:
        for key, value in pairs:
            yield self._made(key, depth + 1, True), self._made(value, depth + 1)

    def _object(self, kind: Any, name: Any, parts: Any, depth: int, key: bool) -> Any:
        plan = self._announced.find(name, kind)
        if key and not plan.hashable:
            raise ValueError(f"{name} is no key")
        made = self._all(parts, depth, key and plan.kind != "exception")
        return plan.make(made)
