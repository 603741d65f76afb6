"""Starting and ending a session."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

import msgspec
import torch

from ..dispatch import meta_inference
from ..errors import argument_checks
from ..errors.argument_checks import spelled
from ..runtime.channel import name_for_nodes
from ..runtime.channel.base import MASTER, ChannelContext
from ..runtime.channel.opened import Channels, maker
from ..runtime.channel.registry import usable_channel
from ..runtime.host import affinity
from ..runtime.host.addresses import LOOPBACK
from ..runtime.host.launcher import Exited, Launcher
from ..runtime.host.output_options import Output
from ..runtime.launch import get_launcher, launcher_names
from ..runtime.node.rng_lock import guarded
from ..runtime.node.worker import Worker
from ..runtime.protocol import bundle as b
from ..runtime.protocol.allow_list import AllowList
from ..runtime.protocol.errors import DisttensorError, NodeLost, StartError
from ..runtime.protocol.keys import curve_pair, job_id, job_secret
from ..runtime.transport.base import Hub
from ..runtime.transport.inproc import InprocHub
from ..runtime.transport.zmq import ZmqHub
from ..session import caches, current
from ..session.places import MAX_SLOTS
from ..session.session import Session
from ..streams import streams
from ..torch_backend import autocast, tested_versions
from ..torch_backend import register as device_backend
from ..verify import selfcheck
from . import notebook
from .launch_plan import part_in, plan_for

#: Seconds for which the end of a script waits for what its nodes still do.
AT_EXIT = 2.0


class SessionContext:
    """What ``init_master_worker`` returns: shuts the session down at the end of a ``with`` block."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> SessionContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            shutdown()
        else:
            _end(report=False)

    def __repr__(self) -> str:
        count = len(self._session.states)
        over = "" if current.current() is self._session else ", shut down"
        return f"<disttensor session, {count} node{'s'[: count != 1]}{over}>"


@spelled
def init_master_worker(
    backend: str = "auto",
    *,
    nodes: int | tuple[int, int] | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    simulate_cuda: int | None = None,
    threads: int | None = None,
    bind: str | None = None,
    env: Mapping[str, str] | None = None,
    allow_ops: Sequence[str] = (),
    functions: str = "any",
    security: str = "curve",
    launcher: str = "auto",
    hosts: str | Sequence[str] | None = None,
    interface: str | Sequence[str] | None = None,
    launcher_options: Mapping[str, str] | None = None,
    timeout: float | None = None,
    trusted_network: bool | None = None,
    log_dir: str | os.PathLike[str] = "",
    tee: str = "",
    redirects: str = "",
    exist_ok: bool = False,
    verify: float = 0,
) -> SessionContext:
    """Makes this process the master and gives it nodes; starts local ones unless ``dtrun`` has.

    Args:
        backend: the data channel that carries tensors: "tcp", another name (docs/CHANNELS.md), or "auto", which takes
            shared memory between processes that share it and TCP between others.
        nodes: how many nodes to start. Default: what dtrun says, else as many as the hosts have slots, else one per
            GPU, at least 2; all of mpiexec's. (2, 4): begin with 2, and let up to 4 join (``wait_for_nodes``).
        init_method: where nodes come to by themselves: "tcp://host:port", "env://", "file:///path" (docs/BOOTSTRAP.md).
            None or "local://": this process has them started.
        rank, world_size: with an init_method, when all processes run one script: rank 0 is the master, and in each
            other process this call makes it a node and does not return. Default: what the init_method says.
        simulate_cuda: give each node this many simulated CUDA devices (CPU memory with a placement of its own).
        threads: torch's intra-op threads per node. Default: its host's cores divided by the nodes there, at least 1.
        bind: what each node keeps to, by its place among those of its host: "gpu", its share of the GPUs; "core", of
            the cores too; "numa", of one socket's; "none". Default: what dtrun says, else "gpu". docs/BINDING.md.
        env: environment variables to set on the nodes. (They have imported torch by then: ``dtrun --env`` is before.)
        allow_ops: operators beyond torch's own that nodes may run, such as "torchvision::*".
        functions: which user functions nodes run: "any" or "none".
        security: "curve" (encrypted and authenticated), or "none", on loopback only.
        launcher: "local" processes; "ssh": those of ``hosts``; "mpi": the processes of `mpiexec -n 5 dtrun script.py`;
            "inproc": threads of this process, for tests; "auto": what dtrun says, else "ssh" if there are ``hosts``.
        hosts: where nodes run and how many: "a:4,b:4" or ["a:4", "b:4"]. Nodes 0 to 3 are on the first.
        interface: the interfaces, addresses or names of this machine by which other hosts reach it, as "eth0" or
            ["eth0", "10.0.0.1"]. Default: those on the way to the hosts.
        launcher_options: what only one launcher knows; for "ssh" (docs/SSH.md) "python", "ssh" and "ssh_options".
        timeout: seconds until nodes that have not answered are an error. Default: what dtrun says, else 60.
        trusted_network: whether nobody else can use the network between the hosts, so that channels that authenticate
            nobody (gloo, mpi, nccl) may be used between them. Default: what dtrun says, else no.
        log_dir: a directory in which node 1's output goes to `1/stdout.log` and `1/stderr.log`, behind what is there.
            Default: what dtrun says, else none.
        tee: what goes to these files and is shown too: "1" stdout, "2" stderr, "3" both, or node by node "0:3,1:2".
            With `log_dir` alone everything.
        redirects: what goes to these files only, in the same way.
        exist_ok: where a session is running, take that one, as a notebook's cell does that is run again. The other
            arguments then say nothing, but ``nodes`` has to be as many as there are.
        verify: the share of operations, 0 to 1, that are computed here as well and compared (docs/VERIFYING.md); the
            first that differs raises VerifyError.

    Returns: a context manager whose end calls ``shutdown``; it need not be used.

    Raises: RuntimeError when a session is running already, StartError when nodes could not be started (names the rank
    and its last output), TypeError for arguments of another kind, ValueError for such out of range or a backend that
    these nodes must not use, ImportError for one whose library is missing, DisttensorError for one that does not work
    here.
    """
    nodes = _checked(
        backend, nodes, simulate_cuda, threads, env, allow_ops, functions, security, hosts, interface, launcher_options,
        timeout,
    )  # fmt: skip
    if (running := current.current()) is not None:
        if not exist_ok:
            raise RuntimeError(
                "init_master_worker was called already in this process; call disttensor.shutdown() first, "
                "or take the session that is running with exist_ok=True"
            )
        if isinstance(nodes, int) and nodes != len(running.states):
            raise ValueError(
                f"nodes={nodes}: the session that is running has {len(running.states)}; "
                "call disttensor.shutdown() first"
            )
        return SessionContext(running)
    share = selfcheck.share_of(verify)
    where = part_in(init_method, rank, world_size, timeout)
    plan = plan_for(launcher, hosts, interface, launcher_options or {}, timeout, nodes, where)
    launcher = plan.launcher
    if launcher not in (known := ["inproc", "nearby", *launcher_names()]):
        known.remove("nearby")
        argument_checks.one_of("launcher", launcher, known)
    if interface is not None and launcher in ("local", "inproc"):
        raise ValueError(
            f"interface={interface!r} is where nodes of other hosts reach this one, and all nodes of "
            f"launcher={launcher!r} are here; leave it out, or name the hosts"
        )
    output = Output(log_dir=os.path.abspath(log_dir) if log_dir else "", tee=tee, redirects=redirects)
    if (tee or redirects) and not log_dir:
        raise ValueError("tee and redirects need a log_dir, where the files are to be")
    if log_dir and launcher == "inproc":
        raise ValueError("log_dir needs nodes that are processes: those of launcher='inproc' share this one's output")
    simulated = _number("DISTTENSOR_SIMULATE_CUDA", simulate_cuda, 0)
    name = os.environ.get("DISTTENSOR_BACKEND", backend) if backend == "auto" else backend
    channel_name = ("inproc" if backend == "auto" else backend) if launcher == "inproc" else name
    usable_channel(channel_name, MASTER)
    trusted = bool(_number("DISTTENSOR_TRUSTED_NETWORK", trusted_network, 0))
    if (bound := os.environ.get("DISTTENSOR_BIND", "") if bind is None else bind) not in ("", *affinity.KINDS):
        argument_checks.one_of("bind", bound, affinity.KINDS)

    starter: Launcher | None = None if launcher == "inproc" else get_launcher(launcher).of(plan)
    hub: Hub | None = None
    session: Session | None = None
    channels: Channels | None = None
    try:
        count = _count(nodes, starter, plan.least)
        job, secret = job_id(), job_secret()
        server = curve_pair() if security == "curve" and starter else ("", "")
        keys = starter.key_pairs(count) if starter else []
        if not server[0]:
            keys = [("", "")] * count
        if starter:
            node_keys = {rank: key[0] for rank, key in enumerate(keys)}
            hub = ZmqHub(starter.listen, server_keys=server if server[0] else None, node_keys=node_keys)
        else:
            hub = InprocHub(count)
        plain = b.Bundle(
            job=job,
            rank=-1,
            address=hub.address if isinstance(hub, ZmqHub) else "inproc",
            addresses=hub.addresses[1:] if isinstance(hub, ZmqHub) else (),
            server_key=server[0],
            backend=name_for_nodes(channel_name),
            nodes=count,
            local_size=count,
            simulate_cuda=simulated,
            threads=threads or 0,
            bind=bound,
            env={**plan.env, **(env or {})},
            allow_ops=tuple(allow_ops),
            functions=functions,
            sys_path=tuple(os.path.abspath(p) for p in sys.path),
            cwd=os.getcwd(),
        )
        bundles = [
            msgspec.structs.replace(plain, rank=rank, public_key=key[0], secret_key=key[1], local_rank=rank)
            for rank, key in enumerate(keys)
        ]
        if starter:
            if log_dir:
                starter.show(output)
            starter.start(bundles)
        meta_inference.warm(device_backend.register)  # while the nodes start
        listen = starter.listen if starter else (LOOPBACK,)
        context = ChannelContext(rank=MASTER, job=job, host=listen[0], further=listen[1:])
        channels = Channels(maker(context), channel_name, joint=False)
        session = Session(job, secret, hub, count, channels, starter, channel_name, trusted)
        session.allow = AllowList(allow_ops)
        session.plain = plain
        if starter is not None and starter.grows:
            session.most = max(count, min(starter.capacity or 0, MAX_SLOTS))
        if isinstance(hub, InprocHub):
            session.changes.enter_context(guarded())
            for bundle in bundles:
                worker = Worker(bundle, hub.spoke(bundle.rank))
                session.threads.append(threading.Thread(target=worker.serve, name=f"node {bundle.rank}", daemon=True))
                session.threads[-1].start()
        meet(session, range(count), plan.timeout)
        session.introduce()
    except BaseException:
        if session is not None:
            session.close(0)
        else:
            if channels is not None:
                channels.close()
            if hub is not None:
                hub.close()
            if starter is not None:
                starter.stop(0)
        raise
    if os.environ.get("DISTTENSOR_LAUNCH_BLOCKING", "0") not in ("", "0"):
        for outbox in session.link.outboxes:
            outbox.blocking = True
            outbox.urge(2)
    caches.drop_plans()
    current.set_session(session)
    autocast.choose_default(session.places)
    _register_once()
    selfcheck.begin(session, share)
    return SessionContext(session)


def _checked(
    backend: str,
    nodes: int | tuple[int, int] | None,
    simulate_cuda: int | None,
    threads: int | None,
    env: Mapping[str, str] | None,
    allow_ops: Sequence[str],
    functions: str,
    security: str,
    hosts: str | Sequence[str] | None,
    interface: str | Sequence[str] | None,
    launcher_options: Mapping[str, str] | None,
    timeout: float | None,
) -> int | tuple[int, int] | None:
    """``nodes``, a whole number if it is one. Raises TypeError, ValueError for arguments that nothing else looks at."""
    if not isinstance(backend, str):
        meant = f"; did you mean nodes={backend!r}?" if isinstance(backend, (int, tuple)) else ""
        raise TypeError(f"backend is the name of a data channel, such as 'tcp', not {backend!r}{meant}")
    for name, number, least in (("simulate_cuda", simulate_cuda, 0), ("threads", threads, 1)):
        if number is not None:
            argument_checks.whole_number(name, number, least)
    argument_checks.one_of("functions", functions, ("any", "none"))
    argument_checks.one_of("security", security, ("curve", "none"))
    argument_checks.texts("allow_ops", allow_ops, "torchvision::*")
    for name, some, example in (("hosts", hosts, "a:4"), ("interface", interface, "eth0")):
        if some is not None and not isinstance(some, str):
            argument_checks.texts(name, some, example)
    for name, words in (("env", env), ("launcher_options", launcher_options)):
        if words is not None:
            argument_checks.mapping(name, words)
    if timeout is not None:
        argument_checks.seconds("timeout", timeout)
    return None if nodes is None else argument_checks.span("nodes", nodes)


def _count(nodes: int | tuple[int, int] | None, starter: Launcher | None, least: int) -> int:
    """How many nodes to begin with."""
    capacity = starter.capacity if starter else None
    if isinstance(nodes, tuple):  # none come later where none come by themselves
        nodes = nodes[0 if starter is not None and starter.grows else 1]
    count = _number("DISTTENSOR_NODES", nodes, least or capacity or max(2, torch.cuda.device_count()))
    if count < 1:
        raise ValueError(f"nodes={count}: at least one node is needed")
    if starter and capacity is not None and count > capacity:
        raise ValueError(f"nodes={count}: {starter.too_many(count)}")
    return count


def _number(variable: str, given: int | None, default: int) -> int:
    if given is not None:
        return int(given)
    text = os.environ.get(variable, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"{variable}={text!r} is not a number") from None


def meet(session: Session, ranks: Sequence[int], timeout: float) -> None:
    """Waits for these nodes' hellos and checks that they speak as we do. Raises StartError."""
    link, deadline = session.link, time.monotonic() + timeout
    while missing := [rank for rank in ranks if rank not in link.hellos]:
        link.drain()
        if lost := next((found for found in link.losses if found.rank in ranks), None):
            where = f" on {lost.host}" if lost.host != "?" else ""
            raise StartError(f"node {lost.rank}{where} did not start: {lost.cause}" + _tail(lost.tail))
        if time.monotonic() > deadline:
            why = session.launcher.missing(missing) if session.launcher is not None else ""
            text = f"nodes {missing} of {len(ranks)} have not answered within {timeout} s"
            raise StartError(text + (why and f":\n{why}"))
        link.pause(0.005)  # short: it may be another thread that takes in what wakes this one
    for rank in ranks:
        hello = link.hellos[rank]
        if hello.protocol != b.PROTOCOL or hello.job != session.job:
            raise StartError(
                f"node {rank} speaks protocol {hello.protocol}, this master {b.PROTOCOL}: install one version"
            )
        mine, theirs = torch.__version__.split("+")[0], hello.torch.split("+")[0]
        if mine != theirs:
            raise StartError(f"node {rank} ({hello.host}) has torch {theirs}, this master {mine}: install one version")


def _tail(lines: Sequence[str]) -> str:
    return "\nits last output:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def shutdown() -> None:
    """Waits until the nodes have done all that was issued, and ends them. Without a session it does nothing.

    Proxies that are left can't be used any more. Ctrl-C ends the waiting.

    Raises what nothing has raised yet: the earliest error of an operation, else NodeLost for a node that was lost.
    """
    _end(report=True)


def _end(report: bool, timeout: float | None = None) -> None:
    session = current.current()
    if session is None:
        return
    error: BaseException | None = None
    if report:
        try:
            error = session.drain_and_collect_errors(timeout)
        except BaseException as e:  # Ctrl-C
            error = e
    selfcheck.end()
    current.set_session(None)
    streams.forget()
    session.close(2.0 if timeout is None else 0.5)
    caches.drop_plans()
    if error is not None:
        raise error


_registered = False


def _register_once() -> None:
    global _registered
    if _registered:
        return
    _registered = True
    tested_versions.say()
    atexit.register(_at_exit)
    notebook.attach()
    os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    """At the end of the script: an error or a loss that nobody noticed is printed and makes the exit code non-zero."""
    session = current.current()
    try:
        _end(report=True, timeout=AT_EXIT)
    except Exception as e:
        import traceback

        sys.stdout.flush()
        what = "a node was lost" if isinstance(e, NodeLost) else "an operation failed"
        print(f"disttensor: {what} and nothing in the script asked for its result:", file=sys.stderr)
        traceback.print_exception(e.with_traceback(None))
        sys.stderr.flush()
        if session is not None and session.launcher is not None:
            session.launcher.leave(1)
        os._exit(1)


def _in_child() -> None:
    """A forked child holds nothing of the session: its use raises, and its end ends nothing."""
    session = current.current()
    if session is not None:
        session.forked()
    atexit.unregister(_at_exit)


def is_initialized() -> bool:
    """Whether a session is running in this process."""
    return current.current() is not None


def node_count() -> int:
    """How many nodes the session has. Raises DisttensorError without one."""
    return len(current.session().states)


__all__ = ["DisttensorError", "Exited", "init_master_worker", "is_initialized", "node_count", "shutdown"]
