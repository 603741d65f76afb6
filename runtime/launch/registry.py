"""The registry of launch methods, by name: a row each says what its nodes are started by, and what it can do.

Three sources, the first that knows a name wins: the rows here, ``register_launch_method``, and the entry points
``disttensor.launchers`` of installed packages, which dtrun and the root find, too. A method's classes are imported when
they are asked for.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from ..host.launch_spec import LaunchSpec
from ..host.launcher import Launcher
from ..process.spelling import did_you_mean
from .method import ENTRY_POINTS, LaunchMethod, load
from .tree.host_starter import HostStarter

#: The launch methods that come with disttensor.
_METHODS = (
    LaunchMethod(
        "local",
        launcher=".starters.local:LocalLauncher",
        hosts="here",
        python=False,
        options=(),
        fork_server=True,
        restarts=True,
    ),
    LaunchMethod("ssh", starter=".starters.ssh:SshStarter", options=("ssh", "ssh_options"), restarts=True),
    LaunchMethod(
        "join",
        launcher=".starters.join:JoinLauncher",
        starter=".starters.join:JoinStarter",
        hosts="joining",
        python=False,
        options=(),
        restarts=True,
    ),
    LaunchMethod(
        "slurm",
        launcher=".starters.slurm:SlurmLauncher",
        starter=".starters.slurm:SlurmStarter",
        hosts="found",
        options=("srun",),
        counted=True,
        complete=".starters.slurm:complete",
        guest=".starters.slurm:worker_options",
    ),
    LaunchMethod(
        "ray",
        launcher=".starters.ray:RayLauncher",
        starter=".starters.ray:RayStarter",
        hosts="found",
        options=("address", "num_cpus", "num_gpus", "strategy"),
        counted=True,
    ),
    LaunchMethod(
        "mpi",
        launcher=".starters.mpi:MpiLauncher",
        hosts="found",
        python=False,
        options=(),
        ranks_given=True,
    ),
    LaunchMethod("inproc", hosts="here", python=False, options=(), in_process=True),
    LaunchMethod(
        "nearby",
        launcher=".starters.root_launcher:RootLauncher",
        starter=".starters.piped:LocalAgentStarter",
        python=False,
        for_tests=True,
        restarts=True,
    ),
)

_BUILTIN = {method.name: method for method in _METHODS}

_registered: dict[str, LaunchMethod] = {}

#: The method that "auto" stands for in this process: where mpiexec started dtrun, dtrun makes it "mpi".
automatic = "local"
#: The methods that "auto" stands for where hosts are named, and where dtrun runs on several hosts by itself.
BY_HOSTS, BY_JOINING = "ssh", "join"


def register_launch_method(method: LaunchMethod) -> None:
    """Registers a launch method in this process, for ``init_master_worker(launcher=method.name)``.

    An installed package has the entry point ``disttensor.launchers`` for its methods instead, which dtrun finds, too.

    Raises TypeError for something else, ValueError for a name that is taken by another method, or a host starter that
    another process could not import.
    """
    if not isinstance(method, LaunchMethod):
        raise TypeError(f"a launch method has to be a LaunchMethod, not {method!r}")
    name = method.name
    if name in ("auto", *_BUILTIN) or _registered.get(name, method) != method:
        raise ValueError(f"the launcher name {name!r} is taken; known launchers: {', '.join(launcher_names())}")
    _starter_text(method)
    _registered[name] = method


def register_launcher(name: str, cls: type[Launcher]) -> None:
    """Registers a launch method of which ``cls`` is the launcher, and no more is known: ``cls.of`` makes one.

    Raises TypeError for something that isn't a Launcher, ValueError for a name that is taken by another class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Launcher)):
        raise TypeError(f"launcher {name!r} has to be a subclass of Launcher, not {cls!r}")
    register_launch_method(LaunchMethod(name, launcher=cls))


def launcher_names() -> list[str]:
    """Returns the names of methods that start processes, sorted; nothing is imported."""
    known = [each.name for each in (*_METHODS, *_registered.values()) if not (each.for_tests or each.in_process)]
    return sorted({*known, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def launch_method(name: str) -> LaunchMethod:
    """Returns the row of the launch method ``name``; of its classes none is imported.

    Raises ValueError for an unknown name (it lists the known ones), TypeError for an entry point that is not a row,
    ImportError for one whose module is missing.
    """
    if (found := _BUILTIN.get(name) or _registered.get(name)) is not None:
        return found
    for point in entry_points(group=ENTRY_POINTS, name=name):
        brought = point.load()
        if not isinstance(brought, LaunchMethod) or brought.name != name:
            raise TypeError(
                f"the entry point {name!r} of {ENTRY_POINTS}, {point.value}, has to be LaunchMethod({name!r}, ...), "
                f"not {brought!r}"
            )
        return brought
    known = launcher_names()
    raise ValueError(f"unknown launcher {name!r}; known launchers: {', '.join(known)}{did_you_mean(name, known)}")


def get_launcher(name: str) -> type[Launcher]:
    """Returns the launcher's class of the method ``name``.

    Raises as ``launch_method``, and ImportError when the launcher's library is missing.
    """
    method = launch_method(name)
    if method.in_process:
        raise ValueError(f"launcher={name!r} starts no process")
    found = load(method.launcher or ".starters.command:CommandLauncher")
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise TypeError(f"launcher {name!r} is {found!r}, which is not a subclass of Launcher")
    return found


def starter_for_root(name: str) -> str:
    """Returns the host starter of a method that only this process knows, as the launch spec tells it to the root; empty
    for the others, which the root finds by their names."""
    return _starter_text(_registered[name]) if name in _registered else ""


def _starter_text(method: LaunchMethod) -> str:
    """Returns a host starter as "module:Class". Raises ValueError for one that another process cannot import."""
    if isinstance(method.starter, str):
        return method.starter
    text = f"{method.starter.__module__}:{method.starter.__qualname__}"
    if text.startswith("__main__:") or "<locals>" in text:
        raise ValueError(
            f"the process that starts agents can't import the starter of launch method {method.name!r} from {text}; "
            "define the class at the top of a module of its own and import it in the script"
        )
    return text


def get_starter(spec: LaunchSpec) -> type[HostStarter]:
    """Returns the class of the host starter that a launch spec names. Raises as ``get_launcher``."""
    found = load(spec.starter or launch_method(spec.launcher).starter or None)
    if not (isinstance(found, type) and issubclass(found, HostStarter)):
        raise ValueError(f"launcher={spec.launcher!r} has no host starter: a root can't start agents by it")
    return found
