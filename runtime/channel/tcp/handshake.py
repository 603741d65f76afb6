"""The handshake: two peers prove to each other that they hold the pair's key, before any other byte.

    acceptor                                     initiator
    nonce (32 bytes)              ------------>
                                  <------------  hello: magic, from rank, to rank, nonce, wishes, proof
    verdict, mode, proof          ------------>                                        (only if the hello's proof holds)

A proof is an HMAC over everything said so far, under a key that HKDF-SHA256 derives from the pair's key for that role,
both ranks, the job and both nonces; so are the keys of the two directions afterwards. A stranger sees one nonce.
Wishes and mode are those of ``shield``: who is between the two can't have them take less than either wants.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from typing import NamedTuple

from ...protocol.errors import BrokenError

_MAGIC = b"DTt2"  #: raise the digit with every change of handshake or frames
_HELLO = struct.Struct("<4sii32sB32s")
_VERDICT = struct.Struct("<BB32s")
NONCE = 32  #: the number of bytes that the acceptor sends first
HELLO = _HELLO.size  #: the number of bytes that the initiator answers

WELCOME = 1  #: the connection is taken
CROSSED = 2  #: both sides called; the acceptor's call (it has the lower rank) is used
TAKEN = 3  #: there is, or was, a connection between the two: a second one is never business as usual
UNFIT = 4  #: what they send each other has to be encrypted, and one of them can't


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """Computes HKDF-SHA256 (RFC 5869), one block: 32 bytes."""
    return hmac.digest(hmac.digest(salt, key, "sha256"), info + b"\x01", "sha256")


class Hello(NamedTuple):
    """An initiator's claims about itself; true only once ``Secrets.check_hello`` returned True."""

    rank: int
    to: int
    nonce: bytes
    wishes: int
    proof: bytes

    @classmethod
    def parse(cls, data: bytes) -> Hello | None:
        """Parses a hello; returns None for bytes that are not a hello of this version."""
        magic, rank, to, nonce, wishes, proof = _HELLO.unpack(data)
        return cls(rank, to, nonce, wishes, proof) if magic == _MAGIC else None


class Keys(NamedTuple):
    """The keys of one direction, 32 bytes each: of its headers, and of payloads that are encrypted."""

    frames: bytes
    payloads: bytes


class Secrets:
    """The keys of one handshake and of the connection that follows. ``key`` is the pair's, 32 bytes.

    ``wishes`` are the initiator's.
    """

    def __init__(self, key: bytes, job: str, initiator: int, acceptor: int, nonces: bytes, wishes: int) -> None:
        self.wishes = wishes
        self.mode = 0  #: the protection that the two have agreed on
        self._ids = struct.pack("<ii", initiator, acceptor)
        self._nonces = nonces
        info = b"disttensor tcp 2 " + hashlib.sha256(job.encode()).digest() + self._ids
        self._initiator_proves = hkdf(key, nonces, info + b"initiator proves")
        self._acceptor_proves = hkdf(key, nonces, info + b"acceptor proves")
        #: keys of what the initiator sends, and of what the acceptor sends
        self.of_initiator, self.of_acceptor = (
            Keys(hkdf(key, nonces, info + role + b" sends"), hkdf(key, nonces, info + role + b" encrypts"))
            for role in (b"initiator", b"acceptor")
        )

    def _said(self) -> bytes:
        return _MAGIC + self._ids + self._nonces + bytes([self.wishes])

    def hello_proof(self) -> bytes:
        return hmac.digest(self._initiator_proves, self._said(), "sha256")

    def check_hello(self, proof: bytes) -> bool:
        return hmac.compare_digest(self.hello_proof(), proof)

    def verdict(self, verdict: int) -> bytes:
        """Returns the acceptor's answer, and ``mode``, as sent."""
        said = bytes([verdict, self.mode]) + self._said()
        return _VERDICT.pack(verdict, self.mode, hmac.digest(self._acceptor_proves, said, "sha256"))


def call(sock: socket.socket, key: bytes, job: str, me: int, peer: int, wishes: int) -> tuple[int, Secrets]:
    """Does the initiator's part over ``sock``, whose timeout holds for each step; returns the verdict and the secrets.

    Raises EOFError when the acceptor hung up before its verdict, BrokenError when it is not who it should be.
    """
    theirs = _read_exactly(sock, NONCE)
    mine = os.urandom(NONCE)
    secrets = Secrets(key, job, me, peer, theirs + mine, wishes)
    sock.sendall(_HELLO.pack(_MAGIC, me, peer, mine, wishes, secrets.hello_proof()))
    answer = _read_exactly(sock, _VERDICT.size)
    secrets.mode = answer[1]
    if not hmac.compare_digest(answer, secrets.verdict(answer[0])):
        raise BrokenError(f"what answers at the address of rank {peer} cannot prove that it holds the key of the pair")
    return answer[0], secrets


def answer(hello: Hello, nonce: bytes, job: str, me: int, key: bytes) -> Secrets | None:
    """Checks a hello to the acceptor's ``nonce``; returns the secrets, or None for a peer that doesn't hold ``key``."""
    secrets = Secrets(key, job, hello.rank, me, nonce + hello.nonce, hello.wishes)
    return secrets if hello.to == me and secrets.check_hello(hello.proof) else None


def _read_exactly(sock: socket.socket, n: int) -> bytes:
    out = b""
    while len(out) < n:
        piece = sock.recv(n - len(out))
        if not piece:
            raise EOFError(f"hung up after {len(out)} of {n} bytes")
        out += piece
    return out
