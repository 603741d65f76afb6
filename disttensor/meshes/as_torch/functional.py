"""Functional collectives of torch's (``torch.distributed._functional_collectives``) on tensors of a mesh.

They name a process group, and give new tensors. Torch's own kernels would have C++ keep a record of works that nobody
waits for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group

from ...collectives.over_dims import _pieces
from ...dispatch.op_plan import OpEntry
from ...dispatch.op_table import handler
from .process_group import MeshGroup, check_group

_ops = torch.ops._c10d_functional


def _group(entry: OpEntry, named: Any, *tensors: Any) -> MeshGroup:
    """Returns the process group of a mesh that is named, whose tensors these have to be."""
    group = named if isinstance(named, torch.distributed.ProcessGroup) else _resolve_process_group(named)
    what = entry.name.partition("::")[2].removesuffix(".default")
    return check_group(what, group, tensors)


@handler(_ops.all_reduce.default)
def _all_reduce(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    x, op, group = args
    return _group(entry, group, x).reduced(x, op)


@handler(_ops.all_reduce_.default)
def _all_reduce_(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    x, op, group = args
    x.detach().copy_(_group(entry, group, x).reduced(x, op))
    return x


@handler(_ops.all_reduce_coalesced.default)
def _all_reduce_coalesced(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    tensors, op, group = args
    return [_group(entry, group, x).reduced(x, op) for x in tensors]


@handler(_ops.all_gather_into_tensor.default)
def _all_gather(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    x, _, group = args
    return torch.cat(list(_group(entry, group, x).gathered(x)), 0)


@handler(_ops.all_gather_into_tensor_coalesced.default)
def _all_gather_coalesced(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    tensors, _, group = args
    return [torch.cat(list(_group(entry, group, x).gathered(x)), 0) for x in tensors]


@handler(_ops.reduce_scatter_tensor.default)
def _reduce_scatter(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    x, op, _, group = args
    return _group(entry, group, x).scattered_single(x, op)


@handler(_ops.reduce_scatter_tensor_coalesced.default)
def _reduce_scatter_coalesced(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    tensors, op, _, group = args
    return [_group(entry, group, x).scattered_single(x, op) for x in tensors]


@handler(_ops.broadcast.default)
def _broadcast(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    x, src, group = args
    return _group(entry, group, x).of_root(x, src)


@handler(_ops.all_to_all_single.default)
def _all_to_all(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    x, out_sizes, in_sizes, group = args
    return _group(entry, group, x).exchanged_single(x, out_sizes, in_sizes)


@handler(torch.ops._dtensor.shard_dim_alltoall.default)
def _shard_dim_alltoall(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Cuts a tensor in one dimension in the place of another."""
    x, gather_dim, shard_dim, named = args
    group = _group(entry, named, x)
    return torch.cat(list(group.exchanged(_pieces(x.detach(), shard_dim, group.size()))), gather_dim)


@handler(_ops.wait_tensor.default)
def _wait(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Returns the tensor: what comes next on its nodes comes after what made it."""
    return args[0]
