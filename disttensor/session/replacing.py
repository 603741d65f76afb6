"""Another process in the place of a lost node: the node goes on, with none of its tensors.

replace     asks whether one can be started, waits for a place, and then
reconnect   ends the former one for good, starts another, meets it, and has the session take it in
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ..runtime.process import undertakings
from ..runtime.protocol.bundle import Bundle
from ..runtime.protocol.errors import DisttensorError, StartError
from ..runtime.protocol.keys import curve_pair
from .meeting import meet
from .session import Session

#: Seconds for a node to start, once there is a place for it.
START = 60.0
#: Seconds between two looks for a place.
_PAUSE = 0.05

#: A CURVE key pair, public key first.
KeyPair = tuple[str, str]


def key_pairs(bundle: Bundle) -> tuple[KeyPair, KeyPair]:
    """Returns key pairs for one more process: of its connection, and of its side channel."""
    return (curve_pair(), curve_pair()) if bundle.server_key else (("", ""), ("", ""))


def bundle_for(session: Session, rank: int, own: KeyPair, beside: KeyPair, first: int = 0) -> Bundle:
    """Returns the bundle of a process that starts while the session runs. ``first``: the number of its first
    command."""
    assert session.bundle is not None
    return msgspec.structs.replace(
        session.bundle, rank=rank, nodes=1, first=first, local_rank=rank, public_key=own[0], secret_key=own[1],
        side_public_key=beside[0], side_secret_key=beside[1],
    )  # fmt: skip


def replace(session: Session, rank: int, new_ref: Callable[[], int], timeout: float | None) -> None:
    """Puts another process in a lost node's place, and waits for it: for a place ``timeout`` seconds, None: as long as
    it takes. ``new_ref`` mints a ref.

    Raises DisttensorError for a node that is not lost, and where no process can be started later; TimeoutError without
    a place; else as ``reconnect``.
    """
    if session.never_again:
        raise DisttensorError(f"node {rank} can't be replaced: {session.never_again}")
    link = session.link
    node = link.nodes[rank]
    if node.lost is None:  # its end may not have been noticed yet
        link.replies.drain()
        link.losses.explain()
    if node.lost is None:
        raise DisttensorError(f"node {rank} is not lost: it is {node.life.value}; dt.kill({rank}) ends it")
    with undertakings.mine.during(lambda: f"waiting for a place for node {rank}"):
        link.losses.wait_for_end(node, START)
        _wait_for_place(session, rank, timeout)
    reconnect(session, rank, new_ref)


def _wait_for_place(session: Session, rank: int, timeout: float | None) -> None:
    launcher, link = session.launcher, session.link
    if launcher is None or not launcher.grows:  # one that does not has the place of the process that has ended
        return
    deadline = None if timeout is None else time.monotonic() + timeout
    while launcher.vacant < 1:
        if link.losses.launcher_died:
            raise StartError(f"node {rank} can't be replaced: {link.losses.launcher_died}")
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(
                f"node {rank} can't be replaced: no host has a free place (none has come within {timeout:g} s); "
                "init_master_worker(spares=1) keeps one free"
            )
        link.waiting.pause(_PAUSE)


def reconnect(
    session: Session, rank: int, new_ref: Callable[[], int], start: Callable[[Bundle], object] | None = None
) -> None:
    """Puts another process in a lost node's place, and waits for it. Uses of the former one's tensors raise NodeLost,
    which says who has held them.

    ``start`` starts a process by its bundle; None: the launcher does. One that has not come, or can't be taken
    in, is lost; the call may be made again.

    Raises TimeoutError where the launcher does not know that the lost process has ended, StartError where no other one
    comes, else as ``Session.take_back`` and ``Link.reconnect``.
    """
    link, launcher = session.link, session.launcher
    if start is None and launcher is not None:
        start = lambda bundle: launcher.start([bundle])  # noqa: E731
    if start is None or session.bundle is None:
        raise DisttensorError("this session has no launcher that could start another node")
    node = link.nodes[rank]
    if node.lost is not None:
        link.losses.wait_for_end(node, START)
    own, beside = key_pairs(session.bundle)
    connection = link.reconnect(rank, own[0], beside[0])
    try:
        start(bundle_for(session, rank, own, beside, connection.first))
        meet(session, [rank], START)
        session.take_back(node, new_ref)
    except BaseException as e:
        link.losses.lose(rank, f"it did not start: {e}")
        link.told_losses.add(rank)  # by this error
        raise
