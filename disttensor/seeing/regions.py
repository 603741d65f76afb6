"""Names for parts of the script, which a profile shows above the lines that they have in them."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

from ..runtime.process.clock import CLOCK
from ..runtime.process.observing import Point


class RegionEnded(NamedTuple):
    """A part of the script that has ended."""

    at: float
    began: float
    name: str


#: Where profiles hear of regions.
ended = Point[RegionEnded]("regions")


class Region:
    """A part of the script with a name. It is entered once at a time."""

    __slots__ = ("_began", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = 0.0

    def __repr__(self) -> str:
        return f"<disttensor.seeing.Region {self._name!r}>"

    def __enter__(self) -> Region:
        self._began = CLOCK.now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if ended.listeners:
            ended.notify(RegionEnded(CLOCK.now(), self._began, self._name))


def region(name: str) -> Region:
    """Names what the script does in a ``with`` block, for profiles: ``with dt.seeing.region("forward"):``.

    Without a profile it does nothing.
    """
    return Region(name)
