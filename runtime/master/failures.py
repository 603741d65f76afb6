"""The failures that nodes have told, and the exceptions that the master raises for them at the user's next
synchronization."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

import torch

from ..protocol import commands as c
from ..protocol.errors import DisttensorError, GeometryError, PeerFailed, RemoteError
from ..protocol.failure_ids import MAX_ARGS, MAX_NAME, MAX_TEXT, position

#: Where a command was issued: a code object and the index of the instruction in it. Cheap to take, unlike a line.
Site = tuple[CodeType, int]

_KNOWN: dict[str, type[Exception]] = {
    f"builtins.{name}": kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)
} | {
    **{f"{kind.__module__}.{kind.__name__}": kind for kind in (DisttensorError, GeometryError, PeerFailed)},
    "torch.OutOfMemoryError": torch.OutOfMemoryError,
    "torch._C._LinAlgError": torch._C._LinAlgError,  # type: ignore[attr-defined]
}

#: Failures kept with their traceback and their whole message; later ones are kept without.
MAX_TRACES = 256
#: Later failures that are attached to the exception of the earliest.
MAX_ATTACHED = 8
#: Failures kept at all.
MAX_FAILURES = 10_000


class Replayed(tuple[CodeType, int]):
    """The site of a replay, with those of what the graph has recorded for the node."""

    recorded: Sequence[Site | None]

    def __new__(cls, site: Site, recorded: Sequence[Site | None]) -> Replayed:
        made = super().__new__(cls, site)
        made.recorded = recorded
        return made


def line_of(site: Site | None) -> str:
    """ "train.py:12 in step", or "an unknown line"."""
    if site is None:
        return "an unknown line"
    code, at = site
    line = next((n for start, end, n in code.co_lines() if start <= at < end and n), code.co_firstlineno)
    return f"{code.co_filename}:{line} in {code.co_qualname}"


@dataclass
class Failure:
    """Command ``seq`` of node ``rank`` failed. ``observed`` once an exception for it was raised."""

    rank: int
    host: str
    pid: int
    told: c.Failed
    site: Site | None
    observed: bool = False

    @property
    def seq(self) -> int:
        return self.told.seq

    def __str__(self) -> str:
        """All in one text."""
        return f"{self.told.message}\n{self.where()}"

    def where(self) -> str:
        """What failed, on which node, and at which line of the user's."""
        at = position(self.seq)[1]
        if isinstance(self.site, Replayed) and at < len(self.site.recorded):
            where = f"  recorded: {line_of(self.site.recorded[at])}\n  replayed: {line_of(self.site)}"
        else:
            where = f"  issued: {line_of(self.site)}"
        return f"  failed: {self.told.op} on node {self.rank} (host {self.host}, pid {self.pid})\n{where}"

    def exception(self, others: Sequence[Failure] = ()) -> Exception:
        """The original type where it is known, else RemoteError naming it, with the original's arguments and text.
        Where it was, the node's traceback and ``others``, later ones, are its notes.

        Marks the failure as observed.
        """
        self.observed = True
        error = self._original()
        error.add_note(self.where())
        if self.told.traceback:
            error.add_note(f"--- traceback on node {self.rank} ---\n{self.told.traceback.rstrip()}")
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
        return RemoteError(f"{kind}: {message}")


def in_short(error: BaseException) -> str:
    """An exception in another's note: its text, and where it was, but not the node's traceback."""
    where = [note for note in getattr(error, "__notes__", ()) if note.startswith("  ")]
    return "\n".join([str(error), *where])


class Failures(dict[tuple[int, int], Failure]):
    """What failed, by node and command, oldest first. Bounded, whatever nodes tell."""

    def keep(self, failure: Failure) -> None:
        """Adds one. When there are too many, half of them go: observed ones first, the oldest before the others; then
        the youngest, as the earliest failure is what the next synchronization raises."""
        if len(self) >= MAX_FAILURES:
            by_worth = [f for f in self.values() if not f.observed] + [f for f in reversed(self.values()) if f.observed]
            for f in by_worth[MAX_FAILURES // 2 :]:
                del self[f.rank, f.seq]
        failure.told = _cut(failure.told, MAX_TEXT if len(self) < MAX_TRACES else 0)
        self[failure.rank, failure.seq] = failure


def _cut(told: c.Failed, most: int) -> c.Failed:
    """Without what is too long to be kept. Nodes cut it too; this is for those that don't."""
    message = told.message[: most or MAX_NAME]
    flat = [x for arg in told.args for x in (arg if isinstance(arg, tuple) else (arg,))]
    short = len(flat) <= MAX_ARGS and sum(len(x) for x in flat if isinstance(x, str)) <= most
    args = told.args if short else ()
    return c.Failed(told.seq, told.op[:MAX_NAME], told.kind[:MAX_NAME], message, told.traceback[:most], args)
