"""Seeded defects, one or more for each family of operations: in nodes' kernels, on the way between, in the front end.

A Defect is put in before a session begins; ``tests/verify/test_selfcheck.py`` shows that ``verify=`` finds each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import disttensor as dt
from disttensor.dispatch import first_call
from disttensor.runtime.channel.inproc import InprocChannel
from disttensor.runtime.collective import reduction
from disttensor.runtime.node import template
from disttensor.session.transfers import Transfers
from disttensor.torch_backend.composites import sdpa

NODE = "node:1"


@dataclass
class Defect:
    """What is broken, a program that meets it, and what is said of it: the operator, how it differs, and the line."""

    seed: Callable[[pytest.MonkeyPatch], None]
    program: Callable[[], Any]
    operator: str
    says: str
    line: str = "lambda: "  #: in the text of the line


def kernel(name: str, breaks: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """``breaks(original, *args)`` in the place of what nodes run for an operator."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        for way in ("fast_path", "plain_path"):
            original = getattr(template, way)

            def path(op: Any, *rest: Any, original: Callable[..., Any] = original) -> Callable[..., Any]:
                fn = original(op, *rest)
                return (lambda *args, **kwargs: breaks(fn, *args, **kwargs)) if op.name() == name else fn

            patch.setattr(template, way, path)

    return seed


def wrapped(owner: Any, name: str, breaks: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """The same for a function of ours."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: breaks(original, *args, **kwargs))

    return seed


def off(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One value is another."""
    result = fn(*args, **kwargs)
    first = result[0] if isinstance(result, tuple) else result
    with torch.no_grad():
        first.view(-1)[-1] += 1
    return result


def twice(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The numbers after those that were due."""
    fn(*args, **kwargs)
    return fn(*args, **kwargs)


def beside(fn: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """Writes memory beside what it shall write."""
    fn(x, *args)
    x.as_strided((1,), (1,), 0).fill_(7)
    return x


def over(fn: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """Writes what it only reads."""
    result = fn(x, *args)
    x.zero_()
    return result


def but_last(fn: Callable[..., Any], xs: list[torch.Tensor], *args: Any) -> Any:
    return fn(xs[:-1], *args)


def ones(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).to(NODE)


def late(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """The backward pass of a function of a leaf; its line is this file's, in ``backwards``."""
    return lambda: backwards(fn(ones(2, 3).requires_grad_()))


def backwards(y: torch.Tensor) -> None:
    y.sum().backward()


def both(*seeds: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def seed(patch: pytest.MonkeyPatch) -> None:
        for each in seeds:
            each(patch)

    return seed


def unlike(fn: Callable[..., Any], op: Any, args: Any, kwargs: Any) -> Any:
    """Strides that the node's tensor has not."""
    result = fn(op, args, kwargs)
    if op.name() == "aten::exp":
        return result.new_empty(result.shape[::-1]).permute(*reversed(range(result.dim())))
    return result


def unmasked(fn: Callable[..., Any], backend: int, query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> Any:
    return fn(backend, query, key, value, None, *rest)


def on_the_way(fn: Callable[..., Any], channel: Any, tensor: torch.Tensor, peer: int, *args: Any) -> Any:
    """From node 0 to node 1 goes something else."""
    return fn(channel, tensor + 1 if (channel._rank, peer) == (0, 1) else tensor, peer, *args)


def forgets(a: torch.Tensor, b: torch.Tensor, **out: Any) -> torch.Tensor:
    """A reduction of the first."""
    return torch.mul(a, 1, **out)


def fused_step() -> None:
    options = {"momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([ones(3)], [ones(3)], [], weight_decay=0.0, is_first_step=True, **options)


def recurrent() -> None:
    layer = nn.LSTM(3, 4).to(NODE)
    layer(ones(5, 2, 3))


def wrong(arrival: Any) -> Any:
    arrival.tensor.add_(1)
    return arrival


DEFECTS: dict[str, Defect] = {
    "elementwise": Defect(kernel("aten::mul.Tensor", off), lambda: ones(2, 3) * 2, "aten::mul.Tensor", "at [1, 2]"),
    "elementwise, torch's way": Defect(
        kernel("aten::sin", off), lambda: ones(2, 3).sin(), "aten::sin", "1 of 6 values differ, by up to 1 "
    ),
    "number first": Defect(
        kernel("aten::rsub.Scalar", off), lambda: 1 - ones(2, 3), "aten::rsub.Scalar", "1 of 6 values"
    ),
    "reduction": Defect(kernel("aten::sum", off), lambda: ones(3).sum(), "aten::sum", "at [] the node has 7.0"),
    "reduction to a number": Defect(
        kernel("aten::_local_scalar_dense", lambda fn, x: fn(x) + 1),
        lambda: ones(1).item(),
        "aten::_local_scalar_dense",
        "1 of 1 values differ",
    ),
    "indices": Defect(
        kernel("aten::argmax", lambda fn, *a: fn(*a) + 1), lambda: ones(3).argmax(), "aten::argmax", "1 of 1"
    ),
    "matmul": Defect(kernel("aten::mm", off), lambda: ones(2, 3) @ ones(3, 2), "aten::mm", "1 of 4 values"),
    "linear": Defect(
        kernel("aten::linear", off), lambda: F.linear(ones(2, 3), ones(4, 3)), "aten::linear", "1 of 8 values"
    ),
    "in place": Defect(kernel("aten::add_.Tensor", off), lambda: ones(3).add_(1), "aten::add_.Tensor", "at [2]"),
    "in place, beside it": Defect(
        kernel("aten::mul_.Tensor", beside), lambda: ones(3)[1:].mul_(2), "aten::mul_.Tensor", "the memory of operand 0"
    ),
    "an operand is written": Defect(
        kernel("aten::exp", over), lambda: ones(3).exp(), "aten::exp", "the memory of operand 0"
    ),
    "out=": Defect(
        kernel("aten::add.out", lambda fn, a, b, out: fn(a, b, alpha=2, out=out)),
        lambda: torch.add(ones(3), ones(3), out=ones(3)),
        "aten::add.out",
        "3 of 3 values",
    ),
    "view of another place": Defect(
        kernel("aten::select.int", lambda fn, x, dim, i: fn(x, dim, i + 1)),
        lambda: ones(3, 2)[1],
        "aten::select.int",
        "the offset is 4, and with local torch 2",
    ),
    "view that is a copy": Defect(
        kernel("aten::view", lambda fn, *a: fn(*a).clone()), lambda: ones(4).view(2, 2), "aten::view", "no memory"
    ),
    "copy that is a view": Defect(
        kernel("aten::clone", lambda fn, x, **k: fn(x[:], **k) if x.dim() != 3 else x),
        lambda: ones(1, 1, 2).clone(),
        "aten::clone",
        "it shares memory with an operand",
    ),
    "layout on the node": Defect(
        kernel("aten::cos", lambda fn, x: fn(x).t().contiguous().t()),
        lambda: ones(2, 3).cos(),
        "aten::cos",
        "the strides are (1, 2), and with local torch (3, 1)",
    ),
    "layout here": Defect(
        both(
            wrapped(first_call.meta_inference, "infer", unlike),
            wrapped(first_call.trial, "tried", lambda fn, *args: first_call.trial.Found(False)),
        ),
        lambda: ones(2, 3).exp(),
        "aten::exp",
        "to the script the strides are",
    ),
    "dtype on the node": Defect(
        kernel("aten::tan", lambda fn, x: fn(x).double()), lambda: ones(3).tan(), "aten::tan", "the dtype is"
    ),
    "factory": Defect(
        kernel("aten::eye.m_out", off), lambda: torch.eye(3, device=NODE), "aten::eye.m_out", "at [2, 2]"
    ),
    "factory, at once": Defect(
        kernel("aten::tril_indices", off),
        lambda: torch.tril_indices(2, 2, device=NODE),
        "aten::tril_indices",
        "1 of 6 values",
    ),
    "random": Defect(
        kernel("aten::normal_", twice), lambda: torch.randn(3, device=NODE), "aten::normal_", "3 of 3 values"
    ),
    "random, the state only": Defect(
        kernel("aten::bernoulli_.float", lambda fn, x, *a: (fn(x, *a), torch.rand(1))[0]),
        lambda: ones(3).bernoulli_(0.0),
        "aten::bernoulli_.float",
        "it has drawn more, or fewer, numbers",
    ),
    "dropout": Defect(
        kernel("aten::bernoulli_.float", twice),
        lambda: F.dropout(ones(100), 0.5),
        "aten::native_dropout",
        "of 100 values differ",
    ),
    "foreach": Defect(
        kernel("aten::_foreach_add_.Scalar", but_last),
        lambda: torch._foreach_add_([ones(2), ones(3)], 1),
        "aten::_foreach_add_.Scalar",
        "the memory of operand 1",
    ),
    "fused optimizer": Defect(
        kernel("aten::_fused_sgd_", lambda fn, xs, *a, **k: fn(xs, *a, **k | {"lr": 1.0})),
        fused_step,
        "aten::_fused_sgd_",
        "the memory of operand 0",
        "torch._fused_sgd_(",
    ),
    "indexing": Defect(
        kernel("aten::index.Tensor", off),
        lambda: ones(3)[torch.tensor([2, 0])],
        "aten::index.Tensor",
        "1 of 2 values",
    ),
    "mask": Defect(
        kernel("aten::nonzero", lambda fn, x: fn(x).flip(0)),
        lambda: ones(3)[ones(3) > 1],
        "aten::nonzero",
        "2 of 2 values",
    ),
    "data-dependent shape": Defect(
        kernel("aten::nonzero", lambda fn, x: fn(x)[1:]),
        lambda: ones(3).nonzero(),
        "aten::nonzero",
        "the shape is (2, 1), and with local torch (3, 1)",
    ),
    "backward": Defect(
        kernel("aten::tanh_backward", off),
        late(torch.tanh),
        "aten::tanh_backward",
        "1 of 6 values",
        "y.sum().backward()",
    ),
    "backward of linear": Defect(
        kernel("aten::mm", off),
        late(lambda x: F.linear(x, ones(4, 3))),
        "aten::mm",
        "1 of 6 values",
        "y.sum().backward()",
    ),
    "composite": Defect(
        wrapped(sdpa, "_fused", unmasked),
        lambda: F.scaled_dot_product_attention(*[ones(1, 1, 3, 4)] * 3, torch.eye(3, device=NODE) * 40),
        "aten::scaled_dot_product_attention",
        "values differ",
    ),
    "recurrent": Defect(
        kernel("aten::mkldnn_rnn_layer", off), recurrent, "aten::mkldnn_rnn_layer", "1 of", "layer(ones"
    ),
    "copy to a node": Defect(
        wrapped(Transfers, "upload", lambda fn, s, x, *a: fn(s, x + 1, *a)),
        lambda: torch.ones(3).to(NODE),
        "a copy to a node",
        "3 of 3 values",
    ),
    "copy to a mesh": Defect(
        wrapped(Transfers, "upload", lambda fn, s, x, *a: fn(s, x + 1, *a)),
        lambda: torch.ones(3).to(dt.mesh(dp=2).device),
        "a copy to a node",
        "3 of 3 values",
    ),
    "copy to the master": Defect(
        wrapped(Transfers, "download", lambda fn, s, x, *a: fn(s, x, *a) + (1 if x.dtype is torch.int16 else 0)),
        lambda: torch.ones(3, dtype=torch.int16, device=NODE).cpu(),
        "a copy to the master",
        "by the checksums of both",
    ),
    "fetch": Defect(
        wrapped(Transfers, "fetch", lambda fn, *a: wrong(fn(*a))),
        lambda: dt.fetch(ones(3)),
        "a copy to the master",
        "by the checksums of both",
    ),
    "copy between nodes": Defect(
        wrapped(InprocChannel, "isend", on_the_way),
        lambda: torch.ones(3, device="node:0").to(NODE),
        "aten::_to_copy",
        "3 of 3 values",
    ),
    "copy of an argument": Defect(
        wrapped(InprocChannel, "isend", on_the_way),
        lambda: dt.run(torch.neg, torch.ones(3, device="node:0"), node=1),
        "a copy between nodes",
        "3 of 3 values",
    ),
    "copy in place": Defect(
        wrapped(InprocChannel, "isend", on_the_way),
        lambda: ones(3).copy_(torch.ones(3, device="node:0")),
        "aten::copy_",
        "3 of 3 values",
    ),
    "collective": Defect(
        lambda patch: patch.setitem(reduction._KERNELS, dt.collectives.ReduceOp.SUM, forgets),
        lambda: dt.all_reduce([torch.full((3,), k + 1.0, device=f"node:{k}") for k in range(2)]),
        "all_reduce",
        "tensor 0 of node",
    ),
    "collective that moves": Defect(
        wrapped(InprocChannel, "isend", on_the_way),
        lambda: dt.broadcast([torch.ones(3, device=f"node:{k}") for k in range(2)], src=0),
        "broadcast",
        "tensor 0 of node 1: 3 of 3 values",
    ),
}

#: Those that are found without ``verify``, as each signature's geometry is compared once.
ALWAYS_FOUND = ("view of another place", "layout on the node", "layout here", "dtype on the node")
