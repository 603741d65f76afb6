"""A failure as both ends speak of it: the number of what failed, and the poison that stands for what it should make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: A told message or traceback has at most this many characters, and a name this many.
MAX_TEXT = 64 << 10
MAX_NAME = 256
#: An exception's arguments are at most so many.
MAX_ARGS = 16


@dataclass(frozen=True)
class Poison:
    """Stands for a tensor that could not be made: the failure ``seq`` on node ``rank`` caused it."""

    rank: int
    seq: int


def replayed(seq: int, at: int) -> int:
    """The number of command ``at`` (from 0) of the graph that command ``seq`` replays. For -1 it is ``seq`` itself."""
    return (at + 1) << 40 | seq


def position(number: int) -> tuple[int, int]:
    """(seq, at) of what ``replayed`` has numbered; ``at`` is -1 for an ordinary command."""
    return number & (1 << 40) - 1, (number >> 40) - 1


def earliest(read: Iterable[Poison]) -> Poison | None:
    """Of several poisons, that of the first failure: which what reads all of them passes on."""
    return min(read, key=lambda poison: position(poison.seq), default=None)


def attempt(say: Callable[[], str], what: str) -> str:
    """What ``say`` gives, or that it can't be had: an exception's own methods may raise anything, even SystemExit."""
    try:
        return say()
    except BaseException as e:
        return f"<{what} can't be had: {type.__getattribute__(type(e), '__name__')}>"
