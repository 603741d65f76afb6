"""Times after which something happens when two hosts hear nothing of each other: the one table of these.

What is one end's to say is said there before the other end gives up: the order of these times is that of `Silence`'s
properties, and tests/unit/test_time_limits.py holds them to it. All other time limits: docs/dev/time-limits.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..process.spelling import shown

#: Seconds by which a limit is above that of a process which tells why, so that this one has told it by then.
ABOVE = 15.0


class Silence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds without a word after which a host's nodes pause, are lost to the master, and end.

    Each end counts by itself, and only time in which it ran. ``pause`` comes first: once the master takes a node for
    lost, that node runs no command any more, whatever arrives.
    """

    pause: float = 10.0  #: the nodes of a host that hears nothing of the master's are stopped, until it hears something
    lost: float = 15.0  #: the nodes of a host of which nothing is heard are lost
    lease: float = 60.0  #: the nodes of a host that still hears nothing end

    @property
    def data(self) -> float:
        """The seconds after which a connection between two data channels is given up. More than ``lost``: a node is
        lost before its connections are, and while it is not, they go on when the network does."""
        return self.lost + ABOVE

    def of_nodes(self, watched: bool) -> float:
        """Returns the seconds after which a node gives up the script. ``watched``: a process on its host keeps the
        lease, else the script's own limit is all there is."""
        return (self.lease if watched else self.lost) + ABOVE

    @property
    def beat(self) -> float:
        """The seconds between two beats, by which hosts hear of each other."""
        return min(2.0, self.pause / 5)

    @property
    def most(self) -> float:
        """The most seconds between two looks that count: beyond them who looks was stopped itself."""
        return 2 * self.beat

    def __str__(self) -> str:
        return f"{self.pause:g},{self.lost:g},{self.lease:g}"


def silence_of(value: Silence | str | Sequence[float]) -> Silence:
    """Returns the Silence that "10,15,60", or three numbers, stand for.

    Raises ValueError where they are not three numbers of seconds, each more than the one before.
    """
    if isinstance(value, Silence):
        return value
    try:
        numbers = [float(part) for part in (value.split(",") if isinstance(value, str) else value)]
        pause, lost, lease = numbers
    except (TypeError, ValueError):
        text = f"silence is three numbers of seconds (pause, lost, lease), as 10,15,60, not {value!r}"
        raise ValueError(text) from None
    if not 0 < pause < lost < lease < 1e6:
        raise ValueError(
            f"silence={shown(value)}: nodes pause first, are lost later and end last, so each number of seconds is "
            "more than the one before, as in 10,15,60"
        )
    return Silence(pause, lost, lease)
