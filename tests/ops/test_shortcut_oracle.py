"""The shortcuts give what the slow way gives, in whatever state torch is: the same commands of the same lines, results
that say the same of themselves, the same errors, and the same number of writes.

Calls are drawn from a table of methods and functions, of operands and of states, by a seed that is always the same; and
from torch's own database of operators, with gradients.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from zlib import crc32

import msgspec
import operator_database as database
import pytest
import torch
import torch.nn.functional as F
from slow_way import slow_way
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import disttensor as dt
from disttensor.dispatch import call_site
from disttensor.dispatch.method_shortcuts import BINARY, UNARY
from disttensor.proxy.meta import minted_refs
from disttensor.session import current

pytestmark = pytest.mark.usefixtures("clean")

NODE = "node:1"
SEED = 40
#: Drawn calls: of these `make test` has every sixteenth, by a hash of its text.
CALLS, EVERY = 4000, 16

METHODS = [name for names in BINARY.values() for name in names]
ALONE = [name for names in UNARY.values() for name in names]


def _hooked(x: Any, y: Any) -> Any:
    """Has a line of its own in a backward, and another backward within it."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = grad.detach().requires_grad_()
            (made,) = torch.autograd.grad(torch.lerp(leaf, leaf, 0.5).sum(), leaf)
        return grad * made

    z = torch.softmax(x * y, -1)
    if z.requires_grad:
        z.register_hook(hook)
    return z


#: Operators without a method of their own, whose forms are learnt; and backwards.
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "addmm": lambda x, y: torch.addmm(x, x, y),
    "linear": lambda x, y: F.linear(x, y),
    "linear with a bias": lambda x, y: F.linear(x, y, y[0]),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "sum over a dim": lambda x, y: x.sum(0),
    "sum that keeps its dim": lambda x, y: x.sum([0], True),
    "mean over dims": lambda x, y: x.mean((0, 1)),
    "torch.relu": lambda x, y: torch.relu(x),
    "threshold": lambda x, y: F.threshold(x, 0.5, 0.0),
    "gelu": lambda x, y: F.gelu(x),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "lerp in place": lambda x, y: x.lerp_(y, 0.5),
    "clamp in place": lambda x, y: x.clamp_(0, 1),
    "pow": lambda x, y: x**2,
    "masked fill": lambda x, y: x.masked_fill_(x > 1, 0.5),
    "copy": lambda x, y: x.copy_(y),
    "zeros like": lambda x, y: torch.zeros_like(x),
    "ones like, of a dtype": lambda x, y: torch.ones_like(x, dtype=torch.float64),
    "add scaled": lambda x, y: x.add_(y, alpha=2),
    "two arguments": lambda x, y: x.add(y, 2),
    "square of a sum": lambda x, y: (x + y).sum(0) * (x - y).mean(),
    "write into a row": lambda x, y: x[0].mul_(2),
    "write into a transpose": lambda x, y: x.t().add_(y),
    "a hook": _hooked,
    "to and fro": lambda x, y: x.detach().sub_(y),
}


def _range(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(16, device=NODE).to(dtype).view(4, 4) / 4 if dtype.is_floating_point else (
        torch.arange(16, device=NODE).view(4, 4).to(dtype)
    )  # fmt: skip


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return _range()


def _without_gradient() -> torch.Tensor:
    with torch.no_grad():
        return _range().requires_grad_().view(4, 4)


OPERANDS: dict[str, Callable[[], Any]] = {
    "plain": _range,
    "leaf": lambda: _range().requires_grad_(),
    "made of a leaf": lambda: _range().requires_grad_() * 2,
    "rows": lambda: torch.cat([_range(), _range()])[2:6],
    "transposed": lambda: _range().t(),
    "view of a leaf": lambda: _range().requires_grad_()[:],
    "view without a gradient": _without_gradient,
    "detached": lambda: _range().requires_grad_().detach(),
    "inference": _inference,
    "expanded": lambda: _range()[:1].expand(4, 4),
    "row": lambda: _range()[1],
    "number": lambda: _range()[1, 2],
    "none": lambda: _range()[:0],
    "double": lambda: _range(torch.float64),
    "integers": lambda: _range(torch.int64),
    "booleans": lambda: _range(torch.bool),
    "complex": lambda: _range(torch.complex64),
    "parameter": lambda: torch.nn.Parameter(_range()),
    "of another node": lambda: torch.ones(4, 4, device="node:0"),
    "local": lambda: torch.ones(4, 4),
    "local number": lambda: torch.tensor(0.5),
}
VALUES: dict[str, Any] = {
    "0.5": 0.5, "2": 2, "-1": -1, "True": True, "1 << 63": 1 << 63, "None": None, "1j": 1j, "inf": float("inf"),
    "text": "x", "a list": [1.0],
}  # fmt: skip


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append(func.name())
        return func(*args, **(kwargs or {}))


#: What a mode sees of a call.
SEEN: list[str] = []

#: States of torch, and how often they are drawn.
STATES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], int]] = {
    "": (nullcontext, 6),
    "no gradients": (torch.no_grad, 3),
    "inference": (torch.inference_mode, 1),
    "autocast": (lambda: torch.autocast("node", torch.bfloat16), 1),
    "a mode of functions": (_Functions, 1),
    "a mode of operators": (_Operators, 1),
    "forward derivatives": (forward_ad.dual_level, 1),
    "hooks of saved tensors": (lambda: saved_tensors_hooks(lambda t: t * 1, lambda t: t), 1),
}


def drawn() -> Iterator[tuple[str, str, str, str]]:
    """Yields names of a function, of both operands and of a state."""
    draw = random.Random(SEED)
    functions = [*METHODS * 2, *ALONE, *FUNCTIONS]
    states = [name for name, (_, often) in STATES.items() for _ in range(often)]
    plain = ["plain"] * 6
    for _ in range(CALLS):
        other = draw.choice([*plain, *OPERANDS, *VALUES, *VALUES, "itself", "itself"])
        yield draw.choice(functions), draw.choice([*plain, *OPERANDS]), other, draw.choice(states)


def chosen(part: int | None) -> list[tuple[str, str, str, str]]:
    """Returns the calls of `make test` for None, or one of the parts of all."""
    return [call for call in dict.fromkeys(drawn()) if crc32(repr(call).encode()) % EVERY == (part or 0)]


def _called(name: str, x: Any, y: Any) -> Any:
    if name in FUNCTIONS:
        return FUNCTIONS[name](x, y)
    return getattr(x, name)() if name in ALONE else getattr(x, name)(y)


def told(value: Any) -> Any:
    """Returns what a result says of itself, and its values; the error of one that may not be asked."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        made = value.grad_fn
        return (
            type(value), value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), str(value.device),
            value.requires_grad, value.is_leaf, value.is_inference(), value._is_view(), value.is_conj(),
            value.is_neg(), None if value.is_inference() else value._version,
            made and (made.name(), [before and before.name() for before, _ in made.next_functions]),
            repr(value.detach().cpu().tolist()),
        )  # fmt: skip
    except RuntimeError as error:  # a view that was made without gradients, of what was written with them
        return str(error)


def traced(call: Callable[[], Any], operands: list[Any]) -> tuple[Any, ...]:
    """Returns what a call gives, what becomes of its operands and their gradients, and what it has sent, of which
    lines."""
    dt.synchronize()
    SEEN.clear()
    tensors = [t for t in operands if isinstance(t, torch.Tensor)]
    leaves = [t for t in tensors if t.requires_grad and t.is_leaf]
    heard: list[Any] = []
    start = minted_refs()
    error = None
    result = None
    with current.session().link.seam.issued.heard_by(heard.append):
        try:
            result = call()
            ends = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
            if ends and not ends[0].is_complex():
                ends[0].sum().backward()
        except Exception as e:
            error = type(e), str(e)
    with contextlib.suppress(RuntimeError):  # told of at its line, and compared by that
        dt.synchronize()
    sent = [(_relative(h.command, start), h.site) for h in heard]
    same = [[leaf is t for t in tensors] for leaf in tree_leaves(result)]
    gradients = [t.grad for t in leaves]
    return error, [*map(told, [*tree_leaves(result), *tensors, *gradients])], same, sent, list(SEEN)


#: Numbers of questions and of transfers, which none has twice.
ONCE = frozenset({"request", "id", "transfer"})


def _relative(value: Any, start: int) -> Any:
    """Returns a command without what differs each time; its refs count from the call."""
    if isinstance(value, tuple):
        return tuple(_relative(each, start) for each in value)
    if not isinstance(value, msgspec.Struct):
        return value
    fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in ONCE}
    return type(value).__name__, {
        name: each - start if name in ("out", "ref") else _relative(each, start) for name, each in fields.items()
    }


def compare(call: tuple[str, str, str, str]) -> None:
    name, first, second, state = call

    def once() -> tuple[Any, ...]:
        x = OPERANDS[first]()
        y = x if second == "itself" else OPERANDS[second]() if second in OPERANDS else VALUES[second]

        def made() -> Any:
            with STATES[state][0]():
                return _called(name, x, y)

        return traced(made, [x, y])

    once(), once()  # its plans and its forms are there
    quick = once()
    with slow_way():
        slow = once()
    for got, expected, what in zip(quick, slow, ("error", "tensors", "identity", "commands", "seen"), strict=True):
        assert repr(got) == repr(expected), f"{call}: {what}"


def test_drawn_calls() -> None:
    for call in chosen(None):
        compare(call)


def test_an_inference_tensor_is_not_written_outside_of_that_mode() -> None:
    """Nor is the number of its writes, which it has not, asked for."""
    for name in METHODS:
        compare((name, "inference", "2", ""))


def test_no_write_is_counted_below_the_key_that_counts_them() -> None:
    """As of the temporaries of a composite operator: those before it are, here and locally."""
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for x in (_range(), _range().cpu()):
        for _ in range(2):  # its plans are there
            x.add_(1), x.zero_()
        with torch._C._ExcludeDispatchKeyGuard(below):
            x.add_(1), x.zero_()
        assert x._version == 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, EVERY))
def test_all_drawn_calls(part: int) -> None:
    for call in chosen(part):
        compare(call)


def functions_called(call: Callable[[], Any]) -> list[str]:
    """Returns the names of the functions of Python that a call calls."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def test_the_shortcuts_are_taken() -> None:
    """Each method of the table goes past torch, for tensors and for numbers; what has a form goes past `run`."""
    for name in (*METHODS, *ALONE):
        for other in (_range(), 2.0):
            if isinstance(other, float) and name in ("mm", "__matmul__", "matmul", "maximum", "minimum"):
                continue
            x = _range()
            for _ in range(2):
                _called(name, x, other)
            made = functions_called(lambda x=x, other=other, name=name: _called(name, x, other))  # type: ignore[misc]
            assert "issue" in made or "issue_write" in made, name
            assert "dispatch" not in made, name
    for name in ("addmm", "linear", "linear with a bias", "softmax", "sum over a dim", "threshold", "lerp in place"):
        x, y = _range().requires_grad_(not name.endswith("place")), _range()
        for _ in range(2):
            FUNCTIONS[name](x, y)
        made = functions_called(lambda x=x, y=y, name=name: FUNCTIONS[name](x, y))  # type: ignore[misc]
        assert "form" in made, name
        assert "run" not in made, name


def lines(call: Callable[[], Any]) -> set[str]:
    """Returns the names of the functions whose lines issue a call's commands."""
    heard: list[Any] = []
    with current.session().link.seam.issued.heard_by(heard.append):
        call()
    return {h.site[0].co_name for h in heard if h.site is not None}


def test_a_new_signature_behind_a_form_is_of_its_line() -> None:
    def written_here(n: int) -> None:
        torch.lerp(torch.ones(n, device=NODE), torch.ones(n, device=NODE), 0.5)

    written_here(3)
    assert lines(lambda: written_here(5)) == {"written_here"}


def test_lines_of_a_backward() -> None:
    """What a backward issues is of the line that has called it, and what a hook issues, of the hook's."""

    def forward() -> torch.Tensor:
        return _hooked(_range().requires_grad_(), 2).sum()  # type: ignore[no-any-return]

    def calls_it(loss: torch.Tensor) -> None:
        loss.backward()

    for _ in range(3):
        loss = forward()
        assert lines(lambda loss=loss: calls_it(loss)) == {"calls_it", "hook"}  # type: ignore[misc]
    assert not call_site.backwards


# ---- torch's own database --------------------------------------------------------------------------------------------


def operators(every: int) -> list[str]:
    return [name for name in database.OPERATORS if not crc32(name.encode()) % every]


def compare_operator(name: str, count: int) -> None:
    op = database.OPERATORS[name]
    dtype = next(iter(database.dtypes(op)), None)
    if dtype is None:
        pytest.skip("no CPU has it")
    grad = database.differentiable(op, dtype)
    for sample in database.samples(op, dtype, count, grad):
        for function in (op, op.inplace_variant):
            if function is None or (function is not op and sample.broadcasts_input):
                continue

            if any(
                t.layout != torch.strided
                for t in tree_leaves([sample.input, sample.args])
                if isinstance(t, torch.Tensor)
            ):
                continue  # no node has one

            def once(function: Any = function, sample: Any = sample) -> tuple[Any, ...]:
                operands = database.Operands(op, sample, True)
                with torch.set_grad_enabled(function is op):
                    return traced(lambda: operands.call(function), operands.tensors)

            once(), once()
            quick = once()
            with slow_way():
                slow = once()
            if name in database.UNDEFINED | database.VARIES:
                continue
            assert repr(quick) == repr(slow), f"{name}: {sample}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", operators(EVERY))
def test_operators(name: str) -> None:
    compare_operator(name, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", operators(1))
def test_all_operators(name: str) -> None:
    compare_operator(name, 8)
