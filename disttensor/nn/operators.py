"""Operators between tensors that are alike along a dim of a mesh, and tensors of which each rank there has a part.

The objective of a mesh is the sum of all ranks' losses, and the gradients of ``dt.all_reduce`` and ``dt.all_gather``
are those of that sum. Where all ranks along a dim compute the *same* loss it counts as many times as there are ranks.
These operators have the gradients of that one loss instead: a tensor that is alike on all ranks has a gradient that is
alike on all, that of the plain module, and not a share of it. They are the operators f and g of Megatron-LM (Shoeybi et
al. 2019, section 3), and their two forms that gather and split. Each is the other's gradient, so they differentiate
twice.
"""

from __future__ import annotations

from typing import Any

import torch

from ..collectives import all_gather, all_reduce
from ..meshes.cut import Cut


def enter(x: torch.Tensor, cut: Cut) -> Any:
    """f: returns the tensor as it is; its gradient is the sum over the ranks, each of which has computed a part."""
    return _Enter.apply(x, cut)  # type: ignore[no-untyped-call]


def leave(x: torch.Tensor, cut: Cut) -> Any:
    """g: returns the sum over the ranks, alike on all; its gradient is passed on as it is."""
    return _Leave.apply(x, cut)  # type: ignore[no-untyped-call]


def gather(x: torch.Tensor, cut: Cut, dim: int = -1) -> Any:
    """Returns the ranks' parts joined in a dimension, without the padding; its gradient is each rank's own part."""
    return _Gather.apply(x, cut, dim)  # type: ignore[no-untyped-call]


def split(x: torch.Tensor, cut: Cut, dim: int = -1) -> Any:
    """Returns each rank's own part of a dimension, padded by zeros; its gradient is that of the parts joined."""
    return _Split.apply(x, cut, dim)  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, cut: Cut) -> torch.Tensor:
        return x.view_as(x)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.cut = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return leave(grads[0], ctx.cut), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, cut: Cut) -> torch.Tensor:
        return all_reduce(x, over=cut.over)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.cut = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return enter(grads[0], ctx.cut), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, cut: Cut, dim: int) -> torch.Tensor:
        whole: Any = all_gather(x, over=cut.over, dim=dim)
        if cut.padding is None:
            return whole  # type: ignore[no-any-return]
        # a copy: torch lets a function's output be a view of its input, and of nothing else
        return whole.narrow(dim, 0, cut.size).clone()  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.cut, ctx.dim = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return split(grads[0], ctx.cut, ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, cut: Cut, dim: int) -> torch.Tensor:
        return cut.own(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.cut, ctx.dim = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather(grads[0], ctx.cut, ctx.dim), None, None
