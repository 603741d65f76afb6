"""The gloo channel: what differs from tcp."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import threading
from contextlib import suppress

import channel_kit
import leaks
import pytest
import torch
from processes import alive_after
from torch.distributed import PrefixStore
from variants import variants

from disttensor.runtime.channel.gloo.channel import GlooChannel
from disttensor.runtime.channel.gloo.group import GlooGroup
from disttensor.runtime.channel.gloo.store import MailboxStore, cut
from disttensor.runtime.channel.library_groups import Mailbox
from disttensor.runtime.channel.tcp.frames import EAGER
from disttensor.runtime.channel.tcp.peer import Limits
from disttensor.runtime.contracts.data_channel import check_data_channel
from disttensor.runtime.contracts.data_channel_kit import LIMIT
from disttensor.runtime.protocol.errors import BrokenError

LARGE = EAGER
MET = 1 << 60  #: the id of a transfer


def connected(n: int) -> list[GlooChannel]:
    return channel_kit.connected(GlooChannel, range(-1, n - 1))


def met(n: int) -> list[GlooChannel]:
    """Every pair has its group."""
    channels = connected(n)
    carriers = [carrier for channel in channels for carrier in channel._carriers()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "disttensor.runtime.channel.gloo.channel._CONNECT_PAIR", LIMIT
        )  # all of them share the interpreter
        for carrier in carriers:
            carrier._begin_group()
        for carrier in carriers:
            carrier.join(LIMIT)
            assert carrier.group is not None
    for (a, one), (b, other) in itertools.permutations(enumerate(channels, -1), 2):
        word = other.irecv(torch.zeros(1), a, MET)
        one.isend(torch.zeros(1), b, MET).wait(LIMIT)
        word.wait(LIMIT)  # what its peer said before has been heard by now: that it has met
    assert all(carrier._met for carrier in carriers)
    return channels


@pytest.fixture(autouse=True)
def nothing_left():
    before = leaks.Held.now(memory=False, descriptors=True)
    yield
    leaks.check(before, "the test")


@pytest.mark.parametrize("make", variants([met, connected]), ids=["met", "from the start"])
def test_conformance(make, monkeypatch):
    # all share the interpreter, which gloo keeps for itself for up to 3 s while a pair of them meets
    monkeypatch.setattr(GlooChannel, "limits", Limits(handshake=LIMIT, connect=LIMIT))
    check_data_channel(make)


def test_large_tensors_go_by_gloo():
    channels = met(2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("disttensor.runtime.channel.tcp.inbound.Inbound.read_into", None)  # the connection has none
            for tensor in (torch.arange(LARGE), torch.randn(300, 300).t(), torch.zeros(LARGE, dtype=torch.complex32)):
                arrival = channels[1].iarrive(tuple(tensor.shape), tensor.dtype, -1, tensor.numel())
                channels[0].send(tensor, 0, tensor.numel())
                arrival.wait(LIMIT)
                assert torch.equal(arrival.tensor.view(torch.uint8), tensor.contiguous().view(torch.uint8))
    finally:
        for channel in channels:
            channel.close()


def test_who_sends_comes_out_when_the_peer_is_forgotten():
    """A peer that was cut off or stopped says nothing: the master does, after its time limit."""
    channels = met(2)
    send = channels[0].isend(torch.zeros(LARGE), 0, 1)  # nobody receives it
    with pytest.raises(TimeoutError):
        send.wait(0.1)
    channels[0].mark_lost(0, "cut off")
    with pytest.raises(BrokenError, match="cut off"):
        send.wait(LIMIT)
    for channel in channels:
        channel.close()


def test_who_receives_comes_out_when_the_peer_is_forgotten(monkeypatch):
    channels = met(2)
    monkeypatch.setattr(channels[0]._peers[0].carrier, "carry", lambda tensor: None)  # the bytes never come
    receive = channels[1].irecv(torch.zeros(LARGE), -1, 1)
    channels[0].isend(torch.zeros(LARGE), 0, 1)
    with pytest.raises(TimeoutError):
        receive.wait(0.1)
    channels[1].mark_lost(-1, "cut off")
    with pytest.raises(BrokenError, match="cut off"):
        receive.wait(LIMIT)
    for channel in channels:
        channel.close()


def test_a_groups_store_says_which_values_there_are():
    """By the way that C++ asks: NCCL's watchdog does, each second, and warns where it gets no answer."""
    mailbox = Mailbox()
    inner = MailboxStore("group", mailbox, lambda key, value: None, lambda: None)
    store = PrefixStore("inside", inner)
    assert not store.check(["dump"])
    store.set("dump", "1")
    mailbox.put("group/inside/other", b"2")
    assert store.check(["dump", "other"])
    assert not store.check(["dump", "third"])


def test_an_end_that_gives_up_does_not_keep_the_other(monkeypatch):
    """Gloo goes on calling where nobody listens any more: that has to end while the channel is being closed."""
    get = MailboxStore.get

    def fail(self, key):
        if threading.current_thread().name.startswith("disttensor-gloo-0-"):
            raise RuntimeError("no")
        return get(self, key)

    monkeypatch.setattr(MailboxStore, "get", fail)
    channels = connected(2)
    target = torch.empty(LARGE)
    receive = channels[1].irecv(target, -1, 1)
    channels[0].isend(torch.ones(LARGE), 0, 1)
    receive.wait(LIMIT)
    assert target.all()
    channels[1].abort()
    channels[0].close()
    assert not [thread for thread in threading.enumerate() if "meet" in thread.name]


def test_who_receives_sees_that_the_peer_hangs_up(monkeypatch):
    """Its reader waits for gloo, which does not see every end."""
    channels = met(2)
    monkeypatch.setattr(channels[0]._peers[0].carrier, "carry", lambda tensor: None)
    for end in ("cut", "close"):
        monkeypatch.setattr(GlooGroup, end, lambda group: None)
    group = channels[0]._peers[0].carrier.group
    receive = channels[1].irecv(torch.zeros(LARGE), -1, 1)
    channels[0].isend(torch.zeros(LARGE), 0, 1).wait(LIMIT)
    channels[0]._peers[0]._sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(BrokenError, match="hung up"):
        receive.wait(LIMIT)
    monkeypatch.undo()
    group.cut()
    group.close()
    for channel in channels:
        channel.close()
    group.join(LIMIT)


@pytest.mark.parametrize("when", ["idle", "in the middle"])
@pytest.mark.parametrize("end", [0, 1], ids=["sender", "receiver"])
def test_a_connection_of_gloos_that_breaks_costs_what_it_carries(end, when, caplog):
    """The channel's own goes on, and carries large tensors from then on, in both directions."""
    channels = met(2)
    carriers = [channels[0]._peers[0].carrier, channels[1]._peers[-1].carrier]
    try:
        if when == "in the middle":
            sent = channels[0].isend(torch.ones(LARGE), 0, 1)  # gloo has it from now on, or in a moment
            while not carriers[0].group._calls:
                threading.Event().wait(0.001)
        group = carriers[end].group
        cut(group._ours, group._theirs)
        target = torch.zeros(LARGE)
        receive = channels[1].irecv(target, -1, 1)
        if when == "idle":
            sent = channels[0].isend(torch.ones(LARGE), 0, 1)
        sent.wait(LIMIT)  # its memory is free again
        try:
            receive.wait(LIMIT)
        except BrokenError as error:
            assert "gloo's connection was ended" in str(error)  # noqa: PT017
        else:
            assert target.all()  # gloo had taken it in before it saw the end
        for number in range(2, 6):
            there, back = torch.zeros(LARGE), torch.zeros(LARGE)
            receives = channels[1].irecv(there, -1, number), channels[0].irecv(back, 0, number)
            channels[0].isend(torch.full((LARGE,), float(number)), 0, number)
            channels[1].isend(torch.full((LARGE,), -float(number)), -1, number)
            for each in receives:
                each.wait(LIMIT)
            assert there.eq(number).all()
            assert back.eq(-number).all()
        assert [carrier.group for carrier in carriers] == [None, None]
        assert "large tensors take the connection with rank" in caplog.text
    finally:
        for channel in channels:
            channel.close()


def joint(n: int) -> list[GlooChannel]:
    return channel_kit.connected(GlooChannel, range(n))


def all_reduce(channel: GlooChannel, ranks: list[int], number: int, numel: int = LARGE) -> torch.Tensor:
    x = torch.full((numel,), float(channel.rank))
    channel.collective("all_reduce", ranks, ranks.index(channel.rank), [x], [x], "SUM", 0, number)
    return x


def outcomes(channels: list[GlooChannel], ranks: list[int], number: int) -> list[object]:
    found: list[object] = [None] * len(channels)

    def rank(me: int) -> None:
        try:
            found[me] = all_reduce(channels[me], ranks, number)
        except Exception as error:
            found[me] = error

    threads = [threading.Thread(target=rank, args=(me,)) for me in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a rank hangs"
    return found


@pytest.mark.parametrize("known", [False, True], ids=["at the first", "later"])
def test_a_rank_that_is_forgotten_breaks_the_collective_of_the_others(known, monkeypatch):
    """It is stopped: its connections stay, and say nothing."""
    channels = joint(3)
    if known:
        outcomes(channels, [0, 1, 2], 1)
    timer = threading.Timer(0.1, lambda: [channel.mark_lost(2, "stopped") for channel in channels[:2]])
    timer.start()
    found = []

    def rank(me: int) -> None:
        with pytest.raises(BrokenError, match=r"rank 2 is lost to rank .: stopped") as caught:
            all_reduce(channels[me], [0, 1, 2], 2)
        found.append(caught.value.rank)

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in [*threads, timer]:
        thread.join(LIMIT)
    assert found == [2, 2]
    made = []
    with monkeypatch.context() as patch:  # what was issued behind it needs no group to break off
        patch.setattr(GlooChannel, "_group", lambda *arguments: made.append(arguments))
        for error in outcomes(channels, [0, 1, 2], 3)[:2]:
            assert isinstance(error, BrokenError)
            assert error.rank == 2
    assert made == []
    first, second, _ = outcomes(channels, [0, 1], 4)  # the others go on
    assert first[0] == second[0] == 1
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("seen", [True, False], ids=["", "which gloo does not see"])
def test_a_rank_that_fails_by_itself_lets_the_others_out(seen, monkeypatch):
    channels = joint(3)
    outcomes(channels, [0, 1, 2], 1)
    group = channels[2]._groups[0, 1, 2]
    monkeypatch.setattr("disttensor.runtime.channel.library_groups._NEWS", 0.5)  # there is none: nobody is lost
    if not seen:
        monkeypatch.setattr(group, "cut", lambda: None)
    channels[2]._groups[0, 1, 2].run = None  # type: ignore[method-assign]
    found = outcomes(channels, [0, 1, 2], 2)
    assert all(isinstance(one, BrokenError) for one in found)
    monkeypatch.undo()
    group.cut()
    for channel in channels:
        channel.regroup([0, 1, 2])
    assert all(one[0] == 3 for one in outcomes(channels, [0, 1, 2], 3))
    for channel in channels:
        channel.close()


@pytest.fixture
def no_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def sockets() -> set[str]:
    there = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            there.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in there if name.startswith("socket:")}


def test_what_is_closed_holds_no_sockets_even_where_it_has_failed(no_collections):
    """The errors are in cycles with their own tracebacks, whose variables lead to the groups."""
    before = sockets()
    channels = joint(3)
    outcomes(channels, [0, 1, 2], 1)
    channels[2]._groups[0, 1, 2].run = None  # type: ignore[method-assign]
    errors = outcomes(channels, [0, 1, 2], 2)
    assert all(isinstance(error, BrokenError) for error in errors)
    receive = channels[1].irecv(torch.zeros(LARGE), 0, 1)
    channels[0].isend(torch.zeros(LARGE), 1, 1)
    receive.wait(LIMIT)
    for channel in channels:
        channel.close()
    assert sockets() <= before


def test_a_forked_child_ends():
    """Gloo's threads are not there: to destroy what they belong to would wait for them."""
    channels = joint(2)
    outcomes(channels, [0, 1], 1)
    child = os.fork()
    if not child:
        channels[0]._groups.clear()
        os._exit(0)
    if alive_after(LIMIT, [child]):
        os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0) == (child, 0)
    for channel in channels:
        channel.close()


def test_a_descriptor_that_is_anothers_by_now_is_left_alone(monkeypatch):
    """Between two looks its number may be used anew: for a file, here."""
    monkeypatch.setattr("disttensor.runtime.channel.gloo.store.stat.S_ISSOCK", lambda mode: True)
    read, write = os.pipe()
    try:
        before = set(os.listdir("/proc/self/fd"))
        assert cut(set(), set()) == 0
        assert set(os.listdir("/proc/self/fd")) == before
        os.write(write, b"x")
        assert os.read(read, 1) == b"x"
    finally:
        os.close(read)
        os.close(write)


def test_a_cut_leaves_the_other_ends_alone():
    """They may be in this process, with bytes on their way to them that have been sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()
        with socket.create_connection(where) as dialled, listener.accept()[0] as accepted:
            assert cut({where}, set()) == 1
            assert accepted.recv(1) == b""
            dialled.send(b"x")
        with socket.create_connection(where) as dialled, listener.accept()[0] as accepted:
            accepted.sendall(b"sent")
            assert cut(set(), {where}) == 1
            accepted.send(b"x")
            assert dialled.recv(9) == b"sentx"
            assert dialled.recv(9) == b""
