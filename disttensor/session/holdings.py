"""Words for what a node holds: how much, and the largest tensors by the lines of the user's program that made them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ..runtime.master.failures import Site, line_of
from ..runtime.process.tables import size as size
from ..runtime.protocol import commands as c

#: The most lines that are named.
LINES = 10

#: Returns the lines that made the tensors of these refs, where they are known: set by proxy/, above.
_lines: list[Callable[[Collection[int]], dict[int, Site]]] = []


def lines_by(find: Callable[[Collection[int]], dict[int, Site]]) -> None:
    """Declares the function that finds the lines which made tensors that there are proxies of."""
    _lines[:] = [find]


def amounts_held(holdings: c.Holdings) -> str:
    """Returns how much a node holds, and how much is left."""
    return (
        f"{size(holdings.bytes)} in {holdings.tensors} tensor{'' if holdings.tensors == 1 else 's'}; "
        f"{size(holdings.free)} of {size(holdings.total)} are left"
    )


class LineHolds(NamedTuple):
    """The tensors that a node holds and one line has made."""

    line: str  #: such as "train.py:12 in step"
    tensors: int
    bytes: int
    largest: str  #: such as "float32 (1024, 512)"

    def __str__(self) -> str:
        many = f"{self.tensors} tensors, the largest {self.largest}" if self.tensors > 1 else self.largest
        return f"  {size(self.bytes):>11}  {self.line}: {many}"


def by_line(holdings: c.Holdings, makers: Mapping[int, Site]) -> list[LineHolds]:
    """Returns the largest of the tensors that a node holds, by the lines that made them: each prints as a text.

    The line of a large tensor is known that the script still has, and that of one which it has made lately
    (``makers``).
    """
    refs = {each.ref for each in holdings.largest}
    known = {**makers, **_lines[0](refs)}
    groups: dict[str, list[c.Held]] = {}
    for each in holdings.largest:
        site = known.get(each.ref)
        groups.setdefault("a line that is not known any more" if site is None else line_of(site), []).append(each)
    found = [
        LineHolds(
            line,
            len(tensors),
            sum(each.bytes for each in tensors),
            max(tensors, key=lambda each: each.bytes).what,
        )
        for line, tensors in groups.items()
    ]
    return sorted(found, key=lambda each: -each.bytes)[:LINES]


def memory_note(holdings: c.Holdings, rank: int, makers: Mapping[int, Site]) -> str:
    """Returns what to add to the error of a command that failed for want of memory."""
    lines = "\n".join(["  its largest tensors, by the lines that made them:", *map(str, by_line(holdings, makers))])
    return f"node {rank} held {amounts_held(holdings)}\n{lines if holdings.largest else ''}".rstrip()
