"""Runs operations by local torch; and the rules by which operations are not compared, or not in full."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..collectives.issue import CollectiveCall
from ..dispatch import seen_at
from ..dispatch.dispatch import _composite
from ..dispatch.op_table import enter
from ..proxy.proxy import DistributedTensor
from ..runtime.collective import ReduceOp
from ..runtime.master.route import route
from ..session.places import Place

aten = torch.ops.aten
_SEEDED = torch.Tag.nondeterministic_seeded

#: Operators that return unwritten memory, at least in part.
_UNSET = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize",
        "resize_",
        "resize_as_",
        "_resize_output_",
    )
)
#: Operators with several right answers, of which a GPU's libraries may give another than a CPU's; and the choice of the
#: best kernel.
_MANY_ANSWERS = frozenset(
    f"aten::{name}"
    for name in (
        "_fused_sdp_choice",
        "_linalg_eigh",
        "_linalg_svd",
        "geqrf",
        "kthvalue",
        "linalg_eig",
        "linalg_ldl_factor_ex",
        "linalg_lstsq",
        "linalg_lu",
        "linalg_lu_factor_ex",
        "linalg_qr",
        "median",
        "mode",
        "sort",
        "topk",
    )
)
#: Operators with results that only their own derivative can read -> the index of the first such result.
_PRIVATE = {"aten::mkldnn_rnn_layer": 3, "aten::_cudnn_rnn": 4, "aten::miopen_rnn": 4}

Reference = Callable[..., Any]
_references: dict[OpOverload, Reference] = {}


def draws(op: OpOverload) -> bool:
    """Returns whether the operator uses a generator."""
    return _SEEDED in op.tags


#: The reason why operations on sparse gradients are not compared.
SPARSE = "a sparse gradient; its parts are compared"


def skipped(op: OpOverload, args: Any, kwargs: Any, composite: bool) -> str:
    """Returns the reason why an operation is not compared, or ""."""
    if route.get().recorder is not None:
        return "nothing runs while a graph is recorded"
    if seen_at.target.place is not None:
        return "a proxy seen as a CPU tensor, which sends nothing"
    if composite and torch.is_autocast_enabled("node"):
        return "a composite under autocast; its parts are compared"
    if not composite and enter(op).handler is _composite:
        return "a composite in inference mode; its parts are compared"
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, torch.Tensor) and not isinstance(x, DistributedTensor):
            if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu":
                return f"an operand that is no tensor of a node or of the CPU ({type(x).__name__}, {x.device.type})"
            if torch._C._functorch.is_functorch_wrapped_tensor(x):
                return "a composite inside a transform; its parts are compared"
            if x.layout is not torch.strided:
                return f"an operand of layout {x.layout}"
        elif isinstance(x, DistributedTensor) and x.layout is not torch.strided:
            return SPARSE
        elif isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return "a traced size"
        elif isinstance(x, torch.device) and x.type == "meta":
            return "the meta device has no values"
    return ""


def without_values(op: OpOverload, kernels: str) -> str:
    """Returns the reason why only dtypes and shapes of an operation's results are compared, or ""."""
    name = op.name().partition(".")[0]
    if name in _UNSET:
        return "memory that nothing has written"
    if kernels == "cuda" and draws(op):
        return "drawn by a GPU, whose generator draws other numbers"
    if kernels == "cuda" and name in _MANY_ANSWERS:
        return "several right answers, and a GPU may give another"
    return ""


def private_from(op: OpOverload) -> int | None:
    """Returns the index of the first result that only a derivative can read; None if there is none."""
    return _PRIVATE.get(op.name().partition(".")[0])


@contextmanager
def plain_torch() -> Iterator[None]:
    """Runs a ``with`` block without the modes, autocast, gradients and warnings of the user's operation."""
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def compute(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Runs ``op`` on local tensors in the place of proxies. Raises torch's own errors."""

    def here(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    args, kwargs = tree_map(here, (args, kwargs))
    with plain_torch():
        return _references.get(op, op)(*args, **kwargs)


def _reference(op: OpOverload) -> Callable[[Reference], Reference]:
    def put(fn: Reference) -> Reference:
        _references[op] = fn
        return fn

    return put


@_reference(aten.native_dropout.default)
def _dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Computes native_dropout on a CPU. Local torch never calls it there; its dropout has a mask of floats, which is
    the dropout of ones."""
    if train is False or not 0 < p < 1:
        return aten.native_dropout.default(x, p, train)
    before = torch.default_generator.get_state()
    mask = torch.nn.functional.dropout(torch.ones_like(x), p)
    torch.default_generator.set_state(before)
    return torch.nn.functional.dropout(x, p), mask


@_reference(aten.native_dropout_backward.default)
def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    return aten.native_dropout_backward.default(grad, mask, scale) if mask.dtype == torch.bool else grad * mask


# ---- collectives -----------------------------------------------------------------------------------------------------

#: The kernels of reductions. Not those of runtime/collective/reduction.py, which are compared with these.
_REDUCTIONS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}

Row = Sequence[torch.Tensor]
Rows = Sequence[Row]


def reduced(tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduces local tensors one after another, floats as float64, and returns the result in their dtype."""
    dtype = tensors[0].dtype
    wide = dtype if not dtype.is_floating_point else torch.float64
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = _REDUCTIONS[op](total, tensor.to(wide))
    if op is ReduceOp.AVG:
        total = total / len(tensors)
    return total.to(dtype)


def _all_gather(collective: CollectiveCall, inputs: Rows, every: Row, counts: list[int]) -> Rows:
    if collective.shares and len(every) > 1 and set(counts) == {1}:
        return [[torch.cat([x.reshape(-1) for x in every])]] * len(inputs)
    return [[every[k % len(every)] for k in range(n)] for n in counts]


def _reduced(collective: CollectiveCall, inputs: Rows, every: Row, counts: list[int]) -> Rows:
    total = reduced(every, collective.op)
    return [[total] * n for n in counts]


#: What computes each kind of collective from local inputs: the call, each node's inputs, all of them in one list, and
#: how many tensors each node writes.
REFERENCES: dict[str, Callable[[CollectiveCall, Rows, Row, list[int]], Rows]] = {
    "all_reduce": _reduced,
    "reduce": _reduced,
    "broadcast": lambda it, inputs, every, counts: [[inputs[it.root][0]] * n for n in counts],
    "all_gather": _all_gather,
    "gather": lambda it, inputs, every, counts: [every[:n] for n in counts],
    "scatter": lambda it, inputs, every, counts: [[x] for x in inputs[it.root]],
    "reduce_scatter": lambda it, inputs, every, counts: [
        [reduced([row[i] for row in inputs], it.op)] for i in range(len(inputs))
    ],
    "all_to_all": lambda it, inputs, every, counts: [[row[i] for row in inputs] for i in range(len(inputs))],
    "shift": lambda it, inputs, every, counts: [[inputs[(i - it.root) % len(inputs)][0]] for i in range(len(inputs))],
}


def collected(collective: CollectiveCall, inputs: Rows) -> Rows:
    """Returns the tensors that a collective writes, for each node the values of its ``outs`` in order, computed from
    local ``inputs`` of each node."""
    every = [x for row in inputs for x in row]
    counts = [len(part.outs) for part in collective.parts]
    return REFERENCES[collective.kind](collective, inputs, every, counts)


def place_of(args: Any, kwargs: Any, place: Place | None) -> Place | None:
    """Returns the place where an operation is computed: ``place``, else that of its first operand with dimensions, else
    that of any operand; None without operands on nodes."""
    if place is not None:
        return place
    proxies = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DistributedTensor)]
    first = next((x for x in proxies if x.dim()), proxies[0] if proxies else None)
    if first is None:
        return None
    return first._h.meta.place.origin  # type: ignore[no-any-return]
