"""The agent that a Ray actor runs on its host: its invitation comes down stdin, which is its life-line, too."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

import msgspec

from ...protocol.errors import UNDECODABLE, StartError
from ..rendezvous.credentials import Invitation, check_invitation
from ..rendezvous.worker_cli import join

#: Seconds within which the root has to be reached.
_TIMEOUT = 30.0


class RayAgentStart(msgspec.Struct, frozen=True):
    """The one line on stdin."""

    invitation: Invitation
    slots: int  #: how many nodes this host has
    first: int  #: the rank of the first


def main(argv: Sequence[str] = ()) -> int:
    """Serves until all nodes of this host have ended; returns the exit code."""
    try:
        told = read_told(sys.stdin.buffer.readline())
    except StartError as e:
        print(f"dtrun ray-agent is what Ray's actors run, not users: {e}", file=sys.stderr)
        return os.EX_USAGE
    threading.Thread(target=_watch, name="life-line", daemon=True).start()
    try:
        # no other agent on the same machine may use the resources that Ray has given this one
        return join(told.invitation, _TIMEOUT, told.slots, told.first, 0, told.slots)
    except StartError as e:
        print(f"disttensor: {e}", file=sys.stderr)
        return 1


def read_told(line: bytes) -> RayAgentStart:
    """Decodes the line on stdin. Raises StartError for any other."""
    try:
        told = msgspec.json.decode(line, type=RayAgentStart)
        check_invitation(told.invitation)
    except UNDECODABLE as e:
        raise StartError(str(e)) from None
    return told


def _watch() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)  # the agent takes this for its root's end
