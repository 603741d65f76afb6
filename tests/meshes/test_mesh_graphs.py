"""Graphs of operations on meshes, their shards, slices and nodes: a replay does what eager does, to the bit."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import bits
from mesh_kit import connected
from torch import nn
from variants import variants

import disttensor as dt
from disttensor import testing
from disttensor.collectives import all_reduce_
from disttensor.meshes import Mesh, from_shards

pytestmark = pytest.mark.usefixtures("settled")

NODES = 3


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        everything()
        part()
        yield


def everything() -> Mesh:
    return dt.mesh(dp=NODES)


def part() -> Mesh:
    return dt.mesh(part=2, nodes=[2, 1])


def values(x: torch.Tensor) -> list[torch.Tensor]:
    """The values of a tensor on each of its nodes."""
    return [shard.detach().cpu() for shard in (shards(x) or [x])]


def shards(x: Any) -> list[torch.Tensor]:
    """The shards of a tensor on a mesh; of one on a node none."""
    return x.shards() if x.device in (everything().device, part().device) else []


def recorded(step: Callable[[], Any], engine: str = "interpreter") -> tuple[dt.Graph, Any]:
    g = dt.Graph()
    with dt.graph(g, engine=engine):
        result = step()
    return g, result


def commands(log: testing.MessageLog) -> list[list[str]]:
    return [log[rank].commands for rank in range(NODES)]


# ---- a training step -------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 4))


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("along", [(), ("dp",)])
def test_a_data_parallel_step_is_one_replay(kind: str, along: tuple[str, ...]) -> None:
    """With dropout, collectives, a schedule of the learning rate, and other draws on the nodes in between."""
    m = everything()
    torch.manual_seed(1)
    data = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(5 * NODES)]

    def train(replay: bool) -> list[torch.Tensor]:
        model = network().to(m.device)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        x, y = torch.zeros(6, 8, device=m.device), torch.zeros(6, dtype=torch.int64, device=m.device)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            with dt.meshes.varying(*along):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            for p in model.parameters():
                all_reduce_(p.grad, "avg", over="dp")  # type: ignore[arg-type]
            optimizer.step()
            return loss.detach()

        torch.manual_seed(2)
        losses: list[torch.Tensor] = []
        g, loss = dt.Graph(), torch.empty(0)
        for i in range(5):
            batch = data[i * NODES : (i + 1) * NODES]
            x.copy_(from_shards(m, [x for x, _ in batch]))
            y.copy_(from_shards(m, [y for _, y in batch]))
            if replay and i == 1:
                g, loss = recorded(step)
            if replay and i:
                dt.synchronize()
                with testing.MessageLog() as log:
                    g.replay()
                assert commands(log) == [[*before, "Replay"] for before in [["Swap"] if i > 1 else []] * NODES]
            else:
                loss = step()
            losses += values(loss)
            torch.rand(3, device="node:1")  # another place draws
            F.dropout(torch.ones(3, device=part().device))
            schedule.step()
        return [*losses, *(v for t in model.state_dict().values() for v in values(t))]

    for got, wanted in zip(train(True), train(False), strict=True):
        assert bits(got) == bits(wanted)


# ---- meshes, slices, nodes and shards together -----------------------------------------------------------------------


class Pool:
    """Tensors of one shape at different places, on which a program of chance runs."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        local = [torch.randn(3, 4) for _ in range(2 * NODES)]
        self.tensors: list[torch.Tensor] = [
            from_shards(everything(), local[:NODES]),
            from_shards(part(), local[NODES : NODES + 2]),
            *(t.to(f"node:{rank}") for rank, t in enumerate(local[NODES:])),
        ]

    def values(self) -> list[torch.Tensor]:
        return [v for t in self.tensors for v in values(t)]


#: What a step does with a tensor, and what becomes another one.
STEPS: list[Callable[[torch.Tensor, random.Random], Any]] = [
    lambda t, chance: t * chance.choice([0.5, 2.0]),
    lambda t, chance: t.sin_().add_(0.25),
    lambda t, chance: t.t().contiguous().view(3, 4),
    lambda t, chance: t[1:].mul_(0.5),
    lambda t, chance: F.dropout(t, 0.4),
    lambda t, chance: chance.choice(shards(t) or [t + 1]),
    lambda t, chance: chance.choice(shards(t) or [t]).add_(1),
    lambda t, chance: (
        dt.all_reduce(t, "avg", over="dp" if t.device == everything().device else "part")
        if shards(t)
        else t.to(everything().device)
    ),
    lambda t, chance: t.copy_(torch.arange(12.0).view(3, 4)),
    lambda t, chance: torch.cat([t, t])[2:5].clone(),
]


def run(pool: Pool, program: int, length: int = 30) -> None:
    chance = random.Random(program)
    for _ in range(length):
        tensors = pool.tensors
        made = chance.choice(STEPS)(chance.choice(tensors), chance)
        if isinstance(made, torch.Tensor) and made.shape == (3, 4):
            tensors.append(made)
        if len(tensors) > 12:
            tensors.pop(chance.randrange(NODES + 2, len(tensors)))


@pytest.mark.parametrize("program", variants(range(12)))
def test_programs_of_chance(program: int) -> None:
    outcomes = []
    for replay in (False, True):
        run(Pool(), program)  # first calls ask
        pool = Pool()
        base = len(pool.tensors)
        torch.manual_seed(4)
        seen: list[torch.Tensor] = []
        g = recorded(lambda pool=pool: run(pool, program))[0] if replay else dt.Graph()
        for _ in range(3):
            if replay:
                g.replay()
            else:
                del pool.tensors[base:]
                run(pool, program)
            seen += pool.values()
        outcomes.append(seen)
        del g, pool
    for got, wanted in zip(*outcomes, strict=True):
        assert bits(got) == bits(wanted)


def test_a_graph_and_its_tensors_go() -> None:
    def held() -> list[int]:
        gc.collect()
        return [torch.node.memory_allocated(f"node:{rank}") for rank in range(NODES)]  # type: ignore[attr-defined]

    m = everything()
    before = held()
    x = torch.ones(100, device=m.device)
    first, rest = x.at(dp=0), part()  # type: ignore[attr-defined]
    y = torch.ones(100, device=rest.device)

    def program(first: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [first + 1, y * 2, x + 1, torch.arange(100.0).to(m.device)]

    program(first, x, y)
    g, results = recorded(partial(program, first, x, y))
    del x, first, y
    try:
        for _ in range(2):
            g.replay()
            assert [v.tolist()[0] for r in results for v in values(r)] == [2.0] * 6 + [0.0] * 3
        del results
        g.replay()
        g.reset()
        assert held() == before
    finally:
        with contextlib.suppress(Exception):
            dt.synchronize()


def test_meshes_that_are_made_after_a_recording_do_not_matter_to_it() -> None:
    """The union of the graph's nodes is the first such mesh."""
    x, y = torch.ones(3, device=part().device), torch.ones(3, device="node:0")

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, y + 1

    program(x, y)
    g, (a, b) = recorded(partial(program, x, y))
    late = dt.mesh(late=2, nodes=[1, 0])
    z = torch.ones(3, device=late.device)
    g.replay()
    assert [v.tolist() for v in (*values(a), b.cpu())] == [[2.0] * 3] * 3
    del a, b
    g.reset()
    del g, x, y
    gc.collect()
    assert (z + 1).tolist() == [2.0] * 3


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_places_take_turns_in_a_graph() -> None:
    m, node = everything(), "node:1"

    def step() -> list[torch.Tensor]:
        return [
            torch.rand(4, device=node), torch.rand(4, device=m.device), torch.rand(4, device=part().device),
            torch.rand(4, device=node), torch.rand(4, device=m.device),
        ]  # fmt: skip

    def varying() -> list[torch.Tensor]:
        with dt.meshes.varying("dp"):
            made = torch.rand(4, device=m.device)
        return [made, *step(), F.dropout(made)]

    def seeding() -> list[torch.Tensor]:
        made = [torch.rand(4, device=m.device)]
        torch.manual_seed(9)
        return [*made, *step()]

    for program in (step, varying, seeding):
        program()
        eager: list[torch.Tensor] = []
        for replay in (False, True):
            g, results = recorded(program) if replay else (dt.Graph(), [])
            torch.manual_seed(6)
            seen = []
            for _ in range(3):
                if replay:
                    g.replay()
                else:
                    results = program()
                seen += [v for r in results for v in values(r)]
                seen += [v for d in (m.device, node, "node:2") for v in values(torch.rand(2, device=d))]
            if replay:
                for got, wanted in zip(seen, eager, strict=True):
                    assert bits(got) == bits(wanted)
            eager = seen


# ---- graphed functions, engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
def test_graphed_takes_and_gives_tensors_on_meshes(verify: bool) -> None:
    m = everything()

    @dt.graphed(verify=verify)
    def step(x: Any, y: Any, factor: float) -> Any:
        total = dt.all_reduce(x * factor, over="dp")
        return total, total.at(dp=1), x.at(dp=2), y + total.at(dp=0), y  # type: ignore[attr-defined]

    for call in range(4):
        mine = [torch.randn(3) for _ in range(NODES)]
        x, y = from_shards(m, mine), torch.full((3,), float(call), device="node:0")
        total, one, given, summed, same_y = step(x, y, call + 1.0)
        wanted = sum(mine[1:], mine[0]) * (call + 1.0)
        for got in [*values(total), one.cpu(), summed.cpu() - call]:
            torch.testing.assert_close(got, wanted)
        assert (one.device, given.device, summed.device) == tuple(torch.device(f"node:{k}") for k in (1, 2, 0))
        assert bits(given.cpu()) == bits(mine[2])
        assert bits(same_y.cpu()) == bits(torch.full((3,), float(call)))


def test_verifying_leaves_what_a_collective_writes_through_a_view_as_eager_does() -> None:
    total = torch.ones(4, device=everything().device)

    @dt.graphed(verify=True)
    def step() -> torch.Tensor:
        return all_reduce_(total.split([1, 2, 1])[1], over="dp").sum()

    for call in range(4):
        assert step().item() == 2 * NODES ** (call + 1)
    assert total.tolist() == [1.0, NODES**4, NODES**4, 1.0]


def test_an_engine_is_asked_on_each_node() -> None:
    x = torch.ones(3, device=everything().device)
    (x * 2 + 1).sin()
    g, y = recorded(lambda: (x * 2 + 1).sin(), "auto")
    g.replay()
    assert set(g.engines()) == set(range(NODES))
    for got in values(y):
        torch.testing.assert_close(got, torch.tensor([3.0] * 3).sin())


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_an_error_of_one_rank_names_the_line_that_recorded_it() -> None:
    m = everything()
    index = from_shards(m, [torch.tensor([0]), torch.tensor([0]), torch.tensor([0])])
    x = torch.arange(3.0, device=m.device)
    x[index]
    g, got = recorded(lambda: x[index])  # the line
    g.replay()
    assert got.tolist() == [0.0]
    index.at(dp=1).fill_(7)  # type: ignore[attr-defined]
    g.replay()
    with pytest.raises(IndexError) as raised:
        got.tolist()
    notes = "\n".join(raised.value.__notes__)
    assert "(dp=1)" in notes
    assert "recorded:" in notes
    assert "in test_an_error_of_one_rank_names_the_line_that_recorded_it" in notes
    assert got.at(dp=0).tolist() == [0.0]  # type: ignore[attr-defined]
    index.zero_()
    g.replay()
    assert got.tolist() == [0.0]


def test_a_new_mesh_waits_and_so_is_made_before() -> None:
    with pytest.raises(dt.errors.GraphError, match="a new mesh has to wait"), dt.graph(dt.Graph()):
        dt.mesh(never=NODES)
    assert torch.ones(2, device=everything().device).sum().item() == 2
