"""The secrets of one job, made fresh by its master: CURVE key pairs, the job's secret and keys derived from it."""

from __future__ import annotations

import hashlib
import hmac
import secrets

import zmq
from zmq.utils import z85


def curve_pair() -> tuple[str, str]:
    """Makes a CURVE key pair: (public, secret), both Z85 text of 40 characters."""
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


def curve_pair_of(seed: bytes) -> tuple[str, str]:
    """Derives the CURVE key pair of 32 secret bytes. Raises ValueError for another number of bytes."""
    if len(seed) != 32:
        raise ValueError(f"a key pair comes from 32 bytes, not from {len(seed)}")
    secret = z85.encode(seed)
    return zmq.curve_public(secret).decode("ascii"), secret.decode("ascii")


def job_secret() -> bytes:
    """Makes a job's secret: 32 random bytes that only the master and its nodes share."""
    return secrets.token_bytes(32)


def job_id() -> str:
    """Makes a name for one job: unlike any other's, no secret, fit for file names and log lines."""
    return secrets.token_hex(8)


def pair_key(secret: bytes, job: str, a: int, b: int, incarnations: tuple[int, int] = (0, 0)) -> bytes:
    """Returns the 32-byte key by which the peers ``a`` and ``b`` of ``job`` prove themselves to each other.

    The key is HKDF-SHA256 (RFC 5869), and is the same for (a, b) and (b, a). -1 stands for the master.
    ``incarnations``: of ``a`` and of ``b``, how many workers were in its place before: each has a key of its own.
    Raises ValueError for a secret that is not 32 bytes long.
    """
    if len(secret) != 32:
        raise ValueError(f"a job's secret has 32 bytes, this one has {len(secret)}: make it with job_secret()")
    (low, first), (high, second) = sorted(zip((a, b), incarnations, strict=True))
    # Fixed-width ranks: (1, 23) and (12, 3) must not become the same text.
    info = b"disttensor pair" + low.to_bytes(8, "big", signed=True) + high.to_bytes(8, "big", signed=True)
    if first or second:
        info += b" again" + first.to_bytes(8, "big") + second.to_bytes(8, "big")
    extracted = hmac.digest(job.encode(), secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)
