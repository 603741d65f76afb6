"""Binds NCCL by ctypes: the few functions that are used, without ever blocking in it.

A communicator is made so that no call waits for others; a waiting thread asks ``ready``, and the function that ``mark``
returns, again and again, and can give up: ``abort``. Errors of NCCL's are RuntimeError, with its own words.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

NAME = "libnccl.so.2"
DTYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
OPS = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
_SUCCESS, _IN_PROGRESS = 0, 7


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    """The struct ncclConfig_t of version 2.14: later versions take it, by its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@cache
def load() -> ctypes.CDLL:
    """Loads NCCL, which torch has loaded already in builds with CUDA. Raises OSError."""
    return ctypes.CDLL(NAME)


class Communicator:
    """One rank's end of a communicator, on a device. Tensors are contiguous and on it; it uses the current stream."""

    def __init__(self, device: torch.device, size: int, id: bytes, me: int) -> None:
        self.device, self.size, self.me = device, size, me
        self._lib = load()
        self._comm = ctypes.c_void_p()
        # The tensors of calls that NCCL has not accepted yet: their memory must not be used for anything else before
        # the stream has the work, and the caller may let go of them at once.
        self._given: list[torch.Tensor] = []
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
        with torch.cuda.device(device):
            self._call(
                self._lib.ncclCommInitRankConfig,
                ctypes.byref(self._comm), size, _Id.from_buffer_copy(id), me, ctypes.byref(config),
            )  # fmt: skip
        # With the object, unless it was ended before: NCCL holds a device's memory, threads and connections for each.
        self._end = weakref.finalize(self, self._lib.ncclCommAbort, self._comm)
        self._end.atexit = False  # a fork's end must not end its parent's

    @staticmethod
    def unique_id() -> bytes:
        id = _Id()
        code = load().ncclGetUniqueId(ctypes.byref(id))
        if code:
            raise RuntimeError(f"ncclGetUniqueId: {code}")
        return bytes(id)

    def ready(self) -> bool:
        """Returns whether the last call has been accepted. Raises RuntimeError if it went wrong."""
        state = ctypes.c_int()
        self._call(self._lib.ncclCommGetAsyncError, self._comm, ctypes.byref(state))
        self._check(state.value)
        if state.value == _IN_PROGRESS:
            return False
        self._given.clear()
        return True

    def mark(self) -> Callable[[], bool]:
        """Returns a function that says whether the device has done all work that it was given until now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.query

    def abort(self) -> None:
        """Ends the communicator, and operations under way in it."""
        self._end()
        self._comm = ctypes.c_void_p()

    def all_reduce(self, source: torch.Tensor, target: torch.Tensor, op: str) -> None:
        self._on_stream(self._lib.ncclAllReduce, source, target, source, OPS[op])

    def reduce(self, source: torch.Tensor, target: torch.Tensor, op: str, root: int) -> None:
        self._on_stream(self._lib.ncclReduce, source, target, source, OPS[op], root)

    def broadcast(self, source: torch.Tensor, target: torch.Tensor, root: int) -> None:
        self._on_stream(self._lib.ncclBroadcast, source, target, source, root)

    def all_gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._on_stream(self._lib.ncclAllGather, source, target, source)

    def reduce_scatter(self, source: torch.Tensor, target: torch.Tensor, op: str) -> None:
        self._on_stream(self._lib.ncclReduceScatter, source, target, target, OPS[op])

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Does many sends and receives, each with a rank, as one operation."""
        self._call(self._lib.ncclGroupStart)
        try:
            for call, tensors in ((self._lib.ncclSend, sends), (self._lib.ncclRecv, receives)):
                for tensor, rank in tensors:
                    self._given.append(tensor)
                    where = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), DTYPES[tensor.dtype]
                    self._call(call, *where, rank, self._comm, self._stream())
        finally:  # or whatever this thread asks of NCCL next would wait for the end of this group
            ended = self._lib.ncclGroupEnd()
        self._check(ended)

    def _on_stream(self, call: Any, source: torch.Tensor, target: torch.Tensor, like: torch.Tensor, *rest: int) -> None:
        self._given += (source, target)
        where = ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.data_ptr())
        self._call(call, *where, ctypes.c_size_t(like.numel()), DTYPES[like.dtype], *rest, self._comm, self._stream())

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def _call(self, call: Any, *args: Any) -> None:
        self._check(call(*args))

    def _check(self, code: int) -> None:
        if code not in (_SUCCESS, _IN_PROGRESS):
            self._lib.ncclGetErrorString.restype = self._lib.ncclGetLastError.restype = ctypes.c_char_p
            text = self._lib.ncclGetErrorString(code).decode()
            last = (self._lib.ncclGetLastError(None) or b"").decode(errors="replace").strip()
            raise RuntimeError(f"NCCL: {text}{last and ': '}{last}")
