"""Runs dtrun's first word: a script, a command for jobs that run already, or one by which agents are started.

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
#: Those for jobs that run already (jobs.py). A script of such a name is written ./ps.
_JOBS = {"ps", "status", "top", "stack", "logs", "trace", "kill"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs dtrun with these arguments (default: the process's), waits for it, and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        return int(import_module(_COMMANDS[arguments[0]]).main(arguments[1:]))
    if arguments and arguments[0] in _JOBS:
        jobs = import_module("disttensor.cli.jobs")
        if taken := jobs.taken_by(arguments[0]):
            print(f"dtrun: error: {taken}", file=sys.stderr)
            return 2
        return int(jobs.main(arguments))
    return int(import_module("disttensor.cli.main").main(arguments))
