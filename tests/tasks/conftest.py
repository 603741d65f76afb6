"""What several files of tests of tasks share: a session of three processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import disttensor as dt


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    """Three nodes that are processes, with the connections that are made at first use."""
    with dt.init_master_worker(nodes=3, threads=1):
        for node in range(3):
            dt.run(dt.tasks.Channel.qsize, dt.tasks.Channel(), node=node)
            for other in range(3):
                torch.ones(1 << 20).to(f"node:{node}").to(f"node:{other}").cpu()
        yield


@pytest.fixture(autouse=True)
def calm(request: pytest.FixtureRequest) -> Iterator[None]:
    """No error is left by a test of the module's session."""
    yield
    if "session" in request.fixturenames:
        dt.synchronize()
