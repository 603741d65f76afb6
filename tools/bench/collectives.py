"""Collectives between processes of this machine: ours over a data channel, beside gloo's and MPI's. "master" is
``dt.all_reduce`` and its like, called by a script for nodes that are such processes; the others have no master.

    python tools/bench/collectives.py [--ranks 2 4] [--sizes 4K 64K 1M 64M] [--channels shm tcp]
    python tools/bench/collectives.py --sizes 1K-256M --plot collectives.png
    python tools/bench/collectives.py --calls [--ranks 2]

"waited" is the script that waits for each call (``async_op=True``, ``wait()``). ``--calls`` is about what a small
all_reduce costs by how it is called, over a list and over a dim of a mesh: microseconds of CPU, of the script's thread
that calls, of its process, and of all processes; the least of several blocks, in turns. Twenty seconds.

All take turns in the same minutes, in blocks of calls, and the medians are compared: machines are shared and noisy.
MPI is measured where mpi4py and an mpiexec are there. About two minutes; over all sizes eight.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from contest import Mpi, Team, calls_of, mpi_ranks, parse_size, parse_sizes, plot, show_size

Op = Callable[[], object]


# ---- the contestants: each gives functions that make one call -------------------------------------------------------


def ours(name: str, rank: int, size: int, pipe: Connection) -> Callable[[str, torch.Tensor], Op]:
    from disttensor.runtime import collective as C
    from disttensor.runtime.channel import ChannelContext, PeerInfo, get_channel
    from disttensor.runtime.collective.shared_pages import SharedPagesOfGroups

    channel = get_channel(name)(ChannelContext(rank, "a benchmark", "127.0.0.1"))
    pipe.send(channel.address())
    addresses, keys = pipe.recv()
    channel.connect({r: PeerInfo(r, a, keys[min(r, rank), max(r, rank)]) for r, a in enumerate(addresses) if r != rank})
    bases, ranks, shared_pages = itertools.count(0, C.IDS), list(range(size)), SharedPagesOfGroups()
    way = None
    if given := os.environ.get("WAY"):
        algorithm, _, chunk = given.partition(":")
        way = C.Way(algorithm, chunk=parse_size(chunk or "512K"))

    def op(collective: str, x: torch.Tensor) -> Op:
        def exchange() -> C.Exchange:
            made = C.Exchange(channel, ranks, rank, next(bases))
            made.shared_pages = shared_pages  # as on nodes
            return made

        if collective == "all_reduce":
            return lambda: C.all_reduce(exchange(), x, x, way=way)
        if collective == "broadcast":
            return lambda: C.broadcast(exchange(), x, 0, way=way)
        if collective == "reduce":
            return lambda: C.reduce(exchange(), x, x, 0, way=way)
        if collective == "all_gather":
            outs = list(torch.empty(size, x.numel()))
            return lambda: C.all_gather(exchange(), x, outs, way=way)
        raise ValueError(collective)

    return op


def gloo(rank: int, size: int, folder: str) -> Callable[[str, torch.Tensor], Op]:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)

    def op(collective: str, x: torch.Tensor) -> Op:
        if collective == "all_reduce":
            return lambda: dist.all_reduce(x)
        if collective == "broadcast":
            return lambda: dist.broadcast(x, 0)
        if collective == "reduce":
            return lambda: dist.reduce(x, 0)
        if collective == "all_gather":
            outs = list(torch.empty(size, x.numel()))
            return lambda: dist.all_gather(outs, x)
        raise ValueError(collective)

    return op


def mpi_op(collective: str, x: torch.Tensor) -> Op:
    from mpi4py import MPI

    comm, array = MPI.COMM_WORLD, x.numpy()
    if collective == "all_reduce":
        return lambda: comm.Allreduce(MPI.IN_PLACE, array)
    if collective == "broadcast":
        return lambda: comm.Bcast(array, 0)
    if collective == "reduce":
        out = torch.empty_like(x).numpy()
        return lambda: comm.Reduce(array, out, root=0)
    if collective == "all_gather":
        out = torch.empty(comm.size * x.numel()).numpy()
        return lambda: comm.Allgather(array, out)
    raise ValueError(collective)


def timed(op: Op, calls: int) -> tuple[float, float]:
    """Seconds of one call, in a block of them, and those of this process's CPU time."""
    op()
    start, used = time.perf_counter(), time.process_time()
    for _ in range(calls):
        op()
    return (time.perf_counter() - start) / calls, (time.process_time() - used) / calls


# ---- ranks ----------------------------------------------------------------------------------------------------------


def rank_main(who: str, rank: int, size: int, pipe: Connection, folder: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    make = gloo(rank, size, folder) if who == "gloo" else ours(who, rank, size, pipe)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        collective, nbytes = task
        x = torch.zeros(nbytes // 4)
        pipe.send(timed(make(collective, x), calls_of(nbytes)))


def mpi_do(collective: str, nbytes: int) -> tuple[float, float]:
    return timed(mpi_op(collective, torch.zeros(nbytes // 4)), calls_of(nbytes))


def total(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Of all ranks: the seconds of the slowest, and their CPU time together."""
    return max(wall for wall, _ in times), sum(cpu for _, cpu in times)


def introduce(addresses: list[str]) -> tuple[list[str], dict[tuple[int, int], bytes]]:
    """What the ranks of a data channel are told."""
    return addresses, {pair: os.urandom(32) for pair in itertools.combinations(range(len(addresses)), 2)}


class Master:
    """Nodes of a session over the channel shm, and this process, which calls once for all of them."""

    name = "master"

    def __init__(self, size: int) -> None:
        import disttensor as dt

        self._dt, self._size = dt, size
        dt.init_master_worker(nodes=size, backend="shm", threads=1)

    def _op(self, collective: str, xs: list[torch.Tensor], waited: bool) -> Op:
        call = self._call(collective, xs)
        return (lambda: call(async_op=True).wait()) if waited else call

    def _call(self, collective: str, xs: list[torch.Tensor]) -> Callable[..., Any]:
        dt = self._dt
        if collective == "all_reduce":
            return partial(dt.all_reduce, xs)
        if collective == "broadcast":
            return partial(dt.broadcast, xs, 0)
        if collective == "reduce":
            return partial(dt.collectives.reduce, xs, 0)
        if collective == "all_gather":
            lists = [[torch.empty_like(x) for _ in xs] for x in xs]
            return partial(dt.all_gather, lists, xs)
        raise ValueError(collective)

    def measure(self, collective: str, nbytes: int, waited: bool = False) -> list[tuple[float, float]]:
        """Until the last of a block of calls is done. The CPU time is this process's."""
        dt, calls = self._dt, calls_of(nbytes)
        op = self._op(collective, [torch.zeros(nbytes // 4, device=f"node:{k}") for k in range(self._size)], waited)
        op()
        dt.synchronize()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(calls):
            op()
        dt.synchronize()
        return [((time.perf_counter() - start) / calls, (time.process_time() - used) / calls)]

    def close(self) -> None:
        self._dt.shutdown()


class Waited:
    """A script that waits for each call; the session is that of a Master."""

    name = "waited"

    def __init__(self, master: Master) -> None:
        self._master = master

    def measure(self, collective: str, nbytes: int) -> list[tuple[float, float]]:
        return self._master.measure(collective, nbytes, waited=True)

    def close(self) -> None:
        pass


# ---- what a call costs ----------------------------------------------------------------------------------------------


def ways_to_call(size: int) -> dict[str, Callable[[int], None]]:
    """Functions that make so many small all_reduces."""
    import disttensor as dt

    mesh = dt.mesh(dp=size)
    xs = [torch.zeros(16, device=f"node:{k}") for k in range(size)]
    x: Any = torch.zeros(16, device=mesh.device)
    there, everywhere = torch.zeros((), device="node:0"), torch.zeros((), device=mesh.device)

    def on_list(**how: Any) -> Any:
        return dt.all_reduce(xs, **how)

    def on_mesh(**how: Any) -> Any:
        return dt.collectives.all_reduce_(x, over="dp", **how)

    def new_one(**how: Any) -> Any:
        y = dt.all_reduce(x, over="dp", **how)
        return y

    def plain(call: Callable[..., Any], after: Callable[[], object] = lambda: None, each: int = 1) -> Any:
        def run(calls: int) -> None:
            for i in range(1, calls + 1):
                call()
                if i % each == 0:
                    after()

        return run

    def in_flight(call: Callable[..., Any], many: int) -> Any:
        def run(calls: int) -> None:
            for _ in range(calls // many):
                for work in [call(async_op=True) for _ in range(many)]:
                    work.wait()

        return run

    return {
        "list": plain(on_list),
        "list, item() after each 16": plain(on_list, there.item, 16),
        "list, asynchronous, 16 in flight": in_flight(on_list, 16),
        "list, item() after each": plain(on_list, there.item),
        "list, waited for": in_flight(on_list, 1),
        "mesh, in place": plain(on_mesh),
        "mesh, a new tensor": plain(new_one),
        "mesh, item() of it after each 16": plain(on_mesh, everywhere.item, 16),
        "mesh, asynchronous, 16 in flight": in_flight(on_mesh, 16),
        "mesh, item() of it after each": plain(on_mesh, everywhere.item),
        "mesh, waited for": in_flight(on_mesh, 1),
    }


def measure_calls(size: int, rounds: int) -> None:
    import disttensor as dt

    calls = 96
    dt.init_master_worker(nodes=size, backend="shm", threads=1)
    clocks = [(~node["pid"] << 3) | 2 for node in dt.nodes()]  # as clock_getcpuclockid(3) has them

    def used() -> tuple[float, float, float]:
        script = time.process_time()
        return time.thread_time(), script, script + sum(map(time.clock_gettime, clocks))

    ways = ways_to_call(size)
    least = dict.fromkeys(ways, (float("inf"),) * 3)
    for _ in range(rounds + 1):  # the first warms up, and has what is learnt once
        for name, run in ways.items():
            dt.synchronize()
            before = used()
            run(calls)
            thread = time.thread_time() - before[0]  # not of the synchronization
            dt.synchronize()
            _, process, everybody = (now - then for now, then in zip(used(), before, strict=True))
            least[name] = tuple(map(min, least[name], (thread / calls, process / calls, everybody / calls)))  # type: ignore[assignment]
    dt.shutdown()
    what = f"us of CPU for an all_reduce of 64 B, {size} nodes"
    print(f"{what:52s} {'thread':>8s} {'script':>8s} {'all':>8s}")
    for name, seconds in least.items():
        print(f"{name:52s} " + " ".join(f"{each * 1e6:8.1f}" for each in seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["4K", "64K", "1M", "8M", "64M"], help='or "1K-256M"')
    parser.add_argument("--channels", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--collectives", nargs="+", default=["all_reduce"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", action="store_true", help="what a small one costs the script")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="PNGs: FILE-all_reduce-2.png and so on")
    parser.add_argument("--mpi-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi_rank:
        mpi_ranks(mpi_do)
        return
    if options.calls:
        for size in options.ranks:
            measure_calls(size, options.rounds)
        return
    rows = []
    print(f"{'':34s} {'':10s} {'ms':>9s} {'CPU ms':>9s} {'GB/s':>6s} {'vs. best other':>14s}")
    for size in options.ranks:
        teams: list[Team | Mpi | Master | Waited] = [Team("gloo", size, rank_main)]
        teams += [Team(who, size, rank_main, introduce) for who in options.channels]
        master = Master(size)
        teams += [master, Waited(master)]
        try:
            teams.append(Mpi(size))
        except ImportError as error:
            print(f"MPI is not measured: {error}")
        for collective in options.collectives:
            curves: dict[str, list[tuple[int, float]]] = {team.name: [] for team in teams}
            for nbytes in parse_sizes(options.sizes):
                seconds: dict[str, list[tuple[float, float]]] = {team.name: [] for team in teams}
                for _ in range(options.rounds):
                    for team in teams:
                        seconds[team.name].append(total(team.measure(collective, nbytes)))
                medians = {name: statistics.median(wall for wall, _ in times) for name, times in seconds.items()}
                cpus = {name: statistics.median(cpu for _, cpu in times) for name, times in seconds.items()}
                others = min(median for name, median in medians.items() if name in ("gloo", "mpi"))
                for name, median in medians.items():
                    ratio = f"{others / median:.2f}x" if name not in ("gloo", "mpi") else ""
                    what = f"{collective} of {show_size(nbytes)}, {size} ranks"
                    print(
                        f"{what:34s} {name:10s} {median * 1e3:9.3f} {cpus[name] * 1e3:9.3f} "
                        f"{nbytes / median / 1e9:6.2f} {ratio:>14s}",
                        flush=True,
                    )
                    rows.append({"collective": collective, "bytes": nbytes, "ranks": size, "who": name, "s": median})
                    curves[name].append((nbytes, nbytes / median / 1e9))
            if options.plot:
                file = f"{options.plot.removesuffix('.png')}-{collective}-{size}.png"
                plot(file, f"{collective}, {size} ranks of one host", curves)
        for team in teams:
            team.close()
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
