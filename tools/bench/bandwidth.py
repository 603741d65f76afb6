"""How fast tensors move, over sizes: from the master to a node, between nodes, and back, by each data channel; beside
memcpy, a raw socket, gloo and MPI, which take turns with them in the same run.

    python tools/bench/bandwidth.py [--sizes 1K-256M] [--channels shm tcp] [--rounds 7]
    python tools/bench/bandwidth.py --sizes 64M --plot bandwidth.png --json bandwidth.json

A block of transfers, as many as there are calls in a block, is begun one after the other; the time is that until the
last has ended, everything that a call does included. memcpy copies between warm tensors; socket, gloo and MPI go from
one process to another, from and to warm memory. The ratio is to what the channel should be as good as: shm to memcpy,
tcp to the socket, gloo and mpi to themselves; it is the median of those of the rounds. MPI is measured where mpi4py and
an mpiexec are there. About two minutes, and 6 GiB of memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from contest import Mpi, Team, calls_of, mpi_ranks, parse_sizes, plot, show_size

#: What a channel is compared with; any other with memcpy.
AGAINST = {"tcp": "socket", "gloo": "gloo", "mpi": "mpi"}
WAYS = ("up", "across", "down")
WORDS = {"up": "master to node", "across": "node to node", "down": "node to master"}

#: Makes, of a tensor, what moves it once, and what waits until all has been moved.
Mover = tuple[Callable[[], object], Callable[[], object]]


def timed(move: Callable[[], object], finish: Callable[[], object], calls: int) -> float:
    """Seconds of one transfer, in a block of them."""
    start = time.perf_counter()
    for _ in range(calls):
        move()
    finish()
    return (time.perf_counter() - start) / calls


class Memcpy:
    name = "memcpy"

    def __init__(self) -> None:
        self._tensors = {0: (torch.empty(0), torch.empty(0))}

    def measure(self, nbytes: int) -> list[float]:
        if nbytes not in self._tensors:
            source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
            self._tensors = {nbytes: (source, target)}
            target.copy_(source)
        source, target = self._tensors[nbytes]
        return [timed(lambda: target.copy_(source), lambda: None, calls_of(nbytes))]

    def close(self) -> None:
        pass


# ---- between two processes: rank 0 sends, rank 1 receives, and says when it has all ----------------------------------


def by_socket(rank: int, folder: str) -> Callable[[torch.Tensor], Mover]:
    from disttensor.runtime.channel.tcp.dial import tune_after, tune_before
    from disttensor.runtime.host.silence import Silence

    listener = socket.socket() if rank == 0 else None
    where = Path(folder) / "port"
    if listener is not None:
        tune_before(listener, "127.0.0.1")
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        (Path(folder) / "new").write_text(str(listener.getsockname()[1]))
        (Path(folder) / "new").rename(where)
        sock, _ = listener.accept()
        listener.close()
    else:
        while not where.exists():
            time.sleep(0.01)
        sock = socket.socket()
        tune_before(sock, "127.0.0.1")
        sock.connect(("127.0.0.1", int(where.read_text())))
    tune_after(sock, Silence().data)

    def take(view: memoryview) -> None:
        got = 0
        while got < len(view):
            n = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
            if not n:
                raise EOFError("the other process is gone")
            got += n

    def over(x: torch.Tensor) -> Mover:
        view = memoryview(x.view(torch.uint8).numpy().data)
        if rank == 0:
            return (lambda: sock.sendall(view)), (lambda: sock.recv(1))
        return (lambda: take(view)), (lambda: sock.sendall(b"."))

    return over


def by_gloo(rank: int, folder: str) -> Callable[[torch.Tensor], Mover]:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ack = torch.zeros(1)

    def over(x: torch.Tensor) -> Mover:
        if rank == 0:
            return (lambda: dist.send(x, 1)), (lambda: dist.recv(ack, 1))
        return (lambda: dist.recv(x, 0)), (lambda: dist.send(ack, 0))

    return over


def peers(who: str, rank: int, size: int, pipe: Connection, folder: str) -> None:
    """A rank of these."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    over = by_socket(rank, folder) if who == "socket" else by_gloo(rank, folder)
    last: tuple[int, Mover] | None = None
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        [nbytes] = task
        if last is None or last[0] != nbytes:
            last = nbytes, over(torch.ones(nbytes // 4))
            timed(*last[1], 2)
        pipe.send(timed(*last[1], calls_of(nbytes)))


def mpi_do(nbytes: int) -> float:
    from mpi4py import MPI

    comm, array = MPI.COMM_WORLD, torch.ones(nbytes // 4).numpy()
    if comm.rank == 0:
        move, finish = (lambda: comm.Send(array, 1)), (lambda: comm.recv(source=1))
    else:
        move, finish = (lambda: comm.Recv(array, 0)), (lambda: comm.send(0, 0))
    timed(move, finish, 2)
    return timed(move, finish, calls_of(nbytes))


# ---- a session -------------------------------------------------------------------------------------------------------


def session(backend: str, rank: int, size: int, pipe: Connection, folder: str) -> None:
    """A process that is a master with two nodes."""
    import disttensor as dt

    torch.set_num_threads(1)
    dt.init_master_worker(backend=backend, nodes=2, threads=1)
    last = 0
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        way, nbytes = task
        if last != nbytes:
            here = torch.ones(nbytes // 4)
            there = here.to("node:0")
            last = nbytes
            for one in WAYS:
                timed(*mover(one, here, there), 3)
        pipe.send(timed(*mover(way, here, there), calls_of(nbytes)))
    dt.shutdown()


def mover(way: str, here: torch.Tensor, there: torch.Tensor) -> Mover:
    import disttensor as dt

    kept: list[Any] = []  # the last one, so that memory is used again and not before

    def keep(x: Any) -> None:
        kept[:] = [x]

    if way == "up":
        return (lambda: keep(here.to("node:0"))), (lambda: dt.synchronize(0))
    if way == "across":
        return (lambda: keep(there.to("node:1"))), (lambda: dt.synchronize(1))
    return (lambda: keep(there.cpu())), (lambda: None)


# ---- all -------------------------------------------------------------------------------------------------------------


def contestants(channels: list[str]) -> tuple[dict[str, Callable[..., list[float]]], list[Any]]:
    """What measures each column of the table, by name; and what has to be closed."""
    teams: list[Any] = [Memcpy(), Team("socket", 2, peers), Team("gloo", 2, peers)]
    try:
        teams.append(Mpi(2))
    except ImportError as error:
        print(f"MPI is not measured: {error}")
    columns = {team.name: team.measure for team in teams}
    for channel in channels:
        try:
            team = Team(channel, 1, session)
        except ImportError as error:
            print(error)
            continue
        teams.append(team)
        columns |= {f"{channel} {way}": lambda n, team=team, way=way: team.measure(way, n) for way in WAYS}
    return columns, teams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1K-256M"])
    parser.add_argument("--channels", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="a PNG")
    parser.add_argument("--mpi-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi_rank:
        mpi_ranks(mpi_do)
        return
    torch.set_num_threads(1)
    columns, teams = contestants(options.channels)
    print(f"GB/s ({', '.join(f'{way}: {words}' for way, words in WORDS.items())}) and the ratio to what it is held to")
    print(f"{'':8s}", *(f"{name:>12s}" for name in columns))
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in columns}
    rows = []
    for nbytes in parse_sizes(options.sizes):
        seconds: dict[str, list[float]] = {name: [] for name in columns}
        for _, (name, measure) in itertools.product(range(options.rounds), columns.items()):
            seconds[name].append(max(measure(nbytes)))
        cells, ratios = [], []
        for name, times in seconds.items():
            median, (channel, _, way) = statistics.median(times), name.partition(" ")
            against = seconds.get(AGAINST.get(channel, "memcpy")) if way else None
            ratio = statistics.median(a / b for a, b in zip(against, times, strict=True)) if against else None
            curves[name].append((nbytes, nbytes / median / 1e9))
            cells.append(f"{nbytes / median / 1e9:12.3f}")
            ratios.append(f"{'' if ratio is None else f'{ratio:.2f}x':>12s}")
            rows.append({"what": name, "bytes": nbytes, "s": median, "ratio": ratio})
        print(f"{show_size(nbytes):8s}", *cells)
        print(f"{'':8s}", *ratios, flush=True)
    for team in teams:
        team.close()
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    if options.plot:
        plot(options.plot, "one tensor after the other, on one host", curves)


if __name__ == "__main__":
    main()
