"""``dt.all_reduce(values, fn)``: functions of the user's, nested values, and values that are missing."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch

import disttensor as dt
from disttensor import testing

N = 8


@pytest.fixture(scope="module")
def eight():
    with dt.init_master_worker(nodes=N, launcher="inproc", simulate_cuda=2) as session:
        yield session


@pytest.fixture(autouse=True)
def nothing_unsaid(eight):
    yield
    dt.synchronize()


def on_nodes(make, n=N):
    return [make(k).to(f"node:{k}") for k in range(n)]


def trees():
    return [None, *(dt.collectives.Way("tree", base) for base in (2, 3, 4, 8))]


# ---- what torch-ipc's tests print --------------------------------------------------------------------------------


@pytest.mark.row("I16")
@pytest.mark.parametrize("way", trees())
def test_numbers(way):
    sums, contributors = dt.all_reduce(list(range(1, 9)), lambda a, b: a + b, algorithm=way)
    assert sums == [36] * N
    assert contributors == N
    sums, _ = dt.all_reduce([[k, 2 * k] for k in range(1, 5)], lambda a, b: a + b, algorithm=way)
    assert sums == [[10, 20]] * 4


@pytest.mark.row("I16")
@pytest.mark.parametrize("way", trees())
def test_tensors(way):
    for add in (torch.add, lambda a, b: a.add_(b)):
        xs = on_nodes(lambda k: torch.full((10,), k + 1.0))
        sums, contributors = dt.all_reduce(xs, add, algorithm=way)
        assert [s.sum().item() for s in sums] == [360] * N
        assert [s.get_node() for s in sums] == list(range(N))
        assert [x[0].item() for x in xs] == list(range(1, 9)), "also a function that writes leaves them as they are"
        assert contributors == N
    sums, _ = dt.all_reduce(on_nodes(lambda k: torch.full((10,), k + 1.0), 2), torch.add, algorithm=way)
    assert [s.sum().item() for s in sums] == [30, 30]


def test_several_tensors():
    values = [[x, x - 1] for x in on_nodes(lambda k: torch.full((10,), k + 1.0))]
    sums, _ = dt.all_reduce(values, lambda a, b: a.add_(b))
    assert [[x.sum().item() for x in s] for s in sums] == [[360, 280]] * N


@pytest.mark.row("I16")
def test_uneven_numbers_of_steps():
    """Node k, from 1, has k steps. Those that are done take part with nothing, and see what the others do."""
    steps = [[k] * k for k in range(1, 5)]
    totals, contributors = [0] * 4, []
    for values in zip_longest(*steps):
        sums, n = dt.all_reduce(values, lambda a, b: a + b)
        contributors.append(n)
        totals = [t + s if v is not None else t for t, s, v in zip(totals, sums, values, strict=True)]
    assert totals == [10, 19, 26, 30]
    assert contributors == [4, 3, 2, 1]
    assert dt.all_reduce([None] * 4, torch.add) == ([None] * 4, 0)


# ---- against local computation -----------------------------------------------------------------------------------


def random(k, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k))


@pytest.mark.row("I16")
@pytest.mark.parametrize("way", trees())
@pytest.mark.parametrize("n", range(1, N + 1))
def test_neighbours_in_order(n, way):
    """A function that doesn't commute, and shapes that grow: rows of all, in order."""
    local = [random(k, k % 3, 2) for k in range(n)]
    rows, _ = dt.all_reduce(
        [x.to(f"node:{k}") for k, x in enumerate(local)], lambda a, b: torch.cat([a, b]), None, algorithm=way
    )
    assert all(torch.equal(row.cpu(), torch.cat(local)) for row in rows)
    words, _ = dt.all_reduce(list("abcdefgh"[:n]), lambda a, b: a + b, algorithm=way)
    assert words == ["abcdefgh"[:n]] * n


@pytest.mark.row("I16")
def test_nested_and_uneven():
    def local(k):
        return {"w": (random(k, 3), random(k + 10, 2, 2).double()), "n": [k, {"name": str(k)}], "empty": ()}

    def remote(k):
        return torch.utils._pytree.tree_map(lambda x: x.to(f"node:{k}") if torch.is_tensor(x) else x, local(k))

    there = [0, 3, 4, 6]
    values = [remote(k) if k in there else None for k in range(N)]
    sums, contributors = dt.all_reduce(values, lambda a, b: a + b)
    assert contributors == 4
    (first, second), number = (sum(local(k)["w"][i] for k in there) for i in range(2)), sum(there)
    for k, s in enumerate(sums):
        assert [x.get_node() for x in s["w"]] == [k, k]
        torch.testing.assert_close(s["w"][0].cpu(), first)
        torch.testing.assert_close(s["w"][1].cpu(), second)
        assert s["n"] == [number, {"name": "0346"}]
        assert s["empty"] == ()


def test_a_leaf_that_some_have_not():
    """As gradients of parameters that a batch didn't use."""
    xs = on_nodes(lambda k: torch.full((2,), float(k)), 4)
    sums, contributors = dt.all_reduce(
        [[xs[0], None], [xs[1], xs[1]], [None, None], [None, xs[3]]], torch.add, dt.collectives.new_group(range(4))
    )
    assert [[x.tolist() for x in s] for s in sums] == [[[1, 1], [4, 4]]] * 4
    assert [[x.get_node() for x in s] for s in sums] == [[k, k] for k in range(4)]
    assert contributors == 4


def test_values_that_are_joined_as_a_whole():
    """Mean and variance of samples on many nodes, by Chan's rule."""
    samples = [random(k, 5 + k) for k in range(N)]

    def join(a, b):
        (n, mean, m2), (m, other, more) = a, b
        delta = other - mean
        return n + m, mean + delta * m / (n + m), m2 + more + delta**2 * n * m / (n + m)

    values = [
        (len(x), x.mean(), ((x - x.mean()) ** 2).sum()) for x in (s.to(f"node:{k}") for k, s in enumerate(samples))
    ]
    results, _ = dt.all_reduce(values, join, is_leaf=lambda v: isinstance(v, tuple))
    every = torch.cat(samples)
    for n, mean, m2 in results:
        assert n == len(every)
        torch.testing.assert_close(mean.cpu(), every.mean())
        torch.testing.assert_close(m2.cpu() / n, every.var(correction=0))


def test_each_result_is_its_own():
    xs = on_nodes(lambda k: torch.ones(2), 2)
    for fn in (lambda a, b: a, lambda a, b: b, torch.maximum):
        for values in (xs, [xs[0], xs[0]], [xs[0]]):
            results, _ = dt.all_reduce(values, fn)
            for r in results:
                r.add_(1)
            assert [r.tolist() for r in results] == [[2, 2]] * len(values)
            assert [x.tolist() for x in xs] == [[1, 1]] * 2


def test_several_values_of_a_node_and_other_devices():
    xs = [torch.full((2,), float(k)).to(dt.device(k // 2, f"cuda:{k % 2}")) for k in range(4)]
    sums, _ = dt.all_reduce(xs, torch.add)
    assert [s.device for s in sums] == [x.device for x in xs]
    assert [s.tolist() for s in sums] == [[6, 6]] * 4


def test_the_function_stays_here_and_nothing_is_waited_for():
    xs = on_nodes(lambda k: torch.ones(3))
    dt.all_reduce(xs, torch.add)
    calls = []
    with testing.MessageLog() as log:
        dt.all_reduce(xs, lambda a, b: calls.append((a.get_node(), b.get_node())) or a + b)
    assert calls == [(0, 0), (2, 2), (4, 4), (6, 6), (0, 0), (4, 4), (0, 0)]
    assert log.questions == []
    assert log.reports == 0


def test_gradients():
    w = torch.ones(2, requires_grad=True)
    xs = [w.to(f"node:{k}") * (k + 1) for k in range(4)]
    products, _ = dt.all_reduce(xs, torch.mul)
    sum(p.sum().cpu() for p in products).backward()
    assert w.grad.tolist() == [4 * 4 * 24] * 2


def test_in_a_graph():
    xs = on_nodes(lambda k: torch.full((3,), float(k)))
    g = dt.Graph()
    with dt.graph(g):
        ys, _ = dt.all_reduce([x + 1 for x in xs], torch.maximum)
    for turn in range(3):
        g.replay()
        assert [y[0].item() for y in ys] == [8 + turn] * N
        xs[7].add_(1)


def test_mistakes_raise_here():
    xs = on_nodes(lambda k: torch.ones(3))
    add = torch.add
    cases = [
        (
            TypeError,
            "value 1 has to be a tensor on a node, not a local",
            lambda: dt.all_reduce([xs[0], torch.ones(3)], add),
        ),
        (
            ValueError,
            "value 2 is nested in another way than value 1",
            lambda: dt.all_reduce([None, [xs[0]], (xs[1],)], add),
        ),
        (ValueError, "value 1 has no tensor, so on which node", lambda: dt.all_reduce([xs[0], None], add)),
        (
            ValueError,
            "2 values for the 3 nodes",
            lambda: dt.all_reduce(xs[:2], add, dt.collectives.new_group([0, 1, 2])),
        ),
        (
            ValueError,
            "value 1 has a tensor on node 1, not on node 2",
            lambda: dt.all_reduce(xs[:2], add, dt.collectives.new_group([0, 2])),
        ),
        (TypeError, "what is a tensor in one value", lambda: dt.all_reduce([xs[0], 3], add)),
        (TypeError, "has to return a tensor where", lambda: dt.all_reduce(xs, lambda a, b: None)),
        (
            TypeError,
            "what the function returns has to be a tensor on a node",
            lambda: dt.all_reduce(xs, lambda a, b: a.cpu()),
        ),
        (ValueError, "a base of at least 2", lambda: dt.all_reduce(xs, add, algorithm="ring")),
        (TypeError, "takes no async_op", lambda: dt.all_reduce(xs, add, async_op=True)),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    with pytest.raises(ZeroDivisionError):
        dt.all_reduce([1, 0], lambda a, b: a / b)
    with pytest.raises(RuntimeError, match="must match the size"):
        dt.all_reduce([xs[0], torch.ones(2, device="node:1")], add)


def test_what_fails_on_a_node_names_its_line():
    xs = on_nodes(lambda k: torch.tensor([k, 9]), 2)
    results, _ = dt.all_reduce(xs, lambda a, b: a[b])
    with pytest.raises(IndexError, match=r"test_custom_reductions\.py"):
        results[1].cpu()


def test_what_torch_has_not_runs_on_the_node():
    def merged(a, b):
        import numpy

        return torch.from_numpy(numpy.union1d(a.numpy(), b.numpy()))

    xs = [torch.tensor([k, 10 * k, 7]).to(f"node:{k}") for k in range(4)]
    unions, _ = dt.all_reduce(xs, lambda a, b: dt.run(merged, a, b, node=a.get_node()))
    assert [u.tolist() for u in unions] == [[0, 1, 2, 3, 7, 10, 20, 30]] * 4
