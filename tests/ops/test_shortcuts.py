"""The short ways past torch give what its own way gives, and are not taken where something stands between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equal import same
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from disttensor import DistributedTensor, testing

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own forward-mode AD uses it
]

HERE = "cpu"
NODE = "node:1"


class Functions(TorchFunctionMode):
    """Notes the names of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "binary": lambda x, y: x + y,
    "scalar": lambda x, y: x * 0.5,
    "matmul": lambda x, y: x @ y,
    "unary": lambda x, y: x.relu(),
    "reduction": lambda x, y: x.sum(),
}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return METHODS[request.param]


def operands(where: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(4, 4, generator=g).to(where), torch.randn(4, 4, generator=g).to(where)


def warm(method: Callable[..., torch.Tensor]) -> None:
    for _ in range(2):
        method(*operands(NODE))


def both(method: Callable[..., torch.Tensor], check: Callable[[str], object]) -> None:
    """What ``check`` gives on a node whose plan is there is what it gives here."""
    warm(method)
    same(check(NODE), check(HERE))


def test_modes_see_the_method(method: Callable[..., torch.Tensor]) -> None:
    def seen(where: str) -> object:
        x, y = operands(where)
        with Functions() as functions:
            method(x, y)
        with Operators() as operators:
            method(x, y)
        return functions.seen, operators.seen

    both(method, seen)


def test_gradients(method: Callable[..., torch.Tensor]) -> None:
    def gradients(where: str) -> object:
        found = []
        for needed in ((True, False), (False, True), (True, True)):
            x, y = operands(where)
            x.requires_grad_(needed[0]), y.requires_grad_(needed[1])
            z = method(x, y)
            assert z.requires_grad == (z.grad_fn is not None)
            if z.requires_grad:
                z.sum().backward()
            with torch.no_grad():
                found.append((z.requires_grad, x.grad, y.grad, method(x, y).requires_grad))
        return found

    both(method, gradients)


def test_inference_mode(method: Callable[..., torch.Tensor]) -> None:
    def inference(where: str) -> object:
        x, y = operands(where)
        with torch.inference_mode():
            z = method(x, y)
        return z.is_inference(), z.clone()

    both(method, inference)


def test_transforms(method: Callable[..., torch.Tensor]) -> None:
    def transformed(where: str) -> object:
        x, y = operands(where)
        stack = torch.stack([x, y, x])
        over = torch.func.vmap(lambda a: method(a, y))(stack)
        beside = torch.func.vmap(lambda a: method(x, y) + a.sum())(stack)
        return over, beside, torch.func.grad(lambda a: method(a, y).sum())(x)

    both(method, transformed)


def test_forward_derivatives(method: Callable[..., torch.Tensor]) -> None:
    def tangent(where: str) -> object:
        x, y = operands(where)
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(method(forward_ad.make_dual(x, y), y)))

    both(method, tangent)


def test_autocast(method: Callable[..., torch.Tensor]) -> None:
    warm(method)
    x, y = operands(NODE)
    with torch.autocast("node", torch.bfloat16):
        got = method(x, y)
    x, y = operands(HERE)
    with torch.autocast("cpu", torch.bfloat16):
        same(got, method(x, y))


# ---- views that are what they are views of -----------------------------------------------------------------------


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t of t": lambda x: x.t().t(),
    "transpose of t": lambda x: x.t().transpose(0, 1),
    "whole slice": lambda x: x[:],
    "same shape": lambda x: x.view(4, 4),
    "flat and back": lambda x: x.view(-1).view(4, 4),
    "unsqueezed and back": lambda x: x.unsqueeze(0).squeeze(0),
    "used between": lambda x: (lambda y: (y + 1, y.t())[1])(x.t()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_all_is_what_it_is_a_view_of(name: str) -> None:
    view = VIEWS[name]

    def used(where: str) -> object:
        x, y = operands(where)
        before = view(x)
        x.add_(y)
        before.mul_(2)
        after = view(x)
        after[1] = 0
        relation = before._is_view(), before._base is x, before._version == x._version
        kept = view(x.clone())  # its base is gone
        return x, before, after, kept, relation, view(x)[1].exp()

    both(lambda x, y: view(x), used)


def test_a_view_of_all_costs_no_command() -> None:
    x, _ = operands(NODE)
    for _ in range(2):
        with testing.MessageLog() as log:
            y = x.t().t().view(4, 4)
            y.add_(1)
    assert log[1].commands == ["Call aten::add_.Tensor"]


def test_a_view_of_all_and_geometry_in_place() -> None:
    def changed(where: str) -> object:
        x, _ = operands(where)
        y = x.t().t()
        y.t_()
        x.mul_(2)
        z = x.view(4, 4)
        z.unsqueeze_(0)
        return x, y, z

    same(changed(NODE), changed(HERE))


def test_a_view_of_all_and_gradients() -> None:
    def gradients(where: str) -> object:
        x, y = (t.requires_grad_() for t in operands(where))
        z = x * 1
        z.t().t().mul_(y)
        (z.t().t() * z).sum().backward()
        return z, x.grad, y.grad

    same(gradients(NODE), gradients(HERE))


# ---- what torch looks up before each operation --------------------------------------------------------------------


@pytest.fixture
def halve() -> Iterator[Any]:
    with torch.library._scoped_library("shortcuts", "FRAGMENT") as library:
        library.define("halve(Tensor x) -> Tensor")
        library.impl("halve", lambda x: x / 2, "CompositeExplicitAutograd")
        yield torch.ops.shortcuts.halve.default


def test_rules_for_an_operator_on_a_subclass_hold(halve: Any) -> None:
    """``torch.library.register_torch_dispatch``, for proxies and for others."""

    class Other(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError("no rule")

    other = torch.Tensor._make_wrapper_subclass(Other, (2,))
    with torch.library._scoped_library("shortcuts", "FRAGMENT") as library:
        for kind in (DistributedTensor, Other):
            torch.library.register_torch_dispatch(halve.name(), kind, lambda *_, name=kind.__name__: name, lib=library)
        with pytest.raises(RuntimeError, match="cast DistributedTensor to"):  # the rule's answer is no tensor
            halve(torch.ones(2, device=NODE))
        with pytest.raises(RuntimeError, match="cast Other to"):
            halve(other)
    same(halve(torch.ones(2, device=NODE)), torch.full((2,), 0.5))
    with pytest.raises(NotImplementedError, match="no rule"):
        halve(other)
