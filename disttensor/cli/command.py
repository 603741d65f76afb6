"""What dtrun's first word asks for: a script, or one of the commands that agents are started by.

An agent starts without dtrun's options, and so without what these import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

#: First words that are not a script, and the module whose ``main`` knows what to do.
_COMMANDS = {
    "agent": "disttensor.runtime.launch.tree.agent",
    "worker": "disttensor.runtime.launch.rendezvous.worker_cli",
    "ray-agent": "disttensor.runtime.launch.starters.ray_agent",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs dtrun with these arguments (default: the process's) and gives its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        return int(import_module(_COMMANDS[arguments[0]]).main(arguments[1:]))
    return int(import_module("disttensor.cli.main").main(arguments))
