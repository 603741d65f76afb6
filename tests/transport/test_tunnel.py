"""Tunnels: sockets over an authenticated connection, which behave like sockets, and let in only whom they should."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from ports import free_port
from transport_kit import LIMIT, Proxy, nothing_leaks

from disttensor.runtime.protocol.errors import BrokenError
from disttensor.runtime.protocol.keys import curve_pair
from disttensor.runtime.transport import tunnel, tunnel_io
from disttensor.runtime.transport.spoke import ZmqSpoke
from disttensor.runtime.transport.tunnel import TunnelClient, TunnelServer
from disttensor.runtime.transport.tunnel_io import WINDOW

HOST, GUEST = curve_pair(), curve_pair()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_leaks():
        yield


@contextlib.contextmanager
def reception(host: str | Sequence[str] = "127.0.0.1", port: int = 0) -> Iterator[TunnelServer]:
    made = TunnelServer(host, port, HOST, GUEST[0])
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def visit(*addresses: str, keys=GUEST, server=HOST[0], timeout: float = LIMIT) -> Iterator[socket.socket]:
    made = TunnelClient(addresses, keys, server, timeout)
    with made.socket as sock:
        sock.settimeout(LIMIT)
        try:
            yield sock
        finally:
            sock.close()
            made.close()


def accept(at: tunnel_io.TunnelPump) -> socket.socket:
    assert select.select([at.arrivals], [], [], LIMIT)[0], "nobody came"
    sock = at.accept()
    assert sock is not None
    sock.settimeout(LIMIT)
    return sock


def receive(sock: socket.socket, size: int) -> bytes:
    out = bytearray()
    while len(out) < size:
        piece = sock.recv(1 << 20)
        assert piece, f"the end after {len(out)} of {size} bytes"
        out += piece
    return bytes(out)


@contextlib.contextmanager
def tunnelled() -> Iterator[tuple[TunnelServer, socket.socket, socket.socket]]:
    with reception() as at, visit(*at.addresses) as there:
        there.sendall(b"knock")
        with accept(at) as here:
            assert receive(here, 5) == b"knock"
            yield at, here, there


def test_bytes_arrive_in_both_directions() -> None:
    with tunnelled() as (_, here, there):
        here.sendall(b"come in")
        assert receive(there, 7) == b"come in"


def test_much_arrives_in_order_in_both_directions_at_once() -> None:
    text = bytes(range(251)) * (5 * WINDOW // 251)
    with tunnelled() as (_, here, there):
        writers = [threading.Thread(target=s.sendall, args=(text,)) for s in (here, there)]
        for writer in writers:
            writer.start()
        got: dict[str, bytes] = {}
        readers = [
            threading.Thread(target=lambda n=n, s=s: got.update({n: receive(s, len(text))}))
            for n, s in (("here", here), ("there", there))
        ]
        for thread in readers:
            thread.start()
        for thread in (*writers, *readers):
            thread.join(4 * LIMIT)
        assert got == {"here": text, "there": text}


def test_a_writer_waits_for_its_reader() -> None:
    with tunnelled() as (_, here, there):
        sent = 0
        while sent < WINDOW:
            sent += there.send(bytes(1 << 16))
        there.settimeout(2.0)
        with contextlib.suppress(TimeoutError):
            while sent < 16 * WINDOW:
                sent += there.send(bytes(1 << 16))
        assert sent < 4 * WINDOW
        receive(here, sent)
        there.settimeout(LIMIT)
        there.sendall(b"there is room again")
        assert receive(here, 19) == b"there is room again"


def test_a_writer_that_does_not_wait_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with tunnelled() as (at, here, there):
        monkeypatch.setattr(tunnel_io.End, "away", property(lambda self: 0, lambda self, value: None), raising=False)
        with contextlib.suppress(OSError):
            while True:
                there.sendall(bytes(1 << 16))
        assert at.accept() is None
        while here.recv(1 << 20):
            pass


@pytest.mark.parametrize(
    "message",
    [
        b"A" + (1 << 40).to_bytes(8, "big"), b"A", b"A" + b"\xff" * 1000, b"", b"X", b"Evil",
        b"D" + bytes(WINDOW + (1 << 17)),
    ],
    ids=["more than was sent", "no number", "a long number", "nothing", "unknown", "a long end", "too much"],
)  # fmt: skip
def test_what_no_other_end_says_ends_the_tunnel(message: bytes) -> None:
    end = tunnel_io.End()
    try:
        end.handle_message(b"D12")
        assert not end.over
        end.handle_message(message)
        assert end.finished
        end.handle_message(b"D12")
        assert end.finished
    finally:
        end.ours.close()
        end.theirs.close()


class Port:
    """A port of messages whose sign that one has arrived, as ZeroMQ's, is gone after any send. At the first end of a
    tunnel that is sent the first message of another peer arrives."""

    def __init__(self) -> None:
        self._sign = os.eventfd(0, os.EFD_NONBLOCK)
        self._arrived: list[tuple[int, bytes]] = []
        self._ends = 0

    def arrive(self, peer: int, message: bytes) -> None:
        self._arrived.append((peer, message))
        os.eventfd_write(self._sign, 1)

    def send(self, peer: int, message: bytes) -> None:
        if message == b"E" and not self._ends:
            self._ends = 1
            self.arrive(1, b"Dsecond")
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._sign)

    def drain(self) -> list[tuple[int, bytes]]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._sign)
        arrived, self._arrived = self._arrived, []
        return arrived

    def gone(self) -> list[int]:
        return []

    def fileno(self) -> int:
        return self._sign

    def close(self) -> None:
        os.close(self._sign)


def test_one_who_comes_while_another_tunnel_ends_is_heard() -> None:
    """To tell the other end of it is a send, which may swallow the sign that a message has arrived."""
    port = Port()
    pump = tunnel_io.TunnelPump(port, "pump")
    pump.start()
    try:
        port.arrive(0, b"Dfirst")
        with accept(pump) as first:
            port.arrive(0, b"E")
            assert first.recv(5) == b"first"
            with accept(pump) as second:
                assert second.recv(6) == b"second"
    finally:
        pump.close()


def test_one_for_whom_there_is_no_descriptor_left_ends_nobody_elses_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    with tunnelled() as (at, here, there):

        def none_left() -> NoReturn:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(tunnel_io, "End", none_left)
            spoke = ZmqSpoke(at.addresses[0], HOST[0], *GUEST, 0, connect_timeout=LIMIT)
            spoke.send(b"Dhello")
            assert spoke.recv(LIMIT) == b"E"
            spoke.close()
        assert at.accept() is None
        here.sendall(b"still here")
        assert receive(there, 10) == b"still here"


def test_one_that_has_no_descriptors_itself_does_not_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_connection", none_left)
    with reception() as at, pytest.raises(OSError, match="Too many open files"):
        TunnelClient(at.addresses, GUEST, HOST[0], LIMIT)


@pytest.mark.parametrize("which", [0, 1], ids=["root", "agent"])
def test_the_end_of_one_is_the_end_of_the_other_after_all_that_was_said(which: int) -> None:
    with tunnelled() as (_, *ends):
        mine, other = ends[which], ends[1 - which]
        mine.sendall(b"x" * 100_000)
        mine.close()
        receive(other, 100_000)
        assert other.recv(1) == b""


def test_who_has_left_is_not_taken_for_somebody_new() -> None:
    with tunnelled() as (at, here, there):
        here.sendall(b"y" * 1000)
        here.close()
        receive(there, 1000)  # which is acknowledged to nobody
        assert there.recv(1) == b""
        with visit(*at.addresses) as second:
            second.sendall(b"me")
            with accept(at) as sock:
                assert receive(sock, 2) == b"me"
            assert at.accept() is None


def test_many_guests_share_a_key_and_are_told_apart() -> None:
    with reception() as at, contextlib.ExitStack() as stack:
        there = [stack.enter_context(visit(*at.addresses)) for _ in range(5)]
        for number, sock in enumerate(there):
            sock.sendall(b"%d" % number)
        here = [stack.enter_context(accept(at)) for _ in there]
        for sock in here:
            number = receive(sock, 1)
            sock.sendall(b"you are " + number)
        assert [receive(sock, 9) for sock in there] == [b"you are %d" % n for n in range(5)]


@pytest.mark.parametrize("how", [Proxy.close, Proxy.reset])
def test_a_cut_connection_ends_both(how: Callable[[Proxy], None]) -> None:
    with reception() as at:
        proxy = Proxy(at.addresses[0])
        with visit(proxy.address) as there:
            there.sendall(b"knock")
            with accept(at) as here:
                receive(here, 5)
                how(proxy)
                assert here.recv(1) == b""
                assert there.recv(1) == b""
        if how is Proxy.reset:
            proxy.close()


# ---- who gets in -----------------------------------------------------------------------------------------------------


def test_another_key_is_refused_at_once() -> None:
    with reception() as at:
        with pytest.raises(BrokenError, match=r"refused the key: it is another job's"):
            TunnelClient(at.addresses, curve_pair(), HOST[0], LIMIT)
        assert at.refused == 1
        assert at.accept() is None
        with visit(*at.addresses) as there:
            there.sendall(b"x")
            accept(at).close()


def test_another_servers_key_connects_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_ATTEMPT", 0.2)
    with reception() as at:
        with pytest.raises(BrokenError, match="does not prove to know this job's secret"):
            TunnelClient(at.addresses, GUEST, curve_pair()[0], 0.3)
        assert at.accept() is None


def test_what_speaks_another_language_is_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_ATTEMPT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(BrokenError, match=rf"{address}: something answers, but"):
            TunnelClient([address], GUEST, HOST[0], 0.3)


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("bomb-went-off",)


PICKLE = pickle.dumps(Bomb())


@pytest.mark.fault(32, 34)
@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(1000), PICKLE * 10], ids=["http", "zeros", "pickle"]
)
def test_a_stranger_leaves_no_trace(noise: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with tunnelled() as (at, here, there):
        host, _, port = at.addresses[0].removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(noise)
            stranger.settimeout(LIMIT)
            while stranger.recv(4096):
                pass
        assert at.accept() is None
        here.sendall(b"still here")
        assert receive(there, 10) == b"still here"
    assert not list(tmp_path.iterdir())


@pytest.mark.fault(34)
def test_pickles_of_one_with_the_key_are_bytes_or_the_end_of_its_tunnel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with tunnelled() as (at, here, there):
        for message, arrives in ((PICKLE, b""), (b"D" + PICKLE, PICKLE)):
            guest = ZmqSpoke(at.addresses[0], HOST[0], *GUEST, 0, connect_timeout=LIMIT)
            guest.send(message)
            with accept(at) as sock:
                assert receive(sock, len(arrives)) == arrives
                if not arrives:
                    assert sock.recv(1) == b""
            guest.close()
        here.sendall(b"still here")
        assert receive(there, 10) == b"still here"
    assert not list(tmp_path.iterdir())


# ---- addresses -------------------------------------------------------------------------------------------------------


def test_a_guest_may_come_before_its_root() -> None:
    port = free_port()
    got = []

    def come() -> None:
        with visit(f"tcp://localhost:{port}") as there:
            there.sendall(b"early")
            got.append(receive(there, 4))

    guest = threading.Thread(target=come)
    guest.start()
    try:
        with reception(port=port) as at, accept(at) as here:
            assert receive(here, 5) == b"early"
            here.sendall(b"late")
            guest.join(LIMIT)
    finally:
        guest.join()
    assert got == [b"late"]


def test_the_first_address_that_answers_is_taken() -> None:
    others = f"tcp://127.0.0.1:{free_port()}", "tcp://no-such-host.invalid:1"
    with reception() as at, visit(*others, *at.addresses) as there:
        there.sendall(b"x")
        accept(at).close()


def test_each_address_is_named_with_its_reason() -> None:
    port = free_port()
    with pytest.raises(BrokenError) as caught:
        TunnelClient([f"tcp://127.0.0.1:{port}", "tcp://no-such-host.invalid:1"], GUEST, HOST[0], 0.2)
    assert f"tcp://127.0.0.1:{port}: Connection refused" in str(caught.value)
    assert "tcp://no-such-host.invalid:1: the name does not resolve" in str(caught.value)


def test_ipv6() -> None:
    with reception("::1") as at, visit(*at.addresses) as there:
        assert at.addresses[0].startswith("tcp://[::1]:")
        there.sendall(b"x")
        accept(at).close()


def test_it_listens_on_each_address_that_is_named_and_on_no_other() -> None:
    with reception(["127.0.0.1", "::1", "127.0.0.2"]) as at:
        hosts = [address.rpartition(":")[0] for address in at.addresses]
        assert hosts == ["tcp://127.0.0.1", "tcp://[::1]", "tcp://127.0.0.2"]
        for address in at.addresses:
            with visit(address) as there:
                there.sendall(b"x")
                accept(at).close()
        port = int(at.addresses[0].rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", port), LIMIT)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_never_every_interface(host: str) -> None:
    with pytest.raises(ValueError, match="means every interface"):
        TunnelServer(host, 0, HOST, GUEST[0])


def test_a_port_that_is_taken() -> None:
    with reception() as at:
        port = int(at.addresses[0].rpartition(":")[2])
        with pytest.raises(BrokenError, match="cannot listen on"):
            TunnelServer("127.0.0.1", port, HOST, GUEST[0])
