"""A launch method: one row says what starts the nodes, and what may be asked of it. Code asks rows, never names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import Any, Literal

from ..host.launcher import Launcher
from ..process.spelling import did_you_mean
from .tree.host_starter import HostStarter

#: The entry point group by which installed packages bring launch methods: `name = "module:row"`.
ENTRY_POINTS = "disttensor.launchers"


@dataclass(frozen=True)
class LaunchMethod:
    """A way to start nodes. A class is given as itself or as "module:Class", which is imported when it is needed.

    A method of which only ``starter`` is given, a CommandStarter, starts nodes on hosts by a command.
    """

    name: str  #: for ``init_master_worker(launcher=name)`` and ``dtrun --launcher name``
    _: KW_ONLY
    launcher: str | type[Launcher] = ""  #: the master's end; empty: one whose root runs ``starter``
    starter: str | type[HostStarter] = ""  #: the root's end, which starts agents; empty: the method has no root
    #: Where nodes are: on this machine; on hosts that the user names; on hosts that something else knows; or on hosts
    #: that join by themselves.
    hosts: Literal["here", "named", "found", "joining"] = "named"
    python: bool = True  #: the user may name the interpreter of other hosts
    options: tuple[str, ...] | None = None  #: the names of its own options; None: its classes look at them themselves
    counted: bool = False  #: it has to be told at first how many nodes there will be
    fork_server: bool = False  #: dtrun starts a fork server before the script
    in_process: bool = False  #: nodes are threads of the script's process, which no launcher starts
    ranks_given: bool = False  #: what started dtrun has started a process for each node: dtrun itself becomes one
    for_tests: bool = False  #: messages do not offer it
    restarts: bool = False  #: while a session runs a process can be started in the place of one that has ended
    #: "module:function", which completes the launch spec that dtrun's options make (slurm.py: ``complete``).
    complete: str = ""
    #: "module:function", which returns the arguments of `dtrun worker` where this process is one of several that
    #: something else has started, and is to be a node; else None (slurm.py: ``worker_options``).
    guest: str = ""

    def __post_init__(self) -> None:
        """Raises TypeError for a method that has nothing by which nodes start."""
        for what, base in (("launcher", Launcher), ("starter", HostStarter)):
            found = getattr(self, what)
            if not isinstance(found, str) and not (isinstance(found, type) and issubclass(found, base)):
                raise TypeError(f"{what} of launch method {self.name!r} has to be a {base.__name__}, not {found!r}")
        if not (self.launcher or self.starter or self.in_process):
            raise TypeError(f"launch method {self.name!r} has neither a launcher nor a starter")

    @property
    def no_restart(self) -> str:
        """The reason why no process can be started in a lost node's place; empty where one can."""
        return "" if self.restarts else f"launcher={self.name!r} can't start a node later"

    def check_options(self, names: Iterable[str]) -> None:
        """Raises ValueError for the name of an option that the method does not have."""
        if self.options is None:
            return
        known = sorted(self.options)
        for name in names:
            if name not in known:
                which = f"known: {', '.join(known)}" if known else "it has none"
                raise ValueError(f"launcher={self.name!r} has no option {name!r} ({which}){did_you_mean(name, known)}")


def load(found: str | Any) -> Any:
    """Returns what "module:name" names, the module relative to this package where it begins with a dot. Returns what is
    not text as it is."""
    if not isinstance(found, str):
        return found
    module, _, attribute = found.partition(":")
    return getattr(import_module(module, __package__), attribute)
