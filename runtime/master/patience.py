"""A wait that takes long is explained: for which node, what that one is at, and which line has issued it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..host.launcher import Sight
from ..host.sights import WAITS, hindrance
from ..process.cells import with_cells
from ..process.clock import CLOCK, Clock
from ..process.own_time import Unheard
from ..process.page import COLLECTIVE, COMMANDS, IDLE, NOBODY, STREAMS, WORDS, Beside
from ..protocol.traits import request_of
from .doing import Activity, activities
from .failures import line_of
from .history import NAMED

if TYPE_CHECKING:
    from .node import Node

#: Seconds of a wait after which it is explained; again each time that it has taken twice as long.
PATIENCE = 10.0
#: Seconds after which a function that was cancelled and goes on is told of.
UNHEEDED = 5.0
#: A node whose commands take so many times as long as those of the others (the median node's) is slow.
SLOWER = 1.5
#: Seconds that a look from outside may take.
_SIGHT = 1.5
#: Lines of a node's stack that are shown.
_LINES = 12
#: What it is at when it may be behind the command that is named.
_SEVERAL = frozenset({COMMANDS, STREAMS})
#: Of these, those at its outer end.
_OUTER = 4

_log = logging.getLogger("disttensor")


class Patience:
    """The patience of one wait for a node."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock, self._unheard = clock, Unheard(clock=clock)
        self._next = PATIENCE
        self._asked: float | None = None  #: the second in which ``look`` was asked for

    def look(self, node: Node, others: list[Node], ask: Callable[[Node], None]) -> None:
        """Warns if the wait has taken long: first asks for a look at the node (``ask``), which sets its ``sight``.

        To be called at least every second. Only time in which this process ran counts. Threads that wait for one node
        say it once.
        """
        seconds = self._unheard.look()
        if seconds < self._next:
            return
        if self._asked is None:
            self._asked = seconds
            node.connection.sight = None
            ask(node)
        elif node.connection.sight is not None or seconds - self._asked > _SIGHT:
            self._asked, self._next = None, 2 * seconds
            now = self._clock.now()
            if now - node.connection.explained > PATIENCE / 2:
                node.connection.explained = now
                _log.warning("%s", explained(node, others, seconds))


class Cancelled:
    """A function that was cancelled on a node that has not said yet that it has ended."""

    def __init__(self, node: Node, request: int, clock: Clock = CLOCK) -> None:
        self.node = node
        self._request = request
        self._unheard = Unheard(clock=clock)
        self._asked = False

    def look(self, ask: Callable[[Node], None]) -> bool:
        """Warns, after a while, if the function runs all the same, and returns True then. ``ask`` is as for Patience.

        To be called at least every second.
        """
        seconds, node = self._unheard.look(), self.node
        if seconds < UNHEEDED:
            return False
        if not self._asked:
            self._asked, node.connection.sight = True, None
            ask(node)
            return False
        sight = node.connection.sight
        if sight is None and seconds < UNHEEDED + _SIGHT:
            return False
        runs = (each for each in node.last_commands() if each.runs)
        sent = next((each for each in runs if request_of(each.command) == self._request), None)
        if sent is not None and sight is not None and not sent.beside and sight.seq != sent.number:
            self._unheard.heard()  # it has not begun, and is not going to
            self._asked = False
            return False
        text = (
            f"node {node.rank}{_where(node)}: {sent.words if sent is not None else 'a function'}, was cancelled "
            f"{seconds:.0f} s ago and goes on; Python code can be interrupted, but no library's (nor what waits in the "
            f"kernel, on a node that has streams); disttensor.kill({node.rank}) ends the node"
        )
        if sight is not None:
            own = [each for each in sight.beside if sent is not None and sent.beside and each.number == sent.number]
            text += "".join(f"\n{line}" for line in _users_frames(sight.stack, own[0] if own else None))
        _log.warning("%s", text)
        return True


def explained(node: Node, others: list[Node], seconds: float) -> str:
    """Returns the words for a node that is waited for."""
    text = f"node {node.rank}{_where(node)} has not answered for {seconds:.0f} s: {_doing(node, node.connection.sight)}"
    behind, most = node.behind, max((other.behind for other in others), default=0)
    if others and behind > most:
        text += f"; it is {behind} commands behind, and the other nodes are {most} at most"
    paces = sorted(other.pace for other in others if other is not node and other.pace)
    if paces and node.pace > SLOWER * (usual := paces[len(paces) // 2]):
        text += (
            f"; its commands have taken {_brief(node.pace)} each, those of the other nodes {_brief(usual)}: it is "
            f"{node.pace / usual:.1f} times as slow"
        )
    if node.connection.sight is not None:
        text += "".join(f"\n{line}" for line in _frames(node.connection.sight))
    return text


def _brief(seconds: float) -> str:
    """Formats a short time."""
    return (
        f"{seconds * 1e6:.0f} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:.1f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
    )


def _where(node: Node) -> str:
    hello = node.said_hello
    return f" (host {hello.host}, pid {hello.pid})" if hello is not None else ""


def _doing(node: Node, sight: Sight | None) -> str:
    if at := node.connection.at_breakpoint:
        return at
    if sight is None:
        return f"it is at what was issued at {line_of(node.outbox.running())}, or behind that"
    works = activities(node, sight)
    named = works[: NAMED + (not works[0].beside)]
    text = f"it {'; it '.join(map(_words, named))}"
    if (more := len(works) - len(named)) > 0:
        text += f"; and {more} other functions"
    if sight.kind == COLLECTIVE and sight.peer != NOBODY:
        text += f"; it waits for node {sight.peer}"
    match hindrance(sight):
        case "paused":
            text += "; its host hears nothing of this one, and has stopped it until it does"
        case "stopped":
            pid = node.said_hello.pid if node.said_hello is not None else 0
            text += f"; its process is stopped (state {sight.state}): `kill -CONT {pid}` has it go on"
        case "deaf":
            text += f"; it holds the GIL: no other thread of its process has run for {sight.deaf:.0f} s"
        case "device":
            text += "; its process is in the kernel, for a device (state D)"
    return text


def _words(work: Activity) -> str:
    """Returns the words for what a thread of a node is at."""
    kind, number, seconds = work.kind, work.number, work.seconds
    what = WORDS[kind] if 0 <= kind < len(WORDS) else "runs something"
    if kind == IDLE:
        return what
    where = " on a stream" if work.beside else ""
    site = None if work.sent is None else work.sent.site
    issued = f" (command {number}){where}, issued at {line_of(site)}" if site is not None else where
    return f"{what}{issued}{' or behind that' if site is not None and kind in _SEVERAL else ''}, for {seconds:.0f} s"


def _frames(sight: Sight) -> list[str]:
    """Returns the lines of the user's in what a node is at: of the thread that runs commands, and of its streams."""
    threads: list[tuple[str, list[str]]] = []
    if sight.kind not in WAITS or not sight.beside:
        threads.append((f"command {sight.seq}", _users_frames(sight.stack)))
    threads += [(f"command {each.number}", _users_frames(sight.stack, each)) for each in sight.beside[:NAMED]]
    threads = [(what, lines) for what, lines in threads if lines]
    if len(threads) == 1:
        return threads[0][1]
    return [line for what, lines in threads for line in (f"  {what}:", *lines)]


def _users_frames(stack: str, beside: Beside | None = None) -> list[str]:
    """Returns the lines of the stack of a thread above the node's own frames: of the one that runs commands, or of the
    one that runs a function beside it."""
    for thread in stack.split("\n\n"):
        head, *lines = thread.splitlines() or [""]
        own = next((i for i, line in enumerate(lines) if "/runtime/node/" in line), None)
        if own is None:
            continue
        takes_commands = any(" in serve" in line for line in lines[own:])
        if takes_commands if beside is None else f"0x{beside.thread:016x} " in head:
            return _short([with_cells(line) for line in lines[:own] if line.startswith("  ")])
    return []


def _short(lines: list[str]) -> list[str]:
    """Returns the frames of a stack that are shown: the innermost, and the outermost, which is the user's function."""
    found: list[str] = []
    for line, same in itertools.groupby(lines):
        found.append(line)
        if (more := len(list(same)) - 1) > 0:
            found.append(f"  [the same line {more} more time{'s' if more > 1 else ''}]")
    return found if len(found) <= _LINES else [*found[: _LINES - _OUTER - 1], "  ...", *found[-_OUTER:]]
