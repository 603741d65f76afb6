"""How the hub looks at connections that are libzmq's, which may close them at any moment."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from limits import HANG
from quick import inputs

from disttensor.runtime.channel.base import ChannelContext, PeerInfo, Protection
from disttensor.runtime.channel.tcp import dial, listener
from disttensor.runtime.channel.tcp.channel import TcpChannel
from disttensor.runtime.channel.tcp.handshake import HELLO, NONCE, PeerHello
from disttensor.runtime.host.tcp_info import _MOST_BETWEEN_TRIES, LATE, _tries, lasting
from disttensor.runtime.protocol.errors import BrokenError
from disttensor.runtime.transport import sockets, zap


def lowest_free(descriptor: int) -> int:
    """The number that the next descriptor gets."""
    number = os.dup(descriptor)
    os.close(number)
    return number


def test_a_connection_that_has_been_closed_leaves_no_descriptor() -> None:
    """Its number may be something else's by the time that it is looked at."""
    ends = os.pipe()
    before = lowest_free(ends[0])
    with pytest.raises(OSError, match="non-socket"), zap._copy(ends[0]):
        pass
    after = lowest_free(ends[0])
    for end in (*ends, *range(before, after)):
        os.close(end)
    assert after == before


#: What else may have the number of a connection that has ended.
OTHERS: dict[str, Callable[[], Any]] = {
    "a Unix socket": lambda: socket.socketpair()[0],
    "a Unix datagram socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    "a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "a listener": lambda: socket.create_server(("127.0.0.1", 0)),
    "a datagram socket": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    "a pipe": lambda: os.fdopen(os.pipe()[0], "rb"),
    "a file": tempfile.TemporaryFile,
    "nothing": lambda: contextlib.nullcontext(-1),
}


@pytest.fixture
def handler(request: pytest.FixtureRequest) -> Iterator[zap.ZapHandler]:
    ctx = sockets.context()
    router = sockets.router(ctx, "tcp://127.0.0.1:*", None)
    handler = zap.ZapHandler(ctx, router, None, getattr(request, "param", -1.0))
    yield handler
    router.close()
    ctx.term()
    handler.join()


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # a pair's or a pipe's other end
def test_a_stranger_that_has_gone_may_be_any_other_descriptor_when_it_is_looked_at(
    name: str, handler: zap.ZapHandler
) -> None:
    """The thread that lets nodes in goes on, and nothing is done to the other one."""
    with OTHERS[name]() as other:
        number = other if isinstance(other, int) else other.fileno()
        handler._note_event(zap._EVENT.pack(int(zmq.EVENT_ACCEPTED), number))
        assert handler._open[number].address == zap._UNKNOWN
        handler._let_in = 1
        assert handler.received() == {}
        assert number not in handler.descriptors()
        handler._note_event(zap._EVENT.pack(int(zmq.EVENT_DISCONNECTED), number))
    assert not handler._open


@pytest.mark.parametrize("handler", [2.0, 200.0], indirect=True)
def test_the_kernel_ends_no_nodes_connection_before_its_silence_is_counted(handler: zap.ZapHandler) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        server.accept()[0] as accepted,
    ):
        try:
            accepted.getsockopt(socket.IPPROTO_TCP, _MOST_BETWEEN_TRIES)
        except OSError:
            pytest.skip("the kernel has no such option: it goes on for a quarter of an hour")
        handler._note_event(zap._EVENT.pack(int(zmq.EVENT_ACCEPTED), accepted.fileno()))
        handler._let_in = 1
        assert handler.watch(accepted.fileno(), 0)
        most = accepted.getsockopt(socket.IPPROTO_TCP, _MOST_BETWEEN_TRIES)
        assert lasting(most, _tries()) > handler._silence + LATE


def test_what_has_a_connections_number_now_is_left_alone(handler: zap.ZapHandler) -> None:
    """libzmq has closed the connection of a node, and the event of its end is on its way."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:

        def connection() -> tuple[socket.socket, socket.socket]:
            dialled = stack.enter_context(socket.create_connection(server.getsockname()))
            return stack.enter_context(server.accept()[0]), dialled

        accepted, _ = connection()
        number = accepted.fileno()
        handler._note_event(zap._EVENT.pack(int(zmq.EVENT_ACCEPTED), number))
        handler._let_in = 1
        assert handler.watch(number, 0)
        assert list(handler.received()) == [number]
        assert number in handler.descriptors()
        another, its_end = connection()
        os.dup2(another.fileno(), number)
        assert handler.received() == {}
        assert number not in handler.descriptors()
        handler.cut(0)
        assert handler.cut_endless({number: (0, 1 << 30)}, {}, 0) == []
        assert handler.cut_deaf() == []
        its_end.sendall(b"as before")
        assert another.recv(100) == b"as before"
        handler._note_event(zap._EVENT.pack(int(zmq.EVENT_DISCONNECTED), number))
        assert handler.take_leaving() == [0]


def test_a_node_is_not_told_as_a_stranger_when_another_process_of_its_host_looks_for_the_port(
    handler: zap.ZapHandler,
) -> None:
    """As agents of one host do that join at once: one is let in while the next makes sure that there is a port."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        numbers = []
        for _ in range(2):
            stack.enter_context(socket.create_connection(server.getsockname()))
            numbers.append(stack.enter_context(server.accept()[0]).fileno())
            handler._note_event(zap._EVENT.pack(int(zmq.EVENT_ACCEPTED), numbers[-1]))
        node, looks = numbers
        assert handler._answer([b"1.0", b"1", sockets.ZAP_DOMAIN, b"127.0.0.1", b"", b"NULL"])[2] == b"200"
        handler._note_event(zap._EVENT.pack(int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL), looks))
        handler._note_event(zap._EVENT.pack(int(zmq.EVENT_DISCONNECTED), looks))
        assert handler.watch(node, 0)
        assert handler.refused == 0
        for stranger in ("noise", "told"):  # one that fails the handshake is told still
            handler._note_event(zap._EVENT.pack(int(zmq.EVENT_ACCEPTED), looks))
            handler._note_event(zap._EVENT.pack(int(zmq.EVENT_DISCONNECTED), looks))
            assert handler.refused == (1 if stranger == "noise" else 2)


def test_a_connection_is_known_where_there_is_no_descriptor_for_a_look_at_it(
    handler: zap.ZapHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the node on it could never be cut off again."""

    def exhausted(descriptor: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as node,
        server.accept()[0] as accepted,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(zap, "_copy", exhausted)
            handler._note_event(zap._EVENT.pack(int(zmq.EVENT_ACCEPTED), accepted.fileno()))
        handler._answer([b"1.0", b"1", sockets.ZAP_DOMAIN, b"127.0.0.1", b"", b"NULL"])
        handler.watch(accepted.fileno(), 0)
        assert accepted.fileno() in handler.descriptors()
        handler.cut(0)
        assert node.recv(1) == b""
        handler._note_event(zap._EVENT.pack(int(zmq.EVENT_DISCONNECTED), accepted.fileno()))
        assert handler.take_leaving() == [0]


def test_a_peer_is_not_late_that_was_not_heard_because_the_listener_was_at_another_one() -> None:
    """As with 64 nodes on two cores: a hello takes the listener a while each."""
    stalled, heard = threading.Event(), threading.Event()
    limit = 0.2

    def admit(sock: socket.socket, hello: PeerHello, nonce: bytes) -> str:
        if hello.rank == 0:
            stalled.set()
            said.wait(HANG)
            clock.append(time.monotonic())
            while time.monotonic() < clock[0] + 2 * limit:  # it is at this one for longer than the other one has
                pass
        else:
            heard.set()
        sock.close()
        return ""

    said, clock = threading.Event(), list[float]()
    listening = listener.Listener(["127.0.0.1"], limit, admit, "listener", lambda: None)
    with contextlib.ExitStack() as stack:
        host, _, port = listening.address.rpartition(":")
        first, peer = (stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(2))
        for one in (first, peer):
            assert len(one.recv(NONCE)) == NONCE
        first.sendall(b"DTt4" + bytes(HELLO - 4))
        assert stalled.wait(HANG)
        peer.sendall(b"DTt4" + (1).to_bytes(4, "little") + bytes(HELLO - 8))
        said.set()
        peer.settimeout(HANG)
        with contextlib.suppress(ConnectionError):
            assert peer.recv(1) == b""  # it is hung up on in any case
        assert heard.is_set()
    listening.stop()
    listening.thread.join()


def test_a_peer_that_has_said_hello_is_heard_before_strangers_push_it_out() -> None:
    """However many have come while the listener was at something else."""
    stalled, go, heard = threading.Event(), threading.Event(), threading.Event()

    def admit(sock: socket.socket, hello: PeerHello, nonce: bytes) -> str:
        if hello.rank == 0:
            stalled.set()
            go.wait(HANG)
        else:
            heard.set()
        sock.close()
        return ""

    listening = listener.Listener(["127.0.0.1"], HANG, admit, "listener", lambda: None)
    with contextlib.ExitStack() as stack:

        def come() -> socket.socket:
            host, _, port = listening.address.rpartition(":")
            return stack.enter_context(socket.create_connection((host, int(port))))

        def say_hello(sock: socket.socket, rank: int) -> None:
            sock.sendall(b"DTt4" + rank.to_bytes(4, "little") + bytes(HELLO - 8))

        peer, first = come(), come()
        for one in (peer, first):
            assert len(one.recv(NONCE)) == NONCE
        say_hello(first, 0)
        assert stalled.wait(HANG)
        say_hello(peer, 1)
        for _ in range(listener._PENDING + 6):
            come()
        go.set()
        assert heard.wait(HANG)
    listening.stop()
    listening.thread.join()


KEY = b"k" * 32


class Crowd:
    """Calls of many ranks at once to one whose listener comes late: until ``come`` it accepts none of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, connect: float, greet: float) -> None:
        self._late, self._arrived = threading.Event(), threading.Semaphore(0)
        accept = listener.Listener._accept

        def accepts(listening: listener.Listener, sock: socket.socket) -> None:
            self._late.wait(HANG)
            accept(listening, sock)

        monkeypatch.setattr(listener.Listener, "_accept", accepts)
        self.channel = TcpChannel(ChannelContext(0, "job", "127.0.0.1"))
        self.channel.connect({rank: PeerInfo(rank, "127.0.0.1:9", KEY) for rank in range(1, ranks + 1)})
        self.errors: list[Exception] = []
        info = PeerInfo(0, self.channel.address(), KEY)

        def call(rank: int) -> None:
            def reached() -> bool:
                self._arrived.release()
                return True

            try:
                sock, _ = dial.dial(info, "job", rank, connect, greet, lambda sock: True, reached, Protection())
                assert sock is not None
                sock.close()
            except Exception as error:
                self.errors.append(error)

        self._threads = [threading.Thread(target=call, args=(rank,)) for rank in range(1, ranks + 1)]
        for thread in self._threads:
            thread.start()
        for _ in range(ranks):
            assert self._arrived.acquire(timeout=HANG), "the kernel keeps too few of them"

    def come(self) -> None:
        self._late.set()
        for thread in self._threads:
            thread.join(HANG)
        self.channel.abort()


def test_a_crowd_of_peers_at_a_listener_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the first collective of 200 nodes on a busy host: none is pushed out, or told that nobody answers."""
    crowd = Crowd(monkeypatch, inputs(200), connect=HANG, greet=HANG)
    crowd.come()
    assert crowd.errors == []


def test_the_limit_for_reaching_a_peer_is_not_that_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel has answered, so it is there."""
    limit = 0.2
    crowd = Crowd(monkeypatch, 3, connect=limit, greet=HANG)
    threading.Event().wait(2 * limit)
    crowd.come()
    assert crowd.errors == []


def test_a_peer_that_is_there_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(monkeypatch, 1, connect=HANG, greet=0.05)
    crowd._threads[0].join(HANG)
    assert [str(error) for error in crowd.errors] == [
        f"rank 1 cannot reach rank 0 at {crowd.channel.address()}: no answer within 0.05 s; check that the address and "
        "port can be reached from here (firewall, interface), and whether its process has said that it has no file "
        "descriptors left"
    ]
    crowd.come()


@pytest.mark.parametrize("error", [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN])
def test_a_network_that_is_down_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """The kernel says so at once, and the link may be back within the limit."""
    left = [error] * 2

    class Cut(socket.socket):
        def connect(self, address: Any) -> None:
            if left:
                raise OSError(left.pop(), "the network is down")
            super().connect(address)

    monkeypatch.setattr(dial.socket, "socket", Cut)
    monkeypatch.setattr(dial, "_PAUSE", 0.001)
    crowd = Crowd(monkeypatch, 1, connect=HANG, greet=HANG)
    crowd.come()
    assert (crowd.errors, left) == ([], [])


def test_a_network_that_stays_down_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError(errno.ENETUNREACH, "the network is down")

    monkeypatch.setattr(dial.socket, "socket", Cut)
    monkeypatch.setattr(dial, "_PAUSE", 0.001)
    info = PeerInfo(0, "127.0.0.1:9", KEY)
    with pytest.raises(BrokenError, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1:9: .*the network is down"):
        dial.dial(info, "job", 1, 0.05, HANG, lambda sock: True, lambda: True, Protection())
