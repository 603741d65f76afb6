"""Meshes, and training on them."""

from __future__ import annotations

from typing import assert_type

import torch

import disttensor as dt


def main() -> None:
    mesh = dt.mesh(dp=2)
    assert_type(mesh, dt.meshes.Mesh)
    assert_type(mesh.device, torch.device)
    assert_type(mesh.nodes, tuple[int, ...])
    x = dt.shard(torch.randn(4, 3), mesh, dp=0)
    assert_type(x, dt.DistributedTensor)
    assert_type(dt.meshes.replicate(torch.ones(3), mesh), dt.DistributedTensor)
    assert_type(dt.meshes.from_shards(mesh, [torch.ones(1), torch.zeros(1)]), dt.DistributedTensor)
    model = dt.DataParallel(torch.nn.Linear(3, 2).to(mesh.device), mesh)
    loss = model(x).square().mean()
    loss.backward()
    with dt.meshes.varying("dp"):
        torch.rand(2, device=mesh.device)
    assert_type(model.module, torch.nn.Module)
