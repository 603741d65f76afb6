"""Processes of a session that are killed at any moment: with commands under way, at its start, in a replay, at its end.

The moments are those of a seed, which the test's name tells.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator

import leaks
import pytest
import torch
import warm
from aftermath import Clock, aftermath, children, probe, within
from fuzzing import SEEDS
from limits import HANG
from processes import alive_after

import disttensor as dt

#: The first fixed seed, and the first that is the commit's.
TWO = [seed for name in ("seed", "commit-seed") for seed in [s for n, s in SEEDS.items() if n.startswith(name)][:1]]

#: Commands that are under way to a node while it is killed.
MANY = 1000


class Asker(threading.Thread):
    """A thread that counts on a node, and asks it for the count each time."""

    def __init__(self, node: int) -> None:
        super().__init__()
        self.count = torch.zeros(1, dtype=torch.int64, device=f"node:{node}")
        self.answers: list[int] = []
        self.asks = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while True:
                self.count += 1
                self.asks.set()
                self.answers.append(int(self.count.item()))
        except BaseException as e:
            self.error = e.with_traceback(None)
        del self.count


@pytest.mark.fault(2)
@pytest.mark.parametrize(
    ("seed", "kills"),
    [*((s, 4) for s in TWO), pytest.param(200, 200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_a_node_that_is_killed_with_commands_under_way(seed: int, kills: int) -> None:
    rng, left = random.Random(seed), kills
    while left > 0:
        with dt.init_master_worker(nodes=1 + min(left, 8), threads=1):
            for node in range(1, 1 + min(left, 8)):
                with aftermath(0):
                    one_that_is_killed(node, at=rng.randrange(MANY))
        left -= 8


def one_that_is_killed(node: int, at: int) -> None:
    pid = int(dt.nodes()[node]["pid"])
    askers = [Asker(node) for _ in range(3)]
    for asker in askers:
        assert asker.asks.wait(HANG)
    x = torch.zeros(1, dtype=torch.int64, device=f"node:{node}")
    with contextlib.suppress(dt.NodeLost):  # it may be noticed while the rest is issued
        for number in range(MANY):
            if number == at:
                clock = Clock()
                os.kill(pid, signal.SIGKILL)
            x += 1
    with pytest.raises(dt.NodeLost, match=rf"node {node} \(host \S+, pid {pid}\) is lost: killed by SIGKILL"):
        x.item()
    for asker in askers:
        asker.join(HANG)
        assert isinstance(asker.error, dt.NodeLost), asker.error
        assert asker.answers == list(range(1, len(asker.answers) + 1))
    clock.check(1.0, f"the loss of node {node}")


# ---- while it starts, and while it ends ------------------------------------------------------------------------------


def killed(pid: int) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        os.kill(pid, signal.SIGKILL)


def ours() -> set[int]:
    """What this process has started, and that has; without what stands ready to become the next program."""
    return children(os.getpid(), but=warm.held()[0])


class Killer(threading.Thread):
    """Kills one of the processes that this one starts, so many seconds after the first of them is there."""

    def __init__(self, rng: random.Random, after: float) -> None:
        super().__init__()
        self.before = ours()
        self.after, self.choose = after, rng.random()
        self.given_up = threading.Event()
        self.victim = 0
        self.start()

    def there(self) -> list[int]:
        """The processes that were started since."""
        return sorted(ours() - self.before)

    def run(self) -> None:
        while not self.there() and not self.given_up.wait(0.001):
            pass
        self.given_up.wait(self.after)
        if there := self.there():
            self.victim = there[int(self.choose * len(there))]
            killed(self.victim)

    def end(self) -> None:
        """Has it kill now, if it has not yet, and waits for that."""
        self.given_up.set()
        self.join()


def check_named(error: dt.DisttensorError) -> None:
    """It says who was killed, and how."""
    assert re.search(r"node \d|fork server", str(error)), error
    assert "SIGKILL" in str(error), error


def one_session() -> tuple[float, float]:
    """The seconds that it takes to begin one and to end it."""
    begun = time.monotonic()
    dt.init_master_worker(nodes=2, threads=1)
    there = time.monotonic()
    dt.shutdown()
    return there - begun, time.monotonic() - there


@pytest.mark.parametrize("seed", TWO)
def test_a_kill_while_the_session_starts(seed: int) -> None:
    """Whichever process it is, and whenever: an error that names it, or a session that loses nodes as any other."""
    rng = random.Random(seed)
    starts, _ = one_session()
    before = leaks.Held.now(descriptors=True)
    for _ in range(4):
        killer = Killer(rng, rng.random() * starts)
        try:
            with dt.init_master_worker(nodes=2, threads=1, timeout=HANG):
                pids = [int(node["pid"]) for node in dt.nodes()]
                killer.end()
                while killer.victim in pids or alive_after(0, pids) != pids:
                    for node in range(2):
                        probe(node)
        except (dt.errors.StartError, dt.NodeLost) as e:
            check_named(e)
        finally:
            killer.end()
        leaks.check(before, "a session that lost a process at its start")
    with dt.init_master_worker(nodes=2, threads=1):
        probe(1)


@pytest.mark.parametrize("seed", TWO)
def test_a_kill_while_the_session_ends(seed: int) -> None:
    rng = random.Random(seed)
    _, ends = one_session()
    before = leaks.Held.now(descriptors=True)
    for _ in range(4):
        known = ours()
        dt.init_master_worker(nodes=2, threads=1)
        for node in range(2):
            probe(node)
        victim = rng.choice(sorted(ours() - known))
        timer = threading.Timer(rng.random() * ends, killed, [victim])
        timer.start()
        try:
            dt.shutdown()
        except dt.NodeLost as e:
            check_named(e)
        finally:
            timer.join()
        leaks.check(before, "a session that lost a process at its end")


# ---- in a replay -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=5, threads=1):
        yield


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("seed", TWO)
def test_a_kill_while_a_graph_is_replayed(seed: int) -> None:
    """Graphs of other nodes go on, from where they are."""
    rng = random.Random(seed)
    a = torch.zeros(3, dtype=torch.int64, device="node:0")
    mine = dt.Graph()
    with dt.graph(mine):
        a.add_(1)
    for node in range(1, 5):
        with aftermath(0):
            lost_in_a_replay(node, rng.randrange(200), a)
        count = int(a[0].item())
        for _ in range(10):
            mine.replay()
        assert a.tolist() == [count + 10] * 3


def lost_in_a_replay(node: int, at: int, a: torch.Tensor) -> None:
    pid = int(dt.nodes()[node]["pid"])
    b = torch.zeros(3, dtype=torch.int64, device=f"node:{node}")
    both = dt.Graph()
    with dt.graph(both):
        b.add_(1)
        back = (b + a.to(f"node:{node}")).to("node:0")
    replays = 0

    def replay() -> None:
        nonlocal replays
        while True:
            if replays == at:
                os.kill(pid, signal.SIGKILL)
            both.replay()
            replays += 1
            if replays % 50 == 0:
                b.tolist()

    with within(10.0), pytest.raises(dt.NodeLost, match=rf"node {node} \(host \S+, pid {pid}\) is lost: .*SIGKILL"):
        replay()
    with pytest.raises(dt.NodeLost):
        both.replay()
    with contextlib.suppress(dt.DisttensorError):  # what it was sent by the lost node last, or not
        back.sum().item()
    with contextlib.suppress(dt.DisttensorError):
        dt.synchronize(0)
