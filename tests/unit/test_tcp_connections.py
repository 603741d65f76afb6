"""How the hub looks at connections that are libzmq's, which may close them at any moment."""

from __future__ import annotations

import os

import pytest

from disttensor.runtime.transport import zap


def lowest_free(descriptor: int) -> int:
    """The number that the next descriptor gets."""
    number = os.dup(descriptor)
    os.close(number)
    return number


def test_a_connection_that_has_been_closed_leaves_no_descriptor() -> None:
    """Its number may be something else's by the time that it is looked at."""
    ends = os.pipe()
    before = lowest_free(ends[0])
    with pytest.raises(OSError, match="non-socket"), zap._connection(ends[0]):
        pass
    after = lowest_free(ends[0])
    for end in (*ends, *range(before, after)):
        os.close(end)
    assert after == before
