"""A tensor class of somebody else's that says itself what operations do (``__torch_dispatch__``), beside tensors on
nodes: torch asks that class, as it does beside tensors of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import disttensor as dt

pytestmark = pytest.mark.usefixtures("nodes", "settled")


class Wrapped(torch.Tensor):
    """Wraps a tensor, and does what that does: as torch's AsyncCollectiveTensor, on whatever device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*bare(args), **bare(kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if type(x) in (torch.Tensor, dt.DistributedTensor) else x, result)


class Refusing(Wrapped):
    """Knows no operation."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def bare(value: Any) -> Any:
    return tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, value)


def gradient(x: Any, w: Any) -> Any:
    return torch.autograd.grad((x * w).sum(), x)[0]


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, w: x + w,
    "add, the other way": lambda x, w: w + x,
    "matmul": lambda x, w: x @ w.t(),
    "cat": lambda x, w: torch.cat([x, w]),
    "foreach": lambda x, w: torch._foreach_add([x, x], [w, w])[0],
    "where": lambda x, w: torch.where(x > 1, x, w),
    "lerp": lambda x, w: x.lerp(w, 0.5),
    "in place": lambda x, w: x.clone().add_(w),
    "copy_": lambda x, w: x.clone().copy_(w),
    "linear": lambda x, w: F.linear(x, w),
    "layer_norm": lambda x, w: F.layer_norm(x, (3,), w[0]),
    "a scalar": lambda x, w: x * w[0, 1],
    "a gradient": lambda x, w: gradient(x.clone().requires_grad_(), w),
}


@pytest.mark.parametrize("place", ["node", "mesh"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_asks_the_other_class(name: str, place: str) -> None:
    device = torch.device("node:1") if place == "node" else dt.mesh(dp=3).device
    x, w = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 2
    found = bare(PROGRAMS[name](x.to(device), Wrapped(w.to(device))))
    expected = bare(PROGRAMS[name](x, Wrapped(w)))
    assert type(found) is dt.DistributedTensor
    for shard in [found] if place == "node" else found.shards():  # type: ignore[attr-defined]
        torch.testing.assert_close(shard.detach().cpu(), expected.detach())


def test_what_no_class_knows_is_torchs_error() -> None:
    x = torch.ones(2, device="node:1")
    with pytest.raises(TypeError, match="returned NotImplemented"):
        torch.add(x, Refusing(torch.ones(2, device="node:1")))


def test_a_local_tensor_of_a_plain_class_is_the_users_mistake() -> None:
    class Plain(torch.Tensor):
        pass

    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        torch.ones(2, device="node:1") + torch.ones(2).as_subclass(Plain)
