"""The registry of launchers, by name. A new one is a file in starters/ and a line here, or ``register_launcher``."""

from __future__ import annotations

from importlib import import_module

from ..host.launcher import Launcher
from ..process.spelling import did_you_mean
from .tree.host_starter import HostStarter

#: name -> "module:class", the module relative to this package; imported when it is asked for
_BUILTIN = {
    "local": ".starters.local:LocalLauncher",
    "mpi": ".starters.mpi:MpiLauncher",
    "ssh": ".starters.ssh:SshLauncher",
    "nearby": ".starters.root_launcher:RootLauncher",  # for tests
    "join": ".starters.join:JoinLauncher",
    "ray": ".starters.ray:RayLauncher",
    "slurm": ".starters.slurm:SlurmLauncher",
}

#: The host starters, by name; the root imports only the one that its launch spec names.
_STARTERS = {
    "ssh": ".starters.ssh:SshStarter",
    "nearby": ".starters.piped:LocalAgentStarter",
    "join": ".starters.join:JoinStarter",
    "ray": ".starters.ray:RayStarter",
    "slurm": ".starters.slurm:SlurmStarter",
}

_registered: dict[str, type[Launcher]] = {}

#: The launcher that "auto" stands for in this process: where mpiexec started dtrun, dtrun makes it "mpi".
automatic = "local"


def register_launcher(name: str, cls: type[Launcher]) -> None:
    """Registers ``cls`` as ``name`` in this process: ``init_master_worker(launcher=name)`` has ``cls.of`` make one.

    Raises TypeError for something that isn't a Launcher, ValueError for a name that is taken by another class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Launcher)):
        raise TypeError(f"launcher {name!r} has to be a subclass of Launcher, not {cls!r}")
    if name in ("auto", "inproc", *_BUILTIN) or _registered.get(name, cls) is not cls:
        raise ValueError(f"the launcher name {name!r} is taken; known launchers: {', '.join(launcher_names())}")
    _registered[name] = cls


def launcher_names() -> list[str]:
    """Returns the known names, sorted; nothing is imported."""
    return sorted({*_BUILTIN, *_registered} - {"nearby"})


def get_launcher(name: str) -> type[Launcher]:
    """Returns the class of the launcher ``name``.

    Raises ValueError for an unknown name (it lists the known ones), ImportError when the launcher's library is missing.
    """
    if name in _registered:
        return _registered[name]
    if name not in _BUILTIN:
        known = launcher_names()
        raise ValueError(f"unknown launcher {name!r}; known launchers: {', '.join(known)}{did_you_mean(name, known)}")
    module, _, attribute = _BUILTIN[name].partition(":")
    found = getattr(import_module(module, __package__), attribute)
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise TypeError(f"launcher {name!r} is {found!r}, which is not a subclass of Launcher")
    return found


def get_starter(name: str) -> type[HostStarter]:
    """Returns the class of the host starter ``name``. Raises as ``get_launcher``."""
    if name not in _STARTERS:
        raise ValueError(f"unknown launcher {name!r}; a root knows: {', '.join(sorted(_STARTERS))}")
    module, _, attribute = _STARTERS[name].partition(":")
    found: type[HostStarter] = getattr(import_module(module, __package__), attribute)
    return found
