"""Random programs of collectives over overlapping groups, beside other operations, against the same done locally."""

from __future__ import annotations

import pytest
from joint_programs import N, by_threads, run, with_streams

import disttensor as dt


@pytest.fixture(scope="module", autouse=True)
def four():
    with dt.init_master_worker(nodes=N, launcher="inproc"):
        yield
        dt.synchronize()


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed):
    run(seed)


def test_random_programs_of_several_threads():
    by_threads()


def test_random_programs_with_streams():
    with_streams()
