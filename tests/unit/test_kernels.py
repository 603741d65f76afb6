"""Which kernels composites pick: the functions of a record against what torch does, given the same facts.

What torch does on this CPU is seen as it does it (on lesser ones: ops/test_picked_kernels.py, which starts processes).
Records of other machines stand in tables, derived by hand from torch's sources as kernel_choice.py names them: 2.13's
sdp_utils_cpp.h from its package, the others from copies of late 2025 and, where it says 2.15, of 2026.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import inputs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from disttensor.runtime.protocol.commands import Abilities
from disttensor.session import kernel_choice
from disttensor.session.kernel_choice import CUDNN, EFFICIENT, FLASH, MATH, Attention, KernelFacts

VERSION = kernel_choice.here().version


class Fact(NamedTuple):
    """A tensor's facts."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def fact(x: torch.Tensor) -> Fact:
    return Fact(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)


def told(*shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Fact:
    return fact(torch.empty_strided(shape, torch.empty(shape, device="meta").stride(), dtype=dtype))._replace(
        offset=offset
    )


class Seen(TorchDispatchMode):
    """The operators that torch has come to, below its composites."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


# ---- attention on CPUs -----------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BACKENDS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


@st.composite
def calls(draw: Any) -> tuple[list[torch.Tensor], torch.Tensor | None, dict[str, Any]]:
    """Operands of attention, which mostly go together."""
    dtype = draw(st.sampled_from(DTYPES))
    batch, heads, long, keys, width = (draw(st.integers(1, 3)) for _ in range(5))
    keys_heads = draw(st.sampled_from([heads, heads, 1]))
    value_width = draw(st.sampled_from([width, width, width + 1]))
    leading = draw(st.sampled_from([True, True, True, False]))
    shapes = [(batch, heads, long, width), (batch, keys_heads, keys, width), (batch, keys_heads, keys, value_width)]
    operands = []
    for shape in shapes:
        shape = shape if leading else shape[1:]
        x = torch.randn(*shape[:-2], shape[-1], shape[-2]).mT if draw(st.integers(0, 4)) == 0 else torch.randn(shape)
        operands.append(x.to(dtype).requires_grad_(draw(st.booleans())))
    mask = None
    kind = draw(st.sampled_from(["none", "none", "plain", "heads", "keys", "three", "learned"]))
    if kind != "none":
        shape = {"heads": (batch, heads, long, keys), "keys": (1, keys), "three": (heads, long, keys)}.get(
            kind, (long, keys)
        )
        mask = torch.randn(shape).to(dtype).requires_grad_(kind == "learned")
        if kind == "plain" and draw(st.booleans()):
            mask = mask > 0
    options = {
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.5])),
        "is_causal": mask is None and draw(st.booleans()),
        "enable_gqa": draw(st.booleans()),
    }
    return operands, mask, options


@settings(max_examples=inputs(300), deadline=None)
@given(call=calls(), allowed=st.sampled_from([BACKENDS, BACKENDS, BACKENDS[:1], BACKENDS[1:]]), grad=st.booleans())
@pytest.mark.filterwarnings("ignore")  # torch tells why no kernel fits
def test_attention_is_what_local_torch_computes_it_with(call: Any, allowed: list[SDPBackend], grad: bool) -> None:
    operands, mask, options = call
    asked = Attention(
        *map(fact, operands),
        None if mask is None else fact(mask),
        options["dropout_p"],
        options["is_causal"],
        options["enable_gqa"],
        grad and any(x.requires_grad for x in operands),
        mask is not None and mask.requires_grad,
    )
    with sdpa_kernel(allowed), torch.set_grad_enabled(grad):
        seen = Seen()
        try:
            with seen:
                scaled_dot_product_attention(*operands, mask, **options)
        except RuntimeError as error:
            if "o available kernel" not in str(error) and "o viable backend" not in str(error):
                return  # shapes that don't go together
            with pytest.raises(RuntimeError, match=str(error).split(".")[0]):
                kernel_choice.attention(kernel_choice.here(), asked)
            return
        expected = FLASH if "_scaled_dot_product_flash_attention_for_cpu" in seen.names else MATH
        assert kernel_choice.attention(kernel_choice.here(), asked) == expected


# ---- an LSTM on CPUs -------------------------------------------------------------------------------------------------

#: Records of CPUs, and the dtypes in which torch gives an LSTM to oneDNN: with and without a graph.
#: Derived from RNN.cpp (use_mkldnn) and mkldnn/Utils.h (mkldnn_bf16_device_check, mkldnn_fp16_device_check).
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPUS: dict[str, tuple[Abilities, set[torch.dtype], set[torch.dtype]]] = {
    "AVX2": (Abilities("AVX2", True, False, False), {F32}, {F32}),
    "AVX-512": (Abilities("AVX512", True, True, False), {F32, BF16}, {F32, BF16}),
    "AMX, with float16": (Abilities("AVX512", True, True, True), {F32, BF16}, {F32, BF16, F16}),
    "ARM with bfloat16": (Abilities("SVE256", True, True, False), {F32, BF16}, {F32, BF16}),
    "ARM without oneDNN": (Abilities("DEFAULT", False, False, False), set(), set()),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_an_lstm_on_other_cpus(cpu: str) -> None:
    node, graphed, plain = CPUS[cpu]
    record = KernelFacts("cpu", (0, 0), VERSION, node)
    for graph, onednn in ((True, graphed), (False, plain)):
        for dtype in DTYPES:
            expected = "onednn" if dtype in onednn else "parts"
            assert kernel_choice.lstm(record, told(2, 1, 3, dtype=dtype), False, graph) == expected
    assert kernel_choice.lstm(record, told(2, 0, 3), False, True) == "parts"
    assert kernel_choice.lstm(record, told(2, 1, 3), True, True) == "parts"
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert kernel_choice.lstm(record, told(2, 1, 3), False, True) == "parts"
    assert kernel_choice.shown_a_cpu(record)
    assert (kernel_choice.dropout(record, 0.5, True), kernel_choice.averages_at_once(record)) == ("parts", False)
    assert kernel_choice.casts(record) == "cpu"


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def gpu(
    major: int, minor: int, cudnn: int = 91900, cuda: tuple[int, int] = (13, 0), version: tuple[int, int] = (2, 13)
) -> KernelFacts:
    node = Abilities("AVX512", True, True, False, cudnn, cuda, True, ((major, minor),))
    return KernelFacts("cuda", (major, minor), version, node)


V100, A100, RTX30, H100, B200, RTX50 = (gpu(*n) for n in ((7, 0), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)))
H100_OLD = gpu(9, 0, cudnn=90800, cuda=(12, 6))
H100_NONE = gpu(9, 0, cudnn=0)
H100_215 = gpu(9, 0, version=(2, 15))


def qkv(*shape: int, dtype: torch.dtype = BF16, **options: Any) -> Attention:
    return Attention(*[told(*shape, dtype=dtype)] * 3, **options)


PLAIN = qkv(2, 4, 64, 64)
FULL = qkv(2, 4, 64, 64, dtype=F32)
MASKED = PLAIN._replace(mask=told(64, 64, dtype=BF16))
LEARNED = MASKED._replace(learned=True)
NARROW = qkv(2, 4, 64, 12)
UNBATCHED = qkv(4, 64, 64)
GROUPED = PLAIN._replace(key=told(2, 2, 64, 64, dtype=BF16), value=told(2, 2, 64, 64, dtype=BF16), gqa=True)
ONE_HEAD = PLAIN._replace(key=told(2, 1, 64, 64, dtype=BF16), value=told(2, 1, 64, 64, dtype=BF16))
WIDE = qkv(2, 4, 64, 256)
STRIDED = PLAIN._replace(query=PLAIN.query._replace(stride=(16384, 4096, 1, 64)))  # type: ignore[attr-defined]

#: (what, record, call, backend), derived by hand from cuda/sdp_utils.cpp: nothing here has run on a GPU.
ON_CUDA: list[tuple[str, KernelFacts, Attention, int]] = [
    ("bfloat16", A100, PLAIN, FLASH),
    ("bfloat16", RTX50, PLAIN, FLASH),
    ("cuDNN first on Hopper", H100, PLAIN, CUDNN),
    ("cuDNN first on Blackwell", B200, PLAIN, CUDNN),
    ("an old cuDNN is not preferred", H100_OLD, PLAIN, FLASH),
    ("no cuDNN", H100_NONE, PLAIN, FLASH),
    ("Volta has no bfloat16", V100, PLAIN, MATH),
    ("Volta has float16, without flash", V100, qkv(2, 4, 64, 64, dtype=F16), EFFICIENT),
    ("float32 is for the efficient one", A100, FULL, EFFICIENT),
    ("float32", H100, FULL, EFFICIENT),
    ("float64", A100, qkv(2, 4, 64, 64, dtype=torch.float64), MATH),
    ("flash takes no mask", A100, MASKED, EFFICIENT),
    ("cuDNN takes one", H100, MASKED, CUDNN),
    ("but none that learns", H100, LEARNED, EFFICIENT),
    ("a mask whose rows are not dense", A100, MASKED._replace(mask=Fact((64, 64), (1, 64), 0, BF16)), MATH),
    ("a mask that is no matrix", H100, MASKED._replace(mask=told(4, 64, 64, dtype=BF16)), EFFICIENT),
    ("12 is no multiple of 8", A100, NARROW, FLASH),
    ("nor for cuDNN", H100, NARROW, FLASH),
    ("nor for the efficient one", A100, NARROW._replace(mask=told(64, 64, dtype=BF16)), MATH),
    ("6 is no multiple of 4", A100, qkv(2, 4, 64, 6, dtype=F32), MATH),
    ("which float32 on Volta needs not", V100, qkv(2, 4, 64, 6, dtype=F32), EFFICIENT),
    ("three dimensions", A100, UNBATCHED, MATH),
    ("since 2.15", H100_215, UNBATCHED, CUDNN),
    ("groups", A100, GROUPED, FLASH),
    ("groups that don't divide", A100, GROUPED._replace(query=told(2, 3, 64, 64, dtype=BF16)), MATH),
    ("groups with a mask", A100, GROUPED._replace(mask=told(64, 64, dtype=BF16)), MATH),
    ("one head of keys, not said so", A100, ONE_HEAD, MATH),
    ("since 2.15", H100_215, ONE_HEAD, CUDNN),
    ("256 wide", H100, WIDE, CUDNN),
    ("256 wide", A100, WIDE, FLASH),
    ("288 wide", A100, qkv(2, 4, 64, 288), EFFICIENT),
    ("training 224 wide on sm86", RTX30, qkv(2, 4, 64, 224, training=True), EFFICIENT),
    ("using 224 wide on sm86", RTX30, qkv(2, 4, 64, 224), FLASH),
    ("training 256 wide on sm86", RTX30, WIDE._replace(training=True), FLASH),
    ("with dropout", RTX30, WIDE._replace(training=True, dropout=0.1), EFFICIENT),
    ("training 224 wide on sm120", RTX50, qkv(2, 4, 64, 224, training=True), EFFICIENT),
    ("causal", A100, PLAIN._replace(causal=True), FLASH),
    ("causal, not square", A100, PLAIN._replace(causal=True, query=told(2, 4, 8, 64, dtype=BF16)), EFFICIENT),
    ("other width of values", A100, PLAIN._replace(value=told(2, 4, 64, 32, dtype=BF16)), EFFICIENT),
    ("dropout", H100, PLAIN._replace(dropout=0.1), CUDNN),
    ("dropout that is no 16th, since 2.15", H100_215, PLAIN._replace(dropout=0.1), FLASH),
    ("one key", H100, PLAIN._replace(key=told(2, 4, 1, 64, dtype=BF16), value=told(2, 4, 1, 64, dtype=BF16)), FLASH),
    ("no query", H100, PLAIN._replace(query=told(2, 4, 0, 64, dtype=BF16)), MATH),
    ("not dense", H100, STRIDED, MATH),
    ("two dtypes", A100, PLAIN._replace(value=FULL.value), MATH),
]


@pytest.mark.parametrize(("what", "record", "asked", "backend"), ON_CUDA)
def test_attention_on_cuda(what: str, record: KernelFacts, asked: Attention, backend: int) -> None:
    assert kernel_choice.attention(record, asked) == backend


def test_a_user_chooses_among_them() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_choice.attention(A100, PLAIN) == MATH
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert kernel_choice.attention(H100, PLAIN) == EFFICIENT
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert kernel_choice.attention(H100, PLAIN) == MATH
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        kernel_choice.attention(A100, MASKED)
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel_choice.attention(H100, PLAIN) == FLASH
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_rest_on_cuda() -> None:
    """Derived from RNN.cpp, Dropout.cpp and autocast_mode.cpp: nothing here has run on a GPU."""
    assert not kernel_choice.shown_a_cpu(H100)
    assert kernel_choice.dropout(H100, 0.5, True) == "fused"
    assert (kernel_choice.averages_at_once(H100), kernel_choice.casts(H100)) == (True, "cuda")
    assert kernel_choice.foreach(H100, False, BF16)


def test_every_choice_is_a_function_of_the_record() -> None:
    """And nothing else in session/kernel_choice.py is public but what those are made of."""
    choices = {
        n for n, f in vars(kernel_choice).items() if inspect.isfunction(f) and f.__module__ == kernel_choice.__name__
    }
    given_a_record = {
        n for n in choices if next(iter(inspect.signature(getattr(kernel_choice, n)).parameters), "") == "record"
    }
    rest = {n for n in choices - given_a_record if not n.startswith("_")}
    assert rest <= {"record", "switches", "here"}
