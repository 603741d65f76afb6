"""Collectives between processes of this machine: ours over a data channel, beside gloo's and MPI's. "master" is
``dt.all_reduce`` and its like, called by a script for nodes that are such processes; the others have no master.

    python tools/bench/collectives.py [--ranks 2 4] [--sizes 4K 64K 1M 64M] [--channels shm tcp]
    python tools/bench/collectives.py --sizes 1K-256M --plot collectives.png

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
from multiprocessing.connection import Connection
from pathlib import Path

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

    def _op(self, collective: str, xs: list[torch.Tensor]) -> Op:
        dt = self._dt
        if collective == "all_reduce":
            return lambda: dt.all_reduce(xs)
        if collective == "broadcast":
            return lambda: dt.broadcast(xs, 0)
        if collective == "reduce":
            return lambda: dt.collectives.reduce(xs, 0)
        if collective == "all_gather":
            lists = [[torch.empty_like(x) for _ in xs] for x in xs]
            return lambda: dt.all_gather(lists, xs)
        raise ValueError(collective)

    def measure(self, collective: str, nbytes: int) -> list[tuple[float, float]]:
        """Until the last of a block of calls is done. The CPU time is this process's."""
        dt, calls = self._dt, calls_of(nbytes)
        op = self._op(collective, [torch.zeros(nbytes // 4, device=f"node:{k}") for k in range(self._size)])
        op()
        dt.synchronize()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(calls):
            op()
        dt.synchronize()
        return [((time.perf_counter() - start) / calls, (time.process_time() - used) / calls)]

    def close(self) -> None:
        self._dt.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["4K", "64K", "1M", "8M", "64M"], help='or "1K-256M"')
    parser.add_argument("--channels", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--collectives", nargs="+", default=["all_reduce"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="PNGs: FILE-all_reduce-2.png and so on")
    parser.add_argument("--mpi-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi_rank:
        mpi_ranks(mpi_do)
        return
    rows = []
    print(f"{'':34s} {'':10s} {'ms':>9s} {'CPU ms':>9s} {'GB/s':>6s} {'vs. best other':>14s}")
    for size in options.ranks:
        teams: list[Team | Mpi | Master] = [Team("gloo", size, rank_main)]
        teams += [Team(who, size, rank_main, introduce) for who in options.channels]
        teams.append(Master(size))
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
