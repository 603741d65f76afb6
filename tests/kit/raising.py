"""Backward passes in each of which something raises, somewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class Boom(Exception):
    pass


def boom(*args: Any) -> Any:
    raise Boom("boom")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Boom("boom")


def _x() -> torch.Tensor:
    return torch.ones(3, device="node:1", requires_grad=True)


def _tensor_hook() -> None:
    x = _x()
    y = x * 2
    y.register_hook(boom)
    y.sum().backward()


def _leaf_hook() -> None:
    x = _x()
    x.register_hook(boom)
    (x * 2).sum().backward()


def _post_accumulate() -> None:
    x = _x()
    x.register_post_accumulate_grad_hook(boom)
    (x * 2).sum().backward()


def _grad_fn_hook() -> None:
    y = _x() * 2
    y.grad_fn.register_hook(boom)
    y.sum().backward()


def _grad_fn_prehook() -> None:
    y = _x() * 2
    y.grad_fn.register_prehook(boom)
    y.sum().backward()


def _module_hook() -> None:
    layer = torch.nn.Linear(3, 3).to("node:1")
    layer.register_full_backward_hook(boom)
    layer(_x()).sum().backward()


def _module_pre_hook() -> None:
    layer = torch.nn.Linear(3, 3).to("node:1")
    layer.register_full_backward_pre_hook(boom)
    layer(_x()).sum().backward()


def _unpack() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, boom):
        y = _x().exp()
    y.sum().backward()


def _pack_in_double() -> None:
    x = _x()
    y = x.exp()
    with torch.autograd.graph.saved_tensors_hooks(boom, lambda t: t):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def _checkpoint(reentrant: bool) -> None:
    calls = []

    def body(a: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise Boom("boom")
        return a.exp()

    checkpoint(body, _x() * 1, use_reentrant=reentrant).sum().backward()


def _function() -> None:
    Failing.apply(_x()).sum().backward()


def _grad() -> None:
    x = _x()
    torch.autograd.grad(Failing.apply(x).sum(), x)


def _nested() -> None:
    x = _x()
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            _function()

    y.register_hook(hook)
    y.sum().backward()


def _thread() -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _tensor_hook()
        except Boom as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    raise errors[0]


def _local_leaf() -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_hook(boom)
    (x.to("node:1") * 2).sum().backward()


def _between_nodes() -> None:
    y = _x().to("node:0") * 2
    y.register_hook(boom)
    y.to("node:1").sum().cpu().backward()


def _interrupt() -> None:
    y = _x() * 2

    def hook(grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    y.register_hook(hook)
    try:
        y.sum().backward()
    except KeyboardInterrupt:
        raise Boom("boom") from None


RAISING: dict[str, Callable[[], None]] = {
    "tensor hook": _tensor_hook,
    "leaf hook": _leaf_hook,
    "post accumulate": _post_accumulate,
    "grad_fn hook": _grad_fn_hook,
    "grad_fn prehook": _grad_fn_prehook,
    "module hook": _module_hook,
    "module pre hook": _module_pre_hook,
    "unpack": _unpack,
    "pack in double": _pack_in_double,
    "checkpoint": lambda: _checkpoint(False),
    "checkpoint reentrant": lambda: _checkpoint(True),
    "function": _function,
    "grad": _grad,
    "nested": _nested,
    "thread": _thread,
    "local leaf": _local_leaf,
    "between nodes": _between_nodes,
    "interrupt": _interrupt,
}
