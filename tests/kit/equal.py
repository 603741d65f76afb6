"""Values on nodes against local ones, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import disttensor as dt


def bits(tensor: torch.Tensor) -> bytes:
    """A local tensor's elements as they are in memory, in order: tells -0.0 from 0.0 and one NaN from another."""
    tensor = tensor.detach().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def outcome(run: Callable[[], Any]) -> Any:
    """What ``run`` gives, or the kind and the first line of the RuntimeError that it raises.

    For what some CPUs can't do, by torch's own choice of a kernel: there proxies have to raise what local tensors do.
    """
    try:
        return run()
    except RuntimeError as error:
        return type(error).__name__, str(error).splitlines()[0]


def same(remote: object, local: object, strides: bool = True, path: str = "result") -> None:
    """Asserts that ``remote`` is what ``local`` is, with proxies where that has tensors.

    Values bit for bit, dtype, shape, strides and storage offset, ``requires_grad``; the types of everything else.
    """
    if isinstance(local, torch.Tensor):
        assert isinstance(remote, dt.DistributedTensor), f"{path} is a {type(remote).__name__}, not a proxy"
        assert remote.dtype == local.dtype, path
        assert remote.shape == local.shape, path
        if strides:
            assert remote.stride() == local.stride(), f"{path}: strides"
            assert remote.storage_offset() == local.storage_offset(), f"{path}: storage offset"
        assert remote.requires_grad == local.requires_grad, f"{path}: requires_grad"
        fetched = remote.detach().cpu()
        assert type(fetched) is torch.Tensor, path
        assert fetched.dtype == local.dtype, f"{path}: fetched"
        assert fetched.shape == local.shape, f"{path}: fetched"
        if bits(fetched) != bits(local):
            assert fetched.tolist() == local.tolist(), f"{path}: values"
            raise AssertionError(f"{path}: bits of {fetched} and {local}")
    elif isinstance(local, (tuple, list)):
        assert type(remote) is type(local), path
        assert len(remote) == len(local), path
        for i, (r, x) in enumerate(zip(remote, local, strict=True)):
            same(r, x, strides, f"{path}[{i}]")
    elif isinstance(local, dict):
        assert list(remote) == list(local), path
        for k in local:
            same(remote[k], local[k], strides, f"{path}[{k!r}]")
    else:
        assert type(remote) is type(local), path
        assert remote == local or (remote != remote and local != local), path


def send(value: object, device: torch.device | str) -> object:
    """``value`` with its tensors moved to ``device``, each once, keeping their strides and ``requires_grad``."""
    moved: dict[int, torch.Tensor] = {}

    def one(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in moved:
            moved[id(x)] = x.detach().to(device).requires_grad_(x.requires_grad)
        return moved[id(x)]

    return torch.utils._pytree.tree_map(one, value)


def at_rank(value: object, rank: int) -> object:
    """``value`` with the shards on a rank in place of its tensors, which are on a mesh."""

    def shard(x: Any) -> Any:
        if not isinstance(x, dt.DistributedTensor):
            return x
        return x.detach().shards()[rank].requires_grad_(x.requires_grad)  # type: ignore[attr-defined]

    return torch.utils._pytree.tree_map(shard, value, is_leaf=lambda x: isinstance(x, torch.Size))
