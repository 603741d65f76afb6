"""Nodes that say what no honest one does: workers that are so from the start, and what takes over one that runs."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aftermath import now

from disttensor.runtime.node import worker
from disttensor.runtime.node.worker import NodeWorker
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.arguments import Addresses

#: Where nobody listens.
UNREACHABLE = "127.0.0.1:1"

#: What a Hello of node 1 has in place of the truth; of the nodes 0 and 1 where they cannot be reached.
LIES: dict[str, Callable[[c.Hello], c.Hello]] = {
    "addresses": lambda hello: msgspec.structs.replace(
        hello, addresses=Addresses(",".join(f"127.0.0.1:{20_000 + i}" for i in range(20_000)))
    ),
    "devices": lambda hello: msgspec.structs.replace(hello, devices=("cpu", *(f"cuda:{i}" for i in range(60_000)))),
    "torch": lambda hello: msgspec.structs.replace(hello, torch="1.2.3"),
    "protocol": lambda hello: msgspec.structs.replace(hello, protocol=hello.protocol + 1),
    "unreachable": lambda hello: msgspec.structs.replace(hello, addresses=Addresses(UNREACHABLE)),
    "host": lambda hello: msgspec.structs.replace(hello, host="\x1b]0;owned\x07" + "h" * 100_000),
}


#: The variable with the path of a file to which node 1 writes, just before it does what it does, when that was.
STAMP = "HOSTILE_STAMP"


def _stamp() -> None:
    Path(os.environ[STAMP]).write_text(now())


def _lying(lie: str) -> Callable[[int], int]:
    ranks = (0, 1) if lie == "unreachable" else (1,)

    def main(lifeline: int) -> int:
        honest = NodeWorker.hello

        def hello(self: NodeWorker) -> c.Hello:
            said = honest(self)
            if self.bundle.rank in ranks:
                _stamp()
                return LIES[lie](said)
            if lie in LATE:
                os.read(lifeline, 1)  # which comes to its end when this node is given up
            return said

        NodeWorker.hello = hello  # type: ignore[method-assign]
        return worker.main(lifeline)

    return main


#: Lies that are refused though the other nodes have not come.
LATE = ("torch", "protocol")
addresses, devices, torch, protocol, unreachable, host = (_lying(lie) for lie in LIES)


def broken(lifeline: int) -> int:
    """Node 1 ends while it starts, after more lines than are kept."""

    def hello(self: NodeWorker) -> c.Hello:
        for number in range(30):
            print(f"line {number}", file=sys.stderr)
        _stamp()
        raise ImportError("no such library")

    honest = NodeWorker.hello
    NodeWorker.hello = lambda self: hello(self) if self.bundle.rank == 1 else honest(self)  # type: ignore[method-assign]
    return worker.main(lifeline)


def _this_worker() -> NodeWorker:
    return next(found for found in gc.get_objects() if type(found) is NodeWorker)


#: What a node that was taken over may say without end, or once: for dt.run.
SAYINGS: dict[str, Callable[[NodeWorker], tuple[c.Reply, ...]]] = {
    "nothing": lambda own: (),
    "what nobody asked for": lambda own: (c.Answer(10**9, "x" * 1_000_000),),
    "failures": lambda own: (c.Failed(0, "o" * 250, "builtins.SystemExit", "m" * 3000, "t" * 3000),),
    "failures to come": lambda own: (c.Failed(10**6, "op", "builtins.KeyError", "m", ""),),
    "the fault of another": lambda own: (c.Poisoned(10**9, 0, 10**6),),
}


def flood(saying: str) -> None:
    """Has this node say one thing without end, in a thread, once this function has returned."""
    own = _this_worker()
    begun = own.executor.done

    def go() -> None:
        while own.executor.done == begun:
            time.sleep(0.01)
        message = codec.encode(c.Report(own.executor.done, SAYINGS[saying](own)))
        while True:
            own._spoke.send(message)

    threading.Thread(target=go, daemon=True).start()


#: A pickle: who opens it makes the folder `MARKER` where it is. It is short enough for any field.
MARKER = "b"
BOMB = b"cposix\nmkdir\n(S'" + MARKER.encode() + b"'\ntR."
#: What replies become when a bomb is put where they have bytes, a value or a text.
ARMED: dict[type[c.Reply], Callable[[Any], c.Reply]] = {
    c.Result: lambda reply: msgspec.structs.replace(reply, data=BOMB),
    c.Answer: lambda reply: msgspec.structs.replace(reply, value=BOMB),
    c.Failed: lambda reply: msgspec.structs.replace(
        reply, kind=BOMB.decode(), message=BOMB.decode(), traceback=BOMB.decode()
    ),
}


def arm(kind: str) -> None:
    """Has all replies of this kind that this node gives from now on carry a bomb; the kind "" is its whole messages."""
    own = _this_worker()
    honest = own._spoke.send

    def send(message: bytes) -> None:
        report = codec.decode_report(message)
        armed = tuple(ARMED[type(r)](r) if type(r).__name__ == kind else r for r in report.replies)
        honest(codec.encode(msgspec.structs.replace(report, replies=armed)) if kind else BOMB)

    own._spoke.send = send  # type: ignore[method-assign]


def answer_with(data: bytes) -> None:
    """Has all results of functions of this node be these bytes from now on."""
    ARMED[c.Result] = lambda reply: msgspec.structs.replace(reply, data=data)
    arm("Result")


def fail_with(value: bytes) -> None:
    """Has all failures that this node reports from now on carry this exception."""
    ARMED[c.Failed] = lambda reply: msgspec.structs.replace(reply, kind="value_kit.Broken", value=value)
    arm("Failed")


def credentials() -> tuple[str, str, str, str, int]:
    """What this node was started with: where the master is, its key, the node's own two, and its rank."""
    bundle = _this_worker().bundle
    return bundle.address, bundle.server_key, bundle.public_key, bundle.secret_key, bundle.rank


def send_as(add: int, factor: int) -> None:
    """Has this node send its next transfers under other numbers than it was told."""
    channel = _this_worker().channels.data[0]
    honest = type(channel).isend.__get__(channel)
    channel.isend = lambda tensor, peer, transfer: honest(tensor, peer, factor * transfer + add)  # type: ignore[method-assign]
