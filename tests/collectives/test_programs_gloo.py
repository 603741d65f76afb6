"""All that ``test_programs`` asks of collectives, of a session over gloo, which does most of them by itself."""

from __future__ import annotations

import pytest
from test_programs import *  # noqa: F403
from test_programs import N

import disttensor as dt


@pytest.fixture
def four():
    """Not of the module: gloo makes connections at first use."""
    with dt.init_master_worker(nodes=N, launcher="inproc", backend="gloo", simulate_cuda=1) as session:
        yield session
