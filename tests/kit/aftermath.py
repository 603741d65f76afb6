"""What a fault may cost: nothing but what it has hit. For tests of the rows of docs/dev/faults.md, and their programs.

`aftermath` looks at all that stays: that other nodes compute to the bit, and that neither they nor the script have more
than before the fault: descriptors, threads, processes, shared memory, tensors; and that nothing was raised where
nobody can catch it. `within` holds a row to its time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from limits import HANG

import disttensor as dt
from disttensor import testing

#: Seconds in which what is just ending may end.
SETTLES = HANG / 4
#: The microseconds for which some process of this machine was ready to run and had no core, in all, as the kernel says.
PRESSURE = Path("/proc/pressure/cpu")


# ---- times -----------------------------------------------------------------------------------------------------------


def starved() -> float:
    """The seconds for which this machine's processes have had fewer cores than they could use; 0 if not counted."""
    try:
        return int(PRESSURE.read_text().splitlines()[0].rpartition("=")[2]) / 1e6
    except OSError:
        return 0.0


def now() -> str:
    """The moment, for a Clock of another process."""
    return f"{time.monotonic()} {starved()}"


class Clock:
    """Seconds, since it was made or since ``stamp``, in which the machine had a core for everybody.

    Other programs are no fault of ours; a wait for nothing takes as long by this clock as by any other.
    """

    def __init__(self, stamp: str = "") -> None:
        self._begun, self._starved = map(float, (stamp or now()).split())

    def read(self) -> float:
        return time.monotonic() - self._begun - (starved() - self._starved)

    def check(self, seconds: float, what: str) -> None:
        """Raises AssertionError if more than ``seconds`` have passed."""
        if (took := self.read()) > seconds:
            raise AssertionError(f"{what} took {took:.1f} s, and its row of docs/dev/faults.md says {seconds} s")


@contextlib.contextmanager
def within(seconds: float, what: str = "this") -> Iterator[None]:
    """Fails if the block takes longer than its row says."""
    clock = Clock()
    yield
    clock.check(seconds, what)


# ---- what is left ----------------------------------------------------------------------------------------------------


def probe(node: int) -> None:
    """Computes something on a node, which travels by a channel, and compares it to the bit; raises AssertionError."""
    x = torch.linspace(-1, 1, 20_000)
    if not torch.equal(torch.exp(x.to(f"node:{node}")).cpu(), torch.exp(x)):
        raise AssertionError(f"node {node} computes something else")


def _kind(target: str) -> str:
    """What a descriptor is of, without its number."""
    return target.partition(":[")[0].removesuffix(" (deleted)")


def _holds(pid: int) -> Counter[str]:
    """What a process has: descriptors by kind, threads by name, shared memory."""
    held: Counter[str] = Counter()
    here = Path(f"/proc/{pid}")
    for entry in os.listdir(here / "fd"):
        with contextlib.suppress(OSError):
            held[f"descriptor of {_kind(os.readlink(here / 'fd' / entry))}"] += 1
    if pid == os.getpid():  # what libraries start for themselves, such as torch's pool, they keep
        held.update(f"thread {t.name}" for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
    else:
        held["threads"] = len(os.listdir(here / "task"))
    for line in (here / "maps").read_text().splitlines():
        if " /dev/shm/" in line:
            held[f"mapped {line.split(maxsplit=5)[5]}"] += 1
    return held


def children(pid: int, but: Collection[int] = ()) -> set[int]:
    """All processes below one, without some and what is below them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                there = set(map(int, Path(f"/proc/{pid}/task/{entry}/children").read_text().split()))
                for child in there.difference(but):
                    found |= {child, *children(child, but)}
    return found


class Held:
    """What the script and some nodes hold at a moment."""

    def __init__(self, nodes: tuple[int, ...]) -> None:
        gc.collect()
        self.nodes = nodes
        pids = {f"node {node}": int(dt.nodes()[node]["pid"]) for node in nodes}
        processes = {"the script": os.getpid(), **{who: pid for who, pid in pids.items() if pid != os.getpid()}}
        self.held = {who: _holds(pid) for who, pid in processes.items()}
        self.tensors = {node: testing.usage(node).tensors for node in nodes}
        self.children = children(os.getpid())

    def since(self, before: Held) -> list[str]:
        """What there is more of, in words."""
        more = [
            f"{who} has {count - before.held[who][what]} more of: {what}"
            for who, held in self.held.items()
            for what, count in held.items()
            if count > before.held[who][what]
        ]
        more += [
            f"node {node} has {count} tensors, and had {before.tensors[node]}"
            for node, count in self.tensors.items()
            if count != before.tensors[node]
        ]
        return [*more, *(f"process {pid} is still there" for pid in self.children - before.children)]


@contextlib.contextmanager
def aftermath(*nodes: int, seconds: float = SETTLES) -> Iterator[None]:
    """Harm may be done in the block; fails if it costs these nodes, or the script, anything afterwards.

    The nodes have answered before, and made the connections that they need: those are no leak. Tensors of these nodes
    that the block makes, and keeps, are one. Whatever is just ending has ``seconds`` for it.
    """
    for node in nodes:
        probe(node)
    before, raised = Held(nodes), list[str]()

    def unraisable(told: Any) -> None:
        raised.append(f"{told.err_msg or 'Exception ignored in'} {told.object!r}: {told.exc_value!r}")

    def unhandled(told: threading.ExceptHookArgs) -> None:
        raised.append(f"thread {told.thread and told.thread.name}: {told.exc_value!r}")

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = unraisable, unhandled
    try:
        yield
        for node in nodes:
            probe(node)
        deadline, pause = time.monotonic() + seconds, threading.Event()
        while left := Held(nodes).since(before):
            if time.monotonic() > deadline:
                raise AssertionError("left behind: " + "; ".join(left))
            pause.wait(0.02)
    finally:
        sys.unraisablehook, threading.excepthook = hooks
    if raised:
        raise AssertionError("raised where nobody catches it: " + "; ".join(raised))
