"""The rendezvous under torchrun, whose own store is at MASTER_PORT: the master publishes its addresses there.

Everybody who reaches that store may read and write it, so it gets addresses only. Both ends authenticate by keys.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ...protocol.errors import StartError
from .credentials import check_addresses


def publish(host: str, port: int, meeting: str, addresses: Sequence[str], timeout: float) -> None:
    """Publishes, in the store at this host and port, the addresses on which the root of a meeting listens.

    Raises StartError when the store cannot be reached.
    """
    try:
        _store(host, port, timeout).set(_key(meeting), " ".join(addresses))
    except RuntimeError as e:  # torch.distributed's errors are of this type
        raise StartError(f"torchrun's store at {host}:{port} cannot be reached: {_first_line(e)}") from e


def look_up(host: str, port: int, meeting: str, timeout: float) -> tuple[str, ...]:
    """Waits for the addresses that the master publishes. Raises StartError when none come in time, or
    what is there is none."""
    deadline = time.monotonic() + timeout
    try:
        store = _store(host, port, timeout)
        store.wait([_key(meeting)], timedelta(seconds=max(1.0, deadline - time.monotonic())))
        said = store.get(_key(meeting))
    except RuntimeError as e:
        text = f"the master has not said within {timeout:g} s in torchrun's store at {host}:{port} where it is"
        raise StartError(f"{text} (is it rank 0 of this torchrun, or told of this store?): {_first_line(e)}") from e
    try:
        addresses = tuple(said.decode("ascii").split())
        check_addresses(addresses)
    except ValueError as e:
        text = f"what torchrun's store at {host}:{port} says of where the master is are no addresses"
        raise StartError(f"{text} (anybody who reaches that store may write there): {e}") from None
    return addresses


def _key(meeting: str) -> str:
    return f"disttensor/{meeting}"


def _store(host: str, port: int, timeout: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # takes seconds where there is no torch yet

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
