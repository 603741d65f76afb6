"""Objects between nodes, and functions that run on several nodes at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from equal import same

import disttensor as dt

N = 4


@pytest.fixture(scope="module")
def four():
    with dt.init_master_worker(nodes=N, launcher="inproc", simulate_cuda=2) as session:
        yield session


@pytest.fixture(autouse=True)
def nothing_unsaid(four):
    yield
    dt.synchronize()


def thing(k: int) -> dict[str, Any]:
    x = torch.arange(3.0) + k
    return {"k": k, "tied": [x, x], "deep": ({"y": x.double()[:, None], "text": str(k)}, None)}


def where(value: Any) -> set[torch.device]:
    return {x.device for x in torch.utils._pytree.tree_leaves(value) if torch.is_tensor(x)}


def on_nodes() -> list[Any]:
    return [dt.run(thing, k, node=k) for k in range(N)]


@pytest.mark.row("I8")
def test_broadcast() -> None:
    for obj in (thing(2), on_nodes()[2]):
        copies = dt.collectives.broadcast_object(obj)
        for k, copy in enumerate(copies):
            same(copy, thing(2))
            assert (copy["tied"][0] is copy["tied"][1]) == (obj["tied"][0] is obj["tied"][1])
            assert {x.get_node() for x in copy["tied"]} == {k}
        copies[0]["tied"][0].add_(1)
        same(copies[1], thing(2))
        same(
            [copy["tied"][1] for copy in dt.collectives.broadcast_object(obj, dt.collectives.new_group([3, 0]))],
            [thing(2)["tied"][1]] * 2,
        )
    at = dt.device(1, "cuda:1")
    assert [where(c) for c in dt.collectives.broadcast_object([torch.ones(1, device=at)])] == [
        {dt.device(k, "cuda:1")} for k in range(N)
    ]


def test_scatter_gather_and_all_gather() -> None:
    local = [thing(k) for k in range(N)]
    for objs in (local, on_nodes(), [dt.run(thing, k, node=3 - k) for k in range(N)]):
        spread = dt.collectives.scatter_object(objs)
        same(spread, local)
        assert [x["tied"][0].get_node() for x in spread] == list(range(N))
        there = dt.collectives.gather_object(spread, 2)
        same(there, local)
        assert {x["tied"][0].get_node() for x in there} == {2}
        there[2]["tied"][0].add_(1)
        same(spread, local)
    rows = dt.collectives.all_gather_object(on_nodes())
    same(rows, [local] * N)
    assert [{x["tied"][0].get_node() for x in row} for row in rows] == [{0}, {1}, {2}, {3}]
    same(dt.collectives.all_gather_object(["a", "b"], dt.collectives.new_group([1, 2])), [["a", "b"]] * 2)


def test_gradients() -> None:
    w = torch.ones(2, requires_grad=True)
    copies = dt.collectives.broadcast_object({"w": w})
    for k, copy in enumerate(copies):
        (copy["w"] * k).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [6, 6]


def test_a_function_on_all_nodes() -> None:
    def work(x: Any, k: int, *, name: str = "?") -> Any:
        return threading.current_thread().name, name, x.sum(), k

    xs = [torch.full((2,), float(k), device=f"node:{k}") for k in range(N)]
    for nodes in (dt.collectives.new_group(), range(N)):
        results = dt.run(
            work, dt.tasks.Each(xs), dt.tasks.Each("abcd"), name=dt.tasks.Each(["p", "q", "r", "s"]), node=nodes
        )
        same(results, [(f"node {k}", "pqrs"[k], torch.tensor(2.0 * k), "abcd"[k]) for k in range(N)])
        assert [r[2].get_node() for r in results] == list(range(N))
    same(dt.run(work, torch.ones(3), 7, node=[2, 1]), [(f"node {k}", "?", torch.tensor(3.0), 7) for k in (2, 1)])


def test_it_runs_on_all_at_once() -> None:
    """Each waits for the others, which one after the other would never end."""
    meeting = threading.Barrier(N)
    Rendezvous.it = meeting
    assert dt.run(meet, node=range(N)) == [True] * N


class Rendezvous:
    it: threading.Barrier


def meet() -> bool:
    from test_objects import Rendezvous  # nodes are threads here

    return Rendezvous.it.wait(20) >= 0


def test_all_end_and_the_first_failure_is_raised() -> None:
    def fail(k: int) -> Any:
        if k % 2:
            raise LookupError(f"no {k}")
        return torch.ones(k)

    with pytest.raises(LookupError, match="no 1") as told:
        dt.run(fail, dt.tasks.Each(range(N)), node=range(N))
    assert any("LookupError: no 3" in note for note in told.value.__notes__)
    same(dt.run(fail, dt.tasks.Each([0, 2]), node=[0, 2]), [torch.ones(0), torch.ones(2)])
    bad = torch.ones(3, device="node:1")[torch.tensor([9], device="node:1")]
    with pytest.raises(IndexError):
        dt.run(lambda x: x, bad, node=[1])


def test_mistakes_raise_here() -> None:
    with pytest.raises(ValueError, match="one object per node: 2 for the 4"):
        dt.collectives.scatter_object([1, 2])
    with pytest.raises(ValueError, match="Each has 2 values for the 4 nodes"):
        dt.run(print, dt.tasks.Each([1, 2]), node=range(N))
    with pytest.raises(ValueError, match="node 9 does not exist"):
        dt.run(print, node=[0, 9])
    with pytest.raises(ValueError, match="node 9 does not exist"):
        dt.collectives.gather_object([torch.ones(1)], 9)
