"""Nodes and scripts without memory, descriptors, disk, or a port, by real limits; and proxies by the million."""

from __future__ import annotations

import gc
import os
import random
import re
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from aftermath import aftermath, within
from fuzzing import SEEDS
from limits import HANG
from output_kit import unfolded

import disttensor as dt
from disttensor import testing
from disttensor.data import distribute


@contextmanager
def limited(kind: int, value: int, *pids: int) -> Iterator[None]:
    """Processes have a soft limit meanwhile."""
    before = {pid: resource.prlimit(pid, kind) for pid in pids}
    try:
        for pid, (_, hard) in before.items():
            resource.prlimit(pid, kind, (value, hard))
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, kind, limits)


def pid_of(node: int) -> int:
    return int(dt.nodes()[node]["pid"])


@pytest.fixture
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        for node in range(2):
            torch.ones(1 << 20).to(f"node:{node}").to(f"node:{1 - node}").cpu()
        yield


# ---- memory ----------------------------------------------------------------------------------------------------------

#: More than there is, and less than any check of sizes refuses.
MUCH = 1 << 30

ALLOCATIONS: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "an operation": (lambda: (torch.ones(MUCH // 4, device="node:1") * 2).sum().item(), RuntimeError),
    "a function": (lambda: dt.run(bytearray, MUCH, node=1), MemoryError),
    "a tensor on its way": (lambda: torch.empty(MUCH // 4).to("node:1").sum().item(), dt.errors.RemoteError),
}


@pytest.mark.fault(9)
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("what", ALLOCATIONS)
def test_a_node_without_memory(what: str) -> None:
    run, kind = ALLOCATIONS[what]
    x = torch.arange(1000.0, device="node:1")
    has = int(Path(f"/proc/{pid_of(1)}/statm").read_text().split()[0]) * resource.getpagesize()
    with aftermath(0, 1), limited(resource.RLIMIT_AS, has + (256 << 20), pid_of(1)):
        with pytest.raises(kind) as caught:
            run()
        told = "\n".join([str(caught.value), *caught.value.__notes__])
        assert f"test_exhausted.py:{run.__code__.co_firstlineno}" in told
        assert "node 1" in told
        assert torch.equal((x + 1).cpu(), torch.arange(1000.0) + 1)
        caught.value.__traceback__ = None
        dt.synchronize()


def kept_by_the_user(device: torch.device | str) -> list[torch.Tensor]:
    return [torch.ones(8 << 20, device=device) for _ in range(4)]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def joined(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x] * 8)


def line_of(function: Callable[..., object]) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + 1} in {function.__name__}"


def held(note: str) -> list[str]:
    """What a note says of the largest tensors, a line for each line of the program."""
    return [line for line in note.splitlines() if f"{__file__}:" in line]


@pytest.mark.fault(9)
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("where", ["node:1", "mesh"])
def test_a_node_without_memory_names_the_lines_that_have_it(where: str) -> None:
    """Also those of tensors that the script has dropped by the time that it learns of it."""
    device = dt.mesh(dp=2).device if where == "mesh" else torch.device(where)
    has = int(Path(f"/proc/{pid_of(1)}/statm").read_text().split()[0]) * resource.getpagesize()
    with aftermath(0, 1), limited(resource.RLIMIT_AS, has + (256 << 20), pid_of(1)):
        kept = kept_by_the_user(device)
        soon_dropped = doubled(kept[0])
        too_much = joined(soon_dropped)
        del soon_dropped
        with pytest.raises(RuntimeError, match="tried to allocate 268435456 bytes") as caught:
            too_much.sum().item()
        notes = caught.value.__notes__
        assert "aten::cat" in notes[0]
        assert line_of(joined) in notes[0]
        assert re.search(r"^node 1 held 160\.00 MiB in 5 tensors; [\d.]+ MiB of [\d.]+ GiB are left$", notes[1], re.M)
        first, second = held(notes[1])
        assert f"128.00 MiB  {line_of(kept_by_the_user)}" in first
        assert first.endswith(": 4 tensors, the largest float32 (8388608,)")
        assert second.endswith(f"32.00 MiB  {line_of(doubled)}: float32 (8388608,)")
        if where == "mesh":
            assert notes[-1] == "  on node 1 (dp=1): 1 of 2 ranks"
        del caught, too_much
        assert on_node_1(kept[1][0] + 1) == 2
        kept.clear()
        again = torch.ones(40 << 20, device=device)  # more than was left
        assert on_node_1(again[0]) == 1
        del again
        dt.synchronize()
        assert torch.node.memory_stats(1)["num_ooms"] == 1  # type: ignore[attr-defined]


def large(samples: list[int]) -> torch.Tensor:
    return torch.ones(16 << 20)


def read_there() -> list[torch.Tensor]:
    return list(distribute(range(1), 1, batch_size=1, collate_fn=large, at="node"))


@pytest.mark.fault(9)
@pytest.mark.usefixtures("cluster")
def test_a_node_without_memory_names_the_line_of_a_function_whose_tensors_it_has() -> None:
    """A batch that the node has read is what a function of ours has returned there; the script has dropped it."""
    with aftermath(0, 1):
        kept = read_there()
        has = int(Path(f"/proc/{pid_of(1)}/statm").read_text().split()[0]) * resource.getpagesize()
        with limited(resource.RLIMIT_AS, has + (256 << 20), pid_of(1)):
            too_much = joined(kept.pop())
            with pytest.raises(RuntimeError, match="tried to allocate 536870912 bytes") as caught:
                too_much.sum().item()
            (line,) = held(caught.value.__notes__[1])
            assert line.endswith(f"64.00 MiB  {line_of(read_there)}: float32 (16777216,)")
        del caught, too_much


def on_node_1(x: torch.Tensor) -> float:
    return (x if x.device == torch.device("node:1") else x.at(dp=1)).item()  # type: ignore[attr-defined]


def test_a_peak_that_nobody_has_counted_is_said_to_begin() -> None:
    node = torch.node  # type: ignore[attr-defined]
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        x = torch.ones(1 << 18, device="node:0")
        assert "not counted" in node.memory_summary()
        with pytest.warns(UserWarning, match="counts the peak of its memory from now on") as told:
            peak = node.max_memory_allocated()
        assert peak == 1 << 20
        assert [each.filename for each in told] == [__file__]
        x = torch.ones(1 << 19, device="node:0")
        assert node.max_memory_allocated() == 3 << 20  # and says it once
        del x


@pytest.mark.fault(44)
@pytest.mark.usefixtures("cluster")
def test_without_shared_memory_tensors_take_tcp() -> None:
    """The kernel gives none: a file of memory must not be as large."""
    local = torch.randn(1 << 20)
    remote = local.to("node:0")
    both = [remote.clone(), remote.to("node:1")]
    dt.all_reduce(both)  # connections of collectives are made at first use, too
    few = limited(resource.RLIMIT_FSIZE, 4096, pid_of(0), pid_of(1), os.getpid())
    with aftermath(0, 1), few, within(5.0):
        assert torch.equal(remote.to("node:1").cpu(), local)
        assert torch.equal((local * 2).to("node:1").cpu(), local * 2)
        dt.all_reduce(both)
        assert torch.equal(both[0].cpu(), local * 4)


# ---- descriptors, disk, ports ----------------------------------------------------------------------------------------

FEW = """
import os, resource, sys, time
import aftermath, torch
import disttensor as dt
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
torch.set_num_threads(1)
with dt.init_master_worker(nodes=1, threads=1):  # what is opened once, and kept
    aftermath.probe(0)
opened, kept = len(os.listdir("/proc/self/fd")), len(aftermath.children(os.getpid()))
clock = aftermath.Clock()
try:
    with dt.init_master_worker(nodes=24, threads=1):
        for node in range(24):
            aftermath.probe(node)
        print("works")
except dt.DisttensorError as e:
    clock.check(5.0, "the error")
    print(str(e).splitlines()[0])
deadline = time.monotonic() + aftermath.SETTLES
while len(left := aftermath.children(os.getpid())) > kept:
    assert time.monotonic() < deadline, f"left behind: {left}"
assert len(os.listdir("/proc/self/fd")) <= opened, "descriptors were left open"
with dt.init_master_worker(nodes=2, threads=1):  # what is left is enough for fewer
    for node in range(2):
        aftermath.probe(node)
print("fewer work")
"""


@pytest.mark.fault(44)
def test_a_script_with_few_descriptors(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script("import sys\nsys.argv = ['', '64']\n" + FEW)
    assert done.returncode == 0, done.stderr
    error, rest = done.stdout.splitlines()
    assert "Too many open files" in error
    assert "64" in error
    assert rest == "fewer work"


VERY_FEW = """
import resource, subprocess
import disttensor as dt
subprocess.Popen = None  # nothing is started: a fork server would import torch in vain, and be waited for
for most in (40, 32, 24, 20, 16):
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        dt.init_master_worker(nodes=2)
    except dt.errors.StartError as e:
        print(e)
"""


@pytest.mark.fault(44)
def test_a_script_with_hardly_any_descriptors(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """It is refused before libzmq, which ends the process where it has none, is asked for anything."""
    done = script(VERY_FEW)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 5
    for line, most in zip(told, (40, 32, 24, 20, 16), strict=True):
        assert "a session of 2 nodes takes 37 file descriptors at least" in line
        assert f"may have {most} open at once (RLIMIT_NOFILE)" in line
        assert "ulimit -n 4096" in line


FEW_LEFT = """
import os, resource
import torch
import disttensor as dt
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (20, hard))
with dt.init_master_worker(nodes=1, threads=1):
    print(torch.ones(3, device="node:0").sum().item())
    for few in (9, 5, 1):
        most = len(os.listdir("/proc/self/fd")) + few
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        try:
            dt.run(id, dt.tasks.Channel(), node=0)
        except OSError as e:
            print(e)
    print(torch.ones(4, device="node:0").sum().item())
"""


@pytest.mark.fault(44)
def test_a_script_with_few_descriptors_left(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """It raises its own limit where it may; else what takes more of libzmq is refused, and the session lives."""
    done = script(FEW_LEFT)
    assert done.returncode == 0, done.stderr
    first, *refused, last = done.stdout.splitlines()
    assert (first, last) == ("3.0", "4.0")
    assert len(refused) == 3
    for line in refused:
        assert "another connection of ZeroMQ takes 14 file descriptors; process" in line
        assert "ulimit -n 4096" in line


@pytest.mark.fault(44)
def test_a_full_disk_for_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "stdout.log").symlink_to("/dev/full")
    with dt.init_master_worker(nodes=2, threads=1, log_dir=str(tmp_path)), aftermath(0, 1), within(5.0):
        for _ in range(3):
            for node in range(2):
                dt.run(print, "a line", node=node)
    said = capfd.readouterr()
    assert said.err.count("no more output of node 0 goes to its stdout.log: [Errno 28] No space left on device") == 1
    # whether lines of two nodes become one depends on when they come
    assert sorted(unfolded(said.out.splitlines())) == [f"[node {node}] a line" for node in range(2) for _ in range(3)]
    assert (tmp_path / "1" / "stdout.log").read_text() == "a line\n" * 3


@pytest.mark.fault(44)
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with within(5.0), pytest.raises(dt.DisttensorError, match=rf"{port}.*[Aa]ddress already in use"):
            dt.init_master_worker(init_method=f"tcp://127.0.0.1:{port}", nodes=1)


# ---- proxies ---------------------------------------------------------------------------------------------------------


class Held(Exception):
    """Holds the frame that it was raised in, and so what that held."""


def holding(x: torch.Tensor) -> Held:
    y = x + 1
    try:
        raise Held
    except Held as e:
        assert y is not None
        return e


def settle(before: list[int], there: list[int]) -> None:
    """Waits until nodes have as many tensors more. A collection that runs in another thread is none of ours."""
    deadline = time.monotonic() + HANG
    while (now := [testing.usage(node).tensors - count for node, count in enumerate(before)]) != there:
        assert time.monotonic() < deadline, (now, there)
        gc.collect()


@pytest.mark.fault(45)
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        *((seed, 20_000) for seed in list(SEEDS.values())[:1] + list(SEEDS.values())[-1:]),
        pytest.param(45, 10_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_a_node_has_what_the_script_has(seed: int, count: int) -> None:
    """However proxies die: at once, in cycles, with exceptions that held their frames, or all at the end."""
    rng = random.Random(seed)
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        one = [torch.ones(1, device=f"node:{node}") for node in range(2)]
        before = [testing.usage(node).tensors for node in range(2)]
        kept: list[tuple[int, object]] = []
        with aftermath(0, 1):
            for number in range(count):
                node = rng.randrange(2)
                match rng.randrange(8):
                    case 0:
                        kept.append((node, one[node] + number))
                    case 1:
                        cycle: list[object] = [one[node] * 2]
                        cycle.append(cycle)
                        del cycle
                    case 2:
                        kept.append((node, holding(one[node])))
                    case 3 if kept:
                        kept.pop(rng.randrange(len(kept)))
                    case 4 if len(kept) > 1000:
                        kept.clear()
                    case _:
                        one[node] + number
                if number % (count // 4) == 0:
                    settle(before, [sum(at == node for at, _ in kept) for node in range(2)])
            kept.clear()
            gc.collect()
