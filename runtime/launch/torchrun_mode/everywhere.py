"""Runs an ordinary program of torch.distributed on every node, as torchrun does: ``dtrun --process-group``.

    dtrun ----launcher (any)----> fork server --> node: this module's ``main`` --exec--> python script.py  RANK=0 ...
      |                                                                                      | init_process_group()
      +----> store_host.py, which holds torch's TCPStore  <----------------------------------+ MASTER_ADDR, MASTER_PORT

There is no master: nodes get no commands. The store listens on the address by which nodes reach this host, which on one
host is the loopback one. It authenticates nobody, as gloo and NCCL don't, so between hosts the network has to be
trusted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...host import affinity, descriptors
from ...host.launch_spec import LaunchSpec
from ...host.launcher import Exited, Started
from ...process.lifetime import adopt_orphans, die_with_parent, end_children
from ...protocol.bundle import Bundle, as_name, as_text, read_bundle
from ...protocol.errors import StartError
from ...protocol.keys import job_id
from ..registry import get_launcher, launch_method
from ..starters.server_launcher import ServerLauncher

ENTRY = "disttensor.runtime.launch.torchrun_mode.everywhere:main"

#: Seconds for the other nodes to end by themselves: when one has failed, when one has because another's end was seen
#: (whose process may take a while to end), and after Ctrl-C.
_GRACE, _AFTER_OTHERS, _AFTER_SIGNAL = 1.0, 3.0, 5.0
#: Seconds that end_children has to wait for the store's host.
_PATIENCE = 1.0

#: Errors of gloo and NCCL where another rank has ended. Such a node may be gone before the other's process is.
_OF_OTHERS = re.compile(r"Connection (closed|reset) by peer|[Ss]ocket [Cc]losed|remote process exited|Broken pipe")

_STORE_HOST = os.path.join(os.path.dirname(__file__), "store_host.py")


def main(lifeline: int) -> int:
    """Makes a node the program. Does not return unless there is no such program."""
    bundle = read_bundle(lifeline)
    if bundle.cwd:
        with contextlib.suppress(OSError):  # it is not there, or this host's user may not enter it
            os.chdir(as_name(bundle.cwd))
    bound = affinity.apply(bundle)
    if bound.said:
        print(f"disttensor: {bound.said}", file=sys.stderr)
    for name, value in _torchrun_variables(bundle).items():
        os.environ[name] = value
    for name, value in _default_environment(bound.threads).items():
        os.environ.setdefault(name, value)
    program = [as_name(bundle.program[0]) or sys.executable, *map(as_name, bundle.program[1:])]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as e:
        print(f"dtrun: {program[0]!r} cannot be run: {e.strerror}", file=sys.stderr)
        return 127


def _torchrun_variables(bundle: Bundle) -> dict[str, str]:
    """Returns torchrun's variables. MASTER_ADDR, MASTER_PORT and related ones are the same for all (``lead``)."""
    rank, size = str(bundle.rank), str(bundle.nodes)
    # programs say torch.cuda.set_device(LOCAL_RANK): of its own GPUs, where somebody has divided those
    alone = affinity.this_host().own_gpus
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": "0" if alone else str(bundle.local_rank),
        "LOCAL_WORLD_SIZE": "1" if alone else str(bundle.local_size),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
    }


def _default_environment(threads: int) -> dict[str, str]:
    """Returns defaults for variables that are not set: of threads, of the network, and for unbuffered output.

    Output of a program leaves at once, as it would on a terminal.
    """
    found = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if os.environ.get("MASTER_ADDR", "").startswith("127."):
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return found


@dataclass
class _Course:
    """The events so far."""

    running: set[int]
    begun: set[int]
    failed: list[Exited] = field(default_factory=list)
    told: int = 0  #: the signal that dtrun was sent

    @property
    def culprits(self) -> list[Exited]:
        """The nodes that have not failed because of others."""
        return [one for one in self.failed if not any(map(_OF_OTHERS.search, one.tail))]


def lead(spec: LaunchSpec, program: Sequence[str], count: int, bind: str, trusted: bool) -> int:
    """Runs ``program`` on ``count`` nodes; returns the exit code.

    That is the code of the node that failed first, or 128 + the signal that killed it, or that dtrun was sent. The
    first word of ``program`` is empty for python.

    Raises StartError when nodes can't be started, ValueError for hosts between which it must not run.
    """
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        stack.callback(end_children, _PATIENCE)
        woken = stack.enter_context(_signals())
        launcher = _launcher(spec)
        stack.callback(launcher.stop, 0)
        _check_network(launcher.listen, trusted)
        host, port, store = stack.enter_context(_store(launcher.listen[0]))
        launcher.show(spec.output)
        env = {as_text(name): as_text(value) for name, value in spec.env.items()} | {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": job_id(),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
        bundles = [
            Bundle(
                "", rank, "", nodes=count, local_rank=rank, local_size=count, threads=0, bind=bind, env=env,
                program=tuple(map(as_text, program)), cwd=as_text(os.getcwd()),
            )
            for rank in range(count)
        ]  # fmt: skip
        launcher.start(bundles)
        course = _Course(set(range(count)), set())
        _follow(launcher, woken, store, course, time.monotonic() + spec.timeout)
        launcher.stop(0)
    return _verdict(course)


def _launcher(spec: LaunchSpec) -> ServerLauncher:
    if launch_method(spec.launcher).fork_server:
        from ..starters.local import LocalLauncher

        return LocalLauncher(ENTRY, ())  # the program imports torch itself, if it wants to
    found = get_launcher(spec.launcher).of(spec)
    if not isinstance(found, ServerLauncher):
        raise StartError(f"--process-group does not go with --launcher {spec.launcher}")
    found.entry = ENTRY
    return found


def _check_network(addresses: Sequence[str], trusted: bool) -> None:
    others = [address for address in addresses if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if others and not trusted:
        raise ValueError(
            "torch.distributed authenticates nobody, and the nodes are on several hosts. If nobody else can use the "
            "network between them, say so: --trusted-network"
        )


@contextlib.contextmanager
def _store(host: str) -> Iterator[tuple[str, int, int]]:
    """Starts the host of torch's store, which ends with its standard input.

    Yields the address and port where it listens, and a descriptor that is readable when its process has ended.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    me = os.getpid()
    with socket.create_server((host, 0), family=family, backlog=1024) as sock:  # from now on ranks can call
        process = subprocess.Popen(
            [sys.executable, "-P", _STORE_HOST, str(sock.fileno())],
            stdin=subprocess.PIPE, pass_fds=(sock.fileno(),), start_new_session=True,
            preexec_fn=lambda: die_with_parent(me),
        )  # fmt: skip
        address, port = sock.getsockname()[:2]
    pidfd = os.pidfd_open(process.pid)
    try:
        yield address, port, pidfd
    finally:
        os.close(pidfd)
        process.communicate()


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Yields a descriptor from which the numbers of signals can be read that would end this process."""
    out, into = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    try:
        yield out
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(out)
        os.close(into)


def _follow(launcher: ServerLauncher, woken: int, store: int, course: _Course, deadline: float) -> None:
    """Returns when all nodes have ended, or some time after one has failed or after a signal.

    Raises StartError when a node has not begun by ``deadline``, or the store is gone.
    """
    until: float | None = deadline
    ending = False
    while course.running:
        left = None if until is None else max(0.0, until - time.monotonic())
        watched = [launcher.fileno(), woken, *([] if course.told else [store])]
        ready = descriptors.wait_readable(watched, left)
        if store in ready:
            raise StartError("torch's store is gone, by which the ranks find each other; what ended it stands above")
        for event in launcher.events() if launcher.fileno() in ready else ():
            if isinstance(event, Started):
                course.begun.add(event.rank)
            elif isinstance(event, Exited):
                course.running.discard(event.rank)
                if event.code:
                    course.failed.append(event)
        if until == deadline and course.running <= course.begun:
            until = None
        if course.failed and not ending:
            until, ending = time.monotonic() + _AFTER_OTHERS, True
        if until is not None and course.culprits and not course.told:
            until = min(until, time.monotonic() + _GRACE)
        if woken in ready:
            number = max(os.read(woken, 64))
            if course.told:
                return
            course.told, until, ending = number, time.monotonic() + _AFTER_SIGNAL, True
            for rank in course.running:
                launcher.kill(rank, number)
        elif until is not None and time.monotonic() >= until:
            if not ending:
                late = sorted(course.running - course.begun)
                raise StartError(f"nodes {late} have not begun in time\n{launcher.missing(late)}")
            return


def _verdict(course: _Course) -> int:
    if course.told:
        return 128 + course.told
    if not course.failed:
        return 0
    first = (course.culprits or course.failed)[0]
    where = f" on {first.host}" if first.host else ""
    print(f"dtrun: error: node {first.rank}{where} failed first: {first.cause}", file=sys.stderr)
    if first.tail:
        print("its last output:", *(f"  {line}" for line in first.tail), sep="\n", file=sys.stderr)
    return first.code if first.code > 0 else 128 - first.code
