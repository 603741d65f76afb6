"""Ends a process that the user's code has forked, where it comes out of that code: it would go on as what it is a copy
of, with the same sockets, beside it."""

from __future__ import annotations

import os

#: The exit code of such a process: an internal error, as in sysexits.h.
EX_FORKED = 70


class EndsForkedChild:
    """A context for code of the user's. A child that was forked in it ends at its end, whether that raises or not;
    nothing that the child has of this process is cleaned up: it is this process's."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._pid = os.getpid()

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._pid:
            text = (
                f"disttensor: {self._what} forked this process (pid {os.getpid()}), which has come out of it and would "
                f"go on as a second process {self._pid}: it ends here. A child ends by os._exit() before that\n"
            )
            try:
                os.write(2, text.encode("utf-8", "replace"))
            finally:
                os._exit(EX_FORKED)
