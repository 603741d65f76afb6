"""Lanes of a node with real CUDA devices: their threads issue to CUDA streams, which CUDA events order.

A task is done for its lane when it is issued. So a tensor carries with it where and when it will be made. A lane that
reads the tensor on another stream of its device has that stream wait, and has the allocator keep the memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ...channel.base import Transfer
from ...host.cuda_devices import in_use
from ..store import Value
from .lane import Lane, Mark


class CudaMark(Mark):
    """An event of a CUDA stream: recorded when its lane has come to it, done when the device has."""

    def __init__(self, device: torch.device, timing: bool) -> None:
        super().__init__()
        self._device = device
        self.event = torch.cuda.Event(enable_timing=timing)
        self._idle = False  #: whether the stream had nothing more to do when the event was recorded

    def reach(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        self._idle = bool(stream.query())  # asked first: an event takes a moment to be done even then
        self.event.record(stream)
        super().reach()

    def recorded(self) -> None:
        """Waits until the event is recorded."""
        super().wait()

    def wait(self, timeout: float | None = None) -> None:
        super().wait(timeout)
        self.event.synchronize()

    def is_completed(self) -> bool:
        return super().is_completed() and (self._idle or bool(self.event.query()))

    def since(self, first: Mark) -> float:
        if not isinstance(first, CudaMark):
            return super().since(first)
        for mark in (first, self):
            mark.event.synchronize()
        return float(first.event.elapsed_time(self.event))


class CudaLane(Lane):
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device, priority: int, *of_lane: Any) -> None:
        super().__init__(*of_lane)
        self.stream = torch.cuda.Stream(device, priority)
        self.follow_default()

    def join_default(self) -> None:
        """Has the default stream wait for this one: all that it is given from now on comes after this stream's work."""
        torch.cuda.default_stream(self.stream.device).wait_stream(self.stream)

    def follow_default(self) -> None:
        """Has this stream wait for all that default streams have been given so far."""
        for index in in_use():
            self.stream.wait_stream(torch.cuda.default_stream(index))


@contextmanager
def on(lane: Lane, reads: Iterable[Any], writes: Callable[[], Sequence[Value | None]]) -> Iterator[None]:
    """Surrounds a lane's work: issues it to the lane's stream, after the tensors ``reads`` are made.

    ``writes`` returns the tensors that the work has made.
    """
    stream: AbstractContextManager[Any] = (
        torch.cuda.stream(lane.stream) if isinstance(lane, CudaLane) else nullcontext()
    )
    with stream:
        meet(reads)
        yield
        sign(writes())


def meet(tensors: Iterable[Any]) -> None:
    """Orders the current streams after the streams that made these tensors, which are about to be used."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            _meet(tensor)


def sign(tensors: Iterable[Any]) -> None:
    """Notes with these tensors that the current streams have made them, or written them, by now."""
    events: dict[torch.device, tuple[Any, Any]] = {}
    for made in tensors:
        if isinstance(made, torch.Tensor) and made.is_cuda:
            if made.device not in events:
                events[made.device] = _now(torch.cuda.current_stream(made.device))
            made._made = events[made.device]  # type: ignore[attr-defined]


def take_over(tensors: Iterable[Any]) -> None:
    """Has the calling thread's default streams use these tensors, and whoever uses them next follow what the streams
    have been given by then: as if they had made the tensors."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            _meet(tensor)
            if hasattr(tensor, "_made"):
                del tensor._made


def wait(lane: Lane, for_: Transfer) -> None:
    """Has a lane wait: on the device for an event of a device, else in the calling thread."""
    if isinstance(for_, CudaMark) and isinstance(lane, CudaLane):
        for_.recorded()
        lane.stream.wait_event(for_.event)
    else:
        for_.wait()


def _meet(tensor: torch.Tensor) -> None:
    """Orders the current stream after the stream that made ``tensor``, which is about to be used."""
    mine, default = torch.cuda.current_stream(tensor.device), torch.cuda.default_stream(tensor.device)
    made = getattr(tensor, "_made", None)
    if made is None:  # made by the default stream, whose commands nobody follows without others
        if mine == default:
            return
        made = tensor._made = _now(default)  # type: ignore[attr-defined]
    stream, event = made
    if stream != mine:
        mine.wait_event(event)
        tensor.record_stream(mine)


def _now(stream: Any) -> tuple[Any, Any]:
    event = torch.cuda.Event()
    event.record(stream)
    return stream, event


def keep_for_default(tensor: torch.Tensor) -> None:
    """Tells the allocator that the default stream uses ``tensor``.

    There are no other streams any more, and the default one's uses are not followed from now on.
    """
    if tensor.is_cuda and hasattr(tensor, "_made"):
        tensor.record_stream(torch.cuda.default_stream(tensor.device))
        del tensor._made
