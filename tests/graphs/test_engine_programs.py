"""What the compiled engine does around generated code: aliases, writes, numbers, random draws, indices.

The generated code's place is taken by the traced program, run as it is, so that many programs can be tried; that
AOTInductor does what it is told is tested in test_engine_build.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from program_kit import SENTINELS, STEPS, copies, interpret, play, record, start, steps_of
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from disttensor.runtime.node.graphs.engines import fitness, listing, tracing
from disttensor.runtime.node.graphs.engines.compiled import Compiled
from disttensor.runtime.node.graphs.engines.numbers import call
from disttensor.runtime.node.graphs.program import Program
from disttensor.runtime.node.store import memory

A, B, C = SENTINELS
NUMBERS = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (1e-3, 2.0, 1.0))


def traced(program: Program, inputs: Sequence[Tensor]) -> Compiled:
    """The program as it would be compiled, by way of its listing."""
    geometry = listing.input_geometry(inputs)
    text = listing.dump(program, geometry)
    parsed, again = listing.parse(text)
    assert again == geometry
    assert listing.dump(parsed, again) == text
    with FakeTensorMode():
        plan = fitness.Analysis(parsed, again).plan
    module = tracing.Traced(parsed, again, plan)
    tracing.check(module, tracing.examples(again, plan, parsed))
    return Compiled(program, geometry, json.loads(json.dumps(plan.plain())), lambda a: list(module(*a)))


def aliases(tensors: Sequence[Tensor]) -> list[list[bool]]:
    return [[memory(a) == memory(b) for b in tensors] for a in tensors]


def replays_alike(function: Callable[[], Sequence[Tensor]], numbers: int = 0, written: bool = True) -> Compiled:
    """Three replays: the same outputs, inputs, aliases and random state as by the interpreter."""
    program, inputs = record(function, numbers)
    ours, theirs = copies(inputs), copies(inputs)
    compiled = traced(program, ours)
    for values in NUMBERS:
        torch.manual_seed(3)
        expected = interpret(program, theirs, values[:numbers])
        state = torch.get_rng_state()
        torch.manual_seed(3)
        results = compiled.run(ours, values[:numbers])
        assert results is not None
        assert torch.equal(state, torch.get_rng_state())
        for one, other in zip([*results, *ours], [*expected, *theirs], strict=True):
            torch.testing.assert_close(one, other)
            assert (steps_of(one), one.storage_offset()) == (steps_of(other), other.storage_offset())
        assert aliases([*results, *ours]) == aliases([*expected, *theirs])
    return compiled


def stays(function: Callable[[], Sequence[Tensor]], why: str) -> None:
    program, inputs = record(function)
    with pytest.raises(listing.NotCompilable, match=why):
        traced(program, inputs)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_view_of_an_input_is_written(x: Tensor) -> None:
    def f() -> list[Tensor]:
        x.view(-1)[3:9].add_(1)
        return [x @ x.t()]

    replays_alike(f)


def test_inputs_that_share_memory_are_written(x: Tensor) -> None:
    flat, turned = x.view(-1)[2:], x.t()

    def f() -> list[Tensor]:
        turned.mul_(0.5)
        flat.add_(1)
        return [x + 1, turned]

    replays_alike(f)


def test_inputs_that_share_memory_are_read(x: Tensor) -> None:
    turned = x.t()
    replays_alike(lambda: [x @ turned, turned + 1])


def test_outputs_share_memory_as_in_eager(x: Tensor) -> None:
    def f() -> list[Tensor]:
        a = x + 1
        b = (x + 2)[1]
        b.zero_()
        return [a, a[1], a.t(), x[0], x, b, a.expand(2, 4, 6), x]

    replays_alike(f)


def test_a_memory_of_several_dtypes_is_written(x: Tensor) -> None:
    whole = x.view(torch.int32)

    def f() -> list[Tensor]:
        x.add_(1)
        return [whole + 1]

    stays(f, "different dtypes")


def test_elements_that_overlap_are_written() -> None:
    wide = torch.zeros(1).expand(3)
    program, inputs = record(lambda: [wide + 1])
    line = program.lines[0]
    overwrite = type(line)(torch.ops.aten.zero_.default, line.args[:1], {}, (), True)
    with pytest.raises(listing.NotCompilable, match="overlap"):
        traced(Program((overwrite, line), program.inputs, program.outputs, 0), inputs)


def test_running_statistics_are_written(x: Tensor) -> None:
    norm = torch.nn.BatchNorm1d(6)
    replays_alike(lambda: [norm(x).detach()])
    norm.eval()
    replays_alike(lambda: [norm(x).detach()])


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=3, max_size=14))
def test_random_programs(steps: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(0)
    outside = start()
    replays_alike(lambda: play(steps, outside), 3)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_change(x: Tensor) -> None:
    w = torch.rand(5, 5) + 1

    def f() -> list[Tensor]:
        w.mul_(A).add_(w, alpha=-B).addcmul_(w, w, value=A).lerp_(w * 2, C)
        torch.addcdiv(w, w, w + 9, value=B)
        x.masked_fill_(x > 0, C)
        return [x / A, w + B, C - w, w**B, w.clamp(A, B), torch.full((3,), C), w.clamp_min(A), w.clone().fill_(B)]

    replays_alike(f, 3)


def test_numbers_of_lists_change() -> None:
    xs, ys = [torch.rand(3) + 1, torch.rand(2, 2)], [torch.rand(3), torch.rand(2, 2) + 1]

    def f() -> list[Tensor]:
        torch._foreach_mul_(xs, A)
        torch._foreach_add_(xs, ys, alpha=B)
        torch._foreach_addcdiv_(xs, ys, [y + 1 for y in ys], [A, C])
        torch._foreach_addcmul_(xs, ys, ys, B)
        torch._foreach_lerp_(xs, ys, C)
        return [*torch._foreach_div(xs, [A, B])]

    replays_alike(f, 3)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adamax"])
def test_learning_rates_of_optimizers(name: str, foreach: bool) -> None:
    parameters = [torch.nn.Parameter(torch.rand(3, 3)), torch.nn.Parameter(torch.rand(3))]
    optimizer = getattr(torch.optim, name)(parameters, lr=A, foreach=foreach)
    for p in parameters:
        p.grad = torch.rand_like(p)

    def f() -> list[Tensor]:
        optimizer.step()
        return []

    f()
    optimizer.zero_grad(set_to_none=False)
    for p in parameters:
        p.grad = torch.rand_like(p)
    replays_alike(f, 1)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: [torch.arange(3) * A], "beside torch.int64"),
        (lambda x: [F.leaky_relu(x, A)], "number that changes"),
        (lambda x: [torch.empty(3).bernoulli_(A)], "numbers that change"),
    ],
)
def test_numbers_where_no_tensor_can_stand(x: Tensor, function: Callable[[Tensor], list[Tensor]], why: str) -> None:
    program, inputs = record(lambda: function(x), 1)
    with pytest.raises(listing.NotCompilable, match=why):
        traced(program, inputs)


def test_sums_with_a_factor_are_products_and_sums(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor takes ``a @ b + alpha * c`` for ``addmm(c, a, b)``."""
    seen: list[object] = []
    monkeypatch.setattr(tracing, "call", lambda op, args, kwargs: [seen.append(kwargs), call(op, args, kwargs)][1])

    def f() -> list[Tensor]:
        y = x @ x.t()
        y.add_(x[:, :4], alpha=0.5)
        ys = torch._foreach_add([y, y], [y, y + 1], alpha=2)
        return [torch.add(y, y, alpha=3), torch.sub(y, y, alpha=3), y, *ys, torch.add(y.int(), y.int(), alpha=2)]

    replays_alike(f)
    assert not [kwargs for kwargs in seen if isinstance(kwargs, dict) and "alpha" in kwargs]


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_draws_are_eagers(x: Tensor) -> None:
    def f() -> list[Tensor]:
        torch.rand(3)  # nobody reads it; the generator advances
        x.t().bernoulli_(0.5)
        return [
            *(F.dropout(x, 0.3), torch.randn(3), torch.rand_like(x), x.clone().uniform_(), F.dropout(x.t(), 0.5)),
            *(torch.randperm(5), torch.randint(9, (4,)), torch.empty(2).normal_(1, 2), F.dropout(x, 1.0)),
            *(torch.empty(3).exponential_(), torch.empty(6).random_(7), torch.normal(0.0, 1.0, (2,))),
        ]

    replays_alike(f)


def test_draws_that_depend_on_data(x: Tensor) -> None:
    stays(lambda: [torch.bernoulli(x.sigmoid())], "depends on a tensor")
    stays(lambda: [torch.multinomial(x.exp(), 2)], "may fail")
    stays(lambda: [torch.normal(x, 1.0)], "depends on a tensor")


# ---- what may fail ---------------------------------------------------------------------------------------------------


def test_indices_are_checked_before_anything_is_written(x: Tensor) -> None:
    table, labels = torch.randn(7, 6), torch.tensor([1, 6, 3, 0])

    def f() -> list[Tensor]:
        x.add_(1)
        torch.rand(3)
        later = labels + torch.arange(4) * 0
        loss = F.cross_entropy(x, labels.clamp(0, 5))
        return [F.embedding(labels, table), table[later], table.gather(0, labels[:, None]), loss]

    program, inputs = record(f)
    compiled = replays_alike(f)
    before = copies(inputs)
    for bad in (7, -1, -100):
        inputs, state = copies(before), torch.get_rng_state()
        where = next(t for t in inputs if t.dtype == torch.int64)
        where[2] = bad
        assert compiled.run(inputs, ()) is None
        assert torch.equal(state, torch.get_rng_state())
        for one, other in zip(inputs, before, strict=True):
            assert torch.equal(one, other) or one is where
        with pytest.raises(IndexError):
            interpret(program, inputs)


def test_a_class_to_ignore_is_no_class(x: Tensor) -> None:
    labels = torch.tensor([1, -100, 3, 0])
    replays_alike(lambda: [F.cross_entropy(x, labels)])


def test_indices_that_come_about_in_range(x: Tensor) -> None:
    def f() -> list[Tensor]:
        best = x.argmax(1, keepdim=True)
        order = x.sort(1)[1]
        return [x.gather(1, best), x.gather(1, order), F.max_pool2d(x[None], 2), x.gather(1, x.topk(2)[1])]

    replays_alike(f)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: [torch.linalg.inv(x @ x.t())], "may fail"),
        (lambda x: [(x.int() + 5) // (x.int() + 2)], "of integers"),
        (lambda x: [x[0][(x[1] * 0.1).long()]], "computed from other than indices"),
        (lambda x: [F.binary_cross_entropy(x.sigmoid(), x.sigmoid())], "may fail"),
        (lambda x: [x.nonzero()], "nonzero"),
        (lambda x: [x.clone().resize_(2)], "geometry"),
    ],
)
def test_what_may_fail_stays(function: Callable[[Tensor], list[Tensor]], why: str) -> None:
    x = torch.full((2, 3), 0.3) + torch.eye(2, 3) * 2
    stays(lambda: function(x), why)


def test_other_geometry_is_refused(x: Tensor) -> None:
    program, inputs = record(lambda: [x + 1])
    compiled = traced(program, inputs)
    assert compiled.run([torch.ones(4, 6)], ()) is not None
    for other in (torch.ones(4, 5), torch.ones(6, 4).t(), torch.ones(4, 6).double(), torch.ones(4, 6).to_sparse()):
        assert compiled.run([other], ()) is None
