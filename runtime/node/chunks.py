"""Chunks of ``dt.map``: a function called for one item after the other, by one command.

An item runs once, and a slow one delays no other. The last item that has begun is answered as any function is, by its
result or its failure. Mapped tells of those before it when the chunk ends, and of those that are not going to begin,
which the script gives to whichever node is free: a chunk ends after a few milliseconds, whatever it has left. While an
item takes long, a thread beside it (ChunkWatch) tells of the others.

    the function's thread      todo.popleft -> call -> done.append -> todo.popleft -> ...
    the watch's                todo.popleft, until it is empty: these are given back

The same thread sends small results that wait for those of the functions behind theirs, where these take long.

Each item is popped once, so it runs or is given back. The function's thread takes no lock: a cancellation may interrupt
it anywhere (interruption.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ..protocol import commands as c

#: Seconds after which a chunk begins no other item.
LONGEST = 0.008
#: Seconds after which an item takes long: it is the last one of its chunk, and of the others is told.
SLOW = 0.005
#: Seconds between two looks for such an item.
LOOK = 0.005
#: Seconds after which a reply leaves that waits for those of functions behind its own.
LATE = 0.002
#: Seconds without a chunk, and without such a reply, after which the watch's thread ends.
IDLE = 0.1
#: The most bytes of results that a chunk collects.
MOST = 256 << 10

#: An encoded value, the tensors beside it, and the classes of users' objects in it.
Result = tuple[bytes, list[torch.Tensor], Collection[type]]


class Chunk:
    """The items of one Run."""

    def __init__(self, request: int, tell: Callable[[c.Mapped], None], goes_on: Callable[[], bool]) -> None:
        """``goes_on``: whether another item may begin."""
        self._request, self._tell, self._goes_on = request, tell, goes_on
        self._todo = deque[tuple[int, bytes]]()
        self._done = deque[tuple[int, bytes]]()
        self._began = self._since = time.monotonic()  #: the chunk, and the item that runs
        self._telling = threading.Lock()  #: never held by the function while it can be interrupted
        self._ended = False

    def run(self, items: Sequence[bytes], call: Callable[[bytes], Result]) -> Result:
        """Calls a function for items until one is the last; returns its result, which is that of the command."""
        todo, done, now, size = self._todo, self._done, time.monotonic, 0
        last = now() + LONGEST
        todo += enumerate(items)
        place, item = todo.popleft()
        while True:
            self._since = now()
            result = call(item)
            size += len(result[0])
            if result[1] or size > MOST or now() > last or not self._goes_on():
                return result
            try:
                following = todo.popleft()
            except IndexError:
                return result
            done.append((place, result[0]))  # only now: the last one is not told of here
            place, item = following

    def look(self, now: float) -> bool:
        """Tells of all other items where the one that runs takes long. Returns whether it has told anything."""
        if now - self._since < SLOW:
            return False
        with self._telling:
            return not self._ended and bool(self._todo or self._done) and self._take_all(now)

    def end(self) -> None:
        """Tells of what is not told. After it nothing is."""
        with self._telling:
            self._ended = True
            self._take_all(time.monotonic())

    def _take_all(self, now: float) -> bool:
        back = [place for place, _ in _emptied(self._todo)]
        done = list(_emptied(self._done))
        results = tuple(result for _, result in done)
        self._tell(c.Mapped(self._request, tuple(place for place, _ in done), results, tuple(back), now - self._began))
        return True


def _emptied(queue: deque[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    with suppress(IndexError):
        while True:
            yield queue.popleft()


class ChunkWatch:
    """Looks whether an item of a chunk takes long, or a function for which a reply waits, in a thread that is there
    while there are chunks and such replies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: set[Chunk] = set()
        self._thread: threading.Thread | None = None
        self.told: Callable[[], None] = lambda: None  #: is called when something is to be sent
        self.held = 0.0  #: since when the oldest reply waits; 0: none does. Whoever sends replies sets it to that
        self._over = threading.Event()

    def close(self) -> None:
        """Ends the thread. A reply waits for no others from now on."""
        self._over.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def hold_reply(self) -> bool:
        """Notes that a reply waits for others. Returns False where it is not to: the oldest one has waited long, or no
        thread would see to it."""
        now = time.monotonic()
        if not self.held:
            with self._lock:
                self.held = now
                self._start_thread()
        return now - self.held < LATE and self._thread is not None

    @contextmanager
    def over(self, chunk: Chunk) -> Iterator[None]:
        """Watches a chunk, and ends it."""
        with self._lock:
            self._chunks.add(chunk)
            self._start_thread()
        try:
            yield
        finally:
            with self._lock:
                self._chunks.discard(chunk)
            chunk.end()

    def _start_thread(self) -> None:
        """Starts the thread, if there is none. The caller holds the lock."""
        if self._thread is None and not self._over.is_set():
            with suppress(RuntimeError):  # the system has none: what is slow delays others
                thread = threading.Thread(target=self._run, name="disttensor-chunks", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        until = time.monotonic() + IDLE
        while True:
            over = self._over.wait(LATE if self.held else LOOK)
            now = time.monotonic()
            with self._lock:
                chunks, held = list(self._chunks), self.held
                if over or (not chunks and not held and now >= until):
                    self._thread = None
                    return
            if chunks or held:
                until = now + IDLE
            late = 0.0 < held < now - LATE
            if any([chunk.look(now) for chunk in chunks]) or late:
                self.told()
