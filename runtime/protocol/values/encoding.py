"""Values on their way into bytes."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from ..failure_ids import attempt
from . import arrays, counting, form
from .announced import blueprint, is_announcable, name_of
from .instead import instead
from .plain_types import PACK

_encoder = msgspec.msgpack.Encoder()
_NO_PARTS = bytes(4)

_AS_THEY_ARE = frozenset({bool, float, type(None)})
_CONTAINERS = frozenset(
    {tuple, set, frozenset, deque, collections.OrderedDict, collections.Counter, collections.defaultdict}
)
_RETURN_TYPES = frozenset(form.RETURN_TYPES.values())


def encode(
    value: Any,
    tensors: list[torch.Tensor],
    what: str = "a function on a node returned",
    beside: bool = True,
    classes: set[type] | None = None,
    refers: Callable[[Any], list[Any] | None] | None = None,
) -> bytes:
    """Encodes a value, and appends its tensors to ``tensors``, with those that its large parts are.

    ``beside``: whether large parts may be such tensors; they are in the bytes otherwise. ``classes``
    gets the classes of users' objects in it. ``refers`` returns what stands for an object that does not cross itself,
    or None.

    Raises TypeError for what can't cross, with ``what`` to say of it; ValueError for what is too large, or too deep.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is int and _is_short(value)):  # most results
        return _NO_PARTS + _encoder.encode(value)
    into = _Encoding(tensors, what, beside, set() if classes is None else classes, refers)
    body = _encoder.encode(into.plain(value, 0))
    if len(body) > form.MAX_DATA:
        raise ValueError(
            f"{what} {len(body)} bytes, and {form.MAX_DATA >> 20} MiB may come beside tensors, arrays of numpy and "
            "bytes; make it some of these"
        )
    if not counting.fits(body) and (why := counting.count(body).over):
        raise ValueError(f"{what} {why}, each of which takes memory of its own; make it tensors, or arrays of numpy")
    if beside and len(body) > form.MESSAGE:
        into.bring(np.frombuffer(bytearray(body), np.uint8))
        body = b""
    return b"".join((len(into.brought).to_bytes(4, "little"), *into.brought, body))


def encoded_list(encoded: Sequence[bytes]) -> bytes:
    """Returns the encoding of a list of values that are encoded, and that have no tensors."""
    count = len(encoded)
    head = bytes((0x90 | count,)) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return b"".join((_NO_PARTS, head, *[each[4:] for each in encoded]))


class _Encoding:
    """One value on its way into bytes."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        what: str,
        beside: bool,
        classes: set[type],
        refers: Callable[[Any], list[Any] | None] | None,
    ) -> None:
        self._refers = refers
        self.tensors, self._what, self._beside, self._classes = tensors, what, beside, classes
        self.brought: list[bytes] = []  #: the places in ``tensors`` of those that are parts
        self._bytes = 0

    def bring(self, data: np.ndarray[Any, Any]) -> None:
        """Has bytes travel as a tensor."""
        self._bytes += data.nbytes
        if self._bytes > form.MAX_BROUGHT:
            raise ValueError(
                f"{self._what} arrays of numpy and bytes of more than {form.MAX_BROUGHT >> 30} GiB; make them tensors, "
                "which stay where they are"
            )
        self.brought.append(len(self.tensors).to_bytes(4, "little"))
        self.tensors.append(torch.from_numpy(data))

    def plain(self, value: Any, depth: int, key: bool = False) -> Any:
        """Returns a value in terms of msgpack. ``key``: it is going to be hashed."""
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if kind is int:
            return value if _is_short(value) else self._leaf(value)
        if kind is str:
            return value if value.isascii() or _is_text(value) else self._leaf(value)
        if depth > form.MAX_DEPTH:
            raise ValueError(f"{self._what} what is more than {form.MAX_DEPTH} deep; does it contain itself?")
        if kind is list:
            return self._values(value, depth)
        if kind is dict:
            return self._dict(value, depth)
        if kind is bytes:
            return value if len(value) <= form.INLINE or not self._beside else self._large_bytes(value)
        if kind in _CONTAINERS:
            return self._container(kind, value, depth, key)
        if issubclass(kind, torch.Tensor):  # not isinstance, which believes what an object says of its class
            self.tensors.append(value.detach())
            return msgspec.msgpack.Ext(form.TENSOR, b"")
        if kind in PACK:
            return self._leaf(value)
        if kind is np.ndarray:
            return self._array(value)
        if issubclass(kind, np.generic):
            return self._scalar(value, depth)
        if kind in _RETURN_TYPES:
            return _ext(form.RETURN_TYPE, [kind.__name__, *self._values(value, depth)])
        return self._object(value, depth, key)

    # ---- the kinds of values -----------------------------------------------------------------------------------------

    def _values(self, values: Iterable[Any], depth: int, key: bool = False) -> list[Any]:
        return [self.plain(x, depth + 1, key) for x in values]

    def _pairs(self, value: dict[Any, Any], depth: int) -> list[Any]:
        return [[self.plain(k, depth + 1, True), self.plain(v, depth + 1)] for k, v in value.items()]

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        if all((type(k) is str and k.isascii()) or (type(k) is int and _is_short(k)) for k in value):
            return {k: self.plain(v, depth + 1) for k, v in value.items()}
        return _ext(form.DICT, self._pairs(value, depth))

    def _container(self, kind: type, value: Any, depth: int, key: bool) -> Any:
        if kind is tuple:
            return _ext(form.TUPLE, self._values(value, depth, key))
        if kind is set or kind is frozenset:
            return _ext(form.SET if kind is set else form.FROZENSET, self._values(value, depth, True))
        if kind is deque:
            return _ext(form.DEQUE, [value.maxlen, *self._values(value, depth)])
        if kind is collections.defaultdict:
            factory = next((i for i, known in enumerate(form.FACTORIES) if known is value.default_factory), None)
            if factory is None:
                name = attempt(partial(repr, value.default_factory), "its factory")
                raise TypeError(
                    f"{self._what} a defaultdict of {name:.100}; for x return dict(x) (only those of Python's own "
                    "plain types can cross)"
                )
            return _ext(form.DEFAULT, [factory, *self._pairs(value, depth)])
        return _ext(form.ORDERED if kind is collections.OrderedDict else form.COUNTER, self._pairs(value, depth))

    def _leaf(self, value: Any) -> Any:
        code, pack = PACK[type(value)]
        return _ext(code, pack(value))

    def _large_bytes(self, value: bytes) -> Any:
        self.bring(np.frombuffer(bytearray(value), np.uint8))
        return msgspec.msgpack.Ext(form.LARGE_BYTES, b"")

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if why := arrays.refused(value.dtype):
            raise TypeError(f"{self._what} an array of numpy {why}")
        value = arrays.plain(value)
        described = arrays.describe(value)
        if value.nbytes <= form.INLINE or not self._beside:
            return _ext(form.ARRAY, [*described, arrays.bytes_of(value)])
        self.bring(arrays.flat(value))
        return _ext(form.LARGE_ARRAY, described)

    def _scalar(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in (np.str_, np.bytes_):  # an array of them would lose zeros at their ends
            return _ext(form.SCALAR_TEXT, self.plain((str if kind is np.str_ else bytes)(value), depth + 1))
        if why := arrays.refused(value.dtype):
            raise TypeError(f"{self._what} a scalar of numpy {why.replace('tolist', 'item')}")
        if value.dtype.type is not kind:
            raise TypeError(self._refusal(value))
        found = arrays.plain(np.asarray(value))
        return _ext(form.SCALAR, [*arrays.describe(found), found.tobytes()])

    def _object(self, value: Any, depth: int, key: bool) -> Any:
        kind: Any = type(value)
        if self._refers is not None and not key and (told := self._refers(value)) is not None:
            return _ext(form.REFERENCE, self._values(told, depth))
        if not is_announcable(kind):
            raise TypeError(self._refusal(value))
        try:
            plan = blueprint(kind)
            parts = plan.parts(value)
            if key and not plan.hashable:
                raise TypeError(
                    f"a {name_of(kind)} has a __hash__ or __eq__ of its own, which would run where it is a key"
                )
        except TypeError as e:
            raise TypeError(f"{self._what} a {name_of(kind)}, which can't cross: {e}") from None
        self._classes.add(kind)
        if plan.kind == "exception":
            parts = self._exception(parts, depth + 1)
        elif plan.kind == "dataclass":
            parts = [{k: self.plain(v, depth + 1, key) for k, v in parts[0].items()}]
        else:
            parts = self._values(parts, depth, key)
        return _ext(form.OBJECT, [plan.kind, name_of(kind), parts])

    def _exception(self, parts: list[Any], depth: int) -> list[Any]:
        """Returns an exception's arguments and attributes, and the names of attributes that can't cross."""
        found, left = {}, []
        args = self._values(parts[0], depth)
        for name, value in parts[1].items():
            before = len(self.tensors), len(self.brought), self._bytes
            try:
                found[name] = self.plain(value, depth + 1)
                if len(self.tensors) > before[0]:
                    raise TypeError("no tensors")  # whoever looks at an error has not asked for them
            except (TypeError, ValueError):
                left.append(name)
                del self.tensors[before[0] :], self.brought[before[1] :]
                self._bytes = before[2]
        return [args, found, left]

    def _refusal(self, value: Any) -> str:
        return (
            f"{self._what} a {name_of(type(value))}; {instead(value)} (only tensors and plain data "
            "(None, numbers, text, bytes, dates, paths, arrays of numpy, lists, tuples, sets, dicts of them; "
            "dataclasses, namedtuples, enums and exceptions of classes that the call has named) come back, because "
            "nothing that a node sends is unpickled)"
        )


def _ext(code: int, parts: Any) -> Any:
    return msgspec.msgpack.Ext(code, _encoder.encode(parts))


def _is_short(number: int) -> bool:
    return -(1 << 63) <= number < 1 << 64


def _is_text(value: str) -> bool:
    """Returns whether a text can be UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
