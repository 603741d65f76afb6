"""For tests of streams: functions that hold a stream of a node up until another lets them go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import disttensor as dt


def _thing(name: str, make: Any) -> Any:
    import builtins  # one per process, however a function got there

    return vars(builtins).setdefault(f"disttensor_test_{name}", make())


def meet(name: str) -> bool:
    """Waits until two are here at once; another pair may meet after them."""
    _thing(name, lambda: threading.Barrier(2)).wait(30)
    return True


def hold(name: str) -> bool:
    """Waits for ``release``."""
    arrive(name)
    assert _thing(name, threading.Event).wait(30)
    return True


def arrive(name: str) -> None:
    """Lets ``held`` go."""
    _thing(name + "-here", threading.Event).set()


def release(name: str) -> bool:
    """Lets ``hold`` go."""
    _thing(name, threading.Event).set()
    return True


def held(name: str) -> bool:
    """Waits until ``hold`` holds."""
    return bool(_thing(name + "-here", threading.Event).wait(30))


def thread(function: Any, *args: Any) -> threading.Thread:
    """Runs it in a thread of its own."""
    started = threading.Thread(target=function, args=args)
    started.start()
    return started


def run_on(stream: dt.Stream, function: Any, *args: Any) -> Any:
    with dt.stream(stream):
        return dt.run(function, *args, node=stream.node)


_count = iter(range(1, 1 << 30))


@contextmanager
def busy(stream: dt.Stream) -> Iterator[Any]:
    """``stream`` is busy until what this gives is called, at the end at last; by way of another stream."""
    name, other = f"busy-{next(_count)}", dt.Stream(stream.node)
    holder = thread(run_on, stream, hold, name)
    try:
        assert run_on(other, held, name)
        yield lambda: run_on(other, release, name)
    finally:
        run_on(other, release, name)
        holder.join()
