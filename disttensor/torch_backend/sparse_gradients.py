"""Sparse gradients of ``nn.Embedding(sparse=True)``, and the operations of optimizers, clipping and users on them.

In the script a COO tensor on a node is two proxies, its indices and its values; a node itself has dense tensors only.
Source of each operation: the kernels of torch for such tensors on CPUs (aten/src/ATen/native/sparse), whose order of
summing it keeps. Other operations are refused, as are other sparse layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload

from ..dispatch.dispatch import run
from ..dispatch.first_call import refuse_layout
from ..dispatch.op_plan import OpEntry
from ..dispatch.op_table import handler
from ..proxy.printing import device_of
from ..proxy.proxy import DistributedTensor
from ..session.places import Place

aten = torch.ops.aten

_kernels: dict[OpOverload, Callable[..., Any]] = {}


class SparseGradient(DistributedTensor):
    """A COO tensor on a node: ``indices`` of shape (sparse dimensions, n), and n ``values``. Users don't make it."""

    _indices_: DistributedTensor
    _values_: DistributedTensor
    _coalesced_now: bool

    @staticmethod
    def __new__(cls, indices: Any, values: Any, size: Any, coalesced: bool = False) -> SparseGradient:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=values.dtype, layout=torch.sparse_coo, device=values.device
        )
        tensor._indices_, tensor._values_, tensor._coalesced_now = indices, values, coalesced
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kernel = _kernels.get(func)
        if kernel is not None:
            return kernel(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith("aten::_foreach_"):
            return _one_by_one(name.removeprefix("aten::_foreach_").partition(".")[0], *args, **(kwargs or {}))
        return _refuse(name)

    @property
    def _h(self) -> NoReturn:  # type: ignore[override]
        """Raises NotImplementedError: it has no handle, and code that asks for one takes it for a dense tensor."""
        _refuse("this")

    @property
    def _place(self) -> Place:
        return self._values_._place

    def get_node(self) -> int:
        return self._values_.get_node()

    def get_device(self) -> int:
        return self._values_.get_device()

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Makes a tensor as ``torch.Tensor.new``: ``new(indices, values, size)``, as torch's optimizers call it."""
        if len(args) == 3 and not kwargs:
            return SparseGradient(*args)
        _refuse("new")

    def tolist(self) -> Any:
        """Raises torch's TypeError, as a local COO tensor does."""
        return self.cpu().tolist()

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = _clone(self)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles by value, as a local tensor."""
        return self.detach().cpu().__reduce_ex__(protocol)  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{str(self.detach().cpu())[:-1]}, device={device_of(self)})"


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what}: with a sparse gradient on a node there is what optimizers do: write x.to_dense(), or x.cpu()"
    )


def _kernel(*ops: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _kernels[op] = function
        return function

    return register


def _with(x: SparseGradient, values: torch.Tensor) -> SparseGradient:
    return SparseGradient(x._indices_, values, x.shape, x._coalesced_now)


def _set(x: SparseGradient, other: SparseGradient) -> SparseGradient:
    x._indices_, x._values_, x._coalesced_now = other._indices_, other._values_, other._coalesced_now
    return x


def _alike(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape:
        raise RuntimeError(f"{op}: expected sizes of 'self' and 'other' to match, but {a.shape} != {b.shape}")


def _one_by_one(method: str, tensors: list[torch.Tensor], *rest: Any, **kwargs: Any) -> list[torch.Tensor] | None:
    """Runs a ``_foreach`` operation one tensor at a time, as torch does where some of the tensors are sparse."""
    apply = getattr(torch.Tensor, method)
    results = [
        apply(x, *(value[i] if isinstance(value, (list, tuple)) else value for value in rest), **kwargs)
        for i, x in enumerate(tensors)
    ]
    return None if method.endswith("_") else results


# ---- made, and taken apart -------------------------------------------------------------------------------------------


@handler(aten._sparse_coo_tensor_with_dims_and_tensors.default)
def _make(entry: OpEntry, args: Any, kwargs: Any) -> SparseGradient:
    """Makes a sparse gradient: the operator below ``torch.sparse_coo_tensor`` and the gradient of an embedding."""
    sparse_dim, dense_dim, size, indices, values = args
    if not (isinstance(indices, DistributedTensor) and isinstance(values, DistributedTensor)):
        refuse_layout(entry.name, torch.sparse_coo)
    if indices._place is not values._place:
        raise RuntimeError(f"{entry.name}: indices are on {indices._place}, but values on {values._place}")
    if (sparse_dim, indices.shape[1]) != (indices.shape[0], values.shape[0]) or sparse_dim + dense_dim != len(size):
        raise RuntimeError(
            f"{entry.name}: indices of shape {tuple(indices.shape)} and values of shape {tuple(values.shape)} are not "
            f"those of a tensor of shape {tuple(size)} with {sparse_dim} sparse dimensions"
        )
    return SparseGradient(indices, values, size, bool(kwargs.get("is_coalesced")))


@handler(aten._embedding_bag_backward.default)
def _bag(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    grad, indices, offsets, bag_of, sizes, _, rows, by_frequency, mode, sparse, weights, *padding = args
    if not sparse:
        return run(entry, args, kwargs, None)
    if not bag_of.shape[0]:  # the bag of each index, which the forward sum on a CPU leaves out
        starts = indices.new_zeros(indices.shape[0] + 1).index_add_(0, offsets, torch.ones_like(offsets))
        bag_of = starts.cumsum(0)[:-1] - 1
    return aten._embedding_bag_sparse_backward.default(
        grad, indices, offsets, bag_of, sizes, rows, by_frequency, mode, weights, *padding
    )


@_kernel(aten._indices.default, aten.indices.default)
def _indices(x: SparseGradient) -> torch.Tensor:
    return x._indices_.detach()


@_kernel(aten._values.default, aten.values.default)
def _values(x: SparseGradient) -> torch.Tensor:
    return x._values_.detach()


_kernels[aten._nnz.default] = lambda x: x._values_.shape[0]
_kernels[aten.sparse_dim.default] = lambda x: x._indices_.shape[0]
_kernels[aten.dense_dim.default] = lambda x: x._values_.dim() - 1
_kernels[aten.is_coalesced.default] = lambda x: x._coalesced_now
_kernels[aten.sym_size.default] = lambda x: x.shape


@_kernel(aten._coalesced_.default)
def _say_coalesced(x: SparseGradient, coalesced: bool) -> SparseGradient:
    x._coalesced_now = coalesced
    return x


@_kernel(aten._coalesce.default, aten.coalesce.default)
def _coalesce(x: SparseGradient) -> SparseGradient:
    """Sums the values of equal indices, in their order. Waits for one round trip: the number of distinct indices."""
    if x._coalesced_now:
        return x
    rows, values = x._indices_, x._values_
    if values.shape[0] < 2:
        return SparseGradient(rows, values, x.shape, True)
    sizes = x.shape[: rows.shape[0]]
    flat = rows[0]
    for size, more in zip(sizes[1:], rows[1:], strict=True):
        flat = flat * size + more
    different, at = torch.unique(flat, return_inverse=True)
    summed = values.new_zeros((different.shape[0], *values.shape[1:])).index_add_(0, at, values)
    parts: list[torch.Tensor] = []
    for size in reversed(sizes[1:]):
        parts.insert(0, different % size)
        different = different.div(size, rounding_mode="floor")
    return SparseGradient(torch.stack([different, *parts]), summed, x.shape, True)


# ---- copies ----------------------------------------------------------------------------------------------------------


@_kernel(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _detach(x: SparseGradient) -> SparseGradient:
    return _with(x, x._values_)


@_kernel(aten.clone.default)
def _clone(x: SparseGradient, *, memory_format: Any = None) -> SparseGradient:
    return SparseGradient(x._indices_.clone(), x._values_.clone(), x.shape, x._coalesced_now)


@_kernel(aten._to_copy.default)
def _to_copy(
    x: SparseGradient,
    *,
    dtype: Any = None,
    device: Any = None,
    layout: Any = None,
    non_blocking: bool = False,
    **_: Any,
) -> torch.Tensor:
    if layout not in (None, torch.sparse_coo):
        refuse_layout("aten::_to_copy", layout)
    device = device or x.device
    values = x._values_.to(device, dtype or x.dtype, non_blocking=non_blocking, copy=True)
    indices = x._indices_.to(device, non_blocking=non_blocking, copy=True)
    if isinstance(values, DistributedTensor):
        return SparseGradient(indices, values, x.shape, x._coalesced_now)
    return torch.sparse_coo_tensor(indices, values, x.shape, is_coalesced=x._coalesced_now)


@_kernel(aten._to_dense.default, aten.to_dense.default)
def _to_dense(x: SparseGradient, dtype: Any = None, masked_grad: Any = None) -> torch.Tensor:
    return _add_to(x._values_.new_zeros(x.shape), x).to(dtype or x.dtype)


@_kernel(aten.copy_.default)
def _copy_to(x: SparseGradient, other: torch.Tensor, non_blocking: bool = False) -> SparseGradient:
    if not isinstance(x, SparseGradient) or not isinstance(other, SparseGradient):
        _refuse("aten::copy_ of a dense tensor")
    _alike("copy_", x, other)
    return _set(x, _to_copy(other, dtype=x.dtype, device=x.device))


@_kernel(aten.zero_.default)
def _zero(x: SparseGradient) -> SparseGradient:
    rows, values = x._indices_, x._values_
    return _set(
        x, SparseGradient(rows.new_empty((rows.shape[0], 0)), values.new_empty((0, *values.shape[1:])), x.shape)
    )


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _mapped(op: OpOverload, written: OpOverload, linear: bool) -> None:
    """Registers an operator that computes value by value and keeps zeros, and its in-place form."""

    def kernel(x: SparseGradient, *rest: Any, **kwargs: Any) -> SparseGradient:
        if any(isinstance(value, torch.Tensor) and value.dim() for value in (*rest, *kwargs.values())):
            _refuse(op.name())
        if not isinstance(x, SparseGradient):
            x, rest = rest[0], (x, *rest[1:])
        if op is aten.pow.Tensor_Scalar and rest[0] == 0:
            raise RuntimeError(
                "pow: cannot raise to zeroth power on sparse tensor; it would make the result tensor dense"
            )
        x = x if linear else _coalesce(x)
        return _with(x, op(x._values_, *rest, **kwargs))

    def in_place(x: SparseGradient, *rest: Any, **kwargs: Any) -> SparseGradient:
        return _set(x, kernel(x, *rest, **kwargs))

    _kernels[op] = kernel
    _kernels[written] = in_place


_mapped(aten.mul.Tensor, aten.mul_.Tensor, linear=True)
_mapped(aten.mul.Scalar, aten.mul_.Scalar, linear=True)
_mapped(aten.div.Tensor, aten.div_.Tensor, linear=True)
_mapped(aten.div.Scalar, aten.div_.Scalar, linear=True)
_mapped(aten.neg.default, aten.neg_.default, linear=True)
_mapped(aten.pow.Tensor_Scalar, aten.pow_.Scalar, linear=False)
_mapped(aten.sqrt.default, aten.sqrt_.default, linear=False)
_mapped(aten.abs.default, aten.abs_.default, linear=False)


@_kernel(aten.add.Tensor)
def _add(a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    if not isinstance(b, SparseGradient):
        _refuse("aten::add of a dense tensor to a sparse one")
    _alike("add", a, b)
    if not isinstance(a, SparseGradient):
        return _add_to(a.clone(), b, alpha)
    if a._indices_.shape[0] != b._indices_.shape[0]:
        raise RuntimeError("add: expected 'self' and 'other' to have same number of sparse dimensions")
    values = b._values_ if alpha == 1 else b._values_ * alpha
    return SparseGradient(torch.cat([a._indices_, b._indices_], 1), torch.cat([a._values_, values]), a.shape)


@_kernel(aten.add_.Tensor)
def _add_in_place(a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    if isinstance(a, SparseGradient):
        return _set(a, _add(a, b, alpha=alpha))
    if not isinstance(b, SparseGradient):
        _refuse("aten::add_")
    _alike("add_", a, b)
    return _add_to(a, b, alpha)


def _add_to(dense: torch.Tensor, x: SparseGradient, alpha: float = 1) -> torch.Tensor:
    rows, values = x._indices_, x._values_
    if len(rows) == 1:
        return dense.index_add_(0, rows[0], values.to(dense.dtype), alpha=alpha)
    return dense.index_put_(tuple(rows), values.to(dense.dtype) * alpha, accumulate=True)


@_kernel(aten.sparse_mask.default)
def _sparse_mask(dense: torch.Tensor, mask: torch.Tensor) -> SparseGradient:
    if isinstance(dense, SparseGradient) or not isinstance(mask, SparseGradient):
        _refuse("aten::sparse_mask")
    _alike("sparse_mask", dense, mask)
    return _with(mask, dense[tuple(mask._indices_)])


@_kernel(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.linalg_vector_norm.default)
def _norm(x: SparseGradient, p: Any = 2, *rest: Any, **kwargs: Any) -> torch.Tensor:
    if any(value not in (None, False, [], ()) for value in (*rest, *kwargs.values())):
        _refuse("a norm over dimensions")
    return _coalesce(x)._values_.norm(2 if p is None else p)  # type: ignore[no-any-return]


@_kernel(aten.sum.default)
def _sum(x: SparseGradient, *, dtype: Any = None) -> torch.Tensor:
    return x._values_.sum(dtype=dtype)
