"""``dt.seeing.check_finite``: the first operation that gives NaN or infinity raises, as local torch finds it.

The twin (tests/kit/finite_twin.py) imports only torch, and looks at each operation of the same program.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from finite_twin import FiniteTwin
from quick import inputs

import disttensor as dt
from disttensor.errors import NonFiniteError
from disttensor.seeing import check_finite

HERE = os.path.basename(__file__)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1, launcher="inproc"):
        yield


def found(node: int | None = None) -> NonFiniteError | None:
    """The error that nodes have reported, once they have done everything."""
    try:
        dt.synchronize(node)
    except NonFiniteError as error:
        return error
    return None


def here(after: int = 0) -> str:
    """The line that calls this, or one after it, as errors have it."""
    return f"{HERE}:{sys._getframe(1).f_lineno + after}"


def test_the_error_says_what_has_become_of_which_operands() -> None:
    x, y = torch.tensor([1.0, 0.0, -2.0, 0.0]).to("node:1"), torch.zeros(4, device="node:1")
    n = torch.tensor([1, 0, 2, 3]).to("node:1")
    with check_finite():
        x * y
        z = x / y
        where = here(-1)
    error = found()
    assert error is not None
    assert isinstance(error, FloatingPointError)
    assert str(error) == (
        "aten::div.Tensor has given float32 (4,) with 2 NaN and 2 inf; its operands: float32 (4,) finite, "
        "float32 (4,) finite"
    )
    assert (error.operator, error.node, error.nan, error.inf, error.shape, error.finite) == (
        "aten::div.Tensor", 1, 2, 2, (4,), (True, True),
    )  # fmt: skip
    assert error.line.startswith(os.path.abspath(__file__)[:1])
    assert f"{where} in test_the_error_says" in error.line
    assert "failed: aten::div.Tensor on node 1" in error.__notes__[0]
    with pytest.raises(NonFiniteError):  # it has no value
        z.sum().item()
    z = x / y
    with check_finite():
        z * n
    error = found()
    assert error is not None
    assert error.finite == (False, True)
    assert "its operands: float32 (4,) with 2 NaN and 2 inf, int64 (4,) finite" in str(error)


def test_it_is_on_in_its_block_alone() -> None:
    x = torch.zeros(3, device="node:0")
    with check_finite():
        x + 1
    x / x
    assert found() is None
    outer = check_finite()
    outer.begin()
    with check_finite(inf=False):
        1 / x
    assert found() is not None  # the outer one still says that infinities count
    outer.end()
    outer.end()
    x / x
    assert found() is None
    with check_finite(inf=False):
        1 / x
        assert found() is None
        (1 / x) * 0
        error = found()
    assert error is not None
    assert (error.nan, error.inf) == (3, 0)


def test_what_is_written_in_place_or_out() -> None:
    x, out = torch.zeros(3, device="node:0"), torch.ones(3, device="node:0")
    with check_finite():
        out.div_(x)
    error = found()
    assert error is not None
    assert (error.operator, error.finite) == ("aten::div_.Tensor", (None, True))
    out = torch.ones(3, device="node:0")
    with check_finite():
        torch.log(x, out=out)
    error = found()
    assert error is not None
    assert error.operator == "aten::log.out"
    tensors = [torch.ones(3, device="node:0"), torch.zeros(3, device="node:0")]
    with check_finite():
        torch._foreach_reciprocal_(tensors)
    error = found()
    assert error is not None
    assert (error.operator, error.inf) == ("aten::_foreach_reciprocal_", 3)


def test_what_nobody_has_computed_is_not_looked_at() -> None:
    x = torch.full((3,), NAN, device="node:0")
    dt.synchronize()
    with check_finite():
        x.t()
        x.view(3, 1)
        torch.empty(64, device="node:0")
        torch.empty_like(x)
        torch.tensor([NAN]).to("node:0")
        x.isnan()
        assert x[0].item() != 0  # NaN is not 0
    assert found() is None
    with check_finite():
        torch.tensor([NAN]).to("node:0") + 1
    error = found()
    assert error is not None
    assert error.finite == (False,)


def test_functions_and_collectives() -> None:
    x = torch.zeros(3, device="node:0")
    with check_finite():
        assert dt.run(plus, x, node=0).shape == (3,)
        with pytest.raises(NonFiniteError, match=r"^divided\(\) has given float32 \(3,\) with 3 NaN and 0 inf\n"):
            dt.run(divided, x, node=0)
    xs = [torch.full((3,), 3e38, device=f"node:{k}") for k in range(2)]
    with check_finite():
        dt.all_reduce(xs)
        where = here(-1)
    error = found()
    assert error is not None
    assert (error.operator, error.inf) == ("all_reduce", 3)
    assert where in error.line


def plus(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def divided(x: torch.Tensor) -> torch.Tensor:
    return x / x


def test_a_mesh_says_which_of_its_ranks() -> None:
    mesh = dt.mesh(dp=2)
    x = dt.meshes.from_shards(mesh, [torch.ones(3), -torch.ones(3)])
    with check_finite():
        x.log()
    error = found()
    assert error is not None
    assert error.node == 1
    assert any("dp=1 of the mesh (dp=2)" in note for note in error.__notes__)


def test_a_stream() -> None:
    x = torch.zeros(3, device="node:0")
    stream = dt.Stream(node=0)
    with dt.stream(stream):
        for _ in range(3):
            x / x  # the first call of a signature goes another way; the next one makes the closure of its lane
        with check_finite():
            y = x / x
            where = here(-1)
    error = found()
    assert error is not None
    assert (error.operator, error.nan) == ("aten::div.Tensor", 3)
    assert where in error.line
    assert dt.seeing.whence(y).failure.startswith("NonFiniteError: aten::div.Tensor has given")
    with dt.stream(stream):
        x / x
    assert found() is None


def test_a_graph_is_looked_at_as_it_is_replayed() -> None:
    x, scale = torch.ones(3, device="node:0"), torch.ones(3, device="node:0")
    (x / scale).sum()
    graph = dt.Graph()
    with dt.graph(graph):
        y = x / scale
        recorded = here(-1)
        z = y + 1
    for _ in range(2):
        graph.replay()
    scale.zero_()
    graph.replay()
    assert found() is None
    with check_finite():
        graph.replay()
        replayed = here(-1)
    error = found()
    assert error is not None
    assert (error.operator, error.inf) == ("aten::div.Tensor", 3)
    assert f"recorded: {os.path.abspath(__file__)}:{recorded.partition(':')[2]} " in error.__notes__[0]
    assert f"replayed: {os.path.abspath(__file__)}:{replayed.partition(':')[2]} " in error.__notes__[0]
    scale.fill_(1)
    graph.replay()
    assert z.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 0], dtype=dtype).to("node:0")
    with check_finite():
        x * 3
        x.conj() - 1
    assert found() is None
    with check_finite():
        x.conj() / x
    error = found()
    assert error is not None
    assert error.nan == 1


def test_numbers_of_one_byte() -> None:
    x = torch.tensor([1.0, NAN]).to("node:0")
    with check_finite():
        x.to(torch.float8_e5m2)
    error = found()
    assert error is not None
    assert error.nan == 1


def test_a_sparse_gradient() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True).to("node:0")
    rows, gradient = embedding(torch.tensor([1, 2]).to("node:0")), torch.full((2, 2), NAN).to("node:0")
    with check_finite():
        rows.sum().backward(retain_graph=True)
        assert found() is None
        rows.backward(gradient)
    error = found()
    assert error is not None
    assert (error.nan, False in error.finite) == (4, True)


# ---- programs --------------------------------------------------------------------------------------------------------

#: Operations of one and of two tensors of one shape.
UNARY: list[Callable[[Any], Any]] = [
    torch.log, torch.sqrt, torch.reciprocal, torch.exp, torch.abs, torch.neg, torch.square, lambda x: x.t(),
    lambda x: x.log_(), lambda x: x.mul_(3), lambda x: x[0].sub_(0.5), lambda x: x.sum(), lambda x: x.softmax(-1),
    lambda x: x.clone(), lambda x: x - x.mean(), lambda x: x * 1e30, lambda x: x.clamp(min=0.25),
]  # fmt: skip
BINARY: list[Callable[[Any, Any], Any]] = [
    torch.add, torch.mul, torch.div, torch.sub, torch.matmul, torch.maximum,
    lambda x, y: x.div_(y.clone()), lambda x, y: torch.cat([x, y]), lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.pow(x, y), lambda x, y: x.copy_(y.clone()),
]  # fmt: skip


def run_program(seed: int, device: str) -> None:
    """Runs a random program on square matrices: each step takes those that there are, and keeps what is one."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    pool = [torch.randn(3, 3, generator=generator).abs().to(device) + 0.1 for _ in range(3)]
    for _ in range(10):
        x, y = chance.choice(pool), chance.choice(pool)
        made = chance.choice(UNARY)(x) if chance.random() < 0.6 else chance.choice(BINARY)(x, y)
        pool += [made] if made.shape == (3, 3) else []


@pytest.mark.parametrize("inf", [True, False])
def test_programs_as_local_torch(inf: bool) -> None:
    caught = 0
    for seed in range(inputs(100)):
        with FiniteTwin(inf) as twin:
            run_program(seed, "cpu")
        error = None
        with check_finite(inf=inf):
            try:
                run_program(seed, "node:0")
            except NonFiniteError as raised:  # at a line that asks its node, such as a new signature's
                error = raised
        later = found()
        error = error or later
        first = None if error is None else (error.operator, error.shape, error.nan, error.inf)
        assert first == twin.first, f"seed {seed}"
        caught += first is not None
    assert caught > 3
