"""The inverse of ``dt.shard``, and the mean over a mesh as a number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import disttensor as dt


@pytest.fixture(scope="module")
def mesh() -> Iterator[dt.meshes.Mesh]:
    with dt.init_master_worker(nodes=6, launcher="inproc"):
        yield dt.mesh(dp=3, tp=2)


@pytest.mark.parametrize(
    "dims",
    [{"dp": 0, "tp": 1}, {"dp": 0}, {"tp": -1}, {"dp": 1, "tp": 0}, {"dp": 0, "tp": 0}, {"tp": 0, "dp": 0}],
    ids=str,
)
def test_it_is_the_inverse_of_shard(mesh: dt.meshes.Mesh, dims: dict[str, int]) -> None:
    whole = torch.randn(12, 6, 2, requires_grad=True)
    weight = torch.randn(12, 6, 2)
    x = dt.shard(whole, mesh, **dims)
    found = dt.meshes.full_tensor(x, **dims)
    assert found.device == mesh.device
    for part in found.shards():  # each rank has it
        assert torch.equal(part.detach().cpu(), whole)
    (found * dt.meshes.replicate(weight, mesh)).sum().backward()
    assert torch.allclose(whole.grad, weight * 6)  # the objective is the sum of all ranks'
    assert abs(dt.meshes.mean(x) - whole.mean().item()) < 1e-6


def test_parts_that_differ_are_put_side_by_side(mesh: dt.meshes.Mesh) -> None:
    """Also where no shard has made them, and as many rows as a rank's index are its own."""
    parts = [torch.full((1, 2), float(k)) for k in range(6)]
    x = dt.meshes.from_shards(mesh, parts)
    assert dt.meshes.full_tensor(x, dp=0, tp=1).cpu().tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]
    assert dt.meshes.mean(x) == 2.5


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.float64])
def test_a_mean_is_a_number(mesh: dt.meshes.Mesh, dtype: torch.dtype) -> None:
    x = dt.meshes.from_shards(mesh, [torch.tensor([k % 2, 1]).to(dtype) for k in range(6)])
    found = dt.meshes.mean(x)
    assert type(found) is float
    assert found == 0.75


def test_mistakes_are_told(mesh: dt.meshes.Mesh) -> None:
    x = dt.shard(torch.ones(6, 2), mesh, dp=0)
    for call, error, words in (
        (lambda: dt.meshes.full_tensor(x), ValueError, r"takes the dims along which .*: full_tensor\(x, dp=0\)"),
        (lambda: dt.meshes.full_tensor(x, pp=0), ValueError, "has no dim 'pp'; it has dp=3, tp=2"),
        (lambda: dt.meshes.full_tensor(x, dp=2), ValueError, r"dp=2: a tensor of shape \(2, 2\) has no dimension 2"),
        (lambda: dt.meshes.full_tensor(torch.ones(2), dp=0), TypeError, "and this one is on the script"),
        (lambda: dt.meshes.mean(torch.ones(2)), TypeError, "mean takes a tensor on a mesh"),
        (lambda: dt.meshes.mean(2.0), TypeError, "and this one is a float"),
        (lambda: dt.meshes.mean(x.to(torch.complex64)), TypeError, "of a torch.complex64 tensor there is none"),
        (lambda: dt.shard(torch.ones(7, 2), mesh, dp=0), ValueError, "7 entries, which dp=3 does not divide"),
    ):
        with pytest.raises(error, match=words):
            call()
