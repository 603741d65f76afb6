"""python tools/bench/tasks.py [--calls 500] [--repeats 5] [--peers futures rpc] [--map 10000]

A small function submitted to another process, and a method called there, many at once: by disttensor, by
``ProcessPoolExecutor`` and by ``torch.distributed.rpc``, in turns in one run. Prints the least CPU of a call, in
microseconds, until its result is there: of the thread that submits, of its process, and of all processes together.

``--map``: so many items of 10 us instead, by ``dt.map`` and ``Executor.map(chunksize=50)``: the least CPU of an item,
the least time, and that until the first result. "one by one": ``dt.map`` of an iterator, which takes items as they are
asked for.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

TICK = os.sysconf("SC_CLK_TCK")

#: What an item of a map counts to.
WORK = 900

#: Calls something so many times, and waits for all results.
Calls = Callable[[int], object]


def one(x: int) -> int:
    return x + 1


def work(x: int) -> int:
    """Takes about 10 us."""
    for _ in range(WORK):
        pass
    return x


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n


def descendants(pid: int) -> Iterator[int]:
    """Yields a process and all that it has begun, directly or not."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from descendants(int(child))


def cpu_of_all() -> float:
    """Seconds of CPU of this process and those below it. The scheduler counts in hundredths."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in descendants(os.getpid())]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICK


def measured(calls: Calls, count: int) -> tuple[float, float, float]:
    """Microseconds of CPU a call: of this thread, of this process, of all processes."""
    everything, process, thread = cpu_of_all(), time.process_time(), time.thread_time()
    calls(count)
    thread, process = time.thread_time() - thread, time.process_time() - process
    return thread / count * 1e6, process / count * 1e6, (cpu_of_all() - everything) / count * 1e6


@contextmanager
def ours() -> Iterator[dict[str, Calls]]:
    import disttensor as dt

    with dt.init_master_worker(nodes=1, threads=1):
        counter = dt.actor(Counter, node=0)
        yield {
            "function": lambda n: [work.result() for work in [dt.submit(one, k, node=0) for k in range(n)]],
            "method": lambda n: [work.result() for work in [counter.add(1) for _ in range(n)]],
        }


@contextmanager
def futures() -> Iterator[dict[str, Calls]]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield {"function": lambda n: [each.result() for each in [pool.submit(one, k) for k in range(n)]]}


def measured_map(make: Callable[[int], Iterator[int]], count: int) -> list[float]:
    """Microseconds an item: of CPU, as ``measured``, and of time; and those until the first result."""
    now = time.perf_counter
    began, first = now(), [0.0]

    def take(count: int) -> None:
        results = make(count)
        next(results)
        first[0] = now()
        assert sum(results) == count * (count - 1) // 2

    cpu = measured(take, count)
    return [*cpu, (now() - began) / count * 1e6, (first[0] - began) * 1e6]


def maps(count: int, repeats: int) -> None:
    """Prints what items of a map cost."""
    import disttensor as dt

    with dt.init_master_worker(nodes=1, threads=1), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        ways: dict[str, Callable[[int], Iterator[int]]] = {
            "dt.map": lambda n: dt.map(work, range(n)),
            "dt.map, one by one": lambda n: dt.map(work, iter(range(n))),
            "futures, chunksize=50": lambda n: pool.map(work, range(n), chunksize=50),
            "futures, chunksize=1": lambda n: pool.map(work, range(n)),
            "here": lambda n: map(work, range(n)),
        }
        least: dict[str, list[float]] = {}
        for _ in range(repeats):
            for name, make in ways.items():
                few = 10 if name.endswith(("one", "=1")) else 1
                list(make(20))
                now = measured_map(make, count // few)
                least[name] = [min(pair) for pair in zip(now, least.get(name, now), strict=True)]
    print(f"{'':24}{'thread':>10}{'process':>10}{'all':>10}{'time':>10}   microseconds an item{'first':>10} result")
    for name, times in least.items():
        print(f"{name:24}" + "".join(f"{each:10.1f}" for each in times[:4]) + f"{times[4]:33.0f}")


def rpc_worker(port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    rpc.init_rpc("worker", rank=1, world_size=2)
    rpc.shutdown()


@contextmanager
def torch_rpc() -> Iterator[dict[str, Calls]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    worker = get_context("spawn").Process(target=rpc_worker, args=(port,))
    worker.start()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    rpc.init_rpc("script", rank=0, world_size=2)
    counters: list[Any] = [rpc.remote("worker", Counter)]
    yield {
        "function": lambda n: [each.wait() for each in [rpc.rpc_async("worker", one, (k,)) for k in range(n)]],
        "method": lambda n: [each.wait() for each in [counters[0].rpc_async().add(1) for _ in range(n)]],
    }
    counters.clear()  # before the end, which waits for it
    rpc.shutdown()
    worker.join()


PEERS = {"disttensor": ours, "futures": futures, "rpc": torch_rpc}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", nargs="*", choices=[*PEERS][1:], default=[*PEERS][1:])
    parser.add_argument("--map", type=int, nargs="?", const=10_000, metavar="ITEMS")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.map:
        maps(options.map, options.repeats)
        return
    least: dict[tuple[str, str], tuple[float, float, float]] = {}
    with ExitStack() as all_peers:
        peers = {name: all_peers.enter_context(PEERS[name]()) for name in ("disttensor", *options.peers)}
        for _ in range(options.repeats):
            for name, ways in peers.items():
                for what, calls in ways.items():
                    calls(20)
                    now, before = measured(calls, options.calls), least.get((what, name))
                    least[what, name] = now if before is None else (
                        min(now[0], before[0]), min(now[1], before[1]), min(now[2], before[2])
                    )  # fmt: skip
    print(f"{'':24}{'thread':>10}{'process':>10}{'all':>10}   microseconds of CPU a call")
    for (what, name), times in sorted(least.items()):
        print(f"{what + ', ' + name:24}" + "".join(f"{each:10.0f}" for each in times))


if __name__ == "__main__":
    main()
