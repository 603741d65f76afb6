"""Asynchronous training: a parameter server, and strategies that drive workers which do not wait for each other."""

from .server import ParameterServer

__all__ = ["ParameterServer"]
