"""What CUDA has a kernel for and a CPU has none, on CPU nodes: libraries take CUDA's way for all that isn't "cpu".

Which those are, torch's own database of operators says. The truth is local torch in a wider type, rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import same
from operator_database import NODE, OPERATORS, Operands, OpInfo, SampleInput, name_of, op_db
from torch.utils._pytree import tree_leaves, tree_map

import disttensor as dt

# nodes that are processes: in-process ones share this process's generator, which samples seed
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("processes", "nothing_left_over")]


@pytest.fixture
def nothing_left_over(processes: None) -> Iterator[None]:
    """A failure that nobody asked about belongs to the test that caused it."""
    yield
    dt.synchronize()


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
KERNELS = "a part of attention's for CUDA: among its results are its generator's state and its padding"
REFUSED = "torch refuses half precision for all devices but CUDA, before a node has a say"

#: (names, types) -> why a CPU node has it not. The list can only shrink: what works fails the test.
LACKS: dict[tuple[str, frozenset[torch.dtype]], str] = {
    ("torch.ops.aten._*_attention_forward", frozenset({torch.float16, torch.float32})): KERNELS,
    ("fft.*", frozenset({torch.float16, torch.bfloat16})): REFUSED,
    ("stft", frozenset({torch.float16, torch.bfloat16})): REFUSED,
    ("sparse.*", frozenset({torch.float16, torch.bfloat16})): "it has sparse tensors; those on nodes are strided",
    ("trace", frozenset({torch.float16, torch.bfloat16})): "what a CPU has from torch 2.13 on; before, it is refused",
    ("__rmod__", INTEGERS): "samples divide by zero, which CPUs refuse and CUDA computes somehow",
}
#: name -> why no CPU has it in any type. The list can only shrink.
NEVER = {
    **{op.name: "its code is compiled by CUDA" for op in op_db if op.name.startswith("jiterator")},
    "torch._scaled_mm_v2": "8-bit numbers that the matrix units of some GPUs multiply",
}


#: (name, dtype) -> why its gradients are not compared.
FORWARD = {
    (name, torch.complex32): "steps of its derivative, each of them rounded, leave the range of complex32"
    for name in ("pow", "logaddexp")
}


def nansum(x: torch.Tensor, dim: Any = None, **options: Any) -> torch.Tensor:
    return x.masked_fill(x.isnan(), 0).sum(dim, **options)


def nanmean(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    return nansum(x, dim, keepdim=keepdim) / x.isnan().logical_not().sum(dim, keepdim=keepdim)


#: name -> what it gives, where no type of a CPU's would
NO_CPU = {"nansum": nansum, "nanmean": nanmean}

WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.bool: torch.uint8,
    **dict.fromkeys(FLOAT8, torch.float32),
    **dict.fromkeys(INTEGERS, torch.float64),
}


def cases() -> list[Any]:
    """All that the database has for CUDA only."""
    found = []
    for name, op in OPERATORS.items():
        if name in NEVER:
            continue
        for dtype in sorted(set(op.dtypesIfCUDA or ()) - set(op.dtypes or ()), key=str):
            why = next((why for (names, types), why in LACKS.items() if fnmatch(name, names) and dtype in types), "")
            marks = [pytest.mark.xfail(reason=why)] if why else []
            found.append(pytest.param(name, dtype, marks=marks, id=f"{name}-{str(dtype)[6:]}"))
    return found


def test_the_lists_name_what_is_for_cuda_only() -> None:
    known = {(case.values[0], case.values[1]) for case in cases()}
    assert len(known) > 40
    assert set(FORWARD) <= known
    assert set(NEVER) <= {name_of(op) for op in op_db}


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_a_cpu_node_has_it(name: str, dtype: torch.dtype) -> None:
    op = OPERATORS[name]
    number = dtype.is_floating_point or dtype.is_complex
    grad = number and op.supports_autograd and dtype in (op.backward_dtypesIfCUDA or ())
    grad = grad and (name, dtype) not in FORWARD
    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 4):
        check(op, sample, dtype)


def check(op: OpInfo, sample: SampleInput, dtype: torch.dtype) -> None:
    """One sample, with gradients, in place and into an ``out=``."""
    try:
        local = Operands(op, sample, False)
        expected = local.call(op)  # some samples are what a CPU has
    except RuntimeError:
        local = Operands(op, widened(sample), False)
        expected = local.call(NO_CPU.get(op.name, op))
    remote = Operands(op, sample, True)
    got = remote.call(op)
    near(got, expected, dtype)
    near(gradients(got, remote), gradients(expected, local), dtype)
    with torch.no_grad():
        if op.supports_out and isinstance(got, torch.Tensor):
            out = torch.empty_like(got)
            assert Operands(op, sample, True).call(lambda *a, **k: op(*a, **k, out=out)) is out
            near(out, expected, dtype)
        if op.inplace_variant is not None and not sample.broadcasts_input and got.dtype == dtype:
            remote = Operands(op, sample, True)
            assert remote.call(op.inplace_variant) is remote.input
            near(remote.input, expected, dtype)


def gradients(result: Any, operands: Operands) -> tuple[Any, ...]:
    outputs = [t for t in tree_leaves(result) if t.requires_grad]
    inputs = [t for t in operands.tensors if t.requires_grad]
    if not outputs or not inputs:
        return ()
    return torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)


def widened(sample: SampleInput) -> SampleInput:
    """The same numbers in a wider type; masks and indices as they are."""
    narrow = sample.input.dtype
    types = {narrow: WIDER[narrow], torch.float16: torch.float32} if narrow in WIDER else {}

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in types:
            return value.detach().to(types[value.dtype]).requires_grad_(value.requires_grad)
        return types.get(value, value) if isinstance(value, torch.dtype) else value

    return SampleInput(wide(sample.input), args=tree_map(wide, sample.args), kwargs=tree_map(wide, sample.kwargs))


def near(remote: Any, local: Any, dtype: torch.dtype) -> None:
    """Asserts that results are on the node and, up to the rounding of ``dtype``, equal to local ones."""
    for r, x in zip(tree_leaves(remote), tree_leaves(local), strict=True):
        if x is None:
            assert r is None
            continue
        assert isinstance(r, dt.DistributedTensor)
        rough = torch.finfo(dtype).eps * 8 if dtype.is_floating_point or dtype.is_complex else 0.0
        assert r.dtype.itemsize <= x.dtype.itemsize
        there = r.detach().cpu().to(x.dtype)
        x = x.detach()
        if rough and r.dtype != x.dtype:  # what overflows
            x = x.to(r.dtype).to(x.dtype)
        torch.testing.assert_close(there, x, rtol=rough, atol=rough, equal_nan=True)


def test_integers_are_counted_exactly() -> None:
    """Large ones too, at the edges between bins."""
    x = torch.tensor([0, 7, 7, 8, (1 << 31) - 1, -3, 3, 4])
    for options in ({"min": 0, "max": 8}, {"bins": 16, "min": 0, "max": 16}, {"bins": 3}):
        got = torch.histc(x.to(NODE), **options)
        same(got, torch.histc(x.double(), **options).long())


def routed(x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A mixture of experts, as libraries compute it: tokens sorted by expert, and one matrix product for each group."""
    weights, chosen = scores.softmax(-1).topk(2, dim=-1)
    chosen = chosen.flatten()
    order = chosen.argsort(stable=True)
    chosen = chosen.float() if x.device.type in ("cpu", "mps") else chosen.int()
    sizes = torch.histc(chosen, bins=len(up), min=0, max=len(up) - 1)
    ends = sizes.cumsum(0, dtype=torch.int32)
    tokens = x.repeat_interleave(2, dim=0)[order]
    y = F.grouped_mm(F.silu(F.grouped_mm(tokens, up, offs=ends)), down.transpose(-2, -1), offs=ends)
    y = y * weights.flatten()[order, None]
    return y[order.argsort()].view(len(x), 2, -1).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [4, 40])
def test_a_mixture_of_experts_is_trained(dtype: torch.dtype, experts: int) -> None:
    """With experts that no token goes to, too."""
    shapes = (12, 16), (12, experts), (experts, 16, 24), (experts, 16, 24)
    local = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    remote = [t.detach().to(NODE).requires_grad_() for t in local]
    here, there = routed(*local), routed(*remote)
    same(there, here)
    here.square().mean().backward()
    there.square().mean().backward()
    for r, x in zip(remote, local, strict=True):
        same(r.grad, x.grad)


@pytest.mark.parametrize("dims", [(2, 3), (3, 3), (2, 2), (3, 2)])
def test_products_of_groups(dims: tuple[int, int]) -> None:
    """Groups of rows, of whole matrices, of the dimension that is summed over, of columns."""
    ends = None if dims == (3, 3) else torch.tensor([3, 8], dtype=torch.int32)
    a, b = torch.randn((2, 8, 8)[-dims[0] :]), torch.randn((2, 8, 8)[-dims[1] :])
    away = None if ends is None else ends.to(NODE)
    same(F.grouped_mm(a.to(NODE), b.to(NODE), offs=away), F.grouped_mm(a, b, offs=ends))
    with pytest.raises((RuntimeError, ValueError)):
        F.grouped_mm(a.double().to(NODE), b.double().to(NODE), offs=away)
