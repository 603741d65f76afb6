"""The failures that nodes have reported, and the exceptions that the master raises for them.

They are raised at the user's next synchronization.
"""

from __future__ import annotations

import builtins
import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType

import torch

from ..process import cells
from ..protocol import commands as c
from ..protocol.errors import (
    CancelledError,
    DisttensorError,
    GeometryError,
    NodeLost,
    NonFiniteError,
    PeerFailed,
    RemoteError,
)
from ..protocol.failure_ids import MAX_ARGS, MAX_NAME, MAX_TEXT, position

#: The place where a command was issued: a code object and the index of the instruction in it. Cheaper than a line.
Site = tuple[CodeType, int]

_KNOWN: dict[str, type[Exception]] = {
    f"builtins.{name}": kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)
} | {
    **{
        f"{kind.__module__}.{kind.__name__}": kind
        for kind in (DisttensorError, CancelledError, GeometryError, NonFiniteError, PeerFailed)
    },
    "torch.OutOfMemoryError": torch.OutOfMemoryError,
    "torch._C._LinAlgError": torch._C._LinAlgError,  # type: ignore[attr-defined]
}

_PEER_FAILED = f"{PeerFailed.__module__}.{PeerFailed.__name__}"
_CANCELLED = f"{CancelledError.__module__}.{CancelledError.__name__}"

#: The number of failures kept with their traceback and their whole message. Later ones are kept without, but that the
#: oldest of those that were observed give theirs up first.
MAX_TRACES = 256
#: The most later failures that are attached to the exception of the earliest.
MAX_ATTACHED = 8
#: The most failures that are kept.
MAX_FAILURES = 10_000


class Replayed(tuple[CodeType, int]):
    """The site of a replay, with the sites of the commands that the graph has recorded for each node."""

    recorded: Mapping[int, Sequence[Site | None]]

    def __new__(cls, site: Site, recorded: Mapping[int, Sequence[Site | None]]) -> Replayed:
        made = super().__new__(cls, site)
        made.recorded = recorded
        return made


def line_of(site: Site | None) -> str:
    """Returns the line of a site in words: "train.py:12 in step", "Cell In[3], line 2 in f", or "an unknown line"."""
    if site is None:
        return "an unknown line"
    return f"{cells.position(site[0].co_filename, line_number(site))} in {site[0].co_qualname}"


def _with_source(site: Site | None) -> str:
    """Returns the line of a site in words, and below them the code of a cell, as no file and number leads to it."""
    source = cells.source(site[0].co_filename, line_number(site)) if site is not None else ""
    return line_of(site) + (f"\n    {source}" if source else "")


def line_number(site: Site) -> int:
    """Returns the number of a site's line in its file."""
    code, at = site
    return next((n for start, end, n in code.co_lines() if start <= at < end and n), code.co_firstlineno)


def short_line(site: Site | None) -> str:
    """Returns the line of a site for a table: "train.py:12", or "Cell In[3], line 2"; "" where it is not known."""
    if site is None:
        return ""
    file, line = site[0].co_filename, line_number(site)
    return cells.position(file if cells.cell_of(file) else os.path.basename(file), line)


def expression(site: Site, most: int = 60) -> str:
    """Returns the source of what a site executes, such as "loss.item()"; else that of its line; "" without sources."""
    code, at = site
    line, end, column, until = next(islice(code.co_positions(), at // 2, None), (None, None, None, None))
    text = linecache.getline(code.co_filename, line or line_number(site)).rstrip("\n")
    found = text.encode()[column:until].decode(errors="replace") if line == end else ""
    found = found or text.strip()
    return found if len(found) <= most else f"{found[: most - 4]} ..."


@dataclass
class Failure:
    """Command ``seq`` of node ``rank`` failed. ``observed`` once an exception for it was raised."""

    rank: int
    host: str
    pid: int
    told: c.Failed
    site: Site | None
    observed: bool = False
    noted: str = ""  #: what the script was at, where it has said so
    incarnation: int = -1  #: of ``told.lost``: the connection whose loss is the reason, if that is lost
    #: the lines of tensors that the node held, where it has told of them
    makers: Mapping[int, Site] = field(default_factory=dict)

    @property
    def seq(self) -> int:
        return self.told.seq

    @property
    def of_a_group(self) -> bool:
        """Returns whether a function has failed because another rank of its process group has: that is raised as it is,
        even where the reason is a loss, as the lost node's own function raises NodeLost."""
        return self.told.kind == _PEER_FAILED

    @property
    def is_cancelled(self) -> bool:
        """Returns whether the script has cancelled the command."""
        return self.told.kind == _CANCELLED

    @property
    def line(self) -> Site | None:
        """The line that has issued the command; of one that a graph has recorded, which has recorded it."""
        at = position(self.seq)[1]
        recorded = self.site.recorded.get(self.rank, ()) if isinstance(self.site, Replayed) else ()
        return recorded[at] if 0 <= at < len(recorded) else self.site

    def __str__(self) -> str:
        """Returns the whole failure as one text."""
        return f"{self.told.message}\n{self.where()}"

    def where(self) -> str:
        """Says which operator failed, on which node, and at which line of the user's."""
        if self.line is not self.site:
            where = f"  recorded: {_with_source(self.line)}\n  replayed: {_with_source(self.site)}"
        else:
            where = f"  issued: {_with_source(self.site)}"
        if self.noted:
            where += f"\n  in {self.noted}"
        return f"  failed: {self.told.op} on node {self.rank} (host {self.host}, pid {self.pid})\n{where}"

    def exception(self, others: Sequence[Failure] = (), loss: NodeLost | None = None, held: str = "") -> Exception:
        """Makes the exception: of the original type where that is known, else a RemoteError that names it; NodeLost
        where the command failed by the ``loss`` of another node.

        The exception has the original's arguments and text; its notes are the place, what the node ``held``, the node's
        traceback and ``others``, later failures. Marks the failure as observed.
        """
        self.observed = True
        error = self._original() if loss is None else loss.fresh_copy()
        if isinstance(error, NonFiniteError):
            error.operator, error.node, error.line = self.told.op, self.rank, line_of(self.line)
        error.add_note(self.where() if loss is None else f"{self.where()}\n  as: {self.told.message}")
        if held:
            error.add_note(held)
        if self.told.traceback:
            trace = cells.with_cells(self.told.traceback.rstrip())
            error.add_note(f"--- traceback on node {self.rank} ---\n{trace}")
        for i, other in enumerate(others[:MAX_ATTACHED]):
            error.add_note(f"--- failure {i + 2} of {len(others) + 1} ---\n{other}")
        if len(others) > MAX_ATTACHED:
            error.add_note(f"--- {len(others) - MAX_ATTACHED} more failures are not shown ---")
        return error

    def _original(self) -> Exception:
        kind, message, args = self.told.kind, self.told.message, self.told.args
        known = _KNOWN.get(kind)
        if known is not None:
            for given in (args, (message,)) if args else ((message,),):
                try:
                    made = known(*given)
                    if given is not args or str(made) == message:
                        return made
                except Exception:  # a type whose constructor wants something else
                    continue
        error = RemoteError(f"{kind}: {message}")
        error.told = self.told.value
        return error


def in_short(error: BaseException) -> str:
    """Formats an exception for another's note: its text, and its place, but not the node's traceback."""
    where = [note for note in getattr(error, "__notes__", ()) if note.startswith("  ")]
    return "\n".join([str(error), *where])


class Failures(dict[tuple[int, int], Failure]):
    """The failures, by node and command, oldest first. Bounded, however many nodes report."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: dict[tuple[int, int], Failure] = {}  #: those with their traceback and whole message
        #: takes a node's warning, which is not a failure, the node's rank, and the line that issued the command
        self.on_warning: Callable[[c.Warned, int, Site | None], None] = lambda told, rank, site: None

    def keep(self, failure: Failure) -> None:
        """Adds a failure. When there are too many, half of them are dropped.

        Observed ones go first, the oldest before the others; then the youngest of the rest, as the earliest failure is
        the one that the next synchronization raises.
        """
        if len(self) >= MAX_FAILURES:
            by_worth = [f for f in self.values() if not f.observed] + [f for f in reversed(self.values()) if f.observed]
            for f in by_worth[MAX_FAILURES // 2 :]:
                del self[f.rank, f.seq]
                self._whole.pop((f.rank, f.seq), None)
        failure.observed = failure.observed or failure.is_cancelled  # by the script itself
        self[failure.rank, failure.seq] = self._whole[failure.rank, failure.seq] = failure
        failure.told = _cut(failure.told, MAX_TEXT)
        if len(self._whole) > MAX_TRACES:
            seen = next((key for key, each in self._whole.items() if each.observed and each is not failure), None)
            given_up = self._whole.pop(seen or (failure.rank, failure.seq))
            given_up.told = _cut(given_up.told, 0)


def _cut(told: c.Failed, most: int) -> c.Failed:
    """Drops or shortens what is too long to be kept. Nodes do so too; this is for those that don't."""
    message = told.message[: most or MAX_NAME]
    flat = [x for arg in told.args for x in (arg if isinstance(arg, tuple) else (arg,))]
    short = len(flat) <= MAX_ARGS and sum(len(x) for x in flat if isinstance(x, str)) <= most
    args = told.args if short else ()
    return c.Failed(
        told.seq, told.op[:MAX_NAME], told.kind[:MAX_NAME], message, told.traceback[:most], args, told.lost,
        told.holdings if most else None, told.value if len(told.value) <= most else b"", told.incarnation,
    )  # fmt: skip
