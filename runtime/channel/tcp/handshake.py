"""The handshake: two peers prove to each other that they hold the pair's key, before any other byte.

    acceptor                                     initiator
    nonce (32 bytes)              ------------>
                                  <------------  hello: magic, from rank, to rank, nonce, proof
    verdict (1 byte), proof       ------------>                                        (only if the hello's proof holds)

A proof is an HMAC over everything said so far, under a key that HKDF-SHA256 derives from the pair's key for that role,
both ranks, the job and both nonces; so are the keys of the two directions afterwards. A stranger sees one nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from typing import NamedTuple

from ...protocol.errors import BrokenError

_MAGIC = b"DTt1"  #: raise the digit with every change of handshake or frames
_HELLO = struct.Struct("<4sii32s32s")
_VERDICT = struct.Struct("<B32s")
NONCE = 32  #: the number of bytes that the acceptor sends first
HELLO = _HELLO.size  #: the number of bytes that the initiator answers

WELCOME = 1  #: the connection is taken
CROSSED = 2  #: both sides called; the acceptor's call (it has the lower rank) is used
TAKEN = 3  #: there is, or was, a connection between the two: a second one is never business as usual


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """Computes HKDF-SHA256 (RFC 5869), one block: 32 bytes."""
    return hmac.digest(hmac.digest(salt, key, "sha256"), info + b"\x01", "sha256")


class Hello(NamedTuple):
    """An initiator's claims about itself; true only once ``Secrets.check_hello`` returned True."""

    rank: int
    to: int
    nonce: bytes
    proof: bytes

    @classmethod
    def parse(cls, data: bytes) -> Hello | None:
        """Parses a hello; returns None for bytes that are not a hello of this version."""
        magic, rank, to, nonce, proof = _HELLO.unpack(data)
        return cls(rank, to, nonce, proof) if magic == _MAGIC else None


class Secrets:
    """The keys of one handshake and of the connection that follows. ``key`` is the pair's, 32 bytes."""

    def __init__(self, key: bytes, job: str, initiator: int, acceptor: int, nonces: bytes) -> None:
        self._ids = struct.pack("<ii", initiator, acceptor)
        self._nonces = nonces
        info = b"disttensor tcp 1 " + hashlib.sha256(job.encode()).digest() + self._ids
        self._initiator_proves = hkdf(key, nonces, info + b"initiator proves")
        self._acceptor_proves = hkdf(key, nonces, info + b"acceptor proves")
        #: key of the frames that the initiator sends, and of those that the acceptor sends
        self.initiator_sends = hkdf(key, nonces, info + b"initiator sends")
        self.acceptor_sends = hkdf(key, nonces, info + b"acceptor sends")

    def hello_proof(self) -> bytes:
        return hmac.digest(self._initiator_proves, _MAGIC + self._ids + self._nonces, "sha256")

    def check_hello(self, proof: bytes) -> bool:
        return hmac.compare_digest(self.hello_proof(), proof)

    def verdict(self, verdict: int) -> bytes:
        """Returns the acceptor's answer as sent."""
        said = bytes([verdict]) + _MAGIC + self._ids + self._nonces
        return _VERDICT.pack(verdict, hmac.digest(self._acceptor_proves, said, "sha256"))


def call(sock: socket.socket, key: bytes, job: str, me: int, peer: int) -> tuple[int, Secrets]:
    """Does the initiator's part over ``sock``, whose timeout holds for each step; returns the verdict and the secrets.

    Raises EOFError when the acceptor hung up before its verdict, BrokenError when it is not who it should be.
    """
    theirs = _read_exactly(sock, NONCE)
    mine = os.urandom(NONCE)
    secrets = Secrets(key, job, me, peer, theirs + mine)
    sock.sendall(_HELLO.pack(_MAGIC, me, peer, mine, secrets.hello_proof()))
    answer = _read_exactly(sock, _VERDICT.size)
    if not hmac.compare_digest(answer, secrets.verdict(answer[0])):
        raise BrokenError(f"what answers at the address of rank {peer} cannot prove that it holds the key of the pair")
    return answer[0], secrets


def answer(hello: Hello, nonce: bytes, job: str, me: int, key: bytes) -> Secrets | None:
    """Checks a hello to the acceptor's ``nonce``; returns the secrets, or None for a peer that doesn't hold ``key``."""
    secrets = Secrets(key, job, hello.rank, me, nonce + hello.nonce)
    return secrets if hello.to == me and secrets.check_hello(hello.proof) else None


def _read_exactly(sock: socket.socket, n: int) -> bytes:
    out = b""
    while len(out) < n:
        piece = sock.recv(n - len(out))
        if not piece:
            raise EOFError(f"hung up after {len(out)} of {n} bytes")
        out += piece
    return out
