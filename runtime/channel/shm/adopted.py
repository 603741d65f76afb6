"""Segments that other processes of a program fill, and that this one sends: those of a DataLoader's workers.

    worker:   Pools.take_segment, and write into the tensor; its description goes to the program beside the batch
    program:  Adoption.adopt_segment: maps the segment, and touches none of the payload's pages
              a send by "shm" finds the tensor's memory here (``claimed``), and announces the segment as its own
    free:     as each segment, by its first page: by the peer whose tensor it has become, or here where it was not sent

Each place of a batch has segments of its own, as a peer opens a segment once, and descriptors are closed then.
"""

from __future__ import annotations

import math
import os

import torch

from ...protocol.errors import ProtocolError
from .segments import HEAD, RETIRED, Segment, Segments, opened, unpacked

#: Segments whose payloads nobody has sent yet, by the payload's address.
_waiting: dict[int, Segment] = {}


def claimed(address: int) -> Segment | None:
    """Returns the segment whose payload begins there, for who sends it: once."""
    return _waiting.pop(address, None)


class Pools:
    """A worker's segments, for each place of a batch."""

    def __init__(self) -> None:
        self._places: dict[int, Segments] = {}

    def take_segment(self, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Segment, torch.Tensor]:
        """Returns a segment, and an uninitialised tensor over it. Raises OSError when there is no memory for it."""
        count = math.prod(shape)
        segment = self._places.setdefault(place, Segments()).take_segment(count * dtype.itemsize)
        return segment, torch.frombuffer(segment.memory, dtype=dtype, count=count, offset=HEAD).view(shape)


class Adoption:
    """The segments of some processes that this one takes over, until their end."""

    def __init__(self) -> None:
        self._known: dict[int, _Adopted] = {}  #: by id

    def adopt_segment(self, descriptor: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor in a segment that its owner has filled. Its memory is another's once it was sent.

        Raises RuntimeError for one that can't be opened: its owner has ended. MemoryError, ProtocolError.
        """
        pid, fd, id, nbytes = unpacked(descriptor)
        for old in [i for i, segment in self._known.items() if segment.close_unneeded()]:
            del self._known[old]
        found = self._known.get(id)
        if found is None:
            try:
                found = self._known[id] = _Adopted(pid, fd, id, nbytes)
            except (OSError, ProtocolError) as error:
                raise RuntimeError(
                    f"a batch of the worker process {pid} can't be had from its shared memory: {error}; the process "
                    "has ended, or this one may not open it"
                ) from error
        return found.tensor(shape, dtype)

    def end(self) -> None:
        """Has peers let go of the segments once their tensors are gone: no process is going to fill them again."""
        for segment in self._known.values():
            segment.last()
        self._known.clear()


class _Adopted(Segment):
    def __init__(self, pid: int, fd: int, id: int, nbytes: int) -> None:
        self.nbytes, self.id, self.fd = nbytes, id, -1
        self.fd, self._map = opened(pid, fd, id, nbytes, inherited=False)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        if count * dtype.itemsize > self.nbytes:
            raise ProtocolError(f"{count} elements of {dtype} in a segment of {self.nbytes} bytes")
        return self.offer(count * dtype.itemsize, _waiting).view(dtype).view(shape)

    def close_unneeded(self) -> bool:
        """Closes what is not needed any more. Returns whether its owner has let go of it."""
        self.forget_descriptor()
        return self.state == RETIRED

    def last(self) -> None:
        """Says that it is not used again."""
        self._map[3] = 1

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
