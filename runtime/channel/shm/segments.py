"""Shared memory that carries payloads between two processes of one host.

The sender owns *segments*, the receiver maps them, and a tensor over one is the receiver's own for as long as it lives.

    sender:   take a segment (warm, if one is free), copy the tensor in, say where it is
    receiver: map it once; then the tensor *is* the mapping (no copy), or is copied out
    free:     the receiver stores a byte in the segment's first page when the tensor's memory dies; the sender reads it
              when it needs a segment. A finalizer may store a byte; it could not send a message

A segment is a sealed memfd: it has no name that another user could open, cannot shrink under its reader (SIGBUS), and
goes away with the two processes, however they end. The receiver opens it through ``/proc/<pid>/fd/<fd>``, which the
kernel allows to processes of the same user only. In another container that may be somebody else's, as pids and
descriptors come again there: so each has a random id, in its first page and in the sender's description of it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
import weakref

import numpy as np
import torch

from ...protocol.errors import ProtocolError
from ..payload import store

#: The first page is the segment's state; the payload starts on a page of its own.
HEAD = mmap.PAGESIZE
FREE, USED, RETIRED = 0, 1, 2
#: The other bytes of the first page: the receiver has mapped the segment (1), has taken the payload (2), the segment is
#: not used again once it is free (3); and its id.
_ID, _WORD = slice(8, 16), struct.Struct("<Q")
_NAME = "disttensor"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: The most segments of a size that are searched for a free one: many are in use where tensors live long.
_LOOKS = 64
#: The most bytes of idle segments, which are warm. The first touch of fresh pages is many times slower than a copy.
MOST_IDLE = 512 << 20

_DESCRIPTOR = struct.Struct("<IIQQ")
#: The size of a descriptor on the wire, bytes.
DESCRIPTOR = _DESCRIPTOR.size


def pack_descriptor(pid: int, fd: int, id: int, nbytes: int) -> bytes:
    """Returns what ``unpacked`` takes apart."""
    return _DESCRIPTOR.pack(pid, fd, id, nbytes)


def unpacked(descriptor: bytes) -> tuple[int, int, int, int]:
    """Returns process, descriptor, id and size of a segment. Raises ProtocolError for bytes of another length."""
    if len(descriptor) != DESCRIPTOR:
        raise ProtocolError(f"the description of a segment has {DESCRIPTOR} bytes, and this one {len(descriptor)}")
    return _DESCRIPTOR.unpack(descriptor)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def _mapped(fd: int, nbytes: int, inherited: bool) -> ctypes.Array[ctypes.c_ubyte]:
    """Maps a descriptor, which may be closed then (the mmap module would keep a duplicate of it); returns the memory.

    Not ``inherited``: a forked child has none of it. Raises OSError.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _unmapped, address, nbytes, 0 if inherited else os.getpid()).atexit = False
    if not inherited:
        _libc.madvise(address, nbytes, mmap.MADV_DONTFORK)
    return memory


def opened(pid: int, fd: int, id: int, nbytes: int, inherited: bool) -> tuple[int, ctypes.Array[ctypes.c_ubyte]]:
    """Opens and maps a segment of another process; returns a descriptor of this one's, and the memory.

    Raises OSError when this process can't open it, ProtocolError for what is not this segment, MemoryError when there
    is no room to map it; the segment is free again then.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise ProtocolError(f"{path} is no shared memory of ours")
    mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(mine, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(mine).st_size != HEAD + nbytes:
            raise ProtocolError(f"{path} is not sealed, or not of {nbytes} bytes")
        try:
            memory = _mapped(mine, HEAD + nbytes, inherited)
        except OSError as error:
            if error.errno != errno.ENOMEM or os.pread(mine, 8, _ID.start) != _WORD.pack(id):
                raise
            os.pwrite(mine, bytes([FREE, 0, 1]), 0)  # as `take` and `free` would
            raise MemoryError(f"{nbytes} bytes of shared memory cannot be mapped") from error
        if bytes(memory[_ID]) != _WORD.pack(id):  # before anything is written: it may be in use between others
            raise ProtocolError(f"{path} is another one than the peer's")
    except BaseException:
        os.close(mine)
        raise
    return mine, memory


def _unmapped(address: int, nbytes: int, pid: int) -> None:
    """Unmaps memory; not in a child of the only process that has it, where something else may lie there by now."""
    if pid in (0, os.getpid()):
        _libc.munmap(address, nbytes)


class Segment:
    """The sender's side of a segment. ``nbytes`` is the size of the largest payload."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError when there is no descriptor, mapping or memory left for it."""
        self.nbytes = nbytes
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, HEAD + nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            # not inherited: a child would keep the memory, and could write into a payload that is another's by now
            self._map = _mapped(self.fd, HEAD + nbytes, inherited=False)
            self.id = secrets.randbits(64)
            self._map[_ID] = list(_WORD.pack(self.id))
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def memory(self) -> ctypes.Array[ctypes.c_ubyte]:
        """The whole memory, its first page included."""
        return self._map

    def describe(self) -> bytes:
        """Returns the descriptor by which the receiver finds the segment."""
        return _DESCRIPTOR.pack(os.getpid(), max(self.fd, 0), self.id, self.nbytes)

    @property
    def state(self) -> int:
        return self._map[0]

    @state.setter
    def state(self, value: int) -> None:
        self._map[0] = value

    @property
    def is_taken(self) -> bool:
        """True when the receiver has taken the payload that was announced last."""
        return bool(self._map[2])

    def announce(self) -> None:
        """Marks the payload, which is about to be announced, as not taken."""
        self._map[2] = 0

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies a CPU tensor's elements in, in row-major order."""
        nbytes = tensor.numel() * tensor.element_size()
        target = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEAD, count=nbytes)
        store(target.view(tensor.dtype).view(tensor.shape), tensor)

    def offer(self, nbytes: int, waiting: dict[int, Segment]) -> torch.Tensor:
        """Returns the memory of a payload as flat bytes. ``waiting`` has the segment by their address until somebody
        takes it out, who sends it; where nobody does, it is free again when the memory is gone."""
        memory = np.frombuffer(memoryview(self._map), dtype=np.uint8, count=nbytes, offset=HEAD)
        address = memory.ctypes.data
        waiting[address] = self
        weakref.finalize(memory, self._free_address, address, waiting, os.getpid()).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _free_address(self, address: int, waiting: dict[int, Segment], pid: int) -> None:
        if os.getpid() == pid and waiting.get(address) is self:  # a forked child has none of the memory
            del waiting[address]
            self.state = FREE

    def forget_descriptor(self) -> None:
        """Closes the descriptor once the receiver has mapped the segment: processes have few of them."""
        if self.fd >= 0 and self._map[1]:
            os.close(self.fd)
            self.fd = -1

    def retire(self) -> None:
        """Lets go of the segment, and has the receiver do so as well."""
        self._map[0] = RETIRED
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Segments:
    """The segments for payloads to one peer. Used by one thread at a time."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[Segment]] = {}
        self._fresh: list[Segment] = []  #: segments that the receiver has not mapped yet, as far as is known

    def take_segment(self, nbytes: int) -> Segment:
        """Takes a free segment of at least ``nbytes``. Raises OSError when a new one can't be had."""
        for segment in self._fresh:
            segment.forget_descriptor()
        self._fresh = [segment for segment in self._fresh if segment.fd >= 0]
        step = 1 << max(16, nbytes.bit_length() - 4)  # sizes in steps of an eighth, so that similar tensors share them
        size = -(-nbytes // step) * step
        same = self._by_size.setdefault(size, [])
        for _ in range(min(_LOOKS, len(same))):
            segment = same.pop(0)
            same.append(segment)
            if segment.state == FREE:
                segment.state = USED
                return segment
        self._trim()
        segment = Segment(size)
        segment.state = USED
        same.append(segment)
        self._fresh.append(segment)
        return segment

    def _trim(self) -> None:
        """Retires idle segments of other sizes when they hold too much. Called when a new one is due."""
        idle = [s for same in self._by_size.values() for s in same if s.state == FREE]
        held = sum(s.nbytes for s in idle)
        for segment in idle:
            if held <= MOST_IDLE:
                break
            held -= segment.nbytes
            segment.retire()
            self._by_size[segment.nbytes].remove(segment)

    def close(self) -> None:
        for same in self._by_size.values():
            for segment in same:
                segment.retire()
        self._by_size.clear()
        self._fresh.clear()


class Mapping:
    """The receiver's side of a segment."""

    def __init__(self, pid: int, fd: int, id: int, nbytes: int) -> None:
        """Raises as ``opened``."""
        mine, self.map = opened(pid, fd, id, nbytes, inherited=True)
        os.close(mine)
        self.id, self.nbytes = id, nbytes
        self.map[1] = 1  # the sender may close its descriptor now
        self._pid = os.getpid()
        self._lease: weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]] | None = None

    @classmethod
    def of(cls, descriptor: bytes, nbytes: int) -> Mapping:
        """Maps the segment that ``descriptor`` names, which has to be of ``nbytes``. Raises as the constructor."""
        pid, fd, id, size = unpacked(descriptor)
        if size != nbytes:
            raise ProtocolError(f"a segment of {size} bytes where one of {nbytes} was due")
        return cls(pid, fd, id, size)

    def mark_taken(self) -> None:
        """Marks the payload in it as taken: it was wanted, and the sender may announce more."""
        self.map[2] = 1

    @property
    def over(self) -> bool:
        """True once the sender is not going to use it again."""
        return self.map[0] == RETIRED or (bool(self.map[3]) and self.map[0] == FREE)

    def lease(self, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Returns the payload. When it (and every tensor over it) is gone, the segment is free again."""
        payload = np.frombuffer(memoryview(self.map), dtype=np.uint8, count=nbytes, offset=HEAD)
        self._lease = weakref.ref(payload, lambda _: self.free())
        return payload

    def free(self) -> None:
        """Frees the segment. May run in a finalizer, and in a forked child, whose tensors do not count."""
        if os.getpid() == self._pid and self.map[0] == USED:
            self.map[0] = FREE


class Mappings:
    """The segments of one peer's payloads. Used by its reader."""

    def __init__(self) -> None:
        self._known: dict[int, Mapping] = {}

    def open(self, descriptor: bytes, nbytes: int) -> Mapping:
        """Returns the mapping of a segment.

        Raises OSError when this process can't open it, ProtocolError for another segment, MemoryError when it has no
        room to map it.
        """
        pid, fd, id, size = unpacked(descriptor)
        if not 0 <= nbytes <= size:
            raise ProtocolError(f"a payload of {nbytes} bytes in a segment of {size}")
        found = self._known.get(id)
        if found is None:
            for old in [i for i, m in self._known.items() if m.over]:
                del self._known[old]
            found = self._known[id] = Mapping(pid, fd, id, size)
        if found.nbytes != size:
            raise ProtocolError(f"segment {id} has {found.nbytes} bytes, not {size}")
        return found

    def close(self) -> None:
        self._known.clear()
