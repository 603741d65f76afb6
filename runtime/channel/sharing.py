"""Large payloads of one tcp peer through shared memory, once a probe has shown that both see the same."""

from __future__ import annotations

import torch

from ..errors import ProtocolError
from .payload import plain
from .segments import FREE, Mapping, Mappings, Segments


class Sharing:
    """Both directions of one pair, seen from one end. ``stage`` and ``probe`` belong to the sender's thread, ``look``
    and ``open`` to the reader's."""

    def __init__(self) -> None:
        self.works = False  #: the peer has opened our probe
        self._asked = False
        self._segments = Segments()
        self._mappings = Mappings()

    def probe(self) -> bytes:
        """The descriptor of a segment for the peer to try, once; else nothing."""
        if self._asked:
            return b""
        self._asked = True
        try:
            segment = self._segments.take(1)
        except OSError:  # nothing to be had: the peer is never asked, and payloads go over the socket
            return b""
        segment.state = FREE
        return self._segments.describe(segment)

    def look(self, descriptor: bytes) -> bool:
        """Whether we see what the peer probes with."""
        try:
            self._mappings.open(descriptor, 1)
        except (OSError, ProtocolError):  # in another container, say
            return False
        return True

    def stage(self, tensor: torch.Tensor) -> bytes:
        """Copies a tensor to where the peer can see it; gives the descriptor, or nothing if there is no memory."""
        if tensor.device.type != "cpu" or tensor._is_zerotensor():
            tensor = plain(tensor)
        try:
            segment = self._segments.take(tensor.numel() * tensor.element_size())
        except OSError:
            return b""
        segment.fill(tensor)
        return self._segments.describe(segment)

    def open(self, descriptor: bytes, nbytes: int) -> Mapping:
        """What the peer has staged. Raises OSError, ProtocolError."""
        return self._mappings.open(descriptor, nbytes)

    def close(self) -> None:
        """Lets go of all segments. Tensors over them live on."""
        self._segments.close()
        self._mappings.close()
