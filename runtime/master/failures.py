"""L4: a failure on a node: what the node tells of it, and the exception that the master raises at the user's next
synchronization."""

from __future__ import annotations

import builtins
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType

import torch

from ..node.store import Poison
from ..protocol import commands as c
from ..protocol.errors import DisttensorError, GeometryError, PeerFailed, RemoteError

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

_BUILTIN = frozenset(kind for name, kind in _KNOWN.items() if name.startswith("builtins."))

#: A told message or traceback has at most this many characters, and a name this many.
MAX_TEXT = 64 << 10
MAX_NAME = 256
#: An exception's arguments are at most so many.
MAX_ARGS = 16
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


# ---- on the node -----------------------------------------------------------------------------------------------------


def name_of(command: c.Command) -> str:
    """What has failed, in the user's words where they are his."""
    return (command.what if isinstance(command, c.Run) else "") or type(command).__name__


def told(number: int, op: str, error: Exception) -> c.Failed:
    """What a node tells of command ``number``'s failure."""
    kind = attempt(lambda: f"{type(error).__module__}.{type(error).__qualname__}", "an exception's type")
    text = attempt(lambda: str(error), f"the text of this {kind}")
    # TracebackException parses source, and CPython 3.11 can fail in that (gh-106905)
    trace = attempt(lambda: _trace(error), "the traceback")
    text = _clean(text[:MAX_TEXT])
    try:
        args = _plain_args(error)
    except BaseException:
        args = ()
    args = () if args == (text,) else args
    return c.Failed(number, op, _clean(kind[:MAX_NAME]), text, _clean(trace[-MAX_TEXT:]), args)


def _clean(text: str) -> str:
    """Without what UTF-8 can't carry (lone surrogates)."""
    return text.encode("utf-8", "replace").decode()


_HERE = os.path.abspath(sys.modules["disttensor.runtime"].__path__[0]) + os.sep
_REAL = os.path.realpath(_HERE) + os.sep
#: What no operator and no user's function raises without a frame of its own.
_OUR_OWN = (AssertionError, AttributeError, KeyError, NameError)


def _trace(error: BaseException) -> str:
    """The traceback, of this error and of those before it, from the first line on that is not the node's own. Empty
    where there is none, as for an operator, unless it is our mistake."""
    whole = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    todo, seen, users = [whole], {id(whole)}, False
    while todo:
        one = todo.pop()
        ours = next((i for i, frame in enumerate(one.stack) if not _is_ours(frame.filename)), len(one.stack))
        users = users or ours < len(one.stack)
        del one.stack[:ours]
        if not one.stack:
            one.stack = None  # type: ignore[assignment]  # so its heading is left out
        for other in (one.__cause__, one.__context__, *(one.exceptions or ())):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                todo.append(other)
    if not users and isinstance(error, _OUR_OWN):
        return "".join(traceback.format_exception(error))
    return "".join(whole.format()) if users else ""


def _is_ours(file: str) -> bool:
    return file.startswith((_HERE, _REAL, "<disttensor ", "<frozen importlib"))


def _plain_args(error: Exception) -> tuple[c.Plain | tuple[c.Plain, ...], ...]:
    """What makes the like of an exception of Python's own: a KeyError's key, the number of an OSError. Only if it is
    plain and short."""
    if type(error) not in _BUILTIN:
        return ()
    args = error.__reduce__()[1]  # the file's name of an OSError is not among its args
    flat = [x for arg in args for x in (arg if type(arg) is tuple else (arg,))]
    texts = [x for x in flat if type(x) is str]
    plain = all(type(x) in (str, int, float, bool, type(None)) for x in flat)
    long = any(type(x) is int and not -(1 << 63) <= x < 1 << 63 for x in flat)
    small = not long and len(flat) <= MAX_ARGS and sum(map(len, texts)) <= MAX_TEXT
    return tuple(args) if plain and small and all(_clean(x) == x for x in texts) else ()


# ---- on the master ---------------------------------------------------------------------------------------------------


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
