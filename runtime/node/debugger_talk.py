"""The talk of a function's debugger with the script: what the debugger takes for its stdin and stdout."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from itertools import count
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Literal, NamedTuple, TypeVar

from ..process.signals import LOOK
from ..protocol import codec, side
from ..protocol import commands as c
from ..protocol.errors import CancelledError
from .interruption import Interruption

#: Stands where a debugger has printed more at once than is sent.
_CUT = "\n[more was printed, and is left out]\n"

#: Numbers of what debuggers are at, which are no functions' requests.
_requests = count(1)

_T = TypeVar("_T")


class Place(NamedTuple):
    """The place at which a function has stopped."""

    file: str
    line: int
    what: str  #: the function


class QuitTalk(BaseException):
    """The function is cancelled, or the session ends: so the talk does, whatever the debugger is at."""


class Talk(io.TextIOBase):
    """The talk of one debugger, which belongs to the thread that makes it."""

    def __init__(
        self, rank: int, number: int, what: str, interruption: Interruption, send: Callable[[c.AtBreakpoint], None]
    ) -> None:
        """``number``: the debugger's, on its node; ``what``: the function, in words; ``send`` sends what is said."""
        self.rank, self.number, self.thread = rank, number, threading.get_ident()
        self._interruption, self._send = interruption, send
        self.place = Place("", 0, codec.one_line(what))
        self._words: SimpleQueue[side.DebuggerLine] = SimpleQueue()
        self._last = 0  #: the number of the last word that has come
        self._said: list[str] = []  #: printed, and not sent
        self._room = codec.MAX_DEBUGGED - len(_CUT)
        self._requests = interruption.running_in(self.thread)
        self._command = 0  #: the request of what the debugger is at, which an interrupt ends; 0 for nothing
        self._told = "over"
        self.is_quit = False  #: whether the session ends
        self.on_interrupt: Callable[[], object] = lambda: None  #: is called for one that comes at no command

    def __repr__(self) -> str:
        return f"<Talk {self.number} of node {self.rank} {self._told} at {self.place.file}:{self.place.line}>"

    # ---- the side channel's thread -----------------------------------------------------------------------------------

    def take_word(self, word: side.DebuggerLine) -> None:
        """Takes a word of the script's."""
        if word.number <= self._last:
            return
        self._last = word.number
        if word.kind == "interrupt":
            command = self._command
            if command:
                self._interruption.cancel(command)
            else:
                self.on_interrupt()
        else:
            self.is_quit = self.is_quit or word.kind == "quit"
            self._words.put(word)

    # ---- the function's thread ---------------------------------------------------------------------------------------

    def stop_at(self, frame: FrameType) -> None:
        """Notes where the function is."""
        file = frame.f_code.co_filename.encode(errors="replace").decode()  # as a name of the system's may be no UTF-8
        self.place = Place(file[: codec.MAX_PATH], max(0, frame.f_lineno or 0), self.place.what)

    def write(self, text: str, /) -> int:
        shown = text if len(text) <= self._room else text[: self._room] + _CUT * (self._room > 0)
        self._room = max(0, self._room - len(text))
        self._said.append(shown)
        return len(text)

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]  # of a bytes stream's signature
        """Asks for a line, and waits for it; "" where nobody types."""
        self._send_state("asks")
        while True:
            if self.is_over:
                raise QuitTalk
            try:
                word = self._words.get(timeout=LOOK)
            except Empty:
                continue
            return word.text + "\n" if word.kind == "line" else ""

    @property
    def is_over(self) -> bool:
        """True once the function was cancelled, or the session ends."""
        running = self._interruption.running_in(self.thread)
        return self.is_quit or any(request not in running for request in self._requests)

    def interruptible(self, do: Callable[[], _T], otherwise: Callable[[], _T]) -> _T:
        """Does what the debugger is asked for, and ``otherwise`` where Ctrl-C has ended that."""
        before, request = self._command, -next(_requests)
        try:
            self._command = request
            return self._interruption.run(request, "", do)
        except CancelledError:
            return otherwise()
        finally:
            self._command = before

    def leave(self, state: Literal["steps", "over"]) -> None:
        """Says that the function goes on. Says nothing where that was said."""
        if state != self._told or self._said:
            self._send_state(state)

    def _send_state(self, state: Literal["asks", "steps", "over"]) -> None:
        text, self._said, self._room = "".join(self._said), [], codec.MAX_DEBUGGED - len(_CUT)
        self._told = state
        text = text.encode(errors="replace").decode()
        self._send(c.AtBreakpoint(self.number, state, text, *self.place))
