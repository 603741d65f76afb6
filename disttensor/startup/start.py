"""Starts and ends a session."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType

import msgspec
import torch

from ..dispatch import meta_inference
from ..dispatch.call_site import here
from ..errors import late_warnings, tracebacks
from ..errors.argument_checks import elsewhere, spelled
from ..runtime.channel import name_for_nodes
from ..runtime.channel.base import MASTER, ChannelContext
from ..runtime.channel.opened import Channels, maker
from ..runtime.channel.registry import check_protection, usable_channel
from ..runtime.host import descriptors
from ..runtime.host.addresses import LOOPBACK
from ..runtime.host.job_sockets import may_be_asked
from ..runtime.host.launch_spec import spec_of_dtrun
from ..runtime.host.launcher import Exited, Launcher
from ..runtime.launch import get_launcher, registry
from ..runtime.master.failures import line_of
from ..runtime.master.link import Link
from ..runtime.node.rng_lock import guarded
from ..runtime.node.worker import NodeWorker
from ..runtime.process import undertakings
from ..runtime.process.cells import script_name
from ..runtime.process.observing import ScriptSeam
from ..runtime.process.signals import Interrupts
from ..runtime.protocol import bundle as b
from ..runtime.protocol.allow_list import AllowList
from ..runtime.protocol.errors import DisttensorError, NodeLost, StartError
from ..runtime.protocol.keys import curve_pair, job_id, job_secret
from ..runtime.transport.inproc import InprocHub
from ..runtime.transport.sockets import SIDE_UNREAD
from ..runtime.transport.zmq import ZmqHub
from ..session import caches, current
from ..session.meeting import meet
from ..session.places import MAX_SLOTS
from ..session.session import Session
from ..streams import streams
from ..tasks.nodes import nodes_of
from ..torch_backend import autocast, tested_versions
from ..torch_backend import register as device_backend
from ..verify import selfcheck
from . import notebook
from .rendezvous import rendezvous_of, script_folder
from .served_metrics import serve_metrics
from .settings import Settings, check
from .traced import begin_trace, end_trace
from .window import open_window

_log = logging.getLogger("disttensor")

#: Seconds for which the end of a script waits for commands that its nodes still run; it waits for checkpoints as long
#: as they take.
AT_EXIT = 2.0


class SessionContext:
    """The result of ``init_master_worker``: a context manager that shuts the session down at the end of its ``with``
    block.

    After an error in the block it waits for checkpoints under way only, and raises no error of what else is.
    """

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
            _end_session(report=False)

    def __repr__(self) -> str:
        count = len(self._session.nodes)
        over = "" if current.current() is self._session else ", shut down"
        return f"<disttensor session, {count} node{'s'[: count != 1]}{over}>"

    def _repr_html_(self) -> str:
        """Returns the session and its nodes as a table, for a notebook."""
        there = nodes_of(self._session)
        return there._repr_html_(repr(self)[1:-1])


#: Keywords by which other libraries, and dtrun, call what arguments of this one mean.
_ELSEWHERE = {
    **{name: f'launcher_options={{"{name}": ...}}' for name in ("python", "ssh", "ssh_options")},
    **dict.fromkeys(("n", "np", "nprocs", "nproc_per_node", "num_nodes", "workers", "num_workers"), "nodes="),
}


@elsewhere(**_ELSEWHERE)
@spelled
def init_master_worker(
    backend: str = "auto",
    *,
    nodes: int | tuple[int, int] | None = None,
    spares: int | None = None,
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
    silence: tuple[float, float, float] | None = None,
    trusted_network: bool | None = None,
    encrypt: bool | None = None,
    checksum: bool | None = None,
    log_dir: str | os.PathLike[str] = "",
    tee: str = "",
    redirects: str = "",
    exist_ok: bool = False,
    verify: float = 0,
) -> SessionContext:
    """Makes this process the master and gives it nodes; starts local ones unless ``dtrun`` has. Waits until they
    answer.

        with dt.init_master_worker(nodes=2):
            x = torch.ones(3, device="node:1")

    Args:
        backend: the data channel that carries tensors: "tcp", another name (docs/CHANNELS.md), or "auto", which takes
            shared memory between processes that share it and TCP between others.
        nodes: how many nodes to start. Default: the number that dtrun gives, else as many as the hosts have slots, else
            one per GPU, at least 2; all of mpiexec's. (2, 4): begin with 2, and let up to 4 join (``wait_for_nodes``).
        spares: how many places more are kept free, for ``dt.nodes()[k].replace()`` (docs/RECOVERY.md). Nothing runs in
            one, and it has a share of its host's GPUs and cores. Default: dtrun's, else 0.
        init_method: the rendezvous of nodes that come by themselves: "tcp://host:port", "env://", "file:///path"
            (docs/BOOTSTRAP.md). None or "local://": this process has them started.
        rank, world_size: with an init_method, when all processes run one script: rank 0 is the master, and in each
            other process this call makes it a node and does not return. Default: the init_method's values.
        simulate_cuda: give each node this many simulated CUDA devices (CPU memory with a placement of its own).
        threads: torch's intra-op threads per node. Default: its host's cores divided by the nodes there, at least 1.
        bind: each node's affinity, by its place among the nodes of its host: "gpu", its share of the GPUs; "core", its
            share of the cores as well; "numa", its share of the GPUs and one socket's cores; "none". Default: dtrun's,
            else "gpu". docs/BINDING.md.
        env: environment variables to set on the nodes. Nodes have imported torch by then; those of ``dtrun --env`` are
            set before.
        allow_ops: operators beyond torch's own that nodes may run, such as "torchvision::*".
        functions: which user functions nodes run: "any" or "none".
        security: "curve" (encrypted and authenticated), or "none", on loopback only.
        launcher: "local" processes; "ssh": those of ``hosts``; "mpi": the processes of `mpiexec -n 5 dtrun script.py`;
            "inproc": threads of this process, for tests, which draw from this process's generator; "auto": dtrun's
            launcher, else "ssh" if there are ``hosts``, else "local". Also "slurm", "ray", and names that installed
            packages or ``register_launch_method`` bring (docs/LAUNCHING.md).
        hosts: the hosts of nodes, and how many run on each: "a:4,b:4" or ["a:4", "b:4"]. Nodes 0 to 3 are on the first.
        interface: the interfaces, addresses or names of this machine by which other hosts reach it, as "eth0" or
            ["eth0", "10.0.0.1"]. Default: those on the way to the hosts.
        launcher_options: options of one launcher only; for "ssh" (docs/SSH.md) "python", "ssh" and "ssh_options".
        timeout: seconds without a sign that any node gets on, after which those that have not answered are an error.
            Default: dtrun's, else 60.
        silence: seconds (pause, lost, lease) without a word between this host and another one, after which its nodes
            stop computing until they hear something, are lost to the script, and end. A script that stands still
            (Ctrl-Z) loses nobody. Default: dtrun's, else (10, 15, 60).
        trusted_network: whether nobody else can use the network between the hosts, so that tensors may cross it in
            clear, and channels that authenticate nobody (gloo, mpi, nccl) may be used there. Default: dtrun's, else no.
        encrypt: True encrypts tensors between all processes, those of one host too, which needs `pip install
            'disttensor[encrypt]'` everywhere; what goes through shared memory stays in clear. False never does, and is
            refused between hosts unless the network is trusted. Default: dtrun's, else those between hosts are
            encrypted unless the network is trusted, and it is an error where they can't be.
        checksum: whether the receiver compares a checksum of each tensor that is not encrypted: one that was altered on
            its way, by accident, is an error then. Default: dtrun's, else no.
        log_dir: a directory in which node 1's output goes to `1/stdout.log` and `1/stderr.log`, behind earlier output.
            Default: dtrun's, else none.
        tee: the output that goes to these files and is shown too: "1" stdout, "2" stderr, "3" both, or node by node
            "0:3,1:2". With `log_dir` alone everything.
        redirects: the output that goes to these files only, in the same form.
        exist_ok: use a session that is running already, as for a notebook's cell that is run again. The other
            arguments have no effect then, but ``nodes`` has to be the number of its nodes.
        verify: the share of operations, 0 to 1, that are computed here as well and compared (docs/VERIFYING.md); the
            first that differs raises VerifyError.

    Returns: a context manager whose end calls ``shutdown``; it need not be used.

    Raises: RuntimeError when a session is running already, StartError when nodes could not be started (names the rank
    and its last output), TypeError for arguments of another kind, ValueError for such out of range or a backend that
    these nodes must not use, ImportError for one whose library is missing, DisttensorError for one that does not work
    here.
    """
    arguments = dict(locals())
    nodes = check(arguments)
    _refuse_in_a_child()
    if (running := current.current()) is not None:
        if not exist_ok:
            raise RuntimeError(
                "init_master_worker was called already in this process; call disttensor.shutdown() first, "
                "or take the session that is running with exist_ok=True"
            )
        if isinstance(nodes, int) and nodes != len(running.nodes):
            raise ValueError(
                f"nodes={nodes}: the session that is running has {len(running.nodes)}; call disttensor.shutdown() first"
            )
        return SessionContext(running)
    share = selfcheck.share_of(verify)
    settings = Settings.of(
        arguments,
        os.environ,
        spec_of_dtrun(),
        where=rendezvous_of(init_method, rank, world_size, timeout),
        automatic=registry.automatic,
        folder=script_folder(),
    )
    if text := settings.unheard(os.environ):
        _log.warning("%s: %s", line_of(here()), text)
    try:
        with contextlib.ExitStack() as undo:
            session = _start(settings, undo)
            undo.pop_all()
    except Exception as e:
        if descriptors.is_shortage(e):
            raise StartError(f"{e}, while a session begins: no file descriptors are left; {descriptors.limit()}") from e
        raise
    caches.drop_plans()
    current.set_session(session)
    autocast.choose_default(session.places)
    _register_once()
    selfcheck.begin_comparing(session, share)
    open_window(session, os.environ)
    serve_metrics(session, os.environ)
    begin_trace(session, os.environ)
    return SessionContext(session)


def _refuse_in_a_child() -> None:
    """Raises RuntimeError where multiprocessing runs the script once more, in a process that it has started, to have
    its functions and classes there."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "init_master_worker: this is a child of multiprocessing, by spawn or forkserver (such as a worker of a "
            "DataLoader), which runs the script's file once more; a child starts no session. Put what only the script "
            'is to do below `if __name__ == "__main__":`, or start children by fork: multiprocessing_context="fork" of '
            'a DataLoader, multiprocessing.set_start_method("fork")'
        )


def _start(settings: Settings, undo: contextlib.ExitStack) -> Session:
    """Starts nodes and returns a session with them, which is not yet the process's. ``undo`` gets what has to be undone
    if that fails."""
    check_protection(settings.channel, usable_channel(settings.channel, MASTER).capabilities, settings.protection)
    interrupts = Interrupts()
    undo.callback(interrupts.restore)
    interrupts.look()
    starter: Launcher | None = None
    if not settings.method.in_process:
        _check_descriptors(settings)
        starter = get_launcher(settings.method.name).of(settings.spec)
        undo.callback(starter.stop, 0)
    count = _count(settings.nodes, starter, settings.spec.least, settings.spares)
    if starter is not None and (why := descriptors.shortage(count)):  # libzmq ends a process that has none left
        raise StartError(why)
    job, secret = job_id(), job_secret()
    hub, side, more, bundle, bundles = _hub(settings, starter, count, job, undo)
    if starter is not None:
        if settings.output.log_dir:
            starter.show(settings.output)
        starter.start(bundles)
    meta_inference.warm(device_backend.register)  # while the nodes start
    listen = starter.listen if starter is not None else (LOOPBACK,)
    links: list[weakref.ref[Link]] = []
    context = ChannelContext(
        MASTER, job, listen[0], listen[1:], settings.protection, settings.spec.silence.data,
        partial(_process_of, links),
    )  # fmt: skip
    seam = ScriptSeam()
    channels = Channels(maker(context, seam), settings.channel, collective=False)
    undo.callback(channels.close)
    session = Session(
        job, secret, hub, count, channels, starter, settings.channel, settings.protection, interrupts, seam
    )
    links.append(weakref.ref(session.link))
    session.link.side.hub = side
    session.hub_beside = more
    if side is not None:
        session.link.side.keys = {each.rank: each.side_public_key for each in bundles}
    undo.callback(session.close, 0)
    session.allow = AllowList(settings.allow_ops)
    session.bundle = bundle
    session.never_again = settings.method.no_restart
    if starter is not None and starter.grows:
        session.max_nodes = max(count, min((starter.capacity or 0) - settings.spares, MAX_SLOTS))
    if isinstance(hub, InprocHub):
        session.changes.enter_context(guarded())
        for each in bundles:
            worker = NodeWorker(each, hub.spoke(each.rank))
            worker.breakpoints.open()
            thread = threading.Thread(target=worker.serve, name=f"node {each.rank}", daemon=True)
            thread.start()
            session.threads.append(thread)
    from ..seeing.flight import record_flights  # not before a session: who imports disttensor may want none
    from ..seeing.progress import show_waits
    from ..seeing.slow_watch import watch_for_slow_nodes

    show_waits(session)
    meet(session, range(count), settings.spec.timeout)
    session.begin()
    watch_for_slow_nodes(session)
    if settings.blocking:
        for node in session.nodes:
            node.outbox.block()
    record_flights(session, os.environ)
    return session


def _hub(
    settings: Settings, starter: Launcher | None, count: int, job: str, undo: contextlib.ExitStack
) -> tuple[ZmqHub | InprocHub, ZmqHub | None, Callable[..., ZmqHub] | None, b.Bundle, list[b.Bundle]]:
    """Opens the master's ends of the control connections and of the side channels, if there can be some.

    Returns them, what opens one more hub for such connections, a bundle for any node (without rank and keys), and the
    bundle of each node to begin with.
    """
    server, keys, hub, side = ("", ""), [("", "")] * count, None, None
    more: Callable[..., ZmqHub] | None = None
    silence = settings.spec.silence
    side_keys = keys
    if starter is not None:
        own = starter.key_pairs(count)
        encrypted = settings.security == "curve"
        if encrypted:
            server, keys = curve_pair(), own
        hub = ZmqHub(
            starter.listen, server_keys=server if encrypted else None, node_keys=_public(keys),
            silence=silence.lost,
        )  # fmt: skip
        undo.callback(hub.close)
        beside = starter.side_key_pairs(count) if encrypted else keys
        if beside:
            side_keys = beside
            more = partial(_hub_beside, starter.listen, server if encrypted else None, silence.lost)
            side = ZmqHub(
                starter.listen, server_keys=server if encrypted else None, node_keys=_public(side_keys),
                unread=SIDE_UNREAD, again=True,
            )  # fmt: skip
            undo.callback(side.close)
    bundle = b.Bundle(
        job=job,
        rank=-1,
        address=hub.address if hub is not None else "inproc",
        addresses=hub.addresses[1:] if hub is not None else (),
        server_key=server[0],
        side_addresses=side.addresses if side is not None else (),
        backend=name_for_nodes(settings.channel),
        encrypt=settings.protection.encrypt,
        trusted_network=settings.protection.trusted,
        checksum=settings.protection.checksum,
        nodes=count,
        local_size=count + settings.spares,
        simulate_cuda=settings.simulate_cuda,
        threads=settings.threads,
        bind=settings.bind,
        env={b.as_text(name): b.as_text(value) for name, value in settings.env.items()},
        allow_ops=settings.allow_ops,
        functions=settings.functions,
        silence=silence.of_nodes(starter is not None and starter.watches),
        data_silence=silence.data,
        sys_path=tuple(b.as_text(os.path.abspath(p)) for p in sys.path),
        cwd=b.as_text(os.getcwd()),
        script=_script() if may_be_asked(os.environ) else None,
    )
    bundles = [
        msgspec.structs.replace(
            bundle, rank=rank, public_key=key[0], secret_key=key[1], side_public_key=beside[0],
            side_secret_key=beside[1], local_rank=rank,
        )
        for rank, (key, beside) in enumerate(zip(keys, side_keys, strict=True))
    ]  # fmt: skip
    if hub is None:
        inproc = InprocHub(count)
        undo.callback(inproc.close)
        return inproc, None, None, bundle, bundles
    return hub, side, more, bundle, bundles


def _process_of(links: list[weakref.ref[Link]], rank: int) -> int:
    """Returns the process of a node that is a child of the session's launcher, once there is a session; else 0."""
    link = links[0]() if links else None
    return 0 if link is None else link.nodes[rank].connection.process


def _script() -> b.ScriptPlace:
    return b.ScriptPlace(script_name(), socket.gethostname(), os.getpid())


def _hub_beside(
    listen: Sequence[str], server: tuple[str, str] | None, silence: float, keys: Mapping[int, str]
) -> ZmqHub:
    return ZmqHub(listen, server_keys=server, node_keys=keys, unread=SIDE_UNREAD, silence=silence)


def _public(keys: Sequence[tuple[str, str]]) -> dict[int, str]:
    return {rank: key[0] for rank, key in enumerate(keys)}


def _check_descriptors(settings: Settings) -> None:
    """Looks for a shortage of descriptors before a launcher starts anything, by the fewest nodes that there can be.

    Raises StartError.
    """
    if settings.method.hosts == "here":
        count = here = _count(settings.nodes, None, settings.spec.least, settings.spares)
    else:
        least = settings.nodes[0] if isinstance(settings.nodes, tuple) else settings.nodes
        count, here = least or settings.spec.least or 1, 0
    if why := descriptors.shortage(count) or descriptors.shortage_below(0, here):
        raise StartError(why)


def _count(nodes: int | tuple[int, int] | None, starter: Launcher | None, least: int, spares: int) -> int:
    """Returns the number of nodes to begin with. Raises ValueError for none, or more than the launcher has room for,
    with the spare places."""
    capacity = starter.capacity if starter else None
    if isinstance(nodes, tuple):  # none come later where none come by themselves
        nodes = nodes[0 if starter is not None and starter.grows else 1]
    if nodes is not None:
        count = nodes
    elif capacity is not None:
        count = min(least or capacity, capacity - spares)
    else:
        count = least or max(2, torch.cuda.device_count() - spares)
    beside = f", spares={spares}" if spares else ""
    if count < 1:
        raise ValueError(f"nodes={count}{beside}: at least one node is needed")
    if starter and capacity is not None and count + spares > capacity:
        raise ValueError(f"nodes={count}{beside}: {starter.too_many(count + spares)}")
    return count


def shutdown() -> None:
    """Waits until the nodes have done all that was issued, and ends them. Without a session it does nothing.

    Proxies that are left can't be used any more. Ctrl-C ends the waiting.

    Raises the error that nothing has raised yet: the earliest one of an operation, else NodeLost for a lost node.
    """
    _end_session(report=True)


def _end_session(report: bool, timeout: float | None = None) -> None:
    session = current.current()
    if session is None:
        return
    error: BaseException | None = None
    try:
        end_trace(session, wait=report and timeout is None)
        if report:
            error = session.drain_and_collect_errors(timeout)
        else:
            for each in session.outlast():
                _log.error("%s", "\n".join([f"{type(each).__name__}: {each}", *getattr(each, "__notes__", ())]))
    except BaseException as e:  # Ctrl-C
        error = e
    try:
        late_warnings.show_warnings(everything=True)
    except Warning as e:  # which a filter makes an error
        error = error or e
    try:
        session.ends.close()
    except BaseException as e:  # Ctrl-C
        error = error or e
    selfcheck.end_comparing()
    current.set_session(None)
    streams.reset_current_streams()
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
    tested_versions.print_untested()
    atexit.register(_at_exit)
    notebook.attach()
    tracebacks.into_ipython()  # which may have come after the import
    os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    """Ends the session at the end of the script.

    An error or a loss that nobody noticed is printed and makes the exit code non-zero; so does Ctrl-C, which ends the
    waiting.
    """
    session = current.current()
    try:
        _end_session(report=True, timeout=AT_EXIT)
    except (Exception, KeyboardInterrupt) as e:
        import traceback

        sys.stdout.flush()
        what = "a node was lost" if isinstance(e, NodeLost) else "an operation failed"
        text = f"{what} and nothing in the script asked for its result:"
        if isinstance(e, Warning):
            text = "a warning that came at the script's end is an error:"
        elif isinstance(e, KeyboardInterrupt):
            text = "Ctrl-C at the script's end, while it waited:"
        print(f"disttensor: {text}", file=sys.stderr)
        traceback.print_exception(e.with_traceback(None))
        sys.stderr.flush()
        if session is not None and session.launcher is not None:
            session.launcher.leave(1)
        os._exit(1)


def _in_child() -> None:
    """Cuts a forked child off from the session: its use raises there, and the child's end ends nothing."""
    session = current.current()
    if session is not None:
        session.forked()
    undertakings.mine.forked()
    atexit.unregister(_at_exit)


#: The short name.
init = init_master_worker

__all__ = ["DisttensorError", "Exited", "init", "init_master_worker", "shutdown"]
