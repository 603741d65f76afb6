"""The script reads large tensors in nodes' memory (shm/direct.py): what comes of it, and what where that fails."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import channel_kit
import pytest
import torch
from aftermath import aftermath
from checkout import search_path
from limits import HANG
from processes import alive_after

import disttensor as dt
from disttensor.runtime.channel.base import MASTER, Protection, Transfer
from disttensor.runtime.channel.shm import direct
from disttensor.runtime.channel.shm.channel import ShmChannel
from disttensor.runtime.channel.shm.direct import NodeSharing
from disttensor.runtime.channel.shm.segments import Segment, pack_descriptor
from disttensor.runtime.channel.tcp.frames import EAGER
from disttensor.runtime.contracts.data_channel import check_data_channel
from disttensor.runtime.contracts.data_channel_kit import LIMIT
from disttensor.runtime.protocol.errors import BrokenError, ChannelError, NodeLost

#: Elements of float32 that are read where they lie, in three pieces (``in_pieces``).
LARGE = 3 * direct.LEAST // 4
_transfers = itertools.count(1)


def connected(n: int = 2, pid: int | None = None, protection: Protection = Protection()) -> list[ShmChannel]:  # noqa: B008
    """Channels of a script and its nodes, whose processes its launcher calls ``pid``: all are this one's threads."""
    process = os.getpid() if pid is None else pid

    def made(context: Any) -> ShmChannel:
        return ShmChannel(replace(context, process_of=lambda peer: process) if context.rank == MASTER else context)

    return channel_kit.connected(made, range(-1, n - 1), protection=protection)


def down(channels: list[ShmChannel], tensor: torch.Tensor, rank: int = 0) -> torch.Tensor:
    """From a node to the script."""
    transfer, target = next(_transfers), torch.empty(tensor.shape, dtype=tensor.dtype)
    receive = channels[0].irecv(target, rank, transfer)
    channels[1 + rank].isend(tensor, MASTER, transfer)
    receive.wait(LIMIT)
    return target


def node_end(channels: list[ShmChannel], rank: int = 0) -> NodeSharing:
    carrier = channels[1 + rank]._peers[MASTER].carrier
    assert isinstance(carrier, NodeSharing)
    return carrier


def reading(channels: list[ShmChannel]) -> list[ShmChannel]:
    """The script has found that it can read all nodes."""
    for rank in range(len(channels) - 1):
        while not node_end(channels, rank)._lends:
            down(channels, torch.ones(LARGE), rank)
    return channels


@pytest.fixture
def pair() -> Iterator[list[ShmChannel]]:
    channels = reading(connected())
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "PIECE", direct.LEAST)


class Reads:
    """The reads of payloads, each of which is told to ``before`` with its number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object] = lambda number: None) -> None:
        self.count, self.probes = 0, 0
        self._read, self._before = direct.read_memory, before
        monkeypatch.setattr(direct, "read_memory", self._called)

    def _called(self, pid: int, source: int, target: int, nbytes: int, mark_at: int) -> bytes:
        if nbytes:
            self.count += 1
            self._before(self.count)
        else:
            self.probes += 1
        return self._read(pid, source, target, nbytes, mark_at)


def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the bytes of what is copied to a segment from now on."""
    found, fill = list[int](), Segment.fill
    monkeypatch.setattr(Segment, "fill", lambda self, tensor: (found.append(tensor.nbytes), fill(self, tensor))[1])
    return found


@pytest.mark.parametrize(
    "protection", [Protection(), Protection(encrypt=True, checksum=True)], ids=["plain", "protected"]
)
def test_conformance(protection, monkeypatch):
    """All that does not go over the connection, from nodes to the script."""
    monkeypatch.setattr(direct, "LEAST", EAGER + 1)
    reads = Reads(monkeypatch)
    check_data_channel(lambda n: reading(connected(n, protection=protection)), (2,))
    assert reads.count > 10
    assert reads.probes


@pytest.mark.usefixtures("in_pieces")
def test_it_is_one_copy_wherever_it_is_to_be(pair, monkeypatch):
    reads, copied = Reads(monkeypatch), fills(monkeypatch)
    source = torch.arange(LARGE, dtype=torch.float32)
    assert torch.equal(down(pair, source), source)
    assert (reads.count, copied) == (3, [])
    rows = torch.zeros(LARGE // 4, 8)[:, ::2]  # elements of others lie between its own
    transfer = next(_transfers)
    receive = pair[0].irecv(rows, 0, transfer)
    pair[1].isend(source, MASTER, transfer)
    receive.wait(LIMIT)
    assert torch.equal(rows.reshape(-1), source)
    assert (reads.count, copied) == (6, [])
    across = source.view(3, -1).t()  # is made contiguous in a segment
    assert torch.equal(down(pair, across), across)
    assert (reads.count, copied) == (6, [source.nbytes])
    assert torch.equal(down(pair, source[: direct.LEAST // 8]), source[: direct.LEAST // 8])
    assert reads.count == 6


def test_the_nodes_tensor_is_kept_until_it_was_read(pair, monkeypatch):
    go = threading.Event()
    Reads(monkeypatch, lambda number: go.wait(LIMIT))
    source, target = torch.full((LARGE,), 7.0), torch.zeros(LARGE)
    memory = weakref.ref(source)
    transfer = next(_transfers)
    receive = pair[0].irecv(target, 0, transfer)
    sending = pair[1].isend(source, MASTER, transfer)
    del source
    with pytest.raises(TimeoutError):
        sending.wait(0.05)
    assert memory() is not None
    go.set()
    receive.wait(LIMIT)
    sending.wait(LIMIT)
    deadline = time.monotonic() + LIMIT
    while memory() is not None and time.monotonic() < deadline:  # by the thread that has written the announcement
        gc.collect()
    assert memory() is None
    assert (target == 7).all()


def test_a_node_that_waits_hears_of_it_whatever_its_connection_brings(pair):
    """Its reader holds what it is to receive only when it has gone on; the word that it may is behind that."""
    early = next(_transfers)
    pair[0].isend(torch.full((3,), 5.0), 0, early).wait(LIMIT)
    target, transfer = torch.zeros(LARGE), next(_transfers)
    receive = pair[0].irecv(target, 0, transfer)
    pair[1].isend(torch.full((LARGE,), 7.0), MASTER, transfer).wait(LIMIT)
    receive.wait(LIMIT)
    assert (target == 7).all()
    arriving = torch.zeros(3)
    pair[1].irecv(arriving, MASTER, early).wait(LIMIT)
    assert (arriving == 5).all()


def test_a_channel_that_closes_waits_until_it_was_read(monkeypatch):
    pair = reading(connected())
    sender = pair[1]._peers[MASTER]._sender

    def closes(number: int) -> None:
        deadline = time.monotonic() + LIMIT
        while not sender._flushing:
            assert time.monotonic() < deadline, "the channel does not wait"
            time.sleep(0.001)

    Reads(monkeypatch, closes)
    target, transfer = torch.zeros(LARGE), next(_transfers)
    receive = pair[0].irecv(target, 0, transfer)
    sending = pair[1].isend(torch.full((LARGE,), 7.0), MASTER, transfer)
    with closing(pair[0]):
        pair[1].close()
        receive.wait(LIMIT)
        sending.wait(LIMIT)
    assert (target == 7).all()


def marked_otherwise(end: NodeSharing) -> tuple[int, int]:
    """A child that has all that this process has, but the mark; and what has it end."""
    told, tell = os.pipe()
    wait, go = os.pipe()
    if (child := os.fork()) == 0:
        ctypes.memset(end._mark, 0, 16)
        os.write(tell, b"!")
        os.close(go)
        os.read(wait, 1)
        os._exit(0)
    os.read(told, 1)
    for fd in (told, tell, wait):
        os.close(fd)
    return child, go


@pytest.mark.parametrize("who", ["another", "ended", "none"])
def test_a_process_that_is_not_the_node_is_not_read(who, monkeypatch, caplog):
    """Whatever the node says: the launcher names the process. And nobody hears of it."""
    processes = {0: 0}
    pair = channel_kit.connected(
        lambda context: ShmChannel(replace(context, process_of=lambda peer: processes[0])), (MASTER, 0)
    )
    child, go = marked_otherwise(node_end(pair))
    if who == "ended":
        os.close(go)
        os.waitpid(child, 0)
    processes[0] = 0 if who == "none" else child
    reads, copied = Reads(monkeypatch), fills(monkeypatch)
    with closing(pair[0]), closing(pair[1]):
        n = 0
        while n < 6 or not copied:  # until both ends know that they share memory they take the connection
            assert torch.equal(down(pair, torch.full((LARGE,), n)), torch.full((LARGE,), n))
            n += 1
    assert (reads.count, reads.probes) == (0, who != "none")
    assert not node_end(pair)._lends
    if who != "ended":
        os.close(go)
        os.waitpid(child, 0)
    assert not caplog.records


def test_where_the_first_read_is_refused_all_goes_by_segments(monkeypatch, caplog):
    asked = []

    def refused(*args: int) -> bytes:
        asked.append(args)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(direct, "read_memory", refused)
    pair, copied, n = connected(), fills(monkeypatch), 0
    with closing(pair[0]), closing(pair[1]):
        while len(copied) < 4:  # until both ends know that they share memory they take the connection
            assert torch.equal(down(pair, torch.full((LARGE,), n)), torch.full((LARGE,), n))
            n += 1
    assert len(asked) == 1
    assert not caplog.records


@pytest.mark.usefixtures("in_pieces")
def test_what_is_refused_later_comes_by_segments_in_order_as_does_all_from_then_on(pair, monkeypatch, caplog):
    def refused(number: int) -> None:
        if number > 1:
            raise PermissionError(1, "Operation not permitted")

    reads, copied = Reads(monkeypatch, refused), fills(monkeypatch)
    targets = [torch.zeros(LARGE) for _ in range(3)]
    numbers = [next(_transfers) for _ in targets]
    receives = [pair[0].irecv(target, 0, number) for target, number in zip(targets, numbers, strict=True)]
    sends = [pair[1].isend(torch.full((LARGE,), float(number)), MASTER, number) for number in numbers]
    for target, number, receive, send in zip(targets, numbers, receives, sends, strict=True):
        receive.wait(LIMIT)
        send.wait(LIMIT)
        assert (target == number).all()
    assert reads.count == 2
    assert len(copied) == 3
    assert (down(pair, torch.full((LARGE,), 5.0)) == 5).all()
    assert (reads.count, len(copied)) == (2, 4)
    assert not caplog.records


@pytest.mark.usefixtures("in_pieces")
def test_a_connection_that_breaks_meanwhile_takes_nothing_away(pair, monkeypatch):
    def cut(number: int) -> None:
        if number == 2:
            pair[1]._peers[MASTER]._sock.shutdown(2)

    reads, target, transfer = Reads(monkeypatch, cut), torch.zeros(LARGE), next(_transfers)
    receive = pair[0].irecv(target, 0, transfer)
    sending = pair[1].isend(torch.full((LARGE,), 7.0), MASTER, transfer)
    receive.wait(LIMIT)
    sending.wait(LIMIT)
    assert (target == 7).all()
    assert reads.count in (3, 2)  # it was read to its end, or came again by a segment
    assert (down(pair, torch.full((LARGE,), 5.0)) == 5).all()


@pytest.mark.usefixtures("in_pieces")
def test_nothing_counts_that_was_read_when_the_node_had_given_up(pair, monkeypatch):
    """It lets its tensor change then, and what the script has may be of before and after."""
    Reads(monkeypatch, lambda number: number == 3 and pair[1]._peers[MASTER].fail(BrokenError, "the node gives up"))
    transfer = next(_transfers)
    receive = pair[0].irecv(torch.zeros(LARGE), 0, transfer)
    sending = pair[1].isend(torch.full((LARGE,), 7.0), MASTER, transfer)
    for one in (receive, sending):
        with pytest.raises(ChannelError):
            one.wait(LIMIT)


def test_memory_that_is_not_there_fails_its_transfer_alone(pair, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(NodeSharing, "stage", lambda self, tensor: pack_descriptor(0, 0, 4096, 1 << 40))
        with pytest.raises(BrokenError, match="the memory is not there"):
            down(pair, torch.zeros(LARGE))
    reads = Reads(monkeypatch)
    assert (down(pair, torch.full((LARGE,), 5.0)) == 5).all()
    assert reads.count == 1


@pytest.mark.parametrize("wrong", ["unasked", "descriptor"])
def test_what_no_honest_node_announces_ends_its_connection(wrong, monkeypatch):
    pair = connected() if wrong == "unasked" else reading(connected())
    reads, fd = Reads(monkeypatch), int(wrong == "descriptor")
    monkeypatch.setattr(NodeSharing, "stage", lambda self, tensor: pack_descriptor(0, fd, tensor.data_ptr(), 1 << 40))
    with closing(pair[0]), closing(pair[1]), pytest.raises(BrokenError, match="was not found readable"):
        down(pair, torch.zeros(LARGE))
    assert reads.count == 0


def mistake(transfer: Transfer) -> str:
    """The error with which a transfer ends; "" for none."""
    try:
        transfer.wait(LIMIT)
    except BrokenError as error:
        return str(error)
    return ""


def test_a_receive_that_does_not_fit_fails(pair):
    """The send, too, unless its end came first: it looks every moment whether its memory is lent still."""
    transfer, text = next(_transfers), f"float32 x {LARGE} but rank -1 receives float32 x {LARGE - 1}"
    receive = pair[0].irecv(torch.zeros(LARGE - 1), 0, transfer)
    sending = pair[1].isend(torch.zeros(LARGE), MASTER, transfer)
    with pytest.raises(BrokenError, match=text):
        receive.wait(LIMIT)
    assert text in mistake(sending) or not mistake(sending)
    assert (down(pair, torch.full((LARGE,), 5.0)) == 5).all()


@pytest.mark.usefixtures("in_pieces")
def test_nothing_is_held_for_a_script_that_is_gone(pair, monkeypatch):
    Reads(monkeypatch, lambda number: number == 2 and pair[0]._peers[0].fail(ChannelError, "the script ends"))
    source, transfer = torch.zeros(LARGE), next(_transfers)
    memory = weakref.ref(source)
    pair[0].irecv(torch.zeros(LARGE), 0, transfer)
    sending = pair[1].isend(source, MASTER, transfer)
    del source
    with pytest.raises(BrokenError):
        sending.wait(LIMIT)
    deadline = time.monotonic() + LIMIT
    while memory() is not None and time.monotonic() < deadline:
        gc.collect()
    assert memory() is None


def test_a_receive_gives_its_tensor_back_until_data_arrives_in_it(pair, monkeypatch):
    numbers = [next(_transfers) for _ in range(2)]
    given, arriving = torch.zeros(LARGE), torch.zeros(LARGE)
    receives = [pair[0].irecv(target, 0, number) for target, number in zip((given, arriving), numbers, strict=True)]
    assert pair[0].take_back(0, numbers[0])
    taken = []
    Reads(monkeypatch, lambda number: taken.append(pair[0].take_back(0, numbers[number - 1])))
    for number in numbers:
        pair[1].isend(torch.ones(LARGE), MASTER, number)
    for receive in receives:
        receive.wait(LIMIT)
    assert taken == [False, False]
    assert (given == 0).all()
    assert (arriving == 1).all()
    assert not pair[0].take_back(0, numbers[1])


def test_the_node_lets_the_script_read_it_and_nobody_else(monkeypatch):
    """Where Yama lets none but ancestors; and only when a script asks whose segment shows that it is that process."""
    allowed = []
    monkeypatch.setattr(direct, "_libc", SimpleNamespace(prctl=lambda *args: allowed.append(args)))
    for process, expected in ((0, []), (os.getpid(), [(0x59616D61, os.getpid(), 0, 0, 0)])):
        pair = connected(pid=process)
        with closing(pair[0]), closing(pair[1]):
            for _ in range(6):
                down(pair, torch.zeros(LARGE))
            if process:
                reading(pair)
                node_end(pair).hear(b"@")  # again
        assert allowed == expected
    strange = NodeSharing(lambda word: None)
    strange.hear(b"@")  # by who has shown no segment
    assert allowed == expected


# ---- in sessions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes, whose memory the script reads already."""
    dt.init_master_worker(nodes=2, threads=1)
    for node in range(2):
        with monkeypatch.context() as patch:
            reads, x = Reads(patch), torch.ones(LARGE, device=f"node:{node}")
            while not reads.count:
                x.cpu()
    yield
    with suppress(dt.DisttensorError):
        dt.shutdown()


@pytest.mark.fault(30)
@pytest.mark.usefixtures("session", "in_pieces")
def test_a_node_that_is_killed_while_it_is_read_is_lost(monkeypatch):
    victim = dt.nodes()[0]["pid"]
    x = torch.ones(LARGE, device="node:0")

    def kill(number: int) -> None:
        if number == 2:
            os.kill(victim, signal.SIGKILL)
            assert not alive_after(HANG, [victim])

    with aftermath(1):
        with monkeypatch.context() as patch:
            Reads(patch, kill)
            with pytest.raises(NodeLost, match=r"node 0 .*SIGKILL"):
                x.cpu()
        y = torch.arange(LARGE, dtype=torch.float32)
        assert torch.equal(y.to("node:1").cpu(), y)


@pytest.mark.usefixtures("session")
def test_what_a_node_keeps_until_it_was_read_is_counted(monkeypatch):
    x = torch.ones(LARGE, device="node:0")
    before = torch.node.memory_allocated("node:0")
    go = threading.Event()
    Reads(monkeypatch, lambda number: go.wait(HANG))
    work = dt.fetch(x)
    del x
    kept = [torch.node.memory_allocated("node:0") for _ in range(2)][1]  # the tensor is freed behind the first question
    go.set()
    assert (work.result() == 1).all()
    dt.synchronize()
    assert kept == before
    assert torch.node.memory_allocated("node:0") == before - 4 * LARGE


@pytest.mark.usefixtures("session")
def test_a_copy_into_a_local_tensor_goes_straight_there(monkeypatch):
    written = []
    read = direct.read_memory
    monkeypatch.setattr(direct, "read_memory", lambda *args: (written.append(args[2]), read(*args))[1])
    values = torch.arange(LARGE, dtype=torch.float32)
    on_mesh = values.to(dt.mesh(dp=2))
    for source in (values.to("node:0"), on_mesh):
        for target in (torch.zeros(LARGE), torch.nn.Parameter(torch.zeros(LARGE))):
            version = target._version
            with torch.no_grad():
                assert target.copy_(source) is target
            assert torch.equal(target, values)
            assert target._version == version + 1
            assert written.pop() == target.data_ptr()
    x = values.to("node:1")
    for target in (
        torch.zeros(LARGE, 2)[:, 0],
        torch.zeros(LARGE, dtype=torch.float64),
        torch.zeros(2, LARGE),
        torch.zeros(LARGE, dtype=torch.complex64).conj(),
    ):
        target.copy_(x)
        assert (target == values.to(target.dtype)).all()
        assert written.pop() != target.data_ptr()
    assert not written


@pytest.mark.usefixtures("session")
def test_nothing_is_written_to_a_users_tensor_after_ctrl_c(monkeypatch):
    read, take_back, asked = direct.read_memory, ShmChannel.take_back, threading.Event()
    returned, early = threading.Event(), []

    def interrupted(*args: int) -> bytes:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert asked.wait(HANG)
        early.append(returned.wait(0.2))
        return read(*args)

    def asks(self: ShmChannel, peer: int, transfer: int) -> bool:
        asked.set()
        return take_back(self, peer, transfer)

    monkeypatch.setattr(direct, "read_memory", interrupted)
    monkeypatch.setattr(ShmChannel, "take_back", asks)
    target = torch.zeros(LARGE)
    x = torch.ones(LARGE, device="node:0")
    with pytest.raises(KeyboardInterrupt):
        target.copy_(x)
    returned.set()
    assert early == [False]
    monkeypatch.undo()
    assert (x.cpu() == 1).all()


REFUSING = """
import ctypes, platform, struct, sys
import torch, disttensor as dt
from disttensor.runtime.channel.shm import direct

libc = ctypes.CDLL(None, use_errno=True)
number, seccomp = {"x86_64": (310, 317), "aarch64": (270, 277)}[platform.machine()]

def hide():
    "Has the kernel refuse it for a node, as for programs with secrets."
    return ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)

def refuse():
    "Has the kernel refuse process_vm_readv to all threads, as that of a container may."
    rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | 1), (0x06, 0, 0, 0x7FFF0000)]
    rules = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(struct.pack("<H6xQ", len(rows), ctypes.addressof(rules)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.syscall(seccomp, 1, 1, program) == 0, ctypes.get_errno()

reads, read = [], direct.read_memory

def counted(*args):
    reads.append("refused")
    mark = read(*args)
    reads[-1] = "read"
    return mark

direct.read_memory = counted
values = torch.arange(200_000.)
for session in range(2):
    dt.init_master_worker(nodes=1, threads=1)
    if sys.argv[1] == "node":
        assert dt.run(hide, node=0) == 0
    x = values.to("node:0")
    if sys.argv[1] == "script" and not session:
        while reads.count("read") < 3:
            assert torch.equal(x.cpu(), values)
        refuse()
    for _ in range(6):
        assert torch.equal(x.cpu(), values)
    print(reads.count("refused"))
    dt.shutdown()
"""


@pytest.mark.parametrize("who", ["script", "node"])
def test_a_job_whose_kernel_refuses_it_goes_by_segments(who, tmp_path):
    """In the middle of a session, and from its beginning: it is tried once, and nothing is said. The script is not
    allowed to read any process; or the node is not to be read, of whose memory it maps no segments either then."""
    (path := tmp_path / "program.py").write_text(REFUSING)
    before = [] if who == "script" or os.getuid() else ["setpriv", "--bounding-set=-sys_ptrace"]  # root reads any
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
    command = [*before, sys.executable, str(path), who]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=env, cwd=tmp_path)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["1", "2"], "", 0)
