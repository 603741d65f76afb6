"""The contract of transport/base.py, for each control transport; then what only a network can do to one."""

import contextlib
import os
import select
import socket
import threading
import time

import pytest
import zmq
from aftermath import within
from deafen import deafen_ends
from transport_kit import LIMIT, Proxy, World, nothing_leaks

from disttensor.runtime.host.tcp_info import Unanswered
from disttensor.runtime.protocol.errors import BrokenError, ClosedError
from disttensor.runtime.protocol.keys import curve_pair, job_id, job_secret, pair_key
from disttensor.runtime.transport import sockets
from disttensor.runtime.transport.base import TURN
from disttensor.runtime.transport.sockets import MAX_MESSAGE
from disttensor.runtime.transport.zap import ZapHandler
from disttensor.runtime.transport.zmq import ZmqHub, ZmqSpoke


@pytest.fixture(autouse=True)
def _clean():
    with nothing_leaks():
        yield


@pytest.fixture(params=["inproc", "curve", "plain"])
def world(request):
    world = World(request.param)
    yield world
    world.close()


@pytest.fixture
def net():
    world = World("curve")
    yield world
    world.close()


@pytest.fixture
def proxy(net):
    proxy = Proxy(net.hub.address)
    yield proxy
    proxy.close()


# ---- every transport ------------------------------------------------------------------------------------------------


def test_messages_keep_their_order(world):
    spokes = [world.join(rank) for rank in range(3)]
    for i in range(300):
        for rank in range(3):
            world.hub.send(rank, b"%d to %d" % (i, rank))
    for rank, spoke in enumerate(spokes):
        assert [spoke.recv(LIMIT) for _ in range(300)] == [b"%d to %d" % (i, rank) for i in range(300)]
        for i in range(300):
            spoke.send(b"%d" % i)
    got = world.take(900)
    for rank in range(3):
        assert [message for sender, message in got if sender == rank] == [b"%d" % i for i in range(300)]


def test_a_node_is_connected_from_its_first_drained_message_on(world):
    assert world.hub.connected == frozenset()
    spoke = world.spoke(1)
    with pytest.raises(BrokenError, match="node 1 is not connected"):
        world.hub.send(1, b"early")
    spoke.send(b"hello")
    world.take(1)
    assert world.hub.connected == {1}
    assert "connected=[1]" in repr(world.hub)
    assert "node=1" in repr(spoke)
    world.echo(1, spoke)
    with pytest.raises(BrokenError, match="node 7"):
        world.hub.send(7, b"")


def test_the_descriptor_tells_what_drain_has(world):
    spoke = world.join(0)
    for i in range(100):
        assert world.hub.drain() == []
        assert not world.ready(0)
        spoke.send(b"%d" % i)
        assert world.ready()
        assert world.take(1) == [(0, b"%d" % i)]


def test_draining_after_each_send_misses_nothing(world):
    # A send may take in what the descriptor would have announced.
    spoke = world.join(0)

    def answer():
        for _ in range(500):
            spoke.send(spoke.recv())

    thread = threading.Thread(target=answer)
    thread.start()
    got = 0
    for i in range(500):
        world.hub.send(0, b"%d" % i)
        got += len(world.hub.drain())
        if i % 7 == 0 and got < i:
            got += len(world.take(1))
    world.take(500 - got)
    thread.join()


def test_one_drain_takes_a_bounded_number(world):
    """A node that sends faster than messages are taken must not hold the thread that takes them."""
    spokes = [world.join(rank) for rank in range(2)]
    many = 2 * TURN + 1
    for i in range(many):
        spokes[0].send(b"%d" % i)
    spokes[1].send(b"other")
    got, turns = [], 0
    while len(got) < many + 1:
        assert world.ready(), f"{len(got)} messages were taken, and the descriptor does not tell of the others"
        some = world.hub.drain()
        assert len(some) <= TURN
        got += some
        turns += 1
    assert turns >= 3
    assert [message for rank, message in got if rank == 0] == [b"%d" % i for i in range(many)]
    assert (1, b"other") in got
    assert world.hub.drain() == []
    assert not world.ready(0)


def test_a_node_is_gone_after_its_last_message_however_many(world):
    spoke = world.join(0)
    for i in range(2 * TURN + 1):
        spoke.send(b"%d" % i)
    spoke.close()
    got, gone = world.lost()
    assert ([message for _, message in got], gone) == ([b"%d" % i for i in range(2 * TURN + 1)], [0])


def test_recv_times_out(world):
    spoke = world.join(0)
    assert spoke.recv(0) is None
    assert spoke.recv(0.01) is None
    world.echo(0, spoke)


def test_an_end_that_does_not_read_holds_nobody_up(world):
    # What limits the sender is the window above, never a queue in here.
    spoke, message = world.join(0), bytes(500)
    for _ in range(5000):
        world.hub.send(0, message)
        spoke.send(message)
    assert len(world.take(5000)) == 5000
    for _ in range(5000):
        assert spoke.recv(LIMIT) == message


@pytest.mark.parametrize("size", [0, 1, 2048, MAX_MESSAGE])
def test_sizes(world, size):
    spoke = world.join(0)
    message = os.urandom(size)
    world.hub.send(0, message)
    assert spoke.recv(LIMIT) == message
    spoke.send(message)
    assert world.take(1) == [(0, message)]


def test_a_message_over_the_limit_is_refused_and_harms_nothing(world):
    spoke = world.join(0)
    for end in (lambda m: world.hub.send(0, m), spoke.send):
        with pytest.raises(ValueError, match=f"{MAX_MESSAGE + 1} bytes"):
            end(bytes(MAX_MESSAGE + 1))
    world.echo(0, spoke)


def test_a_closed_node_is_gone_after_its_last_message(world):
    spoke, other = world.join(0), world.join(2)
    for i in range(200):
        spoke.send(b"%d" % i)
    spoke.close()
    got, gone = world.lost()
    assert got == [(0, b"%d" % i) for i in range(200)]
    assert gone == [0]
    assert world.hub.gone() == []
    assert world.hub.connected == {2}
    with pytest.raises(BrokenError, match="node 0"):
        world.hub.send(0, b"late")
    world.echo(2, other)


def test_a_closed_master_is_gone_after_its_last_message(world):
    spoke = world.join(0)
    for i in range(200):
        world.hub.send(0, b"%d" % i)
    world.hub.close()
    assert [spoke.recv(LIMIT) for _ in range(200)] == [b"%d" % i for i in range(200)]
    for _ in range(2):
        with pytest.raises(ClosedError, match="master"):
            spoke.recv(LIMIT)
    with pytest.raises(ClosedError, match="master"):
        spoke.send(b"late")


def test_sending_to_a_node_that_just_left_is_an_error(world):
    # The hub has not noticed it: nobody has drained.
    world.join(0).close()
    assert world.ready()

    def send_on():
        for _ in range(100_000):
            world.hub.send(0, b"into the void")

    with pytest.raises(BrokenError, match="node 0"):
        send_on()


@pytest.mark.parametrize("end", ["hub", "spoke"])
def test_closing_wakes_a_blocked_recv(world, end):
    spoke = world.join(0)
    errors = []

    def receive():
        assert spoke.recv() == b"go"
        spoke.send(b"waiting")
        try:
            spoke.recv()
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    world.hub.send(0, b"go")
    assert world.take(1) == [(0, b"waiting")]
    (world.hub if end == "hub" else spoke).close()
    thread.join(LIMIT)
    assert len(errors) == 1


def test_nothing_works_after_close(world):
    spoke = world.join(0)
    spoke.close()
    spoke.close()
    world.hub.close()
    world.hub.close()
    for call in (spoke.recv, lambda: spoke.send(b""), world.hub.drain, lambda: world.hub.send(0, b"")):
        with pytest.raises(ClosedError):
            call()
    assert "closed" in repr(spoke)
    assert "closed" in repr(world.hub)


def test_any_thread_may_send_while_one_receives(world):
    spoke = world.join(0)
    received = []

    def receive():
        while (message := spoke.recv()) != b"stop":
            received.append(message)

    def send(thread):
        for i in range(200):
            spoke.send(b"%d %d" % (thread, i))

    threads = [threading.Thread(target=receive), *(threading.Thread(target=send, args=(t,)) for t in range(3))]
    for thread in threads:
        thread.start()
    got = []
    for i in range(600):
        world.hub.send(0, b"%d" % i)  # meets their sends in the node's socket
        got += world.hub.drain()
    world.hub.send(0, b"stop")
    got += world.take(600 - len(got))
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert received == [b"%d" % i for i in range(600)]
    for t in range(3):
        mine = [message for _, message in got if message.startswith(b"%d " % t)]
        assert mine == [b"%d %d" % (t, i) for i in range(200)]


def test_a_send_that_takes_the_receivers_cue_wakes_it(net):
    spoke = net.join(0)
    assert spoke.recv(0) is None  # leaves the mark of a thread that is about to wait
    net.hub.send(0, b"for the receiver")
    assert select.select([spoke._sock.FD], [], [], LIMIT)[0]
    spoke.send(b"from another thread")
    assert select.select([spoke._wake], [], [], 0)[0]


# ---- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.fault(25)
@pytest.mark.parametrize("how", [Proxy.cut, Proxy.reset])
def test_a_cut_connection_is_lost_for_good(net, proxy, how):
    spoke, other = net.join(0, address=proxy.address), net.join(1)
    with within(1.0):
        how(proxy)
        assert net.lost() == ([], [0])
        with pytest.raises(ClosedError):
            spoke.recv(LIMIT)
    with pytest.raises(BrokenError, match="does not come back"):
        net.spoke(0)
    net.echo(1, other)


@pytest.mark.fault(21)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # CPython warns of any fork beside threads
@pytest.mark.parametrize("alive", [True, False], ids=["alive", "ended"])
@pytest.mark.parametrize("kind", ["curve", "inproc"])
def test_another_worker_in_the_place_of_one(kind, alive):
    """Nothing of the former one is given out any more, and its key is good for nothing."""
    world = World(kind)
    try:
        former, other = world.join(0), world.join(1)
        if not alive:
            former.close()
            assert world.lost() == ([], [0])
        elif kind == "curve":
            former.send(b"late")
            assert world.ready()
        keys = curve_pair() if kind == "curve" else ("", "")
        world.hub.readmit(0, keys[0])
        again = {"keys": keys} if kind == "curve" else {}
        if kind == "curve":
            with pytest.raises(BrokenError, match="refused this node's key"):
                world.spoke(0)
        mine = world.spoke(0, **again)
        mine.send(b"hello again")
        assert world.take(1) == [(0, b"hello again")]
        world.echo(0, mine)
        world.echo(1, other)
        assert world.hub.gone() == []
        if kind == "curve":
            with pytest.raises(ClosedError):
                former.recv(LIMIT)
            with pytest.raises(ValueError, match="a key of its own"):
                world.hub.readmit(0, keys[0])
        world.echo(0, mine)
        mine.close()
        assert world.lost() == ([], [0])
    finally:
        world.close()


def test_a_forked_child_does_not_keep_connections_alive(world):
    spoke = world.join(0)
    release, held = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            world.hub.forked()
            world.hub.forked()
            world.hub.close()
            with pytest.raises(ClosedError):
                world.hub.send(0, b"")
            os.close(held)
            os.read(release, 1)
            status = 0
        finally:
            os._exit(status)
    os.close(release)
    world.echo(0, spoke)
    world.hub.close()
    with pytest.raises(ClosedError):
        spoke.recv(LIMIT)
    os.close(held)
    assert os.waitpid(child, 0)[1] == 0


def test_who_was_asked_for_nothing_is_not_deaf():
    """However long it has said nothing; nor is one that reads nothing, as a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        silence = Unanswered()
        assert not silence.lasts(connection, 0.0)
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection.send(bytes(MAX_MESSAGE))
        until = time.monotonic() + 1.0
        while time.monotonic() < until:  # long enough for a kernel that hears nothing to try again
            assert not silence.lasts(connection, 0.0)


@pytest.mark.fault(26)
@pytest.mark.parametrize("hub_hears", [True, False], ids=["commands are lost", "replies are lost"])
def test_an_end_that_answers_is_not_deaf_and_one_that_does_not_is_cut(hub_hears):
    """In the time that was named, and not before; the other node is not harmed."""
    with contextlib.closing(World("curve", silence=2.0)) as net, contextlib.closing(net.join(1)) as other:
        spoke, begun = net.join(0), time.monotonic()
        net.echo(0, spoke)
        assert net.hub.cut_deaf() == []
        [connection] = [fd for fd, rank in net.hub._zap_handler._watched.items() if rank == 0]
        with socket.socket(fileno=os.dup(connection)) as end:
            assert deafen_ends(end.getpeername()[1], at=hub_hears) == 1
        with within(2.0 + 0.5):
            net.hub.send(0, b"to be lost, or its answer")
            while not (deaf := net.hub.cut_deaf()):
                net.echo(1, other)
            assert deaf == [0]
        assert time.monotonic() - begun >= 2.0
        assert net.lost() == ([], [0])
        net.echo(1, other)


def test_connecting_is_tried_again(net, proxy):
    proxy.drop = 2
    net.echo(0, net.join(0, address=proxy.address))


def test_a_master_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BrokenError, match=rf"cannot reach the master at tcp://127.0.0.1:{port}: \d+ attempts in 0.3 s"):
        ZmqSpoke(f"tcp://127.0.0.1:{port}", curve_pair()[0], *curve_pair(), 0, connect_timeout=0.3)


@pytest.mark.fault(44)
def test_a_taken_port_is_named(net):
    port = int(net.hub.address.rpartition(":")[2])
    with within(5.0), pytest.raises(BrokenError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
        ZmqHub(port=port, server_keys=curve_pair(), node_keys={})


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")
def test_ipv6():
    net = World("curve", host="::1")
    net.echo(0, net.join(0))
    assert net.hub.address.startswith("tcp://[::1]:")
    net.close()


def test_several_addresses():
    """A hub listens on each that it is told, of either family, and on no other."""
    hosts = ("127.0.0.1", "::1", "127.0.0.2") if _has_ipv6() else ("127.0.0.1", "127.0.0.2")
    net = World("curve", host=hosts)
    assert [address.rpartition(":")[0] for address in net.hub.addresses] == [
        f"tcp://[{host}]" if ":" in host else f"tcp://{host}" for host in hosts
    ]
    assert net.hub.address == net.hub.addresses[0]
    for rank, address in enumerate(net.hub.addresses):
        net.echo(rank, net.join(rank, address=address))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.3", int(net.hub.address.rpartition(":")[2]))).close()
    net.close()


def test_a_stuck_peer_delays_close_by_a_bound(net, proxy, monkeypatch):
    monkeypatch.setattr(sockets, "FLUSH_MS", 50)
    net.join(0, address=proxy.address)
    proxy.frozen = True
    for _ in range(64):
        net.hub.send(0, bytes(MAX_MESSAGE))
    net.hub.close()  # the test's timeout is the check


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_pair_keys():
    secret = job_secret()
    keys = {(job, a, b): pair_key(secret, job, a, b) for job in ("x", "y") for a in range(-1, 13) for b in range(a)}
    assert len(set(keys.values())) == len(keys)
    assert all(len(key) == 32 and key == pair_key(secret, job, b, a) for (job, a, b), key in keys.items())
    assert pair_key(job_secret(), "x", 1, 0) != keys["x", 1, 0]
    with pytest.raises(ValueError, match="32 bytes"):
        pair_key(b"short", "x", 0, 1)
    assert job_id() != job_id()


def test_pair_key_is_hkdf():
    # One block of RFC 5869, written out with other means than the implementation's.
    import hashlib

    def hmac(key, text):
        key = key.ljust(64, b"\0")
        inner = hashlib.sha256(bytes(k ^ 0x36 for k in key) + text).digest()
        return hashlib.sha256(bytes(k ^ 0x5C for k in key) + inner).digest()

    secret = bytes(range(32))
    info = b"disttensor pair" + (2).to_bytes(8, "big") + (5).to_bytes(8, "big")
    assert pair_key(secret, "job", 5, 2) == hmac(hmac(b"job", secret), info + b"\x01")


def test_a_connection_is_known_before_its_handshake_is_answered(monkeypatch):
    """A connection of which the hub has not heard would count as one that has ended: its node would be lost."""
    seen, gate = [], threading.Event()
    note, answer = ZapHandler._note_event, ZapHandler._answer

    def noted(self, event):
        seen.append("a connection")
        note(self, event)

    def answered(self, request):
        seen.append(bytes(request[1]).decode())
        if len(seen) == 1:
            assert gate.wait(LIMIT)
        return answer(self, request)

    monkeypatch.setattr(ZapHandler, "_note_event", noted)
    monkeypatch.setattr(ZapHandler, "_answer", answered)
    hub = ZmqHub(server_keys=None, node_keys={0: ""})
    first, second = asking = [hub._ctx.socket(zmq.REQ) for _ in range(2)]

    def ask(sock, number):
        """Asks as libzmq does."""
        sock.connect("inproc://zeromq.zap.01")
        sock.send_multipart([b"1.0", number, sockets.ZAP_DOMAIN, b"127.0.0.1", b"", b"NULL"])

    try:
        ask(first, b"the first")
        while not seen:
            time.sleep(0)
        host, _, port = hub.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), LIMIT) as connection:
            assert connection.recv(1)  # a byte of libzmq's greeting: it has told of the connection
            ask(second, b"the second")
            gate.set()
            assert second.recv_multipart()[2] == b"200"
        assert seen[:3] == ["the first", "a connection", "the second"]
    finally:
        gate.set()
        for sock in asking:
            sock.close(0)
        hub.close()
