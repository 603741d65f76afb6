"""The base of launchers of other hosts' nodes: a root beside the master gets them, by the spec's host starter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...host.addresses import LOOPBACK
from ...host.interfaces import addresses_of
from ...host.launch_spec import LaunchSpec, spec_of_dtrun
from ...process.renamed import old_names
from ...protocol.errors import StartError
from ..tree.spawn import inherited_server, spawn_root
from .server_launcher import WORKER, ServerLauncher


class RootLauncher(ServerLauncher):
    """Has a root for ``spec``. Making one starts the root (or takes dtrun's) and returns at once.

    Raises StartError, ValueError for an interface that is not this host's. ``entry`` is for tests.
    """

    grows = watches = True
    server_name, unfit = "the root of the nodes' hosts", "no node can be started"

    def __init__(self, spec: LaunchSpec, entry: str = WORKER) -> None:
        self.spec = spec
        self.capacity = spec.most or spec.slots or None
        self.listen = tuple(addresses_of(spec.interface)) if spec.interface else self.ways()
        # dtrun's root serves dtrun's launch spec, once; the time limit is the master's
        said = spec_of_dtrun()
        same = said is not None and msgspec.structs.replace(spec, timeout=said.timeout) == said
        sock = inherited_server() if same else None
        process = None
        if sock is None:
            sock, process = spawn_root(spec)
        super().__init__(sock, process, entry)

    @classmethod
    def of(cls, spec: LaunchSpec) -> RootLauncher:
        return cls.reuse_resting(spec) or cls(spec)

    def serves(self, spec: LaunchSpec) -> bool:
        return msgspec.structs.replace(spec, timeout=self.spec.timeout) == self.spec

    def ways(self) -> tuple[str, ...]:
        """Returns the addresses of this host on which nodes reach the master, when no interface was named."""
        return (LOOPBACK,)


if not TYPE_CHECKING:  # to type checkers, any name would be there
    __getattr__ = old_names(__name__, {"PlannedLauncher": "RootLauncher"})

__all__ = ["RootLauncher", "StartError"]
