"""Values of every kind that crosses a wire without pickle, and classes that would tell if a line of theirs were run."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dates
import decimal
import enum
import fractions
import os
import pathlib
import uuid
from typing import Any, NamedTuple

import numpy as np
import torch

#: What methods of the classes below have been called, since it was cleared.
RAN: list[str] = []


class Telling:
    """Says of each method that could be called where an object is made, used or dropped that it was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        RAN.append("__init__")

    def __setstate__(self, state: Any) -> None:
        RAN.append("__setstate__")

    def __setattr__(self, name: str, value: Any) -> None:
        RAN.append("__setattr__")
        object.__setattr__(self, name, value)

    def __str__(self) -> str:
        RAN.append("__str__")
        return "telling"


@dataclasses.dataclass
class Stats(Telling):
    """An ordinary dataclass with everything that could be called."""

    loss: float
    steps: int = 0
    inner: Any = None
    total: float = dataclasses.field(init=False, default=0.0)

    def __new__(cls, *args: Any, **kwargs: Any) -> Stats:
        RAN.append("__new__")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        RAN.append("__post_init__")
        self.total = self.loss * self.steps

    @property
    def mean(self) -> float:
        RAN.append("mean")
        return self.total / self.steps


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A frozen dataclass with slots, which can be a key."""

    x: Any
    y: Any = None

    def __post_init__(self) -> None:
        RAN.append("__post_init__")


@dataclasses.dataclass(frozen=True)
class OwnHash:
    """A dataclass with a ``__hash__`` of its own."""

    x: int

    def __hash__(self) -> int:
        RAN.append("__hash__")
        return 1


class Pair(NamedTuple):
    """A namedtuple."""

    first: Any
    second: Any = None


class NewPair(collections.namedtuple("NewPair", "first second")):
    """A namedtuple with a ``__new__``."""

    __slots__ = ()

    def __new__(cls, first: Any, second: Any) -> NewPair:
        RAN.append("__new__")
        return super().__new__(cls, first, second)


class Colour(enum.Enum):
    """An enum."""

    RED = 1
    GREEN = "green"

    @classmethod
    def _missing_(cls, value: object) -> Colour:
        RAN.append("_missing_")
        return cls.RED


class Broken(ValueError):
    """An exception that takes other arguments than it passes on."""

    def __init__(self, code: int, *, where: str = "") -> None:
        RAN.append("__init__")
        super().__init__(f"broken {code}")
        self.code, self.where = code, where

    def retry(self) -> None:
        """A method, which no attribute may hide."""


class NoFile(FileNotFoundError):
    """One that stands on an exception of C with members of its own."""


@dataclasses.dataclass
class Unannounced:
    """A dataclass that nobody has announced."""

    x: int = 1


class Reducing:
    """Would have a function called by who unpickles it."""

    def __reduce__(self) -> Any:
        return RAN.append, ("__reduce__",)


class Lying:
    """Says that it is a tensor."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        RAN.append("__class__")
        return torch.Tensor


class Angry:
    """Answers everything with the end of the process."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(1)

    def __eq__(self, other: object) -> bool:
        raise SystemExit(2)

    def __hash__(self) -> int:
        raise SystemExit(3)

    def __repr__(self) -> str:
        raise SystemExit(4)

    def __call__(self) -> None: ...


class AngryKind(type):
    """A metaclass that does so."""

    def __getattribute__(cls, name: str) -> Any:
        raise SystemExit(1)

    def __instancecheck__(cls, value: Any) -> bool:
        raise SystemExit(2)

    def __subclasscheck__(cls, value: Any) -> bool:
        raise SystemExit(3)


def of_angry_kind() -> Any:
    """Makes an object of a class of that metaclass."""
    return AngryKind("OfAngry", (), {"__module__": __name__})()


class Exiting(torch.Tensor):
    """A tensor that ends the process when torch's functions get it."""

    def __new__(cls) -> Exiting:
        return torch.ones(1).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise SystemExit(5)


class AngryError(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise SystemExit(6)

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(7)


CLASSES = (Stats, Point, OwnHash, Pair, NewPair, Colour, Broken, NoFile)

VALUES: list[Any] = [
    None, True, -1, 2**64 - 1, 2**64, -(2**70), 1.5, float("inf"), "text", "\u00e9", "\ud800", b"bytes",
    bytearray(b"x"), 1j, [1, [2]], (1, (2,)), {1, 2}, frozenset({1}), {}, {1: 2, "a": 3}, {(1, 2): 3, b"k": 4, None: 5},
    collections.OrderedDict(b=1, a=2), collections.Counter("aab"), collections.defaultdict(list, {1: [2]}),
    collections.deque([1, 2], 3), range(1, 9, 2), torch.bfloat16, torch.Size([1, 2]),
    dates.date(2024, 2, 29), dates.time(1, 2, 3, 4, fold=1), dates.datetime(2024, 1, 1), dates.timedelta(-1, 2, 3),
    dates.datetime(2024, 1, 1, tzinfo=dates.UTC), dates.timezone(dates.timedelta(hours=-3), "name"),
    decimal.Decimal("-1.50E+3"), decimal.Decimal("NaN"), fractions.Fraction(-1, 3), uuid.UUID(int=5),
    pathlib.Path(os.fsdecode(b"/x/\xff")), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:\\x"),
    np.arange(6).reshape(2, 3), np.array("text"), np.zeros((0, 3)), np.float32(1.5), np.str_("x"), np.bytes_(b"x"),
    np.datetime64("2024-01-01"), np.array([True]),
    Stats(1.0, 2, Point(1)), {Point(1, (2,)): Pair(1, [2])}, NewPair(1, 2), {Colour.RED: Colour.GREEN},
    Broken(3, where="here"), NoFile(2, "no", "/x"),
]  # fmt: skip
RAN.clear()
