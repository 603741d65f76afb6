"""Calls of NCCL by ctypes, in a process that has the simulated one preloaded (tests/simcuda/test_nccl.py).

A rank is a thread, with a device of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from limits import HANG
from simcuda_calls import call, code, down, made, malloc, stream, up

OK, CUDA, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE, IN_PROGRESS = range(8)
#: numpy's names of NCCL's types; what numpy has not is moved as bytes.
TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6, "float32": 7, "float64": 8,
}  # fmt: skip
BFLOAT16, FLOAT8 = 9, 10
SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)

_nccl = ctypes.CDLL(None)
_nccl.ncclGetErrorString.restype = _nccl.ncclGetLastError.restype = ctypes.c_char_p


class Id(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int)
    )  # fmt: skip


def asks(name: str, *args: Any) -> int:
    """Calls a function of NCCL and returns its result's number. An int is an address or a size."""
    given = [ctypes.c_size_t(x) if isinstance(x, int) else x for x in args]
    return int(getattr(_nccl, "nccl" + name)(*given))


def nccl(name: str, *args: Any) -> None:
    """Calls a function of NCCL, which has to succeed."""
    if error := asks(name, *args):
        raise RuntimeError(f"nccl{name}: {_nccl.ncclGetErrorString(error).decode()}")


def text(error: int) -> str:
    return str(_nccl.ncclGetErrorString(error).decode())


def last_error(comm: int | None = None) -> str:
    return str(_nccl.ncclGetLastError(ctypes.c_void_p(comm)).decode())


def communicators() -> int:
    return int(_nccl.simcuda_communicators())


def unique_id() -> Id:
    id = Id()
    nccl("GetUniqueId", ctypes.byref(id))
    return id


def waits_not() -> Any:
    """Returns the configuration of a communicator whose calls do not wait."""
    return ctypes.byref(Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0))


def begin(id: Id, size: int, me: int, config: Any = None) -> tuple[int, int]:
    """Begins a communicator, on the thread's device. Returns the result and the handle."""
    comm = ctypes.c_size_t()
    error = asks("CommInitRankConfig", ctypes.byref(comm), ctypes.c_int(size), id, ctypes.c_int(me), config)
    return error, comm.value


def state(comm: int) -> int:
    value = ctypes.c_int()
    nccl("CommGetAsyncError", comm, ctypes.byref(value))
    return value.value


def settled(comm: int) -> int:
    """Waits until a communicator's last call is done, and returns its state."""
    pause = threading.Event()
    while (value := state(comm)) == IN_PROGRESS:
        pause.wait(0.001)
    return value


class Rank:
    """One rank of a communicator, with a stream of its device."""

    def __init__(self, id: Id, size: int, me: int) -> None:
        self.me, self.size = me, size
        call("cudaSetDevice", me)
        self.stream = stream()
        error, self.comm = begin(id, size, me)
        assert error == OK, error

    def array(self, values: Any) -> int:
        """Returns an array's address on the device."""
        at = malloc(max(values.nbytes, 1))
        if values.nbytes:
            up(at, values.tobytes(), self.stream)
        return at

    def read(self, at: int, like: Any) -> Any:
        return np.frombuffer(down(at, like.nbytes, self.stream), like.dtype).reshape(like.shape)

    def do(self, name: str, *args: Any) -> None:
        nccl(name, *args, self.comm, self.stream)

    def done(self) -> bool:
        return code("cudaStreamQuery", self.stream) == 0

    def wait(self) -> None:
        call("cudaStreamSynchronize", self.stream)


def together(size: int, part: Callable[[Rank], Any], ends: str = "CommDestroy") -> list[Any]:
    """Has threads do the parts of a communicator's ranks. Returns what they return."""
    id, results, errors = unique_id(), [None] * size, []

    def rank(me: int) -> None:
        try:
            own = Rank(id, size, me)
            results[me] = part(own)
            nccl(ends, own.comm)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=rank, args=(me,), daemon=True) for me in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive(), "a rank hangs"
    assert not errors, errors
    return results


def graph_of(own: Rank, work: Callable[[], Any]) -> int:
    """Captures what is issued to the rank's stream, and returns the graph that can be launched."""
    call("cudaStreamBeginCapture", own.stream, 0)
    work()
    graph = ctypes.c_size_t()
    call("cudaStreamEndCapture", own.stream, ctypes.byref(graph))
    return made("cudaGraphInstantiateWithFlags", graph.value, 0)
