"""Agents of this host that take themselves for those of other hosts, each with a folder for sockets of its own."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from disttensor.runtime.host.launch_spec import Host
from disttensor.runtime.launch import LaunchMethod, register_launch_method
from disttensor.runtime.launch.starters.piped import PipedStarter, agent_here
from disttensor.runtime.launch.starters.root_launcher import RootLauncher

#: The launcher's name, and its starter.
NAME, STARTER = "elsewhere", "elsewhere:ElsewhereStarter"
#: The host of this name is the script's own; that of this one has a clock of its own, by so many seconds ahead. It
#: needs root, for a namespace of times.
HERE, AHEAD, SECONDS = "here", "ahead", 11

#: Runs a program as on the host that its first argument names.
_AS_HOST = """
import runpy, socket, sys
_, name, *sys.argv = sys.argv
socket.gethostname = lambda: name
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def runtime_of(host: str) -> str:
    """The folder for what runs on a host: below that of this process."""
    return os.path.join(os.environ["XDG_RUNTIME_DIR"], host)


class ElsewhereStarter(PipedStarter):
    """Starts the agents."""

    def command(self, host: Host) -> list[str]:
        name = socket.gethostname() if host.name == HERE else host.name
        runtime = Path(runtime_of(host.name))
        runtime.mkdir(exist_ok=True)
        python, _, *rest = agent_here(self.spec)
        clock = (
            ["unshare", "--time", "--monotonic", str(SECONDS), "--fork", "--kill-child"] if host.name == AHEAD else []
        )
        return [*clock, "env", f"XDG_RUNTIME_DIR={runtime}", python, "-P", "-c", _AS_HOST, name, *rest]


def register() -> None:
    """Makes the launcher known to this process and to its roots."""
    register_launch_method(LaunchMethod(NAME, launcher=RootLauncher, starter=ElsewhereStarter, for_tests=True))
