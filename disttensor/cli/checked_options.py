"""Checks dtrun's options against each other, and derives from them the launch spec, the script and its settings.

parse(argv) --> options --> spec_of: where nodes come from; program_of: the script
                           (what it is told: host/precedence.py)
                        --> worker_options_of: this host only lends nodes to a script that runs elsewhere
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence

from ..runtime.host import mpi_env, slurm_env
from ..runtime.host.affinity import forwarded, gpus
from ..runtime.host.interfaces import listening_as
from ..runtime.host.launch_spec import Host, LaunchSpec
from ..runtime.host.output_options import Output
from ..runtime.host.precedence import setting
from ..runtime.host.private_files import make_private_folder
from ..runtime.launch import LaunchMethod, registry
from ..runtime.launch.hosts import parse_hosts, read_hostfile
from ..runtime.launch.method import load
from ..runtime.launch.rendezvous.rendezvous import Rendezvous
from ..runtime.process.spelling import did_you_mean
from ..runtime.protocol.channel_names import BUILTIN, names
from .options import parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options after all checks. ``launcher`` is None for nodes of this machine, ``hosts`` a list of Host or
    None, ``env`` a dict.

    Raises SystemExit: 2 after an error was printed, 0 after the help.
    """
    it = parser()
    options = it.parse_args(argv)
    options.launcher = None if options.launcher == "auto" else options.launcher
    try:
        options.hosts = _hosts(options)
        _check_launcher(options.launcher)
        _check_hosts(options)
        method_of(options).check_options(text.partition("=")[0] for text in options.launcher_option)
        _check_script(options)
        _check_backend(options.backend)
        _check_process_group(options)
        _check_spares(options)
        options.output = _output(options)
        options.env = forwarded(options.env or ())
    except (ValueError, OSError) as e:
        it.error(str(e))
    return options


def _check_backend(name: str | None) -> None:
    """Prints a warning about an unknown data channel, which the script would raise only after its imports, unless it
    registers the channel itself."""
    if name is not None and name not in BUILTIN and ":" not in name and name not in (known := names()):
        print(
            f"dtrun: --backend {name}: here is no data channel of that name (known: {', '.join(known)}), and unless "
            f"the script registers it its start will fail{did_you_mean(name, known)}",
            file=sys.stderr,
        )


def _check_launcher(name: str | None) -> None:
    """Raises ValueError for a launcher that dtrun knows nothing of, or whose nodes are threads of the script's."""
    try:
        known = name is None or not registry.launch_method(name).in_process
    except ValueError:
        known = False
    if not known:
        names = registry.launcher_names()
        raise ValueError(f"--launcher {name} is unknown (known: {', '.join(names)}){did_you_mean(name, names)}")


def method_of(options: argparse.Namespace) -> LaunchMethod:
    """Returns the row of the launch method that these options name."""
    return registry.launch_method(options.launcher or registry.automatic)


def _hosts(options: argparse.Namespace) -> list[Host] | None:
    slots = options.nodes or 1
    if options.hostfile is not None:
        return read_hostfile(options.hostfile, slots)
    return None if options.hosts is None else parse_hosts(options.hosts, slots)


def _check_hosts(options: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other."""
    if options.rdzv_endpoint is not None:
        if options.master_addr or options.master_port:
            raise ValueError("--rdzv-endpoint says the same as --master-addr and --master-port: give one of them")
        address, _, port = options.rdzv_endpoint.rpartition(":")
        if not address or not port.isdecimal():
            raise ValueError(f"--rdzv-endpoint is HOST:PORT, not {options.rdzv_endpoint!r}")
        options.master_addr, options.master_port, options.rdzv_endpoint = address.strip("[]"), int(port), None
    if options.master_port is not None and options.master_port > 65535:
        raise ValueError(f"--master-port {options.master_port}: a port is 65535 at most")
    most = options.nnodes[1]
    if options.hosts:
        if options.launcher is not None and method_of(options).hosts != "named":
            raise ValueError(
                "--hosts is for launchers that the hosts are named to, such as ssh; with --launcher "
                f"{options.launcher} the hosts are known from elsewhere"
            )
        if most > 1 and len(options.hosts) != most:
            raise ValueError(f"--nnodes {most} and {len(options.hosts)} hosts: leave --nnodes out")
        if options.node_rank is not None or options.master_addr is not None:
            raise ValueError("with --hosts dtrun reaches the hosts itself: leave --node-rank and --master-addr out")
        options.launcher = options.launcher or registry.BY_HOSTS
    elif method_of(options).hosts == "named" and method_of(options).starter:
        raise ValueError(f"--launcher {options.launcher} needs --hosts a:4,b:4 or --hostfile")
    elif most > 1 and options.launcher is None:
        options.launcher = registry.BY_JOINING
    elif options.launcher is None and not options.standalone:
        options.launcher = _around(options.backend)
    method = method_of(options)
    if options.standalone and (most > 1 or method.hosts != "here"):
        raise ValueError("--standalone is this machine only: leave out what names others")
    if method.hosts == "joining":
        _check_rendezvous(options)
    elif options.connection_file:
        raise ValueError("--connection-file is for hosts that join: say how many there can be in all, as --nnodes 1:4")
    if options.node_rank is not None and options.node_rank >= most:
        raise ValueError(f"--node-rank {options.node_rank}: with --nnodes {most} ranks are 0 to {most - 1}")
    if options.python and not method.python:
        raise ValueError("--python is for hosts that dtrun reaches itself, by --hosts")
    if method.counted and options.nnodes[0] != most:
        raise ValueError(
            f"--nnodes MIN:MAX is for hosts that join; {method.name.capitalize()} is asked for all nodes at once"
        )
    if options.ssh_options and "ssh_options" not in (method.options or ()):
        raise ValueError("--ssh-options is for --hosts")


def _around(backend: str | None) -> str | None:
    """Returns the launcher ("mpi", "slurm") that has started this process and others beside it; None if none has.

    On some clusters every srun sets mpiexec's variables, too.
    """
    task, place = slurm_env.one_of_several(), mpi_env.place() or (0, 1)
    if place[1] > 1 and (task is None or backend == "mpi" or (task.rank, task.size) != place):
        return "mpi"
    return None if task is None else "slurm"


def _check_rendezvous(options: argparse.Namespace) -> None:
    told = options.master_addr is not None, options.master_port is not None
    if options.connection_file and any(told):
        raise ValueError("--connection-file and --master-addr both say how hosts join: give one of them")
    if not options.connection_file and not all(told):
        raise ValueError("--nnodes needs --master-addr and --master-port, or --hosts, or --connection-file")
    if options.node_rank is None:  # then the same command line works on all hosts
        options.node_rank = 0 if options.connection_file or _is_here(options.master_addr) else -1
    if options.node_rank and options.connection_file:
        raise ValueError("a connection file is joined by: dtrun worker --connection-file FILE")


def _is_here(host: str) -> bool:
    try:
        return bool(listening_as(host))
    except ValueError:
        return False


def _output(options: argparse.Namespace) -> Output:
    if not options.log_dir:
        if options.tee or options.redirects:
            raise ValueError("--tee and --redirects say what goes to the files of --log-dir")
        return Output()
    output = Output(log_dir=os.path.abspath(options.log_dir), tee=options.tee, redirects=options.redirects)
    try:
        make_private_folder(output.log_dir)
    except OSError as e:
        raise ValueError(f"--log-dir {options.log_dir} cannot be made: {e.strerror}") from e
    return output


def _check_script(options: argparse.Namespace) -> None:
    if method_of(options).hosts == "joining" and options.node_rank:
        return  # a host that only joins; whatever script it is given runs on host 0
    if options.check:
        if not options.hosts:
            raise ValueError("--check needs hosts: --hosts a,b or --hostfile FILE")
        return
    if options.script is None:
        raise ValueError("no script was named")
    if options.module and options.no_python:
        raise ValueError("-m is python's, and --no-python is without")
    if options.no_python:
        if shutil.which(options.script) is None:
            raise ValueError(f"--no-python: there is no program {options.script!r}")
        if method_of(options).ranks_given:
            raise ValueError("--no-python: under mpiexec dtrun itself is the process that runs the script")
    elif not options.module and not os.path.isfile(options.script):
        raise ValueError(f"script {options.script!r} {_no_script(options.script)}")


def _no_script(name: str) -> str:
    """Returns why a name is no script, and which one may be meant."""
    if os.path.isdir(name):
        return "is a directory"
    folder, file = os.path.split(name)
    try:
        there = os.listdir(folder or ".")
    except OSError:
        there = []
    if meant := did_you_mean(file, there, "{}"):
        return f"does not exist{meant}"
    if re.fullmatch(r"\w+", name):
        return "does not exist, and dtrun has no command of that name (there is `dtrun worker`)"
    return "does not exist"


def _check_spares(options: argparse.Namespace) -> None:
    """Raises ValueError where no node can be started later, for whose place one would be kept free."""
    if options.spares and (why := method_of(options).no_restart):
        raise ValueError(f"--spares {options.spares}: {why}")


def _check_process_group(options: argparse.Namespace) -> None:
    """Raises ValueError for options about a master beside --process-group, which has none."""
    if not options.process_group:
        return
    if method_of(options).ranks_given:
        raise ValueError("--process-group: under mpiexec each process already runs the script; leave dtrun out")
    for name in ("simulate_cuda", "backend", "spares"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for nodes with a master, and --process-group has none")
    for name, can in (("encrypt", "encrypt"), ("checksum", "compare checksums of")):
        if setting(name, getattr(options, name), os.environ):
            said = f"--{name}" if getattr(options, name) else f"DISTTENSOR_{name.upper()}"
            raise ValueError(
                f"{said}: torch.distributed cannot {can} what ranks send each other (gloo, NCCL); the nodes of a "
                "script without --process-group can"
            )


def spec_of(options: argparse.Namespace) -> LaunchSpec:
    """Returns the launch spec, for the launcher and for the script. Raises ValueError where options are missing."""
    method = method_of(options)
    hosts, (least, most) = tuple(options.hosts or ()), options.nnodes
    slots = options.nodes or max(2, len(gpus()))
    joining = method.hosts == "joining"
    if joining:
        hosts = (Host(socket.gethostname(), slots),)
    spec = LaunchSpec(
        method.name,
        hosts=hosts,
        least=max(1, least * slots - (options.spares or 0)) if joining else 0,
        most=most * slots if joining or method.counted else 0,
        python=options.python or "",
        interface=tuple(name.strip() for name in (options.interface or "").split(",") if name.strip()),
        env=options.env,
        timeout=float(options.timeout or LaunchSpec("").timeout),
        silence=options.silence or LaunchSpec("").silence,
        options=_launcher_options(options),
        output=options.output,
        folder="" if method.hosts == "here" else _folder(options),
    )
    if not method.complete:
        return spec
    completed: LaunchSpec = load(method.complete)(
        spec, options.nodes or 0, most if most > 1 else 0, options.process_group
    )
    return completed


def sizes_of(options: argparse.Namespace, spec: LaunchSpec) -> tuple[int, int]:
    """Returns the number of nodes that the script has unless it asks for fewer, and of those that this host starts.

    Without a master the first one is 0.
    """
    named = options.nodes or max(2, len(gpus()))
    given = spec.least or spec.slots or named
    here = named if registry.launch_method(spec.launcher).hosts in ("here", "joining") else 0
    return 0 if options.process_group else given, here


def _launcher_options(options: argparse.Namespace) -> dict[str, str]:
    own = dict(text.partition("=")[::2] for text in options.launcher_option)
    if method_of(options).hosts == "joining":
        own |= _rendezvous(options).options
    return {**own, "ssh_options": options.ssh_options} if options.ssh_options else own


def _rendezvous(options: argparse.Namespace) -> Rendezvous:
    if options.connection_file:
        return Rendezvous("file", path=os.path.abspath(options.connection_file))
    return Rendezvous("tcp", options.master_addr, options.master_port)


def worker_options_of(options: argparse.Namespace) -> list[str] | None:
    """Returns the arguments of `dtrun worker` for a host that only lends nodes; None on the host that runs the
    script."""
    patience = ["--timeout", str(options.timeout)] if options.timeout else []
    method = method_of(options)
    if method.guest and (arguments := load(method.guest)(options.process_group)) is not None:
        return [*arguments, *patience]
    if method.hosts != "joining" or not options.node_rank:
        return None
    slots = options.nodes or max(2, len(gpus()))
    where = ["--master-addr", options.master_addr, "--master-port", str(options.master_port)]
    which = ["--rank", str(slots * options.node_rank)] if options.node_rank > 0 else []
    return ["--nproc-per-node", str(slots), *where, *which, *patience]


def program_of(options: argparse.Namespace) -> list[str]:
    """Returns the command line of the script."""
    if options.no_python:
        return [options.script, *options.arguments]
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *(["-m"] if options.module else []), options.script, *options.arguments]


def _folder(options: argparse.Namespace) -> str:
    """Returns the folder of the script's own modules, which python puts first on its path."""
    return os.getcwd() if options.module or options.check else os.path.dirname(os.path.realpath(options.script))
