"""python tools/bench/node_copy.py [--mib 64] [--repeats 15]

One tensor from node to node with `.to("node:1")`, commands, allocation and waiting for its arrival included, against
the same bytes over a raw loopback socket between two processes with warm, reused memory, in turns in one run.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from multiprocessing import get_context

import torch

import disttensor as dt


def source(port: int, size: int) -> None:
    sock = socket.create_connection(("127.0.0.1", port))
    data = memoryview(bytearray(size))
    data[:] = b"x" * size
    while sock.recv(1) == b"g":
        sock.sendall(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = options.mib << 20
    listener = socket.create_server(("127.0.0.1", 0))
    child = get_context("fork").Process(target=source, args=(listener.getsockname()[1], size))
    child.start()
    sock, _ = listener.accept()
    sink = memoryview(bytearray(size))

    def raw() -> float:
        start = time.perf_counter()
        sock.sendall(b"g")
        got = 0
        while got < size:
            got += sock.recv_into(sink[got:])
        return time.perf_counter() - start

    with dt.init_master_worker(nodes=2, backend="tcp", threads=1):
        x = torch.ones(size // 4, device="node:0")
        dt.synchronize()

        def moved() -> float:
            start = time.perf_counter()
            y = x.to("node:1")
            dt.synchronize(1)
            del y
            return time.perf_counter() - start

        raw(), moved(), raw(), moved()
        times = [(raw(), moved()) for _ in range(options.repeats)]
    sock.sendall(b"e")
    child.join()
    here, there = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    print(f"{options.mib} MiB: raw socket {size / here / 1e9:.2f} GB/s, node to node {size / there / 1e9:.2f} GB/s")
    print(f"node to node over a raw socket: {ratio:.2f}x")


if __name__ == "__main__":
    main()
