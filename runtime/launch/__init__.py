"""Launchers start worker processes and leave none behind."""

from ..host.launcher import Exited, Launcher, Started
from .method import LaunchMethod
from .registry import get_launcher, launcher_names, register_launch_method, register_launcher

__all__ = [
    "Exited",
    "LaunchMethod",
    "Launcher",
    "Started",
    "get_launcher",
    "launcher_names",
    "register_launch_method",
    "register_launcher",
]
