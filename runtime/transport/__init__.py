"""Control transports. ``zmq`` crosses processes and hosts, ``inproc`` stays in one process (for tests)."""

from .base import Hub, Spoke

__all__ = ["Hub", "Spoke"]
