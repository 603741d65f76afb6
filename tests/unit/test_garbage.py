"""Collections held off: runtime/process/gc_pause.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from disttensor.runtime.process.gc_pause import no_collection


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def test_it_lasts_until_the_last_holder_ends() -> None:
    gc.enable()
    first, second = no_collection(), no_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_an_error_ends_it() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="mine"), no_collection():
        raise ValueError("mine")
    assert gc.isenabled()


def test_where_there_are_none_there_are_none_afterwards() -> None:
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()
