"""The origin of a tensor, as ``dt.seeing.whence`` returns it: plain values, which print as a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..session.holdings import size


@dataclass(frozen=True)
class OriginCommand:
    """A command that has made a tensor, or written it."""

    #: such as "aten::addmm", "step()", "all_reduce"; "an upload", "a copy from node 0"; "" where only the line is known
    operator: str
    line: str  #: the line that has issued it, such as "train.py:33"; "" where no line has, or that isn't known
    code: str  #: such as "model(x)"; "" without sources
    node: int
    number: int = -1  #: its number among the node's commands; -1 where that isn't known
    replayed: str = ""  #: the line of the replay by which a graph has done it, ``line`` being the recorded one
    sure: bool = True  #: False for a function that has had the tensor, and may have written it
    source: OriginCommand | None = None  #: of a copy from another node: what has made, or last written, it there

    def __str__(self) -> str:
        text = self.operator or "a command"
        text += f" at {self.line}" if self.line else " (its line is not known)"
        text += f", replayed at {self.replayed}" if self.replayed else ""
        return text + (f", as {self.source} has left it there" if self.source is not None else "")


@dataclass(frozen=True)
class Origin:
    """The origin of a tensor: what has made it and what has written it last, as far as the script knows that."""

    shape: tuple[int, ...]
    dtype: str
    place: str  #: such as "node 1", "dp=1" for one of a mesh's ranks, or "dp=2, nodes 0 and 1"
    nodes: tuple[int, ...]
    bytes: int
    made: OriginCommand | None  #: what has made it; for a view the operator of the view, at the line that first used it
    memory: OriginCommand | None  #: for a view: what has made the tensor that it lies in
    written: OriginCommand | None  #: what has written it in place last, be it by a view of the same memory
    is_view: bool  #: whether it lies in another tensor's memory, as far as that is known
    ready: bool  #: whether it is known to be computed
    failure: str  #: what has left it without a value: "RuntimeError: ..., in aten::mm at train.py:31"; "" for none
    unknown: tuple[str, ...] = ()  #: what is not known, and why
    ranks: tuple[Origin, ...] = ()  #: for a mesh whose ranks have their values from elsewhere: each one's

    def __repr__(self) -> str:
        text = f"{self.dtype} {self.shape} on {self.place}: " + ", ".join([*self._parts(), *self.unknown])
        text += f"; {size(self.bytes)}; "
        text += f"failed: {self.failure}" if self.failure else "ready" if self.ready else "not known to be ready"
        return "\n  ".join([text, *map(repr, self.ranks)])

    def _parts(self) -> Iterator[str]:
        if self.is_view:
            made = "a view"
            if self.made is not None:
                made += (
                    f" by {self.made} (its first use)" if self.made.line else f" by {self.made.operator}, not used yet"
                )
            yield made + (f" of what {self.memory} has made" if self.memory is not None else "")
        elif self.made is not None:
            yield f"made by {self.made}"
        if self.written is not None:
            yield f"last written by {self.written}" if self.written.sure else f"perhaps written by {self.written}"

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, which json writes."""
        return asdict(self, dict_factory=_plain)

    def is_like(self, other: Origin) -> bool:
        """Returns whether another rank's tensor comes from the same commands of the script."""
        ours, theirs = self._lines(), other._lines()
        return ours == theirs and (self.failure, self.unknown) == (other.failure, other.unknown)

    def _lines(self) -> list[OriginCommand | None]:
        """Returns the commands without what tells nodes apart that were issued the same."""
        commands = (self.made, self.memory, self.written)
        return [None if it is None else replace(it, node=0, number=0) for it in commands]


def _plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields}
