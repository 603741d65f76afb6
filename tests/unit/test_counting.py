"""What bytes become is counted without making it: as many objects as the decoder makes, whatever they are."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import inputs

from disttensor.errors import ProtocolError
from disttensor.runtime.protocol import values
from disttensor.runtime.protocol.values import counting, form

encode = msgspec.msgpack.encode


def made(body: Any) -> counting.ObjectCounts:
    """The objects that the decoder makes of bytes, which are looked at one by one."""
    objects = containers = 0

    def extension(code: int, inside: memoryview) -> Any:
        nonlocal containers
        containers += 1
        look(msgspec.msgpack.decode(inside, ext_hook=extension))

    def look(value: Any) -> None:
        nonlocal objects, containers
        objects += 1
        if isinstance(value, list | dict):
            containers += 1
            parts = value if isinstance(value, list) else [x for pair in value.items() for x in pair]
            for part in parts:
                look(part)

    look(msgspec.msgpack.decode(body, ext_hook=extension))
    return counting.ObjectCounts(objects, containers)


LEAVES = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
    | st.integers(0, 70_000).map(lambda n: "x" * n) | st.integers(0, 300).map(bytes)
)  # fmt: skip
EXTENSIONS = st.tuples(st.integers(2, 47), LEAVES | st.lists(LEAVES, max_size=20)).map(
    lambda pair: msgspec.msgpack.Ext(pair[0], encode(pair[1]))
)
TREES = st.recursive(
    LEAVES | EXTENSIONS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text() | st.integers(-99, 99), inner, max_size=20),
    max_leaves=60,
)


@settings(max_examples=inputs(60), deadline=None, database=None, derandomize=True)
@given(TREES)
def test_as_many_as_are_made(tree: Any) -> None:
    body = encode(tree)
    assert counting.count(body) == made(body)
    assert counting.count(memoryview(bytearray(body))) == made(body)


@pytest.mark.parametrize(
    "tree",
    [[None] * 70_000, [[]] * 70_000, {i: {} for i in range(70_000)}, [1.5] * 300_000, ["x" * 40] * 100, "x" * 70_000],
    ids=lambda tree: f"{type(tree).__name__}-{len(tree)}",
)
def test_long_ones(tree: Any) -> None:
    body = encode(tree)
    assert counting.count(body) == made(body)


@settings(max_examples=inputs(60), deadline=None, database=None, derandomize=True)
@given(st.binary(max_size=200) | TREES.map(encode), st.integers(0, 1 << 30))
def test_what_is_none_is_counted_up_to_there(data: bytes, at: int) -> None:
    """Cut anywhere, and with whatever comes instead: it ends, and what the decoder makes before it sees that is no
    more."""
    for body in (data[: at % (len(data) + 1)], data[: at % (len(data) + 1)] + b"\xc1" + data):
        found = counting.count(body)
        assert 0 <= found.containers <= len(body)
        with contextlib.suppress(ValueError, RecursionError):
            assert found == made(body)


@pytest.mark.parametrize("byte", [b"\x90", b"\x80", b"\xc7\0\2", b"\xa2ab", b"\xc0"])
def test_bytes_that_become_too_much_are_refused_before_it_is_made(byte: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 bytes of each of so many lists would be made by bytes of a sixty-fourth of them."""
    monkeypatch.setattr(form, "MAX_OBJECTS", form.MAX_OBJECTS >> 4)
    monkeypatch.setattr(form, "MAX_CONTAINERS", form.MAX_CONTAINERS >> 4)
    n = (form.MAX_OBJECTS if byte in (b"\xa2ab", b"\xc0") else form.MAX_CONTAINERS) + 1
    data = bytes(4) + b"\xdd" + n.to_bytes(4, "big") + byte * n
    with pytest.raises(ProtocolError, match="it has more than"):
        values.decode(data, [])


def test_a_weight_is_about_what_a_value_takes() -> None:
    lists = values.encode([[]] * 1000, [])
    assert 74 * 1000 < values.weight(lists, []) < 300 * 1000
    tensors: list[Any] = []
    large = values.encode(["x" * 100] * 10_000, tensors)
    assert len(tensors) == 1
    assert 150 * 10_000 < values.weight(large, tensors) < 300 * 10_000
    with pytest.raises(ProtocolError):
        values.weight(b"\1\0\0\0\0\0\0\0", [])
