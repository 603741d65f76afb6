"""Functions on nodes that have stopped at breakpoints, as the script knows it: what their debuggers say.

Replies.take_in --AtBreakpoint--> StoppedFunctions.take_reply, and who serves: seeing/breakpoints.py
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ..process import cells
from ..process.clock import CLOCK, Clock
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import ProtocolError

#: The most functions of one node that stop at once; and the most characters of a debugger that are not shown yet.
MAX_STOPS, MAX_UNSHOWN = 64, 4 * codec.MAX_DEBUGGED


class StoppedFunction:
    """A function that has stopped, and its debugger."""

    __slots__ = (
        "_file",
        "_line",
        "at",
        "is_called_for",
        "is_named",
        "node",
        "number",
        "prompt",
        "said",
        "state",
        "what",
    )

    def __init__(self, node: int, number: int, at: float) -> None:
        self.node, self.number = node, number
        self.at = at  #: when it has stopped last
        #: "asks" for a line; "works" at one that it was given; "steps": the function runs to its next line; "over"
        self.state = "asks"
        self.what = ""  #: the function
        self.prompt = ""  #: by which it asks
        self.said: list[str] = []  #: texts that are not shown yet
        self.is_named = False  #: whether the user was told of it as it had its turn
        self.is_called_for = False  #: whether the user was told that it waits for the script to wait
        self._file, self._line = "", 0

    def __repr__(self) -> str:
        return f"<StoppedFunction of node {self.node} {self.state} at {self.position}>"

    @property
    def position(self) -> str:
        """The line at which it is, such as "train.py:12"."""
        file = self._file if cells.cell_of(self._file) else os.path.basename(self._file)
        return codec.one_line(cells.position(file, self._line))

    def take_said(self) -> str:
        """Returns what is not shown yet. A line of a notebook's cell has its source: only this process has that."""
        said, self.said = "".join(self.said), []
        head, source = f"> {self._file}({self._line})", cells.source(self._file, self._line)
        if source and head in said:
            above, _, below = said.rpartition(head)
            what, _, below = below.partition("\n")
            said = f"{above}> {self.position} in {what}\n-> {source}\n{below}"
        return said

    def hear_debugger(self, said: c.AtBreakpoint, at: float) -> None:
        """Takes what its debugger says. Raises ProtocolError for more than anybody could have asked for."""
        if sum(map(len, self.said)) + len(said.text) > MAX_UNSHOWN:
            raise ProtocolError(f"a debugger that says more than {MAX_UNSHOWN} characters, and nobody has asked")
        text = said.text
        if said.state == "asks":
            above, newline, self.prompt = text.rpartition("\n")
            text = above + newline
        if text:
            self.said.append(text)
        if "steps" in (self.state, said.state):
            self.at = at
        self.state, self.what, self._file, self._line = said.state, said.what, said.file, said.line


class StoppedFunctions:
    """The stops of a session's nodes, each of which its connection has. The caller of each method holds the link's
    lock, unless it says otherwise."""

    __slots__ = ("_clock", "on_change", "on_end", "serve", "wanted")

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self.wanted = False  #: whether a debugger asks, and a thread that waits is to ``serve``
        #: asks the user for whatever debuggers want, in the main thread, until none does, or what that waits for is
        #: over; returns whether it has. Called without the lock
        self.serve: Callable[[Callable[[], bool]], bool] = lambda over: False
        self.on_change: Callable[[StoppedFunction], object] = lambda stop: None  #: is told of what a debugger has said
        self.on_end: Callable[[], object] = lambda: None  #: is told that the session ends

    def take_reply(self, rank: int, stops: dict[int, StoppedFunction], said: c.AtBreakpoint) -> None:
        """Takes what a debugger of a node says. ``stops``: those of its connection. Raises ProtocolError."""
        stop = stops.get(said.stop)
        if stop is None:
            if len(stops) >= MAX_STOPS:
                raise ProtocolError(f"{len(stops) + 1} functions are at breakpoints")
            stop = stops[said.stop] = StoppedFunction(rank, said.stop, self._clock.now())
        stop.hear_debugger(said, self._clock.now())
        if stop.state == "over":
            del stops[said.stop]
        self.on_change(stop)
