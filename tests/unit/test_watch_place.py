"""The place of whoever has nodes note each of their commands."""

from __future__ import annotations

import threading

import pytest
from limits import HANG

from disttensor.errors import DisttensorError
from disttensor.seeing.watch_place import WatchPlace


def test_a_profile_has_what_is_borrowed_given_back_and_waits_for_that() -> None:
    place, order = WatchPlace(), list[str]()

    def profile() -> None:
        place.enter("at train.py:12")
        order.append("a profile")

    thread = threading.Thread(target=profile)
    with place.borrow() as wanted:
        assert wanted is not None
        thread.start()
        assert wanted.wait(HANG)
        order.append("a last look")
    thread.join()
    assert order == ["a last look", "a profile"]


def test_what_is_taken_is_not_borrowed() -> None:
    place = WatchPlace()
    for _ in range(2):
        place.enter("at train.py:12")
        with place.borrow() as wanted:
            assert wanted is None
        with pytest.raises(DisttensorError, match=r"begun at train\.py:12"):
            place.enter("at train.py:13")
        place.leave()
        with place.borrow() as wanted, place.borrow() as second:
            assert wanted is not None
            assert second is None


def test_an_interrupt_frees_it() -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    place = WatchPlace()
    with place.borrow() as wanted:
        assert wanted is not None
        place._borrowed = wanted, Interrupted()
        with pytest.raises(KeyboardInterrupt):
            place.enter("at train.py:12")
    with place.borrow() as wanted:
        assert wanted is not None
