"""Asynchronous training: a parameter server, and strategies that drive workers which do not wait for each other."""

from .driving import drive
from .events import TrainingEvent
from .history import History
from .schedule import Schedule
from .server import ParameterServer
from .strategies import EASGD, Downpour, LocalSGD, Strategy
from .workers import Worker

__all__ = [
    "EASGD",
    "Downpour",
    "History",
    "LocalSGD",
    "ParameterServer",
    "Schedule",
    "Strategy",
    "TrainingEvent",
    "Worker",
    "drive",
]
