"""From the arguments of ``init_master_worker`` and what dtrun has said to a plan: where nodes are to come from."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .runtime.launch import registry
from .runtime.launch.hosts import parse_hosts
from .runtime.launch.plan import Plan, plan_of_dtrun


def _folder() -> str:
    """Where the script's own modules are: what python has put first on its path, if that is a folder of the user's."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    by_name = getattr(main, "__spec__", None) is not None  # python -m
    folder = os.getcwd() if by_name or file is None else os.path.dirname(os.path.realpath(file))
    return folder if folder in map(os.path.abspath, sys.path) else ""


def plan_for(
    launcher: str,
    hosts: str | Sequence[str] | None,
    interface: str | Sequence[str] | None,
    options: Mapping[str, str],
    timeout: float | None,
) -> Plan:
    """The plan that is meant. Arguments come before what dtrun has said.

    Raises ValueError for hosts that are none, or that the launcher has no use for.
    """
    said = plan_of_dtrun()
    if said is not None and hosts is None and launcher in ("auto", said.launcher):
        plan = said
    else:
        if launcher == "auto":
            launcher = registry.automatic if hosts is None else "ssh"
        plan = Plan(launcher, folder=_folder())
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
