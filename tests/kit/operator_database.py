"""PyTorch's own database of operators with sample inputs, run on a node and here.

What is compared, per sample: results bit for bit with their strides, gradients, what in-place variants and writes to
views do to the operands, and what the proxy says of its tensor with what the node has.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import first_calls
import torch
from equal import same, send
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import disttensor as dt
from disttensor.meshes import Mesh

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# Each time that samples are made torch searches the whole stack, with the text of each line, for unittest's test.
vars(core)["extract_test_fn"] = lambda: None

NODE = "node:0"
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
#: Their values are what memory happens to hold.
UNDEFINED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


#: Those that may or may not be right to the bit: LAPACK's depend on where in memory the operands lie, on local CPU too.
VARIES = frozenset({"linalg.lstsq", "linalg.lstsq.grad_oriented", "linalg.pinv.singular"})
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


def samples(op: OpInfo, dtype: torch.dtype, count: int | None, grad: bool, seed: int = 0) -> Iterator[SampleInput]:
    """The same ones each time."""
    torch.manual_seed(seed)
    yield from itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), count)


#: What lies contiguously in memory, and the view of that.
Layout: TypeAlias = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def differentiable(op: OpInfo, dtype: torch.dtype) -> bool:
    return bool(op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"))


def _permuted(x: torch.Tensor) -> Layout | None:
    return (x.transpose(0, -1), lambda t: t.transpose(0, -1)) if x.dim() > 1 else None


def _sliced(x: torch.Tensor) -> Layout | None:
    return (x.repeat_interleave(2, -1), lambda t: t[..., ::2]) if x.dim() else None


def _expanded(x: torch.Tensor) -> Layout | None:
    return (x[:1], lambda t: t.expand(x.shape)) if x.dim() and x.shape[0] > 1 else None


def _channels_last(x: torch.Tensor) -> Layout | None:
    return (x.movedim(1, -1), lambda t: t.movedim(-1, 1)) if x.dim() in (4, 5) else None


def _batch_of_one(x: torch.Tensor) -> Layout | None:
    """The first of a batch, with a step of 1 where there are no steps."""
    return (x[:1].transpose(0, -1), lambda t: t.transpose(0, -1)) if x.dim() > 1 and x.shape[0] else None


#: How a tensor lies in memory.
LAYOUTS: dict[str, Callable[[torch.Tensor], Layout | None]] = {
    "permuted": _permuted,
    "sliced": _sliced,
    "expanded": _expanded,
    "channels_last": _channels_last,
    "batch_of_one": _batch_of_one,
}


class Operands:
    """One sample's arguments: the local ones, or proxies of them. ``layout``: one of LAYOUTS, for what can have it."""

    def __init__(self, op: OpInfo, sample: SampleInput, there: bool, layout: str | None = None) -> None:
        values = (sample.input, list(sample.args), dict(sample.kwargs))
        views: list[Callable[[torch.Tensor], torch.Tensor] | None] = []

        def lay(x: Any) -> Any:
            if not _is(x):
                return x
            strided = layout is not None and x.layout is torch.strided
            base, view = (LAYOUTS[layout](x.detach()) if strided else None) or (x.detach(), None)  # type: ignore[index]
            views.append(view)
            base = base.clone() if view is None else base.clone(memory_format=torch.contiguous_format)
            return base.requires_grad_(x.requires_grad)

        values = tree_map(lay, values)
        if there:
            indices = values[1] if op.name == "tensor_split" else None  # which have to be on the CPU
            values = tree_map(lambda v: NODE if isinstance(v, str) and v == "cpu" else v, send(values, NODE))
            if indices is not None:
                values = (values[0], indices, values[2])
            if op.name in MAKES:
                values[2]["device"] = NODE
        order = iter(views)
        values = tree_map(lambda v: view(v) if _is(v) and (view := next(order)) is not None else v, values)
        self.laid = sum(view is not None for view in views)
        self.input, self.args, self.kwargs = values
        self.tensors = [t for t in tree_leaves(values) if _is(t)]
        if op.name == "tensor_split":
            self.tensors = self.tensors[:1]

    def gather(self, mesh: Mesh, op: OpInfo, ranks: Sequence[Operands]) -> None:
        """Makes these the operands on a mesh, each rank's values those of one of ``ranks``."""
        leaves = [[v for v in tree_leaves((r.input, r.args, r.kwargs))] for r in ranks]
        values, spec = tree_flatten((self.input, self.args, self.kwargs))
        stay = {id(t) for t in tree_leaves(self.args)} if op.name == "tensor_split" else set()
        made = []
        for own, *row in zip(values, *leaves, strict=True):
            if _is(own) and id(own) not in stay:
                bases = [t.detach() for t in row]
                whole = dt.meshes.from_shards(mesh, bases)
                if own.stride() != whole.stride() and own.numel():
                    whole = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=mesh.device).copy_(
                        whole
                    )
                whole = whole.conj() if own.is_conj() else whole
                made.append(whole.detach().requires_grad_(own.requires_grad))
            else:
                made.append(
                    str(mesh.device) if own == "cpu" and isinstance(own, str) else mesh.device if own == CPU else own
                )
        self.input, self.args, self.kwargs = tree_unflatten(made, spec)
        if op.name in MAKES:
            self.kwargs["device"] = mesh.device
        self.tensors = [t for t in tree_leaves((self.input, self.args, self.kwargs)) if _is(t)]
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


def _there(*tensors: torch.Tensor) -> tuple[tuple[Any, ...], ...]:
    """Runs on the node."""
    return tuple(
        (tuple(x.shape), x.stride(), int(x.storage_offset()), str(x.dtype), x.is_conj(), x.is_neg()) for x in tensors
    )


def true_to_node(proxies: list[torch.Tensor]) -> None:
    """Asserts that proxies' metadata are those of their tensors."""
    there = dt.run(_there, *(proxy.detach() for proxy in proxies), node=0) if proxies else ()
    for proxy, (shape, stride, offset, dtype, *bits) in zip(proxies, there, strict=True):
        assert (tuple(proxy.shape), str(proxy.dtype)) == (tuple(shape), dtype), "the node has another shape or dtype"
        assert [proxy.is_conj(), proxy.is_neg()] == bits, "conjugate or negative on one side only"
        said = (proxy.stride(), int(proxy.storage_offset()))
        assert said == (tuple(stride), offset), f"strides and offset {said}, the node has {(stride, offset)}"


def check(
    op: OpInfo, dtype: torch.dtype, count: int | None = None, close: bool = False, layout: str | None = None
) -> int:
    """Runs samples (``count`` at most, of those that can have the layout) and asserts that all is the same. How many
    there were."""
    grad = differentiable(op, dtype)
    done = 0
    for sample in samples(op, dtype, None if layout else count, grad):
        if done == count:
            break
        if layout is not None and not Operands(op, sample, False, layout).laid:
            continue
        done += _check_call(op, sample, grad, close, layout)
        if op.inplace_variant is not None and not sample.broadcasts_input:
            _check_in_place(op, sample, close, layout)
        if layout is None:
            _check_view(op, sample)
    dt.synchronize()
    return done


def _check_call(op: OpInfo, sample: SampleInput, grad: bool, close: bool, layout: str | None) -> bool:
    """False where local torch refuses the sample because of its layout."""
    local, remote = Operands(op, sample, False, layout), Operands(op, sample, True, layout)
    try:
        expected = local.call(op)
    except Exception as error:  # some samples show what is refused
        if layout is not None:
            return False
        with _raises(type(error)):
            remote.call(op)
            dt.synchronize()
        return True
    got = remote.call(op)
    true_to_node([leaf for leaf in tree_leaves(got) if isinstance(leaf, dt.DistributedTensor)])
    if op.name in UNDEFINED:
        expected, got = (tree_map(lambda t: torch.zeros_like(t) if _is(t) else t, v) for v in (expected, got))
    if sample.output_process_fn_grad is not None:
        expected, got = sample.output_process_fn_grad(expected), sample.output_process_fn_grad(got)
    agree(got, expected, close, "result")
    agree(remote.tensors, local.tensors, close, "operand after it")
    if grad:
        here, there = _gradients(expected, local), _gradients(got, remote)
        true_to_node([leaf for leaf in there or () if leaf is not None])
        assert (here is None) == (there is None), "only one of the two has gradients"
        agree(there, here, close, "gradient")
    return True


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


def _check_in_place(op: OpInfo, sample: SampleInput, close: bool, layout: str | None) -> None:
    local, remote = Operands(op, sample, False, layout), Operands(op, sample, True, layout)
    with torch.no_grad():
        try:
            expected = local.call(op.inplace_variant)
        except Exception as error:
            if layout is None:
                with _raises(type(error)):
                    remote.call(op.inplace_variant)
                    dt.synchronize()
            return
        got = remote.call(op.inplace_variant)
        assert (got is remote.input) == (expected is local.input)
    true_to_node([remote.input])
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


def check_recorded(op: OpInfo, dtype: torch.dtype, count: int, layout: str) -> int:
    """Records samples that can have the layout, each in a graph that no such call has gone before, and asserts that its
    replay makes what the proxies say. How many there were; those that have to ask their node say so at their line."""
    done = 0
    for sample in samples(op, dtype, None, False):
        if done == count:
            break
        local = Operands(op, sample, False, layout)
        try:
            local.call(op)
        except Exception:
            continue
        if not local.laid or not all(map(_strided, local.tensors)):
            continue
        remote = Operands(op, sample, True, layout)
        first_calls.forget()
        dt.synchronize()
        g = dt.Graph()
        done += 1
        try:
            with dt.graph(g):
                made = remote.call(op)
            g.replay()
        except dt.errors.GraphError:
            continue
        dt.synchronize()
        true_to_node([leaf for leaf in tree_leaves(made) if isinstance(leaf, dt.DistributedTensor)])
    return done


def check_mistakes(op: OpInfo, late: bool) -> int:
    """Makes the calls that torch's tests of errors make, in place too, and asserts that each is refused at its line as
    locally, and touches nothing. ``late``: some depend on the data, which is told at the next wait. How many they
    were."""
    done = 0
    for wrong in op.error_inputs("cpu"):
        sample = wrong.sample_input
        if not all(_strided(t) and t.dim() <= 64 for t in Operands(op, sample, False).tensors):
            continue
        try:
            Operands(op, sample, True)
        except NotImplementedError:
            continue  # a dtype that does not travel
        for call in (op, op.inplace_variant):
            if call is not None:
                _check_mistake(op, sample, call, late)
                done += 1
    return done


def _check_mistake(op: OpInfo, sample: SampleInput, call: Callable[..., Any], late: bool) -> None:
    local, remote = Operands(op, sample, False), Operands(op, sample, True)
    expected = told = None
    try:
        local.call(call)
    except Exception as error:
        expected = error
    try:
        remote.call(call)
    except Exception as error:
        told = error
    if late and expected is not None and told is None:
        with _raises(type(expected)):
            dt.synchronize()
        return
    dt.synchronize()  # nothing is left to tell
    assert type(told) is type(expected), f"{told!r} where it is {expected!r} here"
    if expected is not None:
        agree(remote.tensors, local.tensors, False, "operand of a wrong call")


def boundaries(sample: SampleInput) -> Iterator[tuple[str, SampleInput]]:
    """Samples at, and one beyond, the bounds of what is right: tensors without elements and of one, and in the place of
    each integer, in tensors and beside them, the number of dimensions and sizes, which as indices are one too large."""
    leaves, spec = tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
    tensors = [t for t in leaves if _is(t)]
    if not all(_strided(t) for t in tensors):
        return

    def made(change: Callable[[int, Any], Any]) -> SampleInput:
        input, args, kwargs = tree_unflatten([change(i, v) for i, v in enumerate(leaves)], spec)
        return SampleInput(input, args=tuple(args), kwargs=kwargs)

    for size, dim in itertools.product((0, 1), (0, -1)):
        if any(t.dim() and t.shape[dim] > size for t in tensors):
            yield (
                f"size {size} in dim {dim}",
                made(lambda _, v, s=size, d=dim: _cut(v, d, s) if _is(v) and v.dim() else v),
            )
    indexed = [t for t in tensors if not _is_index(t)] or tensors
    sizes = sorted({n for t in indexed for n in t.shape})[:3]
    for at, leaf in enumerate(leaves):
        if _is(leaf) and _is_index(leaf) and leaf.numel():
            for n in (*sizes, *(-1 - n for n in sizes)):
                if torch.iinfo(leaf.dtype).min <= n <= torch.iinfo(leaf.dtype).max:
                    yield f"index {n}", made(lambda i, v, at=at, n=n: _with_last(v, n) if i == at else v)
        elif type(leaf) is int:
            dims = max((t.dim() for t in tensors), default=0)
            for n in sorted({dims, -1 - dims, *sizes} - {leaf}):
                yield f"{n} for {leaf}", made(lambda i, v, at=at, n=n: n if i == at else v)


def _is_index(t: torch.Tensor) -> bool:
    return t.dtype in (torch.int64, torch.int32)


def _cut(t: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    cut = t.detach().narrow(dim, 0, min(size, t.shape[dim])).clone()
    return cut.requires_grad_(t.requires_grad)


def _with_last(t: torch.Tensor, n: int) -> torch.Tensor:
    changed = t.clone()
    changed.view(-1)[-1] = n
    return changed


def check_boundaries(op: OpInfo, dtype: torch.dtype, count: int, close: bool = False, values: bool = True) -> int:
    """Runs samples at the bounds, and asserts that values are the same, and that the same are refused: at the line, or
    at the next wait where the data decide. ``values``: whether they are compared. How many there were."""
    done = 0
    for sample in samples(op, dtype, count, False):
        for what, each in boundaries(sample):
            _check_boundary(op, each, close, what, values)
            done += 1
    return done


def _check_boundary(op: OpInfo, sample: SampleInput, close: bool, what: str, values: bool = True) -> None:
    local, remote = Operands(op, sample, False), Operands(op, sample, True)
    expected = told = got = result = None
    try:
        result = local.call(op)
    except Exception as error:
        expected = error
    try:
        got = remote.call(op)
        true_to_node([t for t in tree_leaves(got) if isinstance(t, dt.DistributedTensor)])
        dt.synchronize()
    except Exception as error:
        told = error
    if expected is not None or told is not None:
        assert type(told) is type(expected), f"{what}: {told!r} where it is {expected!r} here"
    elif op.name not in UNDEFINED and values:
        agree(got, result, close, what)


def _larger(x: torch.Tensor) -> torch.Tensor:
    return torch.full((*(n + 1 for n in x.shape), 2), 3).to(x.dtype)


#: For a result, what is given for it to be written into: a local tensor, and the same on the node.
GIVEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda x: torch.empty(0, dtype=x.dtype),
    "larger": _larger,
    "a part": lambda x: torch.full((2, *x.shape), 3).to(x.dtype),
    "another dtype": lambda x: torch.empty(0, dtype=torch.int8),
}


def check_given(op: OpInfo, dtype: torch.dtype, count: int) -> int:
    """Runs samples with an ``out=`` of each of `GIVEN` and asserts that all is the same. How many calls that were."""
    done = 0
    for sample in samples(op, dtype, count, False):
        local = Operands(op, sample, False)
        if not all(t.layout is torch.strided for t in local.tensors):
            continue
        try:
            result = local.call(op)
        except Exception:
            continue
        leaves = [result] if _is(result) else list(result) if isinstance(result, (list, tuple)) else []
        if leaves and all(_strided(t) for t in leaves):
            done += sum(_check_given(op, sample, leaves, how) for how in GIVEN)
    dt.synchronize()
    return done


def _check_given(op: OpInfo, sample: SampleInput, results: list[torch.Tensor], how: str) -> bool:
    local, remote = Operands(op, sample, False), Operands(op, sample, True)
    bases = [GIVEN[how](t) for t in results]
    far = [t.to(NODE) for t in bases]
    here, there = ([t[1] if how == "a part" else t for t in ts] for ts in (bases, far))
    single = _is(local.call(op))
    kept = [t.detach() for t in there]
    before = [(t.shape, t.stride()) for t in there]
    try:
        local.call(lambda *a, **k: op(*a, **k, out=here[0] if single else tuple(here)))
    except Exception as error:
        with _raises(type(error)):
            remote.call(lambda *a, **k: op(*a, **k, out=there[0] if single else tuple(there)))
        true_to_node([*there, *kept])  # local torch may have resized it, or not, by when an operator notices
        return True
    got = remote.call(lambda *a, **k: op(*a, **k, out=there[0] if single else tuple(there)))
    if single:
        assert got is there[0]
    true_to_node([*there, *kept])
    assert [(t.shape, t.stride()) for t in kept] == before, "another tensor of the same memory has changed"
    if op.name not in UNDEFINED:
        agree(there, here, False, f"{how}: out=")
        agree(far, bases, False, f"{how}: the memory of out=")
    return True


@contextlib.contextmanager
def _raises(kind: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except (kind, RuntimeError, dt.DisttensorError):
        return
    raise AssertionError(f"this raises {kind.__name__} here and nothing on a node")


# ---- meshes ----------------------------------------------------------------------------------------------------------


def check_on_mesh(mesh: Mesh, op: OpInfo, dtype: torch.dtype, count: int | None = None, close: bool = False) -> int:
    """Runs samples on a mesh whose ranks have different values, and asserts that each rank has what there is here for
    its values. How many there were.

    Where the shapes of results, or results that are no tensors, depend on the values, RanksDiffer has to be raised, and
    the sample is run with the same values on all ranks.
    """
    grad, done = differentiable(op, dtype), 0
    columns = [list(samples(op, dtype, count, grad, seed)) for seed in range(len(mesh))]
    for row in zip(*columns, strict=False):
        ranks = row if len({_form(sample) for sample in row}) == 1 else row[:1] * len(mesh)
        if not _check_on_ranks(mesh, op, ranks, grad, close):
            assert _check_on_ranks(mesh, op, ranks[:1] * len(mesh), grad, close)
        done += 1
    dt.synchronize()
    return done


def _form(sample: SampleInput) -> str:
    """All of a sample but the values of its tensors."""
    values = (sample.input, list(sample.args), dict(sample.kwargs))
    return repr(tree_map(lambda v: (v.shape, v.stride(), v.dtype, v.requires_grad) if _strided(v) else str(v), values))


def _strided(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _check_on_ranks(mesh: Mesh, op: OpInfo, ranks: Sequence[SampleInput], grad: bool, close: bool) -> bool:
    """False where the ranks' results differ in what all ranks have to have in common, and RanksDiffer was raised."""
    locals_ = [Operands(op, sample, False) for sample in ranks]
    remote = Operands(op, ranks[0], False)
    remote.gather(mesh, op, locals_)
    expected, error = [], None
    for local in locals_:
        try:
            expected.append(local.call(op))
        except Exception as e:
            error = e
    if error is not None:
        with _raises(type(error)):
            remote.call(op)
            dt.synchronize()
        return True
    try:
        got = remote.call(op)
    except dt.errors.RanksDiffer:
        assert len({_common(each) for each in expected}) > 1, "RanksDiffer where all ranks have the same form"
        return False
    if op.name in UNDEFINED:
        got, *expected = (tree_map(lambda t: torch.zeros_like(t) if _is(t) else t, v) for v in (got, *expected))
    process = ranks[0].output_process_fn_grad
    if process is not None:
        got, *expected = map(process, (got, *expected))
    there = _gradients(got, remote) if grad else None
    for rank, (local, wanted) in enumerate(zip(locals_, expected, strict=True)):
        agree(_at(got, rank), wanted, close, f"rank {rank}: result")
        agree(_at(remote.tensors, rank), local.tensors, close, f"rank {rank}: operand after it")
        if grad:
            here = _gradients(wanted, local)
            assert (here is None) == (there is None), "only one of the two has gradients"
            agree(_at(there, rank), here, close, f"rank {rank}: gradient")
    return True


def _common(result: Any) -> str:
    return repr(tree_map(lambda v: (v.shape, v.stride()) if _strided(v) else str(v), result))


def _at(value: Any, rank: int) -> Any:
    def shard(v: Any) -> Any:
        return v.shards()[rank] if isinstance(v, dt.DistributedTensor) else v

    return tree_map(shard, value)
