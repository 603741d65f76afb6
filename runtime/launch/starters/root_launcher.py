"""Launchers of other hosts' nodes: a root beside the master gets them, by the plan's engine."""

from __future__ import annotations

import msgspec

from ...host.addresses import LOOPBACK
from ...host.interfaces import addresses_of
from ...host.launch_spec import Plan, plan_of_dtrun
from ...protocol.errors import StartError
from ..tree.spawn import inherited_server, spawn_root
from .server_launcher import WORKER, ServedLauncher


class PlannedLauncher(ServedLauncher):
    """Has a root for ``plan``. Making one starts it (or takes dtrun's) and returns at once.

    Raises StartError, ValueError for an interface that is none of this host's. ``entry`` is for tests.
    """

    grows = True
    server_name, unfit = "the root of the nodes' hosts", "no node can be started"

    def __init__(self, plan: Plan, entry: str = WORKER) -> None:
        self.plan = plan
        self.capacity = plan.most or plan.slots or None
        self.listen = tuple(addresses_of(plan.interface)) if plan.interface else self.ways()
        # dtrun's root serves dtrun's plan, once; the time limit is the master's
        said = plan_of_dtrun()
        same = said is not None and msgspec.structs.replace(plan, timeout=said.timeout) == said
        sock = inherited_server() if same else None
        process = None
        if sock is None:
            sock, process = spawn_root(plan)
        super().__init__(sock, process, entry)

    @classmethod
    def of(cls, plan: Plan) -> PlannedLauncher:
        return cls.again(plan) or cls(plan)

    def serves(self, plan: Plan) -> bool:
        return msgspec.structs.replace(plan, timeout=self.plan.timeout) == self.plan

    def ways(self) -> tuple[str, ...]:
        """The addresses of this host on which nodes reach the master, when no interface was named."""
        return (LOOPBACK,)


__all__ = ["PlannedLauncher", "StartError"]
