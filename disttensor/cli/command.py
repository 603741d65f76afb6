"""Runs dtrun's first word: a script, or one of the commands by which agents are started.

An agent starts without dtrun's options, and so without their imports.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

#: First words that are not a script -> the module whose ``main`` runs them.
_COMMANDS = {
    "agent": "disttensor.runtime.launch.tree.agent",
    "worker": "disttensor.runtime.launch.rendezvous.worker_cli",
    "ray-agent": "disttensor.runtime.launch.starters.ray_agent",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs dtrun with these arguments (default: the process's), waits for it, and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        return int(import_module(_COMMANDS[arguments[0]]).main(arguments[1:]))
    return int(import_module("disttensor.cli.main").main(arguments))
