"""Batches in words: what a node says of one, and what the master makes of it, whatever a node says."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import inputs

from disttensor.runtime.protocol.batches import describe, rebuild
from disttensor.runtime.protocol.errors import ProtocolError


class Pair(NamedTuple):
    x: torch.Tensor
    rest: Any


class Hostile(tuple[Any, ...]):
    """A class whose code must not run because a node names it."""

    _fields = ("x",)
    made: list[Any] = []  # noqa: RUF012

    def __new__(cls, *args: Any) -> Hostile:
        cls.made.append(args)
        return super().__new__(cls, *args)

    def __init__(self, *args: Any) -> None:
        self.made.append(args)


def whole(described: Any) -> Any:
    return rebuild([described], lambda path, found: (path, *found[0]), lambda path, values: values[0])


def test_all_forms() -> None:
    x = torch.ones(2, 3)
    batch = Pair(x, OrderedDict(a=[x.long(), (x[0], "text")], b=["one", 2, None, 1.5, 1j, b"x"], c=()))
    described, tensors = describe(batch)
    assert [tuple(t.shape) for t in tensors] == [(2, 3), (2, 3), (3,)]
    made = whole(described)
    assert type(made) is Pair
    assert made == (
        ("batch.x", (2, 3), torch.float32),
        {
            "a": [
                ("batch.rest['a'][0]", (2, 3), torch.int64),
                (("batch.rest['a'][1][0]", (3,), torch.float32), "text"),
            ],
            "b": ["one", 2, None, 1.5, 1j, b"x"],
            "c": (),
        },
    )


def test_no_code_of_a_class_runs() -> None:
    made = whole(["named", __name__, "Hostile", ["x"], [["plain", 1]]])
    assert type(made) is Hostile
    assert Hostile.made == []


@pytest.mark.parametrize(
    "named", [["builtins", "tuple", []], ["os", "stat_result", ["x"]], [__name__, "Pair", ["x"]], ["no", "x.y", []]]
)
def test_classes_that_are_no_such_namedtuples(named: list[Any]) -> None:
    with pytest.raises(TypeError, match="has no namedtuple of this name"):
        whole(["named", *named, [["plain", 1] for _ in named[-1]]])


@pytest.mark.parametrize(
    ("each", "message"),
    [
        ([["list", [["plain", 1]]], ["list", []]], "ranks have batch of other kinds or lengths: list of 1, list of 0"),
        ([["list", []], ["tuple", []]], "ranks have list, tuple as batch"),
        ([["dict", ["a"], [["plain", 1]]], ["dict", ["b"], [["plain", 1]]]], "other kinds or lengths"),
    ],
)
def test_ranks_that_differ(each: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rebuild(each, lambda path, found: None, lambda path, values: None)


words = st.sampled_from(["tensor", "plain", "list", "tuple", "dict", "named", "", __name__, "Hostile", "x"])
told = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), words),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.builds(lambda word, rest: [word, *rest], words, st.lists(inner, max_size=4)),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=20,
)


@settings(max_examples=inputs(100), deadline=None)
@given(st.lists(told, min_size=1, max_size=3))
def test_whatever_a_node_says(each: list[Any]) -> None:
    with contextlib.suppress(ProtocolError, ValueError, TypeError):
        rebuild(each, lambda path, found: None, lambda path, values: None)
    assert Hostile.made == []


def test_a_batch_that_has_no_end() -> None:
    deep: Any = ["plain", 1]
    for _ in range(100_000):
        deep = ["list", [deep]]
    with pytest.raises(ProtocolError, match="RecursionError"):
        whole(deep)
