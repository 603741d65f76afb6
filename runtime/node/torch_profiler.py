"""torch's profiler (Kineto) on a node, for a profile of the script's that asks for it.

The script sends these functions, as it does the user's. The profiler sees all threads of the process: the one that
executes, those of streams, and those that functions start. torch has one at a time in a process; a later one takes its
place without a word.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as autograd_profiler
from torch.profiler import profile, supported_activities

from ..process.clock import CLOCK
from ..protocol.errors import DisttensorError

#: How often both clocks are read for one moment: the reading that took least counts.
TRIES = 8


class _ThreadNames:
    """Python's names of this process's threads, by torch's numbers, from now until ``end``: those that have ended
    meanwhile, too, as streams' threads do when they have nothing to do."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        for thread in threading.enumerate():
            self._note_thread(thread)
        self._former = threading.getprofile()
        threading.setprofile(self._note_current_thread)

    def _note_thread(self, thread: threading.Thread) -> None:
        if thread.native_id is not None:
            self.names[thread.native_id] = thread.name

    def _note_current_thread(self, frame: FrameType, event: str, arg: Any) -> None:
        """Notes a thread that begins: Python calls this in it first, and not again."""
        sys.setprofile(self._former)
        self._note_thread(threading.current_thread())

    def end(self) -> dict[int, str]:
        """Returns the names."""
        if threading.getprofile() == self._note_current_thread:  # else a function has put another one there
            threading.setprofile(self._former)  # None, too
        for thread in threading.enumerate():  # some have another name by now
            self._note_thread(thread)
        self.names[os.getpid()] = threading.main_thread().name  # a fork's has the number of its parent's
        return self.names


class RunningProfiler(NamedTuple):
    """The profiler that is on."""

    profiler: profile
    began: tuple[int, float]  #: when, by both clocks
    threads: _ThreadNames


_running: RunningProfiler | None = None


def start_profiler(activities: Sequence[str] | None, options: Mapping[str, Any]) -> None:
    """Starts the profiler. ``activities``: the names of those that are wanted, None for all that there are; one that
    this node can't have, as it has no such device, is left out. ``options``: as for torch.profiler.profile.

    Raises DisttensorError where a profiler of somebody else's is on, or no activity is left; else what torch raises.
    """
    global _running
    drop_profiler()  # of a script's block whose end has not come here
    if autograd_profiler._is_profiler_enabled:
        raise DisttensorError("a torch.profiler is on there, and torch has one at a time: end it first")
    there = {activity.name: activity for activity in supported_activities()}
    wanted = [there[name] for name in (there if activities is None else activities) if name in there]
    if not wanted:
        raise DisttensorError(f"it has no activity {' or '.join(activities or ())}; it has {', '.join(sorted(there))}")
    found = profile(activities=wanted, experimental_config=_ExperimentalConfig(profile_all_threads=True), **options)
    found.start()
    _running = RunningProfiler(found, both_clocks(), _ThreadNames())


def stop_profiler(about: Mapping[str, int | str]) -> tuple[torch.Tensor, list[tuple[int, float]], dict[int, str]]:
    """Stops the profiler. Returns the bytes of torch's file, compressed; its begin and its end, by the calendar and by
    the node's clock; and Python's names of threads, by torch's numbers.

    ``about``: what the file says of this node among others, where HTA reads it.

    Raises DisttensorError where it is not on any more, or another one has taken its place; else what torch raises.
    """
    global _running
    running, _running = _running, None
    if running is None:
        raise DisttensorError("torch's profiler is not on there any more")
    moments = [running.began, both_clocks()]
    threads = running.threads.end()
    running.profiler.add_metadata_json("distributedInfo", json.dumps(dict(about)))
    running.profiler.stop()
    kept = running.profiler.profiler
    results = kept.kineto_results if kept is not None else None
    # without a session of its own torch has nothing, which it can't write: that ends the process
    if results is None or not 0 < results.trace_start_ns() <= running.began[0]:
        raise DisttensorError(
            "a function has used a torch.profiler of its own meanwhile: torch has one at a time, and this one was ended"
        )
    with tempfile.TemporaryDirectory(prefix="disttensor-") as folder:
        path = os.path.join(folder, "torch.json")
        running.profiler.export_chrome_trace(path)
        with open(path, "rb") as file:
            data = gzip.compress(file.read(), 6)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), moments, threads


def drop_profiler() -> None:
    """Stops the profiler, if it is on, and forgets what it has recorded."""
    global _running
    running, _running = _running, None
    if running is not None:
        running.threads.end()
        with suppress(RuntimeError):  # another one has taken its place
            running.profiler.stop()


def both_clocks() -> tuple[int, float]:
    """Returns this moment by the calendar, in nanoseconds since 1970, and by this process's clock."""
    found: list[tuple[float, int, float]] = []
    for _ in range(TRIES):
        before, calendar, after = CLOCK.now(), time.time_ns(), CLOCK.now()
        found.append((after - before, calendar, (before + after) / 2))
    _, calendar, now = min(found)
    return calendar, now
