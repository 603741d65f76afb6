"""Nodes that are threads of the test's process, at whose own ends a test can look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import disttensor as dt
from disttensor.runtime.node.worker import NodeWorker
from disttensor.startup import start


@contextmanager
def thread_nodes(count: int) -> Iterator[list[NodeWorker]]:
    """A session with so many nodes, and these."""
    made = list[NodeWorker]()

    class Kept(NodeWorker):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "NodeWorker", Kept)
        session = dt.init_master_worker(nodes=count, launcher="inproc")
    with session:
        yield made
