"""Slows one node of a real mesh down, and looks whether it is named: `slow_rank.py --cause quota --runs 20`.

Each run is a job of its own, of which chance picks the node. `--cause none` slows nobody down, beside a load that is
the same for all nodes, and nobody may be named in half a minute. `quota` needs a control group that this user may make;
`tbf` root, unshare and tc, as it limits what leaves the node's connections, on the loopback of a network namespace.

The last line says how many runs were as they should be; the exit code is 1 where one was not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

CAUSES = ("none", "quota", "nice", "tbf", "stalls")
#: Seconds of a job before a node is slowed down; within which it is named; for which nobody may be, with `none`.
WARM, NAMED, QUIET = 10.0, 15.0, 30.0
#: What a slow node is named with.
WORDS = {
    "quota": "throttled by its cgroup",
    "nice": "without a core",
    "tbf": "its transfers are slower",
    "stalls": "stalls of",
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cause", choices=CAUSES, required=True)
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--nodes", type=int, default=8)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.one:
        print(json.dumps(run(args.cause, args.nodes, random.Random(args.seed).randrange(args.nodes))))
        return 0
    good = 0
    for seed in range(args.seed, args.seed + args.runs):
        own = [sys.executable, __file__, "--one", f"--cause={args.cause}", f"--nodes={args.nodes}", f"--seed={seed}"]
        prefix = ["unshare", "--net"] if args.cause == "tbf" else []
        done = subprocess.run([*prefix, *own], stdout=subprocess.PIPE, text=True)
        said = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"good": False}
        good += said["good"]
        print(f"seed {seed}: {'good' if said['good'] else 'BAD'} {said}", flush=True)
    print(f"{args.cause}: {good} of {args.runs} runs as they should be")
    return int(good < args.runs)


def run(cause: str, nodes: int, slow: int) -> dict[str, object]:
    """Runs a job; returns what was said of it."""
    if cause == "tbf":
        link = subprocess.run(["ip", "link", "show", "lo"], capture_output=True, text=True, check=True).stdout
        if "state DOWN" not in link:  # as that of a new namespace is
            sys.exit("this is not a network namespace of the trial's own, whose loopback may be slowed down")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    import torch

    import disttensor as dt

    named: list[tuple[float, str]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " behind its mesh: " in record.getMessage():
                named.append((time.monotonic(), record.getMessage()))

    logging.getLogger("disttensor").addHandler(Listener())
    backend = "tcp" if cause == "tbf" else "auto"
    with dt.init_master_worker(backend, nodes=nodes, threads=1), contextlib.ExitStack() as harm:
        mesh = dt.mesh(dp=nodes)
        pids = [node.pid for node in dt.seeing.status(timeout=5).nodes]
        size = 32 if cause == "tbf" else 512
        weight = torch.randn(size, size, device=mesh.device)
        grad = torch.randn((1 << 19) if cause == "tbf" else 1000, device=mesh.device)
        if cause in ("none", "nice"):
            harm.enter_context(load(2))
        early: list[str] = []
        begun, began, half = False, time.monotonic(), (0.0, 0.0)
        last = began + WARM + (QUIET if cause == "none" else NAMED)
        while time.monotonic() < last and not (begun and named):
            x = weight
            for _ in range(8):
                x = torch.mm(x, weight).mul_(0.03)
            grad = dt.all_reduce(grad, "avg", over="dp")
            dt.all_reduce(x.sum(), "avg", over="dp").item()
            if not half[0] and time.monotonic() > began + WARM / 2:
                half = time.monotonic(), used(pids[slow])
            if cause != "none" and not begun and time.monotonic() > began + WARM:
                begun, early = True, [text for _, text in named]
                named.clear()
                share = (used(pids[slow]) - half[1]) / (time.monotonic() - half[0])
                harm.enter_context(HARMS[cause](pids[slow], share))
                began = time.monotonic()
    found: dict[str, object] = {"slow": slow, "named": [text for _, text in named]}
    if cause == "none":
        return {"good": not named, **found}
    text = named[0][1] if named else ""
    is_right = text.startswith(f"node {slow} ") and WORDS[cause] in text
    has_line = Path(__file__).name in text
    seconds = round(named[0][0] - began, 1) if named else None
    return {"good": is_right and has_line and not early, "seconds": seconds, "early": early, **found}


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """Has so many processes take all that they are given of the cores."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in burning:
            each.kill()
            each.wait()


def used(pid: int) -> float:
    """Returns for how many seconds a process has run on cores."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def quota(pid: int, share: float) -> Iterator[None]:
    """Has a control group give the node half of the cores that it has used until now."""
    from disttensor.runtime.host.control_groups import find_group

    group = find_group("cpu")
    assert group is not None, "there is no control group of cores in sight"
    folder = group.folder / f"slow-{os.getpid()}"
    folder.mkdir()
    try:
        most = max(1000, round(100_000 * share / 2))
        if group.v2:
            (folder / "cpu.max").write_text(f"{most} 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text(str(most))
        (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):
            (group.folder / "cgroup.procs").write_text(str(pid))
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                folder.rmdir()
            time.sleep(0.03)


@contextlib.contextmanager
def nice(pid: int, share: float) -> Iterator[None]:
    """Has the node come last for a core, beside processes that take all they are given."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
    yield


@contextlib.contextmanager
def stalls(pid: int, share: float) -> Iterator[None]:
    """Stops the node for 50 ms again and again."""
    ended = threading.Event()

    def stop() -> None:
        while not ended.wait(0.05):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def tbf(pid: int, share: float) -> Iterator[None]:
    """Limits what leaves the node's connections to 16 Mbit/s."""

    def tc(words: str) -> None:
        subprocess.run(["tc", *words.split()], check=True)

    tc("qdisc add dev lo root handle 1: htb default 1")
    for flow in (1, 3):
        tc(f"class add dev lo parent 1: classid 1:{flow} htb rate 10gbit burst 1mb")
    tc("qdisc add dev lo parent 1:3 handle 30: tbf rate 20mbit burst 128kb latency 100ms")
    for port in ports(pid):
        tc(f"filter add dev lo parent 1: protocol ip prio 1 u32 match ip sport {port} 0xffff flowid 1:3")
    yield


def ports(pid: int) -> set[int]:
    """Returns the local ports of a process's connections."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[9] in inodes}


HARMS: dict[str, Callable[[int, float], contextlib.AbstractContextManager[None]]] = {
    "quota": quota, "nice": nice, "tbf": tbf, "stalls": stalls,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
