"""Collectives: their reductions by name, by ours and by torch.distributed's."""

from __future__ import annotations

from typing import assert_type

import torch

import disttensor as dt
from disttensor.collectives import Reduced, ReduceOp


def join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def main() -> None:
    xs = [torch.ones(3, device=f"node:{k}") for k in range(2)]
    dt.all_reduce(xs)
    dt.all_reduce(xs, "avg")
    dt.all_reduce(xs, "MAX")
    dt.all_reduce(xs, ReduceOp.MIN)
    dt.all_reduce(xs, torch.distributed.ReduceOp.SUM)
    dt.all_reduce(xs, op="product")
    work = dt.all_reduce(xs, "sum", async_op=True)
    assert_type(len(work.result()), int)
    assert_type(dt.all_reduce(xs, join), Reduced)
    mesh = dt.mesh(dp=2)
    x = dt.shard(torch.arange(4.0), mesh, dp=0)
    assert_type(dt.all_reduce(x, "avg", over="dp"), dt.DistributedTensor)
    assert_type(dt.all_reduce(x, "sum", over=("dp",), async_op=True).result(), dt.DistributedTensor)
    assert_type(dt.collectives.functional.all_reduce(xs, "sum"), list[torch.Tensor])
