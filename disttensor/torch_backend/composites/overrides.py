"""Overrides of composites that take another path for tensor subclasses, or off the CPU, than for local tensors.

The path decides the numbers: LAPACK finds other singular values when it is asked for vectors as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from ...dispatch.copies import upload
from ...dispatch.dispatch import as_torch_came, run, whole
from ...dispatch.op_plan import OpEntry
from ...dispatch.op_table import enter, handler
from ...proxy.proxy import DistributedTensor, innermost
from ...session import current, kernel_choice
from . import as_cpu, sdpa

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

_kernels: list[tuple[OpOverload, Callable[..., Any]]] = []


def register(library: torch.library.Library) -> None:
    """Puts this module's functions in the place of torch's composites for device type "node"."""
    for op, function in _kernels:
        library.impl(op.name().removeprefix("aten::"), function, "AutogradPrivateUse1")


#: The function, if any, that is called in the place of each composite's override.
_around: list[Callable[..., Any]] = []
_library: list[torch.library.Library] = []


def surround(by: Callable[..., Any] | None) -> None:
    """Has ``by(op, function, *args, **kwargs)`` called in the place of the functions for composites; None ends that.

    The kernels that this registers stay, and without ``by`` call the function itself: torch keeps registered kernels,
    and everything that they hold, even where others have replaced them or their library is gone.
    """
    _around[:] = [by] if by is not None else []
    if _library or by is None:
        return
    _library.append(torch.library.Library("aten", "IMPL"))
    ours = [(aten.scaled_dot_product_attention.default, sdpa.attention), *_kernels]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that a kernel replaces another, which is the purpose
        for op, function in ours:
            name, caller = op.name().removeprefix("aten::"), partial(_surrounded, op, function)
            _library[0].impl(name, caller, "AutogradPrivateUse1", allow_override=True)


def _surrounded(op: OpOverload, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for by in _around:
        return by(op, function, *args, **kwargs)
    return function(*args, **kwargs)


def averaging(original: Callable[[], list[str]]) -> Callable[[], list[str]]:
    @wraps(original)
    def devices() -> list[str]:
        """Returns the device types for which AveragedModel interpolates all parameters at once, with other roundings:
        CUDA nodes, never CPU nodes."""
        session = current.current()
        places = session.places.every if session else ()
        at_once = any(kernel_choice.averages_at_once(place.record) for place in places)
        return [name for name in original() if name != "node" or at_once]

    return devices


def chosen(op: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function in the place of torch's composite ``op``: above autograd, and in inference mode."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        _kernels.append((op, function))

        def without_autograd(entry: OpEntry, args: Any, kwargs: Any) -> Any:
            with as_torch_came():
                return function(*args, **kwargs)

        handler(op)(without_autograd)
        return function

    return put


def _differentiated(x: torch.Tensor) -> bool:
    """Returns whether torch would prepare for a derivative of ``x``, as it always does for subclasses."""
    if type(x) is not DistributedTensor or (torch.is_grad_enabled() and x.requires_grad):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


for _op in as_cpu.OPERATORS:
    chosen(_op)(as_cpu.runs_as_cpu(_op))


@chosen(aten.linalg_svdvals.default)
def svdvals(A: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    """Computes ``torch.linalg.svdvals`` without the vectors, unless a derivative needs them."""
    return aten._linalg_svd(A, False, _differentiated(A), driver=driver)[1]  # type: ignore[no-any-return]


@chosen(aten.linalg_eigvalsh.default)
def eigvalsh(A: torch.Tensor, UPLO: str = "L") -> torch.Tensor:
    """Computes ``torch.linalg.eigvalsh`` without the vectors, unless a derivative needs them."""
    return aten._linalg_eigh(A, UPLO, _differentiated(A))[0]  # type: ignore[no-any-return]


@chosen(aten.linalg_eigvals.default)
def eigvals(A: torch.Tensor) -> torch.Tensor:
    """Computes ``torch.linalg.eigvals`` without the vectors, unless a derivative needs them."""
    return aten.linalg_eig(A)[0] if _differentiated(A) else aten._linalg_eigvals(A)  # type: ignore[no-any-return]


@chosen(aten.ctc_loss.Tensor)
def ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *lengths: Any, **options: Any) -> torch.Tensor:
    """Computes ``torch.nn.functional.ctc_loss``, which takes local lengths on any device: they are sent to the node."""
    place = getattr(log_probs, "_place", None)
    sent = [
        upload(x, place) if place is not None and isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
        for x in lengths[:2]
    ]
    composite = aten.ctc_loss.Tensor._op_dk
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return composite(key, log_probs, targets, *sent, *lengths[2:], **options)  # type: ignore[no-any-return]


@chosen(aten.one_hot.default)
def one_hot(x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Computes ``torch.nn.functional.one_hot`` whole on the node, which looks whether there are such classes. What
    torch computes for subclasses does not."""
    if type(x) is not DistributedTensor or torch._C._len_torch_dispatch_stack():
        return aten.one_hot.default._op_dk(_COMPOSITE, x, num_classes)  # type: ignore[no-any-return]
    return whole(enter(aten.one_hot.default), (x, num_classes), num_classes < 0)  # type: ignore[no-any-return]


def _quantile(op: OpOverload) -> Callable[..., Any]:
    def quantile(x: torch.Tensor, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Computes quantiles. A node that computes as a CPU looks whether they are in the range, as torch does there,
        and gives nothing where they are not."""
        place = getattr(innermost(x), "_place", None)
        if place is not None and kernel_choice.checks_quantiles(place.record):
            plain = q.detach()
            inside = plain.ge(0).logical_and(plain.le(1)).all()
            text = "quantile() q values must be in the range [0, 1]"
            looked = aten._functional_assert_async.msg(inside, text, plain)
            q = q + (looked - plain) if q.requires_grad else looked
        return op._op_dk(_COMPOSITE, x, q, *args, **kwargs)

    return quantile


for _op in (aten.quantile.default, aten.nanquantile.default, aten.quantile.out, aten.nanquantile.out):
    chosen(_op)(_quantile(_op))


def _with_phases(op: OpOverload) -> Callable[..., Any]:
    name = op.name().removeprefix("aten::").removeprefix("_")
    text = (
        f"{name}_backward: The eigenvectors in the complex case are specified up to multiplication by e^{{i phi}}. The "
        "specified loss function depends on this quantity, so it is ill-defined."
    )

    def decompose(*args: Any, **kwargs: Any) -> Any:
        """Computes eigenvectors with torch's own derivative, for which the node looks whether the loss depends on their
        phases, as torch does (linalg_eig_backward in FunctionsManual.cpp)."""
        L, V = op._op_dk(torch._C.DispatchKey.Autograd, *args, **kwargs)
        if V.requires_grad and V.is_complex():
            # the tensor itself would hold its own graph, which holds the hook
            V.register_hook(partial(_without_phases, text, V.detach()))
        return L, V

    return decompose


def _without_phases(text: str, V: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the gradient of eigenvectors, or nothing where it depends on their phases. The bounds are torch's."""
    if grad is None:  # only the eigenvalues have one
        return None
    with torch.no_grad():
        plain = grad.detach()
        phases = (V.mH @ plain).diagonal(0, -2, -1).imag
        looked = aten._functional_assert_async.msg((phases.abs() <= 1e-2).all(), text, plain)
    return grad + torch.zeros_like(looked[..., :1, :1]) if grad.requires_grad else looked


for _op in (aten.linalg_eig.default, aten._linalg_eigh.default):
    _kernels.append((_op, _with_phases(_op)))


def _rank_into(op: OpOverload, without: OpOverload) -> Callable[..., Any]:
    def into(*args: Any, **kwargs: Any) -> Any:
        """Computes a rank and writes it into ``out``, which torch's composite leaves as it is for subclasses."""
        out = kwargs.pop("out")
        rank = without(*args, **kwargs)
        return aten.add.out(rank, 0, out=out)

    return into


for _name, _without in (
    ("out", "default"),
    ("atol_rtol_float_out", "atol_rtol_float"),
    ("atol_rtol_tensor_out", "atol_rtol_tensor"),
    ("out_tol_tensor", "tol_tensor"),
):
    _op = getattr(aten.linalg_matrix_rank, _name)
    chosen(_op)(_rank_into(_op, getattr(aten.linalg_matrix_rank, _without)))


@handler(aten.mkldnn_rnn_layer.default)
def _rnn_layer(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Runs oneDNN's layer. Torch's kernel looks at the grad mode instead of ``train``, so ``train`` takes that mode to
    the node."""
    return run(entry, (*args[:-1], torch.is_grad_enabled()), kwargs, None)
