"""The launch spec: which nodes a root is to get from where, as the command line, or the script, says. No secrets in it.

dtrun hands it to the root as the first frame, and to the script in DISTTENSOR_PLAN (JSON).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from ..process.renamed import old_names
from ..protocol.bundle import names_as_text, names_from_text
from ..protocol.errors import UNDECODABLE
from .output_options import Output
from .silence import Silence

#: The environment variable by which dtrun tells the script its launch spec.
PLAN = "DISTTENSOR_PLAN"


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host, as ssh (or another program that starts processes there) knows it, and its number of nodes."""

    name: str
    slots: int = 1


class LaunchSpec(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order by which the root gets nodes."""

    launcher: str  #: the name of the launch method (launch/registry.py)
    hosts: tuple[Host, ...] = ()
    least: int = 0  #: the number of nodes (not hosts) to begin with; 0: as many as the master asks for
    most: int = 0  #: the most nodes; 0: as many as the hosts have slots, or as are asked for
    python: str = ""  #: the interpreter on other hosts; empty: the path of the master's
    interface: tuple[str, ...] = ()  #: names or addresses on which the master is to listen; empty: found out
    env: dict[str, str] = {}  #: for the nodes
    timeout: float = 60.0  #: seconds within which a host has to be there
    options: dict[str, str] = {}  #: the launcher's own options
    output: Output = Output()
    silence: Silence = Silence()  #: when a host of which nothing is heard pauses, is lost, and ends
    folder: str = ""  #: the script's folder: modules in it are for the nodes, too, wherever they are (tree/shipping.py)
    starter: str = ""  #: "module:Class" of the method's host starter, where only the script's process knows the method

    @property
    def slots(self) -> int:
        """The number of nodes for which the named hosts have room."""
        return sum(host.slots for host in self.hosts)


def text_of(spec: LaunchSpec) -> str:
    """Returns a launch spec as the text that ``spec_of_dtrun`` reads from the environment."""
    return msgspec.json.encode(names_as_text(spec)).decode()


def spec_of_dtrun() -> LaunchSpec | None:
    """Returns the launch spec of the dtrun around this process; None without one. Raises ValueError for a bad one."""
    text = os.environ.get(PLAN, "")
    try:
        return names_from_text(msgspec.json.decode(text, type=LaunchSpec)) if text else None
    except UNDECODABLE as e:
        raise ValueError(f"{PLAN}={text!r} is not a plan of dtrun's: {e}") from e


if not TYPE_CHECKING:  # to type checkers, any name would be there
    __getattr__ = old_names(__name__, {"Plan": "LaunchSpec", "plan_of_dtrun": "spec_of_dtrun"})
