"""The launcher for this machine: a fork server beside the master.

Starting it takes as long as importing torch once; a worker more takes milliseconds. Make the launcher early and ask for
workers later, and the import runs beside the master's other work in between.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ...host.launch_spec import LaunchSpec, spec_of_dtrun
from ..registry import launch_method
from ..tree.spawn import PRELOAD, inherited_server, spawn_server
from .server_launcher import WORKER, ServerLauncher


class LocalLauncher(ServerLauncher):
    """Starts workers on this machine. Making one starts the fork server (or takes dtrun's) and returns at once.

    Raises StartError. ``entry`` and ``preload`` are for tests.
    """

    server_name, unfit = "the fork server", "no node can be started on this machine"
    starts_children = True

    def __init__(self, entry: str = WORKER, preload: Sequence[str] = PRELOAD) -> None:
        spec = spec_of_dtrun()
        sock = inherited_server() if spec is None or launch_method(spec.launcher).fork_server else None
        process = None
        if sock is None:
            sock, process = spawn_server(preload)
        self.host = socket.gethostname()
        super().__init__(sock, process, entry)

    @classmethod
    def of(cls, spec: LaunchSpec) -> LocalLauncher:
        return cls.reuse_resting(spec) or cls()
