"""L4: a failure on a node, as the exception that the master raises at the user's next synchronization."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType

import torch

from . import command as c
from .errors import DisttensorError, GeometryError, PeerFailed, RemoteError
from .store import Poison

#: Where a command was issued: a code object and the index of the instruction in it. Cheap to take, unlike a line.
Site = tuple[CodeType, int]

_KNOWN: dict[str, type[Exception]] = {
    f"builtins.{name}": kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (Warning, UnicodeError))
} | {
    **{f"{kind.__module__}.{kind.__name__}": kind for kind in (DisttensorError, GeometryError, PeerFailed)},
    "torch.OutOfMemoryError": torch.OutOfMemoryError,
    "torch._C._LinAlgError": torch._C._LinAlgError,  # type: ignore[attr-defined]
}

#: A told message or traceback has at most this many characters, and a name this many.
MAX_TEXT = 64 << 10
MAX_NAME = 256
#: Failures kept with their traceback and their whole message; later ones are kept without.
MAX_TRACES = 256
#: Later failures that are attached to the exception of the earliest.
MAX_ATTACHED = 8
#: Failures kept at all.
MAX_FAILURES = 10_000


def replayed(seq: int, at: int) -> int:
    """The number of command ``at`` (from 0) of the graph that command ``seq`` replays. For -1 it is ``seq`` itself."""
    return (at + 1) << 40 | seq


def position(number: int) -> tuple[int, int]:
    """(seq, at) of what ``replayed`` has numbered; ``at`` is -1 for an ordinary command."""
    return number & (1 << 40) - 1, (number >> 40) - 1


def earliest(read: Iterable[Poison]) -> Poison | None:
    """Of several poisons, that of the first failure: which what reads all of them passes on."""
    return min(read, key=lambda poison: position(poison.seq), default=None)


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


def attempt(say: Callable[[], str], what: str) -> str:
    """What ``say`` gives, or that it can't be had: an exception's own methods may raise anything, even SystemExit."""
    try:
        return say()
    except BaseException as e:
        return f"<{what} can't be had: {type.__getattribute__(type(e), '__name__')}>"


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
        at = position(self.seq)[1]
        if isinstance(self.site, Replayed) and at < len(self.site.recorded):
            where = f"  recorded: {line_of(self.site.recorded[at])}\n  replayed: {line_of(self.site)}"
        else:
            where = f"  issued: {line_of(self.site)}"
        return (
            f"{self.told.message}\n"
            f"  failed: {self.told.op} on node {self.rank} (host {self.host}, pid {self.pid})\n"
            f"{where}"
        )

    def exception(self, others: Sequence[Failure] = ()) -> Exception:
        """The original type where it is known, else RemoteError naming it. ``others``, later ones, become notes.

        Marks the failure as observed.
        """
        self.observed = True
        kind, text = self.told.kind, str(self)
        known = _KNOWN.get(kind)
        try:
            error = known(text) if known is not None else RemoteError(f"{kind}: {text}")
        except TypeError:  # a type whose constructor wants more than a text
            error = RemoteError(f"{kind}: {text}")
        if self.told.traceback:
            error.add_note(f"--- traceback on node {self.rank} ---\n{self.told.traceback.rstrip()}")
        for i, other in enumerate(others[:MAX_ATTACHED]):
            error.add_note(f"--- failure {i + 2} of {len(others) + 1} ---\n{other}")
        if len(others) > MAX_ATTACHED:
            error.add_note(f"--- {len(others) - MAX_ATTACHED} more failures are not shown ---")
        return error


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
    return c.Failed(told.seq, told.op[:MAX_NAME], told.kind[:MAX_NAME], message, told.traceback[:most])
