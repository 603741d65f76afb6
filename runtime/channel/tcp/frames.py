"""The frames of a TCP connection: a fixed header, authenticated, then the payload, protected as ``shield`` says.

    kind u8 | dtype u8 | 6 zeros | received u64 | transfer u64 | numel u64 | nbytes u64 | sequence u64 | MAC 16 bytes

little endian, 64 bytes (a payload that starts off a cache line is copied a tenth slower). The MAC is a keyed
blake2b-128 over the 48 bytes before it. The key belongs to one direction of
one connection of one job between two ranks, and the sequence counts that direction's frames from 0. So a header can
be neither forged, nor replayed, nor left out, nor moved, nor sent back, and need not name job or ranks.

``received`` counts the frames that the header's sender has dealt with, over all connections of the two: those need not
be sent again when this one breaks (``kept``). Frames that are COUNTED count.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2b
from typing import NamedTuple

from ...protocol.errors import ProtocolError

DATA = 1  #: a tensor; the payload follows
NACK = 2  #: transfer refused: the receiver's tensor has this dtype and this numel; no payload
POISON = 3  #: the transfer has no tensor: command `numel` of node `nbytes - 1` failed; no payload
CARRIED = 4  #: a tensor that the carrier brings; the carrier's descriptor follows, under the header's MAC
WORD = 5  #: a word from carrier to carrier: `nbytes` bytes follow, under the header's MAC
GONE = 6  #: a tensor whose last bytes were lost with a connection, and which is not to be had any more; no payload
RECEIPT = 7  #: nothing but ``received``
BYE = 8  #: the last frame: this end does not want to go on
COUNTED = frozenset({DATA, NACK, POISON, CARRIED, WORD, GONE})

_FIELDS = struct.Struct("<BB6xQQQQQ")
_MAC = 16
SIZE = _FIELDS.size + _MAC
#: The size of a small payload, at most: it is written and read by the calling thread, if nothing is queued before it.
EAGER = 64 << 10
#: The most bytes that follow a header under its MAC.
MOST_EXTRA = 8 << 10


class Frame(NamedTuple):
    """A header's fields: ``dtype`` is a wire id, ``numel`` counts elements, ``nbytes`` is the payload's."""

    kind: int
    transfer: int
    dtype: int
    numel: int
    nbytes: int


def nbytes_of(header: bytes) -> int:
    """Returns ``Frame.nbytes`` of a header that was not checked: not to be trusted."""
    nbytes: int = _FIELDS.unpack_from(header)[5]
    return nbytes


class Sealer:
    """Makes the headers of one direction, in the order in which they are sent."""

    def __init__(self, key: bytes) -> None:
        self._mac = blake2b(key=key, digest_size=_MAC)
        self._sequence = 0

    @property
    def last(self) -> int:
        """The number of the frame that was sealed last."""
        return self._sequence - 1

    def seal(self, frame: Frame, extra: bytes = b"", received: int = 0) -> bytes:
        """Makes the next header, 64 bytes, and appends ``extra``."""
        kind, transfer, dtype, numel, nbytes = frame
        fields = _FIELDS.pack(kind, dtype, received, transfer, numel, nbytes, self._sequence)
        self._sequence += 1
        mac = self._mac.copy()
        mac.update(fields + extra)
        return fields + mac.digest() + extra


class Opener:
    """Checks the headers of one direction."""

    def __init__(self, key: bytes) -> None:
        self._mac = blake2b(key=key, digest_size=_MAC)
        self._sequence = 0
        self.received = 0  #: that of the last header

    @property
    def last(self) -> int:
        """The number of the frame that was opened last."""
        return self._sequence - 1

    def open(self, header: bytes, extra: bytes = b"") -> Frame:
        """Returns the frame in ``header``. Raises ProtocolError unless it is exactly the one that was sealed next."""
        fields = header[: _FIELDS.size]
        mac = self._mac.copy()
        mac.update(fields + extra)
        if not hmac.compare_digest(mac.digest(), header[_FIELDS.size :]):
            raise ProtocolError(f"frame {self._sequence} has a wrong MAC: it was altered, forged or is out of step")
        kind, dtype, received, transfer, numel, nbytes, sequence = _FIELDS.unpack(fields)
        if sequence != self._sequence:
            raise ProtocolError(f"frame {sequence} arrived where {self._sequence} was due: a replay or a gap")
        if not DATA <= kind <= BYE:
            raise ProtocolError(f"frame {sequence} is of the unknown kind {kind}")
        self._sequence += 1
        self.received = received
        return Frame(kind, transfer, dtype, numel, nbytes)
