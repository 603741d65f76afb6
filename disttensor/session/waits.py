"""The waits of the script by line: what each has cost. A line that waits for values again and again is told of once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from heapq import nlargest
from typing import NamedTuple

from ..runtime.master.failures import Site, line_number, line_of

#: The waits of one line after which it is told of.
MANY = 1000
#: The most sites that are kept. A notebook, or a program that makes code, has ever new ones.
_MOST = 10_000

_log = logging.getLogger("disttensor")

#: The function that returns the user's line, once it is declared: it stands above the session.
_sites: list[Callable[[], Site | None]] = []


def sites_by(here: Callable[[], Site | None]) -> None:
    """Declares the function that returns the user's line."""
    _sites[:] = [here]


class _Line:
    """The waits of one line so far."""

    __slots__ = ("count", "seconds", "site", "values")

    def __init__(self, site: Site) -> None:
        self.site = site  #: which keeps the code alive, and so its id
        self.count, self.seconds = 0, 0.0
        self.values = 0  #: how many of them were for values


class LineWaits(NamedTuple):
    """The waits of one line of the script."""

    site: Site
    waits: int
    seconds: float


class Waits:
    """The waits of a session's script for nodes, by line."""

    def __init__(self) -> None:
        #: re-entrant: a signal's handler that waits may come while it is held
        self._lock = threading.RLock()
        self._sites: dict[tuple[int, int], _Line] = {}  #: by id of the code, and instruction
        self._lines: dict[tuple[int, int], _Line] = {}  #: by id of the code, and line

    def costliest(self, most: int) -> list[LineWaits]:
        """Returns the lines that have waited longest, ``most`` at most, the costliest first."""
        with self._lock:
            lines = [LineWaits(line.site, line.count, line.seconds) for line in self._lines.values()]
        return nlargest(most, lines, key=lambda line: line.seconds)

    def in_all(self) -> tuple[int, float]:
        """Returns how many waits there were, and their seconds."""
        with self._lock:
            lines = list(self._lines.values())
        return sum(line.count for line in lines), sum(line.seconds for line in lines)

    def add_other(self, seconds: float) -> None:
        """Counts a wait of this thread that was not for a value."""
        self.add(_sites[0](), seconds, of_value=False)

    def add(self, site: Site | None, seconds: float, of_value: bool = True) -> None:
        """Counts a wait of ``seconds``, and logs a warning when it is its line's thousandth for a value."""
        if site is None:
            return
        code, at = site
        with self._lock:
            line = self._sites.get((id(code), at)) or self._new(site)
            line.count += 1
            line.seconds += seconds
            line.values += of_value
            if not of_value or line.values != MANY:
                return
        _log.warning(
            "%s has waited for values of nodes %s times, %.1f s in all: each .item(), .cpu() or print() there waits. "
            "disttensor.fetch(x) returns at once, and what is added up on the node needs one .item() at the end",
            line_of(site),
            f"{MANY:,}",
            line.seconds,
        )

    def _new(self, site: Site) -> _Line:
        if len(self._sites) >= _MOST:
            self._sites.clear()
            self._lines.clear()
        code, at = site
        line = self._lines.setdefault((id(code), line_number(site)), _Line(site))
        self._sites[id(code), at] = line
        return line

    def forked(self) -> None:
        """Replaces the lock, in a forked child: a thread of the parent may have held it."""
        self._lock = threading.RLock()
