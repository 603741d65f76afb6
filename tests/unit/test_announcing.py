"""What a call announces: classes of returns=, of return annotations in whatever form, and of their fields."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import Mock

import pytest
import torch
from value_kit import Broken, Pair, Point, Stats

from disttensor.tasks.announcing import Announcing, announced_by

if TYPE_CHECKING:
    from elsewhere import Nowhere  # type: ignore[import-not-found]

_F = TypeVar("_F", bound=Callable[..., Any])


def traced(fn: _F) -> _F:
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        return fn(*args)

    return call  # type: ignore[return-value]


class Policy:
    steps: int

    def act(self) -> Pair: ...  # type: ignore[empty-body]

    @staticmethod
    def fixed() -> Pair: ...  # type: ignore[empty-body]

    def __call__(self) -> Pair: ...  # type: ignore[empty-body]


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Pair: ...  # type: ignore[empty-body]


@traced
def decorated() -> Pair: ...  # type: ignore[empty-body]


@functools.lru_cache
def cached() -> Pair: ...  # type: ignore[empty-body]


def of_a_type_checker(x: Nowhere) -> Pair: ...  # type: ignore[empty-body]


def nested() -> dict[str, list[Pair] | None]: ...  # type: ignore[empty-body]


@dataclasses.dataclass
class Outer:
    """Has a field whose type can't be found, and one whose can."""

    missing: Nowhere
    inner: tuple[Pair, ...]


def outer() -> Outer: ...  # type: ignore[empty-body]


ANNOTATED: dict[str, Any] = {
    "a method": Policy().act,
    "a static method": Policy.fixed,
    "an object with a __call__": Policy(),
    "a module's forward": Net(),
    "a decorator that wraps": decorated,
    "lru_cache": cached,
    "a partial of a partial": functools.partial(functools.partial(nested)),
    "a method of a decorated function": functools.partial(Policy.act, None),
    "beside a name for type checkers": of_a_type_checker,
    "in other types": nested,
    "a field, beside another that can't be found": outer,
    "the class itself": Pair,
}


@pytest.mark.parametrize("name", ANNOTATED)
def test_annotations(name: str) -> None:
    assert Pair in announced_by(Announcing(ANNOTATED[name]))


@pytest.mark.parametrize(
    "fn", [pow, None, Mock(), lambda: 1, print, functools.partial(pow, 2)], ids=lambda x: type(x).__name__
)
def test_what_says_nothing_announces_nothing(fn: Any) -> None:
    assert not list(announced_by(Announcing(fn)))


def test_what_is_named() -> None:
    announced = announced_by(Announcing(pow, returns=[Stats, dict[str, Point]], raises=(Broken,)), [Pair])
    assert set(announced) == {Stats, Point, Broken, Pair}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (Announcing(pow, returns=int), r"returns=<class 'int'> names no dataclass"),
        (
            Announcing(pow, raises=OSError),
            r"raises=.*OSError.*Python's own exceptions need not be announced",
        ),
        (Announcing(pow, raises=Pair), r"raises=.*: Pair is not an exception; returns= is for what is returned"),
        (Announcing(pow, returns=torch.nn.Linear), "other classes can't come back"),
    ],
)
def test_what_can_not_be_named(call: Announcing, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        announced_by(call)
