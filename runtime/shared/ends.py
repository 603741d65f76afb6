"""Functions that tell the script of who has something that it holds for all: the name, and the end."""

from __future__ import annotations

from contextlib import suppress

from ..node import where
from ..node.holders import Holder
from ..process import role
from ..protocol import shared_objects as s
from ..protocol.codec import printable
from ..protocol.errors import DisttensorError
from .waiting import Caller

#: The most characters of a holder's name that the script is told.
WORDS = 200


def who(holder: Holder) -> str:
    """Returns a holder in words."""
    found = where.found()
    place = f" on node {found.node}" if found is not None and not role.is_node() else ""
    return printable(holder.what[:WORDS]) + place


def tell_end(ask: Caller, holder: Holder, request: s.Asking) -> None:
    """Asks for what has to be done at a holder's end."""
    with suppress(DisttensorError):  # the session has ended
        if holder.is_function:  # when the script gets its result, it is done
            ask.ask(request)
        else:  # a thread that is about to be gone, where nothing may wait
            ask.notify(request)
