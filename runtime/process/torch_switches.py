"""The switches of torch that hold for a process as a whole: which there are, and how each is read and set.

A script's torch and a node's have the same ones, so what a user sets in the script is set on nodes by name. What torch
keeps for each thread (grad mode, autocast) is not among them, nor is what only the script reads, such as the default
device; `tests/unit/test_torch_switches.py` has a reason for each setting of torch's that is not here.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

#: A setting as it crosses the wire.
Setting = bool | int | float | str | tuple[bool | int | float | str | None, ...] | None


@dataclass(frozen=True)
class TorchSwitch:
    """A row of the table: how one switch is read and set."""

    get: str | Callable[..., Any]  #: the function that reads it, dotted
    set: str  #: the function that sets it, dotted
    #: the value that it has in a torch that nobody has changed; where a build has another one, that is told to nodes
    untouched: Setting
    args: tuple[str, ...] = ()  #: the first arguments of both functions
    spread: bool = False  #: its value is a tuple: the setter's arguments


def _deterministic() -> tuple[bool, bool]:
    import torch

    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _pairs() -> dict[str, TorchSwitch]:
    """Returns the switches for the precision of float32, by backend and kind of operator."""
    get, set_ = "torch._C._get_fp32_precision_getter", "torch._C._set_fp32_precision_setter"
    pairs = [("generic", "all"), *((b, op) for b in ("cuda", "mkldnn") for op in ("all", "conv", "rnn", "matmul"))]
    tf32 = {("cuda", "conv"), ("cuda", "rnn")}
    return {f"fp32_precision {b} {op}": TorchSwitch(get, set_, "tf32" if (b, op) in tf32 else "none", (b, op))
            for b, op in pairs}  # fmt: skip


def _c(name: str, untouched: Setting, spread: bool = False, get: str = "get", end: str = "") -> dict[str, TorchSwitch]:
    """Returns the switch that torch._C reads and sets by functions of this name."""
    return {name: TorchSwitch(f"torch._C._{get}_{name}{end}", f"torch._C._set_{name}", untouched, spread=spread)}


#: The switches, by name, in the order in which they are set: those that set others with them come first.
SWITCHES: dict[str, TorchSwitch] = {
    "deterministic_algorithms": TorchSwitch(_deterministic, "torch._C._set_deterministic_algorithms", (False, False)),
    **_c("deterministic_fill_uninitialized_memory", True),
    **_c("cublas_allow_tf32", False),
    **_c("float32_matmul_precision", "highest"),
    **_c("cudnn_allow_tf32", True),
    **_c("onednn_allow_tf32", False),
    **_pairs(),
    **_c("cudnn_enabled", True),
    **_c("cudnn_benchmark", False),
    "cudnn_benchmark_limit": TorchSwitch(
        "torch._C._cuda_get_cudnn_benchmark_limit", "torch._C._cuda_set_cudnn_benchmark_limit", 10
    ),
    **_c("cudnn_deterministic", False),
    **_c("cudnn_depthwise_kernel", "auto"),
    **_c("cublas_allow_fp16_reduced_precision_reduction", (True, True), spread=True),
    **_c("cublas_allow_bf16_reduced_precision_reduction", (True, True), spread=True),
    **_c("cublas_allow_fp16_accumulation", False),
    **_c("cublaslt_prefer_grouped_gemm", False),
    **_c("cpu_allow_fp16_reduced_precision_reduction", False),
    **_c("mkldnn_enabled", True),
    **_c("mkldnn_deterministic", False),
    **_c("nnpack_enabled", True),
    **_c("miopen_immediate", False),
    "sdp_use_flash": TorchSwitch("torch._C._get_flash_sdp_enabled", "torch._C._set_sdp_use_flash", True),
    "sdp_use_mem_efficient": TorchSwitch(
        "torch._C._get_mem_efficient_sdp_enabled", "torch._C._set_sdp_use_mem_efficient", True
    ),
    "sdp_use_math": TorchSwitch("torch._C._get_math_sdp_enabled", "torch._C._set_sdp_use_math", True),
    "sdp_use_cudnn": TorchSwitch("torch._C._get_cudnn_sdp_enabled", "torch._C._set_sdp_use_cudnn", True),
    "sdp_use_overrideable": TorchSwitch(
        "torch._C._get_overrideable_sdp_enabled", "torch._C._set_sdp_use_overrideable", True
    ),
    **_c("sdp_priority_order", (1, 2, 0, 3, 4)),
    **_c("math_sdp_allow_fp16_bf16_reduction", False),
    **_c("linalg_preferred_backend", 0),
    **_c("blas_preferred_backend", 1),
    **_c("rocm_fa_preferred_backend", 0),
    **_c("qengine", 4),
    "check_sparse_tensor_invariants": TorchSwitch(
        "torch._C._check_sparse_tensor_invariants", "torch._C._set_check_sparse_tensor_invariants", False
    ),
    **_c("warnAlways", False),
    "mha_fastpath": TorchSwitch(
        "torch.backends.mha.get_fastpath_enabled", "torch.backends.mha.set_fastpath_enabled", True
    ),
}  # fmt: skip

#: Those of an older interface for the precision of float32.
OLDER = ("cublas_allow_tf32", "float32_matmul_precision", "cudnn_allow_tf32", "onednn_allow_tf32")
#: The functions that set them, dotted: those that are replaced in the script's process.
SETTERS = tuple(dict.fromkeys(switch.set for switch in SWITCHES.values()))
#: The values of a torch that nobody has changed.
UNTOUCHED = {name: switch.untouched for name, switch in SWITCHES.items()}


def present() -> dict[str, Setting]:
    """Returns the switches that this process's torch has, with their values.

    One that torch can't read is not among them: where both the old and the new interface for the precision of float32
    were used, torch refuses to tell what the old one says.
    """
    found: dict[str, Setting] = {}
    for name, get in _getters().items():
        try:
            value = get(*SWITCHES[name].args)
        except RuntimeError:
            continue
        if value is not None:
            found[name] = _plain(value)
    return found


def changed(
    before: Mapping[str, Setting], now: Mapping[str, Setting], called: Mapping[str, Setting] | None = None
) -> dict[str, Setting]:
    """Returns the switches that have another value now, in the order in which they are to be set.

    ``called``: switches of the older interface for float32 that the user has set, whose values torch may refuse to
    tell. They set some of the newer ones, so that these come again behind them.
    """
    called = called or {}
    found = {name for name, value in now.items() if before.get(name) != value}
    newer = _pairs().keys()
    if called or not found.isdisjoint(OLDER):
        found |= newer & now.keys()
    first = {name: now[name] for name in now if name in found and name not in called and name not in newer}
    return {**first, **called, **{name: now[name] for name in now if name in found and name in newer}}


def put(settings: Iterable[tuple[str, Setting]]) -> None:
    """Sets switches of this process's torch. Raises ValueError for one that it doesn't have, and its own errors for
    values that it refuses; the others are set then.

    Warnings are left out: the script has had them, where the user set the switch.
    """
    errors: list[Exception] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in settings:
            try:
                _put(name, value)
            except Exception as e:
                errors.append(e)
    if errors:
        raise errors[0]


def _put(name: str, value: Setting) -> None:
    get, switch = _getters().get(name), SWITCHES.get(name)
    set_ = None if switch is None else _function(switch.set)
    if switch is None or get is None or set_ is None:
        import torch

        raise ValueError(f"torch {torch.__version__} has no switch {name!r}")
    if switch.args:
        set_(*switch.args, value)
    elif name == "deterministic_algorithms" and isinstance(value, tuple):
        set_(value[0], warn_only=value[1])
    elif switch.spread and isinstance(value, tuple):
        set_(*value)
    elif type(value) is int and not isinstance(now := get(), (int, list)):
        set_(type(now)(value))  # an enum of torch's
    else:
        set_(list(value) if isinstance(value, tuple) else value)


def _plain(value: Any) -> Setting:
    if isinstance(value, (bool, int, float, str)):
        return value
    return tuple(value) if isinstance(value, (list, tuple)) else int(value)


@cache
def _getters() -> dict[str, Callable[..., Any]]:
    """Returns the functions that read the switches which this torch has."""
    found = {name: s.get if callable(s.get) else _function(s.get) for name, s in SWITCHES.items()}
    return {name: get for name, get in found.items() if get is not None}


def _function(dotted: str) -> Callable[..., Any] | None:
    """Returns a function by its name, or None: some versions and builds of torch lack it."""
    module, _, name = dotted.rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    return found if callable(found) else None
