"""Many proxies, full windows, transfers beside computation and bytes on the wire, with real nodes."""

from __future__ import annotations

import gc
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from equal import same
from telling import warned
from variants import variants

import disttensor as dt
from disttensor import testing

#: More than sockets hold back by themselves.
LARGE = 64 << 20
#: Seconds for what takes a moment; longer is a hang.
SOON = 20
#: Commands in flight to a node, and those of a message, at most.
WINDOW, MESSAGE = int(testing.limit("window")), int(testing.limit("message"))


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    with dt.init_master_worker("tcp", nodes=2, threads=1):
        # tcp: the kernel counts its bytes
        for node in range(2):  # connections are made at first use: have them before the tests look for leaks
            torch.ones(1 << 20).to(f"node:{node}").to(f"node:{1 - node}").cpu()
        yield


@pytest.fixture
def cluster(_cluster: None) -> Iterator[None]:
    dt.synchronize()
    yield
    dt.synchronize()


class Busy:
    """A node that runs a function from the block's start until ``release``, or to the block's end."""

    def __init__(self, node: int, folder: Path) -> None:
        self.node = node
        self._paths = [str(folder / f"{name} {node}") for name in ("begun", "go")]
        for path in self._paths:
            os.mkfifo(path)
        self._begun, self._go = (os.open(path, os.O_RDWR) for path in self._paths)
        self._pool = ThreadPoolExecutor(1)
        self._run: Future[str] | None = None

    def __enter__(self) -> Busy:
        begun, go = self._paths

        def hold() -> str:
            with open(begun, "wb") as file:
                file.write(b".")
            with open(go, "rb") as file:
                file.read(1)
            return "released"

        self._run = self._pool.submit(dt.run, hold, node=self.node)
        assert select.select([self._begun], [], [], SOON)[0], "the node has not begun"
        return self

    @property
    def running(self) -> bool:
        return self._run is not None and not self._run.done()

    def release(self) -> None:
        os.write(self._go, b".")
        assert self._run is not None
        assert self._run.result(SOON) == "released"

    def __exit__(self, *error: object) -> None:
        if self.running:
            self.release()
        self._pool.shutdown()
        os.close(self._begun)
        os.close(self._go)


# ---- many proxies ----------------------------------------------------------------------------------------------------


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.row("M13")
@pytest.mark.fault(45)
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("n", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_live_proxies(n: int) -> None:
    """They cost the master at most 1 KB each; dropping them frees everything on the node, in few messages."""
    x = torch.ones(1, device="node:0")
    worker = int(dt.nodes()[0]["pid"])
    kept = [x + 1 for _ in range(1000)]
    kept.clear()
    gc.collect()
    dt.synchronize()
    tensors, at_master, at_node = testing.usage(0).tensors, resident(os.getpid()), resident(worker)

    kept = [x + 1 for _ in range(n)]
    dt.synchronize()
    assert testing.usage(0).tensors == tensors + n
    assert resident(os.getpid()) - at_master <= 1024 * n
    peak = resident(worker)
    assert kept[n // 2].item() == 2

    with testing.MessageLog() as log:
        kept.clear()
        dt.synchronize()
    assert testing.usage(0).tensors == tensors
    assert log[0].messages <= 1000
    if n > 500_000:  # a node keeps the memory of some tens of thousands for the next ones
        assert resident(worker) - at_node <= 0.2 * (peak - at_node)


# ---- the window ------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_window(cluster: None) -> Iterator[threading.Event]:
    """Set when a thread waits because the window of a node is full."""
    reached = threading.Event()
    with testing.at("window", reached.set):
        yield reached


@pytest.mark.row("M14")
@pytest.mark.fault(29)
def test_a_busy_node_holds_its_issuer_at_the_window(at_window: threading.Event, tmp_path: Path) -> None:
    x, y = torch.zeros(1, device="node:1"), torch.ones(1, device="node:0")
    total, issued = 3 * WINDOW, 0
    # who sends looks at the window afterwards: beyond it are a message of the issuer's, and one of the thread that
    # sends what lies about

    def issue() -> None:
        nonlocal issued
        for _ in range(total):
            x.add_(1)
            issued += 1
            assert testing.queued(1).in_flight <= WINDOW + 2 * MESSAGE

    with ThreadPoolExecutor(1) as pool, Busy(1, tmp_path) as busy:
        before = resident(os.getpid())
        issuing = pool.submit(issue)
        assert at_window.wait(SOON)
        then, queued = issued, testing.queued(1)
        assert resident(os.getpid()) - before < 100 << 20
        assert WINDOW < queued.in_flight <= WINDOW + 2 * MESSAGE
        for i in range(100):
            assert (y + i).item() == 1 + i  # the other node works on
        assert (issued, testing.queued(1)) == (then, queued)  # in flight are as many, so that no more was sent
        assert queued.commands == 0
        assert busy.running
        busy.release()
        issuing.result(SOON)
    assert x.item() == total


def test_a_fetch_does_not_wait_for_the_window_of_another_node(at_window: threading.Event, tmp_path: Path) -> None:
    x, y = torch.zeros(1, device="node:1"), torch.ones(1, device="node:0")
    dropped = [x + 1]
    with ThreadPoolExecutor(2) as pool:
        with Busy(1, tmp_path):
            issuing = pool.submit(lambda: [x.add_(1) for _ in range(2 * WINDOW)])
            assert at_window.wait(SOON)
            dropped.clear()  # there is something to tell the busy node
            assert pool.submit(y.item).result(SOON) == 1
        issuing.result(SOON)


@pytest.mark.parametrize("busy", variants([0, 1]))
def test_transfers_between_nodes_wait_for_the_window(busy: int, at_window: threading.Event, tmp_path: Path) -> None:
    x = torch.ones(1, device="node:0")
    x.to("node:1")
    with ThreadPoolExecutor(1) as pool:
        with Busy(busy, tmp_path):
            issuing = pool.submit(lambda: [x.to("node:1") for _ in range(WINDOW + 500)][-1])
            assert at_window.wait(SOON)
            assert testing.queued(busy).in_flight <= WINDOW + 2 * MESSAGE
        assert issuing.result(SOON).item() == 1


@pytest.mark.fault(29)
def test_waiting_long_at_the_window_is_said(at_window: threading.Event, tmp_path: Path) -> None:
    x = torch.zeros(1, device="node:1")
    with testing.limits(slow=0.0), ThreadPoolExecutor(1) as pool, warned("commands behind") as log:
        with Busy(1, tmp_path):
            issuing = pool.submit(lambda: [x.add_(1) for _ in range(WINDOW + 3 * MESSAGE)])
            assert log.there.wait(SOON)
        issuing.result(SOON)
    assert testing.limit("slow") == 5.0
    message = next(text for text in log.texts if "commands behind" in text)
    assert message.startswith("node 1 is 10")
    assert "so this operation waits; it is at what was issued at" in message


#: What a library does, in the script and on its node: an operation of 0.1 s, which says by a byte that it is done.
NAPS = """
import os, time, torch
naps = torch.library.Library("naps", "DEF")
naps.define("nap_(Tensor(a!) x) -> Tensor(a!)")
done = os.open({path!r}, os.O_RDWR)

def nap(x):
    time.sleep(0.1)
    os.write(done, b".")
    return x.add_(1)

naps.impl("nap_", nap, "CPU")
torch.kept = naps
"""

#: A script at full speed and a node that is not: what the script says of the moment when its thread waits, of a moment
#: when the node has done more, and of the end.
FASTER = r"""
import os, threading, torch, disttensor as dt
from disttensor import testing
from telling import said, warned

exec(NAPS)
MEBI = 1 << 20
WINDOW, MESSAGE = int(testing.limit("window")), int(testing.limit("message"))
told, over, waits = [], [], threading.Event()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def nap_once():
    return torch.ops.naps.nap_(x)  # by this line

def issue():
    try:
        while len(told) < 1_000_000:
            told.append(nap_once())
    except dt.NodeLost as error:
        over.append(error)

def count():
    queued = testing.queued(0)
    assert WINDOW < queued.in_flight <= WINDOW + 2 * MESSAGE and queued.full and not queued.commands, queued
    # what the node has done by now is not in flight any more: ten a second, while a loaded machine issues the others
    # the one that waits is in flight and has not returned
    assert WINDOW < earlier + len(told) + 1, (earlier, len(told), queued)
    assert len(told) <= queued.in_flight + 100, (len(told), queued)
    assert resident() - before < 100 * MEBI
    return len(told), queued.in_flight

assert testing.limit("slow") == 5.0
with dt.init_master_worker(nodes=2, threads=1, allow_ops=["naps::*"]):
    dt.run(exec, NAPS, {}, node=[0])
    x, y = torch.zeros(1, device="node:0"), torch.ones(1, device="node:1")
    assert nap_once().tolist() == [1]
    assert os.read(done, 1) == b"."
    dt.synchronize(0)  # it tells of what it has done: by itself every 1024 commands, and it is at a nap from then on
    before, earlier = resident(), testing.queued(0).in_flight
    waiting = r"node 0 is 10\d\d\d commands behind, so this operation waits; "
    line = waiting + r"it is at what was issued at \S+program\.py:LINE in nap_once, or behind that$"
    with testing.limits(slow=0.5), testing.at("window", waits.set), warned(line) as warning:
        thread = threading.Thread(target=issue)
        thread.start()
        assert waits.wait(120)
        then = count()
        for _ in range(5):  # the node goes on meanwhile, and the window is as full as before
            assert os.read(done, 1) == b"."
            assert (y + 1).item() == 2
            assert count() == then
        assert warning.there.wait(120), warning.texts
        assert thread.is_alive()
        dt.kill(0)
        thread.join(120)
    assert [error.rank for error in over] == [0], over
    assert "program.py:LINE" in said(over[0]), said(over[0])
    print("waited at", then, "of 1000000, grown by", (resident() - before) // MEBI, "MB")
"""


@pytest.mark.fault(29)
def test_a_script_at_full_speed_waits_for_a_node_that_does_ten_commands_a_second(
    tmp_path: Path, script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    fifo = tmp_path / "done"
    os.mkfifo(fifo)
    text = f"NAPS = {NAPS.format(path=str(fifo))!r}\n{FASTER}"
    line = next(number for number, one in enumerate(text.splitlines(), 1) if "by this line" in one)
    done = script(text.replace("LINE", str(line)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("waited at "), done.stdout


# ---- transfers beside computation ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
def test_a_tensor_arrives_while_the_node_computes(tmp_path: Path) -> None:
    local = torch.arange(LARGE // 4, dtype=torch.float32)
    asked, allowed = threading.Event(), threading.Event()

    def later() -> None:
        asked.set()
        assert allowed.wait(SOON)

    with testing.at("upload", later), ThreadPoolExecutor(1) as pool:
        upload = pool.submit(local.to, "node:1")
        try:
            assert asked.wait(SOON)  # the node knows what will come, and turns to something else
            with Busy(1, tmp_path) as busy:
                allowed.set()
                x = upload.result(SOON)
                assert busy.running
        finally:
            allowed.set()
    assert torch.equal(x.cpu(), local)


@pytest.mark.usefixtures("cluster")
def test_a_tensor_of_another_node_arrives_while_the_node_computes(tmp_path: Path) -> None:
    local = torch.arange(LARGE // 4, dtype=torch.float32)
    x = local.to("node:0")
    with Busy(0, tmp_path) as sender:
        y = x.to("node:1")  # node 1 expects it from now on; node 0 comes to sending it later
        with Busy(1, tmp_path) as receiver:
            sender.release()
            dt.synchronize(0)  # until its sends have ended
            assert receiver.running
    assert torch.equal(y.cpu(), local)


# ---- all kinds of tensors --------------------------------------------------------------------------------------------

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[1::2, ::3],
    "column": lambda x: x[:, 2],
    "expanded": lambda x: x[0].expand(3, 8),
    "channels last": lambda x: x.reshape(1, 2, 3, 8).to(memory_format=torch.channels_last),
    "zero-size": lambda x: x[3:3],
    "0-dim": lambda x: x[4, 5],
}


@pytest.mark.row("M2")
@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_every_kind_travels_every_way(dtype: torch.dtype) -> None:
    source = torch.randint(0, 2 if dtype == torch.bool else 100, (6, 8)).to(dtype)
    remote = source.to("node:0")
    for name, layout in LAYOUTS.items():
        local = layout(source)
        copy = local.to("cpu", copy=True)  # what a local copy's strides are
        same(local.to("node:1"), copy, path=f"{name}, master to node")
        moved = layout(remote).to("node:1")
        same(moved, copy, path=f"{name}, node to node")
        back = moved.cpu()
        assert back.stride() == copy.stride(), name
        view = layout(remote).cpu()
        assert view.stride() == copy.stride(), name
        same(view.to("node:0"), copy, path=f"{name}, a view to master and back")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("way", ["up", "down", "node to node"])
def test_zero_size_views_keep_their_strides(way: str) -> None:
    local = torch.ones(6, 8)[:, 3:3]
    match way:
        case "up":
            copy = local.to("node:0")
        case "down":
            copy = torch.ones(6, 8, device="node:0")[:, 3:3].cpu()
        case "node to node":
            copy = torch.ones(6, 8, device="node:0")[:, 3:3].to("node:1")
    assert copy.stride() == local.to("cpu", copy=True).stride()


# ---- bytes -----------------------------------------------------------------------------------------------------------


def tcp_bytes() -> int:
    """Bytes that the kernel has counted at this process's TCP connections, in both directions: those that left, once,
    as the other end acknowledges them some time after it has them."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
        except OSError:
            continue
        with socket.socket(fileno=os.dup(int(fd))) as s:
            if s.family in (socket.AF_INET, socket.AF_INET6):
                info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                received, sent, again = *struct.unpack_from("Q", info, 128), *struct.unpack_from("QQ", info, 200)
                total += received + sent - again  # tcpi_bytes_received, tcpi_bytes_sent, tcpi_bytes_retrans
    return total


@pytest.mark.row("M12")
@pytest.mark.usefixtures("cluster")
def test_bytes_between_nodes_do_not_pass_through_the_master() -> None:
    local = torch.randn(2 << 20)
    size = local.nbytes
    x = local.to("node:0")
    dt.synchronize()
    start = tcp_bytes()
    y = x.to("node:1")
    dt.synchronize()
    between = tcp_bytes() - start
    assert between < 4096
    start = tcp_bytes()
    assert torch.equal(y.cpu(), local)
    assert tcp_bytes() - start >= size  # so they would have been seen


@pytest.mark.row("M24")
@pytest.mark.usefixtures("cluster")
def test_bytes_per_command_of_a_training_step() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(192, 5))
    model = model.to("node:0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 6, 32, device="node:0"), torch.randint(0, 5, (8,), device="node:0")

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(2):  # operators are named once
        step()
    with testing.MessageLog() as log:
        for _ in range(3):
            step()
        dt.synchronize()
    assert len(log[0].commands) > 300
    assert log[0].bytes_sent / len(log[0].commands) <= 20


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("M18")
@pytest.mark.fault(22)
@pytest.mark.usefixtures("cluster")
def test_eight_threads_at_once() -> None:
    """Operations, fetches, uploads and moves of eight threads; in-process nodes have more in test_threads.py."""
    start = threading.Barrier(8)

    def program(k: int, here: str, there: str) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(k)
        x, out = torch.randn(8, 8, generator=g).to(here), []
        for step in range(40):
            x = (x @ x.t()).tanh() + torch.randn(8, 8, generator=g).to(here) * step
            if step % 4 == k % 4:
                x = (x.to(there) / 2).to(here)
            if step % 10 == k:
                out.append(x.cpu())
        return [*out, x.cpu()]

    def run(k: int) -> list[torch.Tensor]:
        start.wait(SOON)
        return program(k, f"node:{k % 2}", f"node:{1 - k % 2}")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(8) as pool:
        results = [f.result(SOON) for f in [pool.submit(run, k) for k in range(8)]]
    for k, got in enumerate(results):
        expected = program(k, "cpu", "cpu")
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    torch.set_num_threads(threads)


# ---- an error at its own line ----------------------------------------------------------------------------------------

FAILING = """\
import torch
import disttensor as dt
dt.init_master_worker(nodes=1, threads=1)
x = torch.ones(3, device="node:0")
i = torch.tensor([7]).to("node:0")
y = x.gather(0, i)
print("issued")
y.sum().item()
"""


def test_launch_blocking(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """With it an error is raised by the line that made it; without it where something waits."""
    done = script(FAILING, DISTTENSOR_LAUNCH_BLOCKING="1")
    assert done.returncode == 1, done.stderr
    assert 'program.py", line 6, in <module>' in done.stderr
    assert "issued" not in done.stdout
    assert "RuntimeError: index 7 is out of bounds" in done.stderr
