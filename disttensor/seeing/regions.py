"""Names for parts of the script, which a profile shows above the lines that they have in them."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from ..runtime.process.clock import CLOCK


class RegionRecorder(Protocol):
    """The recording of a profile, as regions know it."""

    def note_edge(self) -> float:
        """Returns the time of a begin or an end, and notes which commands were issued before it."""
        ...

    def note_region(self, began: float, name: str) -> float:
        """Keeps a region that ends now in this thread. Returns the time."""
        ...


#: What records regions at present. Read for each: an optimizer's step has two.
recorder: RegionRecorder | None = None


class Region:
    """A part of the script with a name. It is entered once at a time."""

    __slots__ = ("_began", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = 0.0

    def __repr__(self) -> str:
        return f"<disttensor.seeing.Region {self._name!r}>"

    def __enter__(self) -> Region:
        self._began = CLOCK.now() if recorder is None else recorder.note_edge()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if recorder is not None:
            recorder.note_region(self._began, self._name)


def region(name: str) -> Region:
    """Names what the script does in a ``with`` block, for profiles: ``with dt.seeing.region("forward"):``.

    Without a profile it does nothing.
    """
    return Region(name)
