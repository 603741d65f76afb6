"""``wait_readable``: what ``select.select`` says, also of descriptors that it refuses."""

from __future__ import annotations

import ast
import errno
import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sources import product, refuse

from disttensor.runtime.host.descriptors import wait_readable

#: The first descriptor that ``select.select`` refuses.
FD_SETSIZE = 1024


@contextmanager
def pipe(high: bool) -> Iterator[tuple[int, int]]:
    """A pipe, whose end for reading has a number that ``select.select`` refuses if ``high``."""
    inn, out = os.pipe()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if high:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], FD_SETSIZE + 8), limits[1]))
        os.dup2(inn, FD_SETSIZE + 3)
        os.close(inn)
        inn = FD_SETSIZE + 3
        with pytest.raises(ValueError, match="out of range"):
            select.select([inn], [], [], 0)
    try:
        yield inn, out
    finally:
        os.close(inn)
        os.close(out)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("high", [False, True], ids=["low", "above 1024"])
def test_what_is_readable(high: bool) -> None:
    with pipe(high) as (inn, out), pipe(False) as (other, _):
        assert wait_readable([inn, other], 0) == []
        assert wait_readable([inn, other], 0.001) == []
        os.write(out, b"x")
        assert wait_readable([inn, other]) == [inn]
        assert wait_readable([], 0) == []


def test_an_end_is_readable() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert wait_readable([ours], 20) == [ours]


def test_a_closed_descriptor_is_an_error() -> None:
    inn, out = os.pipe()
    os.close(inn)
    try:
        with pytest.raises(OSError, match="Bad file descriptor") as raised:
            wait_readable([inn], 20)
    finally:
        os.close(out)
    assert raised.value.errno == errno.EBADF


def test_nothing_of_ours_waits_by_select() -> None:
    """A process with many nodes has more descriptors than it can tell."""
    attributes = ((file, node) for file in product() for node in file.nodes(ast.Attribute) if node.attr == "select")
    used = (file.at(node) for file, node in attributes if ast.unparse(node) == "select.select")
    refuse(used, "nothing waits by select.select")
