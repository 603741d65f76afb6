"""``torch.Generator(device="node:1")``: what it draws on a CPU node is what a local one draws from the same seed."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equal import same
from torch.utils.data import DataLoader, TensorDataset, random_split

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("processes")

#: Each draws twice from ``g``; ``on`` says where.
DRAWS: dict[str, Callable[[torch.Generator, dict[str, Any]], Any]] = {
    "randn": lambda g, on: torch.randn(3, 20, generator=g, **on),
    "rand": lambda g, on: torch.rand(3, generator=g, **on),
    "randint": lambda g, on: torch.randint(0, 9, (4,), generator=g, **on),
    "randperm": lambda g, on: torch.randperm(9, generator=g, **on),
    "normal": lambda g, on: torch.normal(0.0, 2.0, (3,), generator=g, **on),
    "normal of tensors": lambda g, on: torch.normal(torch.ones(3, **on), torch.ones(3, **on), generator=g),
    "rand_like": lambda g, on: torch.rand_like(torch.ones(3, **on), generator=g),
    "bernoulli": lambda g, on: torch.bernoulli(torch.full((9,), 0.5, **on), generator=g),
    "poisson": lambda g, on: torch.poisson(torch.ones(9, **on), generator=g),
    "multinomial": lambda g, on: torch.multinomial(torch.ones(9, **on), 3, generator=g),
    "multinomial again": lambda g, on: torch.multinomial(torch.ones(9, **on), 12, True, generator=g),
    "bernoulli_": lambda g, on: torch.ones(9, **on).bernoulli_(0.3, generator=g),
    "normal_": lambda g, on: torch.ones(9, **on).normal_(generator=g),
    "uniform_": lambda g, on: torch.ones(9, **on).uniform_(-1, 1, generator=g),
    "exponential_": lambda g, on: torch.ones(9, **on).exponential_(generator=g),
    "geometric_": lambda g, on: torch.ones(9, **on).geometric_(0.2, generator=g),
    "cauchy_": lambda g, on: torch.ones(9, **on).cauchy_(generator=g),
    "log_normal_": lambda g, on: torch.ones(9, **on).log_normal_(generator=g),
    "random_": lambda g, on: torch.ones(9, **on).random_(5, generator=g),
    "init": lambda g, on: torch.nn.init.kaiming_uniform_(torch.ones(3, 4, **on), generator=g),
    "truncated": lambda g, on: torch.nn.init.trunc_normal_(torch.ones(3, 4, **on), generator=g),
}


@pytest.mark.row("M10")
@pytest.mark.parametrize("name", DRAWS)
def test_draws(name: str) -> None:
    results = []
    for where in ("node:1", "cpu"):
        g = torch.Generator(device=where).manual_seed(5)
        results.append([DRAWS[name](g, {"device": where}) for _ in range(2)])
    same(*results)
    assert not torch.equal(*results[1])


@pytest.mark.row("M10")
def test_states() -> None:
    results = []
    for where in ("node:1", "cpu"):
        on: dict[str, Any] = {"device": where}
        g = torch.Generator(**on)
        given: list[Any] = [g.initial_seed(), torch.rand(2, generator=g, **on), g.manual_seed(-3) is g]
        given += [g.initial_seed(), torch.rand(2, generator=g, **on)]
        state = g.get_state()
        assert not isinstance(state, dt.DistributedTensor)
        given += [state.tolist(), torch.rand(2, generator=g, **on)]
        copies = [g.clone_state(), copy.deepcopy(g), pickle.loads(pickle.dumps(g))]
        assert all(c.device == g.device == torch.device(where) for c in copies)
        given += [torch.rand(2, generator=c, **on) for c in copies]
        given += [g.set_state(state) is g, g.initial_seed(), torch.rand(2, generator=g, **on)]
        seed = g.seed()
        assert seed == g.initial_seed()
        assert (
            torch.rand(2, generator=g, **on).tolist()
            == torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist()
        )
        results.append(given)
    same(*results)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_state_that_is_set_goes_with_the_command(kind: str) -> None:
    """By a data channel it could be lost on its way, and what is drawn next would be drawn from another state."""
    state = torch.Generator().manual_seed(7).get_state()
    expected = torch.rand(4, generator=torch.Generator().manual_seed(7))
    with contextlib.ExitStack() as taken:
        if kind == "cuda":
            taken.enter_context(testing.as_cuda("node:1"))
        g = torch.Generator("node:1")
        with testing.MessageLog() as log:
            g.set_state(state)
            drawn = torch.rand(4, device="node:1", generator=g)
        others = [name for name in log.commands if "aten::" not in name and name != "Free"]  # of garbage from before
        assert others == ["Keep", "Random", "Keep", "Keep"]
        same(drawn, expected)
        g.set_state(state)
        g.get_state().zero_()  # a copy, as local generators give
        assert torch.equal(g.get_state(), state)


def test_the_default_one_knows_nothing_of_it() -> None:
    g = torch.Generator("node:1")
    torch.manual_seed(3)
    expected = torch.rand(4, device="node:1").tolist()
    torch.manual_seed(3)
    halves = [torch.rand(2, device="node:1")]
    torch.rand(2, device="node:1", generator=g)
    with pytest.raises(RuntimeError, match="expects"):
        torch.ones(2, device="node:1").normal_(0, -1, generator=g)
    assert torch.cat([*halves, torch.rand(2, device="node:1")]).tolist() == expected


def test_data_loader() -> None:
    results = []
    for where in ("node:1", "cpu"):
        with torch.device(where):
            g = torch.Generator(device=where).manual_seed(1)
            loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4, shuffle=True, generator=g)
            batches = [batch.tolist() for _ in range(2) for (batch,) in loader]
            results.append((batches, list(random_split(range(9), [4, 5], generator=g)[1])))  # type: ignore[arg-type]
    assert results[0] == results[1]


def test_class() -> None:
    ours, local = torch.Generator(device="node:1"), torch.Generator()
    assert isinstance(ours, torch.Generator)
    assert isinstance(local, torch.Generator)
    assert issubclass(type(ours), torch.Generator)
    assert type(local) is type(torch.default_generator)
    assert not isinstance(3, torch.Generator)
    with dt.node(1):
        assert torch.Generator("node").device == torch.device("node:1")

    class Own(torch.Generator):
        pass

    assert type(Own()) is Own
    assert not isinstance(local, Own)


@pytest.mark.parametrize("where", ["node:1", "cpu"])
def test_elsewhere(where: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"expected a generator on node 0 cpu but .* torch.Generator\(device='node:0'\)"
    ):
        torch.rand(2, device="node:0", generator=torch.Generator(device=where))


def test_graphs_refuse() -> None:
    g = torch.Generator("node:1")
    with pytest.raises(dt.errors.GraphError, match="each replay would draw the same"), dt.graph(dt.Graph()):
        torch.rand(2, device="node:1", generator=g)
