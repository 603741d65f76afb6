"""Runs composites that choose their kernels by device type (RNNs) on proxies that report "cpu", so that torch selects
the CPU kernels.

Torch's recurrent layers, for example, pick mkldnn on the CPU, cuDNN on CUDA, and for device type "node" kernels that
exist on CUDA only. Where a node computes as a CPU does, such a composite is run on proxies whose torch device is "cpu":
the same remote tensors, at the `twin` of their place. Its parts become commands as ever. To move a proxy to the twin
and back are operations of autograd, and send nothing.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ...dispatch import seen_at
from ...dispatch.copies import upload
from ...dispatch.first_call import place_of
from ...dispatch.left_here import left_here
from ...dispatch.op_table import enter
from ...proxy.proxy import DistributedTensor, innermost
from ...session import kernel_choice
from ...session.places import Place
from .. import autocast
from . import sdpa

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

#: The composites that are run on such proxies.
OPERATORS = (
    *(getattr(aten, kind).input for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *(getattr(aten, kind).data for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    aten.lstm_cell.default,
    aten.gru_cell.default,
)


def _seen(x: torch.Tensor, place: Place) -> torch.Tensor:
    if type(x) is not DistributedTensor:
        return upload(x, place)  # a local gradient that one of torch's formulas made
    # by detach, because its result shares the version counter: the other's graph notices a write to one of the two
    seen_at.target.place = place
    try:
        return x.detach()
    finally:
        seen_at.target.place = None


class _Move(torch.autograd.Function):
    """The autograd function that moves a tensor to a place's twin, or back. ``kept`` lives as long as the graph."""

    @staticmethod
    def forward(x: torch.Tensor, here: Place, there: Place, kept: Any) -> torch.Tensor:
        return _seen(x, there)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.here, ctx.there, ctx.kept = inputs

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _move(grad, ctx.there, ctx.here), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return _move(tangent, ctx.here, ctx.there)


def _move(x: torch.Tensor, here: Place, there: Place, kept: Any = None) -> torch.Tensor:
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return _Move.apply(x, here, there, kept)  # type: ignore[no-untyped-call, no-any-return]
    # without a graph the flag still matters: matmul folds tensors that require a gradient
    return _seen(x, there).requires_grad_(x.requires_grad)


#: Weights' twins, by the weight's id, as long as a graph keeps them. One for all calls, so that gradients add up in
#: torch's order.
_twins: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _as_cpu(x: Any, place: Place, weights: list[Any], cast: Callable[[Any], Any]) -> Any:
    """Returns the twin of ``x``, and adds it to ``weights`` if other calls may share it."""
    if not isinstance(x, torch.Tensor):
        return x
    shared = x.is_leaf and x.requires_grad and torch.is_grad_enabled()
    x = cast(x)
    twin = _twins.get(id(x)) if shared else None
    if twin is None or twin._h.owner is not x._h or not _leads_to(twin, x):
        twin = _move(x, place, place.twin)
    if shared:
        _twins[id(x)] = twin
        weights.append(twin)
    return twin


def _leads_to(twin: torch.Tensor, x: torch.Tensor) -> bool:
    """Returns whether a gradient of ``twin`` goes to ``x``, as another tensor may have had the same id."""
    node: Any = twin.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return node.variable is x if x.is_leaf else node is x.grad_fn


def runs_as_cpu(op: OpOverload) -> Callable[..., Any]:
    """Returns a function that runs ``op`` as on a local CPU, where all its tensors are at one place that computes so.

    The function raises RuntimeError for operands that are at two places, or local.
    """
    # lengths of packed sequences are local everywhere
    local = [i for i, a in enumerate(op._schema.arguments) if a.name == "batch_sizes"]

    def function(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], sdpa.TRACED) and op in _PARTS and sdpa.place_of(args[0]).kernels == "cpu":
            return _PARTS[op](*args, **kwargs)
        place = getattr(innermost(args[0]), "_place", None)
        if place is None or not kernel_choice.shown_a_cpu(place.record) or place.device.type == "cpu":
            return op._op_dk(_COMPOSITE, *args, **kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            return _transformed(op, args, kwargs)
        moving = [None if i in local else a for i, a in enumerate(args)]
        _check(op, moving, kwargs, place)
        weights: list[Any] = []
        with _autocast() as lower:
            moving, kwargs = tree_map(lambda x: _as_cpu(x, place, weights, lower), (moving, kwargs))
            for i in local:
                moving[i] = args[i]
            result = _composed(op, place.record, moving, kwargs)
        return tree_map_only(torch.Tensor, lambda x: _move(x, place.twin, place, weights), result)

    return function


def _lstm_cell(x: Any, hx: Any, of_x: Any, of_h: Any, b: Any = None, c: Any = None) -> tuple[Any, Any]:
    """Computes an LSTM's cell by parts, as torch does on CPUs. Source: aten/src/ATen/native/RNN.cpp, LSTMCell."""
    h, state = hx
    gates = linear(h, of_h, c).add_(linear(x, of_x, b)).unsafe_chunk(4, 1)
    into, kept, new, out = gates[0].sigmoid_(), gates[1].sigmoid_(), gates[2].tanh_(), gates[3].sigmoid_()
    state = (kept * state).add_(into * new)
    return out * state.tanh(), state


def _gru_cell(x: Any, h: Any, of_x: Any, of_h: Any, b: Any = None, c: Any = None) -> Any:
    """Computes a GRU's cell by parts, as torch does on CPUs. Source: RNN.cpp, GRUCell."""
    into, gates = linear(x, of_x, b).unsafe_chunk(3, 1), linear(h, of_h, c).unsafe_chunk(3, 1)
    reset, kept = gates[0].add_(into[0]).sigmoid_(), gates[1].add_(into[1]).sigmoid_()
    new = into[2].add(gates[2].mul_(reset)).tanh_()
    return (h - new).mul_(kept).add_(new)


#: The cells, for what ``torch.compile`` traces with: those have no twins.
_PARTS: dict[OpOverload, Callable[..., Any]] = {
    aten.lstm_cell.default: _lstm_cell,
    aten.gru_cell.default: _gru_cell,
}

#: Held while an LSTM picks its kernel, because the switch (oneDNN's) is that of the whole process.
_switch = threading.RLock()


def _composed(op: OpOverload, record: kernel_choice.KernelFacts, args: Any, kwargs: Any) -> Any:
    """Runs torch's composite on tensors that it takes for local ones. An LSTM chooses by the abilities of this
    machine's CPU: where the node's choice is another, it is led to that."""
    if op is not aten.lstm.input:
        return op._op_dk(_COMPOSITE, *args, **kwargs)
    args = [*args, *(kwargs[a.name] for a in op._schema.arguments[len(args) :])]
    facts = args[0]._h.meta, args[1][0].shape[2] != args[1][1].shape[2], torch.is_grad_enabled()
    with _switch:
        theirs, ours = kernel_choice.lstm(record, *facts), kernel_choice.lstm(kernel_choice.here(), *facts)
        if theirs == ours:
            return op._op_dk(_COMPOSITE, *args)
        if theirs == "onednn":
            return _by_onednn(*args)
        torch._C._set_mkldnn_enabled(False)
        try:
            return op._op_dk(_COMPOSITE, *args)
        finally:
            torch._C._set_mkldnn_enabled(True)


def _by_onednn(
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs an LSTM by oneDNN's layers, as torch does. Source: aten/src/ATen/native/mkldnn/RNN.cpp, mkldnn_rnn."""
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    h, c = hx[0].contiguous(), hx[1].contiguous()
    ways, own = 1 + bidirectional, 4 if biases else 2
    rows: list[list[torch.Tensor]] = []
    for layer in range(layers):
        outs = []
        for way in range(ways):
            at = layer * ways + way
            mine = list(weights[at * own : (at + 1) * own])
            if not biases:
                mine += [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in mine]
            options: tuple[Any, ...] = (
                way > 0,
                [],
                _LSTM,
                h.shape[2],
                layers,
                biases,
                bidirectional,
                batch_first,
                train,
            )
            out, *states = aten.mkldnn_rnn_layer(x, *mine, h[at], c[at], *options)[:3]
            outs.append(out)
            rows.append(states)
        x = torch.cat(outs, -1) if bidirectional else outs[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    last_h, last_c = (torch.stack(row) for row in zip(*rows, strict=True))
    return x.transpose(0, 1) if batch_first else x, last_h, last_c


#: ideep::rnn_kind::LSTM
_LSTM = 2


def _transformed(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Runs torch's decomposition, for ``torch.func``'s transforms, which `_Move` can't cross. It gives nearly the same
    numbers."""
    if op is aten.lstm_cell.default:
        x, (h, c), *weights = args
        weights = [w for w in weights if w is not None]
        layer = (x[None], (h[None], c[None]), weights, len(weights) == 4, 1, 0.0, False, False, False)
        _, h, c = aten.lstm.input.decompose(*layer)
        return h[0], c[0]
    if op is aten.gru_cell.default:
        x, h, *weights = args
        weights = [w for w in weights if w is not None]
        return aten.gru.input.decompose(x[None], h[None], weights, len(weights) == 4, 1, 0.0, False, False, False)[1][0]
    return op.decompose(*args, **kwargs)


def _check(op: OpOverload, args: Any, kwargs: Any, place: Place) -> None:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    for x in tensors:
        if not isinstance(x, DistributedTensor):
            raise left_here(op.name(), x, place)
    place_of(enter(op), tensors, {}, place)


@contextlib.contextmanager
def _autocast() -> Iterator[Callable[[Any], Any]]:
    """Applies the autocast state of nodes to the CPU. Yields the cast of parameters, as torch's cache knows no
    twins."""
    if not torch.is_autocast_enabled("node"):
        yield lambda x: x
        return
    dtype = torch.get_autocast_dtype("node")

    def cast(x: Any) -> Any:
        return autocast.cached(x, dtype) if isinstance(x, torch.nn.Parameter) and x.dtype == torch.float32 else x

    with torch.autocast("cpu", dtype, cache_enabled=torch.is_autocast_cache_enabled()):
        yield cast
