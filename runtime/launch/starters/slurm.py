"""Slurm: nodes are the tasks of a job step, which join the root over the network (join.py).

    srun -n 5 dtrun script.py                  task 0 runs the script; each other task is an agent with one node
    salloc -n 4; dtrun --launcher slurm ...    master --> root: SlurmStarter --srun--> tasks, all of them agents
                                                             <--CURVE, by the step's connection file-- as they come

The connection file is in the user's home, which the hosts of a cluster share; the root removes it when all have come.
srun tells early when a task cannot run, so nobody waits for its node until the time is over.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import socket
import subprocess
from functools import partial

import msgspec

from ...host import slurm_env
from ...host.launch_spec import Host, LaunchSpec
from ...process.lifetime import describe_exit, die_with_parent
from ...protocol.errors import StartError
from ..output.lines import shown_in_tail
from ..rendezvous.rendezvous import of_slurm, url_of
from ..rendezvous.worker_cli import worker_command
from ..tree.control import LaunchFailed
from ..tree.host_starter import RootPort
from ..tree.spawn import LAUNCHER_FD
from ..tree.stderr_tail import StderrTail
from .join import JoinLauncher, JoinStarter
from .root_launcher import RootLauncher

#: Seconds at the end for srun, whose tasks have ended: it waits for descriptors that they have left open.
_PATIENCE = 3.0
#: Seconds until a task's last output has arrived, when srun has reported its end.
_LAST_WORDS = 0.5

#: The line by which srun reports ended tasks: "srun: error: node1: tasks 3-4: Exited with exit code 2".
_ENDED = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.*)")


def complete(spec: LaunchSpec, per_host: int, hosts: int, process_group: bool) -> LaunchSpec:
    """Returns the launch spec of dtrun's options, for what Slurm has started: a task of several, or one that asks it.

    ``per_host`` and ``hosts`` are 0 where the options do not say them. Raises ValueError when nobody says how many.
    """
    if slurm_env.one_of_several() is None:
        return spec_of_allocation(spec, per_host=per_host, hosts=hosts)
    spec = spec_of_step(spec)
    if process_group:  # without a master this task, too, is a node
        size = spec.most + 1
        spec = msgspec.structs.replace(spec, hosts=(Host(socket.gethostname()),), least=size, most=size)
    return spec


def worker_options(process_group: bool) -> list[str] | None:
    """Returns the arguments of `dtrun worker` in each task of a step except the first, which runs the script."""
    task = slurm_env.one_of_several()
    if task is None or not task.rank:
        return None
    rank, *local = of_slurm().assigned
    # Slurm's places are counted without the master's task
    place = [] if process_group else ["--local", *map(str, local)]
    return ["--init-method", "slurm://", "--rank", str(rank), *place]


def spec_of_step(spec: LaunchSpec) -> LaunchSpec:
    """Returns the launch spec for task 0 of a step, of which all other tasks are nodes."""
    where = of_slurm()
    return _spec_of(spec, "join", (where.size or 1) - 1, where.interface, where.options | {"all_come": "yes"})


def spec_of_allocation(spec: LaunchSpec, nodes: int = 0, per_host: int = 0, hosts: int = 0) -> LaunchSpec:
    """Returns the launch spec for a master that has srun start so many nodes, or so many per host.

    By default as many as there are tasks. Raises ValueError when nobody says how many.
    """
    if slurm_env.one_of_several() is not None:
        raise ValueError(
            "srun has started several of this script: let the others be nodes, by `srun dtrun script.py` or by "
            "init_method='slurm://'"
        )
    options = {"srun": spec.options.get("srun", "")}
    if per_host:
        hosts = hosts or int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        nodes = per_host * hosts
        options["srun"] = f"--nodes={hosts} --ntasks-per-node={per_host} {options['srun']}"
    nodes = nodes or slurm_env.task_count()
    if not nodes:
        raise ValueError("how many nodes is Slurm to start? Say so (nodes=, dtrun -n), or run this inside of salloc")
    name = f"{os.environ.get('SLURM_JOB_ID', socket.gethostname())}-{secrets.token_hex(4)}"
    options["connection_file"] = slurm_env.connection_file(name)
    return _spec_of(spec, "slurm", nodes, slurm_env.own_addresses(), options)


def _spec_of(
    spec: LaunchSpec, launcher: str, nodes: int, interface: tuple[str, ...], options: dict[str, str]
) -> LaunchSpec:
    return msgspec.structs.replace(
        spec,
        launcher=launcher,
        least=nodes,
        most=nodes,
        interface=spec.interface or interface,
        options=spec.options | options,
    )


class SlurmLauncher(JoinLauncher):
    """Has srun start the nodes."""

    unfit = "Slurm has started no nodes"

    @classmethod
    def of(cls, spec: LaunchSpec) -> RootLauncher:
        """Takes what dtrun has said, or else asks the allocation that this process is in for ``spec.most`` nodes."""
        if "connection_file" not in spec.options:
            spec = spec_of_allocation(spec, spec.most)
        return super().of(spec)

    def too_many(self, count: int) -> str:
        return f"srun is asked for {self.capacity}"


class SlurmStarter(JoinStarter):
    """Runs srun, beside the tunnel server.

    Options of the launch spec: ``connection_file``; ``srun``, further arguments of srun's.
    """

    def __init__(self, root: RootPort) -> None:
        super().__init__(root)
        self._srun: subprocess.Popen[bytes] | None = None
        self._reasons: StderrTail | None = None
        self._pidfd = -1
        self._failed = False

    def begin(self) -> None:
        self._start()  # before there are threads: it forks
        super().begin()

    def waiting(self) -> str:
        return "\n  ".join([super().waiting(), *self._reason_lines])

    def end(self) -> None:
        super().end()
        if self._srun is not None:
            # Its tasks have ended, or do so as the tunnel server is closed: srun waits for them, and ends.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(_PATIENCE)
            if self._srun.poll() is None:
                self._srun.terminate()
        if self._reasons is not None:
            self._reasons.read()
            self._reasons.close()
        if self._pidfd >= 0:
            self.loop.unwatch(self._pidfd)
            os.close(self._pidfd)

    @property
    def _reason_lines(self) -> list[str]:
        return self._reasons.lines if self._reasons is not None else []

    def _start(self) -> None:
        me = os.getpid()
        err, err_in = os.pipe2(os.O_CLOEXEC)
        self._reasons = StderrTail(self.loop, err, self._look)
        environment = {name: value for name, value in os.environ.items() if name != LAUNCHER_FD}
        try:
            self._srun = subprocess.Popen(
                self.srun_command(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=err_in,
                stderr=err_in,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(me),
            )
        except OSError as e:
            raise StartError(f"srun cannot be run here: {e}") from e
        finally:
            os.close(err_in)
        self._pidfd = os.pidfd_open(self._srun.pid)
        self.loop.watch(self._pidfd, self._reap)

    def srun_command(self) -> list[str]:
        """Returns srun's command line.

        Everybody can read it: it says where the connection file is, not what is in it.
        """
        spec, count = self.spec, self.spec.most
        options = ["--ntasks", str(count), "--unbuffered", "--input=none", "--mpi=none", "--kill-on-bad-exit=0"]
        if "SLURM_JOB_ID" in os.environ:
            options.append("--overlap")  # with a step that this process may be in
        if count > slurm_env.task_count() > 0:
            options.append("--overcommit")
        worker = worker_command(
            "--init-method", url_of("slurm", spec.options["connection_file"]), "--timeout", f"{spec.timeout:g}"
        )
        if spec.python:
            worker[0] = spec.python
        return ["srun", *options, *shlex.split(spec.options.get("srun", "")), *worker]

    def _look(self, lines: list[bytes]) -> None:
        if self.came >= self.spec.most:
            self.root.remark("srun", lines)
            return
        for line in lines:
            if match := _ENDED.match(shown_in_tail(line)):
                why = f"node {match['tasks']} on {match['host']} has ended before it joined ({match['how']})"
                self.loop.later(_LAST_WORDS, partial(self._fail, why))
        self.root.reconsider()  # `waiting` has another text

    def _reap(self) -> None:
        code = self._srun.poll() if self._srun is not None else None
        if code is None:
            return
        self.loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._reasons is not None:
            self._reasons.read()
        if self.came < self.spec.most:
            self._fail(f"srun ended ({describe_exit(code)}) before all had joined")

    def _fail(self, why: str) -> None:
        """Reports a failure, once, so that nobody waits for nodes that never come."""
        if not self._failed:
            self._failed = True
            tail = "".join(f"\n  {line}" for line in self._reason_lines)
            self.root.send_news(LaunchFailed(f"{why}{tail and f'; what srun has said:{tail}'}"))
