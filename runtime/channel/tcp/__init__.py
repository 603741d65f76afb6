"""The data channel "tcp": one authenticated connection between two peers. ``TcpChannel`` is what others build on."""

from .channel import TcpChannel

__all__ = ["TcpChannel"]
