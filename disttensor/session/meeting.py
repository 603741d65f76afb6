"""Meets nodes that start: waits for their hellos, and refuses those that do not speak as this process does."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ..runtime.host import versions
from ..runtime.process import undertakings
from ..runtime.protocol.errors import LAST_OUTPUT, StartError
from .session import Session


def meet(session: Session, ranks: Sequence[int], timeout: float) -> None:
    """Waits for these nodes' hellos, and checks that protocol and torch have the master's versions. Gives up when
    nothing has got on for ``timeout`` seconds: no node has come, and the launcher says of all what it said before.

    Raises StartError.
    """
    missing, progress = list(ranks), _Progress(session, timeout)
    with undertakings.mine.during(lambda: _words_of_start(len(ranks), len(missing), progress.state)):
        _meet(session, ranks, missing, progress, timeout)


def _words_of_start(count: int, missing: int, state: str) -> str:
    waits = "; ".join(state.splitlines())
    return f"starting {count} node{'s'[: count != 1]}: {count - missing} ready" + (waits and f"; {waits}")


def _meet(session: Session, ranks: Sequence[int], missing: list[int], progress: _Progress, timeout: float) -> None:
    link = session.link
    while True:
        # each as it comes: one of another version is refused, however long the others take
        for rank in [rank for rank in missing if link.nodes[rank].said_hello is not None]:
            _check_versions(session, rank)
            missing.remove(rank)
        if not missing:
            return
        late = progress.late(missing)
        link.replies.drain()
        if lost := next((found for found in link.losses.errors if found.rank in ranks), None):
            where = f" on {lost.host}" if lost.host != "?" else ""
            raise StartError(f"node {lost.rank}{where} did not start: {lost.cause}" + _tail(lost.tail))
        if late:
            text = f"nodes {missing} of {len(ranks)} have not answered within {timeout} s"
            counted = "\n(counted from the last sign that any of them got on)" if progress.got_on else ""
            raise StartError(text + (progress.state and f":\n{progress.state}") + counted)
        link.waiting.pause(0.005)  # short: another thread may take in the message that ends this wait


class _Progress:
    """How nodes get on that start. Many of them on a busy host take long, and that is not a fault of theirs."""

    #: Seconds between two looks at what the launcher says of them.
    LOOK = 0.5

    def __init__(self, session: Session, timeout: float) -> None:
        self._launcher, self._timeout = session.launcher, timeout
        self._since = self._looked = time.monotonic()
        self._missing: list[int] = []
        self.state = ""  #: what those that are missing wait for, in the launcher's words
        self.got_on = False  #: whether any of them has got on since the first look

    def late(self, missing: Sequence[int]) -> bool:
        """Looks at those that are missing; returns whether nothing has got on for too long."""
        now = time.monotonic()
        over = now - self._since > self._timeout
        if self._missing and not over and now - self._looked < self.LOOK:
            return False
        state = self._launcher.missing(missing) if self._launcher is not None else ""
        if (state, missing) != (self.state, self._missing):
            self.got_on = bool(self._missing)
            self.state, self._missing, self._since, over = state, list(missing), now, False
        self._looked = now
        return over


def _check_versions(session: Session, rank: int) -> None:
    """Raises StartError when a node that has said hello is of another job, or its host differs from this one."""
    hello = session.link.nodes[rank].hello
    here = versions.own({"torch": str(torch.__version__)})
    there = versions.Versions(hello.host, hello.python, hello.protocol, packages={"torch": hello.torch})
    why = versions.refusal(here, there)
    if not why and hello.job != session.job:
        why = f"it is of job {hello.job}, and this is job {session.job}"
    if why:
        raise StartError(f"node {rank} on {hello.host} did not start: {why}")


def _tail(lines: Sequence[str]) -> str:
    return f"\n{LAST_OUTPUT}\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
