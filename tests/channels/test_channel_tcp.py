"""The tcp channel between good peers."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import warnings
from typing import Any

import channel_kit
import leaks
import psutil
import pytest
import torch
from limits import HANG

from disttensor.runtime.channel import ChannelContext, PeerInfo, Transfer
from disttensor.runtime.channel.base import Protection
from disttensor.runtime.channel.pool import WarmPool
from disttensor.runtime.channel.tcp.channel import TcpChannel
from disttensor.runtime.channel.tcp.frames import EAGER
from disttensor.runtime.channel.tcp.inbound import PIECE, Inbound
from disttensor.runtime.channel.tcp.peer import Limits
from disttensor.runtime.channel.tcp.sender import FrameSender
from disttensor.runtime.channel.ticket import Passing, Ticket
from disttensor.runtime.protocol.errors import BrokenError, ClosedError

KEY = b"k" * 32
#: A payload of so many bytes is counted while it passes.
LARGE = 2 * PIECE + 9


def channel(rank: int, protection: Protection = Protection(), **limits: float) -> TcpChannel:  # noqa: B008 - frozen
    class Impatient(TcpChannel):
        pass

    Impatient.limits = Limits(**limits)
    silence = Impatient.limits.silent
    return Impatient(ChannelContext(rank, "a job", "127.0.0.1", protection=protection, silence=silence))


def connected(n: int, protection: Protection = Protection(), **limits: float) -> list[TcpChannel]:  # noqa: B008
    """Channels of the ranks -1, 0, ... with a key of each pair."""
    return channel_kit.connected(lambda context: channel(context.rank, protection, **limits), range(-1, n - 1))


@pytest.fixture(autouse=True)
def nothing_left():
    before = leaks.Held.now(memory=False, descriptors=True)
    yield
    leaks.check(before, "the test")


#: As on one host by default; with a checksum of each payload; encrypted.
PROTECTIONS = [Protection(), Protection(checksum=True), Protection(encrypt=True)]


def named(protection: Protection) -> str:
    return "+".join(filter(None, ("checksum" * protection.checksum, "encrypted" * bool(protection.encrypt)))) or "plain"


@pytest.fixture(params=PROTECTIONS, ids=named)
def pair(request):
    channels = connected(3, request.param)
    yield channels[1:]
    for one in channels:
        one.close()


def test_pings_of_all_kinds(pair, monkeypatch):
    """The one who waits and the reader thread hand the connection to each other without losing anything."""
    a, b = pair
    monkeypatch.setattr("disttensor.runtime.channel.tcp.reader._interruptible", lambda: False)
    sizes = [0, 1, 256, EAGER // 4, EAGER // 4 + 1, 300_000]
    rounds = 300

    def echo() -> None:
        for n in range(rounds):
            tensor = torch.empty(sizes[n % len(sizes)])
            b.recv(tensor, 0, n)
            b.send(tensor, 0, n)

    thread = threading.Thread(target=echo)
    thread.start()
    for n in range(rounds):
        tensor, back = torch.full((sizes[n % len(sizes)],), float(n)), torch.empty(sizes[n % len(sizes)])
        receive = a.irecv(back, 1, n)
        a.isend(tensor, 1, n)
        if n % 3 == 1:
            called = threading.Event()
            receive.add_done_callback(called.set)
            assert called.wait(20)
        elif n % 7 == 2:
            while not receive.is_completed():
                pass
        receive.wait(20)
        assert torch.equal(tensor, back)
    thread.join()


def test_many_threads_wait(pair):
    """Several threads wait for receives of one connection; each gets its own."""
    a, b = pair
    wrong: list[int] = []

    def get(lane: int) -> None:
        for n in range(100):
            tensor = torch.empty(2)
            a.irecv(tensor, 1, 1000 * lane + n).wait(20)
            if tensor[0] != 1000 * lane + n:
                wrong.append(n)

    threads = [threading.Thread(target=get, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for n in range(100):
        for lane in range(4):
            b.isend(torch.full((2,), 1000.0 * lane + n), 0, 1000 * lane + n)
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_interrupted_wait(pair):
    """Ctrl-C ends the wait and nothing else, wherever in it the interrupt comes."""
    a, b = pair
    armed = threading.Event()

    def interrupt(number, frame):
        if armed.is_set():
            armed.clear()
            raise KeyboardInterrupt

    def press() -> None:
        assert armed.wait(20)
        # More than once: one that comes just before the wait blocks is seen by the interpreter after it only.
        while armed.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(0.002)

    ended = threading.Event()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for n in range(30):
            target = torch.zeros(1)
            receive = b.irecv(target, 0, n)
            thread = threading.Thread(target=press)
            with pytest.raises(KeyboardInterrupt):
                _wait_and_press(receive, armed, thread)
            thread.join()
            a.send(torch.ones(1), 1, n)
            receive.wait(20)
            assert target[0] == 1
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_and_press(receive: Transfer, armed: threading.Event, thread: threading.Thread) -> None:
    thread.start()
    armed.set()
    receive.wait(20)


def test_both_call_at_once():
    """Whoever is first, or both: one connection comes of it."""
    for _ in range(20):
        master, a, b = connected(3)
        barrier = threading.Barrier(2)
        got = [torch.zeros(3), torch.zeros(3)]

        def use(me, peer, out, barrier=barrier):
            barrier.wait()
            receive = me.irecv(out, peer, 0)
            me.isend(torch.full((3,), float(peer)), peer, 0)
            receive.wait(20)

        threads = [threading.Thread(target=use, args=args) for args in ((master, 0, got[0]), (a, -1, got[1]))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got[0].tolist() == [-1.0] * 3
        assert got[1].tolist() == [0.0] * 3
        for one in (master, a, b):
            one.close()


def test_told_of_a_peer_late():
    """The one who is called learns of its caller only now: the call waits for it."""
    a, b = channel(0), channel(1)
    a.connect({1: PeerInfo(1, b.address(), KEY)})
    send = a.isend(torch.ones(4), 1, 0)
    with pytest.raises(TimeoutError):
        send.wait(0.05)
    b.connect({0: PeerInfo(0, a.address(), KEY)})
    target = torch.zeros(4)
    b.recv(target, 0, 0)
    send.wait(20)
    assert target.tolist() == [1.0] * 4
    a.close()
    b.close()


def test_data_waits_for_its_receive(pair):
    """A large send is under way until the receive is there; TCP holds it back."""
    a, b = pair
    a.send(torch.ones(1), 1, 0)
    b.recv(torch.empty(1), 0, 0)
    send = a.isend(torch.arange(8 << 20), 1, 1)
    with pytest.raises(TimeoutError):
        send.wait(0.05)
    target = b.empty((8 << 20,), torch.int64)
    b.recv(target, 0, 1)
    send.wait(20)
    assert torch.equal(target, torch.arange(8 << 20))


def test_the_receive_never_comes():
    a, b = (channels := connected(3, announce=0.05))[1:]
    a.send(torch.ones(1), 1, 41)
    receive = b.irecv(torch.empty(1), 0, 42)
    with pytest.raises(BrokenError, match=r"rank 0 sent transfer 41, which rank 1 was not told to receive"):
        receive.wait(20)
    for one in channels:
        one.close()


def test_close_from_a_done_callback(pair):
    a, b = pair
    receive = b.irecv(torch.empty(3), 0, 0)
    receive.add_done_callback(b.close)
    closed = threading.Event()
    receive.add_done_callback(closed.set)
    a.send(torch.ones(3), 1, 0)
    assert closed.wait(20)
    with pytest.raises(ClosedError):
        b.irecv(torch.empty(3), 0, 1)


def test_a_forked_child_lets_go(pair):
    """The child's copies of the sockets do not keep the connection alive, and the child cannot use the channel."""
    a, b = pair
    a.send(torch.ones(1), 1, 0)
    b.recv(torch.empty(1), 0, 0)
    parent_end, child_end = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: it is what is tested
        pid = os.fork()
    if pid == 0:
        try:
            a.isend(torch.ones(1), 1, 1)
        except ClosedError:
            child_end.send(b"refused" if not psutil.Process().net_connections("tcp") else b"holding")
        parent_end.close()
        child_end.recv(1)  # until the parent is done
        os._exit(0)
    child_end.close()
    assert parent_end.recv(7) == b"refused"
    receive = b.irecv(torch.empty(1), 0, 1)
    a.abort()
    with pytest.raises(BrokenError):
        receive.wait(20)
    parent_end.close()
    os.waitpid(pid, 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_never_every_interface(host):
    with pytest.raises(ValueError, match="interface"):
        TcpChannel(ChannelContext(0, "a job", host))


def test_it_listens_nowhere_else():
    one = channel(0)
    port = int(one.address().rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port), timeout=20).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=20)
    one.close()


class TestPool:
    def test_memory_is_reused_when_the_last_view_is_gone(self):
        pool = WarmPool()
        tensor = pool.empty((1 << 20,), torch.float32)
        address = tensor.data_ptr()
        view = tensor[10:].view(-1, 2)
        del tensor
        assert pool.idle_bytes() == 0
        other = pool.empty((1 << 20,), torch.float32)
        assert other.data_ptr() != address
        del view
        assert pool.idle_bytes() >= 4 << 20
        assert pool.empty((1000, 1000), torch.float32).data_ptr() == address

    def test_a_collection_does_not_lose_what_is_in_use(self):
        pool = WarmPool()
        tensor = pool.empty((1 << 20,), torch.float32)
        gc.collect()
        del tensor
        assert pool.idle_bytes() >= 4 << 20

    def test_bounds(self):
        pool = WarmPool(most_bytes=5 << 20, most_blocks=2)
        tensors = [pool.empty((1 << 20,), torch.uint8) for _ in range(3)]
        tensors.clear()
        assert pool.idle_bytes() == 2 << 20
        pool.empty((8 << 20,), torch.uint8)
        assert pool.idle_bytes() == 2 << 20

    def test_kinds(self):
        pool = WarmPool()
        for dtype in (torch.bfloat16, torch.complex64, torch.bool):
            for shape in ((), (0, 5), (3, 4), (1 << 10, 1 << 11)):
                tensor = pool.empty(shape, dtype)
                assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)

    def test_the_channel_keeps_nothing_alive(self, pair):
        """So that the next receive finds the warm memory of the one before."""
        a, b = pair
        source = torch.ones(1 << 20)
        addresses = set()
        for n in range(4):
            target = b.empty((1 << 20,), torch.float32)
            addresses.add(target.data_ptr())
            done = threading.Event()
            receive = b.irecv(target, 0, n)
            receive.add_done_callback(done.set)
            a.send(source, 1, n)
            receive.wait(20)
            del target, receive
        assert len(addresses) <= 2


def test_several_interfaces() -> None:
    """Of a peer that listens on several, the others take one that answers."""
    several = TcpChannel(ChannelContext(0, "a job", "127.0.0.2", ("127.0.0.3", "127.0.0.1")))
    one = TcpChannel(ChannelContext(1, "a job", "127.0.0.1"))
    addresses = several.address().split(",")
    assert [address.partition(":")[0] for address in addresses] == ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
    with socket.create_server(("127.0.0.4", 0)) as closed:
        gone = f"127.0.0.4:{closed.getsockname()[1]}"
    for channel, peer, address in ((several, 1, one.address()), (one, 0, ",".join([gone, addresses[2]]))):
        channel.connect({peer: PeerInfo(peer, address, bytes(32))})
    x = torch.arange(10.0)
    y = torch.empty(10)
    arriving = several.irecv(y, 1, 1)
    one.isend(x, 0, 1).wait(10)
    arriving.wait(10)
    assert y.tolist() == x.tolist()
    for channel in (several, one):
        channel.close()


class Wire:
    """A socket that takes and gives all at once, and notes how much of the payload has passed before each call."""

    def __init__(self, passing: Ticket | Passing | None) -> None:
        self.passing, self.passed = passing, list[int | None]()

    def _note(self) -> None:
        it = self.passing
        figures = it.passed() if isinstance(it, Ticket) else it and (it.bytes, 0.0)
        self.passed.append(None if figures is None else figures[0])

    def sendmsg(self, parts: tuple[bytes, memoryview]) -> int:
        self._note()
        return len(parts[0]) + len(parts[1]) - 1

    def sendall(self, piece: memoryview) -> None:
        self._note()

    def recv_into(self, view: memoryview, nbytes: int, flags: int) -> int:
        self._note()
        return len(view)


@pytest.mark.parametrize(
    ("nbytes", "passed"),
    [(LARGE, [0, PIECE - 1, 2 * PIECE - 1]), (2 * PIECE, [0, PIECE - 1, 2 * PIECE - 1]), (PIECE, [None, None])],
)
def test_a_large_payload_is_counted_while_it_is_written(nbytes: int, passed: list[int | None]) -> None:
    ticket = Ticket()
    wire: Any = Wire(ticket)
    FrameSender._send_counted(wire, b"header", memoryview(bytearray(nbytes)), ticket)
    assert wire.passed == passed


@pytest.mark.parametrize(("counted", "passed"), [(True, [0, PIECE, 2 * PIECE]), (False, [None])])
def test_a_large_payload_is_counted_while_it_is_read(counted: bool, passed: list[int | None]) -> None:
    passing = Passing() if counted else None
    wire: Any = Wire(passing)
    inbound = Inbound(wire)
    inbound.passing = passing
    inbound.read_into(memoryview(bytearray(LARGE)))
    assert wire.passed == passed
    assert passing is None or passing.bytes == LARGE


@pytest.mark.parametrize("protection", [Protection(), Protection(encrypt=True)], ids=["clear", "sealed"])
def test_a_receive_knows_how_much_has_passed(protection: Protection) -> None:
    if protection.encrypt:
        pytest.importorskip("cryptography")
    ends = connected(2, protection)
    try:
        receiving = ends[1].irecv(torch.empty(LARGE, dtype=torch.uint8), -1, 1)
        assert receiving.passed() is None
        ends[0].isend(torch.ones(LARGE, dtype=torch.uint8), 0, 1)
        receiving.wait(HANG)
        passed, seconds = receiving.passed() or (0, 0.0)
        assert passed >= LARGE  # with what encryption adds
        assert seconds > 0
    finally:
        for end in ends:
            end.close()
