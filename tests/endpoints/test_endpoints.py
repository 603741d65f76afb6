"""Endpoints: other programs talk to the running job. torch-ipc's cases of client and server, and ends of every kind."""

from __future__ import annotations

import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import disttensor as dt
from disttensor.tasks import Connection, Endpoint

LONG = 60.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as made:
        yield made


@pytest.fixture
def pair(endpoint: Endpoint, file: Path) -> Iterator[tuple[Connection, Connection]]:
    """The job's end, and the program's."""
    with dt.tasks.connect(file, tag="pair") as program:
        yield endpoint.clients(1, LONG)[0], program


def same(got: Any, sent: Any) -> None:
    if isinstance(sent, torch.Tensor):
        assert type(got) is torch.Tensor
        assert (got.dtype, got.shape, got.device.type) == (sent.dtype, sent.shape, "cpu")
        assert torch.equal(got, sent.cpu().resolve_conj())
    elif isinstance(sent, np.ndarray):
        assert (type(got), got.dtype, got.shape) == (np.ndarray, sent.dtype, sent.shape)
        assert np.array_equal(got, sent)
    elif isinstance(sent, dict | list | tuple):
        assert type(got) is type(sent)
        assert len(got) == len(sent)
        if isinstance(sent, dict):
            assert [*got] == [*sent]
            got, sent = [*got.values()], [*sent.values()]
        for a, b in zip(got, sent, strict=True):
            same(a, b)
    else:
        assert type(got) is type(sent)
        assert got == sent


@pytest.mark.row("I1")
def test_a_server_on_a_free_port(nodes: object, file: Path) -> None:
    with Endpoint(file) as one, Endpoint(file.with_name("another")) as two:
        ports = {address.rpartition(":")[2] for end in (one, two) for address in end.addresses}
        assert len(ports) == 2
        assert all(address.startswith("tcp://127.0.0.1:") for address in one.addresses)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with pytest.raises(dt.errors.StartError, match="is the connection file of process"):
            Endpoint(file)
        with pytest.raises(dt.errors.BrokenError, match="cannot listen on"):
            Endpoint(file.with_name("third"), port=int(one.addresses[0].rpartition(":")[2]))
        with dt.tasks.connect(file) as client:
            client.send("to the first")
            assert one.recv_any(LONG)[1] == "to the first"
            assert two.clients() == []
    assert not file.exists()
    assert not file.with_name("third").exists()
    with pytest.raises(dt.errors.ClosedError, match="this endpoint is closed"):
        one.clients()
    one.close()


@pytest.mark.row("I2")
def test_slow_start(nodes: object, file: Path, pool: ThreadPoolExecutor) -> None:
    """The client is there first, and tries again until the server is."""
    tries = threading.Event()

    def client() -> Any:
        with pytest.raises(dt.errors.StartError, match="there is no connection file"):
            dt.tasks.connect(file, timeout=0)
        tries.set()
        with dt.tasks.connect(file, timeout=LONG) as job:
            return job.recv(timeout=LONG)

    one = pool.submit(client)
    assert tries.wait(LONG)
    with Endpoint(file) as endpoint:
        endpoint.clients(1, LONG)[0].send("late")
        assert one.result(LONG) == "late"


@pytest.mark.row("I3")
def test_so_many_clients_in_order(endpoint: Endpoint, file: Path) -> None:
    with pytest.raises(TimeoutError, match=r"0 of 2 clients have connected in 0.01 s"):
        endpoint.clients(2, timeout=0.01)
    made = [dt.tasks.connect(file, tag=f"t{i}") for i in range(4)]
    clients = endpoint.clients(4, LONG)
    assert [c.id for c in clients] == [c.id for c in made] == [0, 1, 2, 3]
    assert [c.tag for c in clients] == ["t0", "t1", "t2", "t3"]
    made[1].close()
    assert clients[1].poll(LONG)
    assert [c.id for c in endpoint.clients(3, LONG)] == [0, 2, 3]
    made[1] = dt.tasks.connect(file)
    assert [c.id for c in endpoint.clients(4, LONG)] == [0, 2, 3, 4]  # a number is nobody else's
    for one in made:
        one.close()


@pytest.mark.row("I4")
def test_broadcast_by_tag(endpoint: Endpoint, file: Path) -> None:
    made = [dt.tasks.connect(file, tag="even" if i % 2 == 0 else "odd") for i in range(10)]
    endpoint.clients(10, LONG)
    x = torch.arange(5.0, device="node:1")
    assert endpoint.broadcast(["all", x]) == 10
    assert endpoint.broadcast("even ones", "even") == 5
    assert endpoint.broadcast("nobody", "none") == 0
    endpoint.clients()[1].tag = "even"  # by the server, from now on
    assert endpoint.broadcast("more even ones", tag="even") == 6
    endpoint.broadcast("end")
    for i, one in enumerate(made):
        same(one.recv(timeout=LONG), ["all", torch.arange(5.0)])
        rest = [] if i % 2 else ["even ones"]
        rest += ["more even ones"] if i % 2 == 0 or i == 1 else []
        assert [one.recv(timeout=LONG) for _ in range(len(rest) + 1)] == [*rest, "end"]
        one.close()


@pytest.mark.row("I5")
def test_recv_any_of_ten(endpoint: Endpoint, file: Path, pool: ThreadPoolExecutor) -> None:
    def client(number: int) -> None:
        with dt.tasks.connect(file, tag=str(number)) as job:
            job.send(number)
            assert job.recv(timeout=LONG) == number + 1
            job.send("done")

    running = [pool.submit(client, i) for i in range(10)]
    endpoint.clients(10, LONG)  # all of them: no client closes before it was answered
    seen = []
    for _ in range(20):
        one, value = endpoint.recv_any(LONG)
        if value == "done":
            seen.append(one.tag)
        else:
            assert one.tag == str(value)
            one.send(value + 1)
    for each in running:
        each.result(LONG)
    assert sorted(seen, key=int) == [str(i) for i in range(10)]
    with pytest.raises(dt.errors.ClosedError, match="all clients have closed"):
        endpoint.recv_any(LONG)


@pytest.mark.row("I5")
def test_recv_any_gives_what_came_first(endpoint: Endpoint, file: Path) -> None:
    made = [dt.tasks.connect(file) for _ in range(3)]
    for i in (2, 0, 1, 1, 0):
        made[i].send(i)
        assert endpoint.clients()[i].poll(LONG)
    first, _ = endpoint.recv_any(0)
    assert first.id == 2
    assert sorted(endpoint.recv_any(LONG)[1] for _ in range(4)) == [0, 0, 1, 1]
    with pytest.raises(TimeoutError, match="none of 3 clients has sent something in 0 s"):
        endpoint.recv_any(0)
    for one in made:
        one.close()


@pytest.mark.row("I6")
def test_what_a_server_knows_of_a_client(endpoint: Endpoint, pair: tuple[Connection, Connection]) -> None:
    client, program = pair
    assert (client.id, client.tag, client.address, client.closed) == (0, "pair", "127.0.0.1", False)
    client.send("ping")
    assert program.recv(timeout=LONG) == "ping"
    program.send("pong")
    assert client.recv(timeout=LONG) == "pong"
    endpoint.send(0, "by number")
    assert program.recv(timeout=LONG) == "by number"
    program.send("back")
    assert endpoint.recv(0, timeout=LONG) == "back"
    with pytest.raises(KeyError, match=r"no client has the number 7; there are \[0\]"):
        endpoint.send(7, None)
    client.send("last")
    client.close()
    assert client.closed
    assert program.recv(timeout=LONG) == "last"
    with pytest.raises(dt.errors.ClosedError, match="has closed its end"):
        program.recv(timeout=LONG)
    assert program.closed
    with pytest.raises(dt.errors.ClosedError):
        client.send("too late")


@pytest.mark.row("I7")
def test_what_a_client_can_do(pair: tuple[Connection, Connection]) -> None:
    client, program = pair
    assert not program.poll()
    with pytest.raises(TimeoutError, match="has sent nothing for 0 s"):
        program.recv(timeout=0)
    futures = [program.recv_async() for _ in range(3)]
    assert not futures[0].done()
    assert futures[1].cancel()
    for i in range(3):
        client.send(i)
    assert (futures[0].result(LONG), futures[2].result(LONG)) == (0, 1)
    assert program.recv(timeout=LONG) == 2
    client.send("there already")
    assert program.poll(LONG)
    assert program.recv_async().result(0) == "there already"
    left = program.recv_async()
    program.close()
    program.close()
    with pytest.raises(dt.errors.ClosedError, match="is closed here"):
        left.result(LONG)
    with pytest.raises(dt.errors.ClosedError, match="has closed its end"):
        client.recv(timeout=LONG)
    with pytest.raises(dt.errors.ClosedError):
        program.recv()


@pytest.mark.row("I7")
def test_ping_pong_of_asynchronous_receives(pair: tuple[Connection, Connection]) -> None:
    """The program answers in callbacks, in which it sends, and can't wait."""
    client, program = pair
    waits: list[str] = []

    def answer(future: Any) -> None:
        if (value := future.result()) < 20:
            program.recv_async().add_done_callback(answer)
        try:
            program.recv()
        except dt.DisttensorError as e:
            waits.append(str(e))
        program.send(value + 1)

    program.recv_async().add_done_callback(answer)
    value = 0
    while value < 20:
        client.send(value)
        value = client.recv(timeout=LONG) + 1
    assert "can't wait" in waits[0]


VALUES: list[Any] = [
    *(None, True, 1, 1 << 70, 1.5, "text", b"bytes", [1, (2.0, "x")], {"a": {"b": [None]}}, Path("/a"), {1, 2}),
    *(torch.arange(6.0).reshape(2, 3), torch.arange(6).reshape(2, 3).t(), torch.arange(24)[::3], torch.tensor(True)),
    *(torch.empty(0, 3), torch.zeros((), dtype=torch.bfloat16), torch.randn(3, dtype=torch.cfloat).conj()),
    *([torch.ones(2), {"x": torch.arange(3), "y": (torch.empty(0), "z")}], np.arange(5), np.arange(50_000.0)[::-1]),
    *(np.zeros((0, 2)), b"x" * 200_000, "y" * 600_000, torch.randn(1_000_000)),
]


@pytest.mark.row("I8")
def test_every_value_both_ways(pair: tuple[Connection, Connection]) -> None:
    client, program = pair
    for value in VALUES:
        client.send(value)
        got = program.recv(timeout=LONG)
        same(got, value)
        program.send(got)
        same(client.recv(timeout=LONG), value)


@pytest.mark.row("I8")
@pytest.mark.parametrize("make", ["plain", "strided", "transposed", "node", "strided on a node"])
def test_into_a_tensor_that_is_there(pair: tuple[Connection, Connection], make: str) -> None:
    client, program = pair
    sent = torch.arange(6.0).reshape(2, 3)
    base = torch.zeros(4, 6, device="node:1" if "node" in make else "cpu")
    into = {"strided": base[::2, 1::2], "strided on a node": base[::2, 1::2], "transposed": torch.zeros(3, 2).t()}.get(
        make, base[:2, :3].clone()
    )
    for source in (sent, torch.arange(6.0).reshape(3, 2).t().contiguous().t().reshape(3, 2).t()):
        client.send(source)
        assert program.recv(into, LONG) is into
        assert torch.equal(into.cpu(), source)
    if "strided" in make:
        assert float(base.sum()) == float(into.sum())  # what lies between is as it was
    client.send(torch.empty(0, 3))
    assert program.recv(torch.ones(0, 3), LONG).shape == (0, 3)


@pytest.mark.row("I8")
@pytest.mark.parametrize(
    "into", [torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3).double(), torch.zeros(2, 2), torch.zeros(0)]
)
def test_sizes_that_differ(pair: tuple[Connection, Connection], into: torch.Tensor) -> None:
    """It says which, writes nothing, and the message is the next one still."""
    client, program = pair
    sent = torch.arange(6.0).reshape(2, 3)
    before = into.clone()
    client.send(sent)
    client.send("not a tensor")
    with pytest.raises(ValueError, match=r"has sent a tensor of shape \(2, 3\) and torch.float32"):
        program.recv(into, LONG)
    assert torch.equal(into, before)
    same(program.recv(timeout=LONG), sent)
    with pytest.raises(ValueError, match="has sent a str; recv"):
        program.recv(into, LONG)
    assert program.recv(timeout=LONG) == "not a tensor"


def test_much_both_ways_at_once(pair: tuple[Connection, Connection]) -> None:
    """Both send before they receive, more than fits on the way."""
    x = torch.randn(3_000_000)
    for end in pair:
        for k in range(2):
            end.send([k, x])
    for end in pair:
        for k in range(2):
            same(end.recv(timeout=LONG), [k, x])


@pytest.mark.parametrize(
    ("value", "error"), [(object(), TypeError), (lambda: 1, TypeError), (torch.zeros(3).to_sparse(), TypeError)]
)
def test_what_cannot_cross(pair: tuple[Connection, Connection], value: object, error: type[Exception]) -> None:
    client, program = pair
    with pytest.raises(error, match=r"a message has|a tensor of a message has"):
        client.send(value)
    client.send("goes on")
    assert program.recv(timeout=LONG) == "goes on"


def test_functions_on_nodes_may_connect(endpoint: Endpoint, file: Path, pool: ThreadPoolExecutor) -> None:
    def client(file: Path) -> Any:
        with dt.tasks.connect(file) as job:
            job.send(dt.tasks.here().node)
            return job.recv()

    running = pool.submit(dt.run, client, file, node=2)
    one, value = endpoint.recv_any(LONG)
    assert value == 2
    one.send("seen")
    assert running.result() == "seen"
    with pytest.raises(dt.DisttensorError, match="made by the script"):
        dt.run(Endpoint, str(file), node=1)


def test_refusals(nodes: object, file: Path) -> None:
    with Endpoint(file, max_clients=1) as endpoint, dt.tasks.connect(file) as one:
        with pytest.raises(dt.errors.BrokenError, match=r"refuses: there are 1 clients already \(max_clients=\)"):
            dt.tasks.connect(file)
        one.close()
        endpoint.clients(0)
        with pytest.raises(ValueError, match="not negative"):
            endpoint.recv_any(-1)
        with pytest.raises(ValueError, match="201 characters"):
            dt.tasks.connect(file, tag="x" * 201)
    with pytest.raises(ValueError, match="max_clients=0: at least 1 is needed"):
        Endpoint(file, max_clients=0)
    with pytest.raises(ValueError, match=r"192\.0\.2\.1"):
        Endpoint(file, interface="192.0.2.1")


# ---- ends ------------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
import disttensor as dt

job = dt.tasks.connect(sys.argv[1], tag="program")
job.send(os.getpid())
print(job.recv())
"""


def program(file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(file)], stdout=subprocess.PIPE, text=True)


@pytest.mark.row("I6")
def test_another_program_ends(endpoint: Endpoint, file: Path) -> None:
    """It ends by itself, without a word of close: that is a close."""
    with program(file) as other:
        client, pid = endpoint.recv_any(LONG)
        assert (pid, client.tag) == (other.pid, "program")
        client.send("to be printed")
        with pytest.raises(dt.errors.ClosedError, match="has closed its end"):
            client.recv(timeout=LONG)
        assert other.communicate()[0] == "to be printed\n"
        assert other.returncode == 0


@pytest.mark.row("I6")
@pytest.mark.parametrize("what", ["recv", "recv_any", "broadcast"])
def test_another_program_is_killed(endpoint: Endpoint, file: Path, what: str) -> None:
    """It is told by name, once; others go on."""
    with program(file) as other, dt.tasks.connect(file, tag="other") as survivor:
        clients = endpoint.clients(2, LONG)
        client = next(c for c in clients if c.tag == "program")
        assert client.recv(timeout=LONG) == other.pid
        other.kill()
        other.wait()
        named = rf"client {client.id} \(tag 'program', host {socket.gethostname()}, pid {other.pid}\) has ended without"
        if what == "broadcast":
            assert client.poll(LONG)
        notices = {
            "recv": partial(client.recv, timeout=LONG),
            "recv_any": partial(endpoint.recv_any, LONG),
            "broadcast": partial(endpoint.broadcast, "hello"),
        }
        with pytest.raises(dt.errors.BrokenError, match=named):
            notices[what]()
        if what == "broadcast":
            assert survivor.recv(timeout=LONG) == "hello"
        survivor.send("goes on")
        if what == "recv":
            assert endpoint.clients()[0].recv(timeout=LONG) == "goes on"
        else:
            assert endpoint.recv_any(LONG)[1] == "goes on"
        with pytest.raises(dt.errors.BrokenError, match="has ended without"):
            client.send("nobody reads this")


JOB = """
import sys, disttensor as dt

if __name__ == "__main__":
    with dt.init_master_worker(nodes=1, threads=1):
        with dt.tasks.Endpoint(sys.argv[1]) as endpoint:
            endpoint.clients(1)[0].send("there")
            endpoint.recv_any()
"""


@pytest.mark.row("I7")
def test_the_job_is_killed(file: Path) -> None:
    run = [sys.executable, "-c", JOB, str(file)]
    with subprocess.Popen(run) as job, dt.tasks.connect(file, timeout=LONG) as client:
        assert client.recv(timeout=LONG) == "there"
        job.kill()
        job.wait()
        with pytest.raises(dt.errors.BrokenError, match=rf"the endpoint of .*process {job.pid} .*ended without"):
            client.recv(timeout=LONG)
    with pytest.raises(dt.errors.StartError, match="was left over by process"):
        dt.tasks.connect(file, timeout=1)


SESSION = """
import sys, disttensor as dt

try:
    dt.tasks.Endpoint(sys.argv[1])
except dt.DisttensorError as e:
    print(e)
with dt.init_master_worker(nodes=1, launcher="inproc"):
    dt.tasks.Endpoint(sys.argv[1])
    client = dt.tasks.connect(sys.argv[1])
try:
    client.recv()
except dt.errors.ClosedError as e:
    print(str(e).partition("(")[0], str(e).rpartition(")")[2])
client.close()
"""


def test_the_end_of_the_session_ends_it(file: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SESSION, str(file)], capture_output=True, text=True)
    assert done.stderr == ""
    no_session, end = done.stdout.splitlines()
    assert "init_master_worker" in no_session
    assert end == f"the endpoint of {file}   has closed its end"
    assert not file.exists()


def test_ctrl_c_ends_a_wait_and_loses_nothing(pair: tuple[Connection, Connection]) -> None:
    client, program = pair
    striking = threading.Timer(0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))

    def wait() -> None:
        striking.start()
        client.recv(timeout=LONG)

    with pytest.raises(KeyboardInterrupt):
        wait()
    striking.join()
    program.send(torch.ones(10))
    same(client.recv(timeout=LONG), torch.ones(10))
