"""The script's rendezvous with nodes that come by themselves, and the folder of the script's own modules."""

from __future__ import annotations

import os
import sys

from ..runtime.host.precedence import setting
from ..runtime.launch.rendezvous.rendezvous import Rendezvous, find_rendezvous


def script_folder() -> str:
    """Returns the folder of the script's own modules: the one that python has put first on its path; empty if that is
    no folder of the user's."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    by_name = getattr(main, "__spec__", None) is not None  # python -m
    folder = os.getcwd() if by_name or file is None else os.path.dirname(os.path.realpath(file))
    return folder if folder in map(os.path.abspath, sys.path) else ""


def rendezvous_of(
    init_method: str | None, rank: int | None, world_size: int | None, timeout: float | None
) -> Rendezvous | None:
    """Returns the rendezvous of this process, the master, with nodes that come by themselves; None when it starts them.

    Does not return in a process that is a node by its rank. Raises ValueError for arguments that say too little,
    StartError when a node cannot find its master.
    """
    if init_method is None:
        if rank is not None or world_size is not None:
            raise ValueError("rank and world_size go with an init_method, which says where all processes meet")
        return None
    found = find_rendezvous(init_method, rank, world_size)
    if found is not None and found.size == 1:
        raise ValueError(f"init_method {init_method!r}: a master and a node are 2 processes, and world_size is 1")
    if found is not None and found.rank:
        from ..runtime.launch.rendezvous.worker_cli import become_node

        become_node(found, setting("timeout", timeout, os.environ))
    return found
