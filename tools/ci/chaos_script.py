"""The script that chaos.py torments: random work on proxies and the same on local tensors, compared bit for bit.

Its standard input brings orders (a fault that it does to itself, the number of a node that is about to be killed), the
descriptor that it is given takes its news; both are lines of JSON. An error that no fault of this session explains, a
loss of a node that nobody has harmed, and whatever a session leaves behind end it with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import disttensor as dt
from disttensor import testing
from disttensor.session import current

#: The variable that all processes of a run inherit.
MARK = "DISTTENSOR_CHAOS"
#: Seconds without a step after which the script hangs: all threads are printed, and it ends.
HANG = 60.0
#: Seconds for what ends with a session to be gone.
ENDING = 30.0
#: Tensors of a node, at most, and the shapes that they have: one that goes with a message, and one that does not.
POOL, SHAPES = 8, ((16, 16), (300, 300))
#: Steps between two comparisons of everything.
CHECKPOINT = 40


class Failed(Exception):
    """Something that must not happen has happened."""


class Dropped(Exception):
    """A step whose outcome is not known: what it has written is not compared any more."""


# ---- what is held ----------------------------------------------------------------------------------------------------


def descendants(mark: str) -> set[int]:
    """All processes but this one that have inherited the mark, and this one's children (those that have ended, too)."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found |= set(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    wanted = f"{MARK}={mark}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.add(int(name))
    return found - {os.getpid()}


def held() -> set[str]:
    """Descriptors, threads, processes and shared memory of this process, in words."""
    found = {f"process {pid}" for pid in descendants(os.environ[MARK])}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"descriptor {name} of {os.readlink(f'/proc/self/fd/{name}')}")
    # a thread that is none of Python's is a dummy for the rest of its life
    found |= {
        f"thread {t.name} ({t.ident})" for t in threading.enumerate() if not isinstance(t, threading._DummyThread)
    }
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:disttensor" in line or "/dev/shm/" in line:
            found.add(f"shared memory {line.split(maxsplit=5)[5]}")
    return found | {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "disttensor" in name}


def left_behind(before: set[str]) -> set[str]:
    """What is held now and was not before, once what is just ending has ended, or after ENDING seconds."""
    deadline = time.monotonic() + ENDING
    while True:
        gc.collect()
        # what this very look opens is gone at the second one
        left = (held() & held()) - before
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


# ---- users' functions ------------------------------------------------------------------------------------------------


def scale(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, int]:
    return (x * factor).tanh(), x.shape[0]


def raises() -> None:
    raise ZeroDivisionError("chaos")


class Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> Any:
        raise ValueError("no pickle")


def raises_unsayable() -> None:
    raise Unsayable


def raises_long() -> None:
    raise LookupError("x" * (20 << 20))


def exits() -> None:
    sys.exit(3)


def leaves() -> None:
    os._exit(3)


def crashes() -> None:
    ctypes.string_at(0)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def holds_gil() -> None:
    ctypes.PyDLL(None).usleep(1_500_000)


def has_child() -> int:
    return subprocess.Popen(["sleep", "3600"]).pid


# ---- the work --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Pair:
    """A tensor on a node, and what it has to be."""

    remote: torch.Tensor
    local: torch.Tensor
    node: int
    by: list[str]  #: the steps that have made and written it


class Session:
    """One session: its tensors, the faults that were done to it, and its losses."""

    def __init__(self, script: Script, nodes: int) -> None:
        self.script, self.rng = script, random.Random(script.rng.random())
        #: nodes that a fault ends, those whose end has come, those that were raised as lost, those whose data
        #: connection with the script was cut
        self.doomed: set[int] = set()
        self.gone: set[int] = set()
        self.lost: set[int] = set()
        self.cut: set[int] = set()
        #: errors that nothing has asked about, because Ctrl-C came first
        self.owed: set[type] = set()
        self.nodes = nodes
        self.alive = list(range(nodes))
        self.graphs: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        self.pids: dict[int, int] = {}
        self.pairs: list[Pair] = []
        self.written: list[Pair] = []  #: by the step that runs
        self.steps = 0
        self.doing = "begin"

    def begin(self) -> None:
        with self.script.around_nodes():
            dt.init_master_worker(nodes=self.nodes, threads=1)
        for node in self.alive:
            x = torch.zeros(16, 16, device=f"node:{node}")
            self._played(x).sum().item()  # what is asked at a first call is asked before it is recorded
            graph = dt.Graph()
            with dt.graph(graph):
                y = self._played(x)
            self.graphs.append((graph, x, y))
            self.fresh(node)
        for node in self.alive:  # connections are made, and operators told, before tensors are counted
            torch.ones(1 << 17).to(f"node:{node}").to(f"node:{(node + 1) % self.nodes}").cpu()
        gc.collect()
        self.pids = {node.rank: node.hello.pid for node in current.session().nodes}

    @staticmethod
    def _played(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.5 + 0.25).tanh() @ x

    # -- steps

    def add(self, remote: torch.Tensor, local: torch.Tensor, node: int) -> None:
        if sum(pair.node == node for pair in self.pairs) >= POOL:
            self.pairs.remove(self.pick(node))
        self.pairs.append(Pair(remote, local, node, [self.doing]))

    def fresh(self, node: int, shape: tuple[int, ...] = SHAPES[0]) -> Pair:
        number = self.rng.uniform(-1, 1)
        remote = torch.linspace(-1, 1, shape[0], device=f"node:{node}").mul(number).repeat(shape[1], 1)
        self.add(remote, torch.linspace(-1, 1, shape[0]).mul(number).repeat(shape[1], 1), node)
        return self.pairs[-1]

    def pick(self, node: int | None = None, like: Pair | None = None) -> Pair:
        """One of the pairs, if need be a new one."""
        found = [
            pair
            for pair in self.pairs
            if node in (None, pair.node) and (like is None or pair.local.shape == like.local.shape)
        ]
        if found:
            return self.rng.choice(found)
        node = self.rng.choice(self.alive) if node is None else node
        return self.fresh(node, SHAPES[0] if like is None else tuple(like.local.shape))

    def write(self, pair: Pair) -> torch.Tensor:
        """The remote tensor, which the step is about to write."""
        self.written.append(pair)
        pair.by.append(self.doing)
        return pair.remote

    def reachable(self) -> list[int]:
        """The nodes to and from which the script can copy."""
        return [node for node in self.alive if node not in self.cut]

    def step(self) -> None:
        rng, x = self.rng, self.pick()
        y = self.pick(x.node, x)
        number = rng.uniform(-1, 1)
        self.doing = rng.choice(self.script.steps)
        match self.doing:
            case "fresh":
                self.fresh(rng.choice(self.alive), rng.choice(SHAPES))
            case "upload":
                node = rng.choice(self.reachable())
                local = torch.rand(rng.choice(SHAPES), generator=torch.Generator().manual_seed(rng.getrandbits(30)))
                self.add(local.to(f"node:{node}"), local, node)
            case "random":
                seed = rng.getrandbits(30)
                generator = torch.Generator(device=f"node:{x.node}").manual_seed(seed)
                remote = torch.randn(16, 16, generator=generator, device=f"node:{x.node}")
                self.add(remote, torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)), x.node)
            case "unary":
                self.add((x.remote * number).sin(), (x.local * number).sin(), x.node)
            case "binary":
                self.add(x.remote * y.remote - number, x.local * y.local - number, x.node)
            case "matmul":
                self.add((x.remote @ y.remote).tanh(), (x.local @ y.local).tanh(), x.node)
            case "sort":
                self.add(x.remote.sort(dim=0).values, x.local.sort(dim=0).values, x.node)
            case "add_":
                self.write(x).add_(y.remote, alpha=number).tanh_()
                x.local.add_(y.local, alpha=number).tanh_()
            case "view_":
                row = rng.randrange(16)
                self.write(x)[row].mul_(number)
                x.local[row].mul_(number)
                x.remote.t()[row] = number
                x.local.t()[row] = number
            case "copy_":
                self.write(x).copy_(y.remote.clone())
                x.local.copy_(y.local)
            case "backward":
                w = x.remote.detach().clone().requires_grad_()
                (w * y.remote).sin().sum().backward()
                v = x.local.detach().clone().requires_grad_()
                (v * y.local).sin().sum().backward()
                assert w.grad is not None
                assert v.grad is not None
                self.add(w.grad, v.grad, x.node)
            case "move":
                node = rng.choice(self.alive)
                if node != x.node:
                    self.add(x.remote.to(f"node:{node}"), x.local.clone(), node)
            case "move_":
                z = self.pick(rng.choice(self.alive), x)
                self.write(z).copy_(x.remote)
                z.local.copy_(x.local.clone())
            case "all_reduce":
                self.all_reduce()
            case "broadcast":
                pairs = [self.pick(node, x) for node in self.alive]
                source = pairs[self.alive.index(x.node)]
                dt.broadcast([self.write(p) for p in pairs], src=x.node, group=self.group())
                for pair in pairs:
                    pair.local.copy_(source.local.clone())
            case "run":
                remote, count = dt.run(scale, x.remote, number, node=x.node)
                if count != x.local.shape[0]:
                    raise Failed(f"a function gave {count}, not {x.local.shape[0]}")
                self.add(remote, scale(x.local, number)[0], x.node)
            case "replay":
                graph, inputs, outputs = self.graphs[x.node]
                if x.local.shape == inputs.shape:
                    inputs.copy_(x.remote)
                    graph.replay()
                    self.add(outputs.clone(), self._played(x.local), x.node)
            case "fetch" if x.node not in self.cut:
                self.compare(dt.fetch(x.remote).result(), x, "fetch")
            case "item":
                self.same(x.remote[3, 5].item(), x.local[3, 5].item(), x, "item")
            case "drop":
                self.pairs.remove(x)
        self.steps += 1

    def group(self) -> Any:
        return dt.collectives.new_group(self.alive)

    def all_reduce(self) -> None:
        first = self.pick()
        pairs = [self.pick(node, first) for node in self.alive]
        if self.rng.random() < 0.5:
            # nothing says which of -0.0 and 0.0 is the greater one, nor which of them their sum is: no -0.0 goes in
            whole = torch.stack([pair.local + 0.0 for pair in pairs]).amax(0)
            dt.all_reduce([self.write(pair).add_(0.0) for pair in pairs], "MAX", group=self.group())
            for pair in pairs:
                pair.local.copy_(whole)
            return
        # sums of whole numbers, of which the order changes nothing
        remotes = [(pair.remote * 64).round() + 0.0 for pair in pairs]
        dt.all_reduce(remotes, group=self.group())
        whole = torch.stack([(pair.local * 64).round() + 0.0 for pair in pairs]).sum(0)
        for pair, remote in zip(pairs, remotes, strict=True):
            self.add(remote.sin(), whole.sin(), pair.node)

    # -- comparisons

    def same(self, got: float, wanted: float, pair: Pair, what: str) -> None:
        self.script.counts["comparisons"] += 1
        if got != wanted:
            raise Failed(f"WRONG NUMBER: {what} from node {pair.node} gave {got!r}, not {wanted!r}")

    def compare(self, got: torch.Tensor, pair: Pair, what: str) -> None:
        self.script.counts["comparisons"] += 1
        if got.shape == pair.local.shape and got.dtype == pair.local.dtype:
            differ = (got.view(torch.int32) != pair.local.view(torch.int32)).nonzero()
            if not len(differ):
                return
            at = tuple(differ[0].tolist())
            how = f"{len(differ)} elements differ, the first at {at}: {got[at].item()!r}, not {pair.local[at].item()!r}"
        else:
            how = f"{got.dtype} {tuple(got.shape)}, not {pair.local.dtype} {tuple(pair.local.shape)}"
        raise Failed(f"WRONG NUMBERS: {what} from node {pair.node}: {how}; it is of {', '.join(pair.by[-12:])}")

    def checkpoint(self) -> None:
        """Compares all pairs; one whose tensor is gone by a fault is dropped."""
        for pair in list(self.pairs):
            if pair in self.pairs and self.script.attempt(partial(self.compare_one, pair)) is not None:
                self.discard([pair])
        if not self.doomed and not self.cut:
            self.script.attempt(dt.synchronize)

    def compare_one(self, pair: Pair) -> None:
        remote = pair.remote
        if pair.node in self.cut:  # by another node
            others = self.reachable()
            if not others:
                raise Dropped
            remote = remote.to(f"node:{self.rng.choice(others)}")
        self.compare(remote.cpu(), pair, "a checkpoint")

    def discard(self, pairs: list[Pair]) -> None:
        self.pairs = [pair for pair in self.pairs if pair not in pairs]

    # -- losses

    def explained(self, error: BaseException) -> bool:
        """Whether a fault explains an error."""
        if isinstance(error, Failed):
            return False
        if isinstance(error, dt.NodeLost):
            return error.rank in self.doomed
        if isinstance(error, dt.errors.ChannelError):
            return bool(self.doomed or self.cut)
        if type(error) is dt.errors.RemoteError and "errors.BrokenError: " in str(error):  # a node has lost another
            return bool(self.doomed or self.cut)
        return type(error) in self.owed

    def lose(self, node: int) -> None:
        if node not in self.lost:
            self.lost.add(node)
            self.alive.remove(node)
            self.script.counts["losses"] += 1
            self.discard([pair for pair in self.pairs if pair.node == node])

    def await_losses(self) -> None:
        """A node that is gone has to be reported as lost: where it is not, this hangs."""
        for node in sorted(self.gone - self.lost):

            def ask(node: int = node) -> None:
                while True:
                    torch.ones(1, device=f"node:{node}").sum().item()

            while node not in self.lost:
                self.script.attempt(ask)

    def enough(self) -> bool:
        return len(self.reachable()) >= 2

    # -- faults that the script does to itself

    def expect(self, node: int, kinds: tuple[type[BaseException], ...], what: Callable[[], Any]) -> None:
        """``what`` has to raise one of these, or the loss of its node, if that is doomed."""
        self.owed |= set(kinds)
        try:
            what()
        except kinds as error:
            # the least kind is RuntimeError, of which all of disttensor's are
            if isinstance(error, dt.DisttensorError) and type(error) not in kinds:
                raise
            if isinstance(error, dt.NodeLost):
                if error.rank != node:
                    raise
                self.lose(node)
        else:
            raise Failed(f"no {' or '.join(kind.__name__ for kind in kinds)} was raised")
        self.owed -= set(kinds)  # not after Ctrl-C: then it is raised by something else, later

    def inflict(self, kind: str, node: int) -> None:
        on, rng = f"node:{node}", self.rng
        match kind:
            case "a mistake":
                x = self.pick(node).remote
                self.expect(node, (RuntimeError,), lambda: x + torch.zeros(7, 3, device=on))
            case "a command that fails":
                x = self.pick(node).remote
                bad = torch.full((3,), 10**6, device=on)
                failed = x.flatten()[bad]
                more = (failed * 2).sum()
                self.expect(node, (IndexError,), more.item)
            case "a huge allocation":
                self.expect(node, (RuntimeError,), lambda: torch.ones(1 << 46, device=on).sum().item())
            case "a function that raises":
                function, error = rng.choice(
                    [(raises, ZeroDivisionError), (raises_unsayable, dt.errors.RemoteError), (raises_long, LookupError)]
                )
                self.expect(node, (error,), lambda: dt.run(function, node=node))
            case "a function that calls sys.exit":
                self.expect(node, (dt.DisttensorError,), lambda: dt.run(exits, node=node))
            case "a function that holds the GIL":
                dt.run(holds_gil, node=node)
            case "a function that has a child":
                dt.run(has_child, node=node)
            case "a function that ends its node":
                self.doomed.add(node)
                function = rng.choice([leaves, crashes, is_killed])
                self.expect(node, (dt.NodeLost,), lambda: dt.run(function, node=node))
                self.gone.add(node)
            case "dt.kill":
                self.doomed.add(node)
                if rng.random() < 0.5:
                    testing.stop(node)
                dt.kill(node)
                self.gone.add(node)
            case "the control connection is cut":
                self.doomed.add(node)
                testing.cut(node)
                self.gone.add(node)
            case "the data connection is cut":
                self.cut.add(node)
                testing.cut(node, control=False, data=True)
            case "a fork":
                self.fork(node)
            case "proxies dropped in bulk":
                x = self.pick(node).remote
                for i in range(2000):
                    y = [x + float(i), x[i % 16]]
                    if i % 10 == 0:
                        y.append(y)  # type: ignore[arg-type]
                del y
                gc.collect()
            case "a full window":
                x = torch.zeros(3, device=on)
                testing.stop(node)
                threading.Timer(1.0, os.kill, (self.pids[node], signal.SIGCONT)).start()
                with testing.limits(window=3000):
                    for _ in range(8000):
                        x.add_(1.0)
                if node not in self.cut and x.tolist() != [8000.0] * 3:
                    raise Failed(f"WRONG NUMBERS: 8000 commands through a full window gave {x.tolist()}")
            case "eight threads":
                self.threads()
            case _:
                raise Failed(f"there is no fault {kind!r}")

    def fork(self, node: int) -> None:
        """The child's use of the session raises ForkError; its end frees nothing."""
        x = self.pick(node)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                x.remote.sum().item()
            except dt.errors.ForkError:
                code = 0
            finally:
                self.pairs.clear()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            raise Failed(f"a forked child that used the session ended with status {status}, not by ForkError")

    def threads(self) -> None:
        errors: list[BaseException] = []

        def work(number: int, node: int) -> None:
            try:
                x, y = torch.ones(5, device=f"node:{node}"), torch.ones(5)
                for i in range(200):
                    x, y = x * 0.75 + i, y * 0.75 + i
                    x[number % 5] = y[number % 5] = i
                if x.tolist() != y.tolist():
                    raise Failed(f"WRONG NUMBERS: thread {number} on node {node}")
            except BaseException as error:
                errors.append(error)

        choice = self.reachable() or self.alive
        started = [threading.Thread(target=work, args=(i, self.rng.choice(choice))) for i in range(8)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        for error in errors:
            raise error


STEPS = (
    *("fresh", "upload", "random", "unary", "binary", "matmul", "sort", "add_", "view_", "copy_", "backward"),
    *("move", "move_", "all_reduce", "broadcast", "run", "replay", "fetch", "item", "drop"),
)
#: Faults that must not be split by Ctrl-C: they would leave the test in doubt, not the product.
WHOLE = {
    *("a fork", "eight threads", "dt.kill", "the control connection is cut", "the data connection is cut"),
    "a full window",
}


class Script:
    """The process: sessions, one after the other, until it is told to end."""

    def __init__(self, seed: int, nodes: int, news: int, env: dict[str, str]) -> None:
        self.rng, self.nodes, self.news = random.Random(seed), nodes, news
        self.env = env  #: of nodes
        #: a GPU's numbers are not the CPU's
        self.steps = [step for step in STEPS if not env or step != "random"]
        self.counts: Counter[str] = Counter()
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.armed = self.over = False
        self.wrong: list[str] = []  #: what hooks have caught
        self.told = 0.0

    def around_nodes(self) -> contextlib.AbstractContextManager[Any]:
        """Has nodes that start meanwhile have the variables from the first moment: libraries are preloaded by them."""
        return mock.patch.dict(os.environ, self.env)

    def tell(self, **message: Any) -> None:
        with self.lock:
            os.write(self.news, json.dumps(message).encode() + b"\n")

    def progress(self) -> None:
        now = time.monotonic()
        if now - self.told > 0.25:
            self.told = now
            faulthandler.dump_traceback_later(HANG, exit=True)
            self.tell(at=self.counts["steps"])
        if self.wrong:
            raise Failed(self.wrong[0])

    # -- orders

    def listen(self) -> None:
        """Answers at once, whatever the script is at: the reader of a thread of its own."""
        for line in sys.stdin:
            order = json.loads(line)
            session = self.session
            if "doom" in order:
                node = order["doom"]
                ok = session is not None and node in session.alive
                if session is not None and ok:
                    session.doomed.add(node)
                self.tell(answer=ok)
            elif "gone" in order:
                if session is not None:
                    session.gone.add(order["gone"])
            else:
                self.orders.put(order)
        self.orders.put({"end": True})

    def interrupted(self, number: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            self.counts["interrupts"] += 1
            raise KeyboardInterrupt

    def attempt(self, what: Callable[[], Any], whole: bool = False) -> BaseException | None:
        """Does something that faults may break; gives the error that one explains, raises others."""
        session = self.session
        try:
            try:
                self.armed = not whole
                what()
            finally:
                self.armed = False
        except KeyboardInterrupt as error:
            return error.with_traceback(None)
        except Dropped as error:
            return error.with_traceback(None)
        except Exception as error:
            if session is None or not session.explained(error):
                raise
            if isinstance(error, dt.NodeLost):
                session.lose(error.rank)
            return error.with_traceback(None)
        finally:
            torch.set_grad_enabled(True)  # an exception in the __exit__ of torch.no_grad() leaves it off
            self.progress()
        return None

    # -- sessions

    def main(self) -> None:
        self.hooks()
        with self.around_nodes():
            session = dt.init_master_worker(nodes=2, threads=1)
        with session:  # what stays from a first session stays once
            xs = [torch.ones(1 << 17, device=f"node:{node}") for node in range(2)]
            dt.all_reduce(xs)
            xs[0].to("node:1").cpu()
            dt.fetch(xs[1]).add_done_callback(lambda work: None)
            xs = []
        gc.collect()
        threading.Thread(target=self.listen, daemon=True, name="orders").start()
        before = held()
        while not self.over:
            self.one_session()
            if left := left_behind(before):
                raise Failed("a session has left behind: " + "; ".join(sorted(left)))
            self.progress()
            self.counts["sessions"] += 1

    def hooks(self) -> None:
        signal.signal(signal.SIGINT, self.interrupted)

        def unraisable(what: Any) -> None:
            self.wrong.append(f"an unraisable exception: {what.exc_value!r} in {what.object!r}")
            traceback.print_exception(what.exc_value)

        def of_thread(what: Any) -> None:
            self.wrong.append(f"thread {what.thread} ended by {what.exc_value!r}")
            traceback.print_exception(what.exc_value)

        sys.unraisablehook, threading.excepthook = unraisable, of_thread

    def one_session(self) -> None:
        session = Session(self, self.nodes)
        if self.attempt(session.begin) is not None:  # Ctrl-C while it starts
            self.stop(session)
            return
        self.session = session
        self.tell(up={rank: pid for rank, pid in session.pids.items()})
        with contextlib.suppress(queue.Empty):  # orders to a session that is over
            while True:
                self.dispose(self.orders.get_nowait())
        while session.enough() and not self.over:
            with contextlib.suppress(queue.Empty):
                order = self.orders.get_nowait()
                if "do" in order:
                    self.inflict(session, order)
                else:
                    self.dispose(order)
            self.one_step(session)
            if session.steps % CHECKPOINT == 0:
                session.checkpoint()
            session.await_losses()
        self.tell(down=True)
        session.checkpoint()
        self.session = None
        self.stop(session)

    def dispose(self, order: dict[str, Any]) -> None:
        self.over = self.over or "end" in order
        if "do" in order:
            self.tell(done=False)

    def inflict(self, session: Session, order: dict[str, Any]) -> None:
        kind = order["do"]
        node = session.rng.choice(session.reachable() if "data connection" in kind else session.alive)
        self.attempt(lambda: session.inflict(kind, node), kind in WHOLE)
        self.tell(done=True)

    def one_step(self, session: Session) -> None:
        session.written = []
        if self.attempt(session.step) is not None:
            session.discard(session.written)  # it may have written them, or not
        self.counts["steps"] += 1

    def stop(self, session: Session) -> None:
        """Ends the session, with whatever errors of its faults nothing has asked about."""
        self.session = session
        if (running := current.current()) is not None:
            self.counts["commands"] += sum(node.outbox.sent for node in running.nodes)
        self.attempt(dt.shutdown, whole=True)
        if current.current() is not None:
            raise Failed("a session is there after its shutdown")
        session.pairs, session.written, session.graphs = [], [], []
        self.session = None


@contextlib.contextmanager
def reported(script: Script) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        script.tell(fail="".join(traceback.format_exception_only(error)).strip())
        sys.stderr.flush()
        os._exit(1)  # whatever hangs now would hide what was found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--news", type=int, required=True)
    parser.add_argument("--env", type=json.loads, default={}, help="of the nodes, as JSON")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    script = Script(options.seed, options.nodes, options.news, options.env)
    with reported(script):
        script.main()
    faulthandler.cancel_dump_traceback_later()
    script.tell(over=dict(script.counts))


if __name__ == "__main__":
    main()
