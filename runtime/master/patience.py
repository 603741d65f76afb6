"""A wait that takes long is explained: for which node, what that one is at, and which line has issued it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..host.launcher import Sight
from ..process.own_time import Unheard
from ..process.page import COMMANDS, IDLE, WORDS
from .failures import line_of
from .history import asks

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
#: A node whose own threads have not run for so many seconds holds the GIL, or is stopped.
_DEAF = 2.0
#: Lines of a node's stack that are shown.
_LINES = 12

_log = logging.getLogger("disttensor")


class Patience:
    """The patience of one wait for a node."""

    def __init__(self) -> None:
        self._unheard = Unheard()
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
            node.sight = None
            ask(node)
        elif node.sight is not None or seconds - self._asked > _SIGHT:
            self._asked, self._next = None, 2 * seconds
            now = time.monotonic()
            if now - node.explained > PATIENCE / 2:
                node.explained = now
                _log.warning("%s", explained(node, others, seconds))


class Cancelled:
    """A function that was cancelled on a node that has not said yet that it has ended."""

    def __init__(self, node: Node, request: int) -> None:
        self.node = node
        self._request = request
        self._unheard = Unheard()
        self._asked = False

    def look(self, ask: Callable[[Node], None]) -> bool:
        """Warns, after a while, if the function runs all the same, and returns True then. ``ask`` is as for Patience.

        To be called at least every second.
        """
        seconds, node = self._unheard.look(), self.node
        if seconds < UNHEEDED:
            return False
        if not self._asked:
            self._asked, node.sight = True, None
            ask(node)
            return False
        sight = node.sight
        if sight is None and seconds < UNHEEDED + _SIGHT:
            return False
        sent = next((each for each in node.last_commands() if each.runs and asks(each.command) == self._request), None)
        if sent is not None and sight is not None and not sent.beside and sight.seq != sent.number:
            self._unheard.heard()  # it has not begun, and is not going to
            self._asked = False
            return False
        text = (
            f"node {node.rank}{_where(node)}: {sent.words if sent is not None else 'a function'}, was cancelled "
            f"{seconds:.0f} s ago and goes on; Python code can be interrupted, but no library's (nor what waits in the "
            f"kernel, on a node that has streams); disttensor.kill({node.rank}) ends the node"
        )
        if sight is not None and (stack := _users_frames(sight.stack)):
            text += "\n" + "\n".join(stack)
        _log.warning("%s", text)
        return True


def explained(node: Node, others: list[Node], seconds: float) -> str:
    """Returns the words for a node that is waited for."""
    text = f"node {node.rank}{_where(node)} has not answered for {seconds:.0f} s: {_doing(node, node.sight)}"
    behind, most = node.behind, max((other.behind for other in others), default=0)
    if others and behind > most:
        text += f"; it is {behind} commands behind, and the other nodes are {most} at most"
    paces = sorted(other.pace for other in others if other is not node and other.pace)
    if paces and node.pace > SLOWER * (usual := paces[len(paces) // 2]):
        text += (
            f"; its commands have taken {_brief(node.pace)} each, those of the other nodes {_brief(usual)}: it is "
            f"{node.pace / usual:.1f} times as slow"
        )
    if node.sight is not None and (stack := _users_frames(node.sight.stack)):
        text += "\n" + "\n".join(stack)
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
    if sight is None:
        return f"it is at what was issued at {line_of(node.outbox.running())}, or behind that"
    site = node.outbox.site(sight.seq) if sight.kind != IDLE else None
    what = WORDS[sight.kind] if 0 <= sight.kind < len(WORDS) else "runs something"
    text = f"it {what}"
    if site is not None:
        behind = " or behind that" if sight.kind == COMMANDS else ""
        text += f" (command {sight.seq}), issued at {line_of(site)}{behind}"
    if sight.kind != IDLE:
        text += f", for {sight.seconds:.0f} s"
    if sight.paused:
        text += "; its host hears nothing of this one, and has stopped it until it does"
    elif sight.state in ("T", "t"):
        pid = node.said_hello.pid if node.said_hello is not None else 0
        text += f"; its process is stopped (state {sight.state}): `kill -CONT {pid}` has it go on"
    elif sight.deaf > _DEAF:
        text += f"; it holds the GIL: no other thread of its process has run for {sight.deaf:.0f} s"
    elif sight.state == "D":
        text += "; its process is in the kernel, for a device (state D)"
    return text


def _users_frames(stack: str) -> list[str]:
    """Returns the lines of the stack of the thread that runs commands, above the node's own frames."""
    for thread in stack.split("\n\n"):
        lines = thread.splitlines()
        own = next((i for i, line in enumerate(lines) if "/runtime/node/" in line), None)
        if own is not None and any(" in serve" in line for line in lines[own:]):
            return [line for line in lines[1:own] if line.startswith("  ")][:_LINES]
    return []
