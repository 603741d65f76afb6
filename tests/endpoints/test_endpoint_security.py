"""Endpoints against strangers, who have no key, and against programs that have one and lie, or come early."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
import torch
from limits import HANG

import disttensor as dt
from disttensor.runtime.endpoints import connection, frames, wires
from disttensor.runtime.endpoints.frames import Bye, EndpointHello, EndpointValue, Shape, Welcome
from disttensor.runtime.launch.rendezvous.credentials import read_connection_file
from disttensor.runtime.protocol import values
from disttensor.runtime.protocol.dtypes import IDS
from disttensor.runtime.protocol.keys import curve_pair
from disttensor.runtime.protocol.values import form
from disttensor.runtime.transport.tunnel import TunnelClient
from disttensor.tasks import Connection, Endpoint
from disttensor.tasks import endpoint as endpoint_module


def goes_on(endpoint: Endpoint, file: Path) -> None:
    with dt.tasks.connect(file) as client:
        client.send([1, torch.ones(3)])
        one, value = endpoint.recv_any(HANG)
        assert value[0] == 1
        one.send("heard")
        assert client.recv(timeout=HANG) == "heard"


def test_a_stranger_gets_nothing(endpoint: Endpoint, file: Path) -> None:
    """Without a key a greeting of ZeroMQ's, and no more; with another key, or at another server, nothing."""
    host, _, port = endpoint.addresses[0].removeprefix("tcp://").rpartition(":")
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, frames.frame(EndpointHello(frames.VERSION, "h", 1, ""))):
        with socket.create_connection((host, int(port)), HANG) as stranger:
            stranger.sendall(said)
            heard = bytearray()
            try:
                while piece := stranger.recv(4096):
                    heard += piece
            except ConnectionResetError:
                pass
            assert len(heard) <= 64
    told = read_connection_file(file, 0)
    for keys, server in (
        (curve_pair(), told.server_key),
        ((told.public_key, curve_pair()[1]), told.server_key),
        ((told.public_key, told.secret_key), curve_pair()[0]),
    ):
        with pytest.raises(dt.errors.BrokenError):
            TunnelClient(endpoint.addresses, keys, server, 0.2)
    assert endpoint.clients() == []
    goes_on(endpoint, file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(endpoint: Endpoint, file: Path, mode: int) -> None:
    os.chmod(file, mode)
    with pytest.raises(dt.errors.StartError, match="others can get at it"):
        dt.tasks.connect(file, timeout=1)
    os.chmod(file, 0o600)


def length(size: int) -> bytes:
    return size.to_bytes(4, "big")


def value(*shapes: Shape, data: bytes = b"") -> bytes:
    return frames.frame(EndpointValue(data or values.encode(1, []), shapes))


@dataclass
class Anothers:
    """A class that nobody has announced."""

    x: int


FLOAT, BOOL = IDS[torch.float32], IDS[torch.bool]
HELLO = frames.frame(EndpointHello(frames.VERSION, "liar", 1, ""))


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "said",
    {
        "noise": b"\xff" * 100,
        "no length": length(0) + b"x" * 20,
        "a head too long": HELLO + length(frames.MAX_HEAD + 1),
        "a long head before hello": length(frames.MAX_FIRST + 1),
        "more lists than there may be": HELLO
        + value(data=bytes(4) + b"\xdd" + length(form.MAX_CONTAINERS) + b"\x90" * form.MAX_CONTAINERS),
        "more numbers than there may be": HELLO + value(data=bytes(4) + b"\xdd\xff\xff\xff\xff"),
        "lists in what is beside": HELLO
        + value(Shape(IDS[torch.uint8], (5 + form.MAX_CONTAINERS,)), data=length(1)[::-1] + bytes(4))
        + b"\xdd"
        + length(form.MAX_CONTAINERS)
        + b"\x90" * form.MAX_CONTAINERS,
        "bytes where none were counted": HELLO
        + value(Shape(FLOAT, (1,)), data=bytes(4) + b"\xc7\x05\x01\xdb" + bytes(4))
        + bytes(4),
        "no msgpack": length(3) + b"\xc1\xc1\xc1",
        "a value before hello": value(),
        "a welcome": frames.frame(Welcome(1, 0)),
        "goodbye before hello": frames.frame(Bye()),
        "hello twice": HELLO + HELLO,
        "a tensor left over": HELLO + value(Shape(FLOAT, (1,))) + bytes(4),
        "no such dtype": HELLO + value(Shape(9999, (1,))),
        "a dtype with a scale": HELLO + value(Shape(IDS[torch.quint8], (1,))),
        "more than there can be": HELLO + value(Shape(FLOAT, (1 << 40,))),
        "sizes whose product is no number": HELLO + value(Shape(FLOAT, (0, 1 << 61, 1 << 61))),
        "a bool that is 2": HELLO + value(Shape(BOOL, (1,)), data=values.encode(torch.ones(1), [])) + b"\2",
        "a pickle": HELLO + value(data=b"\x80\x04c__builtin__\nexit\n."),
        "an object": HELLO + value(data=values.encode(Anothers(1), [], classes=set())),
        "another protocol": frames.frame(msgspec.structs.replace(EndpointHello(0, "h", 1, ""), version=7)),
    }.items(),
    ids=lambda case: case[0],
)
def test_who_has_a_key_and_lies_loses_its_connection(endpoint: Endpoint, file: Path, said: tuple[str, bytes]) -> None:
    with program(file) as liar:
        liar.sendall(said[1])
        while liar.recv(4096):
            pass
    goes_on_after(endpoint, file)


@contextlib.contextmanager
def program(file: Path) -> Iterator[socket.socket]:
    """What a program that has the key can say, byte by byte."""
    told = read_connection_file(file, 0)
    tunnel = TunnelClient(told.addresses, (told.public_key, told.secret_key), told.server_key, HANG)
    tunnel.socket.settimeout(HANG)
    try:
        yield tunnel.socket
    finally:
        tunnel.socket.close()
        tunnel.close()


def ended(endpoint: Endpoint) -> None:
    """All connections have ended, and the thread has seen it."""
    with endpoint._wires.cond:
        assert endpoint._wires.wait(lambda: endpoint._count > 0 and not endpoint._wires.wires, HANG)


@pytest.mark.parametrize("whole", [True, False])
def test_what_an_ended_client_has_sent_in_part_is_dropped_at_once(endpoint: Endpoint, file: Path, whole: bool) -> None:
    """Whether that was no message, or was none yet: the script need not ask for anything."""
    size = 8 << 20
    tracemalloc.start()
    try:
        for _ in range(3):
            with program(file) as liar:
                liar.sendall(HELLO + length(size) + b"\xc1" * (size if whole else size - 1))
                if whole:
                    while liar.recv(4096):
                        pass
            ended(endpoint)
        assert tracemalloc.get_traced_memory()[0] < size // 2
    finally:
        tracemalloc.stop()
    goes_on_after(endpoint, file)


def test_clients_that_are_gone_count_while_they_have_left_something(nodes: object, file: Path) -> None:
    with Endpoint(file, max_clients=2) as endpoint:
        for _ in range(2):
            with dt.tasks.connect(file) as client:
                client.send("left behind")
        with pytest.raises(dt.errors.BrokenError, match=r"2 clients already \(max_clients=\), with 2 that are gone"):
            dt.tasks.connect(file)
        assert endpoint.recv_any(HANG)[1] == "left behind"
        goes_on_after_messages(endpoint, file)


def goes_on_after_messages(endpoint: Endpoint, file: Path) -> None:
    with dt.tasks.connect(file) as client:
        client.send("mine")
        assert [endpoint.recv_any(HANG)[1] for _ in range(2)] == ["left behind", "mine"]


def test_of_killed_clients_the_last_ones_are_told(nodes: object, file: Path) -> None:
    """They take no place of the living, and are no more than there may be of these."""
    with Endpoint(file, max_clients=2) as endpoint:
        for _ in range(6):
            with program(file) as killed:
                killed.sendall(HELLO)
                assert killed.recv(4096)
            ended(endpoint)
        with dt.tasks.connect(file) as client:
            client.send("alive")
            assert endpoint.clients(1, HANG)[0].poll(HANG)
            assert endpoint.recv_any(HANG)[1] == "alive"
            for number in (4, 5):
                with pytest.raises(dt.errors.BrokenError, match=f"client {number} .* has ended without a word"):
                    endpoint.recv_any(HANG)
            with pytest.raises(TimeoutError):
                endpoint.recv_any(0)


def test_a_closed_endpoint_keeps_nothing(nodes: object, file: Path) -> None:
    with Endpoint(file) as endpoint, dt.tasks.connect(file) as client:
        client.send(torch.ones(1000))
        (there,) = endpoint.clients(1, HANG)
        assert there.poll(HANG)
        left = weakref.ref(there._wire)
        del there
    gone = weakref.ref(endpoint)
    del endpoint, client
    gc.collect()
    assert gone() is None
    assert left() is None


def test_the_window_counts_what_values_become(endpoint: Endpoint, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of lists is a hundred times as much in memory as on the wire."""
    monkeypatch.setattr(wires, "FULL_BYTES", 1 << 20)
    with dt.tasks.connect(file) as client:
        (one,) = endpoint.clients(1, HANG)
        for _ in range(8):
            client.send([[]] * 10_000)
        for left in range(8, 0, -1):
            assert one.poll(HANG)
            assert len(one._wire.inbox) == 1, left
            assert one._wire.held > 1 << 20
            assert one.recv(timeout=HANG) == [[]] * 10_000


def test_a_broadcast_names_who_does_not_read(endpoint: Endpoint, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever has to do with others goes on meanwhile."""
    said: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(wires, "PATIENCE", 0.05)
    monkeypatch.setattr(wires._log, "warning", lambda text, *values: said.put(text % values))
    with ThreadPoolExecutor(1) as pool, dt.tasks.connect(file) as other, program(file) as deaf:
        deaf.sendall(HELLO)
        first, second = endpoint.clients(2, HANG)
        waiting = pool.submit(endpoint.broadcast, torch.ones(4 << 20))
        assert len(other.recv(timeout=HANG)) == 4 << 20
        while f"client {first.id} " in (text := said.get(timeout=HANG)):
            pass  # it has just taken it
        assert f"a broadcast has not been taken by client {second.id} (host liar, pid 1), which reads nothing" in text
        first.send("at once", HANG)
        assert other.recv(timeout=HANG) == "at once"
        other.send(torch.ones(1 << 20), HANG)
        assert len(endpoint.recv_any(HANG)[1]) == 1 << 20
        assert not waiting.done()
        deaf.close()
        with pytest.raises(dt.errors.BrokenError, match="host liar"):
            waiting.result(HANG)


def goes_on_after(endpoint: Endpoint, file: Path) -> None:
    """The liar is told of, by name, if it had been let in."""
    with dt.tasks.connect(file) as client:
        client.send("honest")
        told: list[str] = []
        seen: list[object] = []
        while not seen:
            try:
                seen.append(endpoint.recv_any(HANG)[1])
            except dt.errors.BrokenError as e:
                told.append(str(e))
        assert seen == ["honest"]
        assert all("host liar" in line for line in told)


def test_who_sends_without_end_waits(endpoint: Endpoint, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody takes is bounded; and all of it comes, in order."""
    monkeypatch.setattr(wires, "FULL_BYTES", 1 << 20)
    monkeypatch.setattr(wires, "FULL_MESSAGES", 8)
    with dt.tasks.connect(file) as client:
        (one,) = endpoint.clients(1, HANG)
        sent = 0

        def send_without_end() -> None:
            nonlocal sent
            while sent < 10_000:
                client.send([sent, torch.full((100_000,), float(sent))], timeout=0.2)
                sent += 1

        with pytest.raises(TimeoutError, match=r"has not taken a message for 0.2 s; it is still on its way"):
            send_without_end()
        assert len(one._wire.inbox) <= 8
        for number in range(sent + 1):
            got, x = one.recv(timeout=HANG)
            assert got == number
            assert bool((x == number).all())
        assert not one.poll()


def test_a_file_of_nodes_that_join_is_no_endpoints(tmp_path: Path) -> None:
    """What answers by it is another kind of thing, and says so."""
    job = tmp_path / "join"
    script = (
        "import sys, disttensor as dt\n"
        "dt.init_master_worker(nodes=2, init_method='file://' + sys.argv[1], timeout=60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(job)], stderr=subprocess.DEVNULL) as running:
        try:
            with pytest.raises(dt.errors.BrokenError, match="is that file an Endpoint's"):
                dt.tasks.connect(job, timeout=HANG)
        finally:
            running.kill()


def test_another_version_is_refused_with_both(endpoint: Endpoint, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "EndpointHello", lambda version, *more: EndpointHello(version + 1, *more))
    with pytest.raises(dt.errors.BrokenError, match="version 2 of these messages, and this job version 1"):
        dt.tasks.connect(file)


def test_a_program_connects_while_it_is_made(nodes: object, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is there, and its port open, before the object is whole."""

    class Slow(wires.Wires):
        def __init__(self, heard: Any, arrivals: int, arrived: Any) -> None:
            super().__init__(heard, arrivals, arrived)
            coming.append(pool.submit(dt.tasks.connect, file, timeout=HANG))
            assert select.select([arrivals], [], [], HANG)[0]
            if self._thread.ident is not None:  # it is told of the program that has come
                self._thread.join(HANG)

    coming = list[Future[Connection]]()
    monkeypatch.setattr(endpoint_module, "Wires", Slow)
    with ThreadPoolExecutor(1) as pool, dt.tasks.Endpoint(file) as endpoint, coming[0].result(HANG) as client:
        endpoint.clients(1, timeout=HANG)[0].send("there")
        assert client.recv(timeout=HANG) == "there"
