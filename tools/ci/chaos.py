"""python tools/ci/chaos.py [--seconds 600] [--seed N] [--every 2] [--nodes 3] [--only TEXT] [--simcuda DEVICES]

A script computes on nodes and compares all with local torch, bit for bit, while faults come: a random one every few
seconds. What they must not lead to is a failure: a wrong number, an error that no fault explains, a node lost that
nothing has harmed, a minute without progress, a message about an unraisable exception, and a process, thread,
descriptor or shared memory that is left behind. The seed decides which faults come in which order, to which nodes, and
what is computed; not at which moment. A failure prints it, with the latest faults.

The script is chaos_script.py. This process stops, kills and interrupts it, harms its nodes, and is the stranger.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil

#: The variable that all processes of a run inherit.
MARK = "DISTTENSOR_CHAOS"
#: Seconds without news after which the script hangs; it says so itself after 60, unless it can't.
SILENT = 90.0
#: Seconds for the first session, and for the end.
STARTING, ENDING = 120.0, 60.0
#: From so many seconds on each kind of fault has to have come.
ALL = 120.0

#: Faults that come from outside, and those that the script does to itself when it is told to.
OUTSIDE = (
    "a node is stopped for a while",
    "the script is stopped for a while",
    "a node is killed",
    "a stopped node is killed",
    "Ctrl-C",
    "strangers talk nonsense",
    "strangers in a flood",
)
INSIDE = (
    "a mistake",
    "a command that fails",
    "a huge allocation",
    "a function that raises",
    "a function that calls sys.exit",
    "a function that holds the GIL",
    "a function that has a child",
    "a function that ends its node",
    "dt.kill",
    "the control connection is cut",
    "the data connection is cut",
    "a fork",
    "proxies dropped in bulk",
    "a full window",
    "eight threads",
)
#: A kernel whose index is out of range ends what its process has of GPUs.
NOT_ON_GPUS = {"a command that fails"}

#: What a stranger says first: other protocols, halves of ours, a frame of a gigabyte.
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE" + bytes(47)
NONSENSE = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(64),
    GREETING[:11],
    GREETING,
    GREETING + b"\x04\xc8\x05HELLO" + bytes(194),
    GREETING + b"\x06" + (1 << 30).to_bytes(8, "big") + b"\x05HELLO",
    GREETING.replace(b"CURVE", b"NULL\0"),
    b"\x80\x04\x95cposix\nsystem\n(S'true'\ntR.",
)


class Failed(Exception):
    """A fault has led to what it must not lead to."""


class Chaos:
    """A run: the script, and the faults that come to it."""

    def __init__(
        self, seed: int, every: float, nodes: int, kinds: list[str], errors: IO[str], env: dict[str, str]
    ) -> None:
        self.kinds = kinds
        self.rng, self.every, self.nodes = random.Random(seed), every, nodes
        self.faults: Counter[str] = Counter()
        self.latest: deque[str] = deque(maxlen=12)
        self.deck: list[str] = []
        self.counts: dict[str, int] = {}
        self.later: list[tuple[float, int, Callable[[], None]]] = []  #: a heap, by time
        self.pids: dict[int, int] = {}  #: of nodes, while there is a session
        self.answers: deque[bool] = deque()
        self.pending = False  #: the script has not done yet what it was told to do
        self.over = False
        self.mark = secrets.token_hex(8)
        mine, its = os.pipe()
        self.news, self.unread = mine, b""
        self.began = self.heard = time.monotonic()
        command = [sys.executable, str(Path(__file__).with_name("chaos_script.py")), "--seed", str(seed)]
        command += ["--nodes", str(nodes), "--news", str(its), "--env", json.dumps(env)]
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"}
        self.script = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=errors, env=environment, pass_fds=[its], start_new_session=True
        )
        os.close(its)

    # -- the script

    def order(self, **order: Any) -> None:
        assert self.script.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its news say why
            self.script.stdin.write(json.dumps(order).encode() + b"\n")
            self.script.stdin.flush()

    def hear(self, seconds: float) -> None:
        """Takes in the script's news for so long, or until there are some; does what is due."""
        if self.later:
            seconds = min(seconds, self.later[0][0] - time.monotonic())
        if select.select([self.news], [], [], max(0.0, seconds))[0]:
            data = os.read(self.news, 1 << 16)
            if not data and not self.over:
                code = self.script.wait()
                raise Failed(
                    f"the script has ended with exit code {code}: it hung for a minute, or crashed (see above)"
                )
            *lines, self.unread = (self.unread + data).split(b"\n")
            for line in lines:
                self.heard = time.monotonic()
                self.take(json.loads(line))
        self.do_due()
        limit = SILENT if self.pids else STARTING
        if time.monotonic() - self.heard > limit:
            raise Failed(f"no news of the script for {limit:.0f} s")

    def do_due(self) -> None:
        while self.later and self.later[0][0] <= time.monotonic():
            heapq.heappop(self.later)[2]()

    def take(self, message: dict[str, Any]) -> None:
        if "fail" in message:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.script.wait(5)
            raise Failed(message["fail"])
        if "up" in message:
            self.pids = {int(rank): pid for rank, pid in message["up"].items()}
        elif "down" in message:
            self.pids = {}
        elif "answer" in message:
            self.answers.append(message["answer"])
        elif "done" in message:
            self.pending = False
        elif "over" in message:
            self.counts, self.over = message["over"], True

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.later, (time.monotonic() + seconds, len(self.later) + id(what), what))

    # -- faults

    def run(self, seconds: float) -> None:
        while not self.pids:
            self.hear(1.0)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            next_one = time.monotonic() + self.every
            self.fault()
            while (now := time.monotonic()) < next_one or not self.pids or self.pending:
                self.hear(max(0.05, next_one - now))
        while self.later:
            self.hear(1.0)
        self.order(end=True)
        while not self.over:
            self.hear(1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.script.wait(ENDING)
        if self.script.poll() != 0:
            raise Failed(f"the script's exit code is {self.script.poll()} (None: it does not end)")
        self.nothing_left()

    def fault(self) -> None:
        """The next of the shuffled kinds: each comes once before one comes again."""
        if not self.deck:
            self.deck = list(self.kinds)
            self.rng.shuffle(self.deck)
        kind = self.deck.pop()
        self.latest.append(f"{time.monotonic() - self.began:6.1f} s  {kind}")
        if kind in INSIDE:
            self.pending = True
            self.order(do=kind)
            self.faults[kind] += 1
        elif self.from_outside(kind):
            self.faults[kind] += 1
        else:
            self.deck.insert(0, kind)  # what it was meant for was gone: later, then

    def from_outside(self, kind: str) -> bool:
        rank = self.rng.choice(sorted(self.pids))
        seconds = self.rng.uniform(1, 3)
        match kind:
            case "a node is stopped for a while":
                return self.stop(self.pids[rank], seconds)
            case "the script is stopped for a while":
                return self.stop(self.script.pid, seconds)
            case "a node is killed" | "a stopped node is killed":
                try:
                    process = os.pidfd_open(self.pids[rank])
                except ProcessLookupError:
                    return False
                try:
                    self.order(doom=rank)
                    while not self.answers:
                        self.hear(1.0)
                    if not self.answers.popleft():
                        return False
                    with contextlib.suppress(ProcessLookupError):
                        if "stopped" in kind:
                            signal.pidfd_send_signal(process, signal.SIGSTOP)
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                    self.order(gone=rank)
                finally:
                    os.close(process)
            case "Ctrl-C":
                os.killpg(self.script.pid, signal.SIGINT)  # as a terminal does
            case "strangers talk nonsense":
                for port in self.ports():
                    for words in (*NONSENSE, self.rng.randbytes(3000)):
                        self.stranger(port, words, self.rng.choice([0.0, seconds]))
            case "strangers in a flood":
                for port in self.ports():
                    for _ in range(150):
                        self.stranger(port, b"", seconds)
        return True

    def stop(self, pid: int, seconds: float) -> bool:
        try:
            process = os.pidfd_open(pid)
            signal.pidfd_send_signal(process, signal.SIGSTOP)
        except ProcessLookupError:
            return False

        def resume() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGCONT)
            os.close(process)

        self.after(seconds, resume)
        return True

    def ports(self) -> list[tuple[str, int]]:
        """All TCP ports on which a process of the run listens."""
        found = set()
        for pid in self.processes():
            with contextlib.suppress(psutil.Error):
                for c in psutil.Process(pid).net_connections("tcp"):
                    if c.status == psutil.CONN_LISTEN:
                        found.add((c.laddr.ip, c.laddr.port))
        if not found:
            raise Failed("no process of the run listens on any port: there is nothing for strangers")
        return sorted(found)

    def stranger(self, address: tuple[str, int], words: bytes, seconds: float) -> None:
        """Connects, says this, and goes after so many seconds."""
        connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        connection.settimeout(0.2)  # where the script is stopped nobody takes it in, and others must not wait for it
        self.do_due()
        try:
            connection.connect(address)
            connection.sendall(words)
        except OSError:  # it is turned away, or what listened is gone
            connection.close()
        else:
            self.after(seconds, connection.close)

    # -- the end

    def processes(self) -> list[int]:
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    def nothing_left(self) -> None:
        deadline = time.monotonic() + ENDING
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            raise Failed(f"processes outlive the script: {left}")

    def end(self) -> None:
        """Ends whatever is left of the run."""
        if self.script.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.script.pid, signal.SIGCONT)
                os.kill(self.script.pid, signal.SIGABRT)  # prints all threads
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.script.wait(5)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.script.kill()
        self.script.wait()


def said(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()


def devices(count: int) -> dict[str, str]:
    """The environment of nodes that have so many simulated GPUs."""
    if not count:
        return {}
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kit"))
    from simcuda_kit import environment

    return {**environment(True, devices=count, delay_ms=1), "OMP_NUM_THREADS": "1"}


def check(chaos: Chaos, text: str, seconds: float) -> None:
    if "Exception ignored" in text:
        raise Failed("something was printed of an exception that nobody could be given (see above)")
    if not sum(chaos.faults.values()):
        raise Failed("no fault came")
    if not chaos.counts.get("comparisons") or not chaos.counts.get("commands"):
        raise Failed("nothing was computed, or compared")
    if seconds >= ALL and (never := [kind for kind in chaos.kinds if not chaos.faults[kind]]):
        raise Failed(f"never came: {', '.join(never)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="default: from the time")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two faults")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument(
        "--simcuda", type=int, default=0, help="how many simulated GPUs nodes have (docs/dev/simcuda.md)"
    )
    parser.add_argument("--only", action="append", help="faults whose names have this text; may come more than once")
    options = parser.parse_args()
    faults = [kind for kind in (*OUTSIDE, *INSIDE) if not options.simcuda or kind not in NOT_ON_GPUS]
    kinds = [kind for kind in faults if not options.only or any(text in kind for text in options.only)]
    if not kinds:
        parser.error(f"no fault is called so; there are: {', '.join(faults)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("chaos: ended by SIGTERM"))
    seed = time.time_ns() % 10**9 if options.seed is None else options.seed
    print(f"chaos: seed {seed}, {options.seconds:g} s, a fault every {options.every:g} s", flush=True)
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        chaos = Chaos(seed, options.every, options.nodes, kinds, errors, devices(options.simcuda))
        try:
            try:
                chaos.run(options.seconds)
            finally:
                chaos.end()
            check(chaos, said(errors), options.seconds)
        except Failed as failure:
            print("the script's errors end so:\n" + said(errors)[-8000:])
            print("the latest faults:\n  " + "\n  ".join(chaos.latest))
            sys.exit(f"chaos: FAILED with --seed {seed} --every {options.every:g}: {failure}")
    for kind, count in sorted(chaos.faults.items()):
        print(f"{count:6}  {kind}")
    print(f"{sum(chaos.faults.values()):6}  faults")
    for name in ("losses", "sessions", "interrupts", "steps", "commands", "comparisons"):
        print(f"{chaos.counts.get(name, 0):6}  {name}")


if __name__ == "__main__":
    main()
