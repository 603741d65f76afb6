"""``linear`` is one operation of autograd's here: it gives what torch's composite gives, to the bit, in any company."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import bits, same
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from disttensor import testing

pytestmark = [
    pytest.mark.usefixtures("processes"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own forward-mode AD uses it
]

HERE, NODE = "cpu", "node:1"
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

SHAPES = {
    "matrix": ((32, 64), 48),
    "batch": ((4, 7, 16), 5),
    "four": ((2, 3, 4, 8), 9),
    "one row": ((1, 16), 16),
    "one column": ((6, 1), 3),
    "one output": ((5, 8), 1),
    "one of all": ((1, 1), 1),
    "single rows": ((3, 1, 1), 2),
    "vector": ((8,), 4),
    "empty": ((0, 8), 4),
    "wide": ((3, 300), 200),
}


def operands(where: str, shape: tuple[int, ...] = (32, 64), out: int = 48, bias: bool = True) -> Operands:
    g = torch.Generator().manual_seed(5)
    x, w, b = (torch.randn(s, generator=g) for s in (shape, (out, shape[-1]), (out,)))
    return x.to(where), w.to(where), b.to(where) if bias else None


def equal(got: Any, want: Any) -> None:
    """To the bit, and with the same strides."""
    if isinstance(want, torch.Tensor):
        assert bits(got.detach().cpu()) == bits(want.detach())
        assert got.stride() == want.stride()
        assert (got.requires_grad, got.is_leaf) == (want.requires_grad, want.is_leaf)
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            equal(g, w)
    else:
        assert got == want


def both(program: Callable[[str], Any]) -> None:
    equal(program(NODE), program(HERE))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, bias: bool) -> None:
    shape, out = SHAPES[name]

    def program(where: str) -> Any:
        found = []
        for needed in itertools.product((True, False), repeat=3):
            given = operands(where, shape, out, bias)
            for t, need in zip(given, needed, strict=True):
                if t is not None:
                    t.requires_grad_(need)
            y = F.linear(*given)
            if y.requires_grad:
                (y * y).sum().backward()
            found.append((y, y.grad_fn and y.grad_fn.name(), [None if t is None else t.grad for t in given]))
        return found

    both(program)


STRANGE: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], Operands]] = {
    "transposed input": lambda x, w, b: (x.t().contiguous().t(), w, b),
    "transposed weight": lambda x, w, b: (x, w.t().contiguous().t(), b),
    "sliced input": lambda x, w, b: (torch.cat([x, x], 1)[:, : x.shape[1]], w, b),
    "expanded bias": lambda x, w, b: (x, w, b[:1].expand(b.shape[0])),
    "bias of a matrix": lambda x, w, b: (x, w, b.expand(x.shape[0], -1)),
    "offset": lambda x, w, b: (torch.cat([x, x])[x.shape[0] :], w, b),
    "permuted batch": lambda x, w, b: (torch.stack([x, x]).transpose(0, 1), w, b),
    "double": lambda x, w, b: (x.double(), w.double(), b.double()),
    "bfloat16": lambda x, w, b: (x.bfloat16(), w.bfloat16(), b.bfloat16()),
    "complex": lambda x, w, b: (x.cfloat(), w.cfloat(), b.cfloat()),
    "one weight for both": lambda x, w, b: (w, w, None),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_operands(name: str) -> None:
    def program(where: str) -> Any:
        leaves = [t.requires_grad_() for t in operands(where) if t is not None]
        y = F.linear(*STRANGE[name](*leaves))  # type: ignore[arg-type]
        y.abs().sum().backward()
        return y, [t.grad for t in leaves]

    both(program)


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda y: y.sum(),
    "of a row": lambda y: y[..., 0, :].exp().sum(),
    "transposed": lambda y: (y.transpose(-1, -2) * 2.0).contiguous().sin().sum(),
    "permuted": lambda y: y.flip(0).transpose(0, 1).reshape(-1).cumsum(0).mean(),
}


@pytest.mark.parametrize("shape", [(6, 16), (4, 7, 16)], ids=["matrix", "batch"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_strides_of_the_gradient(name: str, shape: tuple[int, ...]) -> None:
    def program(where: str) -> Any:
        x, w, b = (t.requires_grad_() for t in operands(where, shape) if t is not None)
        GRADIENTS[name](F.linear(x, w, b)).backward()
        return x.grad, w.grad, b.grad

    both(program)


@pytest.mark.parametrize("shape", [(6, 16), (4, 7, 16)], ids=["matrix", "batch"])
def test_second_derivatives(shape: tuple[int, ...]) -> None:
    def program(where: str) -> Any:
        given = [t.requires_grad_() for t in operands(where, shape) if t is not None]
        y = F.linear(*given)
        first = torch.autograd.grad(y.sin().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), given)
        return first, second

    both(program)


def test_some_gradients_only() -> None:
    def program(where: str) -> Any:
        x, w, b = (t.requires_grad_() for t in operands(where) if t is not None)
        y = F.linear(x, w, b).relu().sum()
        return [torch.autograd.grad(y, t, retain_graph=True) for t in ([x], [w], [b], [x, b], [w, x])]

    both(program)


def test_batched_gradients() -> None:
    def program(where: str) -> Any:
        x, w, b = (t.requires_grad_() for t in operands(where) if t is not None)
        y = F.linear(x, w, b)
        some = torch.stack([torch.ones_like(y), y.detach()])
        return torch.autograd.grad(y, (x, w, b), some, is_grads_batched=True)

    same(program(NODE), program(HERE))


def test_transforms() -> None:
    def program(where: str) -> Any:
        x, w, b = operands(where)
        assert b is not None

        def loss(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, w, b).tanh().sum()

        each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, None, 0))(w, b, x)
        tangent = torch.func.jvp(lambda x: F.linear(x, w, b), (x,), (x,))
        kept = torch.func.vmap(lambda a: a.sum() + F.linear(x, w, b))(x)  # its operands are no part of the transform
        return each, tangent, kept, torch.func.jacrev(lambda b: F.linear(x[:2], w, b))(b)

    same(program(NODE), program(HERE))


def test_forward_derivatives() -> None:
    def program(where: str) -> Any:
        x, w, b = operands(where)
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(F.linear(forward_ad.make_dual(x, x), w, b)))

    both(program)


def test_modes_see_the_parts() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    seen: list[str] = []

    def program(where: str) -> Any:
        seen.clear()
        x, w, b = (t.requires_grad_() for t in operands(where) if t is not None)
        with Names():
            F.linear(x, w, b).sum().backward()
        return [name for name in seen if name not in ("aten::detach", "aten::alias")]

    both(program)


def test_without_gradients() -> None:
    def program(where: str) -> Any:
        found = []
        for bias, shape in itertools.product((True, False), ((6, 16), (4, 7, 16))):
            given = [None if t is None else t.requires_grad_() for t in operands(where, shape, bias=bias)]
            with torch.no_grad():
                found.append(F.linear(*given))  # type: ignore[arg-type]
            with torch.inference_mode():
                y = F.linear(*given)  # type: ignore[arg-type]
                assert y.is_inference()
            found.append(y.clone())
        return found

    both(program)


def test_hooks_and_checkpoints() -> None:
    def program(where: str) -> Any:
        x, w, b = (t.requires_grad_() for t in operands(where) if t is not None)
        seen: list[Any] = []
        w.register_hook(lambda g: g * 2)
        b.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad + 1))

        def unpack(t: torch.Tensor) -> torch.Tensor:
            return t * 1.0

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = F.linear(x, w, b)
        z = checkpoint(lambda y: F.linear(y, y[:5], None), y, use_reentrant=False)
        y.register_hook(lambda g: g + 1)
        y.retain_grad()
        z.square().sum().backward()
        return x.grad, w.grad, b.grad, y.grad, seen

    both(program)


def test_what_is_written_meanwhile() -> None:
    """Refused where it is needed, and only there."""

    def program(where: str) -> Any:
        found = []
        for needed, written in itertools.product(((True, False), (False, True)), (0, 1)):
            x, w, b = operands(where)
            x.requires_grad_(needed[0]), w.requires_grad_(needed[1])
            y = F.linear(x, w, b)
            with torch.no_grad():
                (x, w)[written].mul_(2)
            if needed[written]:  # the other one is needed for its derivative
                y.sum().backward()
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.sum().backward()
            found.append((x.grad, w.grad))
        return found

    both(program)


def test_twice_through_one_graph() -> None:
    x, w, b = (t.requires_grad_() for t in operands(NODE) if t is not None)
    y = F.linear(x, w, b).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert w.grad is not None
    same(w.grad, 2 * torch.ones(32, 48).t().mm(operands(HERE)[0]))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@pytest.mark.parametrize("change", ["shape", "dtype", "place", "local"])
def test_errors_name_the_line(change: str) -> None:
    x, w, b = operands(NODE)
    for _ in range(2):
        if change == "shape":
            bad = (x[:, :5], w, b)
        elif change == "dtype":
            bad = (x.double(), w, b)
        elif change == "place":
            bad = (x.to("node:0"), w, b)
        else:
            bad = (x.cpu(), w, b)
        with pytest.raises(RuntimeError):
            F.linear(*bad)
        with pytest.raises(RuntimeError):
            F.linear(bad[0], bad[1].requires_grad_(), bad[2])


def test_autocast() -> None:
    def program(where: str) -> Any:
        x, w, b = (t.requires_grad_() for t in operands(where) if t is not None)
        with torch.autocast(where.partition(":")[0], torch.bfloat16):
            y = F.linear(x, w, b)
        y.float().square().sum().backward()
        return y.dtype, y, x.grad, w.grad, b.grad

    both(program)


def test_in_composites() -> None:
    """An encoder layer and attention, whose composites use linear in C++."""

    def program(where: str) -> Any:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(where)
        x = torch.randn(3, 5, 16).to(where)
        layer(x).square().sum().backward()
        return [p.grad for p in layer.parameters()]

    both(program)


@pytest.mark.parametrize("shape", [(6, 16), (4, 7, 16)], ids=["matrix", "batch"])
def test_order_of_sums(shape: tuple[int, ...]) -> None:
    """What several uses of one tensor add up to: in a first derivative to the bit; in a penalty on it, to rounding.

    The penalty is in float64: in float32, the kernels of a CPU without AVX differ by more than 1e-4.
    """

    def program(where: str, penalty: bool) -> Any:
        dtype = torch.float64 if penalty else torch.float32
        x, w, b = (t.to(dtype).requires_grad_() for t in operands(where, shape, 16) if t is not None)
        h = x
        for _ in range(3):
            h = F.linear(h, w, b).tanh() + F.linear(h, w).sigmoid() * F.linear(x, w, b)
        first = torch.autograd.grad(h.square().sum(), (x, w, b), create_graph=True)
        return torch.autograd.grad(sum(g.norm() for g in first), (x, w, b)) if penalty else first

    both(lambda where: program(where, False))
    for got, want in zip(program(NODE, True), program(HERE, True), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-9, atol=1e-9)


def test_commands() -> None:
    """A backward is two products, the view that one is of, and a sum."""
    x, w, b = (t.requires_grad_() for t in operands(NODE) if t is not None)

    def backward() -> None:
        x.grad = w.grad = b.grad = None
        y.backward(g)

    for _ in range(3):
        y = F.linear(x, w, b)
        g = y.detach()
        with testing.MessageLog() as log:
            backward()
    # frees are those of the gradients before, and of whatever garbage the collector has just found
    assert len([command for command in log[1].commands if command != "Free"]) <= 4
