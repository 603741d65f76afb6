"""Collectives with several tensors per node, and into one tensor per node."""

from __future__ import annotations

import pytest
import torch

import disttensor as dt
from disttensor import testing
from disttensor.collectives import functional as F

N = 4
#: Which places take part, in order: (node, CUDA device or -1).
LAYOUTS = [
    [(node, device) for node in range(N) for device in range(2)],
    [(node, -1) for node in range(N) for _ in range(3)],
    [(2, 0), (0, -1), (2, 1), (0, 0), (3, -1)],
    [(1, 0), (1, 1), (1, -1)],
]


@pytest.fixture(scope="module")
def four():
    with dt.init_master_worker(nodes=N, launcher="inproc", simulate_cuda=2) as session:
        yield session


@pytest.fixture(autouse=True)
def nothing_unsaid(four):
    yield
    dt.synchronize()


def random(k, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k))


def at(layout, make):
    """(local tensors, the same at the places)"""
    local = [make(k) for k in range(len(layout))]
    return local, [x.to(dt.device(*place)) for x, place in zip(local, layout, strict=True)]


def end(work, async_op):
    assert (work is not None) == async_op
    if work is not None:
        assert work.wait()


@pytest.mark.row("G13")
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_if_there_were_one_node_for_each(layout, async_op):
    n = len(layout)
    local, xs = at(layout, lambda k: random(k, 3, 5))
    places = [x.device for x in xs]
    outs = [torch.empty_like(x) for x in xs]
    end(dt.all_reduce(xs, out=outs, async_op=async_op), async_op)
    for x, y, out in zip(xs, local, outs, strict=True):
        torch.testing.assert_close(out.cpu(), sum(local))
        assert torch.equal(out.cpu(), outs[0].cpu())
        assert torch.equal(x.cpu(), y)
    end(dt.all_reduce(outs, "AVG", async_op=async_op), async_op)
    for out in outs:
        torch.testing.assert_close(out.cpu(), sum(local))
    end(dt.all_reduce(outs, dt.collectives.ReduceOp.MAX, algorithm="tree", async_op=async_op), async_op)

    node = layout[1][0]
    first = next(i for i, place in enumerate(layout) if place[0] == node)
    for op, whole in (("SUM", sum(local)), ("AVG", sum(local) / n), ("MIN", torch.stack(local).amin(0))):
        ys = [x.clone() for x in xs]
        end(dt.collectives.reduce(ys, node, op, async_op=async_op), async_op)
        torch.testing.assert_close(ys[first].cpu(), whole)
        assert all(torch.equal(y.cpu(), x) for i, (y, x) in enumerate(zip(ys, local, strict=True)) if i != first)
    end(dt.broadcast(ys, node, async_op=async_op), async_op)
    assert all(torch.equal(y.cpu(), ys[first].cpu()) for y in ys)

    local, xs = at(layout, lambda k: random(k, k, 2))  # of different lengths, also none
    lists = [[torch.empty(other.shape, device=x.device) for other in local] for x in xs]
    end(dt.all_gather(lists, xs, async_op=async_op), async_op)
    assert all(torch.equal(out.cpu(), x) for outs in lists for out, x in zip(outs, local, strict=True))
    assert [x.device for x in xs] == places


@pytest.mark.row("G13")
def test_sixteen_devices_as_in_torch_distributeds_tutorial():
    layout = [(node, device) for node in range(N) for device in (-1, 0, 1, -1)]
    _, xs = at(layout, lambda k: torch.ones(2))
    dt.all_reduce(xs)
    assert [x.tolist() for x in xs] == [[16, 16]] * 16


@pytest.mark.parametrize("op", list(dt.collectives.ReduceOp))
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64])
def test_every_op_as_with_one_each(op, dtype):
    make = lambda k: (random(k, 7).abs() * 5).to(dtype)  # noqa: E731
    _, each = at([(k, -1) for k in range(N)], make)
    _, pairs = at([(0, -1), (0, 0), (1, -1), (1, 0)], make)
    try:
        dt.all_reduce(each, op, algorithm="tree")
    except TypeError:
        with pytest.raises(TypeError):
            dt.all_reduce(pairs, op)
        return
    dt.all_reduce(pairs, op)
    for one, other in zip(each, pairs, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu())


def test_strides_transport_and_what_is_large():
    _, bases = at(LAYOUTS[0], lambda k: torch.full((4, 6), float(k)))
    dt.all_reduce([base.t()[::2] for base in bases])
    for k, base in enumerate(bases):
        assert base[:, ::2].eq(28).all()
        assert base[:, 1::2].eq(k).all()
    local, xs = at(LAYOUTS[2], lambda k: random(k, 3_000_001))
    dt.all_reduce(xs, transport=torch.bfloat16)
    assert all(torch.equal(x.cpu(), xs[0].cpu().bfloat16().float()) for x in xs)
    torch.testing.assert_close(xs[0].cpu(), sum(local), atol=0.1, rtol=0.1)


def test_gradients():
    w = torch.ones(2, requires_grad=True)
    xs = [w.to(dt.device(*place)) * k for k, place in enumerate(LAYOUTS[0])]
    sums = F.all_reduce(xs)
    sum(s.sum().cpu() for s in sums).backward()
    assert w.grad.tolist() == [8 * 28] * 2


def test_in_a_graph():
    _, xs = at(LAYOUTS[0], lambda k: torch.full((3,), float(k)))
    g = dt.Graph()
    with dt.graph(g):
        ys = [x * 2 for x in xs]
        dt.all_reduce(ys, "AVG")
    for turn in range(3):
        g.replay()
        assert [y[0].item() for y in ys] == [7 + 2 * turn] * 8
        for x in xs:
            x.add_(1)


@pytest.mark.parametrize("async_op", [False, True])
def test_poison_reaches_all(async_op):
    for what in (
        dt.all_reduce,
        lambda xs, **o: dt.all_gather([[torch.empty_like(x) for _ in xs] for x in xs], xs, **o),
    ):
        _, xs = at(LAYOUTS[2], lambda k: torch.ones(3))
        xs[2] = torch.ones(3, device=xs[2].device)[torch.tensor([9, 9, 9], device=xs[2].device)]
        work = what(xs, async_op=async_op)
        if async_op:
            with pytest.raises(IndexError):
                work.wait()
        else:
            with pytest.raises(IndexError):
                dt.synchronize()
    dt.all_reduce(at(LAYOUTS[2], lambda k: torch.ones(3))[1])


def test_mistakes_raise_here():
    _, xs = at(LAYOUTS[1], lambda k: torch.ones(3))
    cases = [
        (ValueError, "there twice", lambda: dt.all_reduce([xs[0], xs[1], xs[0]])),
        (
            ValueError,
            r"tensors are on nodes \[0, 1, 2, 3\]",
            lambda: dt.all_reduce(xs, group=dt.collectives.new_group([0, 1])),
        ),
        (ValueError, "takes one tensor per node", lambda: dt.collectives.sendreceive(xs)),
        (ValueError, "out: tensors on nodes", lambda: dt.all_reduce(xs, out=xs[::-1])),
        (ValueError, "one list per tensor: 2 lists for 12", lambda: dt.all_gather([xs, xs], xs)),
        (
            ValueError,
            "has no algorithm 'native'|no all_reduce of its own",
            lambda: dt.all_reduce(xs, algorithm="native"),
        ),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()


# ---- into one tensor per node ----------------------------------------------------------------------------------------


@pytest.mark.row("T13")
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("device", [-1, 1])
def test_outs_grow(device, async_op):
    """Of different lengths, in the order of the nodes; what is too small grows, as in TorchMPI."""
    local, xs = at([(k, device) for k in (2, 0, 3)], lambda k: random(k, 2 * k, 3))
    whole = torch.cat(local)
    outs = [
        torch.empty(0, device=xs[0].device),
        torch.empty(whole.shape, device=xs[1].device),
        torch.full((50, 50), 7.0, device=xs[2].device),
    ]
    work = dt.collectives.all_gather_into_tensor(outs, xs, async_op=async_op)
    end(work, async_op)
    assert work is None or work.result() is outs
    for out, x in zip(outs, xs, strict=True):
        assert torch.equal(out.cpu(), whole)
        assert out.device == x.device
    turned = [torch.zeros(3, len(whole), device=x.device).t() for x in xs]
    end(dt.collectives.all_gather_into_tensor(turned, xs, async_op=async_op), async_op)
    assert all(torch.equal(out.cpu(), whole) for out in turned)


def test_nothing_is_asked_for_when_outs_grow():
    _, xs = at([(k, -1) for k in range(N)], lambda k: torch.ones(k))
    outs = [torch.empty(0, device=x.device) for x in xs]
    dt.collectives.all_gather_into_tensor(outs, xs)
    with testing.MessageLog() as log:
        outs = [torch.empty(0, device=x.device) for x in xs]
        dt.collectives.all_gather_into_tensor(outs, xs)
    assert [out.shape for out in outs] == [(6,)] * N
    assert log.questions == []
    assert log.reports == 0


def test_mistakes_of_it_raise_here():
    _, xs = at([(k, -1) for k in range(N)], lambda k: torch.ones(k, 2))
    outs = [torch.empty(0, device=x.device) for x in xs]
    cases = [
        (
            ValueError,
            "but for the first size",
            lambda: dt.collectives.all_gather_into_tensor(outs[:2], [xs[0], xs[1][:, :1]]),
        ),
        (
            ValueError,
            "but for the first size",
            lambda: dt.collectives.all_gather_into_tensor(outs[:2], [x.sum() for x in xs[:2]]),
        ),
        (
            TypeError,
            "float32, but torch.int64 arrives",
            lambda: dt.collectives.all_gather_into_tensor(outs, [x.long() for x in xs]),
        ),
        (ValueError, "outs: tensors on nodes", lambda: dt.collectives.all_gather_into_tensor(outs[::-1], xs)),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    assert all(out.shape == (0,) for out in outs), "nothing has been resized"
