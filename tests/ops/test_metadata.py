"""Proxies' metadata are what the node's tensors have, whatever the operands' strides; some meta kernels are wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import first_calls
import pytest
import torch
from operator_database import NODE, strides, true_to_node
from telling import said

import disttensor as dt
from disttensor import testing
from disttensor.dispatch import meta_inference, rehearsal, trial
from disttensor.dispatch.op_table import entries
from disttensor.runtime.protocol.errors import GeometryError

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("clean")

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "atan2": torch.atan2,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "gelu": lambda x, y: torch.ops.aten.gelu_backward(x, y),
    "threshold": lambda x, y: torch.ops.aten.threshold_backward(x, y, 0),
    "copy": lambda x, y: (x + y).clone(),
}


def operand(draw: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, permuted, expanded or with steps."""
    kind = draw.choice(("contiguous", "permuted", "expanded", "steps"))
    if kind == "permuted":
        order = draw.sample(range(len(shape)), len(shape))
        return torch.randn([shape[i] for i in order], dtype=dtype).permute([order.index(i) for i in range(len(shape))])
    if kind == "expanded":
        return torch.randn([draw.choice((1, n)) for n in shape], dtype=dtype).expand(shape)
    if kind == "steps":
        return torch.randn([2 * n for n in shape], dtype=dtype)[tuple(slice(None, None, 2) for _ in shape)]
    return torch.randn(shape, dtype=dtype)


def there(x: torch.Tensor) -> torch.Tensor:
    """On the node with these very strides."""
    base = torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(NODE)
    return torch.as_strided(base, x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_elementwise(name: str, dtype: torch.dtype) -> None:
    draw = random.Random(name)
    for _ in range(60):
        shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.choice((2, 3, 4)))]
        x, y = operand(draw, shape, dtype), operand(draw, shape, dtype)
        got, expected = OPERATORS[name](there(x), there(y)), OPERATORS[name](x, y)
        true_to_node([got])
        assert strides(got) == strides(expected)


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugate": lambda z: z.conj(),
    "negative": lambda z: z.conj().imag,
    "both": lambda z: torch._neg_view(z.conj()),
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_results_of_functions(name: str) -> None:
    z = torch.randn(3, 2, dtype=torch.complex64)
    expected, got = LAZY[name](z), dt.run(LAZY[name], z.to(NODE), node=0)
    true_to_node([got])
    assert (got.is_conj(), got.is_neg()) == (expected.is_conj(), expected.is_neg())
    for use in (lambda x: x * 2, torch.clone, lambda x: x.t().real.neg(), lambda x: torch.view_as_real(x + 0j)):
        assert torch.equal(use(got).cpu(), use(expected))


@pytest.mark.parametrize("adjoint", [True, False])
def test_a_lazy_result_of_what_is_asked(adjoint: bool) -> None:
    """Operators whose meta kernels are not believed."""
    a, b = torch.randn(3, 3, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
    factors = torch.linalg.lu_factor(a)
    expected = torch.linalg.lu_solve(*factors, b, left=False, adjoint=adjoint)
    remote = [x.to(NODE) for x in (*factors, b)]
    for _ in range(2):  # asked, and planned
        got = torch.linalg.lu_solve(*remote, left=False, adjoint=adjoint)
        true_to_node([got])
        assert got.is_conj() == expected.is_conj()
        assert torch.equal(got.imag.cpu(), expected.imag)


# ---- a meta kernel that is wrong -------------------------------------------------------------------------------------


def _steps(x: Any) -> Any:
    """With a step of two elements."""
    if not isinstance(x, torch.Tensor):
        return type(x)(map(_steps, x))
    wide = torch.empty([2 * n for n in x.shape], dtype=x.dtype, device="meta")
    return wide[tuple(slice(None, None, 2) for _ in x.shape)]


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, Any], None]]:
    """Has the script take an operator's results for others."""
    right, lies = meta_inference.infer, dict[Any, Any]()

    def inferred(op: Any, args: Any, kwargs: Any) -> Any:
        if op in lies and lies[op] is None:
            raise NotImplementedError  # as where there is no meta kernel
        result = right(op, args, kwargs)
        return lies[op](result) if op in lies else result

    def tell(op: Any, lie: Callable[[Any], Any] | None) -> None:
        lies[op] = lie
        forget(op)

    def forget(op: Any) -> None:
        if id(op) in entries:
            entries[id(op)].drop_plans()

    monkeypatch.setattr(meta_inference, "infer", inferred)
    monkeypatch.setattr(trial, "tried", lambda *_: trial.Found(False))  # this CPU's kernel does as the meta kernel says
    yield tell
    for op in lies:
        forget(op)


LIES: dict[str, tuple[Any, Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "strides": (aten.cosh.default, lambda x: x.cosh(), _steps),
    "dtype": (aten.erfc.default, lambda x: x.erfc(), lambda r: r.to(torch.float64)),
    "shape": (aten.cumsum.default, lambda x: x.cumsum(0), lambda r: r.new_empty(r.shape[0] + 1, *r.shape[1:])),
    "offset": (aten.sinh.default, lambda x: x.sinh(), lambda r: r.new_empty(r.numel() + 1)[1:].view(r.shape)),
    "bits": (aten.asinh.default, lambda x: x.asinh(), lambda r: torch._neg_view(r)),
    "several": (aten.cummax.default, lambda x: x.cummax(0), _steps),
    "list": (aten._foreach_cosh.default, lambda x: torch._foreach_cosh([x, x]), _steps),
    "view": (aten.diagonal.default, lambda x: x.diagonal() + 0, lambda r: r.as_strided(r.shape, (1,))),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", LIES)
def test_a_difference_is_told_with_operator_and_line(name: str, stream: bool, wrong: Any) -> None:
    op, call, lie = LIES[name]
    x = torch.ones(3, 5, device=NODE)
    wrong(op, lie)
    with dt.stream(dt.Stream(0) if stream else None):
        made = call(x)
    with pytest.raises(GeometryError, match="where the script takes it to be") as caught:
        dt.synchronize()
    assert f"{op.name()} gave a tensor (" in str(caught.value)
    assert f"failed: {op.name()} on node 0" in said(caught.value)
    line = call.__code__.co_firstlineno
    assert f"test_metadata.py:{line} in <lambda>" in said(caught.value)
    with pytest.raises(GeometryError):  # and nobody computes with it
        (made[0] if isinstance(made, (list, tuple)) else made).sum().item()
    assert x.sum().item() == 15


def test_what_is_written_is_compared_too(wrong: Any) -> None:
    x, out = torch.ones(2, 3, device=NODE), torch.ones(0, device=NODE)
    wrong(aten.acosh.out, lambda r: r)
    torch.acosh(x, out=out)  # another shape: the node says which
    assert out.tolist() == [[0.0] * 3] * 2

    wrong(aten.atanh.out, None)
    small = torch.ones(6, device=NODE)[:0]
    torch.atanh(x * 0, out=small)
    assert small.tolist() == [[0.0] * 3] * 2

    wrong(aten.t_.default, None)
    x.t_()
    with pytest.raises(GeometryError, match=r"aten::t_ gave"):
        dt.synchronize()


def test_a_graph_compares_what_is_written(wrong: Any) -> None:
    x, small = torch.ones(2, 3, device=NODE), torch.ones(6, device=NODE)[:0]
    wrong(aten.atanh.out, None)
    dt.synchronize()
    g = dt.Graph()
    with dt.graph(g):
        torch.atanh(x, out=small)
    g.replay()
    with pytest.raises(GeometryError, match=r"aten::atanh\.out gave"):
        dt.synchronize()


def test_a_graph_compares_in_its_first_replay(wrong: Any) -> None:
    wrong(aten.expm1.default, _steps)
    x = torch.ones(2, 3, device=NODE)
    dt.synchronize()
    g = dt.Graph()
    with dt.graph(g):
        x.expm1()
    dt.synchronize()
    g.replay()
    with pytest.raises(GeometryError, match="aten::expm1 gave"):
        dt.synchronize()


#: Calls of which torch's meta kernels tell other strides, or nothing: for a column of a matrix of one row, and others.
FIRST_IN_A_GRAPH: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": torch.relu,
    "times a number": lambda x: x * 2,
    "clamp": lambda x: x.clamp(min=0),
    "beside another": lambda x: torch.logaddexp(x, x.contiguous()),
    "conjugate": lambda x: torch.relu(torch.view_as_complex(torch.stack([x, x], -1)).conj().imag),
    "several": lambda x: torch.frexp(x),
    "empty": lambda x: torch.empty_like(x).fill_(3),
    "no meta kernel": lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    "refuses zeros": lambda x: (
        torch.arange(3, device=x.device).view(3, 1).t()[..., None] // torch.full((2,), 2, device=x.device)
    ),
}


@pytest.mark.parametrize("name", FIRST_IN_A_GRAPH)
def test_a_first_call_while_a_graph_is_recorded(name: str) -> None:
    """Nobody can be asked what it makes of its operands, so its node is asked what it makes of others that lie so."""
    call = FIRST_IN_A_GRAPH[name]
    local = [torch.arange(1.0, 7.0).view(1, 6).t(), torch.arange(1.0, 7.0).view(6, 1).t(), torch.ones(4, 3, 1)[::2]]
    expected = [t for x in local for t in leaves(call(x))]
    xs = [there(x) for x in local]
    dt.synchronize()
    first_calls.forget()
    g = dt.Graph()
    with dt.graph(g):
        made = [t for x in xs for t in leaves(call(x))]
    g.replay()
    dt.synchronize()
    assert [x.stride() for x in made] == [x.stride() for x in expected]
    true_to_node(made)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(made, expected, strict=True))


def test_a_loss_while_the_node_is_asked_beside_a_recording_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node refuses nothing then: who goes on would be told by nobody, and the loss counts as told."""

    def lost(function: Any) -> Any:
        raise dt.NodeLost(0, cause="killed")

    x = there(torch.arange(1.0, 7.0).view(1, 6).t())
    dt.synchronize()
    first_calls.forget()
    monkeypatch.setattr(rehearsal, "unwarned", lost)
    with pytest.raises(dt.NodeLost, match="killed"), dt.graph(dt.Graph()):
        x * 2


def leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def test_only_the_first_call_is_longer() -> None:
    x = torch.ones(7, 11, device=NODE)
    with testing.MessageLog() as log:
        for _ in range(3):
            x.hypot(x)
    first, *others = [c for c in log.issued()[0] if "hypot" in log.name(0, c) and "Call" in log.name(0, c)]
    assert [type(c).__name__ for c in (first, *others)] == ["First", "Call", "Call"]


def test_a_meta_kernel_is_tried_once_for_operands_that_lie_alike(wrong: Any) -> None:
    def questions(n: int) -> int:
        """That a call with permuted operands asks."""
        x = torch.ones(n, n + 1, device=NODE).t()
        with testing.MessageLog() as log:
            aten.copysign(x, x)
        return sum(name.startswith("Ask") for name in log.commands)

    wrong(aten.copysign.Tensor, lambda r: r)
    assert [questions(n) for n in (3, 4, 5)] == [1, 0, 0]
    wrong(aten.copysign.Tensor, _steps)
    assert [questions(n) for n in (3, 4, 5, 5)] == [1, 1, 1, 0]  # it was wrong: the node is asked for each shape


def test_a_node_that_does_more_than_this_cpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "tried", lambda *_: trial.Found(True))
    x = torch.ones(5, 3, device=NODE)

    def questions(n: int) -> int:
        with testing.MessageLog() as log:
            x[:n].erfinv()
        return sum(name.startswith("Ask") for name in log.commands)

    assert [questions(n) for n in (2, 3, 4, 4)] == [1, 0, 0, 0]


def _refusing(op: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError("the meta kernel refuses all")


REFUSED_IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it lies": lambda x: x.mul_(x + 1),
    "of another geometry": lambda x: x.sum().addbmm_(x.view(1, 2, 3), x.view(1, 3, 2)),
}


@pytest.mark.parametrize("name", REFUSED_IN_PLACE)
def test_a_first_call_in_place_that_the_meta_kernel_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is recorded as otherwise: a node is asked beside the recording, as it is of other calls."""
    call, x = REFUSED_IN_PLACE[name], torch.arange(1.0, 7.0)
    if name == "as it lies":  # torch's own has no such call
        infer = meta_inference.infer
        refuse = lambda op, *rest: (_refusing if op is aten.mul_.Tensor else infer)(op, *rest)  # noqa: E731
        monkeypatch.setattr(meta_inference, "infer", refuse)
    expected = call(x.clone())
    for recorded in (False, True):
        first_calls.forget()
        y, g = there(x), dt.Graph()
        if recorded:
            with dt.graph(g):
                made = call(y)
            g.replay()
        else:
            made = call(y)
        true_to_node([made])
        assert (made.shape, made.stride()) == (expected.shape, expected.stride())
        assert torch.equal(made.cpu(), expected)
    first_calls.forget()


def test_a_mistake_in_place_is_raised_while_a_graph_is_recorded() -> None:
    x = there(torch.ones(3))
    first_calls.forget()
    with pytest.raises(RuntimeError, match=r"output with shape \[3\] doesn't match"), dt.graph(dt.Graph()):
        x.mul_(torch.ones(2, 3, device=NODE))


def test_the_node_may_take_what_the_meta_kernel_refuses() -> None:
    x = torch.randn(2, 3, 4).transpose(0, 2)
    assert torch.equal(torch.view_copy(x.to(NODE), (4, 6)).cpu(), torch.view_copy(x, (4, 6)))
    y, g = x.to(NODE), dt.Graph()
    first_calls.forget()
    with dt.graph(g):  # nothing can be asked of the call itself
        made = torch.view_copy(y, (4, 6))
    g.replay()
    assert torch.equal(made.cpu(), torch.view_copy(x, (4, 6)))
    with pytest.raises(RuntimeError, match="shape") as caught:
        torch.ones(2, 3, device=NODE).t() @ torch.ones(4, 5, device=NODE)
    assert "(3x2 and 4x5)" in str(caught.value)
