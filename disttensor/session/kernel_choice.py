"""Chooses a composite's kernel as the node's own torch would, by functions of that node's record and the call's facts.

A composite of torch's chooses among kernels by its operands' device type and by the machine's abilities, for which it
asks its own process. Here that process is the script, and the kernels run elsewhere. So each node tells in its Hello
what its torch would find (`Abilities`), and for an overridden composite the choice is made here. Switches that a user
sets (``torch.nn.attention.sdpa_kernel``, ``torch.backends.mkldnn.flags``) are the script's.

The rules for CUDA are read from torch's sources, and have never run on a GPU.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from ..runtime.host import capabilities
from ..runtime.protocol.commands import Abilities, Hello

#: torch.nn.attention.SDPBackend
MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3
_CPU = torch.device("cpu")
_HALVES = (torch.float16, torch.bfloat16)


class KernelFacts(NamedTuple):
    """The facts by which the torch of a place chooses kernels, beside its operands."""

    kind: str  #: the kind of kernels: "cpu" or "cuda"; a simulated CUDA device computes as a CPU does
    capability: tuple[int, int]  #: the CUDA device's compute capability
    version: tuple[int, int]  #: torch's version
    node: Abilities


class Operand(Protocol):
    """The facts of a tensor by which kernels are chosen: those of a `Meta`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


def record(hello: Hello, device: str) -> KernelFacts:
    """Returns the record of a node's device ("cpu", "cuda:1"). The node's torch has the script's version (`meet` in
    meeting.py checks that)."""
    _, _, index = device.partition(":")
    kind = "cuda" if index and not hello.simulated else "cpu"
    capability = hello.abilities.capabilities[int(index)] if index else (0, 0)
    return KernelFacts(kind, capability, _version(hello.torch), hello.abilities)


@cache
def here() -> KernelFacts:
    """Returns the record of this process's CPU, by which composites choose for operands that they take for local."""
    return KernelFacts("cpu", (0, 0), _version(str(torch.__version__)), capabilities.cpu())


def _version(torch_version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


# ---- attention -------------------------------------------------------------------------------------------------------


class Attention(NamedTuple):
    """The facts of a call of scaled_dot_product_attention."""

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None = None
    dropout: float = 0.0
    causal: bool = False
    gqa: bool = False
    training: bool = False  #: whether query, key or value requires a gradient
    learned: bool = False  #: whether the mask requires a gradient


class AttentionSwitches(NamedTuple):
    """The user's switches for attention."""

    flash: bool
    efficient: bool
    math: bool
    cudnn: bool
    order: tuple[int, ...]
    deterministic: bool


def switches() -> AttentionSwitches:
    """Returns the script's switches, as they are now."""
    return AttentionSwitches(
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
        torch._C._get_deterministic_algorithms() and not torch._C._get_deterministic_algorithms_warn_only(),
    )


def attention(record: KernelFacts, asked: Attention) -> int:
    """Returns the backend that scaled_dot_product_attention takes. Raises torch's RuntimeError where none is
    allowed."""
    if record.kind == "cpu":
        return _attention_on_cpu(asked)
    on = switches()
    if not (on.flash or on.efficient or on.math or on.cudnn):
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
    if record.version >= (2, 15):
        asked = _batched(asked)
    for backend in _order(record, on):
        may = _CUDA.get(backend)
        if may is not None and may(record, asked, on):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _attention_on_cpu(asked: Attention) -> int:
    """Returns the choice of the script's torch, which has the node's version; on CPUs only operands and switches
    decide."""

    def shown(x: Operand | None) -> Any:
        return None if x is None else torch.Tensor._make_wrapper_subclass(
            _Shown, x.shape, strides=x.stride, storage_offset=x.offset, dtype=x.dtype, device=_CPU
        )  # fmt: skip

    query, key, value, mask = map(shown, asked[:4])
    if asked.learned:
        mask.requires_grad_()
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        return int(torch._fused_sdp_choice(query, key, value, mask, asked.dropout, asked.causal, enable_gqa=asked.gqa))


class _Shown(torch.Tensor):
    """A tensor of metadata only, which torch takes for a CPU tensor."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func}: there is nothing to compute with")


# Source: torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, and sdp_utils_cpp.h beside it, which is in
# torch's package. Each function's docstring names its source there. Nested tensors are never on a node.


def _order(record: KernelFacts, on: AttentionSwitches) -> tuple[int, ...]:
    """priority_order: cuDNN comes first on Hopper and Blackwell, unless the user has set another order."""
    major, minor = record.capability
    new = record.node.cuda >= (13, 0) or minor in (0, 3)
    preferred = record.node.cudnn > 91500 and major in (9, 10) and new  # check_prefer_cudnn_attention
    if preferred and on.order[:4] == (FLASH, EFFICIENT, MATH, CUDNN):
        return (CUDNN, FLASH, EFFICIENT, MATH)
    return on.order


def _batched(asked: Attention) -> Attention:
    """normalize_unbatched_input, of torch 2.15."""
    if not all(len(x.shape) == 3 for x in asked[:3]):
        return asked
    mask = asked.mask
    while mask is not None and len(mask.shape) < 4:
        mask = SeenOperand((1, *mask.shape), (0, *mask.stride), mask.offset, mask.dtype)
    operands = [SeenOperand((1, *x.shape), (0, *x.stride), x.offset, x.dtype) for x in asked[:3]]
    return asked._replace(query=operands[0], key=operands[1], value=operands[2], mask=mask)


class SeenOperand(NamedTuple):
    """The facts of an operand that is not a proxy."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def _four(asked: Attention) -> bool:
    """check_tensor_shapes."""
    return all(len(x.shape) == 4 for x in asked[:3])


def _dtypes(asked: Attention, allowed: tuple[torch.dtype, ...]) -> bool:
    """check_tensor_dtype."""
    return asked.query.dtype in allowed and all(x.dtype == asked.query.dtype for x in asked[:3])


def _low(record: KernelFacts, asked: Attention) -> bool:
    """check_dtypes_low_precision."""
    return _dtypes(asked, _HALVES if record.capability >= (8, 0) else (torch.float16,))


def _mask_fits(asked: Attention) -> bool:
    """check_attn_mask_shape."""
    mask, (batch, heads, long, _), keys = asked.mask, asked.query.shape, asked.key.shape[2]
    if mask is None:
        return True
    if asked.learned or mask.shape[-2] not in (1, long) or mask.shape[-1] not in (1, keys):
        return False
    return len(mask.shape) == 2 or (
        len(mask.shape) == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    )


def _heads_fit(record: KernelFacts, asked: Attention, grouped: bool, same: bool = True) -> bool:
    """check_batch_size_and_num_heads_dense."""
    (batch, heads), (key_batch, keys), (value_batch, values) = (tuple(x.shape[:2]) for x in asked[:3])
    if not batch == key_batch == value_batch:
        return False
    if asked.gqa and grouped:
        return (keys == values or not same) and keys > 0 < values and heads % keys == 0 == heads % values
    if grouped and record.version >= (2, 15) and keys == values == 1:
        return True
    return heads == keys == values


def _dense(asked: Attention, one_is_any: bool) -> bool:
    """check_nonzero_sequence_lengths_dense and check_last_dim_stride_equals_1_dense."""
    if 0 in (asked.query.shape[-2], asked.key.shape[-2]):
        return False
    dense = all(x.stride[-1] == 1 for x in asked[:3]) or (one_is_any and asked.query.shape[-1] == 1)
    return dense and (asked.mask is None or asked.mask.stride[-1] == 1)


def _flash(record: KernelFacts, asked: Attention, on: AttentionSwitches) -> bool:
    """can_use_flash_attention."""
    if not (on.flash and record.node.flash and _four(asked) and asked.mask is None and _low(record, asked)):
        return False
    width, capability = asked.query.shape[-1], record.capability
    if width > 256 or any(x.shape[-1] != width for x in asked[:3]) or not (8, 0) <= capability <= (12, 1):
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if asked.training and small and width > 192 and (width <= 224 or asked.dropout > 0):
        return False
    if asked.causal and asked.query.shape[-2] != asked.key.shape[-2]:  # check_flash_causal_non_square_seqlens
        return False
    return _heads_fit(record, asked, grouped=True) and _dense(asked, one_is_any=True)


def _efficient(record: KernelFacts, asked: Attention, on: AttentionSwitches) -> bool:
    """can_use_mem_efficient_attention."""
    if not (on.efficient and (5, 0) <= record.capability <= (12, 1) and _four(asked)):
        return False
    half, major = asked.query.dtype in _HALVES, record.capability[0]
    aligned = 4 if major >= 8 else 1  # minimum_gemm_alignment
    if major >= 8 or (major == 7 and half):
        aligned = max(aligned, 8 if half else 4)
    width, value = asked.query.shape[-1], asked.value.shape[-1]
    if asked.key.shape[-1] != width or 0 in (width, value) or width % aligned or value % aligned:
        return False
    operands = asked[:3] if record.version >= (2, 15) and major >= 8 else ()
    if any(x.offset % aligned for x in operands if 0 not in x.shape):  # check_data_ptr_alignment_mem_efficient
        return False
    if not (_dense(asked, one_is_any=False) and _heads_fit(record, asked, grouped=False)):
        return False
    return _dtypes(asked, (torch.float32, *_HALVES) if major >= 8 else (torch.float32, torch.float16))


def _cudnn(record: KernelFacts, asked: Attention, on: AttentionSwitches) -> bool:
    """can_use_cudnn_attention."""
    version, capability = record.node.cudnn, record.capability
    if not on.cudnn or version < 90000 or (asked.dropout > 0 and 91100 < version < 91400):
        return False
    if not _four(asked) or on.deterministic or not _low(record, asked) or not _mask_fits(asked):
        return False
    if not (8, 0) <= capability <= (12, 1) or not _dense(asked, one_is_any=True):
        return False
    if not _heads_fit(record, asked, grouped=True, same=False):
        return False
    (_, _, long, width), keys, value = asked.query.shape, asked.key.shape[2], asked.value.shape[3]
    if record.version >= (2, 15):
        if asked.dropout * 16 != int(asked.dropout * 16) or max(asked.query.shape[:2]) > 65535:  # check_cudnn_dropout
            return False
        large = (capability == (9, 0) or capability[0] == 10) and not (capability == (10, 7) and version <= 92500)
        wide = 256 if large and version > 92200 else 128
        if wide == 128 and large and version >= 91100 and (width, value) == (192, 128):
            wide = 192
        # check_cudnn_d256_bprop_head_dim
        if asked.training and wide == 256 and not (
            max(width, value) <= 128 or (width, value) in ((192, 128), (256, 256))
        ):  # fmt: skip
            return False
    else:
        wide = 256 if version >= 91000 and capability == (9, 0) else 128
    if max(width, value) > wide or width % 8 or value % 8:  # check_cudnn_tensor_shapes
        return False
    return keys != 1 and not (asked.dropout and long == 1)


_CUDA = {
    MATH: lambda record, asked, on: on.math,
    FLASH: _flash,
    EFFICIENT: _efficient,
    CUDNN: _cudnn,
}


# ---- recurrent layers ------------------------------------------------------------------------------------------------


def lstm(record: KernelFacts, input: Operand, projections: bool, graph: bool) -> str:
    """Returns how a CPU computes an LSTM's layers: "onednn", or "parts", its decomposition. ``graph``: the grad mode.

    Source: aten/src/ATen/native/RNN.cpp, lstm and use_mkldnn.
    """
    if projections or not torch._C._get_mkldnn_enabled() or 0 in input.shape:
        return "parts"
    node = record.node
    dtypes = {
        torch.float32: node.onednn,
        torch.bfloat16: node.bfloat16,
        torch.float16: node.float16 and not graph,
    }
    return "onednn" if dtypes.get(input.dtype) else "parts"


def shown_a_cpu(record: KernelFacts) -> bool:
    """Returns whether a recurrent layer or cell is run on proxies that torch takes for CPU tensors. On CUDA it is not:
    cells are fused there, as in torch, and layers are made of cells, where local torch has cuDNN's. Source: RNN.cpp."""
    return record.kind == "cpu"


# ---- others ----------------------------------------------------------------------------------------------------------


def dropout(record: KernelFacts, p: float, train: bool | None) -> str:
    """Returns how dropout is computed: "fused", one kernel that draws and masks, or "parts": bernoulli, div and mul.

    Source: aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable. Where nothing or all is dropped, torch takes
    neither; a direct call of the operator gets the fused kernel.
    """
    return "fused" if record.kind == "cuda" or train is False or not 0 < p < 1 else "parts"


def foreach(record: KernelFacts, same: bool, dtype: torch.dtype) -> bool:
    """Returns whether an optimizer takes all parameters at once: on CUDA, as torch's own default; on CPUs, where
    torch's default is one by one, only where that gives the ``same`` numbers (as for Adam) in this dtype."""
    return record.kind == "cuda" or (same and dtype in (torch.float32, torch.float64))


def averages_at_once(record: KernelFacts) -> bool:
    """Returns whether AveragedModel interpolates all parameters at once, with other roundings. Source:
    torch/optim/swa_utils.py and torch/utils/_foreach_utils.py, _get_foreach_kernels_supported_devices."""
    return record.kind == "cuda"


def checks_quantiles(record: KernelFacts) -> bool:
    """Returns whether the ``q`` of a quantile are looked at. Source: aten/src/ATen/native/Sorting.cpp,
    quantile_compute, which leaves it out where it would have to wait."""
    return record.kind == "cpu"


def casts(record: KernelFacts) -> str:
    """Returns the kind of device whose casts autocast makes: "cpu" or "cuda".

    Source: aten/src/ATen/autocast_mode.cpp, which registers by kind.
    """
    return record.kind
