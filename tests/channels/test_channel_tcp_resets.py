"""Connections of the tcp channel that are reset while both ends live: the next one goes on where they ended."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
import torch
from test_channel_tcp import KEY, PROTECTIONS, channel, connected, named, nothing_left  # noqa: F401 - a fixture

import disttensor as dt
from disttensor.runtime.channel import PeerInfo
from disttensor.runtime.channel.base import Protection
from disttensor.runtime.channel.tcp import kept, peer
from disttensor.runtime.channel.tcp.channel import TcpChannel
from disttensor.runtime.channel.tcp.frames import RECEIPT, Frame
from disttensor.runtime.protocol.errors import BrokenError, ProtocolError

#: More than the kernels and the proxy between hold: its sender is in the middle of it.
LARGE = 8 << 20
#: What the kernels and the proxy hold wholly, so that its sender may be done with it long before it arrives.
MIDDLE = 200_000


class Between:
    """A proxy before ``target`` that resets its connections, at one end or at both, and may hold back what comes."""

    def __init__(self) -> None:
        self.target = ""
        self.made = 0  #: connections
        self.flows = threading.Event()
        self.flows.set()
        self.passes = self.always = -1  #: bytes that are passed on until it resets the connection, and then; -1: all
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # or large payloads wait in the kernel
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            host, port = self.target.split(":")
            try:
                callee = socket.create_connection((host, int(port)))
            except OSError:
                caller.close()
                continue
            self.made += 1
            self._pairs.append((caller, callee))
            for source, sink in ((caller, callee), (callee, caller)):
                thread = threading.Thread(target=self._pump, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 14):
                self.flows.wait()
                sink.sendall(data)
                if self.passes >= 0:
                    self.passes = max(0, self.passes - len(data))
                    if not self.passes:
                        self.passes = self.always
                        self.reset()
        except OSError:
            pass
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def reset(self, ends: tuple[bool, bool] = (True, True)) -> None:
        """Resets what there is, for the end that has called and the one that was called, or ends it for that one."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock, hard in zip(pair, ends, strict=True):
                with suppress(OSError):
                    if hard:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.shutdown(socket.SHUT_RD)  # its thread comes out
                sock.close()

    def close(self) -> None:
        self.flows.set()
        if self._listener.fileno() < 0:
            return
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.reset((False, False))
        for thread in self._threads:
            thread.join()


@contextmanager
def apart(protection: Protection = Protection(), **limits: float) -> Iterator[tuple[TcpChannel, TcpChannel, Between]]:  # noqa: B008
    """Ranks 0 and 1, which reach each other by one and the same proxy; whoever calls."""
    with ExitStack() as stack:
        ends = [channel(rank, protection, **limits) for rank in range(2)]
        betweens = [Between(), Between()]
        for one, between in zip(ends, betweens, strict=True):
            between.target = one.address()
        for rank, one in enumerate(ends):
            other = 1 - rank
            one.connect({other: PeerInfo(other, betweens[other].address, KEY)})
        both = Both(betweens)
        try:
            yield ends[0], ends[1], both  # type: ignore[misc]
        finally:
            for one in ends:
                one.abort()
            for between in betweens:
                between.close()
        stack.close()


class Both:
    """The two proxies of a pair."""

    def __init__(self, betweens: list[Between]) -> None:
        self._betweens = betweens

    @property
    def made(self) -> int:
        return sum(one.made for one in self._betweens)

    def reset(self, ends: tuple[bool, bool] = (True, True)) -> None:
        for one in self._betweens:
            one.reset(ends)

    def hold(self) -> None:
        for one in self._betweens:
            one.flows.clear()

    def go(self) -> None:
        for one in self._betweens:
            one.flows.set()

    def reset_after(self, nbytes: int) -> None:
        for one in self._betweens:
            one.passes = nbytes

    def reset_always(self, nbytes: int) -> None:
        for one in self._betweens:
            one.passes = one.always = nbytes

    def end(self) -> None:
        """Resets all, and lets no call through any more."""
        for one in self._betweens:
            one.close()


def numbered(k: int, n: int = 5) -> torch.Tensor:
    return torch.full((n,), float(k))


ENDS = {"both": (True, True), "caller": (True, False), "callee": (False, True), "an ordinary end": (False, False)}


@pytest.mark.parametrize("protection", PROTECTIONS, ids=named)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_an_idle_connection_that_is_reset_comes_back_by_itself(ends, protection):
    with apart(protection) as (a, b, between):
        for k in range(6):
            target = torch.zeros(5)
            first, second = (a, b) if k % 2 else (b, a)
            receive = second.irecv(target, 1 - second._context.rank, k)
            first.isend(numbered(k), 1 - first._context.rank, k).wait(20)
            receive.wait(20)
            assert torch.equal(target, numbered(k))
            between.reset(ends)
        assert between.made > 1


@pytest.mark.parametrize("protection", PROTECTIONS, ids=named)
@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("at", [1, 3000, LARGE // 3])  # what is left does not fit into the kernel's buffers
def test_a_reset_in_the_middle_of_transfers_loses_nothing(at, both, sender, protection):
    """Small ones of which copies are kept, and large ones that are being written; each once, in order."""
    with apart(protection) as (a, b, between):
        ends = [a, b] if sender == 0 else [b, a]
        ways = [(ends[0], ends[1], 0)] + ([(ends[1], ends[0], 100)] if both else [])
        for first, second, base in ways:
            warm = second.irecv(torch.zeros(5), first._context.rank, base + 99)
            first.isend(numbered(1), second._context.rank, base + 99)
            warm.wait(20)
        between.reset_after(at)
        sizes = [5, LARGE // 4, 700, 5, LARGE // 4, 0, 3, LARGE // 4, 1]
        sends, receives = [], []
        for first, second, base in ways:
            for k, n in enumerate(sizes):
                target = torch.zeros(n)
                receives.append((second.irecv(target, first._context.rank, base + k), target, k, n))
                sends.append(first.isend(numbered(k + 1, n), second._context.rank, base + k))
        for transfer, target, k, n in receives:
            transfer.wait(20)
            assert torch.equal(target, numbered(k + 1, n))
        for one in sends:
            one.wait(20)
        assert between.made > 1


def reset_when_handed_over(a: TcpChannel, b: TcpChannel, between: Both, k: int) -> torch.Tensor:
    """Has rank 0 send, and use the memory for something else, while the proxy passes nothing on. Then all is reset."""
    check(a, b, k)
    between.hold()
    tensor = numbered(k + 1, MIDDLE // 4)
    a.isend(tensor, 1, k + 1).wait(20)
    tensor.fill_(-1)
    between.reset()
    between.go()
    return tensor


def check(a: TcpChannel, b: TcpChannel, k: int) -> None:
    target = torch.zeros(5)
    receive = b.irecv(target, 0, k)
    a.isend(numbered(k), 1, k).wait(20)
    receive.wait(20)
    assert torch.equal(target, numbered(k))


@pytest.mark.parametrize("protection", PROTECTIONS, ids=named)
@pytest.mark.parametrize("posted", [False, True], ids=["before its receive", "after it"])
def test_what_was_handed_over_is_kept_until_its_receipt_where_hosts_are_apart(protection, posted, monkeypatch):
    monkeypatch.setattr(kept, "is_local", lambda sock: False)
    with apart(protection) as (a, b, between):
        target = torch.zeros(MIDDLE // 4)
        receive = b.irecv(target, 0, 8) if posted else None
        reset_when_handed_over(a, b, between, 7)
        (receive or b.irecv(target, 0, 8)).wait(20)
        assert torch.equal(target, numbered(8, MIDDLE // 4))
        check(a, b, 9)


@pytest.mark.parametrize("protection", PROTECTIONS, ids=named)
def test_what_cannot_be_had_any_more_fails_that_transfer_only(protection):
    """Nothing of what is in its memory now comes in its place."""
    with apart(protection) as (a, b, between):
        target = torch.zeros(MIDDLE // 4)
        receive = b.irecv(target, 0, 8)
        behind = torch.zeros(5)
        later = b.irecv(behind, 0, 9)
        reset_when_handed_over(a, b, between, 7)
        a.isend(numbered(9), 1, 9)
        with pytest.raises(BrokenError, match="transfer 8 from rank 0 to rank 1 broke off: the connection was reset"):
            receive.wait(20)
        later.wait(20)
        assert torch.equal(behind, numbered(9))
        assert target.count_nonzero() == 0
        check(a, b, 10)
        assert (a.failure(1), b.failure(0)) == ("", "")


def test_calls_that_are_refused_go_on_between_hosts(monkeypatch):
    """As a firewall does it for a while. On one host the kernel knows that nobody listens any more."""
    monkeypatch.setattr(kept, "is_local", lambda sock: False)
    with apart() as (a, b, between):
        check(a, b, 1)
        refused = threading.Event()
        real = peer.dial

        def refuse(*args, **kwargs):
            if not refused.is_set():
                refused.set()
                raise BrokenError("nobody there") from ConnectionRefusedError()
            return real(*args, **kwargs)

        monkeypatch.setattr(peer, "dial", refuse)
        between.reset()
        check(a, b, 2)
        assert refused.is_set()


@pytest.mark.parametrize("local", [True, False], ids=["on one host", "between hosts"])
def test_a_connection_that_does_not_come_back_is_given_up_in_words(local, monkeypatch):
    monkeypatch.setattr(kept, "is_local", lambda sock: local)
    with apart(silent=0.3) as (a, b, between):
        check(a, b, 1)
        receive = b.irecv(torch.zeros(5), 0, 2)
        between.end()
        with pytest.raises(
            BrokenError, match="rank 0 closed its end or died; its connection with rank 1 is gone"
        ) as caught:
            receive.wait(20)
        assert ("no other one has come about, or has brought anything, within 0.3 s" in str(caught.value)) is not local
        with pytest.raises(BrokenError, match="rank 1 closed its end or died"):
            a.irecv(torch.zeros(5), 1, 3).wait(20)


def test_what_the_last_connection_brought_late_keeps_nobody_waiting(monkeypatch):
    """A reader may deal with a frame when the sender finds the connection broken: the next gains no time by that."""
    monkeypatch.setattr(kept, "is_local", lambda sock: False)
    with apart(silent=0.3) as (a, b, between):
        check(a, b, 1)
        receive = b.irecv(torch.zeros(5), 0, 2)
        peer_of_b = b._peers[0]
        lost = threading.Event()
        began = peer_of_b._break_with_lock
        monkeypatch.setattr(peer_of_b, "_break_with_lock", lambda connection: (began(connection), lost.set()))
        between.end()
        assert lost.wait(20)
        peer_of_b.count(Frame(RECEIPT, 0, 0, 0, 0))
        with pytest.raises(BrokenError, match=r"within 0\.3 s"):
            receive.wait(20)


def test_one_that_breaks_in_the_same_place_each_time_is_given_up_in_words():
    with apart(silent=0.3) as (a, b, between):
        check(a, b, 1)
        between.reset_always(LARGE // 2)
        receive = b.irecv(torch.zeros(LARGE), 0, 2)
        send = a.isend(torch.zeros(LARGE), 1, 2)
        for one in (receive, send):
            with pytest.raises(BrokenError, match=r"within 0.3 s|closed its end or died"):
                one.wait(20)


def test_an_end_that_hangs_up_is_not_called_again(monkeypatch):
    calls = []
    with apart() as (a, b, _):
        check(a, b, 1)
        monkeypatch.setattr(peer, "dial", lambda *args, **kwargs: calls.append(args))
        receive = b.irecv(torch.zeros(5), 0, 2)
        a.close()
        with pytest.raises(BrokenError, match="rank 0 closed its end or died"):
            receive.wait(20)
        assert not calls


def test_copies_of_what_was_sent_are_bounded_and_go_with_their_receipts():
    """One who says nothing does not fill the memory of this one; who receives says so now and then."""
    holds = kept.Kept()
    outs = [kept.Out(kept.Frame(kept.DATA, n, 8, 1, 1), None, kept.Ticket()) for n in range(5)]
    for out in outs:
        holds.add(out)
        holds.keep_copy(out, bytes(kept.MOST // 2))
    assert [out.copy is not None for out in outs] == [False, False, False, True, True]
    over, again = holds.begin_connection(0)
    assert not over
    assert [out.frame.kind for out in again] == [kept.GONE] * 3 + [kept.DATA] * 2
    holds.add(again[0])
    new = kept.Out(kept.Frame(kept.DATA, 5, 8, 1, 1), None, kept.Ticket())
    holds.add(new)
    holds.keep_copy(new, bytes(kept.MOST // 2))
    assert [out.copy is not None for out in again] == [False, False, False, True, True]  # those are yet to be written
    with apart() as (a, b, _):
        for k in range(500):
            receive = b.irecv(torch.zeros(5), 0, k)
            a.isend(numbered(k), 1, k)
            receive.wait(20)
        sender = a._peers[1]._sender
        assert sender._kept.sent == 500
        b.isend(numbered(1), 0, 1000)
        a.recv(torch.zeros(5), 1, 1000)
        assert sender._kept.receipt == 500
        assert sender._kept._held == 0
        for k in range(2000, 2100):
            receive = b.irecv(torch.zeros(5), 0, k)
            a.isend(numbered(k), 1, k)
            receive.wait(20)
        assert sender._kept.receipt >= 532


def test_what_is_to_be_sent_again_may_have_arrived_before():
    """The peer says so with the connection after the next, as when the next was a call from before it had arrived."""
    holds = kept.Kept()
    outs = [kept.Out(kept.Frame(kept.DATA, n, 8, 1, 1), None, kept.Ticket()) for n in range(4)]
    for out in outs:
        holds.add(out)
        holds.keep_copy(out, b"a")
    assert holds.begin_connection(1) == ([outs[0].ticket], outs[1:])
    holds.add(outs[1])
    assert (holds.receipt, holds.sent) == (1, 4)
    with pytest.raises(ProtocolError, match="it has received 3 frames, of 1 to 2"):
        holds.acknowledge(3)  # by this connection only one more was sent
    assert holds.begin_connection(3) == ([outs[1].ticket, outs[2].ticket], outs[3:])
    assert (holds.receipt, holds.sent, holds._held) == (3, 4, 1)
    with pytest.raises(ProtocolError, match="it has received 5 frames, of 3 to 4"):
        holds.begin_connection(5)


def test_a_call_from_before_the_last_connection_is_not_taken_for_the_next(monkeypatch):
    """Both have called at once, and the call that was not used arrives when the one that was has broken."""
    call, offer = peer.TcpPeer._call, peer.TcpPeer.offer
    arrived, may_offer, offered = threading.Event(), threading.Event(), threading.Event()
    may_call = [threading.Event(), threading.Event()]
    calls = [threading.Event(), threading.Event()]  # they want to

    def gated(self, *limits):
        calls[self.me].set()
        assert may_call[self.me].wait(20)
        return call(self, *limits)

    def judged(self, sock, secrets):
        if self.me == 1:
            return offer(self, sock, secrets)
        arrived.set()
        assert may_offer.wait(20)
        taken = offer(self, sock, secrets)
        offered.set()
        return taken

    monkeypatch.setattr(peer.TcpPeer, "_call", gated)
    monkeypatch.setattr(peer.TcpPeer, "offer", judged)
    with apart() as (a, b, between):
        receive = b.irecv(torch.zeros(5), 0, 1)
        may_call[1].set()
        assert arrived.wait(20)
        may_call[0].set()
        a.isend(numbered(1), 1, 1).wait(20)
        receive.wait(20)
        for one in range(2):
            may_call[one].clear()
            calls[one].clear()
        between.reset((False, False))
        for one in calls:
            assert one.wait(20)
        may_offer.set()
        assert offered.wait(20)
        assert a._peers[1]._standing.connection == 1
        assert a._peers[1]._connection is None
        assert a._peers[1]._broken is None
        for one in may_call:
            one.set()
        for k, (first, second) in enumerate([(b, a), (a, b)], 2):
            target = torch.zeros(5)
            receive = second.irecv(target, first._context.rank, k)
            first.isend(numbered(k), second._context.rank, k).wait(20)
            receive.wait(20)
            assert torch.equal(target, numbered(k))


@pytest.mark.parametrize("receipt", [1, 1 << 40])
def test_a_receipt_of_what_was_not_sent_ends_the_connection(receipt):
    with apart() as (a, b, _):
        check(a, b, 1)
        b._peers[0].received = receipt + 1
        b.isend(numbered(2), 0, 2)
        with pytest.raises(BrokenError, match=f"given up: it has received {receipt + 1} frames"):
            a.irecv(torch.zeros(5), 1, 2).wait(20)


@pytest.mark.parametrize("again", [True, False], ids=["is made again", "is not"])
@pytest.mark.parametrize("call", ["crossed", "in vain"])
def test_a_first_connection_that_has_broken_before_it_is_noticed(call, again, monkeypatch):
    """The end whose own call came to nothing waits for the other's, which has come and is gone when it looks."""
    original, tried = peer.TcpPeer._call, threading.Event()

    def late(self, *limits):
        if self.me != 1 or tried.is_set():
            return original(self, *limits)
        tried.set()
        sent = a.isend(numbered(1), 1, 1)
        with self.lock:
            assert self._changed.wait_for(lambda: self._connection is not None, 20)
            connection = self._connection
        if again:
            self.lose(connection, EOFError("it ended"))
        else:
            sent.wait(20)
            monkeypatch.setattr(a._peers[1]._sender, "_writing", True)  # in the midst of a frame it says no goodbye
            a._peers[1].fail(BrokenError, "an error of its own")
            with self.lock:
                assert self._changed.wait_for(lambda: self._connection is not connection, 20)
        if call == "in vain":
            raise BrokenError("no answer")
        return False

    monkeypatch.setattr(peer.TcpPeer, "_call", late)
    master, a, b = connected(3)
    with closing(master), closing(a), closing(b):
        targets = torch.zeros(2, 5)
        receives = [b.irecv(target, 0, k) for k, target in enumerate(targets, 1)]
        if again:
            assert tried.wait(20)  # else this end's call may come first, and the other one makes none
            a.isend(numbered(2), 1, 2)
            for receive in receives:
                receive.wait(20)
            assert torch.equal(targets, torch.stack([numbered(1), numbered(2)]))
        else:
            with pytest.raises(BrokenError, match="closed its end or died"):
                receives[1].wait(20)


def test_a_first_connection_that_breaks_before_the_own_call_begins(monkeypatch):
    """An end that is about to make its first call has had the other's connection meanwhile, and lost it."""
    first, broken = peer.TcpPeer._call_first, threading.Event()
    call, crossed = peer.TcpPeer._call, list[bool]()

    def late(self):
        if self.me == 0 and not broken.is_set():
            b.isend(numbered(1), 0, 1)
            with self.lock:
                assert self._changed.wait_for(lambda: self._connection is not None, 20)
                connection = self._connection
            self.lose(connection, EOFError("it ended"))
            broken.set()
        return first(self)

    def once_crossed(self, *limits):
        if self.me != 0 or crossed:
            return call(self, *limits)
        crossed.append(True)
        self._reached()
        return False

    monkeypatch.setattr(peer.TcpPeer, "_call_first", late)
    monkeypatch.setattr(peer.TcpPeer, "_call", once_crossed)
    master, a, b = connected(3)
    with closing(master), closing(a), closing(b):
        targets = torch.zeros(2, 5)
        receives = [a.irecv(target, 1, k) for k, target in enumerate(targets, 1)]
        assert broken.wait(20)
        b.isend(numbered(2), 0, 2)
        for receive in receives:
            receive.wait(20)
        assert torch.equal(targets, torch.stack([numbered(1), numbered(2)]))


def end_connections() -> int:
    """Ends all data connections of this process, as something between hosts may; returns their number."""
    from disttensor.runtime.channel.tcp.channel import _channels

    socks = [one._sock for end in list(_channels) for one in list(end._peers.values()) if one._sock is not None]
    for sock in socks:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    return len(socks)


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_a_session_whose_data_connections_end_again_and_again(encrypt):
    """Collectives, copies between nodes, uploads and downloads: all values are right, before and after."""
    with dt.init_master_worker(nodes=3, backend="tcp", threads=1, encrypt=encrypt):
        local = [torch.arange(300.0) + k for k in range(3)]
        ended = 0
        for k in range(8):
            xs = [x.to(f"node:{j}") for j, x in enumerate(local)]
            dt.all_reduce(xs)
            ended += dt.run(end_connections, node=k % 3)
            for j, x in enumerate(xs):
                assert torch.equal(x.cpu(), sum(local))
                assert torch.equal(x.to(f"node:{(j + 1) % 3}").cpu(), sum(local))
            if k % 2:
                end_connections()
        assert ended > 4
        assert dt.run(os.getpid, node=2) > 0
