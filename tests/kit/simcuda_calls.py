"""Calls of CUDA's runtime by ctypes, in a process that has it preloaded (tests/simcuda/test_runtime.py)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from limits import HANG

SUCCESS, INVALID_VALUE, NO_MEMORY, NO_DEVICE, NO_PEER, NOT_READY, ILLEGAL = 0, 1, 2, 100, 217, 600, 700
#: Flags: a stream that does not wait for the legacy one; events without times, and between processes.
APART, UNTIMED, SHARED = 1, 2, 2 | 4
#: The two bytes that fresh, freed and pinned memory is full of.
PATTERN = b"\xf5\x7f"

_runtime = ctypes.CDLL(None)
Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Handle64(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * 64),)

    def hex(self) -> str:
        return bytes(self).hex()


def code(name: str, *args: Any) -> int:
    """Calls a function of the runtime and returns its error's number. An int is an address, a size or a flag."""
    given = [ctypes.c_size_t(x) if isinstance(x, int) else x for x in args]
    return int(getattr(_runtime, name)(*given))


def call(name: str, *args: Any) -> None:
    """Calls a function of the runtime, which has to succeed."""
    if error := code(name, *args):
        raise RuntimeError(f"{name}: error {error}")


def made(name: str, *args: Any) -> int:
    """Calls a function that writes a handle or an address to its first argument, and returns that."""
    value = ctypes.c_size_t()
    call(name, ctypes.byref(value), *args)
    return value.value


def malloc(size: int) -> int:
    return made("cudaMalloc", size)


def pinned(size: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * size).from_address(made("cudaHostAlloc", size, 0))


def stream(flags: int = APART) -> int:
    return made("cudaStreamCreateWithFlags", flags)


def event(flags: int = 0) -> int:
    return made("cudaEventCreateWithFlags", flags)


def up(address: int, data: bytes, on: int = 0) -> None:
    call("cudaMemcpyAsync", address, data, len(data), 1, on)


def down(address: int, size: int, on: int = 0) -> bytes:
    """Returns a device's bytes, which a copy on the stream has brought to memory that is not pinned."""
    out = ctypes.create_string_buffer(size)
    call("cudaMemcpyAsync", out, address, size, 2, on)
    return out.raw


@contextmanager
def held(on: int) -> Iterator[None]:
    """Inside, the stream does nothing of what comes from here on."""
    going, gone = threading.Event(), threading.Event()

    def stand(data: Any) -> None:
        gone.set()
        going.wait(HANG)

    callback = Callback(stand)
    call("cudaLaunchHostFunc", on, callback, None)
    gone.wait(HANG)
    try:
        yield
    finally:
        going.set()
        code("cudaStreamSynchronize", on)
