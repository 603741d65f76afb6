"""Breakpoints in functions on nodes: their debuggers ask here, at the script's terminal or in its notebook.

    StoppedFunctions.take_reply --on_change--> Prompter: a debugger asks, or its function goes on        any thread
    Waiting.wait, look --> Prompter.serve --> input() --> DebuggerLine --> the node           the main thread

What a node says is shown and never evaluated. The main thread asks, while it waits for nodes, or in Python's own waits
(a lock, a future): there a signal's handler does. One debugger after the other has its turn.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Literal

from ..runtime.launch.output.lines import plain
from ..runtime.master.breakpoints import MAX_UNSHOWN, StoppedFunction
from ..runtime.master.link import Link
from ..runtime.node import breakpoints
from ..runtime.process import signals
from ..runtime.protocol import side
from ..runtime.protocol.errors import NodeLost
from ..runtime.shared.waiting import AnswerSlot
from ..session.session import Session

#: Seconds of one wait for what a debugger says.
LOOK = 0.5
#: Seconds for which a function that steps keeps its turn while others wait for theirs.
STEP = 1.0
#: Seconds after which it is said that a function waits for the script to wait.
UNHEARD = 1.0
#: The signal by which another thread calls the main one: to the prompt, or away from it.
CALL = signal.SIGRTMIN + 8

#: The most functions that are named as those that wait for their turn.
NAMED = 3
#: The most characters of a debugger's prompt.
PROMPT = 60
#: The code in which Python waits, and our own for waits that are not for a node.
_WAITS = frozenset(wait.__code__ for wait in (threading.Condition.wait, threading.Thread.join, AnswerSlot.wait))
#: That in which ``join`` waits before Python 3.13. Others call it, too, and do not wait.
_OF_JOIN = getattr(threading.Thread, "_wait_for_tstate_lock", None)

_log = logging.getLogger("disttensor")

Kind = Literal["line", "go on", "interrupt", "quit"]


class _Withdrawn(BaseException):
    """The debugger that asks has ended meanwhile."""


class Prompter:
    """The prompts of one session."""

    def __init__(self) -> None:
        self.is_asking = False  #: whether the user is asked right now
        self._link: Link | None = None
        self._shares_process = False
        self._clear: Callable[[], object] = lambda: None
        self._words = count(1)  #: the numbers of what debuggers are told
        self._current: StoppedFunction | None = None  #: which has its turn
        self._serving = False
        self._said_no_terminal = False
        self._interrupts = 0  #: how often Ctrl-C came since something was typed
        self._handles = False  #: whether the main thread has a handler of ``CALL``

    def serve_session(self, session: Session, clear: Callable[[], object]) -> None:
        """Serves a session from now on. ``clear`` takes away the line that says what the script waits for."""
        self._link, self._clear, self._shares_process = session.link, clear, session.shares_process
        stops = session.link.breakpoints
        stops.serve, stops.on_change, stops.on_end = self.serve, self._changed, self._end
        if threading.current_thread() is threading.main_thread() and _is_free(CALL):
            signal.signal(CALL, self._called)
            self._handles = True
            session.changes.callback(self._stop_handling)

    def _stop_handling(self) -> None:
        self._handles = False
        if threading.current_thread() is threading.main_thread() and signal.getsignal(CALL) == self._called:
            signal.signal(CALL, signal.SIG_IGN)  # one may be on its way, and would end the process by default

    @property
    def _links(self) -> Link:
        if self._link is None:
            raise AssertionError("no session is served")
        return self._link

    def forked(self) -> None:
        """Forgets all in a forked child: the debuggers are the parent's."""
        self._link, self._handles = None, False

    # ---- any thread, under the link's lock ---------------------------------------------------------------------------

    def _changed(self, stop: StoppedFunction) -> None:
        """Takes note of what a debugger has said."""
        if stop.state == "asks":
            if not _can_ask():
                if not self._said_no_terminal:
                    self._said_no_terminal = True
                    _log.warning(
                        "node %d goes on from its breakpoint at %s: nobody can be asked, as the script's stdin is not "
                        "a terminal; PYTHONBREAKPOINT=0 leaves breakpoints out",
                        stop.node,
                        stop.position,
                    )
                stop.said = []
                self._answer(stop, "go on")
                return
            self._links.breakpoints.wanted = True
            return
        if stop.state == "over":
            self._links.side.end_debugger(stop.node, stop.number)
        if stop is self._current and self.is_asking:
            self._call()

    def lost(self, error: NodeLost) -> None:
        """Takes note of the loss of a node, whose debuggers are gone with it."""
        stop = self._current
        if stop is not None and stop.node == error.rank:
            stop.said.append(f"\nnode {error.rank} is lost, and its debugger with it: {error.cause}\n")
            stop.state = "over"
            if self.is_asking:
                self._call()

    def _end(self) -> None:
        """Ends the functions that are at breakpoints, as the session does."""
        if self._link is not None:  # else this is a forked child
            for stop in self._stops():
                self._answer(stop, "quit")

    def _answer(self, stop: StoppedFunction, kind: Kind, text: str = "") -> None:
        link = self._links
        with link.lock:
            if stop.state == "over" or link.is_forked or link.closed:
                return
            if kind != "interrupt":
                stop.state = "works"
            word = side.DebuggerLine(stop.number, next(self._words), kind, text)
            if self._shares_process:
                breakpoints.take_word(stop.node, word)
            else:
                link.side.answer_debugger(link.nodes[stop.node], word)

    def look(self) -> None:
        """Calls the main thread to a debugger that asks, if it waits otherwise than for nodes; else says once that one
        asks. To be called again and again, by another thread."""
        if self.is_asking and self._current is not None and self._current.state != "asks":
            self._call()  # a signal that comes just before the wait for a key is heard with the next one
        if self._link is None or not self._link.breakpoints.wanted or self._serving:
            return
        main = threading.main_thread().ident
        if any(thread == main for thread, _ in list(self._link.waiting.under_way.values())):
            return
        if _waits(sys._current_frames().get(main or 0)):
            self._call()
            return
        now = self._links.clock.now()
        for stop in self._asking():
            if now - stop.at > UNHEARD and not stop.is_called_for:
                stop.is_called_for = True
                _log.warning(
                    "node %d is at a breakpoint in %s, %s: it asks as soon as the script waits for something",
                    stop.node,
                    stop.what,
                    stop.position,
                )

    def _call(self) -> None:
        if self._handles:
            signal.pthread_kill(threading.main_thread().ident or 0, CALL)

    # ---- the main thread ---------------------------------------------------------------------------------------------

    def _called(self, number: int, frame: FrameType | None) -> None:
        if self.is_asking:
            if self._current is None or self._current.state != "asks":
                raise _Withdrawn
        elif _waits(frame) and signals.is_safe(frame):
            self.serve(lambda: not _waits(frame))

    def serve(self, over: Callable[[], bool]) -> bool:
        """Asks the user for whatever debuggers want, until none does, or ``over()`` while a function steps. Returns
        whether it has. Does nothing in threads other than the main one."""
        if self._serving or threading.current_thread() is not threading.main_thread():
            return False
        served = False
        self._serving = True
        try:
            while (stop := self._turn()) is not None:
                served = True
                self._clear()
                self._show(stop)
                if stop.state == "asks":
                    self._ask(stop)
                elif stop.state == "over" or (stop.state == "steps" and over()):
                    self._current = None
                else:
                    self._wait(stop)
        finally:
            self._serving = False
        return served

    def _turn(self) -> StoppedFunction | None:
        """Returns the debugger that has its turn; None where none asks."""
        stop, waiting = self._current, self._asking()
        if stop is not None and stop.state == "steps" and waiting and self._links.clock.now() - stop.at > STEP:
            stop = None  # it may wait for those
        if stop is None:
            stop = next(iter(waiting), None)
            if stop is None:
                self._links.breakpoints.wanted = False
                if self._asking():  # meanwhile
                    self._links.breakpoints.wanted = True
                    return self._turn()
        self._current = stop
        return stop

    def _show(self, stop: StoppedFunction) -> None:
        """Prints what a debugger has said, except its prompt."""
        if not stop.is_named and stop.state == "asks":
            stop.is_named = True
            others = [f"node {other.node}, {other.position}" for other in self._asking() if other is not stop]
            words = "more waits for its turn" if len(others) == 1 else "more wait for their turn"
            wait = f"; {len(others)} {words}: {'; '.join(others[:NAMED])}" if others else ""
            _print(f"node {stop.node} is at a breakpoint in {stop.what}, {stop.position}{wait}\n")
        with self._links.lock:
            said = stop.take_said()
        _print(plain(said, MAX_UNSHOWN))

    def _ask(self, stop: StoppedFunction) -> None:
        prompt = plain(stop.prompt, PROMPT).strip()
        own = f"(node {stop.node}"
        prompt = f"{prompt} " if prompt.startswith(own) else f"{own}) {prompt} "
        try:
            try:
                self.is_asking = True
                if stop.state != "asks":
                    return
                line = input(prompt)
            finally:
                self.is_asking = False
        except _Withdrawn:
            _print("\n" if stop.said else "\nthe function has ended, and its debugger with it\n")
            return
        except KeyboardInterrupt:
            self._interrupts += 1
            if self._interrupts > 1:
                self._interrupts = 0
                raise
            _print("\n--KeyboardInterrupt--\n")
            return
        except (EOFError, OSError, RuntimeError, ValueError):  # closed, or a notebook whose front end can't ask
            is_first = prompt.endswith("pdb) ")  # else it leaves what the debugger was told to begin
            _print(f"\nnode {stop.node} goes on from its breakpoint: the input has ended\n" if is_first else "\n")
            self._interrupts = 0
            self._answer(stop, "go on")
            return
        self._interrupts = 0
        self._answer(stop, "line", line.encode(errors="replace").decode())

    def _wait(self, stop: StoppedFunction) -> None:
        """Waits until a debugger says something, or its function does. A Ctrl-C ends what it is at, a second one the
        script's wait."""
        try:
            self._links.waiting.pause(LOOK)
        except KeyboardInterrupt:
            self._interrupts += 1
            if self._interrupts > 1:
                self._interrupts = 0
                raise
            self._answer(stop, "interrupt")
        if stop.state == "asks":
            self._interrupts = 0

    def _asking(self) -> list[StoppedFunction]:
        """Returns the debuggers that ask, the one that has waited longest first."""
        return sorted((stop for stop in self._stops() if stop.state == "asks"), key=lambda stop: stop.at)

    def _stops(self) -> Iterator[StoppedFunction]:
        for node in self._links.nodes:
            yield from list(node.connection.stops.values())


def breakpoint(*, header: str | None = None) -> None:
    """Stops a function on a node at its next line: its pdb asks at the script's terminal, or in its notebook.

        def step(x):
            dt.seeing.breakpoint()
            return x * 2

    So does Python's ``breakpoint()`` on nodes that are processes. The script asks while it waits for something, one
    debugger after the other, by prompts such as ``(node 1 pdb) ``. All commands of pdb's work; Ctrl-D has the function
    go on, Ctrl-C ends what the debugger is at. Where the script's stdin is not a terminal the function goes on, and
    a warning says so once. In the script itself it does what Python's ``breakpoint()`` does.

    With ``PYTHONBREAKPOINT=0`` in the environment it does nothing. ``header`` is printed first.
    """
    frame = sys._getframe(1)
    if os.environ.get("PYTHONBREAKPOINT") == "0" or breakpoints.stop(frame, header):
        return
    import pdb  # it imports much

    debugger = pdb.Pdb()
    if header:
        debugger.message(header)
    debugger.set_trace(frame)


def _can_ask() -> bool:
    """Returns whether somebody can be asked: at a terminal, or in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is not None:
        return True
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # it is closed
        return False


def _waits(frame: FrameType | None) -> bool:
    """Returns whether a thread with this innermost frame waits."""
    if frame is not None and _OF_JOIN is not None and frame.f_code is _OF_JOIN.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_code in _WAITS


def _is_free(number: int) -> bool:
    return signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN)


def _print(text: str) -> None:
    """Prints a text as far as stdout can show it."""
    if text and sys.stdout is not None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()
