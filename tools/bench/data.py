"""python tools/bench/data.py [--mib 64] [--repeats 15] [--pings 2000]

The tcp data channel against a raw socket, between two processes over loopback, alternately in one run. Bulk: one tensor
of that many MiB; the raw socket sends from and receives into warm, reused memory with the channel's socket options.
Small: 1 KiB there and back; the raw socket uses one sendall and one recv_into each way. Look at the ratios: what a
machine does at all varies with what else it does.

The channel also with a checksum of each payload (`checksum=True`), and encrypted (`encrypt=True`, where it can be),
in the same turns: their cost is the ratio to the channel's own row.

Python's handler of SIGINT is off here, as in a node: who waits for a small receive then reads the socket itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from disttensor.runtime.channel import ChannelContext, DataChannel, PeerInfo, get_channel
from disttensor.runtime.channel.base import Protection
from disttensor.runtime.channel.cipher import no_cipher
from disttensor.runtime.channel.tcp.dial import tune_after, tune_before
from disttensor.runtime.host.silence import Silence

SMALL = 256  # float32 elements: 1 KiB


#: What is measured: the raw socket, and the channel with a protection.
PROTECTIONS = {"tcp": Protection(), "checksum": Protection(checksum=True)}
if no_cipher():
    print(f"without a row of encryption: {no_cipher()}")
else:
    PROTECTIONS["encrypted"] = Protection(encrypt=True)
KINDS = ("raw", *PROTECTIONS)
NAMES = {"raw": "raw socket", "tcp": "tcp channel", "checksum": "... with a checksum", "encrypted": "... encrypted"}


def channels_of(rank: int, pipe: Connection, key: bytes) -> dict[str, DataChannel]:
    """A channel of each kind that knows the other process's."""
    return {kind: channel_of(rank, pipe, key, protection) for kind, protection in PROTECTIONS.items()}


def channel_of(rank: int, pipe: Connection, key: bytes, protection: Protection) -> DataChannel:
    """A tcp channel that knows the other process's."""
    channel = get_channel("tcp")(ChannelContext(rank, "bench", "127.0.0.1", protection=protection))
    pipe.send(channel.address())
    other = 1 - rank
    channel.connect({other: PeerInfo(other, pipe.recv(), key)})
    return channel


def read_all(sock: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        n = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        if not n:
            raise EOFError("the other process is gone")
        got += n


def serve(pipe: Connection, key: bytes, where: tuple[str, int], mib: int, pings: int) -> None:
    """The other process: does what the pipe says."""
    raw = socket.socket()
    tune_before(raw, "127.0.0.1")
    raw.connect(where)
    tune_after(raw, Silence().data)
    channels = channels_of(1, pipe, key)
    source = torch.randn(mib << 18)
    source_bytes = memoryview(source.view(torch.uint8).numpy().data)
    small, small_bytes = torch.empty(SMALL), memoryview(bytearray(SMALL * 4))
    transfer = 0
    while (what := pipe.recv()) != "end":
        kind, _, size = what.partition(" ")
        if what == "raw bulk":
            raw.sendall(source_bytes)
        elif size == "bulk":
            transfer += 1
            channels[kind].send(source, 0, transfer)
        elif what == "raw ping":
            for _ in range(pings):
                read_all(raw, small_bytes)
                raw.sendall(small_bytes)
        elif size == "ping":
            channel = channels[kind]
            for _ in range(pings):
                transfer += 1
                channel.recv(small, 0, transfer)
                channel.send(small, 0, transfer)
    for channel in channels.values():
        channel.close()
    raw.close()


def show(name: str, values: list[float], unit: str) -> None:
    low, middle, high = min(values), statistics.median(values), max(values)
    print(f"{name:<34} min {low:8.2f}   median {middle:8.2f}   max {high:8.2f}   {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--pings", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    listener = socket.socket()
    tune_before(listener, "127.0.0.1")
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    key = os.urandom(32)
    context = get_context("fork")  # before any thread: nothing but the import of torch is shared
    pipe, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, key, listener.getsockname(), args.mib, args.pings))
    child.start()
    raw, _ = listener.accept()
    tune_after(raw, Silence().data)
    channels = channels_of(0, pipe, key)
    sink = memoryview(bytearray(args.mib << 20))
    small, small_bytes = torch.zeros(SMALL), memoryview(bytearray(SMALL * 4))
    transfer = 0

    def measure(what: str) -> float:
        nonlocal transfer
        start = time.perf_counter()
        pipe.send(what)
        kind, _, size = what.partition(" ")
        if what == "raw bulk":
            read_all(raw, sink)
        elif size == "bulk":
            transfer += 1
            channel = channels[kind]
            channel.recv(channel.empty((args.mib << 18,), torch.float32), 1, transfer)
        elif what == "raw ping":
            for _ in range(args.pings):
                raw.sendall(small_bytes)
                read_all(raw, small_bytes)
        else:
            channel = channels[kind]
            for _ in range(args.pings):
                transfer += 1
                receive = channel.irecv(small, 1, transfer)
                channel.isend(small, 1, transfer)
                receive.wait()
        return time.perf_counter() - start

    figures: dict[str, list[float]] = {}
    for what in ("bulk", "ping"):
        for kind in KINDS:  # connections, warm memory
            measure(f"{kind} {what}")
        for _ in range(args.repeats if what == "bulk" else max(3, args.repeats // 3)):
            for kind in KINDS:
                figures.setdefault(f"{kind} {what}", []).append(measure(f"{kind} {what}"))
    pipe.send("end")
    child.join()
    for channel in channels.values():
        channel.close()
    raw.close()
    listener.close()

    size = args.mib << 20
    for kind in KINDS:
        show(f"{NAMES[kind]}, {args.mib} MiB", [size / t / 1e9 for t in figures[f"{kind} bulk"]], "GB/s")
    pairs = zip(figures["raw bulk"], figures["tcp bulk"], strict=True)
    show("ratio of neighbours, channel / raw", [raw_time / tcp_time for raw_time, tcp_time in pairs], "x")
    medians = statistics.median(figures["raw bulk"]) / statistics.median(figures["tcp bulk"])
    print(f"{'ratio of the medians':<34} {medians:.2f} x")
    for kind in KINDS[2:]:
        both = zip(figures[f"{kind} bulk"], figures["tcp bulk"], strict=True)
        show(f"time of neighbours, {kind} / tcp", [protected / plain for protected, plain in both], "x")
    for kind in KINDS:
        show(f"{NAMES[kind]}, 1 KiB one way", [t / args.pings / 2 * 1e6 for t in figures[f"{kind} ping"]], "us")


if __name__ == "__main__":
    main()
