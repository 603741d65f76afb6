"""The tcp channel among strangers, on bad wires, and with peers that die."""

from __future__ import annotations

import errno
import os
import pickle
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial

import pytest
import torch
from aftermath import within
from channel_kit import BETWEEN_PROCESSES
from channel_kit import connected as connected_by
from deafen import deafen
from hostile_workers import BOMB
from limits import HANG
from test_channel_tcp import KEY, PROTECTIONS, channel, connected, named, nothing_left  # noqa: F401 - a fixture

from disttensor.runtime.channel import ChannelContext, PeerInfo, get_channel
from disttensor.runtime.channel.base import Protection
from disttensor.runtime.channel.carrier import Carrier
from disttensor.runtime.channel.tcp import dial
from disttensor.runtime.channel.tcp import peer as tcp_peer
from disttensor.runtime.channel.tcp.channel import TcpChannel
from disttensor.runtime.channel.tcp.frames import CARRIED, DATA, NACK, POISON, SIZE, WORD, Frame, Opener, Sealer
from disttensor.runtime.channel.tcp.handshake import HELLO, NONCE, VERDICT, WELCOME, PeerHello, Secrets, answer, call
from disttensor.runtime.channel.tcp.inbound import Inbound
from disttensor.runtime.channel.tcp.listener import Listener
from disttensor.runtime.channel.tcp.peer import Limits
from disttensor.runtime.channel.tcp.shield import CHECKSUM, CHUNK, CIPHER, ENCRYPT, Sealed, agreed, is_local
from disttensor.runtime.protocol.codec import dtype_id
from disttensor.runtime.protocol.errors import BrokenError, ChannelError, ProtocolError
from disttensor.runtime.protocol.transfer_ids import BLOCK, COLLECTIVES, ORDERED


class Wire:
    """A proxy before ``target``: it can flip a bit of, or cut, what the caller sends, and it keeps a record of it."""

    def __init__(self, target: str, flip: int | None = None, cut: int | None = None) -> None:
        self.flip, self.cut, self.record = flip, cut, b""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._run)]
        self._socks: list[socket.socket] = []
        self._threads[0].start()

    def _run(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            host, port = self._target.split(":")
            try:
                callee = socket.create_connection((host, int(port)))
            except ConnectionError:  # it has closed meanwhile: who has called hung up before it said anything
                caller.close()
                continue
            self._socks += [caller, callee]
            for args in ((caller, callee, True), (callee, caller, False)):
                thread = threading.Thread(target=self._pump, args=args)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, forward: bool) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                if forward and self.cut is not None:
                    data = data[: self.cut - passed]
                if forward and self.flip is not None and 0 <= self.flip - passed < len(data):
                    at = self.flip - passed
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                passed += len(data)
                if forward:
                    self.record += data
                sink.sendall(data)
                if forward and passed == self.cut:
                    break
        except OSError:
            pass
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._socks):
            sock.close()


@contextmanager
def through_a_wire(
    flip: int | None = None,
    cut: int | None = None,
    protection: Protection = Protection(),  # noqa: B008 - frozen
    **limits: float,
) -> Iterator[tuple[TcpChannel, TcpChannel, Wire]]:
    """Rank 0 calls rank 1 through a wire; rank 1 calls nobody who answers."""
    a, b = channel(0, protection, **limits), channel(1, protection, **limits)
    wire = Wire(b.address(), flip, cut)
    silent = socket.create_server(("127.0.0.1", 0))
    a.connect({1: PeerInfo(1, wire.address, KEY)})
    b.connect({0: PeerInfo(0, f"127.0.0.1:{silent.getsockname()[1]}", KEY)})
    try:
        yield a, b, wire
    finally:
        a.abort()
        b.abort()
        wire.close()
        silent.close()


@contextmanager
def pair(**limits: float) -> Iterator[tuple[TcpChannel, TcpChannel]]:
    """Ranks 0 and 1."""
    a, b = channel(0, **limits), channel(1, **limits)
    a.connect({1: PeerInfo(1, b.address(), KEY)})
    b.connect({0: PeerInfo(0, a.address(), KEY)})
    try:
        yield a, b
    finally:
        a.abort()
        b.abort()


def stranger(address: str) -> socket.socket:
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    return sock


def everything(sock: socket.socket) -> bytes:
    """All that they send until they hang up."""
    out = b""
    try:
        while piece := sock.recv(4096):
            out += piece
    except ConnectionError:
        pass
    return out


def check_works(a: TcpChannel, b: TcpChannel, to: int, source: int, transfer: int = 1000) -> None:
    target = torch.zeros(5)
    receive = b.irecv(target, source, transfer)
    a.isend(torch.ones(5), to, transfer).wait(20)
    receive.wait(20)
    assert target.tolist() == [1.0] * 5


def test_wrong_key():
    """Rank 0 has another key for rank 1 than rank 1 has; the master has the right one."""
    master, a, b = connected(3)
    a.connect({1: PeerInfo(1, b.address(), bytes(32))})
    target = torch.zeros(3)
    with pytest.raises(BrokenError, match=r"rank 1 at .* refused rank 0 in the handshake"):
        a.isend(torch.ones(3), 1, 0).wait(20)
    check_works(master, b, 1, -1)
    # The stranger's attempts are no fault of the true rank 0.
    receive = b.irecv(target, -1, 0)
    assert b.failure(0) == ""
    b.irecv(torch.zeros(3), 0, 0)
    master.isend(torch.ones(3), 1, 0).wait(20)
    receive.wait(20)
    for one in (master, a, b):
        one.close()


def test_a_peer_that_is_introduced_later_than_any_time_limit(monkeypatch, caplog):
    """It computes for long before it takes the command that introduces the two."""
    monkeypatch.setattr(dial, "_LATE", 0.02)
    kept, many = threading.Semaphore(0), 20  # each for 0.05 s, and all limits together are 0.4 s
    drop = Listener._drop_pending

    def dropped(self: Listener, pending: object, why: str = "") -> None:
        drop(self, pending, why)
        kept.release()

    monkeypatch.setattr(Listener, "_drop_pending", dropped)
    a, b = channel(0, handshake=0.05, connect=0.2, greet=0.2), channel(1, handshake=0.05)
    with closing(a), closing(b):
        a.connect({1: PeerInfo(1, b.address(), KEY)})
        send = a.isend(torch.ones(3), 1, 0)
        for _ in range(many):
            assert kept.acquire(timeout=HANG)
        assert a.failure(1) == ""
        assert not send.is_completed()
        b._listener._limit = HANG  # a busy host may need longer for one call
        b.connect({0: PeerInfo(0, a.address(), KEY)})
        target = torch.zeros(3)
        b.irecv(target, 0, 0).wait(HANG)
        send.wait(HANG)
        assert target.tolist() == [1.0] * 3
    assert not caplog.records


def test_many_that_are_introduced_later_push_nobody_out(monkeypatch):
    """A whole job calls a node that is busy: more than strangers may come at once."""
    monkeypatch.setattr("disttensor.runtime.channel.tcp.listener._PENDING", 2)
    many = 12
    # no limit for calls: on a busy host the first may have been hung up on before the last one comes
    b, *others = [channel(rank, handshake=HANG, greet=HANG) for rank in range(many)]
    come = threading.Semaphore(0)
    monkeypatch.setattr(b._listener, "_admit", lambda sock, hello, nonce: come.release())
    with ExitStack() as stack:
        for one in (b, *others):
            stack.enter_context(closing(one))
        sends = []
        for rank, one in enumerate(others, 1):
            one.connect({0: PeerInfo(0, b.address(), KEY)})
            sends.append(one.isend(torch.ones(1), 0, rank))
        while len(b._listener._unknown) < many - 1:
            assert come.acquire(timeout=HANG)
        monkeypatch.setattr(b._listener, "_admit", b._admit)
        b.connect({rank: PeerInfo(rank, one.address(), KEY) for rank, one in enumerate(others, 1)})
        for rank, send in enumerate(sends, 1):
            b.irecv(torch.zeros(1), rank, rank).wait(HANG)
            send.wait(HANG)


@pytest.mark.fault(39)
def test_another_job():
    a, b = channel(0), channel(1)
    a._context = type(a._context)(0, "another job", "127.0.0.1")
    for me, peer in ((a, b), (b, a)):
        other = peer._context.rank
        me.connect({other: PeerInfo(other, peer.address(), KEY)})
    with within(1.0), pytest.raises(BrokenError, match="another job"):
        a.isend(torch.ones(3), 1, 0).wait(20)
    a.close()
    b.close()


def test_an_impostor_listens():
    """What answers at the peer's address does not have the key: it learns a nonce and a proof, and no more."""
    impostor = socket.create_server(("127.0.0.1", 0))
    a = channel(0)
    a.connect({1: PeerInfo(1, f"127.0.0.1:{impostor.getsockname()[1]}", KEY)})
    send = a.isend(torch.ones(3), 1, 0)
    sock, _ = impostor.accept()
    sock.sendall(os.urandom(NONCE))
    hello = b""
    while len(hello) < HELLO:
        hello += sock.recv(HELLO - len(hello))
    sock.sendall(b"\x01\x00" + os.urandom(VERDICT - 2))
    with pytest.raises(BrokenError, match="cannot prove"):
        send.wait(20)
    assert everything(sock) == b""
    a.close()
    sock.close()
    impostor.close()


def hello(job: str, rank: int, to: int) -> Callable[[bytes], bytes]:
    """Returns what makes a hello, of one without the pair's key, to the acceptor's nonce."""

    def said(nonce: bytes) -> bytes:
        near, far = socket.socketpair()
        with near, far:
            far.sendall(nonce)
            far.shutdown(socket.SHUT_WR)
            with suppress(EOFError):
                call(near, bytes(32), job, rank, to, 0)
            return far.recv(HELLO, socket.MSG_WAITALL)

    return said


#: Why one is refused that does not say hello.
NOISE = "not the handshake of a peer of this job, or none in time"


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


@pytest.mark.fault(32, 34)
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b" " * HELLO, NOISE),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", NOISE),
        (random.Random(1).randbytes(5000), NOISE),
        (pickle.dumps(Bomb()) * 10, NOISE),
        (b"DTt4" + bytes(HELLO - 4), "for another job, or for another one than rank 1"),
        (hello("another job", 0, 1), "for another job, or for another one than rank 1"),
        (hello("a job", 0, 2), "for another job, or for another one than rank 1"),
        (hello("a job", 0, 1), "without the key of rank 0 and rank 1"),
        (hello("a job", 7, 1), None),
        (b"DTt4" + (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(64), NOISE),
    ],
    ids=[
        "http",
        "tls",
        "random",
        "pickle",
        "zeros",
        "another job",
        "another rank",
        "a known rank",
        "an unknown rank",
        "half of it",
    ],
)
def test_strangers_get_a_nonce_and_no_more(said, why, tmp_path, monkeypatch, caplog):
    """They are told to the log once, however many come; of those that may become known later nothing is said."""
    monkeypatch.chdir(tmp_path)
    master, a, b = connected(3, handshake=0.3)
    for _ in range(3):
        with stranger(b.address()) as sock:
            sock.sendall(said(sock.recv(NONCE, socket.MSG_PEEK | socket.MSG_WAITALL)) if callable(said) else said)
            assert len(everything(sock)) <= NONCE
    check_works(a, b, 1, 0)
    assert not list(tmp_path.iterdir())
    for one in (master, a, b):
        one.close()
    told = [] if why is None else [f"refused a connection from 127.0.0.1: {why}; 1 refused so far"]
    assert [record.getMessage() for record in caplog.records] == told


def headed(sealer: Sealer, kind: int, name: str) -> bytes:
    """A frame of this kind, which carries a pickle wherever it has room; kind 0 is one whose header is a pickle."""
    descriptor = BOMB.ljust(24, b"\0") if name == "shm" else b""
    n = len(BOMB)
    if kind:
        extra = {CARRIED: descriptor, WORD: BOMB}.get(kind, b"")
        return sealer.seal(Frame(kind, 7, dtype_id(torch.uint8), n, n), extra) + (BOMB if kind == DATA else b"")
    fields = BOMB.ljust(SIZE - 16, b"\0")
    mac = sealer._mac.copy()
    mac.update(fields)
    return fields + mac.digest()


@pytest.mark.fault(34, 35)
@pytest.mark.parametrize("name", BETWEEN_PROCESSES)
@pytest.mark.parametrize("kind", [0, DATA, NACK, POISON, CARRIED, WORD, WORD + 1])
def test_pickles_of_a_peer_with_the_key_are_bytes_or_the_end_of_its_connection(kind, name, tmp_path, monkeypatch):
    """In every frame, and with more behind it in place of the next one."""
    monkeypatch.chdir(tmp_path)
    b = get_channel(name)(ChannelContext(1, "a job", "127.0.0.1"))
    with closing(b), socket.create_server(("127.0.0.1", 0)) as silent:
        b.connect({0: PeerInfo(0, f"127.0.0.1:{silent.getsockname()[1]}", KEY)})
        target = torch.zeros(len(BOMB), dtype=torch.uint8)
        receive, behind = b.irecv(target, 0, 7), b.irecv(torch.zeros(3), 0, 8)
        with stranger(b.address()) as sock:
            verdict, secrets = call(sock, KEY, "a job", 0, 1, 0)
            assert verdict == WELCOME
            with within(1.0):
                sock.sendall(headed(Sealer(secrets.of_initiator.frames), kind, name) + BOMB * 10)
                with suppress(BrokenError) if kind == DATA else pytest.raises(ChannelError):
                    receive.wait(20)
                with pytest.raises(BrokenError, match="rank 0"):
                    behind.wait(20)
        assert bytes(target.tolist()) == (BOMB if kind == DATA else bytes(len(BOMB)))
        b.abort()
    assert not list(tmp_path.iterdir())


def test_one_who_hangs_up_without_a_word_is_not_told(caplog):
    master, a, b = connected(3)
    stranger(b.address()).close()
    check_works(a, b, 1, 0)
    for one in (master, a, b):
        one.close()
    assert not caplog.records


class Acceptor:
    """A socket to one whose answers come byte by byte."""

    def __init__(self) -> None:
        self.nonce = self.coming = os.urandom(NONCE)

    def agree(self, secrets: Secrets) -> None:
        secrets.mode = 0

    def recv(self, n: int) -> bytes:
        piece, self.coming = self.coming[:1], self.coming[1:]
        return piece

    def sendall(self, data: bytes) -> None:
        hello = PeerHello.parse(data)
        assert hello is not None
        secrets = answer(hello, self.nonce, "job", 1, KEY)
        assert secrets is not None
        self.agree(secrets)
        self.coming = secrets.verdict(WELCOME)


def test_a_handshake_in_pieces():
    verdict, _ = call(Acceptor(), KEY, "job", 0, 1, 0)
    assert verdict == WELCOME


@pytest.mark.fault(33)
def test_silent_strangers():
    """They are hung up on after the limit, no more than 64 at once are kept, and peers get through meanwhile."""
    master, a, b = connected(3)
    crowd = [stranger(b.address()) for _ in range(150)]
    check_works(a, b, 1, 0)
    assert len(b._listener._pending) <= 64 + 2  # one more for each peer, who may come now
    for sock in crowd:
        assert len(everything(sock)) <= NONCE
        sock.close()
    assert not b._listener._pending
    check_works(master, b, 1, -1)
    for one in (master, a, b):
        one.close()


@pytest.mark.fault(28)
@pytest.mark.parametrize("at", [0, 5, 17, 25, 33, 47, 48, SIZE - 1])
def test_flipped_bit_in_a_header(at):
    with through_a_wire(flip=HELLO + at) as (a, b, _):
        target = torch.zeros(100)
        receive = b.irecv(target, 0, 7)
        a.isend(torch.ones(100), 1, 7).wait(20)
        with within(1.0), pytest.raises(BrokenError, match=r"rank 0 with rank 1 .*wrong MAC"):
            receive.wait(20)
        assert target.count_nonzero() == 0
        with pytest.raises(BrokenError):
            b.irecv(target, 0, 8).wait(20)


@pytest.mark.parametrize("at", [0, 4, 8, 12, 44, 45, HELLO - 33, HELLO - 1])
def test_flipped_bit_in_the_hello(at):
    with through_a_wire(flip=at, handshake=0.1) as (a, _, _):
        send = a.isend(torch.ones(3), 1, 0)
        with pytest.raises(BrokenError, match="refused rank 0"):
            send.wait(20)


N = 1 << 20


@pytest.mark.fault(30)
@pytest.mark.parametrize("passed", [0, 1, SIZE - 1, SIZE, SIZE + N // 2, SIZE + N - 1])
@pytest.mark.parametrize("protection", PROTECTIONS, ids=named)
def test_cut_in_a_tensor(passed, protection):
    """At any byte, each time: the receive fails and says whose it was; it never ends well. The one behind it may."""
    with through_a_wire(cut=HELLO + passed, protection=protection, silent=0.1) as (a, b, _):
        source = marked(N)
        receive = b.irecv(torch.zeros(N, dtype=torch.uint8), 0, 7)
        behind = torch.zeros(3)
        queued = b.irecv(behind, 0, 8)
        with within(5.0):
            sends = a.isend(source, 1, 7), a.isend(torch.ones(3), 1, 8)
            with pytest.raises(BrokenError, match=r"rank 0 .*rank 1"):
                receive.wait(20)
            for one in (*sends, queued):
                try:
                    one.wait(20)
                except BrokenError as error:
                    assert "rank 1" in str(error)  # noqa: PT017 - it may also have ended well: written is not arrived
                else:
                    assert one is not queued or behind.tolist() == [1.0] * 3
        assert torch.equal(source, marked(N))


@pytest.mark.parametrize("protection", PROTECTIONS, ids=named)
def test_uncut_wire(protection):
    """The same wire, unharmed: the tests above fail for the reason that they say."""
    with through_a_wire(protection=protection) as (a, b, _):
        target = torch.zeros(N, dtype=torch.uint8)
        receive = b.irecv(target, 0, 7)
        a.isend(torch.ones(N, dtype=torch.uint8), 1, 7).wait(20)
        receive.wait(20)
        assert target.count_nonzero() == N


CHECKED, ENCRYPTED = PROTECTIONS[1:]
#: Bytes of payloads: written by the caller; in several chunks.
SMALL_AND_LARGE = (400, 3 * CHUNK + 5)


def marked(nbytes: int) -> torch.Tensor:
    """A tensor whose bytes are easy to find: 16 that come again and again."""
    return torch.tensor(list(b"a tensor's bytes"), dtype=torch.uint8).repeat(nbytes // 16 + 1)[:nbytes].clone()


def on_the_wire(nbytes: int, protection: Protection) -> int:
    """How many bytes a payload takes."""
    return nbytes + 4 if protection is CHECKED else nbytes + 16 * -(-nbytes // CHUNK)


@pytest.mark.fault(28)
@pytest.mark.parametrize("nbytes", SMALL_AND_LARGE, ids=["small", "large"])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
@pytest.mark.parametrize("protection", [CHECKED, ENCRYPTED], ids=named)
def test_flipped_bit_in_a_payload(protection, nbytes, where):
    """Never wrong numbers: an error that names both ranks and the transfer. The source stays as it is."""
    at = int(where * (on_the_wire(nbytes, protection) - 1))
    with through_a_wire(flip=HELLO + SIZE + at, protection=protection) as (a, b, _):
        source = marked(nbytes)
        receive, next_one = b.irecv(torch.zeros_like(source), 0, 7), b.irecv(torch.zeros(3), 0, 8)
        send = a.isend(source, 1, 7)
        what = "its checksum is not" if protection is CHECKED else "the tag of its encryption is wrong"
        with within(1.0), pytest.raises(BrokenError, match=rf"transfer 7 from rank 0 to rank 1 .*{what}"):
            receive.wait(20)
        assert torch.equal(source, marked(nbytes))
        if protection is CHECKED:  # nothing else is in doubt
            send.wait(20)
            a.isend(torch.ones(3), 1, 8).wait(20)
            next_one.wait(20)
        else:
            with pytest.raises(BrokenError, match=r"the connection of rank 0 with rank 1 was given up: .*altered"):
                next_one.wait(20)


@pytest.mark.parametrize("nbytes", SMALL_AND_LARGE, ids=["small", "large"])
def test_flipped_bit_in_clear(nbytes):
    """Without either it arrives: the test above flips bits indeed, and this is what the two are for."""
    with through_a_wire(flip=HELLO + SIZE + nbytes - 1) as (a, b, _):
        target = torch.zeros(nbytes, dtype=torch.uint8)
        receive = b.irecv(target, 0, 7)
        a.isend(marked(nbytes), 1, 7).wait(20)
        receive.wait(20)
        assert (target != marked(nbytes)).sum() == 1


@pytest.mark.parametrize("nbytes", SMALL_AND_LARGE, ids=["small", "large"])
@pytest.mark.parametrize("protection", [CHECKED, ENCRYPTED], ids=named)
def test_a_payload_that_nobody_can_take(protection, nbytes):
    """All of its bytes are passed over, those of its protection too, and the connection goes on."""
    with through_a_wire(protection=protection) as (a, b, _):
        receive = b.irecv(torch.zeros(3), 0, 7)
        a.isend(marked(nbytes), 1, 7)
        with pytest.raises(BrokenError, match=f"rank 0 sends uint8 x {nbytes} but rank 1 receives float32 x 3"):
            receive.wait(20)
        check_works(a, b, 1, 0, transfer=8)


def passed(protection: Protection) -> bytes:
    """All that crosses the wire for a small and a large tensor, one of them without a fixed place."""
    with through_a_wire(protection=protection) as (a, b, wire):
        for transfer, nbytes in enumerate(SMALL_AND_LARGE):
            target = torch.zeros(nbytes, dtype=torch.uint8)
            receive = b.irecv(target, 0, transfer)
            a.isend(marked(nbytes), 1, transfer).wait(20)
            receive.wait(20)
            assert torch.equal(target, marked(nbytes))
        return wire.record


def has_payload(record: bytes) -> bool:
    """Whether eight bytes of a payload can be seen."""
    twice = b"a tensor's bytes" * 2
    return any(twice[start : start + 8] in record for start in range(16))


def test_who_listens_sees_nothing_of_what_is_encrypted():
    assert has_payload(passed(PROTECTIONS[0]))
    first, second = passed(ENCRYPTED), passed(ENCRYPTED)
    assert not has_payload(first)
    assert len(first) == len(second) == HELLO + sum(SIZE + on_the_wire(n, ENCRYPTED) for n in SMALL_AND_LARGE)
    assert first[-1000:] != second[-1000:]  # other keys


FAR = "disttensor.runtime.channel.tcp.shield.is_local"


@pytest.mark.parametrize(
    ("protection", "clear"),
    [(Protection(), False), (Protection(trusted=True), True), (Protection(encrypt=False, trusted=True), True)],
    ids=str,
)
def test_to_another_host_in_clear_only_on_a_trusted_network(monkeypatch, protection, clear):
    monkeypatch.setattr(FAR, lambda sock: False)
    assert has_payload(passed(protection)) == clear


@pytest.mark.parametrize("protection", [Protection(), Protection(encrypt=False)], ids=str)
def test_to_another_host_nothing_goes_that_cannot_be_encrypted(monkeypatch, protection):
    monkeypatch.setattr(FAR, lambda sock: False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    why = r"pip install 'disttensor\[encrypt\]'" if protection.encrypt is None else "encrypt=False was asked for"
    with through_a_wire(protection=protection) as (a, _, wire):
        with pytest.raises(BrokenError, match=rf"rank 0 cannot: .*{why}.*encrypt=True.*trusted_network=True"):
            a.isend(marked(400), 1, 7).wait(20)
        assert wire.record == b""


@pytest.mark.parametrize("able", [0, 1])
def test_one_end_cannot_encrypt(able):
    """Both are told, whoever calls; and the one that can sends nothing in clear."""
    protections = [Protection(encrypt=False), Protection(encrypt=False)]
    protections[able] = ENCRYPTED
    a, b = channel(0, protections[0]), channel(1, protections[1])
    wire = Wire(b.address())
    a.connect({1: PeerInfo(1, wire.address, KEY)})
    b.connect({0: PeerInfo(0, a.address(), KEY)})
    target = torch.zeros(400, dtype=torch.uint8)
    with closing(wire), closing(a), closing(b):
        receive, send = b.irecv(target, 0, 7), a.isend(marked(400), 1, 7)
        for one in (receive, send):
            with pytest.raises(BrokenError, match=rf"rank {1 - able} cannot: .*encrypt=True.*trusted_network=True"):
                one.wait(20)
        assert not has_payload(wire.record)
        assert target.count_nonzero() == 0


@pytest.mark.parametrize(("here", "there", "local"), [
    ("127.0.0.1", "127.0.0.5", True), ("::1", "::1", True), ("10.0.0.1", "10.0.0.1", True),
    ("10.0.0.1", "10.0.0.2", False), ("fe80::1%eth0", "fe80::2%eth0", False),
])  # fmt: skip
def test_what_is_on_this_host(here, there, local):
    class Sock:
        def getsockname(self):
            return here, 1

        def getpeername(self):
            return there, 2

    assert is_local(Sock()) == local


@pytest.mark.parametrize("theirs", [0, CHECKSUM, ENCRYPT, CHECKSUM | ENCRYPT, CIPHER])
@pytest.mark.parametrize("mine", [0, CHECKSUM, ENCRYPT, CHECKSUM | ENCRYPT, CIPHER])
def test_what_either_wants_is_done(mine, theirs):
    wanted = (mine | theirs) & ~CIPHER
    assert agreed(mine | CIPHER, theirs | CIPHER) == wanted
    for less in (agreed(mine & ~CIPHER, theirs | CIPHER), agreed(mine | CIPHER, theirs & ~CIPHER)):
        assert less == (None if wanted & ENCRYPT else wanted)


def test_an_altered_mode():
    """Who is between the two can't have them agree on less."""

    class Between(Acceptor):
        def sendall(self, data):
            super().sendall(data)
            assert self.coming[1] == ENCRYPT
            self.coming = self.coming[:1] + b"\0" + self.coming[2:]

        def agree(self, secrets):
            secrets.mode = ENCRYPT

    with pytest.raises(BrokenError, match="cannot prove"):
        call(Between(), KEY, "job", 0, 1, ENCRYPT | CIPHER)


class Script:
    """A socket that keeps what is sent, and gives it back to an Inbound."""

    def __init__(self) -> None:
        self.data = b""

    def sendall(self, data, flags=0):
        self.data += bytes(data)

    def recv_into(self, view, n=0, flags=0):
        n = min(len(view), len(self.data))
        view[:n], self.data = self.data[:n], self.data[n:]
        return n


@pytest.mark.parametrize("change", ["nothing", "chunks change places", "another frame's", "another direction's"])
def test_chunks_in_their_place_only(change):
    payload = memoryview(bytearray(os.urandom(2 * CHUNK)))
    sock = Script()
    Sealed(KEY).send(4, payload, sock)
    assert sock.data[: CHUNK + 16] != payload[:CHUNK]
    if change == "chunks change places":
        half = CHUNK + 16
        sock.data = sock.data[half:] + sock.data[:half]
    key = bytes(32) if change == "another direction's" else KEY
    target = memoryview(bytearray(2 * CHUNK))
    read = partial(Sealed(key).read, 5 if change == "another frame's" else 4, target, Inbound(sock))
    if change == "nothing":
        assert read()
        assert target == payload
    else:
        with pytest.raises(ProtocolError, match="altered"):
            read()


def test_keys_are_of_one_direction_and_one_connection():
    def keys(nonces: bytes) -> list[bytes]:
        secrets = Secrets(KEY, "job", 0, 1, nonces, 0)
        return [*secrets.of_initiator, *secrets.of_acceptor]

    assert len({*keys(bytes(64)), *keys(b"x" * 64)}) == 8


class Open(Carrier):
    """A carrier that would take anything, and not say where to."""

    def stage(self, tensor):
        raise AssertionError("it was given a tensor")

    def open(self, descriptor, nbytes):
        raise AssertionError("it was announced a tensor")


def test_a_carrier_that_leaves_the_host_gets_nothing_that_is_to_be_encrypted():
    class Carried(TcpChannel):
        def _carrier(self, peer):
            return Open

    for protection, error in ((ENCRYPTED, None), (Protection(), BrokenError)):
        a, b = connected_by(lambda context: Carried(context), [0, 1], protection=protection)
        target = torch.zeros(N, dtype=torch.uint8)
        with closing(a), closing(b):
            receive = b.irecv(target, 0, 7)
            a.isend(marked(N), 1, 7)
            if error is None:
                receive.wait(20)
                assert torch.equal(target, marked(N))
            else:
                with pytest.raises(error):
                    receive.wait(20)


@pytest.mark.fault(38)
def test_replayed_session():
    """All that rank 0 once said, said again to a rank 1 that waits for the same transfer: it gets a nonce."""
    with through_a_wire() as (a, b, wire):
        check_works(a, b, 1, 0, transfer=7)
        said = wire.record
    assert len(said) == HELLO + SIZE + 20
    b = channel(1)
    silent = socket.create_server(("127.0.0.1", 0))
    b.connect({0: PeerInfo(0, f"127.0.0.1:{silent.getsockname()[1]}", KEY)})
    target = torch.zeros(5)
    receive = b.irecv(target, 0, 7)
    sock = stranger(b.address())
    sock.sendall(said)
    assert len(everything(sock)) <= NONCE
    assert not receive.is_completed()
    assert target.count_nonzero() == 0
    sock.close()
    b.abort()
    silent.close()


def test_frames_in_order_only():
    def sealed(key: bytes = KEY) -> list[bytes]:
        sealer = Sealer(key)
        return [sealer.seal(Frame(DATA, n, 8, 3, 12)) for n in range(3)]

    first, second, third = sealed()
    opener = Opener(KEY)
    assert opener.open(first) == Frame(DATA, 0, 8, 3, 12)
    for wrong in (first, third, sealed(b"x" * 32)[1], second[:-1] + b"\0"):
        with pytest.raises(ProtocolError):
            opener.open(wrong)
    assert opener.open(second).transfer == 1


@pytest.mark.parametrize("early", [False, True], ids=["announced", "not announced yet"])
@pytest.mark.parametrize("first", [ORDERED, COLLECTIVES + 5 * BLOCK], ids=["copies", "a collective"])
def test_a_transfer_out_of_order_ends_the_connection_at_once(first, early):
    """Its receiver, and all behind it, would wait for good."""
    with pair() as (a, b):
        check_works(a, b, 1, 0, first)
        if early:
            a.isend(torch.ones(5), 1, first + 9)
        receive = b.irecv(torch.zeros(5), 0, first + 7)
        if not early:
            a.isend(torch.ones(5), 1, first + 9)
        due = {ORDERED: "transfer 9 where 7 was due"}.get(first, f"transfer {first + 9} where {first + 7} was due")
        with pytest.raises(BrokenError, match=f"connection of rank 0 with rank 1 was given up: rank 0 sent {due}"):
            receive.wait(20)
        with pytest.raises(BrokenError, match="where"):
            b.irecv(torch.zeros(5), 0, first + 11).wait(20)


def test_what_an_expired_peer_has_sent_arrives_and_nothing_else_is_waited_for():
    with pair() as (a, b):
        check_works(a, b, 1, 0)
        late = b.irecv(torch.zeros(5), 0, 2)
        a.isend(torch.ones(5), 1, 2).wait(20)
        a.isend(torch.full((5,), 3.0), 1, 3).wait(20)
        late.wait(20)
        b.expire(0, "its host is gone")
        target = torch.zeros(5)
        b.irecv(target, 0, 3).wait(20)
        assert target.tolist() == [3.0] * 5
        for transfer in (4, 5):
            with pytest.raises(BrokenError, match="rank 0 is lost to rank 1: its host is gone"):
                b.irecv(torch.zeros(5), 0, transfer).wait(20)


@pytest.mark.fault(26)
@pytest.mark.parametrize("deaf", [0, 1])
def test_a_connection_that_carries_nothing_one_way_is_given_up(deaf):
    """Between hosts, as nobody looks on loopback. The one who has something under way finds it out."""
    with pair(silent=1.0) as (a, b):
        check_works(a, b, 1, 0)
        receive = a.irecv(torch.zeros(5), 1, 3)
        deafen((a, b)[deaf]._peers[1 - deaf]._sock)
        with within(1.0 + 0.5):
            a.isend(torch.ones(5), 1, 2)
            while not receive.is_completed():
                a._look()
        with pytest.raises(BrokenError, match="its host has not answered for some time"):
            receive.wait(20)


@pytest.mark.parametrize("connected", [True, False])
def test_an_expired_peer_frees_who_waits_for_it(connected):
    """For a tensor that never comes, also where another one that nobody is told of stands before it."""
    with pair() as (a, b):
        if connected:
            check_works(a, b, 1, 0)
            a.isend(torch.ones(5), 1, 77)
        receive = b.irecv(torch.zeros(5), 0, 8)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receive.wait, 20)
            b.expire(0, "its host is gone")
            b.expire(0, "told twice")
            with pytest.raises(BrokenError, match="rank 0 is lost to rank 1: its host is gone"):
                waiting.result(20)


def test_transfers_that_have_no_order_may_come_in_any():
    """And what has an order does not wait for what has another one, or none."""
    with pair() as (a, b):
        numbers = [8, 7, ORDERED + 2, COLLECTIVES, ORDERED + 5, COLLECTIVES + BLOCK + 3, COLLECTIVES + 1]
        receives = [b.irecv(torch.zeros(5), 0, n) for n in (7, COLLECTIVES, ORDERED + 2, ORDERED + 5, COLLECTIVES + 1)]
        receives += [b.irecv(torch.zeros(5), 0, n) for n in (COLLECTIVES + BLOCK + 3, 8)]
        for n in numbers:
            a.isend(torch.ones(5), 1, n)
        for receive in receives:
            receive.wait(20)


@pytest.mark.fault(31)
def test_nobody_listens():
    a = channel(0, connect=0.5)  # for as long it waits for the other's call
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    a.connect({1: PeerInfo(1, address, KEY)})
    with within(10.0), pytest.raises(BrokenError, match=f"rank 0 cannot reach rank 1 at {address}"):
        a.isend(torch.ones(1), 1, 0).wait(20)
    a.close()


@pytest.mark.fault(31)
@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("unreachable", [0, 1])
@pytest.mark.parametrize("silent", [True, False], ids=["no answer", "refused"])
def test_one_reaches_the_other_and_that_is_enough(sender, unreachable, silent):
    """Whoever sends first, and whether its own call is refused or gets no answer at all."""
    with ExitStack() as stack:
        hole = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = f"127.0.0.1:{hole.getsockname()[1]}"
        if silent:  # its queue is full: the kernel answers no more calls
            for _ in range(2):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(hole.getsockname())
        else:
            hole.close()
        ends = [stack.enter_context(closing(channel(rank))) for rank in range(2)]
        for rank, end in enumerate(ends):
            other = 1 - rank
            there = address if other == unreachable else ends[other].address()
            end.connect({other: PeerInfo(other, there, KEY)})
        with within(10.0):
            for first, second in ((sender, 1 - sender), (1 - sender, sender)):
                target = torch.zeros(5)
                sent = ends[first].isend(torch.ones(5), second, 1)
                ends[second].irecv(target, first, 1).wait(20)
                sent.wait(20)
                assert target.tolist() == [1.0] * 5


@pytest.mark.parametrize("kind", [EOFError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError])
def test_a_first_call_that_ends_in_the_handshake_is_made_again(kind, monkeypatch):
    """Whichever end, or whatever between the two, has ended it: `ss -K` aborts a connection of its own host."""
    original, ended = dial.call, list[bool]()

    def once_ended(*args):
        if not ended:
            ended.append(True)
            raise kind("it ended")
        return original(*args)

    monkeypatch.setattr(dial, "call", once_ended)
    master, a, b = connected(3)
    with closing(master), closing(a), closing(b):
        a.isend(torch.ones(5), 1, 1)
        target = torch.zeros(5)
        b.irecv(target, 0, 1).wait(20)
        assert (ended, target.tolist()) == ([True], [1.0] * 5)


def test_a_peer_that_was_to_call_and_gave_up_is_heard_of_soon(monkeypatch):
    """Its own call was under way, and so the other's was not used; then it fails, which nobody is told of."""
    original, begun, crossed = dial.dial, threading.Event(), threading.Event()

    def failing(info, job, me, limit, patience, watch, reached, *rest):
        if me == 0:
            assert reached()
            begun.set()
            assert crossed.wait(20)
            raise BrokenError("no way from here")
        result = original(info, job, me, limit, patience, watch, reached, *rest)
        if result[0] is None:
            crossed.set()
        return result

    monkeypatch.setattr(tcp_peer, "dial", failing)
    master, a, b = connected(3)
    with closing(master), closing(a), closing(b):
        sent = a.isend(torch.ones(5), 1, 1)
        assert begun.wait(20)
        with pytest.raises(BrokenError, match="refuses a second connection from rank 1: it gave up the first one"):
            b.irecv(torch.zeros(5), 0, 1).wait(20)
        assert crossed.is_set()
        with pytest.raises(BrokenError, match="no way from here"):
            sent.wait(20)


def test_too_many_addresses_are_not_tried():
    """Each would be a socket, and a peer could have others scan a network."""
    a = channel(0, connect=0.5)
    a.connect({1: PeerInfo(1, ",".join(["127.0.0.1:9"] * 33), KEY)})
    with pytest.raises(BrokenError, match=r"a peer has 32 addresses at most, not 33: 127.0.0.1:9,"):
        a.isend(torch.ones(1), 1, 0).wait(20)
    a.close()


@pytest.mark.fault(31)
def test_nobody_answers():
    """The address leads nowhere: an error within the limit, for who receives too, and abort need not wait for it."""
    assert Limits().connect <= 9.0  # of the 10 s, the rest is for the telling
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        a = channel(0, connect=0.1, greet=0.1)
        a.connect({1: PeerInfo(1, address, KEY)})
        unreached = rf"rank 0 cannot reach rank 1 at {address}: no answer within 0.1 s"
        with within(0.1 + 1.0), pytest.raises(BrokenError, match=unreached):
            a.irecv(torch.ones(1), 1, 0).wait(20)
        a.close()
        a = channel(0)
        a.connect({1: PeerInfo(1, address, KEY)})
        a.isend(torch.ones(1), 1, 0)
        a.abort()


def test_a_listener_without_descriptors_says_so(monkeypatch, caplog):
    """Its peer sees only that nobody answers; once there is a descriptor, it answers."""

    def none_left(_):
        raise OSError(errno.EMFILE, "Too many open files")

    with closing(channel(0, connect=0.3, greet=0.3)) as a, closing(channel(1)) as b:
        for one, rank, other in ((a, 1, b), (b, 0, a)):
            one.connect({rank: PeerInfo(rank, other.address(), KEY)})
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", none_left)
            with pytest.raises(BrokenError, match="whether its process has said that it has no file descriptors left"):
                a.isend(torch.ones(1), 1, 0).wait(20)
    [record] = [r for r in caplog.records if "can't take a connection" in r.message]
    assert "disttensor-tcp-1-listen can't take a connection, and its peer waits in vain: no file desc" in record.message
    assert f"process {os.getpid()} may have" in record.message


@pytest.mark.fault(44)
def test_a_listener_without_descriptors_hangs_up(monkeypatch):
    """Its peer, which has reached its kernel, does not take it for a busy one; then it listens at the same port."""
    callers = []

    def none_left(sock):
        callers.append(sock)
        raise OSError(errno.EMFILE, "Too many open files")

    a, b = channel(0, connect=0.3, greet=HANG), channel(1)
    for one, rank, other in ((a, 1, b), (b, 0, a)):
        one.connect({rank: PeerInfo(rank, other.address(), KEY)})
    address = b.address()
    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", none_left)
        with pytest.raises(BrokenError, match=r"in the handshake .*said that it has no file descriptors left"):
            a.isend(torch.ones(1), 1, 0).wait(HANG / 2)
    assert callers
    a.close()
    with closing(channel(0)) as again:
        b.connect({0: PeerInfo(0, again.address(), bytes(32))})
        again.connect({1: PeerInfo(1, address, bytes(32))})
        check_works(again, b, 1, 0)
    b.close()


def test_a_listener_that_hangs_up_may_be_about_to_listen_again(monkeypatch):
    """Who was hung up on, and is refused next, calls once more."""
    connect, calls = socket.socket.connect, []

    def refused_second(sock, where):
        calls.append(where)
        if len(calls) == 2:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        connect(sock, where)

    def hang_up_first(*args):
        if len(calls) == 1:
            raise EOFError("it hung up")
        return greet(*args)

    greet = dial.call
    monkeypatch.setattr(dial, "call", hang_up_first)
    monkeypatch.setattr(socket.socket, "connect", refused_second)
    master, a, b = connected(3)
    with closing(master), closing(a), closing(b):
        a.isend(torch.ones(5), 1, 1).wait(20)
        b.recv(target := torch.zeros(5), 0, 1)
        assert target.tolist() == [1.0] * 5
    assert len(calls) == 3


def test_who_has_no_descriptors_to_call_says_so_at_once(monkeypatch):
    """It does not wait for the peer's call, which it could not take."""

    def none_left(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    a, b = channel(0), channel(1)
    a.connect({1: PeerInfo(1, b.address(), KEY)})
    monkeypatch.setattr("disttensor.runtime.channel.tcp.dial.tune_before", none_left)
    with (
        within(1.0),
        pytest.raises(BrokenError, match=rf"no file descriptors left to call rank 1; process {os.getpid()} "),
    ):
        a.isend(torch.ones(1), 1, 0).wait(20)
    for one in (a, b):
        one.close()


def test_a_rank_started_anew():
    """A second connection of a rank is refused, until the master tells of a new key."""
    master, a, b = connected(3)
    check_works(a, b, 1, 0)
    broken = b.irecv(torch.zeros(1), 0, 1)
    a.abort()
    with pytest.raises(BrokenError):
        broken.wait(20)
    again = channel(0)
    again.connect({1: PeerInfo(1, b.address(), b._peers[0].info.key)})
    with pytest.raises(BrokenError, match="refuses a second connection from rank 0"):
        again.isend(torch.ones(1), 1, 0).wait(20)
    again.connect({1: PeerInfo(1, b.address(), KEY)})
    b.connect({0: PeerInfo(0, again.address(), KEY)})
    check_works(again, b, 1, 0)
    for one in (master, again, b):
        one.close()


@pytest.mark.parametrize("sends", [True, False], ids=["sends", "receives"])
@pytest.mark.parametrize("what", ["0-1-send", "0-1-read", "1-0-send", "1-0-read"])
def test_a_thread_that_the_system_lacks_fails_the_peer(what: str, sends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left both ends waiting, without an end: nobody read, or wrote."""
    start = threading.Thread.start

    def lacking(thread: threading.Thread) -> None:
        if thread.name == f"disttensor-tcp-{what}":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", lacking)
    with ExitStack() as ends:
        _, *pair = [ends.enter_context(closing(each)) for each in connected(3, connect=0.5, greet=0.5)]
        me = int(what[0])
        mine, theirs = pair[me], pair[1 - me]
        tensors = torch.ones(1 << 16), torch.empty(1 << 16)
        if sends:
            transfers = theirs.irecv(tensors[1], me, 1), mine.isend(tensors[0], 1 - me, 1)
        else:
            transfers = theirs.isend(tensors[0], me, 1), mine.irecv(tensors[1], 1 - me, 1)
        for transfer in transfers:
            with suppress(BrokenError):  # the kernels may have taken all of it
                transfer.wait(HANG)
        why = f"rank {me} has no thread for its connection with rank {1 - me}: can't start new thread"
        with pytest.raises(BrokenError, match=why):
            mine.isend(torch.ones(1 << 22), 1 - me, 2).wait(HANG)  # whoever has called: it takes a thread
        assert mine.failure(1 - me) == why
