"""Launchers start worker processes and leave none behind."""

from ..host.launcher import Exited, Launcher, Started
from .registry import get_launcher, launcher_names, register_launcher

__all__ = ["Exited", "Launcher", "Started", "get_launcher", "launcher_names", "register_launcher"]
