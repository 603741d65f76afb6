"""Values that cross a wire without pickle come as they were; what is none of theirs is refused, and runs nothing."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dates
import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import value_kit as kit
from fuzzing import fuzz
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from disttensor.runtime.protocol import values
from disttensor.runtime.protocol.errors import ProtocolError
from disttensor.runtime.protocol.values import form


def crossed(value: Any, classes: Any = kit.CLASSES) -> Any:
    tensors: list[torch.Tensor] = []
    data = values.encode(value, tensors)
    kit.RAN.clear()
    made = values.decode(data, tensors, classes)
    assert not kit.RAN
    return made


def same(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, BaseException):
        return same(a.args, b.args) and same(vars(a), vars(b)) and str(a) == str(b)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (set, frozenset)):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


@pytest.mark.parametrize("value", kit.VALUES, ids=lambda v: f"{type(v).__name__} {str(v)[:20]!a}")
def test_a_value_comes_as_it_was(value: Any) -> None:
    assert same(crossed(value), value)
    assert same(crossed([value, {"x": (value,)}]), [value, {"x": (value,)}])


_KEYS = st.one_of(
    st.integers(), st.text(), st.binary(), st.booleans(), st.none(), st.dates(), st.decimals(allow_nan=False),
    st.fractions(), st.uuids(), st.timedeltas(), st.sampled_from(kit.Colour),
)  # fmt: skip
_LEAVES = st.one_of(
    _KEYS, st.floats(), st.complex_numbers(), st.times(), st.datetimes(timezones=st.just(dates.UTC)),
    st.text(st.characters()), st.builds(pathlib.PurePosixPath, st.text(st.characters(exclude_characters="\0"))),
    npst.arrays(
        st.one_of(npst.scalar_dtypes(), npst.unicode_string_dtypes(), npst.byte_string_dtypes()),
        npst.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=4),
    ),
    npst.scalar_dtypes().map(lambda dtype: np.zeros((), dtype)[()]),
)  # fmt: skip
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.sets(_KEYS, max_size=3),
        st.dictionaries(st.one_of(_KEYS, st.tuples(_KEYS), st.builds(kit.Point, _KEYS)), inner, max_size=3),
        st.builds(kit.Point, inner, inner), st.builds(kit.Pair, inner, inner), st.builds(kit.Stats, st.just(1.0)),
        st.builds(collections.OrderedDict, st.dictionaries(_KEYS, inner, max_size=3)),
    ),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_whatever_value_comes_as_it_was(seed: int) -> None:
    def check(value: Any) -> None:
        assert same(crossed(value), value)

    fuzz(seed, 120, check, _VALUES)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(100_000.0)[::-2], np.asfortranarray(np.ones((200, 300), "c16")), np.zeros(9000, ">i8"),
        np.array(["text"] * 20_000), np.arange(20_000).astype("M8[s]"), np.arange(9000, dtype=np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)  # fmt: skip
def test_large_arrays_travel_as_tensors(array: np.ndarray[Any, Any]) -> None:
    tensors: list[torch.Tensor] = []
    data = values.encode({"a": array, "t": torch.ones(2)}, tensors)
    assert len(data) < 200
    assert [t.dtype for t in tensors] == [torch.uint8, torch.float32]
    before = array.copy()
    array[:1] = array[-1]  # what is written afterwards does not come
    made = values.decode(data, tensors)
    assert same(made["a"], before)
    assert made["a"].flags.writeable
    assert made["t"] is tensors[1]


def test_what_is_large_travels_as_a_tensor() -> None:
    for value in (b"x" * 100_000, "x" * 600_000, list(range(200_000)), [b"x" * 60_000] * 20):
        tensors: list[torch.Tensor] = []
        data = values.encode(value, tensors)
        assert len(data) < 100
        assert len(tensors) == 1
        assert same(values.decode(data, tensors), value)
        data = values.encode(value, tensors := [], beside=False)
        assert not tensors
        assert same(values.decode(data, []), value)


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MAX_DATA", 1000)
    monkeypatch.setattr(form, "MAX_BROUGHT", 100_000)
    with pytest.raises(ValueError, match=r"returned 2\d\d\d bytes, and"):
        values.encode("x" * 2000, [])
    with pytest.raises(ValueError, match=r"more than .* GiB; make them tensors"):
        values.encode([np.zeros(9000)] * 2, [])
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(ValueError, match="more than 100 deep; does it contain itself"):
        values.encode(deep, [])
    tensors: list[torch.Tensor] = [torch.zeros(200_000, dtype=torch.uint8)]
    with pytest.raises(ProtocolError, match="over the limit"):
        values.decode(b"\1\0\0\0\0\0\0\0", tensors)


@dataclasses.dataclass
class Hidden:
    """A field whose property hides it."""

    x: int = 1


Hidden.x = property(lambda self: 1, lambda self, value: None)  # type: ignore[assignment]


@dataclasses.dataclass
class Dropped:
    """A class with a ``__del__``."""

    def __del__(self) -> None: ...


class Local:
    """No dataclass."""


def extra() -> Any:
    point = kit.Stats(1.0)
    object.__setattr__(point, "more", 1)
    return point


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Local(), "a test_values.Local; return what it is made of"),
        (Text("x"), r"a test_values.Text; for x return str\(x\)"),
        (np.zeros(1, object), "Python objects; for x return x.tolist"),
        (np.zeros(1, "f4,i4"), "structured dtype"),
        (np.ma.zeros(3), r"for x return numpy.asarray\(x\)"),
        (torch.device("cpu"), r"for x return str\(x\)"),
        (collections.defaultdict(lambda: 1), "a defaultdict of"),
        (Hidden(), "Hidden.x is a field and a property"),
        (Dropped(), "has a __del__"),
        (extra(), "has the attribute 'more', which is no field and would be lost"),
        ({kit.OwnHash(1): 2}, "a __hash__ or __eq__ of its own"),
        ({(kit.OwnHash(1),)}, "a __hash__ or __eq__ of its own"),
        (ExceptionGroup("x", [ValueError()]), r"for x return repr\(x\)"),
        (dates.datetime(2024, 1, 1, tzinfo=type("Zone", (dates.tzinfo,), {})()), "time zones other than"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_cross_is_refused_in_words(value: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        values.encode(value, [])


def test_of_an_exception_stays_what_cannot_cross() -> None:
    error = kit.Broken(1)
    error.lock, error.seen = object(), [torch.ones(2), object()]  # type: ignore[attr-defined]
    tensors: list[torch.Tensor] = []
    made = values.decode(values.encode(error, tensors), tensors, kit.CLASSES)
    assert not tensors
    assert vars(made).keys() == {"code", "where", "__notes__"}
    assert "['lock', 'seen']" in made.__notes__[0]


# ---- what a node that was taken over may say -------------------------------------------------------------------------

_pack = msgspec.msgpack.encode


def ext(code: int, parts: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _pack(parts))


def said(value: Any) -> bytes:
    return bytes(4) + _pack(value)


def thing(kind: str, cls: type | str, parts: Any) -> Any:
    return ext(form.OBJECT, [kind, cls if isinstance(cls, str) else values.name_of(cls), parts])


def nested(depth: int, value: Any = None) -> Any:
    for _ in range(depth):
        value = ext(form.TUPLE, [value])
    return value


_STATS = {"loss": 1.0, "steps": 1, "inner": None, "total": 1.0}

HOSTILE: dict[str, Any] = {
    "many fields": thing("dataclass", kit.Point, [{f"f{i}": i for i in range(50_000)}]),
    "a field that is none": thing("dataclass", kit.Stats, [{**_STATS, "other": 1}]),
    "__class__": thing("dataclass", kit.Stats, [{**_STATS, "__class__": "x"}]),
    "__dict__": thing("dataclass", kit.Stats, [{**_STATS, "__dict__": {}}]),
    "__dict__ in place of a field": thing("dataclass", kit.Point, [{"x": 1, "__dict__": {}}]),
    "a property": thing("dataclass", kit.Stats, [{"loss": 1.0, "steps": 1, "inner": None, "mean": 1.0}]),
    "too few fields": thing("dataclass", kit.Point, [{"x": 1}]),
    "no fields": thing("dataclass", kit.Point, []),
    "fields that are no dict": thing("dataclass", kit.Point, [[1, 2]]),
    "another kind": thing("namedtuple", kit.Stats, [_STATS]),
    "a tuple that is too long": thing("namedtuple", kit.Pair, [1, 2, 3]),
    "a member that is none": thing("enum", kit.Colour, ["BLUE"]),
    "a member's method": thing("enum", kit.Colour, ["_missing_"]),
    "a value of a member": thing("enum", kit.Colour, [7]),
    "too many attributes": thing("exception", kit.Broken, [[], {f"f{i}": i for i in range(257)}, []]),
    "an exception's class": thing("exception", kit.Broken, [[], {"__class__": 1}, []]),
    "an exception's method": thing("exception", kit.Broken, [[], {"retry": 1}, []]),
    "add_note": thing("exception", kit.Broken, [[], {"add_note": 1}, []]),
    "__traceback__": thing("exception", kit.Broken, [[], {"__traceback__": 1}, []]),
    "a member of C of another type": thing("exception", kit.NoFile, [[], {"characters_written": "x"}, []]),
    "attributes that are no texts": thing("exception", kit.Broken, [[], {1: 1}, []]),
    "no arguments": thing("exception", kit.Broken, [1, {}, []]),
    "an object with a hash as a key": {"x": ext(form.DICT, [[thing("dataclass", kit.OwnHash, [{"x": 1}]), 1]])},
    "one in a set": ext(form.SET, [thing("dataclass", kit.OwnHash, [{"x": 1}])]),
    "one in a tuple in a set": ext(form.SET, [ext(form.TUPLE, [thing("dataclass", kit.OwnHash, [{"x": 1}])])]),
    "one in a native dict": msgspec.Raw(b"\x81" + _pack(thing("dataclass", kit.OwnHash, [{"x": 1}])) + b"\xc0"),
    "a list in a set": ext(form.SET, [[1]]),
    "deep": nested(150),
    "deeper": nested(2000),
    "deep lists": msgspec.Raw(b"\x91" * 100_000 + b"\xc0"),
    "a huge array of few bytes": ext(form.ARRAY, ["<f8", [1 << 40], False, b"12345678"]),
    "one whose size wraps": ext(form.ARRAY, ["<f8", [1 << 61, 8], False, b""]),
    "a negative size": ext(form.ARRAY, ["<f8", [-1, -1], False, b"12345678"]),
    "many dims": ext(form.ARRAY, ["<f8", [1] * 1000, False, b"12345678"]),
    "objects": ext(form.ARRAY, ["|O", [1], False, b"12345678"]),
    "objects that are named else": ext(form.ARRAY, ["|O8", [1], False, b"12345678"]),
    "a structured dtype": ext(form.ARRAY, ["f4,i4", [1], False, b"12345678"]),
    "a dtype that is no text": ext(form.ARRAY, [5, [1], False, b"12345678"]),
    "a bool that is none": ext(form.ARRAY, ["|b1", [1], False, b"\x02"]),
    "text beyond Unicode": ext(form.ARRAY, ["<U1", [1], False, b"\xff\xff\xff\x7f"]),
    "a long double of another machine": ext(form.ARRAY, ["<f16/112", [1], False, bytes(16)]),
    "an array that did not come": ext(form.LARGE_ARRAY, ["<f8", [1], False]),
    "bytes that did not come": msgspec.msgpack.Ext(form.LARGE_BYTES, b""),
    "a tensor that did not come": msgspec.msgpack.Ext(form.TENSOR, b""),
    "a date that is none": ext(40, [2023, 2, 29]),
    "a date of NaN": ext(40, [float("nan"), 1, 1]),
    "a date of floats": ext(40, [2023.0, 1, 1]),
    "a year of 10**9": ext(40, [10**9, 1, 1]),
    "a time of NaN": ext(41, [float("nan"), 0, 0, 0, 0, None]),
    "a fold of 7": ext(41, [0, 0, 0, 0, 7, None]),
    "a timedelta of NaN": ext(43, [float("nan"), 0, 0]),
    "a timedelta too long": ext(43, [10**12, 0, 0]),
    "a zone of three days": ext(44, [3 * 86400 * 10**6]),
    "a path that is no text": ext(39, [0, "x"]),
    "a path of bad bytes": ext(39, [0, b"\xc0\x80"]),
    "a path of no kind": ext(39, [-1, b"x"]),
    "a Decimal that is none": ext(45, "1e"),
    "a Decimal of a number": ext(45, 5),
    "a Fraction by zero": ext(46, [b"\1", b"\0"]),
    "a Fraction that is long": ext(46, [b"\1" * 100_000, b"\1" * 99_999]),
    "a UUID of 3 bytes": ext(47, b"xxx"),
    "a range by zero": ext(36, [b"\0", b"\1", b"\0"]),
    "a dtype that is none": ext(37, 999),
    "a factory that is none": ext(form.DEFAULT, [99]),
    "a return type that is none": ext(form.RETURN_TYPE, ["__builtins__"]),
    "no code": ext(99, [1]),
    "an object of one part": ext(form.OBJECT, ["dataclass"]),
    "a name that is a list": ext(form.OBJECT, ["dataclass", [1], []]),
    "a reference where there may be none": ext(form.REFERENCE, [1, 0, None]),
    "a name of control characters": ext(form.OBJECT, ["dataclass", "\x1b[2J", []]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_honest_node_says(name: str) -> None:
    kit.RAN.clear()
    with pytest.raises(ProtocolError):
        values.decode(said(HOSTILE[name]), [], kit.CLASSES)
    with pytest.raises(ProtocolError):
        values.decode(said([1, {"x": HOSTILE[name]}]), [], kit.CLASSES)
    assert not kit.RAN


@pytest.mark.parametrize("cls", [kit.Unannounced, "os.system", "builtins.object", "posix.system", "value_kit.Telling"])
@pytest.mark.parametrize("kind", ["dataclass", "namedtuple", "enum", "exception"])
def test_a_class_that_nobody_announced(cls: type | str, kind: str) -> None:
    with pytest.raises(values.Unannounced, match="was not announced"):
        values.decode(said(thing(kind, cls, [{}])), [], kit.CLASSES)


def test_two_classes_of_one_name_are_not_told_apart() -> None:
    others = [dataclasses.make_dataclass("Same", ["x"]) for _ in range(2)]
    data = values.encode(others[0](1), [])
    assert values.decode(data, [], others[:1]).x == 1
    with pytest.raises(values.Unannounced, match="two different classes of that name"):
        values.decode(data, [], others)


@pytest.mark.parametrize(
    "data",
    [b"", b"\1", bytes(4), b"\1\0\0\0", b"\1\0\0\0\0\0\0\0", b"\xff\xff\xff\xff", bytes(4) + b"\xc1",
     bytes(4) + b"\x93\x01", bytes(4) + b"\xc7\x00\x63", bytes(4) + b"\xd4\x02\xff", bytes(4) + b"\x01\x01",
     b"\2\0\0\0" + bytes(8) + b"\1"],
)  # fmt: skip
@pytest.mark.parametrize("tensors", [[], ["T"]])
def test_bytes_that_are_no_value(data: bytes, tensors: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        values.decode(data, tensors)


def test_tensors_that_are_left_over_are_refused() -> None:
    with pytest.raises(ProtocolError, match="1 tensors are left over"):
        values.decode(said(1), ["T"])
    for wrong in (torch.zeros(3), torch.zeros(1, 3, dtype=torch.uint8), "T"):
        with pytest.raises(ProtocolError, match="no tensor of bytes"):
            values.decode(b"\1\0\0\0\0\0\0\0\1", [wrong])
