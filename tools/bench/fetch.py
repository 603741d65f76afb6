"""python tools/bench/fetch.py [--pings 2000] [--repeats 7]

A small `.item()` against a raw ZeroMQ REQ/REP round trip of 20 bytes between two processes over loopback TCP, in turns
in one run: with CURVE, as nodes have it, and in plain text. And `.cpu()` of 1, 32 and 64 KiB against `.item()`, by the
CPU time of the script's thread, and against a plain socket's round trip of as many bytes, by the clock.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
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


class Socket:
    """A TCP connection to a process that sends so many bytes for each one that comes."""

    def __init__(self, nbytes: int) -> None:
        ours, theirs = (socket.socket() for _ in range(2))
        ours.bind(("127.0.0.1", 0))
        ours.listen()
        theirs.connect(ours.getsockname())
        self.socket = ours.accept()[0]
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = memoryview(bytearray(nbytes))
        self.child = get_context("fork").Process(target=self.answer, args=(theirs,))
        self.child.start()
        ours.close()
        theirs.close()

    def answer(self, theirs: socket.socket) -> None:
        self.socket.close()
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while theirs.recv(1):
            theirs.sendall(self.buffer)

    def ping(self) -> None:
        self.socket.sendall(b"x")
        at = 0
        while at < len(self.buffer):
            at += self.socket.recv_into(self.buffer[at:])

    def end(self) -> None:
        self.socket.close()
        self.child.join()


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
    sockets = {kib: Socket(kib << 10) for kib in (1, 32, 64)}  # forked before any thread is there
    plain, curve = Raw(False), Raw(True)

    import disttensor as dt

    with dt.init_master_worker(nodes=1, threads=1):
        x = torch.ones((), device="node:0")
        ways: dict[str, Callable[[], object]] = {
            "REQ/REP, plain": plain.ping,
            "REQ/REP, CURVE": curve.ping,
            ".item()": x.item,
        }
        for kib, raw in sockets.items():
            ways[f"socket, {kib} KiB"] = raw.ping
            ways[f".cpu(), {kib} KiB"] = torch.ones(kib << 8).to("node:0").cpu
        times: dict[str, list[float]] = {name: [] for name in ways}
        cores: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, ping in ways.items():
                ping()
                start, core = time.perf_counter(), time.thread_time()
                for _ in range(options.pings):
                    ping()
                cores[name].append((time.thread_time() - core) / options.pings * 1e6)
                times[name].append((time.perf_counter() - start) / options.pings * 1e6)
    for name, values in times.items():
        median, core = statistics.median(values), statistics.median(cores[name])
        print(f"{name:16} min {min(values):7.1f}   median {median:7.1f} us   of the thread {core:7.1f} us of CPU")
    for name in ("REQ/REP, CURVE", "REQ/REP, plain"):
        ratio = statistics.median(a / b for a, b in zip(times[".item()"], times[name], strict=True))
        print(f"small .item() over {name}: {ratio:.2f}x")
    for kib in sockets:
        name = f".cpu(), {kib} KiB"
        core = statistics.median(a / b for a, b in zip(cores[name], cores[".item()"], strict=True))
        clock = statistics.median(a / b for a, b in zip(times[name], times[f"socket, {kib} KiB"], strict=True))
        print(f"{name} over .item(), of the thread: {core:.2f}x; over a socket, by the clock: {clock:.1f}x")
    plain.end()
    curve.end()
    for raw in sockets.values():
        raw.end()


if __name__ == "__main__":
    main()
