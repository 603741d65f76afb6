"""Breakpoints in functions on a node: the debuggers, and their talk with the script, whose terminal they have.

    function's thread: Debugger --Talk.readline--> "disttensor-breakpoints" --AtBreakpoint--> script: its prompt
    side channel's thread: Debugger <-- Talk.take_word <-- Breakpoints.take_word <--DebuggerLine-- script: a typed line

A function may be cancelled at any moment, by an exception in its thread: so another one sends what its debugger says.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import SimpleQueue
from types import FrameType
from typing import Any

from ..protocol import commands as c
from ..protocol import side
from . import holders, where
from .debugger_talk import Talk
from .interruption import Interruption

#: The most debuggers of a node at once: further functions go on.
MAX_TALKS = 64
#: By rank: those of the nodes of this process, which are several where nodes are threads of the script.
_open: dict[int, Breakpoints] = {}


class Breakpoints:
    """The debuggers of one node."""

    def __init__(self, rank: int, say: Callable[[c.Reply], None], interruption: Interruption) -> None:
        """``say`` sends a reply at once; ``interruption`` has the functions that run."""
        self.rank, self.interruption = rank, interruption
        self._say = say
        self._talks: dict[int, Talk] = {}
        self._debuggers: dict[int, Any] = {}  #: by thread
        self._numbers = count()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._replies: SimpleQueue[c.Reply | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Breakpoints of node {self.rank} {list(self._talks.values())}>"

    def open(self) -> None:
        """Has functions of this node stop here."""
        _open[self.rank] = self

    def close(self) -> None:
        """Ends the thread."""
        if _open.get(self.rank) is self:
            del _open[self.rank]
        if self._thread is not None:
            self._replies.put(None)
            self._thread.join()

    def take_word(self, word: side.DebuggerLine) -> None:
        """Takes a word of the script's. One for a debugger that has ended comes too late."""
        if (talk := self._talks.get(word.stop)) is not None:
            talk.take_word(word)

    def stop(self, frame: FrameType, header: str | None) -> None:
        """Has the function of a frame stop at its next line, and its debugger ask the script."""
        if os.getpid() != self._pid:
            print("disttensor: a breakpoint in a forked child of a node is left out", file=sys.stderr)
            return
        found = self._debuggers.get(threading.get_ident())
        if found is None:
            if len(self._talks) >= MAX_TALKS:
                print(f"disttensor: a breakpoint beside {MAX_TALKS} others is left out", file=sys.stderr)
                return
            from .debugger import Debugger  # not before it is needed: pdb imports much

            holder, number = holders.current(), next(self._numbers)
            talk = self._talks[number] = Talk(self.rank, number, holder.what, self.interruption, self._replies.put)
            found = self._debuggers[talk.thread] = Debugger(talk)
            self._start_sending()
            holder.at_end(talk, partial(self._end_talk, talk, found))
        if not found.is_asking:  # else what its user has typed has come to a breakpoint
            found.stop_at_next_line(frame, header)

    def _end_talk(self, talk: Talk, debugger: Any, error: BaseException | None) -> None:
        """Ends a debugger with its function."""
        debugger.end_debugging()
        del self._talks[talk.number], self._debuggers[talk.thread]

    def _start_sending(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._send, name="disttensor-breakpoints", daemon=True)
                thread.start()
                self._thread = thread

    def _send(self) -> None:
        while (reply := self._replies.get()) is not None:
            self._say(reply)


def stop(frame: FrameType, header: str | None = None) -> bool:
    """Has the function of a frame stop. Returns False, and does nothing, in a thread that is not a node's."""
    place = where.found()
    if place is None:
        return False
    if (node := _open.get(place.node)) is not None:
        node.stop(frame, header)
    else:
        print("disttensor: a breakpoint is left out: nothing but commands reaches this node", file=sys.stderr)
    return True


def take_word(rank: int, word: side.DebuggerLine) -> None:
    """Gives a node that is a thread of this process a word of the script's."""
    if (node := _open.get(rank)) is not None:
        node.take_word(word)


def hook(*args: Any, header: str | None = None, **kwargs: Any) -> None:
    """Replaces ``sys.breakpointhook`` on nodes: Python's ``breakpoint()`` asks at the script's terminal."""
    if os.environ.get("PYTHONBREAKPOINT") != "0" and not stop(sys._getframe(1), header):
        sys.__breakpointhook__(*args, **kwargs)
