"""Nodes that come and go while the session runs: joining ones are taken in when the script asks for that."""

from __future__ import annotations

import time

import torch

from ..dispatch.call_site import here
from ..errors.argument_checks import spelled, whole_number
from ..runtime.master.failures import line_of
from ..runtime.master.route import waits
from ..runtime.process import undertakings
from ..runtime.protocol.errors import DisttensorError, StartError
from ..session import current
from ..session.meeting import meet
from ..session.replacing import START, bundle_for, key_pairs
from ..session.session import Session

#: Seconds between two looks for hosts that have joined.
_PAUSE = 0.05


@spelled
def wait_for_nodes(count: int | None = None, timeout: float | None = None) -> int:
    """Waits until there are ``count`` nodes, taking in those that join; returns the number of nodes.

        dt.init_master_worker(nodes=(2, 4), init_method="tcp://0.0.0.0:29500")    # begins with 2
        count = dt.wait_for_nodes(4, timeout=60)

    With None it takes in all nodes that have joined by now, and waits for no other. Lost nodes don't count, and don't
    come back: a node that joins in place of a lost one is a new node, with the next number. ``timeout`` counts seconds
    from the call; a node that has joined by then has 60 s more to start.

    Raises TimeoutError after ``timeout`` seconds, StartError when a node that has joined does not start, ValueError for
    more nodes than this session may have (``init_master_worker(nodes=(2, 4))``), GraphError while a graph is recorded,
    DisttensorError without a session.
    """
    waits("wait_for_nodes")
    count = None if count is None else whole_number("count", count)
    session = current.session()
    link, deadline = session.link, None if timeout is None else time.monotonic() + timeout
    if count is not None and count > _possible(session) and not link.losses.launcher_died:  # that is said below
        raise ValueError(f"{count} nodes: this session can have {_possible(session)}; see init_master_worker(nodes=)")
    link.waiting.pause(0)
    with undertakings.mine.during(lambda: f"waiting for nodes: {_alive(session)} of {count} are there"):
        return _wait(session, count, timeout, deadline)


def _wait(session: Session, count: int | None, timeout: float | None, deadline: float | None) -> int:
    link = session.link
    while True:
        there, vacant = _alive(session), 0
        if session.launcher is not None and session.launcher.grows:
            vacant = min(session.launcher.vacant, session.max_nodes - len(session.nodes))
        wanted = vacant if count is None else min(vacant, count - there)
        if wanted > 0:
            _take_in(session, wanted)
        elif count is None or there >= count:
            return there
        elif link.losses.launcher_died:
            raise StartError(f"{there} of {count} nodes are there, and no other can come: {link.losses.launcher_died}")
        elif deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"{there} of {count} nodes are there after {timeout:g} s; no other has come")
        else:
            link.waiting.pause(_PAUSE)


def _alive(session: Session) -> int:
    return sum(node.lost is None for node in session.nodes)


def _possible(session: Session) -> int:
    """Returns the largest number of nodes that there can be at once, now that some may have been lost."""
    grows = session.launcher is not None and session.launcher.grows
    return _alive(session) + (session.max_nodes - len(session.nodes) if grows else 0)


def _take_in(session: Session, count: int) -> None:
    link, launcher, bundle = session.link, session.launcher, session.bundle
    if launcher is None or bundle is None:
        raise DisttensorError("no node can join this session")
    bundles, nodes = [], []
    for _ in range(count):
        own, beside = key_pairs(bundle)
        nodes.append(link.extend(own[0], beside[0]))
        bundles.append(bundle_for(session, nodes[-1].rank, own, beside))
    try:
        launcher.start(bundles)
        meet(session, [node.rank for node in nodes], START)
    except BaseException as e:
        for node in nodes:
            link.losses.lose(node.rank, f"it did not start: {e}")
        raise
    finally:
        session.extend(nodes)


@spelled
def kill(node: int | str | torch.device) -> None:
    """Ends a node at once, by SIGKILL, whatever it is at: a function that never returns, a process that is stopped.

    What it held is lost, as if it had died: waiting for it and uses of its tensors raise NodeLost, and the other nodes
    go on. Where nodes can join, another one may take its place (``wait_for_nodes``). Returns at once. Raises NodeLost
    for a node that is lost already, ValueError for one that does not exist, DisttensorError without a session.
    """
    session = current.session()
    place = session.places.at(node).one
    session.link.losses.kill(place.node, f"killed by disttensor.kill, at {line_of(here())}")
