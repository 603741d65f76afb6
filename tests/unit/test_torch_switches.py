"""Each setting of torch's is sent to nodes, or somebody has said why it is not (runtime/process/torch_switches.py)."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from types import ModuleType
from typing import Any

import pytest
import torch

from disttensor.runtime.process import torch_switches

_LOCAL = "it is about devices of this process; nodes' devices have torch.node"
_SCRIPT = "Python of the script's reads it, where the script's program calls that; a function on a node sets its own"
_THREAD = "torch keeps it for a thread; what it changes of operations is in their commands"
_LOADING = "torch.load and torch.save are called in the script"
_COMPILER = "what is compiled is compiled in the script, as commands"
_TESTS = "torch's own tests and tracers use it"
_SCRIPTING = "it is about TorchScript's programs, whose operators come to nodes one by one"

#: The settings that are not sent, by patterns of their names, with the reason.
NOT_SENT = {
    "torch.set_default_dtype": "it is sent by a command of its own (Default)",
    "torch.set_default_tensor_type": "it is sent by a command of its own (Default)",
    "torch._C._set_default_dtype": "it is sent by a command of its own (Default)",
    "torch._C._set_default_tensor_type": "it is sent by a command of its own (Default)",
    "torch.set_num_threads": "each node has as many as its host has cores for it: init_master_worker(threads=)",
    "torch.set_num_interop_threads": "each node has its own; dt.run(torch.set_num_interop_threads, 2, node=1)",
    "torch._C.set_num_*threads": "as their public names",
    "torch.set_flush_denormal": "it is of a thread: dt.run(torch.set_flush_denormal, True, node=1) sets a node's",
    "torch._C.set_flush_denormal": "as its public name",
    "torch.set_default_device": "factories take it in the script, which makes its tensors by commands",
    "torch.random.set_rng_state": "it is about this process's generator; torch.node.set_rng_state is about a node's",
    "torch*.set_anomaly_enabled": "backward runs in the script",
    "torch.autograd.anomaly_mode.set_detect_anomaly": "backward runs in the script",
    "torch*.set_autocast_*": _THREAD,
    "torch.autograd.grad_mode.*": _THREAD,
    "torch.autograd.graph.*": "backward runs in the script",
    "torch._C._set_*grad*": _THREAD,
    "torch._C._set_multithreading_enabled": _THREAD,
    "torch._C._set_view_replay_enabled": _THREAD,
    "torch._C._set_override_stale_capture_stream": "backward runs in the script",
    "torch._C._set_warn_on_accumulate_grad_stream_mismatch": "backward runs in the script",
    "torch._C._set_autograd_fallback_mode": "backward runs in the script",
    "torch.overrides.*": _THREAD,
    "torch.accelerator.*": _LOCAL,
    "torch.cpu.*": _LOCAL,
    "torch.cuda.*": _LOCAL,
    "torch.mps.*": _LOCAL,
    "torch.mtia.*": _LOCAL,
    "torch.xpu.*": _LOCAL,
    "torch._C._accelerator_set*": _LOCAL,
    "torch._C._cuda_set*": _LOCAL,
    "torch._C._xpu_set*": _LOCAL,
    "torch._C._mtia_set*": _LOCAL,
    "torch._C._mps_set*": _LOCAL,
    "torch.backends.disable_global_flags": "it forbids the script assignments to flags",
    "torch.backends.opt_einsum.*": "torch.einsum chooses the order of its products in Python, in the script",
    "torch.backends.python_native.*": "it chooses kernels in Triton and CuteDSL, which few builds have",
    "torch.backends.quantized.supported_engines": "it can't be set",
    "torch.backends.xnnpack.enabled": "it can't be set",
    "torch.nn.attention.*_flash_attention_impl": "it loads a library: dt.run(activate_flash_attention_impl, 'FA4')",
    "torch._C._set_sdp_use_fa3": "the kernels that it is about are another library's, which has to be loaded first",
    "torch._C._set_storage*_access_error_msg": "it is about one storage",
    "torch._C._set_sm_carveout_experimental": "it has no public name",
    "torch.ao.*": "it changes modules, and not torch",
    "torch.compiler.*": _COMPILER,
    "torch.fx.*": _COMPILER,
    "torch.export.*": _COMPILER,
    "torch.onnx.*": _COMPILER,
    "torch.distributed.*": "it is about process groups, and modules that use them",
    "torch.profiler.*": "it is about what this process does",
    "torch.testing.*": _TESTS,
    "torch.hub.*": _LOADING,
    "torch.serialization.*": _LOADING,
    "torch.jit.*": _SCRIPTING,
    "torch._C._jit_set_*": _SCRIPTING,
    "torch._C._set_graph_executor_optimize": _SCRIPTING,
    "torch._C._set_value_trace": _SCRIPTING,
    "torch._C._set_tracing_state": _SCRIPTING,
    "torch._C._set_should_use_format_with_string_table": _SCRIPTING,
    "torch._C._set_default_mobile_cpu_allocator": _SCRIPTING,
    "torch.multiprocessing.*": "it is about processes that the script starts",
    "torch._C._set_worker_*": "it is about processes that the script starts",
    "torch._C._set_print_stack_traces_on_fatal_signal": "it is about signals of this process",
    "torch._C._set_thread_name": "it is about a thread of this process",
    "torch.utils.set_module": "it is no setting",
    "torch.utils.checkpoint.*": _SCRIPT,
    "torch.utils.data.*": _SCRIPT,
    "torch._C._set_backcompat_*": "it is about warnings of Python's arguments, which the script has",
    "torch._C._set_cached_tensors_enabled": _TESTS,
    "torch._C._set_conj": "it changes a tensor, and not torch",
    "torch._C._set_neg": "it changes a tensor, and not torch",
    "torch._C._set_tensor_metadata": "it changes a tensor, and not torch",
    "torch._C._set_dispatch_mode": _THREAD,
    "torch._C._set_dtensor_allow_implicit_replication": _SCRIPT,
    "torch._C._set_generator_metaclass": _TESTS,
    "torch._C._set_graph_exec_group": _THREAD,
    "torch._C._set_meta_in_tls_dispatch_include": _THREAD,
    "torch._C._set_only_lift_cpu_tensors": _TESTS,
    "torch._C._set_skip_next_torch_function": _THREAD,
    "torch._C._set_torch_function_state": _THREAD,
    "torch._C._set_throw_on_mutable_data_ptr": "it changes a tensor, and not torch",
    "torch._C._set_warn_deprecated_on_mutable_data_ptr": "it changes a tensor, and not torch",
}  # fmt: skip

#: What sets something by its name.
SETS = re.compile(r"(set|enable|disable|use|allow|preferred|activate|restore)_|flags$")
SETS_IN_C = re.compile(r"_?(accelerator_|cuda_|jit_|mps_|mtia_|xpu_)?set_")


def modules() -> Iterator[tuple[str, ModuleType]]:
    """Torch's public modules, and all of its backends."""
    for found in pkgutil.iter_modules(torch.backends.__path__, "torch.backends."):
        if not found.name.rpartition(".")[2].startswith("_"):
            importlib.import_module(found.name)
    for name, module in sorted(sys.modules.items()):
        if re.match(r"torch(\.[a-z][a-z_0-9]*)*$", name) and isinstance(module, ModuleType):
            yield name, module


def settings() -> dict[str, Any]:
    """What sets something, by its dotted name: functions of public modules, attributes of those that are objects, and
    functions of torch._C."""
    found: dict[str, Any] = {}
    for name, module in modules():
        inner = vars(module).get("m", module)  # a module of torch's whose attributes are settings has the real one in m
        for key, value in vars(inner).items():
            if SETS.match(key) and callable(value) and getattr(value, "__module__", name) in (name, None, "torch._C"):
                found[f"{name}.{key}"] = value
        if type(module) is not ModuleType:
            for key in dir(type(module)):
                value = inspect.getattr_static(type(module), key)
                if key.startswith("_") or (isinstance(value, property) and value.fset is None):
                    continue
                if hasattr(type(value), "__set__") or (SETS.match(key) and callable(value)):
                    found[f"{name}.{key}"] = value
    found |= {f"torch._C.{key}": getattr(torch._C, key) for key in dir(torch._C) if SETS_IN_C.match(key)}
    return found


def functions_that_set(value: Any) -> list[Any]:
    """The functions that are called when an attribute of a module is set, or the function itself."""
    if isinstance(value, property):
        return [value.fset]
    if hasattr(value, "setter"):  # a ContextProp of torch's
        return [value.setter]
    return [type(value).__set__] if hasattr(type(value), "__set__") else [value]


def is_sent(name: str, value: Any) -> bool:
    """Whether it calls a setter that tells the nodes, by its source."""
    if name in torch_switches.SETTERS:
        return True
    short = [setter.rpartition(".")[2] for setter in torch_switches.SETTERS]
    for function in functions_that_set(value):
        if getattr(function, "__name__", "") in short:
            return True
        with suppress(OSError, TypeError):
            source = inspect.getsource(function)
            if any(f"{each}(" in source for each in short) or "set_flags(" in source:
                return True
    return False


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_setting_is_sent_or_not_for_a_reason() -> None:
    found = settings()
    assert len(found) > 150, "torch's settings were not found"
    left = {name for name, value in found.items() if not is_sent(name, value)}
    unknown = {name for name in left if not any(fnmatch(name, pattern) for pattern in NOT_SENT)}
    assert not unknown, (
        f"torch {torch.__version__} has settings of which nobody has said whether nodes need them: a row in "
        f"runtime/process/torch_switches.py for one that changes what operations compute, else a line here: {unknown}"
    )
    both = {name for name in found.keys() - left if name in NOT_SENT and not name.endswith(".set_flags")}
    assert both <= {"torch.backends.opt_einsum.flags"}, f"these are sent: {both}"


def test_a_setting_that_is_new_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a public module, in an object in a module's place, and in torch._C."""

    def set_more(value: bool) -> None: ...

    class Prop:
        def __get__(self, obj: object, kind: object) -> bool:
            return True

        def __set__(self, obj: object, value: bool) -> None: ...

    set_more.__module__ = "torch.backends.mha"
    monkeypatch.setattr(torch.backends.mha, "set_more", set_more, raising=False)
    monkeypatch.setattr(type(torch.backends.cudnn), "more", Prop(), raising=False)
    monkeypatch.setattr(torch._C, "_set_more", set_more, raising=False)
    for name in ("torch.backends.mha.set_more", "torch.backends.cudnn.more", "torch._C._set_more"):
        assert not is_sent(name, settings()[name])
        assert not any(fnmatch(name, pattern) for pattern in NOT_SENT)


def test_an_untouched_torch_has_the_values_of_the_table() -> None:
    """So a session that sets nothing tells its nodes nothing. And what was read can be set."""
    found = torch_switches.present()
    assert len(found) > 30
    told = torch_switches.changed(torch_switches.UNTOUCHED, found)
    assert told.keys() <= {"qengine", "blas_preferred_backend"}, told  # other processors and builds have others
    torch_switches.put(found.items())
    assert torch_switches.present() == found


def test_what_torch_refuses_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"torch .* has no switch 'nope'"):
        torch_switches.put([("nope", True)])
    with pytest.raises(Exception, match=r"bool|expects|argument"):
        torch_switches.put([("cudnn_enabled", "yes")])


#: Setters, the first two of the older interface for float32, and what they are given.
OLD_AND_NEW: list[tuple[str, tuple[Any, ...]]] = [
    ("float32_matmul_precision", ("medium",)),
    ("cublas_allow_tf32", (False,)),
    ("float32_matmul_precision", ("medium",)),
    ("cublas_allow_tf32", (True,)),
    ("fp32_precision_setter", ("mkldnn", "matmul", "bf16")),
    ("float32_matmul_precision", ("highest",)),
    ("fp32_precision_setter", ("generic", "all", "tf32")),
    ("fp32_precision_setter", ("cuda", "matmul", "ieee")),
    ("cudnn_allow_tf32", (False,)),
    ("fp32_precision_setter", ("generic", "all", "none")),
    ("cudnn_allow_tf32", (True,)),
    ("float32_matmul_precision", ("highest",)),
    ("cublas_allow_tf32", (True,)),
    ("float32_matmul_precision", ("medium",)),
]


def use(name: str, args: tuple[Any, ...]) -> None:
    getattr(torch._C, f"_set_{name}")(*args)


def seen() -> list[object]:
    """The state of torch, and what the older interface says of it: a value, or that it can't say one."""
    found: list[object] = [torch_switches.present()]
    for read in (
        torch._C._get_float32_matmul_precision,
        torch._C._get_cublas_allow_tf32,
        torch._C._get_cudnn_allow_tf32,
    ):
        try:
            found.append(read())
        except RuntimeError as e:
            found.append(str(e))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_both_interfaces_for_the_precision_of_float32() -> None:
    """What is told of each change leads another torch to the same state, which has only been told changes."""
    begin = torch_switches.present()
    history: list[dict[str, torch_switches.Setting]] = []
    try:
        for i, (name, args) in enumerate(OLD_AND_NEW, 1):
            before = torch_switches.present()
            use(name, args)
            called = {name: args[0]} if name in torch_switches.OLDER else {}
            history.append(torch_switches.changed(before, torch_switches.present(), called))
            want = seen()
            torch_switches.put(begin.items())
            for told in history:
                torch_switches.put(told.items())
            assert seen() == want, history[-1]
            torch_switches.put(begin.items())
            for earlier in OLD_AND_NEW[:i]:
                use(*earlier)
            assert seen() == want
    finally:
        torch_switches.put(begin.items())
    assert torch_switches.present() == begin
