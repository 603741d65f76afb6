"""Lines of the script that wait for a value again and again: each is told of once, with what it has cost."""

from __future__ import annotations

import logging
import threading

from ..runtime.master.failures import Site, line_number, line_of

#: The waits of one line after which it is told of.
MANY = 1000
#: The most sites that are kept. A notebook, or a program that makes code, has ever new ones.
_MOST = 10_000

_log = logging.getLogger("disttensor")


class _Line:
    """The waits of one line so far."""

    __slots__ = ("count", "seconds", "site")

    def __init__(self, site: Site) -> None:
        self.site = site  #: which keeps the code alive, and so its id
        self.count, self.seconds = 0, 0.0


class Waits:
    """The waits of a session's script for values of nodes, by line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[tuple[int, int], _Line] = {}  #: by id of the code, and instruction
        self._lines: dict[tuple[int, int], _Line] = {}  #: by id of the code, and line

    def add(self, site: Site | None, seconds: float) -> None:
        """Counts a wait of ``seconds``, and logs a warning when it is its line's thousandth."""
        if site is None:
            return
        code, at = site
        with self._lock:
            line = self._sites.get((id(code), at)) or self._new(site)
            line.count += 1
            line.seconds += seconds
            if line.count != MANY:
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
        self._lock = threading.Lock()
