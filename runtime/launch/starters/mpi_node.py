"""A process of mpiexec's that is a node: for one session after the other, until the master is done."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from functools import partial
from typing import NoReturn

import msgspec
import torch

from ...host import descriptors, mpi_env
from ...host.output_options import Output
from ...node import worker
from ...process import torch_switches
from ...process.lifetime import adopt_orphans, end_children, name_process
from ...protocol.bundle import Bundle
from ...protocol.errors import BrokenError
from ...protocol.keys import curve_pair
from ..output.printer import Printer
from ..output.relay import Source
from .mpi import ARRIVE, OFFER, ORDER, Offer, await_true, exit_at_once, flush, receive_probed

#: The seed of torch's generators in every process.
_SEED = torch.default_generator.initial_seed()
#: The switches of torch that this process began with: a script tells its nodes of those only that it has set itself.
_SWITCHES = torch_switches.present()
#: Seconds for processes that user functions have started to end by themselves, and for the last output to be read.
_PATIENCE = 1.0
#: Set when the master has nothing more for this process, and may end at any time.
_leaving = threading.Event()


def serve(world: mpi_env.MpiWorld, output: Output = Output()) -> NoReturn:  # noqa: B008 - frozen
    """Makes this process the node of its rank, and ends it with the exit code."""
    code = 1
    try:
        _prepare_process(world, output)
        code = _work(world)
    except BaseException:
        traceback.print_exc()
        flush()
    if code:
        os._exit(code)
    null = os.open(os.devnull, os.O_WRONLY)  # the relay is a child, and ends when nobody can write to it
    os.dup2(null, 1)
    os.dup2(null, 2)
    end_children(_PATIENCE)
    _leaving.set()
    _order(world, "")  # or all processes are ended here
    world.mpi.Finalize()
    exit_at_once(0)


def _order(world: mpi_env.MpiWorld, public: str, side: str = "", timeout: float | None = None) -> bytes | None:
    """Offers to be a node with these keys, and waits for the master's order; None if none comes in time.

    ``side`` is the public key of the side channel.
    """
    comm, status = world.comm, world.mpi.Status()
    comm.Send([msgspec.json.encode(Offer(public, side, bool(world.abandoned))), world.mpi.BYTE], 0, OFFER)
    return receive_probed(world, status) if await_true(lambda: bool(comm.Iprobe(0, ORDER, status)), timeout) else None


def _work(world: mpi_env.MpiWorld) -> int:
    """Serves session after session. A code other than 0 ends all processes: mpiexec does so without MPI_Finalize."""
    patience = None
    while True:
        (public, secret), (side, side_secret) = curve_pair(), curve_pair()
        order = _order(world, public, side, patience)
        if order is None:
            return worker.EX_MASTER_GONE
        if not order:
            return 0
        bundle = msgspec.json.decode(order, type=Bundle)
        if bundle.public_key:
            bundle = msgspec.structs.replace(bundle, secret_key=secret, side_secret_key=side_secret)
        _be_new()
        try:
            code = worker.start(bundle)
        except BrokenError as e:  # its master may have given the session up meanwhile
            print(f"disttensor: {e}", file=sys.stderr)
            code = worker.EX_MASTER_GONE
        flush()
        if code not in (0, worker.EX_MASTER_GONE):  # the master's connection may end before its process
            return code
        # The host of a master that was lost may be cut off, and mpiexec with it.
        patience = None if code == 0 or world.near(0) else ARRIVE


def _prepare_process(world: mpi_env.MpiWorld, output: Output) -> None:
    rank = world.rank - 1
    _relay_output(rank, output)
    if world.near(0):
        pidfd = os.pidfd_open(world.cards[0].pid)
        threading.Thread(target=_watch, args=(pidfd,), name="life-line", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's
    adopt_orphans()
    faulthandler.enable(all_threads=False)
    sys.argv = ["disttensor-worker"]
    name_process(f"dt-node-{rank}")


def _be_new() -> None:
    """Resets state that an earlier session has changed, as in a new process."""
    torch.set_default_dtype(torch.float32)
    torch_switches.put(torch_switches.changed(torch_switches.present(), _SWITCHES).items())
    torch.manual_seed(_SEED)
    random.seed()
    gc.collect()


def _watch(master: int) -> None:
    descriptors.wait_readable([master])
    if _leaving.is_set():  # in MPI_Finalize one process may end before another has noticed that all may
        time.sleep(_PATIENCE)
        os._exit(0)
    os._exit(worker.EX_MASTER_GONE)


def _relay_output(rank: int, output: Output) -> None:
    """Forks a process that puts ``[node 0] `` before each line, so that output left in the pipe by a crash gets out."""
    pipes = os.pipe(), os.pipe()
    flush()
    if os.fork() == 0:
        try:
            _relay(rank, output, pipes[0][0], pipes[1][0])
        finally:
            os._exit(0)
    for number, (out, into) in enumerate(pipes, 1):
        os.dup2(into, number)
        os.close(out)
        os.close(into)
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _relay(rank: int, output: Output, out: int, err: int) -> None:
    """Relays output until nobody has the pipes any more."""
    os.setsid()  # mpiexec kills groups of processes, and the last output is wanted most
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name_process(f"dt-output-{rank}")
    first = 3
    for fd in sorted((out, err)):  # MPI's connections have to end with the node itself
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    # Open MPI gives its processes terminals, and passes on their output there to wherever its own output goes.
    environment = {**os.environ, "TERM": "dumb"}
    printer = Printer(output, environment=environment)
    try:
        printer.begin_node(rank)
    except OSError as e:  # nobody can be told but who reads this, and output is not to be lost
        os.write(2, f"[node {rank}] no output goes to its log files: {e}\n".encode())
        printer.close()
        printer = Printer(environment=environment)
        printer.begin_node(rank)
    sources = [Source(fd, stream, partial(printer.feed, rank)) for stream, fd in ((1, out), (2, err))]
    poller = select.poll()
    for source in sources:
        poller.register(source.fd, select.POLLIN)
    while open_ := [source for source in sources if not source.ended]:
        due = printer.due
        ready = {fd for fd, _ in poller.poll(None if due is None else max(0.0, due - time.monotonic()) * 1000)}
        for source in open_:
            if source.fd in ready:
                source.read()
                if source.ended:
                    poller.unregister(source.fd)
                    source.close()
        printer.push(3600)
    printer.end_node(rank)
    printer.flush(3600)
