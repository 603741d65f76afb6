"""The figures of a job for Prometheus: what they are, where they are served, and what strangers can do there."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import struct
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError, URLError

import prometheus_client
import psutil
import pytest
import torch
from limits import HANG
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families

import disttensor as dt
from disttensor import testing
from disttensor.seeing import GpuStatus, LineStatus, metrics, metrics_server
from disttensor.seeing.metrics import COUNTER, FAMILIES
from disttensor.seeing.metrics_server import MOST, MetricsServer

Figures = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        yield


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port at which the figures of sessions are served."""
    found = free_port()
    monkeypatch.setenv("DISTTENSOR_METRICS", f"127.0.0.1:{found}")
    return found


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    made = prometheus_client.CollectorRegistry()
    made.register(dt.seeing.collector())
    return made


def scrape(port: int, host: str = "127.0.0.1") -> Figures:
    """The figures by their names, without "disttensor_", and the values of their labels."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=HANG) as answer:
        return figures(answer.read().decode())


def figures(text: str) -> Figures:
    found: Figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name.removeprefix("disttensor_"), tuple(sample.labels[name] for name in sample.labels)
            assert key not in found
            found[key] = sample.value
    return found


def read(registry: prometheus_client.CollectorRegistry) -> Figures:
    return figures(prometheus_client.generate_latest(registry).decode())


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_names_are_as_prometheus_has_them() -> None:
    """Units are whole and stand last, "_total" comes with counters, and a text says what it is without the others."""
    assert len({it.name for it in FAMILIES}) == len(FAMILIES)
    for it in FAMILIES:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)+|nodes", it.name), it
        assert not re.search(r"_(total|count|sum|bucket|info|created|ms|kb|mb|percent)$", it.name), it
        assert not re.search(r"_(bytes|seconds|ratio)_", it.name), it
        assert re.fullmatch(r"[A-Z1].*[^.]|[A-Z1].*\.", it.says), it
        assert it.says.endswith("."), it
        assert not {*it.labels} - {"node", "host", "place", "device", "line"}, it


@pytest.mark.usefixtures("session")
def test_the_figures_are_those_of_the_job(registry: prometheus_client.CollectorRegistry) -> None:
    dt.mesh(dp=2)
    x = torch.ones(1000, device="node:1")
    for _ in range(3):
        x.sum().item()
    (x + 1).cpu()
    torch.ones(10).to("node:1")
    before, found, status = dt.seeing.status(), read(registry), dt.seeing.status()
    assert found["session_running", ()] == 1
    assert found["nodes", ()] == 2
    assert before.script.commands <= found["script_commands_total", ()] <= status.script.commands
    assert found["script_resident_bytes", ()] > 1 << 20
    assert found["script_waits_total", ()] == sum(it.waits for it in status.lines) == 4
    for it in status.lines:
        assert found["script_line_waits_total", (it.line,)] == it.waits
        assert found["script_line_wait_seconds_total", (it.line,)] == it.seconds
    host = status.nodes[1].host
    labels = host, "1", "dp=1"
    assert found["node_up", labels] == 1
    assert found["node_losses_total", labels] == 0
    assert found["node_commands_total", labels] > 4
    assert found["script_received_bytes_total", labels] == 4000
    assert found["script_sent_bytes_total", labels] == 40
    assert ("node_resident_bytes", labels) not in found  # this is the script's process


def test_nodes_that_are_processes(port: int) -> None:
    """What is seen of them from outside, while one is stopped, and when it is lost."""
    with dt.init_master_worker(nodes=2, threads=1):
        x = torch.ones(300, 300, device="node:1")
        (x @ x).sum().item()
        labels = dt.seeing.status(timeout=HANG).nodes[1].host, "1", ""
        deadline = time.monotonic() + HANG
        while not (before := scrape(port))["node_busy_seconds_total", labels]:  # which it notes twice a second
            assert time.monotonic() < deadline
        assert before["node_resident_peak_bytes", labels] >= before["node_resident_bytes", labels] > 1 << 20
        assert before["node_cpu_seconds_total", labels] > 0
        assert before["node_tensors", labels] == 1
        assert before["node_held_bytes", labels] == x.nbytes
        testing.stop(1)
        x.neg_()
        stopped = scrape(port)
        assert stopped["node_up", labels] == 1
        assert stopped["node_behind", labels] >= 1
        testing.resume(1)
        testing.kill(1)
        with pytest.raises(dt.NodeLost):
            x.cpu()
        lost = scrape(port)
        assert lost["node_up", labels] == 0
        assert lost["node_losses_total", labels] == 1
        counters = {f"{it.name}_total" for it in FAMILIES if it.kind == COUNTER}
        assert {key: (before[key], lost[key]) for key in before if key[0] in counters and lost[key] < before[key]} == {}


@pytest.mark.usefixtures("session")
def test_lines_slow_nodes_and_gpus(
    registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one name are one line: Prometheus refuses what is there twice."""
    status = dt.seeing.status()
    gpus = GpuStatus("cuda:0", 3, 8, 0.25), GpuStatus("cuda:1", 4, 8, None)
    slow = dt.seeing.SlowStatus(1, "dp=1", "a", 0.5, "", "", "")
    lines = LineStatus("train.py:3", "", 2, 1.5), LineStatus("train.py:3", "", 1, 0.25)
    nodes = replace(status.nodes[0], gpus=gpus), status.nodes[1]
    monkeypatch.setattr(metrics, "status", lambda: replace(status, nodes=nodes, slow=(slow,), lines=lines))
    found = read(registry)
    assert found["script_line_waits_total", ("train.py:3",)] == 3
    assert found["script_line_wait_seconds_total", ("train.py:3",)] == 1.75
    assert {labels[:1]: figure for (name, labels), figure in found.items() if name == "gpu_used_bytes"} == {
        ("cuda:0",): 3,
        ("cuda:1",): 4,
    }
    assert [figure for (name, _), figure in found.items() if name == "gpu_busy_ratio"] == [0.25]
    assert [figure for (name, _), figure in found.items() if name == "node_slow_ratio"] == [0, 0.5]


def test_a_collector_outlives_sessions(registry: prometheus_client.CollectorRegistry) -> None:
    for _ in range(2):
        assert read(registry) == {("session_running", ()): 0}
        with dt.init_master_worker(nodes=1, launcher="inproc"):
            assert read(registry)["nodes", ()] == 1
    assert repr(dt.seeing.collector()) == "<disttensor.seeing.collector()>"


@pytest.mark.parametrize("ends", [True, False])
def test_a_session_that_ends_meanwhile(
    registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """What this raises is no answer; another error is told."""

    def fail() -> None:
        if ends:
            dt.shutdown()
        raise dt.DisttensorError("there is no session")

    with dt.init_master_worker(nodes=1, launcher="inproc"):
        monkeypatch.setattr(metrics, "status", fail)
        if ends:
            assert read(registry) == {("session_running", ()): 0}
        else:
            with pytest.raises(dt.DisttensorError, match="there is no session"):
                read(registry)


def test_without_prometheus_client(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    said = r"dt\.seeing\.collector\(\) needs prometheus_client: pip install 'disttensor\[metrics\]'"
    with pytest.raises(ImportError, match=f"^{said}$"):
        dt.seeing.collector()
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        pass
    assert re.fullmatch(rf"no metrics are served at DISTTENSOR_METRICS=127.0.0.1:{port}: {said}", *caplog.messages)


# ---- where they are served -------------------------------------------------------------------------------------------


def listening() -> set[tuple[str, int]]:
    """The addresses at which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_it_listens_at_that_address_and_while_there_is_a_session(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    port = free_port()
    monkeypatch.setenv("DISTTENSOR_METRICS", f"{host}:{port}")
    before = listening()
    for _ in range(2):
        with dt.init_master_worker(nodes=1, launcher="inproc"):
            assert listening() - before == {(host.strip("[]"), port)}
            assert scrape(port, host)["session_running", ()] == 1
        assert listening() == before
        with pytest.raises(URLError, match="Connection refused"):
            scrape(port, host)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("0.0.0.0:9400", "0.0.0.0 is not this machine's alone"),
        ("9400", "'9400' is no address such as 127.0.0.1:9400"),
    ],
)
def test_an_address_of_others_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str, why: str
) -> None:
    monkeypatch.setenv("DISTTENSOR_METRICS", address)
    before = listening()
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        assert listening() == before
    (said,) = caplog.messages
    assert said.startswith(f"no metrics are served at DISTTENSOR_METRICS={address}: {why}")


def test_a_port_that_is_taken(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", port)), dt.init_master_worker(nodes=1, launcher="inproc"):
        assert torch.ones(1, device="node:0").item() == 1
    (said,) = caplog.messages
    assert re.search(r": \[Errno \d+\] Address already in use$", said)


def test_several_ask_at_once(port: int) -> None:
    found, errors = list[Figures](), list[Exception]()
    together = threading.Barrier(4)

    def ask() -> None:
        try:
            together.wait(HANG)
            found.append(scrape(port))
        except Exception as e:
            errors.append(e)

    with dt.init_master_worker(nodes=2, launcher="inproc"):
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert [each["nodes", ()] for each in found] == [2] * 4


# ---- strangers -------------------------------------------------------------------------------------------------------


class Served:
    """A server whose answers a test lets come."""

    def __init__(self) -> None:
        self.port, self.server = free_port(), MetricsServer()
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()
        self.server.open("127.0.0.1", self.port, self.answer)

    def answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        self.asked.release()
        assert self.may_answer.wait(HANG)
        start("200 OK", [("Content-Type", "text/plain")])
        return [b"disttensor_nodes 2.0\n"]

    def connect(self, said: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(HANG)
        connection.sendall(said)
        return connection


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.may_answer.set()
    made.server.close()
    made.server.close()


def heard(connection: socket.socket) -> bytes:
    """All that comes until the other end hangs up."""
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionResetError:  # it has not read what was said
        pass
    connection.close()
    return found


GET = b"GET /metrics HTTP/1.0\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (GET, b"HTTP/1.0 200 OK"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 \r\n\r\n", b""),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n", b"HTTP/1.0 414 "),
        (b"GET / HTTP/1.0\r\n" + b"x: y\r\n" * 1000 + b"\r\n", b"HTTP/1.0 431 "),
    ],
)
def test_what_is_no_request_is_refused(
    served: Served, capfd: pytest.CaptureFixture[str], said: bytes, answer: bytes
) -> None:
    served.may_answer.set()
    assert heard(served.connect(said)).startswith(answer)
    assert heard(served.connect(GET)).endswith(b"disttensor_nodes 2.0\n")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("when", ["while it asks", "while it is answered"])
def test_who_hangs_up_is_not_told_of(served: Served, capfd: pytest.CaptureFixture[str], when: str) -> None:
    connection = served.connect(GET[:8] if when == "while it asks" else GET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
    if when == "while it is answered":
        assert served.asked.acquire(timeout=HANG)
    connection.close()
    served.may_answer.set()
    assert heard(served.connect(GET)).startswith(b"HTTP/1.0 200 OK")
    served.server.close()
    assert capfd.readouterr() == ("", "")


def test_so_many_at_once_and_no_more(served: Served) -> None:
    crowd = [served.connect(GET) for _ in range(MOST)]
    for _ in crowd:
        assert served.asked.acquire(timeout=HANG)
    assert heard(served.connect(GET)) == b""
    served.may_answer.set()
    assert all(heard(each).startswith(b"HTTP/1.0 200 OK") for each in crowd)


def test_who_says_nothing_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "SILENT", 0.05)
    assert heard(served.connect()) == b""


def test_who_takes_long_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece that comes gives no more time. So many as it could say are an answer of their own."""
    monkeypatch.setattr(metrics_server, "SILENT", 0.05)
    connection = served.connect(b"GET / HTTP/1.0\r\n")
    with contextlib.suppress(OSError):
        for _ in range(150):
            if select.select([connection], [], [], 0.01)[0]:
                break
            connection.sendall(b"x: y\r\n")
    assert heard(connection) == b""


def test_the_end_waits_for_nobody_silent(served: Served) -> None:
    silent = [served.connect() for _ in range(MOST)]
    assert heard(served.connect()) == b""  # the others have been let in
    served.server.close()
    assert [heard(each) for each in silent] == [b""] * MOST
    with pytest.raises(ConnectionRefusedError):
        served.connect()


def test_only_figures_can_be_asked_for(port: int) -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", data=b"x", method="POST")
        with pytest.raises(HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=HANG)


def test_a_forked_child_does_not_hold_the_port(served: Served) -> None:
    listener = served.server._listener
    assert listener is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        number = listener.fileno()
        served.server.forked()
        served.server.close()
        try:
            os.fstat(number)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    served.may_answer.set()
    assert heard(served.connect(GET)).startswith(b"HTTP/1.0 200 OK")
