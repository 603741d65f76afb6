"""Embeddings with sparse gradients on nodes, beside the same programs of local torch."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from limits import HANG

import disttensor as dt

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # what torch says once, of local ones too
NODE = "node:1"
BATCHES = ([1, 2, 1, 5], [0, 2, 5, 5], [3, 3, 3, 3])


@pytest.fixture(autouse=True, scope="module")
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        yield


def rows(batch: list[int], where: str) -> torch.Tensor:
    return torch.tensor(batch, device=where)


def lookup(table: nn.Module, batch: list[int], where: str) -> torch.Tensor:
    return table(rows(batch, where))


def bag(table: nn.Module, batch: list[int], where: str) -> torch.Tensor:
    return table(rows(batch, where), torch.tensor([0, 3, 4], device=where))


TABLES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "plain": (lambda: nn.Embedding(6, 3, sparse=True), lookup),
    "padding": (lambda: nn.Embedding(6, 3, sparse=True, padding_idx=2), lookup),
    "in double": (lambda: nn.Embedding(6, 3, sparse=True, dtype=torch.float64), lookup),
    "bag": (lambda: nn.EmbeddingBag(6, 3, sparse=True, mode="sum"), bag),
    "padded bag": (lambda: nn.EmbeddingBag(6, 3, sparse=True, mode="sum", padding_idx=5), bag),
    "mean bag": (lambda: nn.EmbeddingBag(6, 3, sparse=True, mode="mean"), bag),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "maximize": lambda p: torch.optim.SparseAdam(p, lr=0.1, maximize=True),
}


def both(table: str) -> list[tuple[str, nn.Module]]:
    make, _ = TABLES[table]
    torch.manual_seed(0)
    local = make()
    return [("cpu", local), (NODE, copy.deepcopy(local).to(NODE))]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("passes", [1, 2])
def test_training(table: str, optimizer: str, passes: int) -> None:
    """``passes``: batches whose gradients are summed for a step."""
    results = []
    for where, model in both(table):
        opt = OPTIMIZERS[optimizer](model.parameters())
        for batch in BATCHES:
            opt.zero_grad()
            for i in range(passes):
                (TABLES[table][1](model, batch[i:] + batch[:i], where) ** 2).sum().backward()
            (weight,) = model.parameters()
            assert weight.grad is not None
            assert weight.grad.is_sparse
            assert weight.grad.device.type == where.partition(":")[0]
            opt.step()
        results.append(weight.detach().cpu())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def gradients() -> list[torch.Tensor]:
    found = []
    for where, model in both("plain"):
        (lookup(model, BATCHES[0], where) ** 2).sum().backward()
        assert isinstance(model.weight, torch.Tensor)
        assert model.weight.grad is not None
        found.append(model.weight.grad)
    return found


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "as it is": lambda g: g.cpu(),
    "coalesced": lambda g: g.coalesce().cpu(),
    "its indices": lambda g: g.coalesce().indices(),
    "its values": lambda g: g.coalesce().values(),
    "not coalesced": lambda g: (g._indices(), g._values(), g._nnz(), g.is_coalesced(), g.sparse_dim(), g.dense_dim()),
    "dense": lambda g: g.to_dense(),
    "in double": lambda g: g.to(torch.float64).cpu(),
    "doubled": lambda g: (g * 2).cpu(),
    "negative": lambda g: (-g).cpu(),
    "by a tensor": lambda g: (g / g.coalesce().values().sum()).cpu(),
    "squared": lambda g: (g**2).cpu(),
    "sum of two": lambda g: (g + g * 3).coalesce().cpu(),
    "a third added": lambda g: g.add(g, alpha=3).coalesce().cpu(),
    "to a dense one": lambda g: torch.ones_like(g.to_dense()) + g,
    "summed": lambda g: g.sum(),
    "norm": lambda g: g.norm(),
    "masked by it": lambda g: (g.to_dense() + 1).sparse_mask(g.coalesce()).cpu(),
    "set to zero": lambda g: g.clone().zero_().to_dense(),
    "halved in place": lambda g: g.clone().mul_(0.5).cpu(),
    "copied into": lambda g: g.clone().zero_().copy_(g).cpu(),
    "in two sparse dimensions": lambda g: torch.sparse_coo_tensor(
        torch.stack([g._indices()[0], g._indices()[0] % 2]), g._values()[:, 0], (6, 2)
    ).coalesce().cpu(),
    "and dense": lambda g: torch.sparse_coo_tensor(
        torch.stack([g._indices()[0], g._indices()[0] % 2]), g._values()[:, 0], (6, 2)
    ).to_dense(),
    "sent again": lambda g: g.cpu().to(g.device).cpu(),
    "deep copy": lambda g: copy.deepcopy(g).cpu(),
    "shapes": lambda g: (g.shape, g.dtype, g.layout, g.is_sparse, g.numel(), g.dim(), g.requires_grad),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_gradient_is_used(use: str) -> None:
    local, remote = gradients()
    expected, found = USES[use](local), USES[use](remote)
    if isinstance(found, dt.DistributedTensor):
        assert found.device == torch.device(NODE)
        found = found.cpu()
    if isinstance(found, tuple):
        found = tuple(v.cpu() if isinstance(v, torch.Tensor) else v for v in found)
    if isinstance(expected, torch.Tensor) and expected.is_sparse:
        assert found.is_sparse
        assert found.is_coalesced() == expected.is_coalesced()
        assert torch.equal(found._indices(), expected._indices())
        found, expected = found._values(), expected._values()
    if isinstance(expected, torch.Tensor) or all(isinstance(v, torch.Tensor) for v in expected):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    else:
        assert str(found) == str(expected)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15, of local ones too
def test_it_is_saved_as_a_local_one() -> None:
    local, remote = gradients()
    file = io.BytesIO()
    torch.save(remote, file)
    file.seek(0)
    for loaded in (torch.load(file), pickle.loads(pickle.dumps(remote))):
        assert loaded.device.type == "cpu"
        assert torch.equal(loaded.to_dense(), local.to_dense())
    assert repr(remote).startswith("tensor(indices=tensor([[1, 2, 1, 5]])")
    assert "device='node:1'" in repr(remote)
    assert remote.get_node() == 1


def test_hooks_and_clipping() -> None:
    results = []
    for where, model in both("plain"):
        weight = model.weight
        assert isinstance(weight, torch.Tensor)
        seen: list[bool] = []
        weight.register_hook(lambda g, seen=seen: seen.append(g.is_sparse) or g * 3)
        weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.is_sparse))
        (lookup(model, BATCHES[0], where) ** 2).sum().backward()
        assert seen == [True, True]
        assert weight.grad is not None
        weight.grad = weight.grad * 0.5
        results.append(weight.grad.to_dense().cpu())
    torch.testing.assert_close(*results)
    assert results[0].count_nonzero()


def test_a_grad_that_is_kept_is_zeroed() -> None:
    (_, remote) = both("plain")[1]
    optimizer = torch.optim.SGD(remote.parameters(), lr=0.1)
    (lookup(remote, BATCHES[0], NODE) ** 2).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert isinstance(remote.weight, torch.Tensor)
    assert remote.weight.grad is not None
    assert remote.weight.grad._nnz() == 0
    before = remote.weight.detach().cpu()
    optimizer.step()
    assert torch.equal(remote.weight.detach().cpu(), before)


@pytest.mark.parametrize("to", ["cpu", "node:0", "node:1"])
@pytest.mark.parametrize("start", ["cpu", "node:1"])
def test_it_goes_where_its_module_goes(start: str, to: str) -> None:
    (_, model) = both("plain")[0]
    model.to(start)
    (lookup(model, BATCHES[0], start) ** 2).sum().backward()
    weight = model.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    before = weight.grad.to_dense().cpu()
    model.to(to)
    assert model.weight is weight
    assert weight.grad.is_sparse
    assert weight.device == weight.grad.device == torch.device(to)
    assert torch.equal(weight.grad.to_dense().cpu(), before)
    torch.optim.SparseAdam(model.parameters()).step()


def test_it_passes_the_self_check() -> None:
    """In a process of its own session: its parts are compared, and it is no failure."""
    program = """
import torch, disttensor as dt
from disttensor import verify
with dt.init_master_worker(nodes=1, launcher="inproc", verify=1.0):
    table = torch.nn.Embedding(6, 3, sparse=True).to("node:0")
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(2):
        table(torch.tensor([1, 2, 1], device="node:0")).pow(2).sum().backward()
        optimizer.step()
print(sorted(verify.counts().skipped))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG)
    parts = "its parts are compared"
    assert done.stdout == f"['a composite in inference mode; {parts}', 'a sparse gradient; {parts}']\n", done.stderr


def test_beside_dense_layers() -> None:
    """Two optimizers, as the documentation of SparseAdam has it; the loss falls."""
    losses = []
    for where in ("cpu", NODE):
        torch.manual_seed(1)
        table, head = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)
        table.to(where), head.to(where)
        optimizers = torch.optim.SparseAdam(table.parameters(), lr=0.1), torch.optim.Adam(head.parameters(), lr=0.1)
        losses.append([])
        for _ in range(5):
            loss = F.cross_entropy(head(table(rows([0, 1, 2, 2], where))), rows([0, 1, 0, 0], where))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1][-1] < losses[1][0]


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "made of a dense one": lambda g: g.to_dense().to_sparse(),
    "a product": lambda g: torch.sparse.mm(g, torch.ones(3, 2, device=g.device)),
    "cosines": lambda g: g.cos(),
    "a row": lambda g: g[0],
    "of another's indices": lambda g: g * g,
    "given to a function": lambda g: dt.run(abs, g, node=1),
    "another layout": lambda g: g.to_sparse_csr(),
    "added to": lambda g: g.add_(torch.ones(6, 3, device=g.device)),
}


@pytest.mark.parametrize("use", REFUSED)
def test_what_else_is_refused(use: str) -> None:
    _, remote = gradients()
    with pytest.raises(NotImplementedError, match=r"what optimizers do|only strided ones can"):
        REFUSED[use](remote)


def test_wrong_ones_are_errors() -> None:
    local, remote = gradients()
    for gradient in (local, remote):
        with pytest.raises(RuntimeError, match="cannot raise to zeroth power on sparse"):
            gradient.pow(0)
    with pytest.raises(RuntimeError, match="sizes of 'self' and 'other'"):
        torch.ones(5, 3, device=NODE).add_(remote)
    with pytest.raises(RuntimeError, match="are not those of a tensor of shape"):
        torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
            2, 1, (6, 3), remote._indices(), remote._values(), layout=torch.sparse_coo, device=remote.device
        )
    out_of_range = torch.sparse_coo_tensor(remote._indices() + 9, remote._values(), (6, 3))
    with pytest.raises((dt.DisttensorError, IndexError, RuntimeError), match="out of"):
        out_of_range.to_dense().cpu()
