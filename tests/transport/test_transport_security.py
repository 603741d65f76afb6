"""Who gets in and who does not. Each refusal stands beside the case that must still work."""

import contextlib
import logging
import os
import pathlib
import pickle
import re
import resource
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from aftermath import Clock, within
from sources import product, refuse
from transport_kit import LIMIT, Proxy, World, nothing_leaks, usage

from disttensor.runtime.host.tcp_info import bytes_received
from disttensor.runtime.master.side_channels import SideChannels
from disttensor.runtime.protocol.errors import BrokenError
from disttensor.runtime.protocol.keys import curve_pair
from disttensor.runtime.transport import sockets, zap
from disttensor.runtime.transport import zmq as transport
from disttensor.runtime.transport.sockets import MAX_MESSAGE
from disttensor.runtime.transport.spoke import plain_name

MEBI = 1 << 20


@pytest.fixture(autouse=True)
def _clean():
    with nothing_leaks():
        yield


@pytest.fixture
def net():
    world = World("curve")
    yield world
    world.close()


class Peer:
    """A ZeroMQ peer with any keys and any name, and none of the manners of a spoke."""

    def __init__(self, net, keys, name):
        self._ctx = sockets.context()
        curve = sockets.Curve(*keys, net.server[0]) if keys else None
        self.sock = sockets.dealer(self._ctx, net.hub.address, curve, name)
        self.sock.monitor("inproc://peer", zmq.EVENT_ALL)
        self._monitor = sockets.pair(self._ctx)
        self._monitor.connect("inproc://peer")
        self.sock.connect(net.hub.address)

    def sees(self, *wanted):
        """Waits for one of the events."""
        while self._monitor.poll(LIMIT * 1000):
            (kind,) = struct.unpack_from("=H", self._monitor.recv_multipart()[0])
            if kind in wanted:
                return True
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._monitor.close()
        self.sock.close(linger=100)
        self._ctx.term()


def connect(address):
    """A raw TCP connection."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    raw = socket.create_connection((host, int(port)))
    raw.settimeout(LIMIT)
    return raw


def hangs_up(raw):
    """Waits until the hub has hung up."""
    try:
        while raw.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


# ---- strangers ------------------------------------------------------------------------------------------------------


#: The line of the log about one that shows no key. Who is turned away at once is gone before its address is asked for.
NO_NODE = (
    r"refused a connection from (127\.0\.0\.1|an unknown address): "
    r"not the handshake of a node of this job; 1 refused so far"
)


def refused(net, count):
    """Waits until the hub has refused so many, and looks that it is no more."""
    deadline = time.monotonic() + LIMIT
    while net.hub.refused < count:
        assert time.monotonic() < deadline, f"{net.hub.refused} of {count} were refused"
    assert net.hub.refused == count


def told_once(caplog, line):
    """Waits for a line of the log, and looks that it is the only one."""
    deadline = time.monotonic() + LIMIT
    while not caplog.records:
        assert time.monotonic() < deadline, "nothing was told"
    [record] = caplog.records
    assert re.fullmatch(line, record.getMessage())


@pytest.mark.fault(32)
def test_an_unlisted_key_is_refused_though_it_knows_the_servers(net):
    with pytest.raises(BrokenError, match="refused this node's key"):
        net.spoke(0, keys=curve_pair())
    assert net.hub.refused == 1
    assert net.hub.drain() == []
    net.echo(0, net.join(0))
    assert net.hub.refused == 1


@pytest.mark.fault(32)
def test_a_wrong_server_key_connects_nobody(net, caplog):
    right, net.server = net.server, curve_pair()
    with pytest.raises(BrokenError, match="cannot reach the master"):
        net.spoke(0, connect_timeout=0.2)
    net.server = right
    net.echo(0, net.join(0))
    assert net.hub.drain() == []
    told_once(caplog, NO_NODE)


@pytest.mark.fault(32)
def test_plain_text_is_refused_where_keys_are_expected(net, caplog):
    with Peer(net, None, plain_name(0)) as peer:
        peer.sock.send(b"let me in")
        assert peer.sees(zmq.EVENT_DISCONNECTED)
    net.echo(0, net.join(0))
    assert net.hub.drain() == []
    # It may hang up first, as it is no friend of keys: then there is nothing to tell.
    assert not caplog.records or told_once(caplog, NO_NODE) is None


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


@pytest.mark.fault(32, 34)
@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(80),
        os.urandom(999),
        pickle.dumps(Bomb()) * 10,
    ],
    ids=["http", "tls", "random", "pickle"],
)
def test_noise_is_not_delivered(net, noise, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    spoke = net.join(0)
    with connect(net.hub.address) as raw:
        raw.sendall(noise)
        assert hangs_up(raw)
    refused(net, 1)
    told_once(caplog, NO_NODE)
    assert net.hub.drain() == []
    net.echo(0, spoke)
    assert not list(tmp_path.iterdir())


def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.fault(33)
def test_a_huge_hello_is_given_no_memory(net):
    before, sent = resident(), 0
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
    with connect(net.hub.address) as raw:
        raw.sendall(greeting + b"\x06" + (1024 * MEBI).to_bytes(8, "big"))  # a long command frame
        try:
            while sent < 128 * MEBI:
                raw.sendall(bytes(MEBI))
                sent += MEBI
        except ConnectionError:
            pass
    assert sent < 32 * MEBI, "the hub went on reading"
    assert resident() - before < 50 * MEBI
    net.echo(0, net.join(0))


def endless(connection: socket.socket, known: bool, all_sent: threading.Event) -> None:
    """Writes as an authenticated node that no libzmq would let: a part after the other, each of them with another to
    come, until it is cut off. (In plain text: a client's CURVE is libzmq's own.) ``known``: after a first message."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
    name = plain_name(0)
    metadata = b"".join(
        bytes([len(key)]) + key + len(value).to_bytes(4, "big") + value
        for key, value in ((b"Socket-Type", b"DEALER"), (b"Identity", name))
    )
    ready = b"\x05READY" + metadata
    connection.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
    heard = b""
    while b"READY" not in heard:
        heard += connection.recv(4096)
    connection.sendall(b"\x00\x05hello" * known)
    part = b"\x03" + MEBI.to_bytes(8, "big") + bytes(MEBI)
    with contextlib.suppress(OSError):
        for _ in range(4 * transport.MAX_UNFINISHED // MEBI):
            connection.sendall(part)
        all_sent.set()


@pytest.mark.parametrize("known", [True, False], ids=["a node", "one who has said nothing yet"])
def test_a_message_without_an_end_is_cut_off(known):
    with contextlib.closing(World("plain")) as net, contextlib.closing(net.join(1)) as other:
        host, _, port = net.hub.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            all_sent = threading.Event()
            sending = threading.Thread(target=endless, args=(connection, known, all_sent))
            sending.start()
            taken, cut, gone, connections, came = [], [], [], 1, False
            while not all_sent.is_set() and not (came and connections == 1):  # as the script does each second
                cut += net.hub.cut_endless()
                taken += net.hub.drain()
                gone += net.hub.gone()
                connections = len(net.hub._zap_handler.received())
                came |= connections == 2
            with contextlib.suppress(OSError):  # the kernel may let it wait for two minutes
                connection.shutdown(socket.SHUT_RDWR)
            sending.join()
        net.echo(1, other)
        if known and not all_sent.is_set():
            gone = gone or net.lost()[1]
    assert not all_sent.is_set()
    assert taken == [(0, b"hello")] * known
    assert set(cut) == set(range(known))  # again and again, until its end is noticed
    assert gone == [0] * known


def test_a_word_of_a_side_channel_without_an_end_is_cut_off():
    """Though the script has nothing to tell anybody there, and nodes have nothing to say."""
    with contextlib.closing(World("plain")) as net:
        side = SideChannels()
        side.hub = net.hub
        host, _, port = net.hub.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            all_sent = threading.Event()
            sending = threading.Thread(target=endless, args=(connection, True, all_sent))
            sending.start()
            connections, came = 0, False
            while not all_sent.is_set() and not (came and connections == 0):
                side.cut_endless()
                connections = len(net.hub._zap_handler.received())
                came |= connections == 1
                sending.join(0.01)
            with contextlib.suppress(OSError):  # the kernel may let it wait for two minutes
                connection.shutdown(socket.SHUT_RDWR)
            sending.join()
    assert not all_sent.is_set()


def test_messages_that_nobody_has_taken_yet_are_not_unfinished(net, monkeypatch):
    """The script may compute for long, or stand still."""
    monkeypatch.setattr(transport, "MAX_UNFINISHED", MEBI)
    with contextlib.closing(net.join(0)) as spoke:
        for _ in range(40):
            spoke.send(bytes(MAX_MESSAGE))
        deadline = time.monotonic() + LIMIT
        while net.hub._zap_handler.received().popitem()[1][1] < 2 * MEBI:
            assert time.monotonic() < deadline
        cut = [net.hub.cut_endless() for _ in range(3)]
        if not any(cut):
            net.take(40)
            cut += [net.hub.cut_endless() for _ in range(3)]
            net.echo(0, spoke)
    assert cut == [[]] * 6


@pytest.mark.parametrize("kind", ["curve", "plain"])
def test_what_an_honest_node_sends_is_never_unfinished(kind):
    """To the last byte, or it would be cut off one day."""
    with contextlib.closing(World(kind)) as net, contextlib.closing(net.join(0)) as spoke:
        sizes = [0, 1, 200, 221, 222, 223, 255, 256, 5000, 65_536, MAX_MESSAGE] * 20
        for size in sizes:
            spoke.send(bytes(size))
        assert [len(message) for _, message in net.take(len(sizes))] == sizes
        [(rank, read)] = net.hub._zap_handler.received().values()
        [connection] = [fd for fd in net.hub._zap_handler._open]
        with socket.socket(fileno=os.dup(connection)) as wire:
            arrived = bytes_received(wire)
        handshake = 1000
        assert rank == 0
        assert read < arrived
        assert 0 <= net.hub._taken[0] + handshake - arrived < 10 * len(sizes) + handshake


@pytest.mark.fault(33)
def test_silent_connections_are_dropped(monkeypatch):
    assert sockets.HANDSHAKE_MS == 2000
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", 500)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, limits[1]), limits[1]))  # both ends are here
    net = World("curve")
    spoke = net.join(0)
    before, opened = resident(), usage()[0]
    strangers = []
    for _ in range(20):
        strangers += [connect(net.hub.address) for _ in range(50)]
        net.echo(0, spoke)  # it is served meanwhile, and what waits to be let in does not overflow the kernel's queue
    clock = Clock()
    assert all(hangs_up(raw) for raw in strangers)
    while usage()[0] > opened + len(strangers):  # their own ends
        net.echo(0, spoke)
        clock.check(5.0, "giving descriptors back")
    clock.check(5.0, "hanging up")
    assert resident() - before < 50 * MEBI
    for raw in strangers:
        raw.close()
    net.echo(0, spoke)
    net.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def with_a_key_of_its_own(net):
    with pytest.raises(BrokenError, match="refused"):
        net.spoke(0, keys=curve_pair())


def with_noise(net):
    with connect(net.hub.address) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        assert hangs_up(raw)


@pytest.mark.fault(32)
@pytest.mark.parametrize(
    ("visit", "line"),
    [
        (with_a_key_of_its_own, "refused a connection from 127.0.0.1: unknown key; 1 refused so far"),
        (with_noise, NO_NODE),
    ],
    ids=["unknown keys", "noise"],
)
def test_a_crowd_of_strangers_gets_one_line_in_the_log(net, caplog, visit, line):
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            visit(net)
        net.join(0).close()
        assert net.lost() == ([], [0])
        for _ in range(5):
            visit(net)
        refused(net, 10)
    told_once(caplog, line)


def test_nodes_are_no_strangers(net, caplog):
    """Neither one that looks whether there is a port, nor one that ends before its first word, nor those that are there
    at the end."""
    connect(net.hub.address).close()
    net.spoke(0).close()
    spoke, other = net.join(1), net.spoke(2)
    deadline = time.monotonic() + LIMIT
    while len(net.hub._zap_handler.received()) > 2:
        assert time.monotonic() < deadline
    net.echo(1, spoke)
    assert net.hub.refused == 0
    spoke.close()
    other.close()
    net.hub.close()
    assert not caplog.records


def test_nodes_that_come_at_once_do_not_wait_for_each_other(monkeypatch):
    """A crowd is let pile up, and then all of it is answered: else each would wait for the pauses of those before."""
    pauses, before, all_ask, answer = [], [], threading.Event(), zap.ZapHandler._answer

    def answered(self, request):
        assert all_ask.wait(LIMIT)
        before.append(len(pauses))
        return answer(self, request)

    monkeypatch.setattr(zap, "_CROWD", -1)  # a crowd, without end
    monkeypatch.setattr(zap, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append))
    monkeypatch.setattr(zap.ZapHandler, "_answer", answered)
    hub = transport.ZmqHub(server_keys=None, node_keys={0: ""})
    asking = [hub._ctx.socket(zmq.REQ) for _ in range(12)]
    try:
        for k, sock in enumerate(asking):  # as libzmq asks
            sock.connect("inproc://zeromq.zap.01")
            sock.send_multipart([b"1.0", b"%d" % k, sockets.ZAP_DOMAIN, b"127.0.0.1", b"", b"NULL"])
        all_ask.set()
        assert [sock.recv_multipart()[2] for sock in asking] == [b"200"] * len(asking)
    finally:
        all_ask.set()
        for sock in asking:
            sock.close(0)
        hub.close()
    assert before == before[:1] * len(asking), f"pauses before each answer: {before}"


def test_without_a_doorman_nobody_gets_in(net):
    # libzmq's default is the opposite: no ZAP handler, no questions.
    ctx, server = sockets.context(), curve_pair()
    lonely = sockets.router(ctx, "tcp://127.0.0.1", sockets.Curve(*server))
    net.server, address = server, f"tcp://127.0.0.1:{lonely.bind_to_random_port('tcp://127.0.0.1')}"
    with pytest.raises(BrokenError):
        net.spoke(0, address=address, connect_timeout=0.2)
    lonely.close()
    ctx.term()


# ---- nodes that lie -------------------------------------------------------------------------------------------------


@pytest.mark.fault(37)
def test_a_second_worker_with_a_live_nodes_key_is_refused(net):
    first = net.join(0)
    with pytest.raises(BrokenError, match="was connected before"):
        net.spoke(0)
    assert net.hub.refused == 1
    net.echo(0, first)


@pytest.mark.fault(37)
def test_of_two_with_one_key_the_first_to_speak_is_the_node(net):
    first, second = net.spoke(0), net.spoke(0)
    first.send(b"hello")
    assert net.take(1) == [(0, b"hello")]
    second.send(b"no, me")
    while not net.hub.refused:
        assert net.ready()
        assert net.hub.drain() == []
    net.echo(0, first)
    assert second.recv(0) is None


@pytest.mark.fault(14)
def test_a_restarted_worker_is_refused(net):
    net.join(0).close()
    assert net.lost()[1] == [0]
    with within(1.0), pytest.raises(BrokenError, match="does not come back"):
        net.spoke(0)
    net.echo(1, net.join(1))


@pytest.mark.fault(37)
def test_a_live_nodes_routing_id_is_of_no_use(net):
    spoke = net.join(0)
    with Peer(net, net.keys[1], net.hub._routes[0]) as peer:
        assert peer.sees(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        peer.sock.send(b"I am node 0")
        net.echo(0, spoke)
    net.echo(0, spoke)
    # Its name is taken, so the socket heeds nothing of it, or takes its message for a name.
    assert net.hub.drain() == []
    assert net.hub.connected == {0}


def test_a_lost_nodes_routing_id_is_of_no_use(net):
    spoke = net.join(0)
    route = net.hub._routes[0]
    spoke.close()
    assert net.lost()[1] == [0]
    with Peer(net, net.keys[1], route) as peer:
        peer.sock.send(b"I am node 0")
        assert net.take(1) == [(1, b"I am node 0")]
        with pytest.raises(BrokenError, match="node 0 is gone"):
            net.hub.send(0, b"secret")


def test_nor_is_it_before_the_loss_was_noticed(net, monkeypatch):
    spoke = net.join(0)
    route = net.hub._routes[0]
    monkeypatch.setattr(net.hub, "_take_ended_ranks", lambda: ())
    spoke.close()
    assert net.ready()
    with Peer(net, net.keys[1], route) as peer:
        peer.sock.send(b"I am node 0")
        while not net.hub.refused:
            assert net.hub.drain() == []


@pytest.mark.fault(37)
def test_a_rank_is_the_keys_whatever_the_name(net):
    with Peer(net, net.keys[1], plain_name(0)) as peer:
        peer.sock.send(b"I am node 0")
        assert net.take(1) == [(1, b"I am node 0")]


@pytest.mark.fault(35)
def test_a_message_of_many_frames_is_dropped(net):
    with Peer(net, net.keys[1], b"many") as peer:
        peer.sock.send_multipart([b"1", b"2", b"3"])
        peer.sock.send(b"one")
        assert net.take(1) == [(1, b"one")]
        assert net.hub.refused == 1


@pytest.mark.fault(35)
def test_an_oversize_message_cuts_off_its_sender_only(net):
    other = net.join(0)
    with Peer(net, net.keys[1], b"big") as peer:
        peer.sock.send(b"hello")
        net.take(1)
        for i in range(200):
            peer.sock.send(b"%d" % i)
        with within(1.0):
            peer.sock.send(bytes(2 * MEBI))
            assert net.lost() == ([(1, b"%d" % i) for i in range(200)], [1])
    net.echo(0, other)


# ---- on the path ----------------------------------------------------------------------------------------------------


@pytest.mark.fault(38)
def test_a_replayed_session_is_refused(net):
    proxy = Proxy(net.hub.address)
    spoke = net.join(0, address=proxy.address)
    spoke.send(b"once")
    net.take(1)
    with connect(net.hub.address) as raw:
        raw.sendall(proxy.recorded)
        assert hangs_up(raw)
    assert net.hub.drain() == []
    net.echo(0, spoke)
    assert b"once" not in proxy.recorded
    proxy.close()


@pytest.mark.fault(28)
def test_a_flipped_bit_ends_the_connection(net):
    with contextlib.closing(Proxy(net.hub.address)) as proxy:
        spoke, other = net.join(0, address=proxy.address), net.join(1)
        proxy.flip = True
        with within(1.0):
            spoke.send(b"damaged on its way")
            assert net.lost() == ([], [0])
        net.echo(1, other)


# ---- plain text -----------------------------------------------------------------------------------------------------


def test_plain_text_hears_only_expected_names():
    net = World("plain", nodes=1)
    spoke = net.join(0)
    with Peer(net, None, b"stranger") as peer:
        peer.sock.send(b"hello")
        while not net.hub.refused:
            assert net.ready()
            assert net.hub.drain() == []
    net.echo(0, spoke)
    net.close()


def test_plain_text_is_for_loopback(monkeypatch):
    monkeypatch.delenv(transport.PLAINTEXT_SWITCH, raising=False)
    with pytest.raises(ValueError, match=transport.PLAINTEXT_SWITCH):
        transport.ZmqHub("192.0.2.1", server_keys=None, node_keys={})
    assert transport._endpoint("192.0.2.1", 0, encrypted=True) == "tcp://192.0.2.1:0"
    monkeypatch.setenv(transport.PLAINTEXT_SWITCH, "1")  # only "yes" means yes
    with pytest.raises(ValueError, match="not loopback"):
        transport._endpoint("192.0.2.1", 0, encrypted=False)
    monkeypatch.setenv(transport.PLAINTEXT_SWITCH, "yes")
    assert transport._endpoint("192.0.2.1", 0, encrypted=False) == "tcp://192.0.2.1:0"


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "0", "::", "::ffff:0.0.0.0", "0x0"])
def test_every_interface_is_never_meant(host):
    with pytest.raises(ValueError, match="every interface"):
        transport.ZmqHub(host, server_keys=curve_pair(), node_keys={}).close()


def test_the_hub_listens_nowhere_else(net):
    connect(net.hub.address).close()
    with pytest.raises(ConnectionRefusedError):
        connect(net.hub.address.replace("127.0.0.1", "127.0.0.2"))


def test_bad_keys_are_named():
    key = curve_pair()[0]
    with pytest.raises(ValueError, match="nodes 0 and 1 have the same"):
        transport.ZmqHub(server_keys=curve_pair(), node_keys={0: key, 1: key})
    with pytest.raises(ValueError, match="node 0's public key"):
        transport.ZmqHub(server_keys=curve_pair(), node_keys={0: "short"})


# ---- the source -----------------------------------------------------------------------------------------------------


def test_only_the_factory_makes_zeromq_sockets():
    makes = re.compile(
        r"\bzmq\.(asyncio\.|green\.)?(Context|Socket)\s*\(|\b(ctx|context)\.socket\(|Context\.instance|SHADOW"
    )
    makers = {file.name for file in product() if makes.search(file.text)}
    assert "runtime/transport/sockets.py" in makers
    refuse(sorted(makers - {"runtime/transport/sockets.py"}), "only sockets.py makes sockets of ZeroMQ's")


def test_every_socket_has_its_options():
    ctx = sockets.context()
    keys = sockets.Curve(*curve_pair())
    router = sockets.router(ctx, "tcp://127.0.0.1", keys)
    dealer = sockets.dealer(ctx, "tcp://127.0.0.1", keys, b"name", 75.0)
    every = (router, dealer, sockets.pair(ctx), sockets.rep(ctx))
    for sock in every:
        assert (0, 0, 1024 if sock is router else 0) == (sock.LINGER, sock.SNDHWM, sock.RCVHWM)
    for sock in (router, dealer):
        assert (sock.MAXMSGSIZE, sock.HANDSHAKE_IVL, sock.MECHANISM) == (MEBI + 64, 2000, zmq.CURVE)
        assert sock.HEARTBEAT_IVL == 0  # a process that was stopped is no loss: its kernel answers
        assert sock.TCP_KEEPALIVE == 1
    probes = [(s.TCP_KEEPALIVE_IDLE, s.TCP_KEEPALIVE_INTVL, s.TCP_KEEPALIVE_CNT) for s in (router, dealer)]
    assert probes == [(2, 3, 5), (5, 15, 5)]
    assert (dealer.TCP_MAXRT, dealer.RECONNECT_IVL > 3600_000) == (80_000, True)
    for sock in every:
        sock.close()
    ctx.term()
