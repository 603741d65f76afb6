"""The results of collectives that the line which made them throws away: it takes them for collectives that write in
place, as torch.distributed's do.

A line is accused where it neither names nor uses the value of its call, and nothing was issued before the value was
freed. What a line names, returns or passes on is another line's business: a name may be ``_``, and a line that calls a
model to warm it up throws away what the last layer has returned.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
from functools import lru_cache
from types import CodeType
from typing import Any

from ..dispatch.call_site import here
from ..errors.argument_checks import spelled
from ..errors.late_warnings import warn_later
from ..futures.work import Work
from ..proxy.meta import Handle
from ..proxy.proxy import DistributedTensor
from ..runtime.master.failures import Site
from ..runtime.master.link import Link
from ..runtime.master.route import route
from ..runtime.process.signals import uninterrupted
from ..session.session import Session

#: The instructions behind a call whose value the line drops, or gives to a list, which it may drop.
_DROPS = ("POP_TOP", "LIST_APPEND")
#: The files between the user's call and here.
_OURS = {
    __file__,
    spelled.__code__.co_filename,
    *(os.path.join(os.path.dirname(__file__), name) for name in ("api.py", "over_dims.py")),
}


class Watched(Handle, gc=False, eq=False):
    """The handle of a result that its line seems to throw away."""

    text: str
    site: Site
    thread: int
    link: Link
    issued: int  #: the commands that had been issued when it was returned

    @uninterrupted
    def __del__(self) -> None:
        if self.ref:
            self.meta.dead.append(self.ref)
            if self.link.issued() <= self.issued:
                warn_later(self.text, self.site, thread=self.thread)


class Untaken:
    """Says of an asynchronous collective's result that nobody took it, at its Work's end: a line dropped the Work, or
    the script has waited for it and not asked for the result."""

    def __init__(self, text: str, site: Site, link: Link, dropped: bool) -> None:
        self._text, self._site, self._thread, self._link = text, site, threading.get_ident(), link
        self._issued = link.count_issued() if dropped else None
        self.taken = self.waited = False

    def __del__(self) -> None:
        if self.taken:
            return
        if self.waited or (self._issued is not None and self._link.issued() <= self._issued):
            warn_later(self._text, self._site, thread=self._thread)


def watch(result: Any, what: str, over: object, session: Session) -> Any:
    """Returns what a collective returns to its caller: a new tensor, or a Work that gives one. Watches it where the
    caller is a line of the user's."""
    if route.get().recorder is not None:  # a graph keeps what is recorded
        return result
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename in _OURS:
        frame = frame.f_back
    site = here()
    if site is None or site[0] is not frame.f_code:
        return result
    dropped = _is_dropped(*site)
    if isinstance(result, Work):
        result.untaken = Untaken(_text(what, over), site, session.link, dropped)  # type: ignore[attr-defined]
    elif dropped and type(result) is DistributedTensor and (ref := result._h.ref):
        handle, link = result._h, session.link
        issued = link.count_issued()
        result._h = Watched(ref, handle.meta, _text(what, over), site, threading.get_ident(), link, issued)
        handle.ref = 0
    return result


@lru_cache(maxsize=1024)
def _is_dropped(code: CodeType, at: int) -> bool:
    """Returns whether the line with the call at an instruction does not use its value: it drops it, or makes a list."""
    behind = next((each for each in dis.get_instructions(code) if each.offset > at), None)
    return behind is not None and behind.opname in _DROPS


def _text(what: str, over: object) -> str:
    better = f"{what}_(x, over={over!r}) writes x" if what == "all_reduce" else f"write y = {what}(...)"
    return (
        f"the result of {what}(x, over={over!r}) is a new tensor, which this line throws away; x stays as it is "
        f"({better})"
    )
