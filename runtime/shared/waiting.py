"""One call's wait for its answer, in the script or in a function on a node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..process.signals import LOOK
from ..process.spelling import shown
from ..protocol import shared_objects as s
from ..protocol.shared_objects import Asking, ObjectAnswer


class AnswerSlot:
    """The place of an answer."""

    __slots__ = ("_come", "abandoned", "answer", "request")

    def __init__(self, request: Asking) -> None:
        self.request = request
        self._come = threading.Lock()
        self._come.acquire()
        self.answer: ObjectAnswer | None = None
        self.abandoned = False

    def fill(self, answer: ObjectAnswer) -> None:
        """Puts the answer in."""
        self.answer = answer
        self._come.release()

    def wait(self, timeout: float | None = None, own_thread: bool = False) -> ObjectAnswer | None:
        """Returns the answer, or None after ``timeout`` seconds. Interruptible in every thread, except in one of
        disttensor's ``own``, which nobody interrupts."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.answer is None:
            left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not own_thread:
                left = LOOK if left < 0 else min(left, LOOK)
            self._come.acquire(timeout=min(left, threading.TIMEOUT_MAX))
            if self.answer is None and deadline is not None and time.monotonic() >= deadline:
                return None
        return self.answer


def what_for(request: Asking, named: Callable[[int], str]) -> str:
    """Returns what a request waits for, in words. ``named`` returns an object by its number, as "Channel begun"."""
    names = [named(number) for number in getattr(request, "of", ())]
    one = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    match request:
        case s.Take() | s.Lease():
            return f"an item of {one}"
        case s.Put() | s.TaskDone():
            return f"room in {one}"
        case s.Arrive():
            return f"the others at {one}"
        case s.JoinQueue():
            return f"all of {one} to be done"
        case s.DictEntry():
            return f"a key of {one}"
    return one


def check_timeout(timeout: float | None) -> None:
    """Raises ValueError for a time limit that is below 0, or no number."""
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout={shown(timeout)}: seconds are not negative")


class Caller(Protocol):
    """The one that asks: the script's, or a node's."""

    def number(self) -> int:
        """Returns a number for a request."""

    def ask(self, request: Asking, timeout: float | None = None) -> ObjectAnswer:
        """Asks, and waits for the answer; after ``timeout`` seconds withdraws the request. One that is interrupted puts
        back what it has taken."""

    def ask_async(self, slot: AnswerSlot) -> None:
        """Asks what a slot is for, and does not wait; the answer comes into it."""

    def notify(self, request: Asking) -> None:
        """Asks, and drops the answer."""

    def notify_later(self, request: Asking) -> None:
        """Asks as ``notify``, in a finalizer: takes no lock."""

    def expect_later(self) -> None:
        """Has what ``notify_later`` gets be asked from now on."""
