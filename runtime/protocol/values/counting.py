"""The number of objects that bytes become, counted without making one of them.

A value's bytes say nothing of its size in memory: a list without elements is one byte, and 74 bytes once it is made. In
msgpack each element is announced by the list or dict that has it, so its containers tell how many objects there are.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from . import form

#: What is no container, and whose length its first byte tells: as many of them as there are in a row.
_OTHERS = re.compile(
    rb"(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]++|[\xcb\xcf\xd3].{8}|[\xca\xce\xd2].{4}|[\xcd\xd1].{2}|[\xcc\xd0].|"
    + b"|".join(rb"[\x%02x].{%d}" % (0xA0 + n, n) for n in range(32))
    + rb")*+",
    re.DOTALL,
)
#: Bytes that are looked at without a pause, in which other threads run.
_TURN = 1 << 20
#: Bytes behind the first one that say how many elements or bytes there are: of arrays, maps; of bytes, text.
_ARRAYS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}
_LONG = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
#: Bytes that stand before those of an extension value, which are msgpack, too.
_EXTENSIONS = {0xC7: 3, 0xC8: 4, 0xC9: 6, 0xD4: 2, 0xD5: 2, 0xD6: 2, 0xD7: 2, 0xD8: 2}
#: The bytes in memory of an object, about, and more of a list, a dict or an extension value.
_OBJECT, _MORE = 60, 100


class ObjectCounts(NamedTuple):
    """The objects that a value is made of."""

    objects: int
    containers: int  #: those of them that are lists, dicts, or what has a list or a dict

    @property
    def nbytes(self) -> int:
        """The bytes that they take in memory, about, apart from those of text and bytes."""
        return self.objects * _OBJECT + self.containers * _MORE

    @property
    def over(self) -> str:
        """Says why these are too many; "" where they are not."""
        if self.containers > form.MAX_CONTAINERS:
            return f"more than {form.MAX_CONTAINERS:,} lists, tuples, dicts and the like"
        return f"more than {form.MAX_OBJECTS:,} objects" if self.objects > form.MAX_OBJECTS else ""


def count(body: Any) -> ObjectCounts:
    """Returns the objects of a value's msgpack; of more than there may be, or of what is none, those up to there."""
    data, at, objects, containers = memoryview(body), 0, 1, 0
    while at < len(data):
        if (end := _OTHERS.match(data, at, at + _TURN).end()) > at:  # type: ignore[union-attr]  # or of no bytes
            at = end
            continue
        inside, size = _container(data, at)
        if inside >= 0:
            containers, objects = containers + 1, objects + inside
            if containers > form.MAX_CONTAINERS or objects > form.MAX_OBJECTS:
                break
        if not size:
            break
        at += size
    return ObjectCounts(objects, containers)


def fits(body: Any) -> bool:
    """Returns whether so few bytes, of which each object takes one at least, can't be too many objects."""
    return len(body) <= min(form.MAX_CONTAINERS, form.MAX_OBJECTS)


def _container(data: memoryview, at: int) -> tuple[int, int]:
    """Returns how many objects are in what begins here (-1: it is no container), and how many bytes it has, apart from
    these; no bytes for what is not msgpack."""
    first = data[at]
    if 0x80 <= first < 0xA0:
        return (first & 15) * (1 if first >= 0x90 else 2), 1
    if (width := _ARRAYS.get(first)) is not None:
        return _number(data, at, width), 1 + width
    if (width := _MAPS.get(first)) is not None:
        return 2 * _number(data, at, width), 1 + width
    if (width := _EXTENSIONS.get(first)) is not None:
        return 1, width
    if (width := _LONG.get(first)) is not None:
        return -1, 1 + width + _number(data, at, width)
    return -1, 0


def _number(data: memoryview, at: int, width: int) -> int:
    return int.from_bytes(data[at + 1 : at + 1 + width], "big")
