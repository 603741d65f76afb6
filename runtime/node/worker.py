"""The worker's process loop.

    life-line pipe --> bundle, then silence; its end means that the master is gone
    Spoke.recv() --> decode --> CommandExecutor.apply --> replies --> Spoke.send()

One thread receives and executes, so the default lane costs no hand-over between threads. A second one waits for the
end of the life-line.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import socket
import sys
import threading
from array import array
from functools import partial

import msgspec
import torch

from ..channel.base import ChannelContext, Protection
from ..channel.cipher import no_cipher
from ..channel.counted import sent_over_network
from ..channel.opened import Channels, maker
from ..host import affinity, capabilities, topology
from ..host.addresses import LOOPBACK, first_to_answer, interfaces_for
from ..host.memory_limit import memory_left
from ..process import page, role
from ..process.flight import COUNT
from ..process.observing import BatchApplied, CommandBegun, CommandDone, MessageBegun, NodeSeam
from ..process.page import COMMANDS, STREAMS
from ..process.torch_threads import compute_as_told
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.allow_list import AllowList
from ..protocol.bundle import PROTOCOL, Bundle, as_name, read_bundle
from ..protocol.errors import ClosedError, ProtocolError
from ..transport.base import Spoke
from .breakpoints import Breakpoints, hook
from .description import Description
from .executor import CommandExecutor
from .gathering import Gathering
from .own_bundle import set_own
from .process_groups import ProcessGroups
from .receive_ahead import Ahead
from .side_channel import SideChannel
from .user_functions import Functions
from .warned import tell_warnings

#: The largest number of commands applied between two reports to the master; its window is several times that.
ACK_EVERY = 1024
#: The same limit in bytes of commands; the master's window has both measures.
ACK_BYTES = 8 << 20

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

#: Seconds within which one of several addresses of the master has to answer.
REACH = 30.0

#: Seconds that a stream has at the end to finish its current task.
JOIN = 2.0

#: Seconds between two signs that the threads of this process run.
ALIVE = 0.5

#: The exit code of a worker whose master went away.
EX_MASTER_GONE = 75


class NodeWorker:
    """One node: it takes commands from a spoke, has an executor apply them, and sends the replies."""

    def __init__(self, bundle: Bundle, spoke: Spoke) -> None:
        self.bundle = bundle
        self.seam = NodeSeam(bundle.rank)  #: where observers look in
        self._spoke = spoke
        self._replies: list[c.Reply] = []
        self._told = bundle.first
        self._unacknowledged = 0  #: bytes of messages since the last report
        self._telling = threading.RLock()  #: held while reporting, by the receiving thread or a stream's
        self._receiver = threading.get_ident()
        #: where the time of work is counted; nodes in threads of one process have one page, which cannot tell
        self._page = page.mine if role.is_node() else None
        hosts = bundle.data_hosts or (LOOPBACK,)
        protection = Protection(bundle.encrypt, bundle.trusted_network, bundle.checksum)
        context = ChannelContext(bundle.rank, bundle.job, hosts[0], hosts[1:], protection, bundle.data_silence)
        self.channels = Channels(maker(context, self.seam), bundle.backend)
        if self._page is not None:
            self._page.sending = partial(sent_over_network, self.channels)
        self.executor = CommandExecutor(
            bundle.rank,
            self._emit,
            self.channels,
            AllowList(bundle.allow_ops),
            Functions(bundle.functions, ProcessGroups(bundle.rank, self.channels)),
            bundle.simulate_cuda,
            self._progress,
            self.seam,
            bundle.first,
        )
        self.executor.emit_with_next = self._hold_reply
        self._watch = self.executor.functions.watch  #: has what is held leave in time
        self.breakpoints = Breakpoints(bundle.rank, self._say_at_once, self.executor.functions.interruption)

    def __repr__(self) -> str:
        return f"<NodeWorker node={self.bundle.rank} done={self.executor.done} told={self._told}>"

    def hello(self) -> c.Hello:
        cuda = self.bundle.simulate_cuda or torch.cuda.device_count()
        at = topology.of_node(cuda=bool(cuda and not self.bundle.simulate_cuda))
        return c.Hello(
            protocol=PROTOCOL,
            job=self.bundle.job,
            pid=os.getpid(),
            host=socket.gethostname(),
            torch=str(torch.__version__),
            python=platform.python_version(),
            devices=("cpu", *(f"cuda:{i}" for i in range(cuda))),
            simulated=bool(self.bundle.simulate_cuda),
            gpus=affinity.gpus() if cuda and not self.bundle.simulate_cuda else (),
            addresses=self.channels.open(0, self.bundle.backend),
            abilities=capabilities.own(self.bundle.simulate_cuda),
            no_cipher=codec.one_line(no_cipher()),
            numa=at.numa,
            pcie_root=at.pcie_root,
            memory=(memory_left()[1], *(self._memory_of(i) for i in range(cuda))),
        )

    def _memory_of(self, index: int) -> int:
        """Returns the bytes of memory of one of its CUDA devices."""
        if self.bundle.simulate_cuda:
            return memory_left()[1]
        return int(torch.cuda.get_device_properties(index).total_memory)

    def serve(self) -> int:
        """Applies commands until StopNode (returns 0), the master's end (75) or a broken protocol (70)."""
        compute_as_told()
        torch.set_grad_enabled(False)
        self._receiver = threading.get_ident()
        executor, seam = self.executor, self.seam
        ahead, mine = Ahead(self._spoke, executor), page.mine
        record, slot = mine.ring.write, mine.ring.slot
        try:
            self._emit(self.hello())
            self._flush()
            while not executor.stopped:
                batch, size = ahead.next()
                began = mine.begin_command(batch.first, COMMANDS)
                if seam.observed:
                    self._apply(batch, size)
                else:
                    executor.apply(batch)
                # before the report, which tells for how long it has worked
                done = executor.done
                ended = mine.rest() if done == executor.seq else self._begin_streams(mine, done)
                record(slot(), began, batch.first, size, ended - began, executor.seq - batch.first & COUNT, COMMANDS)
                self._unacknowledged += size
                if self._replies or done - self._told >= ACK_EVERY or self._unacknowledged >= ACK_BYTES:
                    self._flush()
                if executor.received:
                    ahead.look()
        except ClosedError:
            return EX_MASTER_GONE
        except ProtocolError as e:
            print(f"disttensor: node {self.bundle.rank} gives up: {e}", file=sys.stderr)
            return 70
        finally:
            self.breakpoints.close()
            executor.close()
            executor.functions.close()
            self.channels.close()
            self._spoke.close()
            executor.join(JOIN)
        return 0

    def _apply(self, batch: c.Batch, size: int) -> None:
        """Applies a batch of so many bytes, and tells observers of it, and of each of its commands."""
        seam, rank, now = self.seam, self.bundle.rank, self.seam.clock.now
        began, moments = now(), array("d")
        timed = seam.timed.listeners
        if timed:
            seam.timed.notify(MessageBegun(rank, batch.first, len(batch.commands), moments))
        if seam.commands.listeners:
            for number, command in enumerate(batch.commands, batch.first):
                what = self.executor.what(command)
                start = now()
                moments.append(start)
                seam.commands.notify(CommandBegun(start, rank, "", number, what, command))
                self.executor.apply(c.Batch(number, (command,)))
                seam.commands.notify(CommandDone(now(), start, rank, "", number, what, command))
            moments.append(now())
        elif timed:
            self.executor.apply_timed(batch, moments, now)
        else:
            self.executor.apply(batch)
        if seam.applied.listeners:
            seam.applied.notify(BatchApplied(now(), began, rank, batch.first, len(batch.commands), size))

    def _emit(self, reply: c.Reply) -> None:
        if type(reply) in _AWAITED:
            self._flush(reply)
        else:
            with self._telling:
                self._replies.append(reply)

    def _hold_reply(self, reply: c.Reply) -> None:
        """Has a reply leave with those that follow: at the end of the batch, or soon."""
        with self._telling:
            self._replies.append(reply)
            if not self._watch.hold_reply():
                self._flush()

    def _say_at_once(self, reply: c.Reply) -> None:
        """Sends a reply from the middle of a function."""
        self._emit(reply)
        self._flush()

    @property
    def _due(self) -> bool:
        return self.executor.done - self._told >= ACK_EVERY or self._unacknowledged >= ACK_BYTES

    def _begin_streams(self, mine: page.Page, done: int) -> float:
        """Notes that only streams are at work. Returns the time."""
        began = mine.begin_command(done, STREAMS)
        if self.executor.done == self.executor.seq:  # they have ended meanwhile, and found something else noted
            mine.end_streams()
        return began

    def _progress(self) -> None:
        """Reports if a report is due. Called when a stream has done something."""
        if self.executor.done == self.executor.seq:
            page.mine.end_streams()
        if self._replies or self._due:
            self._flush()

    def _flush(self, reply: c.Reply | None = None) -> None:
        """Reports the commands that are done, with the replies and this one. This opens the master's window."""
        try:
            with self._telling:
                if reply is not None:
                    self._replies.append(reply)
                self._report()
        except ClosedError:
            if threading.get_ident() == self._receiver:
                raise  # in another thread: the receiver finds it out by itself

    def _report(self) -> None:
        executor = self.executor
        done = executor.done  # read first: a command that fails from here on is not counted as done
        replies, self._replies = self._replies, []
        self._watch.held = 0.0
        if not replies and done == self._told:
            return  # another thread was faster
        self._told = done
        if done == executor.seq:
            self._unacknowledged = 0
        message = codec.encode(c.Report(done, tuple(replies), self._page.busy if self._page is not None else 0.0))
        if len(message) > codec.MAX_MESSAGE:
            if len(replies) > 1:
                for reply in replies:
                    self._replies = [reply]
                    self._report()
                return
            seq = done
            text = f"an answer of {len(message)} bytes is over the limit of {codec.MAX_MESSAGE}; return tensors instead"
            failed = c.Failed(seq, "answer", "disttensor.runtime.protocol.errors.DisttensorError", text, "")
            request = replies[0].request if type(replies[0]) in _AWAITED else 0  # type: ignore[union-attr]
            message = codec.encode(c.Report(seq, (failed, c.Poisoned(request, self.bundle.rank, seq))))
        self._spoke.send(message)


#: Replies that somebody waits for: they leave at once, not at the end of the batch. With streams a batch may have ended
#: long before the answer is there, and nobody would send it.
_AWAITED = frozenset(kind for kind, row in codec.REPLIES.items() if row.awaited)


def main(lifeline: int) -> int:
    """Runs a worker process: reads its bundle from the life-line, serves, and returns the exit code."""
    bundle = read_bundle(lifeline)
    threading.Thread(target=_watch, args=(lifeline,), name="life-line", daemon=True).start()
    return start(bundle)


def start(bundle: Bundle) -> int:
    """Makes this process the node that the bundle describes; returns the exit code when its session has ended."""
    role.become_node(bundle.rank)
    tell_warnings()
    for path in map(as_name, reversed(bundle.sys_path)):
        if path not in sys.path:
            sys.path.insert(0, path)
    if bundle.cwd:
        with contextlib.suppress(OSError):  # it is not there, or this host's user may not enter it
            os.chdir(as_name(bundle.cwd))
    bound = affinity.apply(bundle)
    if bound.said:
        print(f"disttensor: {bound.said}", file=sys.stderr)
    torch.set_num_threads(bound.threads)
    _keep_memory()
    addresses = (bundle.address, *bundle.addresses)
    address = first_to_answer(addresses, REACH)
    if not bundle.data_hosts:
        bundle = msgspec.structs.replace(bundle, data_hosts=interfaces_for(address, addresses))
    from ..transport.zmq import ZmqSpoke

    spoke = ZmqSpoke(
        address, bundle.server_key, bundle.public_key, bundle.secret_key, bundle.rank, silence=bundle.silence
    )
    worker = NodeWorker(bundle, spoke)
    if not bundle.side_addresses:
        return worker.serve()
    set_own(bundle, addresses.index(address))
    beside = partial(
        ZmqSpoke, bundle.side_addresses[addresses.index(address)], bundle.server_key, bundle.side_public_key,
        bundle.side_secret_key, bundle.rank, silence=bundle.silence,
    )  # fmt: skip
    cancel, gathering = worker.executor.functions.cancel, Gathering(worker.seam)
    description, debuggers = Description(worker.executor, worker.channels), worker.breakpoints
    if sys.breakpointhook is sys.__breakpointhook__ and not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = hook
    debuggers.open()
    with contextlib.closing(SideChannel(beside, worker.channels, cancel, gathering, description, debuggers.take_word)):
        return worker.serve()


def _keep_memory() -> None:
    """Has malloc keep the memory that a step frees for the next one.

    Otherwise it would give pages back and fault them in again: a node frees in bursts, so malloc's own thresholds trim
    the heap several times in a training step. The kept memory goes back when many tensors are dropped (``Store.free``).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 512 << 20)


def _watch(lifeline: int) -> None:
    """Ends this process with its life-line; shows until then that its threads run."""
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    try:
        while True:
            page.mine.live()
            if poller.poll(ALIVE * 1000) and not os.read(lifeline, 1):
                break
    finally:
        os._exit(EX_MASTER_GONE)
