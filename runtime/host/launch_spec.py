"""Which nodes a root is to get from where: what the command line, or the script, has said about it. No secrets in it.

dtrun hands it to the root as the first frame, and to the script in DISTTENSOR_PLAN (JSON).
"""

from __future__ import annotations

import os

import msgspec

from .output_options import Output

#: Where dtrun tells the script its plan.
PLAN = "DISTTENSOR_PLAN"


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host, as ssh (or whoever starts something there) knows it, and how many nodes it is for."""

    name: str
    slots: int = 1


class Plan(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What the root gets nodes by."""

    launcher: str  #: which engine (registry.py)
    hosts: tuple[Host, ...] = ()
    least: int = 0  #: nodes (not hosts) to begin with; 0: as many as the master asks for
    most: int = 0  #: nodes there can be; 0: as many as the hosts have slots, or as are asked for
    python: str = ""  #: the interpreter on other hosts; empty: the path of the master's
    interface: tuple[str, ...] = ()  #: names or addresses on which the master is to listen; empty: found out
    env: dict[str, str] = {}  #: for the nodes
    timeout: float = 60.0  #: seconds for a host to be there
    options: dict[str, str] = {}  #: the launcher's own
    output: Output = Output()
    folder: str = ""  #: of the script: modules in it are for the nodes, too, wherever they are (tree/shipping.py)

    @property
    def slots(self) -> int:
        """How many nodes the named hosts are for."""
        return sum(host.slots for host in self.hosts)


def plan_of_dtrun() -> Plan | None:
    """What the dtrun around this process has said; None without one. Raises ValueError for what is no plan."""
    text = os.environ.get(PLAN, "")
    try:
        return msgspec.json.decode(text, type=Plan) if text else None
    except msgspec.DecodeError as e:
        raise ValueError(f"{PLAN}={text!r} is no plan of dtrun's: {e}") from e
