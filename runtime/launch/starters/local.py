"""The launcher for this machine: a fork server beside the master.

Starting it takes as long as importing torch once; a worker more takes milliseconds. Make the launcher early and ask for
workers later, and the import runs beside the master's other work in between.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from ...host.launch_spec import LaunchSpec, spec_of_dtrun
from ...protocol.bundle import Bundle
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
        self._job = ""  #: the one whose places are given out
        self._places: dict[int, int] = {}  #: rank -> the last place on this host that it was given
        self._used: set[int] = set()  #: the places that any has been given
        super().__init__(sock, process, entry)

    def placed(self, bundle: Bundle) -> Bundle:
        """Gives a node a free place: one that none has had before any other, as what a node has died of may be there
        still; then the one that the bundle says."""
        if bundle.job != self._job:
            self._job, self._places, self._used = bundle.job, {}, set()
        taken = {place for rank, place in self._places.items() if rank != bundle.rank and rank in self._running}
        free = [place for place in range(bundle.local_size) if place not in taken]
        if not free:
            return bundle
        place = min(free, key=lambda place: (place in self._used, place != bundle.local_rank, place))
        self._places[bundle.rank] = place
        self._used.add(place)
        return msgspec.structs.replace(bundle, local_rank=place)

    @classmethod
    def of(cls, spec: LaunchSpec) -> LocalLauncher:
        return cls.reuse_resting(spec) or cls()
