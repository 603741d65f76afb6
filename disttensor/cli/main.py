"""dtrun: runs a script as the master, with its nodes beside it.

    dtrun ----fork server (imports torch meanwhile)----> nodes, output prefixed "[node 0] "
      |              ^ control socket
      +----> python script.py args   (DISTTENSOR_LAUNCHER_FD, DISTTENSOR_NODES, ...)

    dtrun --hosts a,b script.py: a root replaces the fork server, and has ssh, srun or Ray start agents on other hosts,
    each with a fork server of its own (see launch/tree/root.py)

    mpiexec -n 3 dtrun script.py: rank 0 runs the script, ranks 1 and 2 become nodes 0 and 1 (launch/starters/mpi.py)

A script works without dtrun too. With dtrun, the server imports torch while the script does, several settings can be
given from outside, and all processes that the script leaves behind are ended with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from ..runtime.host import descriptors, mpi_env
from ..runtime.host.affinity import gpus
from ..runtime.host.launch_spec import PLAN, LaunchSpec, text_of
from ..runtime.host.precedence import for_script, setting
from ..runtime.launch import LaunchMethod, registry
from ..runtime.launch.tree.control import Stop
from ..runtime.launch.tree.framed import frame
from ..runtime.launch.tree.spawn import LAUNCHER_FD, spawn_root, spawn_server, was_taken
from ..runtime.process.lifetime import adopt_orphans, die_with_parent, end_children, wait_any
from ..runtime.protocol.errors import StartError
from ..torch_backend import at_import
from .checked_options import method_of, parse, program_of, sizes_of, spec_of, worker_options_of

#: Seconds in which the processes that a script leaves behind may end by themselves. The fork server needs one.
_PATIENCE = 2.0

#: Seconds in which a root may end nodes on other hosts; and in which a root whose nodes another launcher has started
#: may tell them of the end. Both are more than the root takes itself (tree/root.py).
_ROOTS_END, _LINGER = 6.0, 8.0

#: Linux's si_code of signals that the kernel sends: Ctrl-C on the terminal.
_SI_KERNEL = 0x80

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs dtrun with these arguments (default: the process's) and returns its exit code. Never raises for bad ones."""
    try:
        options = parse(argv)
    except SystemExit as e:
        return int(e.code or 0)
    method = method_of(options)
    if method.ranks_given:
        return _run_by_mpi(options)
    if (guest := worker_options_of(options)) is not None:
        os.environ.update(options.env)
        return int(import_module("disttensor.runtime.launch.rendezvous.worker_cli").main(guest))
    try:
        spec = spec_of(options)
    except ValueError as e:
        print(f"dtrun: error: {e}", file=sys.stderr)
        return 2
    if options.check:
        return _check_hosts(options, spec)
    if why := descriptors.shortage_below(*sizes_of(options, spec)):  # before all is started that could not live
        print(f"dtrun: error: {why}", file=sys.stderr)
        return 1
    if options.process_group:
        return _run_everywhere(options, spec)
    environment = os.environ | for_script(options, spec) | {PLAN: text_of(spec)}
    environment.pop(LAUNCHER_FD, None)  # set by a dtrun around this one
    spawn: Callable[[], tuple[socket.socket, subprocess.Popen[bytes]]] | None = None
    if method.fork_server:
        spawn = partial(spawn_server, tied=True, output=options.output, environment=os.environ | spec.env)
    elif method.starter:
        spawn = partial(spawn_root, spec, tied=True)
    try:
        code = _run(
            program_of(options), environment, spawn, _patience(method, spec),
            "" if options.no_python else options.script,
        )  # fmt: skip
    except StartError as e:
        print(f"dtrun: error: {e}", file=sys.stderr)
        return 1
    return code if code >= 0 else 128 - code


def _patience(method: LaunchMethod, spec: LaunchSpec) -> float:
    if not method.starter:
        return 0.0
    return _LINGER if "all_come" in spec.options else _ROOTS_END


def _check_hosts(options: argparse.Namespace, spec: LaunchSpec) -> int:
    """Prints a line for each host, and returns 0 if all of them can take part in a job."""
    check = import_module("disttensor.cli.host_check")
    try:
        trusted = setting("trusted_network", options.trusted_network, os.environ)
        found = check.check_hosts(spec, float(options.timeout or check.PATIENCE), bool(trusted))
    except (StartError, ValueError, OSError) as e:
        print(f"dtrun: error: {e}", file=sys.stderr)
        return 1
    import_module("disttensor.runtime.process.tables").show(check.rows(found))
    return int(any(each.problems for each in found))


def _run_everywhere(options: argparse.Namespace, spec: LaunchSpec) -> int:
    """Runs the script on every node, without a master."""
    everywhere = import_module("disttensor.runtime.launch.torchrun_mode.everywhere")
    count = spec.least or spec.slots or options.nodes or max(2, len(gpus()))
    program = program_of(options)
    try:
        return int(
            everywhere.lead(
                spec, program if options.no_python else ["", *program[1:]], count, options.bind or "none",
                bool(options.trusted_network),
            )
        )  # fmt: skip
    except (StartError, ValueError) as e:
        print(f"dtrun: error: {e}", file=sys.stderr)
        return 1


def _run_by_mpi(options: argparse.Namespace) -> int:
    """Runs one of mpiexec's processes: rank 0 runs the script itself, the others become nodes and do not return."""
    die_with_parent(os.getppid())  # mpiexec, or its helper on this host
    first = (mpi_env.place() or (0, 1))[0] == 0
    try:
        world = mpi_env.world()
        if world.comm.size < 2:
            raise StartError("mpiexec has to start at least 2 processes, the master and a node: mpiexec -n 2 dtrun ...")
    except StartError as e:
        if first:
            print(f"dtrun: error: {e}", file=sys.stderr)
        return 1
    if not first:
        os.environ.update(options.env)
        at_import.drop_awaited()
        from ..runtime.launch.starters.mpi_node import serve

        serve(world, options.output)
    from ..runtime.launch.starters.mpi import lead

    os.environ.update(for_script(options, LaunchSpec(options.launcher)))
    registry.automatic = options.launcher
    code, used = lead(lambda: _run_here(options))
    if code == 0 and not used:
        _say_unused(options.script)
    return code


def _run_here(options: argparse.Namespace) -> int:
    """Runs the script in this process, as python itself would, and returns its exit code."""
    script = options.script
    sys.argv = [script, *options.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if options.module else os.path.dirname(os.path.abspath(script))
    try:
        if options.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return (e.code or 0) & 0xFF
        print(e.code, file=sys.stderr)
        return 1
    except BaseException as e:
        trace = e.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next  # not a frame of the script
        sys.excepthook(type(e), e.with_traceback(trace), trace)
        return 128 + signal.SIGINT if isinstance(e, KeyboardInterrupt) else 1
    return 0


def _run(
    program: list[str],
    environment: dict[str, str],
    spawn: Callable[[], tuple[socket.socket, subprocess.Popen[bytes]]] | None,
    patience: float = 0.0,
    name: str = "",
) -> int:
    """Runs the script and returns its return code, as subprocess counts it. No process is left when this returns.

    ``spawn`` starts the fork server or the root, which after the script has ``patience`` seconds to end by itself; None
    where the script's launcher needs neither.
    ``name``: the script's name, for the message to a script that has not used its nodes; "" for no message.
    """
    forwarded = {s for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN}  # as after nohup
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Blocked signals are not lost, whatever comes before the loop below; a handler could miss the script's start.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*forwarded, signal.SIGCHLD])
    adopt_orphans()
    me = os.getpid()

    def settle() -> None:
        die_with_parent(me)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        control, server = spawn() if spawn is not None else (None, None)
        with control or contextlib.nullcontext():
            fds = () if control is None else (control.fileno(),)
            if control is not None:
                environment = {**environment, LAUNCHER_FD: str(control.fileno())}
            try:
                script = subprocess.Popen(program, env=environment, pass_fds=fds, preexec_fn=settle)
            except OSError as e:
                raise StartError(f"{program[0]!r} cannot be run: {e.strerror}") from e
            code = _watch(script, forwarded)
            if control is not None:
                if name and code == 0 and not was_taken(control):
                    _say_unused(name)
                if code >= 0:  # it ended by itself, which the end of a socket does not show
                    with contextlib.suppress(OSError):
                        control.sendall(frame(Stop(0.0)))
        if server is not None:
            wait_any([server.pid], patience)
    finally:
        end_children(_PATIENCE)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if server is not None:
        server.poll()  # only tells the object that its process was reaped
    return code


def _say_unused(name: str) -> None:
    """Prints that a script has not used its nodes: it may have forgotten to ask for them."""
    with contextlib.suppress(OSError, ValueError):
        print(
            f"dtrun: {name} never called disttensor.init_master_worker(): its nodes were started in vain",
            file=sys.stderr,
            flush=True,
        )


def _watch(script: subprocess.Popen[bytes], forwarded: set[signal.Signals]) -> int:
    while True:
        info = signal.sigwaitinfo([*forwarded, signal.SIGCHLD])
        if (code := script.poll()) is not None:
            return code
        # The script is in the same process group, so that it can read the terminal: it has a Ctrl-C from there already.
        typed = info.si_signo == signal.SIGINT and info.si_code == _SI_KERNEL
        if info.si_signo in forwarded and not typed:
            script.send_signal(info.si_signo)
