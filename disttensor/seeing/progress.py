"""The line that says what the script waits for, while its main thread waits; and a word when nothing goes on any more.

Waiting, Undertakings --> WaitsShown.look, by the thread that flushes --> text --> TransientLine
                          WaitsShown.end_wait, by the thread whose wait has ended --> erased
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from time import process_time
from typing import NamedTuple

from ..dispatch.call_site import site_of_thread
from ..runtime.channel.counted import CountedChannel
from ..runtime.launch.output.transient_line import TransientLine, transient_line
from ..runtime.master.connection import Life
from ..runtime.master.failures import expression, short_line
from ..runtime.master.node import Node
from ..runtime.process import undertakings
from ..runtime.process.page import IDLE
from ..session.session import Session
from .breakpoints import Prompter
from .reading import queues_of, read_node
from .stall import Stall, warn_of_stall
from .status import NodeStatus, phrase

#: Seconds of a wait after which it is shown.
SHOWN = 2.0
#: Seconds between two looks.
LOOK = 0.5
#: Seconds of a wait from which on all nodes are asked how they are, and those between two such questions.
ALL, AGAIN = 20.0, 5.0

_log = logging.getLogger("disttensor")


class _Held(NamedTuple):
    """The wait, or the undertaking, that holds the main thread."""

    began: float
    node: int | None  #: the node that it waits for
    words: str  #: what it is at, where that is known; "" for a mere wait
    shared: str  #: what it waits for that tasks share, such as "an item of Channel begun"; "" where it waits for none
    lasts: Callable[[], bool]  #: whether it goes on


class WaitsShown:
    """The waits of a session's main thread, as they are shown."""

    def __init__(self, session: Session, line: TransientLine | None) -> None:
        self._session, self._line = session, line
        self._clock = session.link.clock
        self._main = threading.main_thread()
        self._stall = Stall()
        self._looked = self._asked_all = 0.0
        self._off = False
        self.is_asked: Callable[[], bool] = lambda: False  #: whether the user types at the terminal

    def look(self) -> None:
        """Shows what the main thread waits for, if it does so for long. To be called again and again; looks now and
        then, and raises nothing."""
        now = self._clock.now()
        if self._off or now - self._looked < LOOK:
            return
        self._looked = now
        try:
            self._look(now)
        except Exception:  # what is shown is no reason to let nodes wait
            self._off = True
            _log.warning("what the script waits for is not shown any more", exc_info=True)
            self.end_wait()

    def end_own_wait(self) -> None:
        """Takes the line away where the main thread calls this, whose wait has ended."""
        if threading.get_ident() == self._main.ident:
            self.end_wait()

    def end_wait(self) -> None:
        """Takes the line away."""
        if self._line is not None:
            self._line.erase()

    def _look(self, now: float) -> None:
        held = self._what_holds()
        if self.is_asked() or held is None or now - held.began < SHOWN:
            self.end_wait()
            return
        seconds, link = now - held.began, self._session.link
        if self._line is None and seconds < ALL:  # nothing is shown, nor can have stood still for long
            return
        nodes = [] if held.node is None else [self._session.nodes[held.node]]
        if seconds >= ALL and now - self._asked_all >= AGAIN:
            self._asked_all, nodes = now, self._session.nodes
        link.roll_call.ask(nodes)
        with link.lock:
            rows = [read_node(self._session, node) for node in self._session.nodes]
            mark, used = self._how_far()
        row = None if held.node is None else rows[held.node]
        if self._line is not None:
            self._line.show(self._text(held, row, seconds), held.lasts)
        if any(row.state == "at a breakpoint" for row in rows):
            return  # what stands still does so for its user
        if held.shared and all(row.state in ("idle", "lost") for row in rows):
            return  # no node has it: another thread of the script's may hear it from outside, whenever that is
        if still := self._stall.look(now, held.began, mark, used):
            queues, wait = queues_of(self._session), self._words_of_wait(held, seconds)
            warn_of_stall(still, wait, held.node, rows, queues, self._session.flight)

    def _what_holds(self) -> _Held | None:
        under_way = self._session.link.waiting.under_way
        own = [it for it in undertakings.mine.under_way() if it.thread == self._main.ident]
        mine, shared = [it for it in own if not it.is_wait], [it for it in own if it.is_wait]
        waits = [(began, it) for it, (thread, began) in list(under_way.items()) if thread == self._main.ident]
        began, request = min(waits, key=lambda wait: wait[0], default=(0.0, None))
        node = None if request is None else request.node
        if mine and mine[-1].holds:
            it = mine[-1]
            return _Held(it.began, node, it.words(), "", lambda: it in undertakings.mine.under_way())
        words = mine[-1].words() if mine else ""
        if request is not None:
            return _Held(began, node, words, "", lambda: request in under_way)
        if not shared:
            return None
        wait = shared[0]
        return _Held(wait.began, None, words, wait.words(), lambda: wait in undertakings.mine.under_way())

    # ---- words -------------------------------------------------------------------------------------------------------

    def _text(self, held: _Held, row: NodeStatus | None, seconds: float) -> str:
        """Returns the line."""
        site = site_of_thread(self._main.ident or 0)
        at = f" at {short_line(site)}" if site is not None else ""
        if held.words:
            return f"{held.words} ({seconds:.0f} s{at})"
        text = f"waiting {seconds:.0f} s{at}"
        if held.shared:
            text += f" for {held.shared}"
        if row is not None:
            text += f" for node {row.rank}: {self._words_of(row)}"
        return text

    def _words_of(self, row: NodeStatus) -> str:
        described = self._session.nodes[row.rank].connection.described
        text = phrase(row) + (f" ({row.line})" if row.line else "")
        if described is not None and described.building > 0:
            text += f", compiling a graph, {described.building_for:.0f} s (the interpreter runs meanwhile)"
        return text + (f", {row.behind:,} commands behind" if row.behind > 1 else "")

    def _words_of_wait(self, held: _Held, seconds: float) -> str:
        site = site_of_thread(self._main.ident or 0)
        at = f" at {short_line(site)}: {expression(site)}" if site is not None else ""
        waits_for = held.shared or (f"node {held.node}" if held.node is not None else "")
        what = held.words or f"waits for {waits_for}".removesuffix(" for ")
        return f"{what}, {seconds:.0f} s{at}"

    # ---- progress ----------------------------------------------------------------------------------------------------

    def _how_far(self) -> tuple[Hashable, float]:
        """Returns what changes with any progress, and the seconds for which all have run on cores."""
        session = self._session
        nodes, used = [], process_time()
        for node in session.nodes:
            nodes.append(_how_far(node))
            used += node.connection.seen.cpu if node.connection.seen is not None else 0.0
        own = [
            (*(row[3][:2] + row[4][:2] for row in channel.rows()), *(each.passed for each in channel.large()))
            for channel in list(session.router.data.values())
            if isinstance(channel, CountedChannel)
        ]
        return (tuple(nodes), tuple(own)), used


def _how_far(node: Node) -> Hashable:
    at, seen, described = node.connection, node.connection.seen, node.connection.described
    if node.life is not Life.THERE:
        return node.life, at.number
    busy: tuple[object, ...] = ()
    if seen is not None:
        seq = seen.seq if seen.kind != IDLE else -1
        busy = seq, seen.kind, tuple(each.number for each in seen.beside), object() if seen.state == "D" else None
    moving: tuple[object, ...] = ()
    if described is not None:
        moving = described.done, *(each.bytes for each in described.moving), *(it.passed for it in described.large)
    return at.number, node.outbox.done, busy, moving


def show_waits(session: Session) -> None:
    """Has the waits of a session's main thread be shown, from now until the session's end."""
    shown, prompter = WaitsShown(session, transient_line()), session.part(Prompter)
    shown.is_asked = lambda: prompter.is_asking
    prompter.serve_session(session, shown.end_wait)
    session.link.idle.looks += [shown.look, prompter.look]
    session.link.waiting.on_long_wait = undertakings.mine.on_end = shown.end_own_wait
    session.changes.callback(_end_showing, session)


def _end_showing(session: Session) -> None:
    session.link.idle.looks.clear()
    session.link.waiting.on_long_wait = undertakings.mine.on_end = _nothing


def _nothing() -> None:
    """Does nothing: no session is there whose waits could be shown."""
