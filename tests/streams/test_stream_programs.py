"""Random programs over streams of two nodes: the same values as when everything is done one after the other, here.

Out-of-place operations may run on any stream at any time. Each stream has a tensor that it alone writes, in place and
without events. Any other write is between events that order it with all streams of its node.

Some operations fail. What depends on them is poisoned there, and NaN here, which spreads in the same way.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import disttensor as dt
from disttensor import testing

NAMES = (
    *("new", "binary", "view", "write", "own", "own_add", "snapshot", "move", "drop", "value", "sort", "mask"),
    *("function", "event", "burst", "query", "fail", "fail_write", "replay"),
)
number = st.integers(0, 11)
STEPS = st.tuples(st.sampled_from(NAMES), number, number, number)
Step = tuple[str, int, int, int]


@pytest.fixture(params=["inproc", "local"], scope="module")
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    # of nodes in this process: the default stream changes between threads all the time
    with testing.limits(lately=4), dt.init_master_worker(nodes=2, launcher=request.param, threads=1):
        for node in range(2):  # connections are made at first use
            torch.ones(1 << 20).to(f"node:{node}").cpu()
        yield


class Here:
    """Does a program here, one step after the other."""

    def __init__(self) -> None:
        self.pool: list[torch.Tensor] = [torch.arange(4.0), torch.arange(4.0) - 2]
        self.nodes = [0, 1]
        self.own = [torch.zeros(4) for _ in range(6)]
        self.values: list[object] = []
        self.fed = [torch.zeros(4), torch.zeros(4)]  #: what graphs read, one of each node
        self.kept = [torch.zeros(4), torch.zeros(4)]  #: what they write

    def replay(self, node: int) -> torch.Tensor:
        self.kept[node].mul_(0.5).add_(self.fed[node])
        return self.kept[node] * 2

    def all(self) -> list[torch.Tensor]:
        return [*self.pool, *self.own, *self.fed, *self.kept]

    def on(self, k: int, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where stream ``k`` can use it."""
        return tensor

    def new(self, k: int, c: float) -> torch.Tensor:
        return torch.full((4,), c)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def order(self, k: int, node: int) -> None: ...

    def event(self, k: int, j: int) -> None: ...

    def fail(self, x: torch.Tensor) -> torch.Tensor:
        return x * math.nan

    def fail_write(self, x: torch.Tensor) -> None:
        x.fill_(math.nan)

    def value(self, ask: Callable[[], object], x: torch.Tensor) -> object:
        return "failed" if x.isnan().any() else ask()

    def step(self, step: Step) -> None:
        name, i, j, k = step
        k %= 6
        at = i % len(self.pool)
        x, y = self.pool[at], self.pool[j % len(self.pool)]
        made: torch.Tensor | None = None
        match name:
            case "new":
                made = self.new(k, j / 4)
            case "binary":
                made = self.on(k, x) * 0.5 + self.on(k, y)
            case "view":
                made, k = x.flip(0) if j % 2 else x.view(2, 2).view(4), self.nodes[at] * 3 + k % 3
            case "write":
                k = self.nodes[at] * 3 + k % 3
                self.order(k, self.nodes[at])
                x.mul_(0.5).add_(j)
                self.order(k, self.nodes[at])
            case "own":
                self.own[k].mul_(0.5).add_(j)
            case "own_add":
                self.own[k].add_(self.on(k, x))
            case "burst":
                for n in range(20):
                    self.own[k].mul_(0.75).add_(n)
            case "snapshot":
                made = self.own[k].clone()
            case "move":
                made = self.on(k, x)
                made = made + 1
            case "drop":
                if len(self.pool) > 1:
                    self.pool.pop(at)
                    self.nodes.pop(at)
            case "value":
                self.values.append(self.value(lambda: self.on(k, x).sum().item(), x))
            case "sort":
                made = self.on(k, x).sort(descending=bool(j % 2))[0]
            case "mask":
                z = self.on(k, x)
                self.values.append(self.value(lambda: z[z > j / 2].tolist(), x))
            case "function":
                z = self.on(k, x)
                self.values.append(self.value(lambda: self.run(z).tolist(), x))
            case "fail":
                made = self.fail(self.on(k, x))
            case "fail_write":
                k = self.nodes[at] * 3 + k % 3
                self.order(k, self.nodes[at])
                self.fail_write(x)
                self.order(k, self.nodes[at])
            case "event":
                self.event(k, j % 6)
            case "replay":
                self.fed[k // 3].fill_(j)
                made = self.replay(k // 3) + 0
            case "query":
                self.event(k, k)
        if made is not None:
            self.pool.append(made)
            self.nodes.append(k // 3)


class There(Here):
    """The same on streams 0 to 2 of node 0 and 3 to 5 of node 1; the first of each is the default one."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = [dt.Stream(n) if i else dt.streams.default_stream(n) for n in range(2) for i in range(3)]
        self.pool = [x.to(f"node:{n}") for x, n in zip(self.pool, self.nodes, strict=True)]
        self.own = [x.to(f"node:{k // 3}") for k, x in enumerate(self.own)]
        self.fed = [x.to(f"node:{n}") for n, x in enumerate(self.fed)]
        self.kept = [x.to(f"node:{n}") for n, x in enumerate(self.kept)]
        self.outputs: list[torch.Tensor] = []
        self.graphs = [dt.Graph(), dt.Graph()]
        for node, graph in enumerate(self.graphs):
            with dt.graph(graph):
                self.outputs.append(super().replay(node))

    def replay(self, node: int) -> torch.Tensor:
        self.graphs[node].replay()
        return self.outputs[node]

    def on(self, k: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(f"node:{k // 3}")

    def new(self, k: int, c: float) -> torch.Tensor:
        return torch.full((4,), c, device=f"node:{k // 3}")

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return dt.run(lambda t: t * 2, x, node=x.get_node())  # type: ignore[attr-defined, no-any-return]

    def order(self, k: int, node: int) -> None:
        for other in range(node * 3, node * 3 + 3):
            if other != k:
                self.streams[k].wait_stream(self.streams[other])
                self.streams[other].wait_stream(self.streams[k])

    def fail(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(0, torch.full((4,), 9, device=x.device))

    def fail_write(self, x: torch.Tensor) -> None:
        x.index_fill_(0, torch.full((1,), 9, device=x.device), 1)

    def value(self, ask: Callable[[], object], x: torch.Tensor) -> object:
        try:
            return ask()
        except (RuntimeError, IndexError) as e:
            return "failed" if "out of" in str(e) else e

    def event(self, k: int, j: int) -> None:
        if k == j:
            self.streams[k].query()
        else:
            self.streams[j].wait_event(self.streams[k].record_event())

    def step(self, step: Step) -> None:
        name, i, _, k = step
        k %= 6
        if name in ("view", "write", "fail_write"):
            k = self.nodes[i % len(self.pool)] * 3 + k % 3
        with dt.stream(self.streams[k]):
            super().step(step)


def check(program: list[Step]) -> None:
    keep = torch.ones(1, device="node:0")
    gc.collect()  # tracebacks of the errors of the program before
    dt.synchronize()
    before = testing.usage(keep)
    here, there = Here(), There()
    for step in program:
        here.step(step)
        there.step(step)
    assert there.values == here.values
    assert there.nodes == here.nodes
    for mine, theirs in zip(here.all(), there.all(), strict=True):
        assert there.value(theirs.tolist, theirs) == here.value(mine.tolist, mine)
    del there, theirs
    gc.collect()
    with contextlib.suppress(RuntimeError, IndexError):  # what nothing has asked about
        dt.synchronize()
    dt.synchronize()
    assert testing.usage(keep) == before, "something is left on the node"


ordinary = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.row("M15")
@pytest.mark.usefixtures("session")
@settings(ordinary, max_examples=4)
@example([(name, i, i * 5 % 12, i * 7 % 12) for i, name in enumerate([*NAMES, *reversed(NAMES), *NAMES])])
@given(st.lists(STEPS, max_size=30))
def test_random_programs_over_streams(program: list[Step]) -> None:
    check(program)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("session")
@settings(ordinary, max_examples=80, derandomize=False, print_blob=True)
@given(st.lists(STEPS, min_size=20, max_size=120))
def test_many_random_programs_over_streams(program: list[Step]) -> None:
    check(program)
