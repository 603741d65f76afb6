"""The exceptions of disttensor. All of its own are DisttensorErrors; an operator's errors keep their types."""

from ..runtime.protocol.errors import (
    BrokenError,
    BusyError,
    CancelledError,
    ChannelError,
    ClosedError,
    DisttensorError,
    ForkError,
    GeometryError,
    GraphError,
    NodeLost,
    PeerFailed,
    PoisonedError,
    ProtocolError,
    RemoteError,
    StartError,
    VerifyError,
)

__all__ = [
    "BrokenError",
    "BusyError",
    "CancelledError",
    "ChannelError",
    "ClosedError",
    "DisttensorError",
    "ForkError",
    "GeometryError",
    "GraphError",
    "NodeLost",
    "PeerFailed",
    "PoisonedError",
    "ProtocolError",
    "RemoteError",
    "StartError",
    "VerifyError",
]
