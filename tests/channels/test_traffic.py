"""Statistics: what data channels have carried, as ``dt.channels.stats`` tells it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from types import SimpleNamespace

import channel_kit
import pytest
import torch
from native_channel import NativeChannel

import disttensor as dt
from disttensor.runtime.channel import DataChannel, counted
from disttensor.runtime.channel.counted import CountedChannel, TransferTally
from disttensor.runtime.channel.inproc import InprocChannel
from disttensor.runtime.channel.tcp.channel import TcpChannel
from disttensor.runtime.channel.tcp.reader import ReceiveTicket
from disttensor.runtime.contracts.data_channel import check_data_channel

_jobs = itertools.count()


@pytest.mark.parametrize("inner", [InprocChannel, TcpChannel])
def test_a_counted_channel_is_a_data_channel(inner):
    def make(n):
        job = f"counted {next(_jobs)}"
        return channel_kit.connected(lambda context: CountedChannel(inner(context)), range(-1, n - 1), job)

    check_data_channel(make)


def test_it_passes_everything_on():
    public = {name for name in vars(DataChannel) if not name.startswith("_")} - {"send", "recv", "unavailable", "blame"}
    assert public <= vars(CountedChannel).keys() | {"capabilities"}


def test_it_is_what_it_counts():
    [channel] = channel_kit.connected(lambda context: CountedChannel(TcpChannel(context)), [0])
    assert channel.name == "tcp"
    assert channel.capabilities is TcpChannel.capabilities
    assert "TcpChannel rank=0" in repr(channel)
    channel.close()


def test_seconds_are_those_in_which_something_was_under_way(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(counted, "perf_counter", lambda: clock[0])
    tally = TransferTally()

    def at(now):
        clock[0] = now
        return tally

    at(11.0).add(100, 10.0)  # a second
    at(14.0).begin_transfer(1, 13.0)
    at(15.0).begin_transfer(1, 14.5)  # beside the first
    at(15.5).add(1, 15.0)
    assert at(16.0).figures() == (4, 103, 4.0)
    at(17.0).end_transfer()
    at(18.0).end_transfer()
    assert tally.figures() == (4, 103, 6.0)
    at(19.0).add(1, 17.0)  # half of it was counted
    assert at(30.0).figures() == (5, 104, 7.0)
    at(31.0).begin_transfer(0, 18.5)
    at(32.0).end_transfer()
    assert tally.figures() == (6, 104, 20.0)


def test_nobody_waits_who_counts():
    """Or a tcp channel's reader thread would take over from those who wait, at a cost for every small message."""
    roused, ended = [], []
    peer = SimpleNamespace(reader=SimpleNamespace(parked=True, rouse=lambda: roused.append(1)))
    ticket = ReceiveTicket(peer)  # type: ignore[arg-type]
    ticket.add_background_callback(lambda: ended.append(1))
    assert (roused, ended) == ([], [])
    ticket.finish()
    ticket.add_background_callback(lambda: ended.append(2))
    assert (roused, ended) == ([], [1, 2])
    waiting = ReceiveTicket(peer)  # type: ignore[arg-type]
    waiting.add_done_callback(lambda: None)
    assert roused


def test_without_a_session():
    for ask in (dt.channels.stats, dt.channels.reset_stats):
        with pytest.raises(dt.DisttensorError, match="no session"):
            ask()


@pytest.mark.row("I19")
def test_small_collectives_in_shared_memory_count_what_is_given_and_got():
    with dt.init_master_worker("shm", nodes=2, threads=1):
        xs = [torch.ones(100, device=f"node:{k}") for k in range(2)]
        for _ in range(3):
            dt.all_reduce(xs)
        dt.broadcast(xs, 1)
        rows = {row.at: row for row in dt.channels.stats() if row.peer == "group"}
        assert (rows["node:0"].sent.calls, rows["node:0"].sent.bytes, rows["node:0"].received.bytes) == (4, 1200, 1600)
        assert (rows["node:1"].sent.calls, rows["node:1"].sent.bytes, rows["node:1"].received.bytes) == (4, 1600, 1200)


def test_a_lost_node_is_missing():
    with dt.init_master_worker(nodes=2, threads=1):
        x = torch.ones(4).to("node:0").to("node:1")
        dt.synchronize()
        os.kill(dt.nodes()[1]["pid"], signal.SIGKILL)
        with pytest.raises(dt.NodeLost):
            list(iter(lambda: x.sum().item(), 0))  # until it raises
        rows = {(row.at, row.peer): (row.sent.bytes, row.received.bytes) for row in dt.channels.stats()}
        assert rows == {("master", "node:0"): (16, 0), ("node:0", "master"): (0, 16), ("node:0", "node:1"): (16, 0)}
        dt.channels.reset_stats()
        assert dt.channels.stats() == ()


def test_each_channel_of_a_session():
    with dt.init_master_worker(nodes=2, backend="tcp", threads=1):
        dt.channels.select("send", "shm", min_bytes=1 << 16)
        x = torch.ones(1 << 14).to("node:0")
        x.to("node:1")
        x[:8].to("node:1")
        dt.synchronize()
        sent = {row.channel: row.sent.bytes for row in dt.channels.stats() if row.at == "node:0" and row.sent.calls}
    assert sent == {"shm": 1 << 16, "tcp": 32}


@pytest.fixture(scope="module")
def three():
    with dt.init_master_worker(nodes=3, launcher="inproc"):
        yield


@pytest.fixture
def fresh(three):
    dt.synchronize()
    dt.channels.reset_stats()


def flows(use="transfers"):
    """(from, to) -> (calls, bytes), as both ends have counted it."""
    dt.synchronize()
    rows = [row for row in dt.channels.stats() if row.use == use]
    sent = {(row.at, row.peer): (row.sent.calls, row.sent.bytes) for row in rows if row.sent.calls}
    received = {(row.peer, row.at): (row.received.calls, row.received.bytes) for row in rows if row.received.calls}
    assert sent == received
    return sent


@pytest.mark.row("I9")
def test_every_transfer_is_counted_at_both_ends(fresh):
    x = torch.ones(1000).to("node:0")
    y = x.to("node:1")
    y.to("node:2").to("node:1")
    x[:10].cpu()
    dt.fetch(y.t()).wait()
    assert flows() == {
        ("master", "node:0"): (1, 4000),
        ("node:0", "node:1"): (1, 4000),
        ("node:1", "node:2"): (1, 4000),
        ("node:2", "node:1"): (1, 4000),
        ("node:0", "master"): (1, 40),
        ("node:1", "master"): (1, 4000),
    }
    total = dt.channels.stats()
    assert (total.sent.calls, total.sent.bytes) == (total.received.calls, total.received.bytes) == (6, 20040)
    assert total.sent.seconds > 0
    assert total.sent.rate == pytest.approx(20040 / total.sent.seconds / 1e6)


def test_counting_starts_anew(fresh):
    x = torch.ones(5).to("node:0")
    assert flows() == {("master", "node:0"): (1, 20)}
    dt.channels.reset_stats()
    assert flows() == {}
    assert dt.channels.stats() == ()
    x.cpu()
    assert flows() == {("node:0", "master"): (1, 20)}


@pytest.mark.row("I19")
@pytest.mark.parametrize(("algorithm", "times"), [("ring", 4 / 3), ("all", 2)])
def test_collectives_are_counted_apart(fresh, algorithm, times):
    """And each byte travels as often as the algorithm says."""
    xs = [torch.zeros(3 << 10, device=f"node:{k}") for k in range(3)]
    dt.all_reduce(xs, algorithm=algorithm)
    assert flows() == {}
    sent = flows("collectives")
    for node in range(3):
        mine = sum(nbytes for (source, _), (_, nbytes) in sent.items() if source == f"node:{node}")
        assert mine == times * (12 << 10)


@pytest.mark.row("I9")
def test_the_table(fresh):
    torch.ones(1 << 18).to("node:2")
    dt.synchronize()
    head, master, node = str(dt.channels.stats()).splitlines()
    assert head.split() == ["at", "peer", "channel", "for", "sent", "MB", "s", "MB/s", "received", "MB", "s", "MB/s"]
    assert master.split()[:6] == ["master", "node:2", "inproc", "transfers", "1", "1.049"]
    assert node.split()[:7] == ["node:2", "master", "inproc", "transfers", "0", "1", "1.049"]


def test_nothing_is_counted_while_a_graph_is_recorded(fresh):
    g = dt.Graph()
    with dt.graph(g), pytest.raises(dt.errors.GraphError, match="counting"):
        dt.channels.stats()


def test_streams_count_too(fresh):
    s = dt.Stream("node:1")
    with dt.stream(s):
        x = torch.ones(100).to("node:1")
        y = x.to("node:2")
    assert flows() == {("master", "node:1"): (1, 400), ("node:1", "node:2"): (1, 400)}
    del s, x, y


def test_a_channels_own_collectives():
    one, other = channel_kit.connected(
        lambda context: CountedChannel(NativeChannel(context)), [0, 1], "native, counted"
    )
    xs, outs = [torch.full((8,), k) for k in (1, 2)], [torch.zeros(8, dtype=torch.int64) for _ in range(2)]

    def take_part(channel, me):
        channel.collective("all_reduce", [0, 1], me, [xs[me]], [outs[me]], "SUM", 0, 1)

    thread = threading.Thread(target=take_part, args=(other, 1))
    thread.start()
    take_part(one, 0)
    thread.join()
    assert [out.tolist() for out in outs] == [[3] * 8] * 2
    for channel in (one, other):
        [(name, _, peer, sent, received)] = channel.rows()
        assert (name, peer, sent[:2], received[:2]) == ("native", counted.GROUP, (1, 64), (1, 64))
        channel.close()
