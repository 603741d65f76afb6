"""Nodes that join while the session runs: taken in when the script asks, and at no other time."""

from __future__ import annotations

import time

import msgspec

from ..errors.argument_checks import spelled, whole_number
from ..runtime.master.route import waits
from ..runtime.protocol.errors import DisttensorError
from ..runtime.protocol.keys import curve_pair
from ..session import current
from ..session.session import Session
from .start import meet

#: Seconds for a node to start when its host is there.
START = 60.0
#: Seconds between two looks for hosts that have come.
_PAUSE = 0.05


@spelled
def wait_for_nodes(count: int | None = None, timeout: float | None = None) -> int:
    """Waits until there are ``count`` nodes, taking in those that join; gives how many there are.

    None: takes in all that have come by now, and waits for no other. Nodes that are lost don't count, and don't come
    back: one that comes in its place is a new node, with the next number.

    Raises TimeoutError after ``timeout`` seconds, StartError when a node that has come does not start, ValueError for
    more nodes than this session may have (``init_master_worker(nodes=(2, 4))``), GraphError while a graph is recorded.
    """
    waits("wait_for_nodes")
    count = None if count is None else whole_number("count", count)
    session = current.session()
    link, deadline = session.link, None if timeout is None else time.monotonic() + timeout
    if count is not None and count > _possible(session):
        raise ValueError(f"{count} nodes: this session can have {_possible(session)}; see init_master_worker(nodes=)")
    link.pause(0)
    while True:
        there, vacant = _alive(session), 0
        if session.launcher is not None and session.launcher.grows:
            vacant = min(session.launcher.vacant, session.most - len(session.states))
        wanted = vacant if count is None else min(vacant, count - there)
        if wanted > 0:
            _take_in(session, wanted)
        elif count is None or there >= count:
            return there
        elif deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"{there} of {count} nodes are there after {timeout:g} s; no other has come")
        else:
            link.pause(_PAUSE)


def _alive(session: Session) -> int:
    return sum(outbox.lost is None for outbox in session.link.outboxes)


def _possible(session: Session) -> int:
    """How many nodes there can be at once, now that some may have been lost."""
    grows = session.launcher is not None and session.launcher.grows
    return _alive(session) + (session.most - len(session.states) if grows else 0)


def _take_in(session: Session, count: int) -> None:
    link, launcher, plain = session.link, session.launcher, session.plain
    if launcher is None or plain is None:
        raise DisttensorError("no node can join this session")
    bundles, outboxes = [], []
    for _ in range(count):
        public, secret = curve_pair() if plain.server_key else ("", "")
        outboxes.append(link.extend(public))
        rank = outboxes[-1].rank
        bundles.append(msgspec.structs.replace(plain, rank=rank, nodes=1, public_key=public, secret_key=secret))
    try:
        launcher.start(bundles)
        meet(session, [outbox.rank for outbox in outboxes], START)
    except BaseException as e:
        for outbox in outboxes:
            link.lose(outbox.rank, f"it did not start: {e}")
        raise
    finally:
        session.extend(outboxes)
