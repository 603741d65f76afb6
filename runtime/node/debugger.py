"""The debugger of a function on a node: Python's pdb, whose stdin and stdout are the script's (debugger_talk.py).

It sees the user's frames only: those of the node's own below them are neither shown nor stepped into.
"""

from __future__ import annotations

import code
import contextlib
import pdb
import sys
import traceback
from functools import partial
from types import CodeType, FrameType
from typing import Any, cast

from .debugger_talk import QuitTalk, Talk
from .user_functions import _result_of

#: The modules below the user's frames in the stack of a thread.
_OURS = ("disttensor.", "threading")


class Debugger(pdb.Pdb):
    """The debugger of one function: of the thread that runs it."""

    def __init__(self, talk: Talk) -> None:
        stream = cast(Any, talk)
        super().__init__(stdin=stream, stdout=stream, nosigint=True)
        self.prompt = f"(node {talk.rank} pdb) "
        self.is_asking = False
        self._talk = talk
        self._bottom: FrameType | None = None  #: the outermost of the user's frames
        talk.on_interrupt = self._stop_soon

    def stop_at_next_line(self, frame: FrameType, header: str | None) -> None:
        """Has the function stop at the next line of a frame."""
        if header:
            self.message(header)
        bottom = _outermost(frame)
        super().set_trace(frame)
        # From here on each call in this thread is seen by the debugger: there must be none.
        self._bottom = self.botframe = bottom
        below = bottom.f_back
        while below is not None:
            del below.f_trace
            below = below.f_back

    def end_debugging(self) -> None:
        """Ends it with its function. A debugger that is at nothing any more does not see what runs after that."""
        if sys.gettrace() == self.trace_dispatch:
            sys.settrace(None)
        self._bottom = None
        self.reset()  # or it would keep the function's frames
        self.clear_all_breaks()
        self._talk.leave("over")

    def _stop_soon(self) -> None:
        """Has the function stop at its next line. Called by another thread, while it steps."""
        self._set_stopinfo(None, None)  # type: ignore[attr-defined]

    # ---- what bdb calls, in the function's thread --------------------------------------------------------------------

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        found = super().dispatch_return(frame, arg)
        if frame is self._bottom:
            sys.settrace(None)
            self._talk.leave("over")
        return found

    def interaction(self, frame: FrameType | None, *args: Any, **kwargs: Any) -> None:
        if frame is not None:
            self._talk.stop_at(frame)
        self.is_asking, over = True, True
        try:
            super().interaction(frame, *args, **kwargs)
            over = self.quitting or self.stoplineno == -1  # of set_continue
        except QuitTalk:
            if not self._talk.is_quit:
                raise KeyboardInterrupt from None
            self.set_quit()
        finally:
            self.is_asking = False
            self._talk.leave("over" if over else "steps")

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's own goes on after a KeyboardInterrupt, by which the function is cancelled here

    # ---- what is typed -----------------------------------------------------------------------------------------------

    def onecmd(self, line: str) -> Any:
        found = self._talk.interruptible(partial(super().onecmd, line), self._interrupted)
        if self._talk.is_over:  # pdb takes any exception of an expression's for the user's
            raise QuitTalk
        return found

    def _interrupted(self) -> bool:
        self.message("--KeyboardInterrupt--")
        return False

    def do_EOF(self, arg: str) -> Any:
        """EOF
        Nobody types any more: the function goes on.
        """
        self.clear_all_breaks()
        return self.do_continue("")

    def do_interact(self, arg: str) -> None:
        """interact

        Start an interactive interpreter whose global namespace
        contains all the (global and local) names found in the current scope.
        """
        frame = self.curframe
        if frame is not None:
            _Console({**frame.f_globals, **self.curframe_locals}, self._talk).interact(banner="*interactive*")


class _Console(code.InteractiveConsole):
    """The interpreter of ``interact``."""

    def __init__(self, names: dict[str, Any], talk: Talk) -> None:
        super().__init__(names)
        self._talk = talk

    def raw_input(self, prompt: str = "") -> str:
        self._talk.write(f"(node {self._talk.rank}) {prompt}")
        line = self._talk.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def write(self, data: str) -> None:
        self._talk.write(data)

    def showtraceback(self) -> None:
        """Shows the error of what was typed, whatever hook the process has for others."""
        error = sys.exc_info()[1]
        if error is not None and error.__traceback__ is not None:  # the first frame is the interpreter's own
            self.write("".join(traceback.format_exception(error.with_traceback(error.__traceback__.tb_next))))

    def showsyntaxerror(self, filename: str | None = None, **kwargs: Any) -> None:
        self.write("".join(traceback.format_exception_only(sys.exc_info()[1])))

    def runcode(self, code: CodeType) -> None:
        with contextlib.redirect_stdout(cast(Any, self._talk)):
            self._talk.interruptible(partial(super().runcode, code), lambda: self.write("\nKeyboardInterrupt\n"))


def _outermost(frame: FrameType) -> FrameType:
    """Returns the outermost frame of the user's in the stack of a frame."""
    frames = [frame]
    while (below := frames[-1].f_back) is not None and below.f_code is not _result_of.__code__:
        frames.append(below)
    while len(frames) > 1 and frames[-1].f_globals.get("__name__", "").startswith(_OURS):
        frames.pop()
    return frames[-1]
