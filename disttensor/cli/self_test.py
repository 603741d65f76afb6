"""The part of the doctor that has a process of its own: torch, its devices, two nodes, each data channel between them.

Each row goes to standard output as soon as it is known, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..runtime.host.affinity import this_host
from .doctor import MARK, NONE, OK, WRONG, CheckRow, size

#: Channels of no use between two processes: the choice among the others, threads of one process, and none at all.
_NO_CARRIERS = ("auto", "inproc", "null")


def main() -> int:
    """Prints the rows, and returns the exit code."""
    for row in rows():
        print(MARK + json.dumps(row._asdict()), flush=True)
    return 0


def rows() -> Iterator[CheckRow]:
    """Yields the rows, as they are known."""
    begun = time.monotonic()
    try:
        import torch
    except Exception as e:
        yield CheckRow(
            "torch", WRONG, f"it cannot be imported: {e}", "install it anew: https://pytorch.org/get-started"
        )
        return
    from ..torch_backend.tested_versions import untested

    text = f"imported in {time.monotonic() - begun:.1f} s"
    if told := untested(str(torch.__version__)):
        yield CheckRow("torch", NONE, text + "; " + told.removeprefix("disttensor: ").split(";")[0], "it may well work")
    else:
        yield CheckRow("torch", OK, text)
    yield devices(torch)
    yield from session(torch)


def devices(torch: Any) -> CheckRow:
    """Returns the row of the devices that nodes would have."""
    host = this_host()
    text = f"{len(host.cores)} of {os.cpu_count()} cores"
    if host.cpus:
        text += f", of which a limit lets {host.cpus} be busy"
    if not host.gpus:
        return CheckRow("devices", OK, f"{text}; no GPU")
    if not torch.cuda.is_available():
        text += f"; {len(host.gpus)} GPUs, of which torch sees none"
        return CheckRow(
            "devices", WRONG, text, f"install a build of torch for CUDA (this one is {torch.__version__}), or a driver"
        )
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_properties(at) for at in range(count)]
    text += "; " + ", ".join(f"cuda:{at} {each.name} ({size(each.total_memory)})" for at, each in enumerate(names))
    return CheckRow("devices", OK, text)


def session(torch: Any) -> Iterator[CheckRow]:
    """Yields the rows of two nodes: what they compute, and what each data channel carries."""
    from .. import channels
    from ..startup.start import init_master_worker, shutdown

    begun = time.monotonic()
    try:
        init_master_worker(nodes=2, launcher="local", threads=1, timeout=60)
    except Exception as e:
        yield CheckRow(
            "self-test", WRONG, f"two nodes did not start: {e}", "see the rows above, or send this to the authors"
        )
        return
    try:
        started = time.monotonic() - begun
        yield attempt("self-test", lambda: f"two nodes started in {started:.1f} s; {computed(torch)}")
        for name in dict.fromkeys(channel for _, _, channel in channels.available()):
            if name not in _NO_CARRIERS:
                yield channel(torch, name)
    finally:
        shutdown()


def computed(torch: Any) -> str:
    """Computes on both nodes what is computed here, and compares. Raises ArithmeticError where they differ."""
    torch.set_num_threads(1)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(241))
    here = (x @ x.t()).relu().sum(0)
    begun = time.monotonic()
    for node in ("node:0", "node:1"):
        there = x.to(node)
        if not torch.allclose((there @ there.t()).relu().sum(0).cpu(), here, rtol=1e-5):
            raise ArithmeticError(f"{node} has computed another result than this process")
    there = torch.ones((), device="node:0")
    trips = 20
    begun = time.monotonic()
    for _ in range(trips):
        there.item()
    return (
        f"both compute what is computed here; a value comes back in {(time.monotonic() - begun) / trips * 1e6:.0f} us"
    )


def channel(torch: Any, name: str) -> CheckRow:
    """Returns the row of a data channel, after it has carried a tensor from node to node."""
    from .. import channels

    entry = channels.available()["send", "cpu", name]
    if not entry and (cuda := channels.available()["send", "cuda", name]).why:
        return CheckRow(f"channel {name}", NONE, entry.why or cuda.why, "programs that do not ask for it need nothing")

    def carried() -> str:
        channels.select(["send", "upload", "download"], name)
        x = torch.arange(1 << 18, dtype=torch.float32)
        begun = time.monotonic()
        back = x.to("node:0").to("node:1").cpu()
        seconds = time.monotonic() - begun
        if not torch.equal(back, x):
            raise ArithmeticError("what came is not what was sent")
        return f"carried 1 MiB to node 0, to node 1 and back in {seconds * 1e3:.0f} ms"

    try:
        return attempt(f"channel {name}", carried)
    finally:
        channels.reset()


def attempt(name: str, tries: Callable[[], str]) -> CheckRow:
    """Returns the row of a function that says what it has found, or raises."""
    try:
        return CheckRow(name, OK, tries())
    except Exception as e:
        text = f"{type(e).__name__}: {e}".splitlines()[0]
        return CheckRow(name, WRONG, text, "send this, with the rows above, in a bug report")


if __name__ == "__main__":
    sys.exit(main())
