"""The protection of the payloads of a connection: none, a checksum, or encryption; and which of these it gets.

    none      | payload |
    Checked   | payload | CRC-32 |                            an empty payload has nothing behind it
    Sealed    | chunk 0, encrypted | tag | chunk 1, encrypted | tag | ...

CRC-32 finds accidents, at three times the speed of a keyed hash, which would find attackers too; these are what
encryption is for, whose tags find accidents as well. A chunk's nonce is its frame's number, which the header's MAC
vouches for, and its own number in the frame: so no chunk can be forged, replayed, left out or moved. Headers are
authenticated and in clear: kinds, ids, dtypes and sizes of transfers can be seen.

Each end says in the handshake what it wants, and the acceptor decides: what one of them wants is done. Whether the
other one is on this host each end sees by itself, on the connection; the names of hosts are not relied on.
"""

from __future__ import annotations

import socket
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from ...host.interfaces import is_loopback
from ...host.versions import INSTALL_CIPHER
from ...protocol.errors import BrokenError
from ..base import Protection
from ..cipher import TAG, Cipher, no_cipher
from ..payload import byte_view, plain
from .inbound import Inbound

#: What a connection may have, and what an end may want: payloads with a checksum, encrypted payloads.
CHECKSUM, ENCRYPT = 1, 2
#: What an end may be able to.
CIPHER = 4

#: The most bytes that are encrypted, or added up, at once: they are in the cache still when they are sent.
CHUNK = 1 << 20
#: The number of bytes of a checksum.
SUM = 4

_NONCE = struct.Struct("<QI")


def is_local(sock: socket.socket) -> bool:
    """Returns whether both ends of a connection are on this host: over loopback, or an address of its own."""
    there = str(sock.getpeername()[0])
    return is_loopback(there) or there == str(sock.getsockname()[0])


def wishes(protection: Protection, sock: socket.socket) -> tuple[int, str]:
    """Returns what this end wants of a connection and can do, in bits, and the reason why it can't encrypt; an empty
    text if it can."""
    apart = not is_local(sock)
    encrypt = protection.encrypts(apart) or protection.forbids(apart)
    lacks = "encrypt=False was asked for" if protection.encrypt is False else no_cipher(load=encrypt)
    return CHECKSUM * protection.checksum | ENCRYPT * encrypt | CIPHER * (not lacks), lacks


def agreed(mine: int, theirs: int) -> int | None:
    """Returns what a connection gets, in bits; None: it has to be encrypted, and an end can't."""
    both = (mine | theirs) & (CHECKSUM | ENCRYPT)
    return None if both & ENCRYPT and not mine & theirs & CIPHER else both


def unprotected(me: int, rank: int, lacks: str) -> BrokenError:
    """Returns the error for a connection that would have to be encrypted. ``lacks``: why this end can't; empty if it is
    the other one that can't."""
    other = f"it has no package cryptography ({INSTALL_CIPHER}), or said encrypt=False"
    who, why = (me, lacks) if lacks else (rank, other)
    return BrokenError(
        f"what rank {me} and rank {rank} send each other has to be encrypted, and rank {who} cannot: {why}. "
        "encrypt=True needs the package on all hosts; if nobody else can use the network between them, say so: "
        "trusted_network=True"
    )


def checksum(tensor: torch.Tensor) -> bytes:
    """Computes the checksum of a tensor's payload."""
    copy = plain(tensor)
    return zlib.crc32(byte_view(copy)).to_bytes(SUM, "little")


class Shield(ABC):
    """Protects the payloads of one direction of a connection: at one end those sent, at the other those read.

    ``sequence`` is the number of the payload's frame.
    """

    @abstractmethod
    def size(self, nbytes: int) -> int:
        """Returns the number of bytes on the wire of a payload of ``nbytes``."""

    @abstractmethod
    def pack(self, sequence: int, payload: memoryview) -> bytes:
        """Returns all bytes of a payload of at most CHUNK bytes."""

    @abstractmethod
    def send(self, sequence: int, payload: memoryview, sock: socket.socket) -> None:
        """Sends a payload over a blocking socket. Raises OSError."""

    @abstractmethod
    def read(self, sequence: int, payload: memoryview, inbound: Inbound) -> bool:
        """Reads a payload. False, and all of it was read: its checksum is wrong.

        Raises EOFError, OSError, and ProtocolError for a payload that was altered, of which the rest is not read.
        """


class Checked(Shield):
    """A checksum behind each payload."""

    def size(self, nbytes: int) -> int:
        return nbytes + SUM if nbytes else 0

    def pack(self, sequence: int, payload: memoryview) -> bytes:
        return bytes(payload) + zlib.crc32(payload).to_bytes(SUM, "little") if len(payload) else b""

    def send(self, sequence: int, payload: memoryview, sock: socket.socket) -> None:
        total = 0
        for _, chunk in _chunks(payload):
            total = zlib.crc32(chunk, total)
            sock.sendall(chunk)
        if len(payload):
            sock.sendall(total.to_bytes(SUM, "little"))

    def read(self, sequence: int, payload: memoryview, inbound: Inbound) -> bool:
        total = 0
        for _, chunk in _chunks(payload):
            inbound.read_into(chunk)
            total = zlib.crc32(chunk, total)
        return not len(payload) or inbound.next_bytes(SUM) == total.to_bytes(SUM, "little")


class Sealed(Shield):
    """Encryption, chunk by chunk. ``key`` is this direction's, 32 bytes, and of this connection only."""

    def __init__(self, key: bytes) -> None:
        """Raises ImportError without the package that encrypts."""
        self._cipher = Cipher(key)
        self._buffer = memoryview(b"")  #: as large as the largest chunk so far: many connections carry little

    def size(self, nbytes: int) -> int:
        return nbytes + TAG * -(-nbytes // CHUNK)

    def _room(self, chunk: memoryview) -> memoryview:
        """Returns memory for a chunk with its tag."""
        size = len(chunk) + TAG
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        return self._buffer[:size]

    def pack(self, sequence: int, payload: memoryview) -> bytes:
        if not len(payload):
            return b""
        out = self._room(payload)
        self._cipher.seal(_NONCE.pack(sequence, 0), payload, out)
        return bytes(out)

    def send(self, sequence: int, payload: memoryview, sock: socket.socket) -> None:
        for number, chunk in _chunks(payload):
            out = self._room(chunk)
            self._cipher.seal(_NONCE.pack(sequence, number), chunk, out)
            sock.sendall(out)

    def read(self, sequence: int, payload: memoryview, inbound: Inbound) -> bool:
        for number, chunk in _chunks(payload):
            sealed = self._room(chunk)
            inbound.read_into(sealed)
            self._cipher.open(_NONCE.pack(sequence, number), sealed, chunk)
        return True


def shield(mode: int, key: bytes) -> Shield | None:
    """Returns what protects the payloads of one direction; None: nothing. ``mode``: what was agreed.

    Raises ImportError without the package that encrypts.
    """
    if mode & ENCRYPT:
        return Sealed(key)
    return Checked() if mode & CHECKSUM else None


def _chunks(payload: memoryview) -> Iterator[tuple[int, memoryview]]:
    for start in range(0, len(payload), CHUNK):
        yield start // CHUNK, payload[start : start + CHUNK]
