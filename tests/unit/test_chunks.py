"""A node's side of a chunk of ``dt.map``: which items run, which are given back, and what is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from limits import HANG

from disttensor.runtime.node import chunks
from disttensor.runtime.node.chunks import LONGEST, MOST, SLOW, Chunk, ChunkWatch
from disttensor.runtime.protocol import commands as c

ITEMS = [bytes((k,)) for k in range(5)]


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(chunks, "time", clock)
    return clock


class Seen:
    """A chunk, what it has told, and which items have begun."""

    def __init__(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        self.told: list[c.Mapped] = []
        self.begun: list[int] = []
        self.chunk = Chunk(7, self.told.append, goes_on)

    def run(self, during: Callable[[int], object] = lambda k: None, tensors: Any = (), size: int = 1) -> bytes:
        """Runs the items; returns the result of the last one."""

        def call(item: bytes) -> Any:
            self.begun.append(item[0])
            during(item[0])
            return item * size, [torch.ones(1)] if item[0] in tensors else [], ()

        result = self.chunk.run(ITEMS, call)[0]
        self.chunk.end()
        return result[:1]

    @property
    def done(self) -> list[int]:
        for told in self.told:
            assert [result[0] for result in told.results] == list(told.done)
        return [place for told in self.told for place in told.done]

    @property
    def back(self) -> list[int]:
        return [place for told in self.told for place in told.back]


def test_all_but_the_last_are_told_of_at_the_end(clock: Clock) -> None:
    seen = Seen()
    assert seen.run(lambda k: setattr(clock, "now", 0.001 * (k + 1))) == ITEMS[4]
    assert [(told.request, told.done, told.back, told.seconds) for told in seen.told] == [(7, (0, 1, 2, 3), (), 0.005)]


@pytest.mark.parametrize("why", ["time", "tensor", "size", "cancelled"])
def test_what_has_not_begun_is_given_back(why: str, clock: Clock) -> None:
    seen = Seen(lambda: why != "cancelled" or len(seen.begun) < 3)

    def during(k: int) -> None:
        if why == "time" and k == 2:
            clock.now = LONGEST + 0.001

    tensors, size = (2,) if why == "tensor" else (), MOST // 3 + 1 if why == "size" else 1
    assert seen.run(during, tensors, size) == ITEMS[2]
    assert (seen.begun, seen.done, seen.back) == ([0, 1, 2], [0, 1], [3, 4])


@pytest.mark.parametrize("slow", range(5))
def test_others_are_told_of_while_one_takes_long(slow: int, clock: Clock) -> None:
    seen, found = Seen(), list[bool]()

    def during(k: int) -> None:
        if k == slow:
            found.extend(
                [seen.chunk.look(clock.now), seen.chunk.look(clock.now + SLOW), seen.chunk.look(clock.now + 9)]
            )
            assert (seen.done, seen.back) == (list(range(slow)), list(range(slow + 1, 5)))

    assert seen.run(during) == ITEMS[slow]
    assert found == [False, True, False]
    assert seen.begun == list(range(slow + 1))
    assert [told.done or told.back for told in seen.told[1:]] == [()]  # the end says for how long it was
    assert not seen.chunk.look(9)


def test_an_item_that_fails_is_not_told_of(clock: Clock) -> None:
    seen = Seen()

    def fail(k: int) -> None:
        if k == 2:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        seen.run(fail)
    seen.chunk.end()
    assert (seen.done, seen.back) == ([0, 1], [3, 4])


def test_a_watch_tells_while_there_are_chunks_and_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "IDLE", 0)
    watch, seen, told = ChunkWatch(), Seen(), threading.Event()
    watch.told = told.set
    for _ in range(2):
        with watch.over(seen.chunk):
            (thread,) = [one for one in threading.enumerate() if one.name == "disttensor-chunks"]
            if not seen.begun:
                seen.chunk.run(ITEMS, lambda item: (seen.begun.append(1), told.wait(HANG)) and (item, [], ()))  # type: ignore[func-returns-value,return-value]
                assert (seen.back, len(seen.begun)) == ([1, 2, 3, 4], 1)
        thread.join(HANG)
        assert not thread.is_alive()
