"""The peak of local torch's memory, as its CPU allocator tells the profiler: the insides of operators are included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def local_peak(program: Callable[[], T]) -> int:
    """Runs a program and returns the most bytes that it had allocated. What it returns lives until its end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = program()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del kept
    return peak
