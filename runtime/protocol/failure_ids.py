"""Failures as both ends name them: the number of the failed command, and the poison in place of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: A reported message or traceback has at most this many characters, and a name this many.
MAX_TEXT = 64 << 10
MAX_NAME = 256
#: The largest number of an exception's arguments that is reported.
MAX_ARGS = 16


@dataclass(frozen=True)
class Poison:
    """Stands for a tensor that could not be made: the failure ``seq`` on node ``rank`` caused it."""

    rank: int
    seq: int


def replayed(seq: int, at: int) -> int:
    """Returns the number of command ``at`` (from 0) of the graph that ``seq`` replays; ``seq`` where ``at`` is -1."""
    return (at + 1) << 40 | seq


def position(number: int) -> tuple[int, int]:
    """Returns (seq, at) of a number that ``replayed`` made; ``at`` is -1 for an ordinary command."""
    return number & (1 << 40) - 1, (number >> 40) - 1


def earliest(read: Iterable[Poison]) -> Poison | None:
    """Returns the poison of the first failure among several: a command that reads them all passes that one on."""
    return min(read, key=lambda poison: position(poison.seq), default=None)


def attempt(say: Callable[[], str], what: str) -> str:
    """Returns ``say()``, or a text in its place: an exception's own methods may raise anything, even SystemExit."""
    try:
        return say()
    except BaseException as e:
        return f"<{what} can't be had: {type.__getattribute__(type(e), '__name__')}>"
