"""Dictionaries of the script and of functions on nodes.

The names in brackets are those of torch-ipc's own cases (its test/test_sharedtable.lua), which are all here. ``move``,
which empties the table that was given, is Lua's way to save memory: here a value is copied once more anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from everywhere import FROM, here, on_node
from hypothesis import example, given, settings
from hypothesis import strategies as st

import disttensor as dt
from disttensor.tasks import Barrier, Channel, Lock, SharedDict

pytestmark = pytest.mark.row("I23")


@pytest.fixture(scope="module", autouse=True)
def reached(either: None) -> None:
    """Each node has its connection before the tests look for leaks."""
    for node in range(2):
        assert dt.run(len, SharedDict(), node=node) == 0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(6) as made:
        yield made


def everything(t: Any) -> list[Any]:
    """What a dictionary says to each of its methods; with Python's own the same comes out."""
    said: list[Any] = [len(t), list(t), list(t.items()), list(t.values()), dict(t), t == dict(t)]
    for act in (
        lambda: t["a"], lambda: t["nobody"], lambda: t.get("nobody"), lambda: t.get("a", 3), lambda: "a" in t,
        lambda: "nobody" in t, lambda: t.__delitem__("nobody"), lambda: t.__delitem__("a"), lambda: t["a"],
        lambda: t.setdefault("a", [4]), lambda: t.setdefault("a", [5]), lambda: t.pop("a"), lambda: t.pop("a", 6),
        lambda: t.pop("a"), lambda: t.update({1: "one", "z": None}), lambda: t.__setitem__(True, "true"),
        lambda: t[1.0], lambda: list(t), lambda: t.popitem(), lambda: t.popitem(), lambda: t.update(x=1),
        lambda: (None in t.values(), ("x", 1) in t.items()), lambda: "x" in set(t.keys()), lambda: t.clear(),
        lambda: len(t),
        lambda: t.popitem(), lambda: t.setdefault(None), lambda: t[None], lambda: bool(t),
    ):  # fmt: skip
        try:
            said.append(act())
        except KeyError as e:
            said.append(["KeyError", *map(str, e.args[:1] if e.args[0] != "popitem(): dictionary is empty" else [])])
    return [["KeyError"] if isinstance(x, list) and "popitem" in str(x) else x for x in said]


@FROM
def test_it_does_what_python_s_own_does(at: Callable[..., Any]) -> None:
    """[testCount, testRead, testPairs, testMove: what was given is in, in order, and still there]"""
    given_first: dict[Any, Any] = {"b": 2, "a": [1, {"x": (2, None)}], 7: 3.5, (1, "t"): b"\0", "": {"n": {1, 2}}}
    assert at(everything, SharedDict(given_first)) == everything(dict(given_first))
    assert list(given_first) == ["b", "a", 7, (1, "t"), ""]
    assert at(everything, SharedDict(given_first.items())) == everything(dict(given_first))


def test_an_empty_one() -> None:
    """[testEmpty]"""
    for t in (SharedDict(), SharedDict({}), SharedDict([])):
        assert len(t) == 0
        assert list(t) == list(t.items()) == []


@FROM
def test_writes(at: Callable[..., Any]) -> None:
    """[testWrite] What is changed in a value that came out stays outside until it is put in again."""

    def change(t: Any) -> list[int]:
        for i in range(3):
            t[i] = t[i] + 1
        out = t["list"]
        out.append(2)
        return t["list"]  # type: ignore[no-any-return]

    t = SharedDict({0: 2, 1: 3, 2: 4, "list": [1]})
    assert at(change, t) == [1]
    assert [t[i] for i in range(3)] == [3, 4, 5]


def test_writes_of_others(pool: ThreadPoolExecutor) -> None:
    """[testWriteOnOther]"""

    def counts(t: Any) -> None:
        for _ in range(100):
            t[1] = t[1] + 1

    def sets(t: Any, i: int) -> None:
        t[i] = i

    t = SharedDict({1: 0})
    on_node(counts, t)
    assert t[1] == 100
    for work in [dt.submit(sets, t, i, node=i % 2) for i in range(1, 21)]:
        work.result()
    assert {key: t[key] for key in range(2, 21)} == {i: i for i in range(2, 21)}
    assert len(t) == 20


def test_a_lock_guards_it(pool: ThreadPoolExecutor) -> None:
    """[testMultipleWrites, testExternalType: the lock is in the dictionary, and so are tensors]"""

    def work(t: Any) -> None:
        for i in range(10):
            with t["lock"]:
                t[i] = t.get(i, torch.tensor([0])) + 1

    t = SharedDict({"lock": Lock()})
    for done in [pool.submit(dt.run, work, t, node=node) for node in (0, 1)] + [pool.submit(work, t)]:
        done.result()
    assert [int(t[i]) for i in range(10)] == [3] * 10
    assert len(t) == 11


@FROM
def test_dictionaries_in_a_dictionary(at: Callable[..., Any]) -> None:
    """[testTableIncrement, testTableExpand] One that the script has made is the same one for whoever gets it."""

    def work(t: Any) -> list[Any]:
        for i in range(2):
            t[i][len(t[i])] = i
            t[i].add("count", 2)
        return [dict(t[i]) for i in range(2)]

    t, inner = SharedDict(), [SharedDict({"count": k}, name=f"inner {k}") for k in range(2)]
    t.update(enumerate(inner))
    t["channel"], t["barrier"] = Channel(3, "c"), Barrier(1, timeout=2.5)
    expected = [{"count": k + 2, 1: k} for k in range(2)]
    assert at(work, t) == expected
    assert [dict(x) for x in inner] == expected
    assert repr(t["channel"]) == "<Channel c maxsize=3>"
    assert t["barrier"].wait() == 0
    assert t[0].name == "inner 0"
    with pytest.raises(TypeError, match=r"<Barrier \d+> can't be put into <SharedDict \d+>: its action can't cross"):
        t["barrier"] = Barrier(1, action=print)


@FROM
def test_tensors(at: Callable[..., Any]) -> None:
    def swap(t: Any) -> list[Any]:
        x = t["x"]
        t["y"] = {"twice": x * 2}
        x.zero_()
        return [type(x) is torch.Tensor, x.device.type]

    x = torch.randn(3, 4)
    t = SharedDict({"x": x.to("node:1")})
    assert at(swap, t) == [True, "cpu"]
    assert torch.equal(t["x"], x)
    assert torch.equal(t["y"]["twice"], x * 2)


def test_no_change_is_lost(pool: ThreadPoolExecutor) -> None:
    """``modify`` and ``add`` of many at once; without them changes are lost."""

    def work(t: Any) -> None:
        for _ in range(40):
            t.add("n")
            t.modify("list", lambda found: [*found, len(found)], [])

    t = SharedDict()
    for done in [pool.submit(dt.run, work, t, node=node) for node in (0, 1)] + [pool.submit(work, t)]:
        done.result()
    assert t["n"] == 120
    assert t["list"] == list(range(120))
    assert t.add("n", 0.5) == 120.5
    with pytest.raises(KeyError, match="nobody"):
        t.modify("nobody", str)

    def fails(value: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        t.modify("n", fails)
    assert t["n"] == 120.5


def test_what_was_taken_out_and_put_in_again_is_another_value() -> None:
    """``modify`` is not taken in by a value that went and came back while the function ran."""
    t, seen = SharedDict({"k": 1}), list[int]()

    def function(value: int) -> int:
        seen.append(value)
        if len(seen) == 1:
            del t["k"]
            t["k"] = 1
        return value + 1

    assert t.modify("k", function) == 2
    assert seen == [1, 1]


@FROM
def test_wait(at: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    t = SharedDict({"there": 1})
    assert at(SharedDict.wait, t, "there") == 1
    with pytest.raises(TimeoutError, match=r"<SharedDict \d+> has had no 'x' within 0\.01 s"):
        at(SharedDict.wait, t, "x", 0.01)
    waiting = [pool.submit(at, SharedDict.wait, t, "x")]
    if at is here:
        waiting.append(pool.submit(SharedDict.wait, t, "x"))
    t["y"] = 2
    t["x"] = [3]
    assert [work.result() for work in waiting] == [[3]] * len(waiting)


def test_its_size() -> None:
    """[testSize] And what was taken out is not counted."""
    t = SharedDict()
    assert t.nbytes == 0
    for i in range(10):
        t[i] = list(range(1000))
    assert t.nbytes > 10 * 1000
    full = t.nbytes
    t[0] = 0
    assert full - 3 * 1000 < t.nbytes < full - 1000
    t.clear()
    assert t.nbytes == 0


def test_many_keys_come_in_pages() -> None:
    t, text = SharedDict(), "x" * 60_000
    for i in range(40):
        t[i, text] = i
    t["large"] = torch.zeros(1 << 20)
    t["last"] = 1
    assert list(t) == [*((i, text) for i in range(40)), "large", "last"]
    assert [v if isinstance(v, int) else v.shape[0] for v in on_node(lambda t: list(t.values()), t)] == [
        *range(40), 1 << 20, 1,
    ]  # fmt: skip


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary(max_size=3)
    | st.sampled_from([0, 0.0, -0.0, False, 1, 1.0, True, 2**63, 2.0**63, 2**70, 2.0**70, float("inf"), "1", b"1"])
)  # fmt: skip
KEYS = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)


@settings(max_examples=60, deadline=None)
@example([(1, 0), (1.0, 1), (True, 2), ("1", 3)])
@example([(-0.0, 0), (False, 1), (0, 2), (None, 3), (2.0**70, 4), (2**70, 5), (float("inf"), 6)])
@example([((1, ("a", 2.0)), 0), ((True, ("a", 2)), 1), ((1, "a", 2), 2)])
@given(st.lists(st.tuples(KEYS, st.integers(0, 9)), max_size=8))
def test_keys_are_equal_as_python_s_are(pairs: list[tuple[Any, int]]) -> None:
    t, own = SharedDict(), dict[Any, int]()
    for key, value in pairs:
        t[key] = own[key] = value
    assert list(map(repr, t.items())) == list(map(repr, own.items()))
    assert all(key in t for key in own)


@FROM
@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        ([1], TypeError, "is None, a number, text, bytes or a tuple of these, not a list"),
        ((1, {2}), TypeError, "not a set"),
        (frozenset([1]), TypeError, "not a frozenset"),
        (1j, TypeError, "not a complex"),
        (float("nan"), ValueError, "NaN is no key"),
        ("x" * 70_000, ValueError, r"has 70\d\d\d bytes, and may have 64 KiB"),
    ],
)
def test_keys_that_are_none(at: Callable[..., Any], key: Any, error: type[Exception], match: str) -> None:
    def sets(t: Any, key: Any) -> None:
        t[key] = 1

    t = SharedDict()
    with pytest.raises(error, match=match):
        at(sets, t, key)
    assert len(t) == 0
    t[np.int64(3)] = t[np.str_("x")] = 1
    assert list(t) == [3, "x"]


@FROM
def test_values_that_are_none(at: Callable[..., Any]) -> None:
    def sets(t: Any, kind: str) -> str:
        value: Any = object() if kind == "object" else b"x" * (65 << 20)
        try:
            t["k"] = value
        except (TypeError, ValueError) as e:
            return f"{type(e).__name__}: {e}"
        return ""

    t = SharedDict({"k": 1})
    assert at(sets, t, "object").startswith("TypeError: an item has a builtins.object")
    assert "and 64 MiB may come" in at(sets, t, "large")
    assert t["k"] == 1


def test_it_is_found_by_its_name() -> None:
    t = SharedDict({"k": 1}, name="settings")
    assert on_node(lambda: SharedDict.named("settings")["k"]) == 1
    assert SharedDict.named("settings") is t
    with pytest.raises(dt.DisttensorError, match="a SharedDict is made by the script"):
        on_node(SharedDict)
