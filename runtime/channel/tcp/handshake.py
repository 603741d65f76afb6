"""The handshake: two peers prove to each other that they hold the pair's key, before any other byte.

    acceptor                                     initiator
    nonce (32 bytes)              ------------>
                                  <------------  hello: magic, ranks, nonce, wishes, standing, tag, proof
    verdict, mode, standing, proof ----------->                                        (only if the hello's proof holds)

A proof is an HMAC over everything said so far, under a key that HKDF-SHA256 derives from the pair's key for that role,
both ranks, the job and both nonces; so are the keys of the two directions afterwards. A stranger sees one nonce.
The tag says that the initiator knows the job's name, which is not a secret. An acceptor that has not been told of this
rank yet cannot check the proof: with a right tag it keeps the initiator waiting, without one it refuses the call.
A ``Standing`` says what an end has of the connections that the two have had before: a new one goes on where they ended.
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

_MAGIC = b"DTt4"  #: raise the digit with every change of handshake or frames
_STANDING = struct.Struct("<8sIQ")
_HELLO = struct.Struct(f"<4sii32sB{_STANDING.size}s16s32s")
_VERDICT = struct.Struct(f"<BB{_STANDING.size}s32s")
NONCE = 32  #: the number of bytes that the acceptor sends first
HELLO = _HELLO.size  #: the number of bytes that the initiator answers
VERDICT = _VERDICT.size  #: the number of bytes that the acceptor answers

WELCOME = 1  #: the connection is taken
CROSSED = 2  #: both sides called; the acceptor's call (it has the lower rank, or was faster) is used
TAKEN = 3  #: the two are through with each other, or the initiator is another one than before
UNFIT = 4  #: what they send each other has to be encrypted, and one of them can't


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """Computes HKDF-SHA256 (RFC 5869), one block: 32 bytes."""
    return hmac.digest(hmac.digest(salt, key, "sha256"), info + b"\x01", "sha256")


class Standing(NamedTuple):
    """The state of one end of a pair. ``instance`` is another one whenever a rank was started anew."""

    instance: bytes = bytes(8)
    connection: int = 1  #: the number of the connection that is to be made, from 1
    received: int = 0  #: the number of frames that have come over those before, and were dealt with

    def pack(self) -> bytes:
        return _STANDING.pack(*self)


class PeerHello(NamedTuple):
    """An initiator's claims about itself; true only once ``Secrets.check_hello`` returned True."""

    rank: int
    to: int
    nonce: bytes
    wishes: int
    standing: Standing
    tag: bytes
    proof: bytes

    @classmethod
    def parse(cls, data: bytes) -> PeerHello | None:
        """Parses a hello; returns None for bytes that are not a hello of this version."""
        magic, rank, to, nonce, wishes, standing, tag, proof = _HELLO.unpack(data)
        if magic != _MAGIC:
            return None
        return cls(rank, to, nonce, wishes, Standing._make(_STANDING.unpack(standing)), tag, proof)

    def is_for(self, job: str, me: int, nonce: bytes) -> bool:
        """Returns whether a hello to the acceptor's ``nonce`` is for rank ``me`` of a job, by what it says."""
        return self.to == me and hmac.compare_digest(self.tag, _tag(job, self.rank, me, nonce + self.nonce))


class DirectionKeys(NamedTuple):
    """The keys of one direction, 32 bytes each: of its headers, and of payloads that are encrypted."""

    frames: bytes
    payloads: bytes


class Secrets:
    """The keys of one handshake and of the connection that follows. ``key`` is the pair's, 32 bytes.

    ``wishes`` and ``standing`` are the initiator's.
    """

    def __init__(
        self,
        key: bytes,
        job: str,
        initiator: int,
        acceptor: int,
        nonces: bytes,
        wishes: int,
        standing: Standing = Standing(),  # noqa: B008 - immutable
    ) -> None:
        self.wishes, self.standing = wishes, standing
        self.acceptors = Standing()  #: the acceptor's, once it has answered
        self.mode = 0  #: the protection that the two have agreed on
        self._ids = struct.pack("<ii", initiator, acceptor)
        self._nonces = nonces
        info = b"disttensor tcp 3 " + hashlib.sha256(job.encode()).digest() + self._ids
        self._initiator_proves = hkdf(key, nonces, info + b"initiator proves")
        self._acceptor_proves = hkdf(key, nonces, info + b"acceptor proves")
        #: keys of what the initiator sends, and of what the acceptor sends
        self.of_initiator, self.of_acceptor = (
            DirectionKeys(hkdf(key, nonces, info + role + b" sends"), hkdf(key, nonces, info + role + b" encrypts"))
            for role in (b"initiator", b"acceptor")
        )

    def _hello_fields(self) -> bytes:
        return _MAGIC + self._ids + self._nonces + bytes([self.wishes]) + self.standing.pack()

    def hello_proof(self) -> bytes:
        return hmac.digest(self._initiator_proves, self._hello_fields(), "sha256")

    def check_hello(self, proof: bytes) -> bool:
        return hmac.compare_digest(self.hello_proof(), proof)

    def verdict(self, verdict: int) -> bytes:
        """Returns the acceptor's answer, ``mode`` and standing, as sent."""
        standing = self.acceptors.pack()
        said = bytes([verdict, self.mode]) + standing + self._hello_fields()
        return _VERDICT.pack(verdict, self.mode, standing, hmac.digest(self._acceptor_proves, said, "sha256"))


def call(
    sock: socket.socket,
    key: bytes,
    job: str,
    me: int,
    peer: int,
    wishes: int,
    standing: Standing = Standing(),  # noqa: B008 - immutable
) -> tuple[int, Secrets]:
    """Does the initiator's part over ``sock``, whose timeout holds for each step; returns the verdict and the secrets.

    Raises EOFError when the acceptor hung up before its verdict, BrokenError when it is not who it should be.
    """
    theirs = _read_exactly(sock, NONCE)
    mine = os.urandom(NONCE)
    secrets = Secrets(key, job, me, peer, theirs + mine, wishes, standing)
    tag = _tag(job, me, peer, theirs + mine)
    sock.sendall(_HELLO.pack(_MAGIC, me, peer, mine, wishes, standing.pack(), tag, secrets.hello_proof()))
    answer = _read_exactly(sock, _VERDICT.size)
    _, secrets.mode, acceptors, _ = _VERDICT.unpack(answer)
    secrets.acceptors = Standing._make(_STANDING.unpack(acceptors))
    if not hmac.compare_digest(answer, secrets.verdict(answer[0])):
        raise BrokenError(f"what answers at the address of rank {peer} cannot prove that it holds the key of the pair")
    return answer[0], secrets


def answer(hello: PeerHello, nonce: bytes, job: str, me: int, key: bytes) -> Secrets | None:
    """Checks a hello to the acceptor's ``nonce``; returns the secrets, or None for a peer that doesn't hold ``key``."""
    secrets = Secrets(key, job, hello.rank, me, nonce + hello.nonce, hello.wishes, hello.standing)
    return secrets if hello.to == me and secrets.check_hello(hello.proof) else None


def _tag(job: str, initiator: int, acceptor: int, nonces: bytes) -> bytes:
    """Returns what a hello says of the job that it belongs to: as another job's name gives other bytes, it is for
    nobody else."""
    said = struct.pack("<ii", initiator, acceptor) + nonces
    return hmac.digest(b"disttensor tcp job " + hashlib.sha256(job.encode()).digest(), said, "sha256")[:16]


def _read_exactly(sock: socket.socket, n: int) -> bytes:
    out = b""
    while len(out) < n:
        piece = sock.recv(n - len(out))
        if not piece:
            raise EOFError(f"hung up after {len(out)} of {n} bytes")
        out += piece
    return out
