"""Counts the opcodes of Python that a function executes: the same in every run and on every machine, as no time is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Counter:
    """A count of the opcodes of a thread's frames: those that begin while it counts, and those that it joins.

    ``within``: what stands in the paths of the files that count.
    """

    def __init__(self, within: str = "") -> None:
        self.count = 0
        self._within = within

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if self._within not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        self.count += event == "opcode"
        return self.trace

    def join(self, frame: FrameType) -> None:
        frame.f_trace = self.trace
        frame.f_trace_opcodes = True
        sys.settrace(self.trace)


def opcodes(function: Callable[..., object], *operands: object) -> int:
    """Returns the opcodes of the call."""
    counter, before = Counter(), sys.gettrace()
    sys.settrace(counter.trace)
    result = function(*operands)
    sys.settrace(before)
    del result
    return counter.count


@contextmanager
def without_a_collector() -> Iterator[None]:
    """Has the collector do nothing: what it finds would be freed, and counted, anywhere."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
