"""Shared memory as a carrier, once a probe has shown that both processes see the same."""

from __future__ import annotations

import threading
from collections import deque

import torch

from ...protocol.errors import ProtocolError
from ..carrier import Carrier, FullError, Parcel, Say
from ..payload import plain
from . import adopted
from .segments import DESCRIPTOR, FREE, Mapping, Mappings, Segment, Segments, unpacked

#: The most bytes that the peer has not taken yet, but for one payload of any size.
AHEAD = 16 << 20
#: Words between the two carriers: can you open this segment? I can.
TRY, _YES = b"?", b"!"


class Loan(Parcel):
    """A payload in a segment of the sender's."""

    def __init__(self, mapping: Mapping, nbytes: int) -> None:
        self._mapping, self._nbytes = mapping, nbytes

    def discard(self) -> None:
        self._mapping.free()

    def lend(self) -> torch.Tensor:
        return torch.frombuffer(self._mapping.lease(self._nbytes), dtype=torch.uint8)


class Sharing(Carrier):
    """Both directions of one pair, seen from one end."""

    size = DESCRIPTOR
    local = True

    def __init__(self, say: Say) -> None:
        super().__init__(say)
        self.works = False  #: the peer has opened this side's probe
        self._asked = False
        self._segments = Segments()
        self._lock = threading.Lock()  #: guards the segments
        self._reserved: dict[int, Segment] = {}  #: reserved segments by address
        self._mappings = Mappings()
        #: payloads that the peer may not have taken yet, with their bytes
        self._announced: deque[tuple[Segment, int]] = deque()

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        segment = self._take_segment(nbytes) if self.works else None
        return None if segment is None else segment.offer(nbytes, self._reserved)

    def _take_segment(self, nbytes: int) -> Segment | None:
        try:
            with self._lock:
                return self._segments.take_segment(nbytes)
        except OSError:
            return None

    def stage(self, tensor: torch.Tensor) -> bytes | None:
        """Copies a tensor to memory that the peer can see. None if there is no memory, or not yet an answer.

        Raises FullError (back-pressure), as a socket without room would make the sender wait: sends to a peer that
        computes for long must not fill the memory.
        """
        if not self.works:
            self._probe()
            return None
        self._check_room(tensor.numel() * tensor.element_size())
        if tensor.device.type != "cpu" or tensor._is_zerotensor():
            tensor = plain(tensor)
        filled = None
        if tensor.is_contiguous():
            filled = self._reserved.pop(tensor.data_ptr(), None) or adopted.claimed(tensor.data_ptr())
        segment = filled or self._take_segment(tensor.numel() * tensor.element_size())
        if segment is None:
            return None
        if filled is None:
            segment.fill(tensor)
        segment.announce()
        self._announced.append((segment, tensor.numel() * tensor.element_size()))
        return segment.describe()

    def _check_room(self, nbytes: int) -> None:
        """Raises FullError if the peer has not taken enough yet."""
        announced = self._announced
        while announced and announced[0][0].is_taken:
            announced.popleft()
        if announced and nbytes + sum(size for _, size in announced) > AHEAD:
            raise FullError

    def _probe(self) -> None:
        """Gives the peer a segment to try, once."""
        if self._asked:
            return
        self._asked = True
        segment = self._take_segment(1)
        if segment is not None:  # else the peer is never asked, and payloads go over the connection
            segment.state = FREE
            self.say(TRY + segment.describe())

    def hear(self, word: bytes) -> None:
        if word == _YES:
            self.works = True
            return
        if not word.startswith(TRY):  # from a peer that has more words than this one
            return
        descriptor = word.removeprefix(TRY)
        try:
            self._mappings.open(descriptor, 1)
        except (OSError, ProtocolError, MemoryError):  # in another container, say: no answer means that it is no use
            return
        self.say(_YES)
        self.note_opened(unpacked(descriptor)[0])

    def note_opened(self, pid: int) -> None:
        """Notes that a segment of the peer's could be opened, so that ``pid`` is its process."""

    def open(self, descriptor: bytes, nbytes: int) -> Parcel:
        """Returns the payload that the peer has announced. Raises OSError, ProtocolError, MemoryError."""
        mapping = self._mappings.open(descriptor, nbytes)
        mapping.mark_taken()
        return Loan(mapping, nbytes)

    def close(self) -> None:
        self._announced.clear()
        self._segments.close()
        self._mappings.close()
