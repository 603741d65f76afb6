"""From the arguments of ``init_master_worker`` and what dtrun has said to a plan: where nodes are to come from."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..runtime.host.launch_spec import Plan, plan_of_dtrun
from ..runtime.launch import registry
from ..runtime.launch.hosts import parse_hosts
from ..runtime.launch.rendezvous.rendezvous import Rendezvous, meeting


def _folder() -> str:
    """Where the script's own modules are: what python has put first on its path, if that is a folder of the user's."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    by_name = getattr(main, "__spec__", None) is not None  # python -m
    folder = os.getcwd() if by_name or file is None else os.path.dirname(os.path.realpath(file))
    return folder if folder in map(os.path.abspath, sys.path) else ""


def part_in(init_method: str | None, rank: int | None, world_size: int | None, timeout: float | None) -> Rendezvous | None:
    """Where this process, the master, meets nodes that come by themselves; None when it starts them.

    Does not return in a process that is a node by its rank. Raises ValueError for what says too little, StartError when
    a node cannot find its master.
    """
    if init_method is None:
        if rank is not None or world_size is not None:
            raise ValueError("rank and world_size go with an init_method, which says where all processes meet")
        return None
    found = meeting(init_method, rank, world_size)
    if found is not None and found.size == 1:
        raise ValueError(f"init_method {init_method!r}: a master and a node are 2 processes, and world_size is 1")
    if found is not None and found.rank:
        from ..runtime.launch.rendezvous.worker_cli import TIMEOUT, become_node

        become_node(found, TIMEOUT if timeout is None else timeout)
    return found


def _plan_to_meet(where: Rendezvous, nodes: int | tuple[int, int] | None) -> Plan:
    least, most = nodes if isinstance(nodes, tuple) else (nodes, nodes)
    most = most or (where.size or 1) - 1
    if not most:
        raise ValueError(f"how many nodes are to come to {where}? Give nodes, or rank and world_size")
    return Plan(
        "join", least=least or most, most=most, interface=where.interface, options=where.options, folder=_folder()
    )


def plan_for(
    launcher: str,
    hosts: str | Sequence[str] | None,
    interface: str | Sequence[str] | None,
    options: Mapping[str, str],
    timeout: float | None,
    nodes: int | tuple[int, int] | None = None,
    where: Rendezvous | None = None,
) -> Plan:
    """The plan that is meant. Arguments come before what dtrun has said.

    Raises ValueError for hosts that are none, or that the launcher has no use for, and for too few words about nodes
    that are to come to a meeting.
    """
    said = plan_of_dtrun()
    if where is not None:
        if launcher not in ("auto", "join") or hosts is not None:
            raise ValueError(f"with init_method {str(where)!r} nodes come by themselves; leave launcher and hosts out")
        plan = _plan_to_meet(where, nodes)
    elif launcher == "join" and (said is None or said.launcher != "join"):
        raise ValueError("launcher='join' needs an init_method, which says where nodes come to: 'tcp://host:port', ...")
    elif said is not None and hosts is None and launcher in ("auto", said.launcher):
        plan = said
    else:
        if launcher == "auto":
            launcher = registry.automatic if hosts is None else "ssh"
        most = nodes[1] if isinstance(nodes, tuple) else nodes or 0
        plan = Plan(launcher, most=most if launcher == "ray" else 0, folder=_folder())
        if launcher == "slurm":
            from ..runtime.launch.starters.slurm import spec_of_allocation

            plan = spec_of_allocation(plan, most)
    changes: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if hosts is not None:
        if plan.launcher in ("local", "mpi", "inproc"):
            raise ValueError(f"hosts={hosts!r}: launcher={plan.launcher!r} starts nodes on this machine only")
        changes["hosts"] = tuple(parse_hosts(hosts if isinstance(hosts, str) else ",".join(hosts)))
    if interface is not None:
        names = interface.split(",") if isinstance(interface, str) else interface
        changes["interface"] = tuple(name.strip() for name in names if name.strip())
    if options:
        changes["options"] = plan.options | {k: str(v) for k, v in options.items() if k != "python"}
        changes["python"] = options.get("python", plan.python)
    return msgspec.structs.replace(plan, **changes) if changes else plan
