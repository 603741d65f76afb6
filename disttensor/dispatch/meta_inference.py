"""Infers the metadata of an operation's outputs without a round trip, by torch's meta kernels, once per signature.

This file also names the operations that need the node: data-dependent shapes (a round trip each time) and meta kernels
that are missing or wrong (one per signature).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ..runtime.process.gc_pause import no_collection
from ..runtime.process.heard import heard

T = TypeVar("T")

#: Operators whose meta kernels give other shapes or strides than the CPU kernel, for contiguous operands too: the node
#: is asked once per signature. (For other operands `lying` in first_call.py finds out.)
WRONG_META = frozenset(
    {
        "aten::max_unpool2d",
        "aten::nonzero_static",
        "aten::native_layer_norm",
        "aten::_embedding_bag",
        "aten::_embedding_bag_forward_only",
        "aten::native_batch_norm",
        "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit.no_stats",
        "aten::_native_batch_norm_legit_no_training",
        "aten::_batch_norm_with_update",
        "aten::_batch_norm_no_update",
        "aten::native_batch_norm_backward",
        "aten::native_group_norm",
        "aten::native_group_norm_backward",
        "aten::_fft_c2c",
        "aten::_fft_c2r",
        "aten::_fft_r2c",
        "aten::_linalg_svd",
        "aten::linalg_eig",
        "aten::_linalg_eigh",
        "aten::linalg_qr",
        "aten::_linalg_slogdet",
        "aten::_linalg_solve_ex",
        "aten::_linalg_det",
        "aten::linalg_lu",
        "aten::linalg_lu_factor_ex",
        "aten::linalg_inv_ex",
        "aten::linalg_cholesky_ex",
        "aten::triangular_solve",
        "aten::cholesky_solve",
        "aten::linalg_solve_triangular",
        "aten::geqrf",
        "aten::ormqr",
        "aten::_cdist_forward",
        "aten::grid_sampler_2d",
        "aten::_ctc_loss",
        "aten::histogram.bin_ct",
        "aten::convolution",
        "aten::convolution_backward",
        "aten::linalg_lstsq",
        "aten::_thnn_fused_lstm_cell",
        "aten::mkldnn_rnn_layer",
        "aten::mkldnn_rnn_layer_backward",
        "aten::kaiser_window",
        "aten::kaiser_window.periodic",
        "aten::kaiser_window.beta",
        "aten::_grouped_mm",
    }
)

#: Torch's tags of data-dependent operators; a shape that depends on the data has to be asked for each time.
_DYNAMIC = torch.Tag.dynamic_output_shape
_VALUE = torch.Tag.data_dependent_output
#: Operators that return nothing and raise if the data are bad: the node is asked, or later operations would compute on
#: garbage.
_CHECKS = frozenset({"aten::_linalg_check_errors"})
#: The elements, at most, of local tensors that are made to get local torch's error for an operation.
_FEW = 1 << 22
_PLAIN = frozenset({"bool", "int", "float", "number", "complex", "str"})


def _native_attention(*args: Any, **kwargs: Any) -> Any:
    """Infers multi-head attention: torch's meta kernel returns weights even where none are wanted."""
    op = torch.ops.aten._native_multi_head_attention.default
    wanted = args[10] if len(args) > 10 else kwargs.get("need_weights", True)
    output, weights = op(*args, **kwargs)
    return output, weights if wanted else None


def _flash_attention(*args: Any, **kwargs: Any) -> Any:
    """Infers flash attention on a CPU: torch 2.11's meta kernel has the sums of exponentials in float32, for doubles as
    well."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    output, sums = op(*args, **kwargs)
    return output, sums.to(torch.float64) if output.dtype is torch.float64 else sums


def _padded(nested: torch.Tensor, padding: float, size: Any = None) -> torch.Tensor:
    if size is None:
        raise RuntimeError("to_padded_tensor of a tensor on a node needs its output_size")
    return nested.new_empty(size)


#: Operators whose outputs these functions know better than their meta kernels. The first two begin and end torch's fast
#: path for padded batches (``nn.TransformerEncoder``), the third runs in between: there a node has a nested tensor,
#: without the padding. To the script it has the size with padding, which only torch's own layers see.
_KNOWN: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten._nested_tensor_from_mask.default: lambda x, *rest, **_: x.new_empty(x.shape),
    torch.ops.aten.to_padded_tensor.default: _padded,
    torch.ops.aten._transformer_encoder_layer_fwd.default: lambda x, *rest, **_: x.new_empty(x.shape),
    torch.ops.aten._native_multi_head_attention.default: _native_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
}


def asks_always(op: OpOverload) -> bool:
    """Returns whether an operator's output shapes depend on the data."""
    return _DYNAMIC in op.tags and op.name() not in {"aten::index.Tensor", "aten::index.Tensor_out"}


def writes_out(op: OpOverload) -> bool:
    """Returns whether an operator writes its results into tensors that it is given by name: an ``out=``."""
    return any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)


def is_wrong(op: OpOverload) -> bool:
    """Returns whether an operator's meta kernel gives other shapes or strides than the CPU kernel. That of its ``out=``
    overloads is the same."""
    return op.name() in WRONG_META or (op._schema.name in WRONG_META and writes_out(op))


def list_length(name: str, args: tuple[Any, ...]) -> int:
    """Returns the number of tensors in the list that an operator returns whose shapes the node has to be asked for.

    Raises NotImplementedError where it is not known.
    """
    if name == "aten::_histogramdd_bin_edges":
        return len(args[1])
    raise NotImplementedError(
        f"{name}: a list of tensors whose shapes depend on the data is not supported; "
        "call it on x.cpu(), or on the node in a function with disttensor.run"
    )


def gives_value(op: OpOverload) -> bool:
    """Returns whether an operator returns a Python value instead of tensors (``.item()``, ``equal``)."""
    returns = op._schema.returns
    if op.name() in _CHECKS:
        return True
    return _VALUE in op.tags or (bool(returns) and all(str(r.type) in _PLAIN for r in returns))


def infer(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``op`` on the meta device, and returns its outputs there. What it warns of is for the caller to find out.

    Raises NotImplementedError where the meta kernel is missing or wrong, and torch's own errors (shapes, dtypes) at the
    user's line.
    """
    if is_wrong(op):
        raise NotImplementedError
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    try:
        return unwarned(partial(_KNOWN.get(op, op), *args, **kwargs))
    except NotImplementedError:
        raise
    except (AssertionError, ArithmeticError, RuntimeError, TypeError, ValueError, IndexError) as e:
        if (local := _locally(op, args, kwargs)) is not None:
            try:
                raise local from None
            finally:
                del local  # its frames would have it, and keep a user's tensors until the collector comes
        # some of torch's meta kernels refuse operands by an assertion, or stumble over them
        if not isinstance(e, (AssertionError, ArithmeticError)):
            raise
        raise RuntimeError(f"{op.name()}: {e}" if str(e) else f"{op.name()} refuses these arguments") from e


class _Running(threading.local):
    """Says whether this thread runs meta kernels of our own accord."""

    meta = False


_running = _Running()


def unwarned(call: Callable[[], T]) -> T:
    """Returns what a call that runs meta kernels returns. Nobody hears what they warn of, be they C++ or Python: the
    kernels themselves warn of it as well."""
    before, _running.meta = _running.meta, True
    try:
        return heard(call)[0]
    finally:
        _running.meta = before


class QuietWarnings:
    """Stands for the module ``warnings`` where torch's meta kernels are: those that we run warn nobody."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def warn(self, *args: Any, stacklevel: int = 1, **kwargs: Any) -> None:
        if not _running.meta:
            self._original.warn(*args, stacklevel=stacklevel + 1, **kwargs)


def _locally(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Returns the error that local torch raises for tensors like these, as meta kernels may have other words for it;
    None if it raises none."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None  # a trial would draw from the user's generator
    metas = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    if sum(v.numel() for v in metas) > _FEW:
        return None

    def like(v: Any) -> Any:
        if isinstance(v, torch.Tensor) and v.device.type == "meta":
            return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cpu").zero_()
        return v

    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    try:
        with torch.no_grad():
            op(*tree_map(like, args), **tree_map(like, kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError) as e:
        return None if isinstance(e, NotImplementedError) or "not implemented for" in str(e) else e.with_traceback(None)
    return None


#: Modules that these import, each of which takes a part of the time. Between two of them a Ctrl-C is heard.
_PARTS = ("sympy", "torch.distributed.fsdp", "torch._dynamo")


def warm(then: Callable[[], None]) -> None:
    """Has torch import the modules that its meta kernels need (over a second, which the first operation would take
    otherwise), and calls ``then``; once. Waits for it, and raises its errors.

    It runs in a thread of its own, where no Ctrl-C arrives: an import that is broken off in the middle is spoilt for
    good. A Ctrl-C is raised when a part of them has been imported, and the next call goes on; a second one at once.
    (Not to wait at all was tried. The interpreter waits for the thread at its end, as torch would abort it; but what is
    imported meanwhile resets CPython's note of a KeyboardInterrupt that nobody caught, and the exit code is another.)
    """
    if not _warmed.is_set():
        stop, over = threading.Event(), threading.Event()
        threading.Thread(target=_warm, args=(then, stop, over), name="disttensor-warm").start()
        try:
            over.wait()  # not the thread's join: after a Ctrl-C in join, Python 3.11 takes the thread for ended
        except BaseException:
            stop.set()
            over.wait()
            raise
    if _failed:
        raise _failed[0]


_once, _warmed, _failed = threading.Lock(), threading.Event(), list[BaseException]()


def _warm(then: Callable[[], None], stop: threading.Event, over: threading.Event) -> None:
    cause: Exception | None = None
    try:
        with _once, no_collection():  # imports make no garbage, and take a third less time without collections
            for name in _PARTS:
                if stop.is_set() or _warmed.is_set():
                    return
                try:
                    importlib.import_module(name)
                except Exception as e:  # torch may do without it; if not, what it says below is of an import half done
                    cause = cause or e
            try:
                x = torch.empty(2, 2, device="meta")
                torch.ops.aten.mul.Tensor(torch.ops.aten.mm.default(x, x), 2.0)
                then()
            except BaseException as e:
                _failed.append(cause or e)
            _warmed.set()
    finally:
        over.set()


def stand_ins(tree: Any, tensor_type: Any) -> Any:
    """Returns ``tree`` with tensors on the meta device in place of proxies."""
    return tree_map(lambda v: v._h.meta.stand_in if isinstance(v, tensor_type) else v, tree)
