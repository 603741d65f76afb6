"""PyTorch's own database of operators with sample inputs, run on a node and here.

What is compared, per sample: results bit for bit with their strides, gradients, what in-place variants and writes to
views do to the operands, and what the proxy says of its tensor with what the node has.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from equal import same, send
from torch.utils._pytree import tree_leaves, tree_map

import disttensor as dt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

NODE = "node:0"
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
#: Their values are what memory happens to hold.
UNDEFINED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


#: Those that make tensors from numbers; some samples name no device.
MAKES = frozenset({"arange", "linspace", "logspace"})


def name_of(op: OpInfo) -> str:
    """Unique: "sum", "std_mean.unbiased"."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


#: Without those of CUDA only.
OPERATORS: dict[str, OpInfo] = {name_of(op): op for op in op_db if not op.name.startswith("jiterator")}


def dtypes(op: OpInfo) -> list[torch.dtype]:
    """Those of ours that the operator has a CPU kernel for."""
    supported = op.supported_dtypes("cpu")
    return [d for d in DTYPES if d in supported]


def samples(op: OpInfo, dtype: torch.dtype, count: int | None, grad: bool) -> Iterator[SampleInput]:
    """The same ones each time."""
    torch.manual_seed(0)
    yield from itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), count)


def differentiable(op: OpInfo, dtype: torch.dtype) -> bool:
    return bool(op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"))


class Operands:
    """One sample's arguments: the local ones, or proxies of them."""

    def __init__(self, op: OpInfo, sample: SampleInput, there: bool) -> None:
        values = (sample.input, list(sample.args), dict(sample.kwargs))
        values = tree_map(lambda v: v.detach().clone().requires_grad_(v.requires_grad) if _is(v) else v, values)
        if there:
            indices = values[1] if op.name == "tensor_split" else None  # which have to be on the CPU
            values = tree_map(lambda v: NODE if isinstance(v, str) and v == "cpu" else v, send(values, NODE))
            if indices is not None:
                values = (values[0], indices, values[2])
            if op.name in MAKES:
                values[2]["device"] = NODE
        self.input, self.args, self.kwargs = values
        self.tensors = [t for t in tree_leaves(values) if _is(t)]
        if op.name == "tensor_split":
            self.tensors = self.tensors[:1]

    def call(self, function: Callable[..., Any]) -> Any:
        torch.manual_seed(1)
        return function(self.input, *self.args, **self.kwargs)


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def agree(remote: Any, local: Any, close: bool, what: str) -> None:
    """As ``same``, but strides where they matter; ``close`` asks for equal numbers up to rounding only."""
    theirs, ours = tree_leaves(local), tree_leaves(remote)
    assert len(ours) == len(theirs), f"{what}: {len(ours)} results where there are {len(theirs)} here"
    for i, (r, x) in enumerate(zip(ours, theirs, strict=True)):
        path = f"{what}[{i}]"
        if not _is(x):
            same(r, x, path=path)
            continue
        assert isinstance(r, dt.DistributedTensor), f"{path} is a {type(r).__name__}, not a proxy"
        assert (r.dtype, r.shape, r.requires_grad) == (x.dtype, x.shape, x.requires_grad), path
        assert (r.is_conj(), r.is_neg()) == (x.is_conj(), x.is_neg()), f"{path}: lazy conjugate or negative"
        assert strides(r) == strides(x), f"{path}: strides {r.stride()} where they are {x.stride()} here"
        if close and (x.is_floating_point() or x.is_complex()):
            scale = x.detach().abs().nan_to_num().max().item() if x.numel() else 0.0
            rough = torch.finfo(x.dtype).eps * 256
            torch.testing.assert_close(r.detach().cpu(), x.detach(), rtol=rough, atol=rough * scale, equal_nan=True)
        else:
            same(r, x, strides=False, path=path)


def strides(x: torch.Tensor) -> tuple[int, ...]:
    """Of the dimensions in which there are steps."""
    return tuple(s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1) if x.numel() else ()


def _there(x: torch.Tensor) -> tuple[Any, ...]:
    """Runs on the node."""
    return tuple(x.shape), x.stride(), int(x.storage_offset()), str(x.dtype), x.is_conj(), x.is_neg()


def true_to_node(proxy: torch.Tensor) -> None:
    """Asserts that a proxy's metadata are its tensor's."""
    shape, stride, offset, dtype, *bits = dt.run(_there, proxy.detach(), node=0)
    assert (tuple(proxy.shape), str(proxy.dtype)) == (tuple(shape), dtype), "the node has another shape or dtype"
    assert [proxy.is_conj(), proxy.is_neg()] == bits, "conjugate or negative on one side only"
    said = [s for n, s in zip(shape, proxy.stride(), strict=True) if n > 1] if proxy.numel() else []
    has = [s for n, s in zip(shape, stride, strict=True) if n > 1] if proxy.numel() else []
    assert (said, int(proxy.storage_offset())) == (has, offset), f"strides {proxy.stride()}, the node has {stride}"


def check(op: OpInfo, dtype: torch.dtype, count: int | None = None, close: bool = False) -> int:
    """Runs samples (``count`` at most) and asserts that all is the same. How many there were."""
    grad = differentiable(op, dtype)
    done = 0
    for sample in samples(op, dtype, count, grad):
        done += 1
        _check_call(op, sample, grad, close)
        if op.inplace_variant is not None and not sample.broadcasts_input:
            _check_in_place(op, sample, close)
        _check_view(op, sample)
    dt.synchronize()
    return done


def _check_call(op: OpInfo, sample: SampleInput, grad: bool, close: bool) -> None:
    local, remote = Operands(op, sample, False), Operands(op, sample, True)
    try:
        expected = local.call(op)
    except Exception as error:  # some samples show what is refused
        with _raises(type(error)):
            remote.call(op)
            dt.synchronize()
        return
    got = remote.call(op)
    for leaf in tree_leaves(got):
        if isinstance(leaf, dt.DistributedTensor):
            true_to_node(leaf)
    if op.name in UNDEFINED:
        expected, got = (tree_map(lambda t: torch.zeros_like(t) if _is(t) else t, v) for v in (expected, got))
    if sample.output_process_fn_grad is not None:
        expected, got = sample.output_process_fn_grad(expected), sample.output_process_fn_grad(got)
    agree(got, expected, close, "result")
    agree(remote.tensors, local.tensors, close, "operand after it")
    if grad:
        here, there = _gradients(expected, local), _gradients(got, remote)
        for leaf in there or ():
            if leaf is not None:
                true_to_node(leaf)
        assert (here is None) == (there is None), "only one of the two has gradients"
        agree(there, here, close, "gradient")


def _gradients(result: Any, operands: Operands) -> Any:
    outputs = [t for t in tree_leaves(result) if _is(t) and t.requires_grad]
    inputs = [t for t in operands.tensors if t.requires_grad]
    if not outputs or not inputs:
        return ()
    torch.manual_seed(2)
    seeds = [torch.ones_like(t) for t in outputs]
    try:
        return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
    except RuntimeError:  # some samples have no backward
        return None


def _check_in_place(op: OpInfo, sample: SampleInput, close: bool) -> None:
    local, remote = Operands(op, sample, False), Operands(op, sample, True)
    with torch.no_grad():
        try:
            expected = local.call(op.inplace_variant)
        except Exception as error:
            with _raises(type(error)):
                remote.call(op.inplace_variant)
                dt.synchronize()
            return
        got = remote.call(op.inplace_variant)
        assert (got is remote.input) == (expected is local.input)
    true_to_node(remote.input)
    agree(remote.tensors, local.tensors, close, "operand of the in-place variant")


def _check_view(op: OpInfo, sample: SampleInput) -> None:
    """What is written to a result that is a view of an operand is to be found in the operand."""
    local, remote = Operands(op, sample, False), Operands(op, sample, True)
    views: list[int] = []
    with torch.no_grad(), contextlib.suppress(Exception):
        theirs = [t for t in tree_leaves(local.call(op)) if _is(t) and t.layout is torch.strided]
        memory = {t.untyped_storage().data_ptr() for t in local.tensors if t.layout is torch.strided and t.numel()}
        views = [i for i, t in enumerate(theirs) if t.numel() and t.untyped_storage().data_ptr() in memory]
        if not views:
            return
        ours = [t for t in tree_leaves(remote.call(op)) if _is(t)]
        written = []
        for i in views:
            with contextlib.suppress(RuntimeError):  # expanded tensors can't be written
                theirs[i].mul_(0)
                written.append(ours[i])
        for view in written:
            view.mul_(0)
    if views:
        agree(remote.tensors, local.tensors, False, "operand under a view")


@contextlib.contextmanager
def _raises(kind: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except (kind, RuntimeError, dt.DisttensorError):
        return
    raise AssertionError(f"this raises {kind.__name__} here and nothing on a node")
