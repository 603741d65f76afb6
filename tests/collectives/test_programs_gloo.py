"""All that ``test_programs`` asks of collectives, of a session over gloo, which does most of them by itself."""

from __future__ import annotations

import pytest
from test_programs import *  # noqa: F403
from test_programs import N

import disttensor as dt

# gloo's own reductions send other bytes than ours, which does those with a dtype for the way: they can't be compared
del test_what_travels_as_bfloat16_is_half_as_long  # noqa: F821


@pytest.fixture
def four():
    """Not of the module: gloo makes connections at first use."""
    with dt.init_master_worker(nodes=N, launcher="inproc", backend="gloo", simulate_cuda=1) as session:
        yield session
