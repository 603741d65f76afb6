"""python tools/bench/fetch.py [--pings 2000] [--repeats 7]

A small `.item()` against a raw ZeroMQ REQ/REP round trip of 20 bytes between two processes over loopback TCP, in turns
in one run: with CURVE, as nodes have it, and in plain text.
"""

from __future__ import annotations

import argparse
import statistics
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import zmq


def echo(pipe: Connection, keys: tuple[bytes, bytes] | None) -> None:
    context = zmq.Context()
    server = context.socket(zmq.REP)
    if keys:
        server.curve_server, (server.curve_publickey, server.curve_secretkey) = True, keys
    pipe.send(server.bind_to_random_port("tcp://127.0.0.1"))
    while (message := server.recv()) != b"end":
        server.send(message)
    server.send(b"end")
    server.close()
    context.term()


class Raw:
    """A REQ socket and its echoing process."""

    def __init__(self, curve: bool) -> None:
        keys = zmq.curve_keypair() if curve else None
        forks = get_context("fork")
        pipe, theirs = forks.Pipe()
        self.child = forks.Process(target=echo, args=(theirs, keys))
        self.child.start()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        if keys:
            self.socket.curve_serverkey = keys[0]
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
        self.socket.connect(f"tcp://127.0.0.1:{pipe.recv()}")

    def ping(self) -> None:
        self.socket.send(b"x" * 20)
        self.socket.recv()

    def end(self) -> None:
        self.socket.send(b"end")
        self.socket.recv()
        self.socket.close()
        self.context.term()
        self.child.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pings", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, curve = Raw(False), Raw(True)  # forked before any thread is there

    import disttensor as dt

    with dt.init_master_worker(nodes=1, threads=1):
        x = torch.ones((), device="node:0")
        ways = {"REQ/REP, plain": plain.ping, "REQ/REP, CURVE": curve.ping, ".item()": x.item}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, ping in ways.items():
                ping()
                start = time.perf_counter()
                for _ in range(options.pings):
                    ping()
                times[name].append((time.perf_counter() - start) / options.pings * 1e6)
    for name, values in times.items():
        print(f"{name:16} min {min(values):7.1f}   median {statistics.median(values):7.1f} us")
    for name in ("REQ/REP, CURVE", "REQ/REP, plain"):
        ratio = statistics.median(a / b for a, b in zip(times[".item()"], times[name], strict=True))
        print(f"small .item() over {name}: {ratio:.2f}x")
    plain.end()
    curve.end()


if __name__ == "__main__":
    main()
