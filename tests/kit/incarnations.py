"""A session of three nodes in which the worker of one is taken away, and another one comes in its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from limits import HANG
from msgspec.structs import replace

import disttensor as dt
from disttensor.proxy.meta import new_ref
from disttensor.runtime.master.connection import Progress
from disttensor.runtime.node.worker import NodeWorker
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.transport.inproc import InprocHub
from disttensor.session import current
from disttensor.session.replacing import reconnect

#: The node whose worker is taken away.
NODE = 1


class Cluster:
    """The session that runs. ``kind``: whether its nodes are "threads" or "processes"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.session = current.session()
        self.node = self.session.nodes[NODE]

    def lose(self) -> None:
        """Takes the worker away, and waits until that is known."""
        if self.kind == "processes":
            os.kill(self.node.hello.pid, signal.SIGKILL)
        else:
            self.session.link.hub.cut(NODE)
        limit = time.monotonic() + HANG
        while self.node.lost is None:
            if time.monotonic() > limit:
                raise AssertionError(f"node {NODE} is not lost after {HANG} s")
            self.session.link.waiting.pause(0.01)
            self.session.link.replies.drain()
        self._join()

    def _join(self) -> None:
        for thread in self.session.threads:  # as a launcher waits for the end of a process
            if thread.name == f"node {NODE}":
                thread.join(HANG)

    def come(self, **other: Any) -> None:
        """Puts another worker in its place; of threads, one with ``other`` things in its bundle."""
        start = partial(self._start, **other)
        reconnect(self.session, NODE, new_ref, None if self.kind == "processes" else start)

    def again(self) -> None:
        self.lose()
        self.come()

    def _start(self, bundle: Bundle, **other: Any) -> None:
        hub: Any = self.session.link.hub
        assert isinstance(hub, InprocHub)
        self._join()  # one that was not taken in has no connection any more
        worker = NodeWorker(replace(bundle, **other), hub.spoke(bundle.rank))
        thread = threading.Thread(target=worker.serve, name=f"node {bundle.rank}", daemon=True)
        thread.start()
        self.session.threads.append(thread)

    def place(self, device: torch.device | str) -> Any:
        """The place that a device names."""
        return self.session.places.named(device)

    def templates(self) -> tuple[dict[Any, int], dict[int, Any]]:
        """What the node's templates are by, and what they are."""
        return dict(self.node.templates), dict(self.node.defined)

    def standing(self) -> list[object]:
        """The streams and graphs that the node is to have."""
        return list(self.node.standing)

    def progress(self, device: torch.device | str) -> list[Progress]:
        """How far the nodes of a place are. A message meanwhile is an error."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.session.link.hub), "send", None)
            return list(self.place(device).progress)

    def send(self) -> None:
        """Sends all that is queued."""
        self.session.link.sender.flush_all()

    def has_side_channel(self) -> bool:
        """Whether the node has its side channel, or nodes have none."""
        hub: Any = self.session.link.side.hub
        return hub is None or NODE in hub.connected


def gone(error: pytest.ExceptionInfo[dt.NodeLost], incarnation: int = 0) -> str:
    """Checks the error of a use of what the node has held; returns its notes."""
    notes = "\n".join(error.value.__notes__)
    if (error.value.rank, error.value.incarnation) != (NODE, incarnation):
        raise AssertionError(f"{error.value!r} is of another loss: {error.value.incarnation}")
    if f"was held by incarnation {incarnation} of node {NODE}" not in notes or "was not restored" not in notes:
        raise AssertionError(f"who has held it is not said: {notes}")
    if not ("issued: " in notes or "replayed: " in notes) or "test_another_worker.py" not in notes:
        raise AssertionError(f"the line is not said: {notes}")
    return notes
