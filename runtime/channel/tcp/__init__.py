"""The data channel "tcp": one authenticated connection between two peers. Other channels build on ``TcpChannel``."""

from .channel import TcpChannel

__all__ = ["TcpChannel"]
