"""Inference mode, in which torch takes nothing apart before dispatch, and ordinary tensors in it stay ordinary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from differential import as_local, on_places
from equal import same
from test_ops_elementwise import COMPARE, ELEMENTWISE
from test_ops_indexing import INDEX
from test_ops_linalg import LINALG, MATMUL
from test_ops_nn import LOSSES, NN
from test_ops_numbers import CAST
from test_ops_reductions import REDUCE, SORT
from test_ops_writing import FOREACH, INPLACE, OUT

pytestmark = pytest.mark.usefixtures("clean")


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated", "ignore:index_reduce")
@on_places(
    *(ELEMENTWISE, COMPARE, INDEX, LINALG, MATMUL, LOSSES, NN, CAST, REDUCE, SORT, FOREACH, INPLACE, OUT),
    devices=["cpu"],
)
def test_as_local(program: str, name: str) -> None:
    with torch.inference_mode():
        as_local(program, name)


VIEWS = {
    "x[1]": lambda x: x[1],
    "x[1:3]": lambda x: x[1:3],
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "view": lambda x: x.view(2, 8),
    "reshape": lambda x: x.reshape(2, 8),
    "flatten": lambda x: x.flatten(),
    "contiguous": lambda x: x.contiguous(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "chunk": lambda x: x.chunk(2)[1],
    "split": lambda x: x.split(3)[0],
    "unbind": lambda x: x.unbind(1)[2],
    "expand": lambda x: x.expand(2, 4, 4),
    "diagonal": lambda x: x.diagonal(),
    "detach": lambda x: x.detach(),
    "real": lambda x: x.real,
}


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_a_tensor_from_outside(view: str) -> None:
    local = torch.arange(16.0).view(4, 4)
    remote = local.to("node:1")
    with torch.inference_mode():
        for x in (remote, local):
            y = VIEWS[view](x)
            assert not y.is_inference()
            y.mul_(2) if view != "expand" else None
            assert y.tolist() == VIEWS[view](x).cpu().tolist()
    same(remote, local)
    same(remote.requires_grad_() * 2, local.requires_grad_() * 2)


def test_parameters_and_attention() -> None:
    """A model from outside, a cache that is written in inference mode."""
    net = torch.nn.Linear(8, 24)
    there = torch.nn.Linear(8, 24)
    there.load_state_dict(net.state_dict())
    there.to("node:1")
    cache, remote_cache = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8, device="node:1")
    x = torch.randn(2, 1, 4, 8)
    with torch.inference_mode():
        for model, kept, value in ((net, cache, x), (there, remote_cache, x.to("node:1"))):
            q, k, v = model(value).chunk(3, dim=-1)
            kept[:, :, :2] = F.scaled_dot_product_attention(q, k, v)[:, :, :2]
    same(remote_cache, cache)


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.ones(3, device="node:1") * 2
        x.add_(1)
        view = x[1:]
        view.mul_(2)
    assert x.is_inference()
    same(x, torch.tensor([3.0, 6, 6]))


def test_products_are_computed_as_outside() -> None:
    """A weight's transpose still tells that the weight wants a gradient, by which matmul chooses its way."""
    x, w = torch.randn(4, 3, 5), torch.randn(7, 5)
    there = w.to("node:1").requires_grad_()
    w.requires_grad_()
    with torch.inference_mode():
        same(F.linear(x.to("node:1").transpose(0, 1), there), F.linear(x.transpose(0, 1), w))
