"""Shared memory as a carrier, once a probe has shown that both see the same."""

from __future__ import annotations

import torch

from ..errors import ProtocolError
from .carrier import Carrier, Parcel, Say
from .payload import plain
from .segments import DESCRIPTOR, FREE, Mapping, Mappings, Segments

#: What the two say to each other: can you open this segment? I can.
_TRY, _YES = b"?", b"!"


class Loan(Parcel):
    """A payload in a segment of the sender's."""

    def __init__(self, mapping: Mapping, nbytes: int) -> None:
        self._mapping, self._nbytes = mapping, nbytes

    def drop(self) -> None:
        self._mapping.free()

    def lend(self) -> torch.Tensor:
        return torch.frombuffer(self._mapping.lease(self._nbytes), dtype=torch.uint8)


class Sharing(Carrier):
    """Both directions of one pair, seen from one end."""

    size = DESCRIPTOR

    def __init__(self, say: Say) -> None:
        super().__init__(say)
        self.works = False  #: the peer has opened our probe
        self._asked = False
        self._segments = Segments()
        self._mappings = Mappings()

    def stage(self, tensor: torch.Tensor) -> bytes | None:
        """Copies a tensor to where the peer can see it. None if there is no memory, or not yet an answer."""
        if not self.works:
            self._probe()
            return None
        if tensor.device.type != "cpu" or tensor._is_zerotensor():
            tensor = plain(tensor)
        try:
            segment = self._segments.take(tensor.numel() * tensor.element_size())
        except OSError:
            return None
        segment.fill(tensor)
        return self._segments.describe(segment)

    def _probe(self) -> None:
        """Gives the peer a segment to try, once."""
        if self._asked:
            return
        self._asked = True
        try:
            segment = self._segments.take(1)
        except OSError:  # nothing to be had: the peer is never asked, and payloads go over the connection
            return
        segment.state = FREE
        self.say(_TRY + self._segments.describe(segment))

    def hear(self, word: bytes) -> None:
        if word == _YES:
            self.works = True
            return
        try:
            self._mappings.open(word.removeprefix(_TRY), 1)
        except (OSError, ProtocolError):  # in another container, say: no answer means no
            return
        self.say(_YES)

    def open(self, descriptor: bytes, nbytes: int) -> Loan:
        """Raises OSError, ProtocolError."""
        return Loan(self._mappings.open(descriptor, nbytes), nbytes)

    def close(self) -> None:
        self._segments.close()
        self._mappings.close()
