"""Operators of simulated CUDA devices: the CPU's kernels, over aliases of device memory, on the streams' threads.

    caller     the meta kernel says what comes out, or the CPU's (``_told``); torch's caching allocator has the memory;
               a closure is enqueued
    stream     the closure makes CPU tensors at addresses that tasks may touch, and calls the CPU's kernel

A closure holds addresses, never tensors of the device: were it to keep them alive, no mistake about a lifetime or
about ``record_stream`` could be seen. It calls nothing of CUDA.

What random operators draw: those of the n-th call since a generator was seeded draw what a new generator of the CPU
draws whose seed is of both (``_drawing``). A generator's offset counts as on a GPU, so its state can be kept and set.
What a graph draws is counted while it is captured: each replay draws that much, from where the generator is then.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_runtime = ctypes.CDLL(None)
_runtime.cudaGetErrorString.restype = ctypes.c_char_p
_SHIFT = 1 << 44
_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_LAUNCH_FAILURE = 719

#: What needs no kernel: views, memory, one number (a copy by CUDA's runtime), what is not torch's.
NATIVE = {
    f"aten::{name}"
    for name in [
        "_efficientzerotensor",
        "_local_scalar_dense",
        "_reshape_alias",
        "as_strided",
        "is_set_to",
        "record_stream",
        "resize_",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "unfold",
        "view",
        "view_as_complex",
        "view_as_real",
    ]
}
#: What torch composes of other operators on a CPU, where a GPU has a kernel of its own: the CPU's rule is taken whole.
WHOLE = ("aten::convolution", "aten::convolution_backward", "aten::_convolution")
#: What may have CPU tensors that are not single numbers beside tensors of the device.
MIXED = ("index", "_index", "_unsafe_index", "copy", "set_", "nonzero", "repeat_interleave")

#: How often each operator was called.
calls: dict[str, int] = {}


class Where(NamedTuple):
    """A tensor of a device, by its memory."""

    address: int
    size: int  #: bytes, from the first element to the last one
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def alias(self) -> Tensor:
        """Returns a CPU tensor on the same memory."""
        if not self.size:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        memory = (ctypes.c_char * self.size).from_address(self.address + _SHIFT)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.stride)


def where(tensor: Tensor) -> Where:
    shape, stride = tuple(tensor.shape), tensor.stride()
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    size = 0 if 0 in shape else (last + 1) * tensor.element_size()
    return Where(tensor.data_ptr() if size else 0, size, tensor.dtype, shape, stride)


def _write(to: Where, value: Tensor) -> None:
    to.alias().copy_(value.real if value.is_complex() and not to.dtype.is_complex else value)


# ---- on the streams

_waiting: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)
_replayed: set[int] = set()  #: what a graph has, which may run again


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    work = _waiting.get(number) if number in _replayed else _waiting.pop(number, None)
    if work is None:  # an error has come between, and its launch was refused
        return
    try:
        with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
            work()
    except BaseException:
        traceback.print_exc()
        _runtime.simcuda_break(_LAUNCH_FAILURE)


def _stream(index: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))


def _capturing(index: int) -> int:
    """Returns the number of the capture that the current stream of a device is in, or 0."""
    return int(_runtime.simcuda_capturing(index, _stream(index)))


def launch(device: torch.device, work: Callable[[], None]) -> None:
    """Has the current stream of a device call ``work``."""
    stream = _stream(device.index)
    number = next(_numbers)
    if _runtime.simcuda_capturing(device.index, stream):
        _replayed.add(number)
    _waiting[number] = work
    if error := _runtime.simcuda_launch(device.index, stream, _run, ctypes.c_void_p(number)):
        _waiting.pop(number, None)
        raise torch.AcceleratorError(f"CUDA error: {_error(error)}")


def _error(number: int) -> str:
    return f"{_runtime.cudaGetErrorString(number).decode()} ({number})"


# ---- fresh memory

_INTEGERS = 0xA5A5A5A5A5A5A5A5
#: Signalling NaNs.
_FILLS = {
    torch.float64: 0x7FF5A5A5A5A5A5A5,
    torch.complex128: 0x7FF5A5A5A5A5A5A5,
    torch.float32: 0x7FA5A5A57FA5A5A5,
    torch.complex64: 0x7FA5A5A57FA5A5A5,
    torch.float16: 0x7DA57DA57DA57DA5,
    torch.bfloat16: 0x7FA57FA57FA57FA5,
}


def _filled(tensor: Tensor) -> Tensor:
    """Fills what the allocator has given, which may be a block that was free, as soon as the stream comes to it."""
    if size := tensor.untyped_storage().nbytes():
        index = tensor.device.index
        stream = _stream(index)
        pattern = ctypes.c_uint64(_FILLS.get(tensor.dtype, _INTEGERS))
        storage = ctypes.c_void_p(tensor.untyped_storage().data_ptr())
        if error := _runtime.simcuda_fill(index, storage, pattern, ctypes.c_size_t(size), stream):
            raise torch.AcceleratorError(f"CUDA error: {_error(error)}")
    return tensor


def _fresh(kernel: Any) -> Callable[..., Tensor]:
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        return _filled(kernel.call_boxed(_CUDA, *args, **kwargs))

    return empty


# ---- random numbers

Generators = Callable[[], torch.Generator]  #: gives a CPU's generator for one call of a random operator


def _drawing(generator: torch.Generator | None, device: torch.device) -> Generators:
    own = torch.cuda.default_generators[device.index] if generator is None else generator
    if own.device.type != "cuda":
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{own.device.type}'")
    if number := _capturing(device.index):
        return _captured[number].add(own)
    offset = own.get_offset()
    own.set_offset(offset + 4)
    return partial(_seeded, own.initial_seed(), offset)


def _seeded(seed: int, offset: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 6364136223846793005 + offset) & ((1 << 63) - 1))


class GraphDraws:
    """The random calls of a graph: how many there are of each generator, and where that is at the replay under way."""

    def __init__(self) -> None:
        self._counts: dict[torch.Generator, int] = {}
        self._at: dict[torch.Generator, tuple[int, int]] = {}  #: seed and offset

    def add(self, own: torch.Generator) -> Generators:
        """Counts a call that is captured."""
        count = self._counts.get(own, 0)
        self._counts[own] = count + 1

        def drawn() -> torch.Generator:
            seed, offset = self._at[own]
            return _seeded(seed, offset + 4 * count)

        return drawn

    def begin(self) -> None:
        """Has the replay that comes next on the current stream draw from where the generators are, which go on."""
        for own, count in self._counts.items():
            offset = own.get_offset()
            own.set_offset(offset + 4 * count)
            at = own.initial_seed(), offset
            launch(torch.device("cuda", torch.cuda.current_device()), partial(self._at.__setitem__, own, at))


#: By the numbers of captures.
_captured: weakref.WeakValueDictionary[int, GraphDraws] = weakref.WeakValueDictionary()


def _graphs_draw(kind: Any) -> None:
    """Has CUDA graphs draw. torch's own kernels read the generator's place in the device's memory, which it writes."""
    capture_begin, replay = kind.capture_begin, kind.replay

    def capture(self: Any, *args: Any, **kwargs: Any) -> None:
        capture_begin(self, *args, **kwargs)
        self.simcuda_draws = GraphDraws()
        _captured[_capturing(torch.cuda.current_device())] = self.simcuda_draws

    def draw(self: Any) -> None:
        self.simcuda_draws.begin()
        replay(self)

    kind.capture_begin, kind.replay = capture, draw
    kind.simcuda_draws = GraphDraws()  # of one that has captured nothing


# ---- the general rule


def _device_of(flat: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    for x in flat:
        if isinstance(x, Tensor) and x.is_cuda:
            return x.device
    device = torch.device(kwargs.get("device") or "cuda")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _on_one_device(name: str, flat: Sequence[Any], device: torch.device) -> None:
    mixed = name.startswith(tuple(f"aten::{prefix}" for prefix in MIXED))
    for x in flat:
        if isinstance(x, Tensor) and x.device != device and (x.is_cuda or (x.dim() and not mixed)):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{device} and {x.device}! (in {name})"
            )


def _number(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x
    return torch.tensor(x, dtype=torch.get_default_dtype() if isinstance(x, float) else None)


def _stays(x: Any) -> Any:
    """Returns what a closure keeps of a value that is not on the device."""
    return x.clone() if isinstance(x, Tensor) and x.dim() else x


def _stand_in(x: Any, device: str) -> Any:
    """Returns a tensor that lies as ``x`` does: on the meta device, or of ones."""
    if not (isinstance(x, Tensor) and x.is_cuda):
        return x
    stands = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return stands.fill_(1) if device == "cpu" else stands


def _told(op: Any, flat: list[Any], tree: Any, devices: Sequence[str], random: bool) -> tuple[Any, list[Any]]:
    """Returns tensors that lie as the results do, and those that stood for the operands: of the first of these devices
    whose kernel takes them. None where none does."""
    for device in devices:
        stands = [_stand_in(x, device) for x in flat]
        args, kwargs = tree_unflatten(stands, tree)
        if "device" in kwargs:
            kwargs["device"] = device
        if random:
            kwargs["generator"] = None
        try:
            return op(*args, **kwargs), stands
        except NotImplementedError:
            continue
        except Exception:
            if device == "meta":  # what the CPU refuses to do with ones it may do with the operands
                raise
    return None, stands


def _plain(x: Tensor) -> bool:
    """Returns whether a tensor has the strides of a new one; torch calls some others contiguous, too."""
    return x.stride() == torch.empty(x.shape, device="meta").stride()


@functools.cache
def _in_common() -> set[str]:
    """Returns the operators for which a CPU and CUDA have one function around their kernels: it lays the results."""
    listed = Path(torch.__file__).parents[1] / "torchgen" / "packaged" / "ATen" / "native" / "native_functions.yaml"
    found = set()
    for entry in listed.read_text().split("\n- func: ")[1:]:
        keys = [keys.split(", ") for keys in re.findall(r"^    ([\w, ]+): \w+", entry, re.M)]
        if any({"CPU", "CUDA"} <= {*each} for each in keys) or re.search(r"^  structured(_delegate)?: ", entry, re.M):
            found.add(f"aten::{entry.partition('(')[0]}")
    return found


def rule(op: Any, name: str, compute: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns the kernel of an operator.

    Args:
        op: the operator.
        name: its name, with its overload.
        compute: what it computes with CPU tensors, instead of itself.
    """
    compute = compute or op
    random = any(a.name == "generator" for a in op._schema.arguments)
    # meta kernels in Python choose other strides than torch's function in C++, for dimensions of one element and more
    laid_as_here = name in _in_common() and not random
    order = [a.name for a in op._schema.arguments]
    # torch gives a kernel in Python numbers where it has made tensors of them, which most operators then refuse
    numbers = torch._C._should_allow_numbers_as_tensors(name.removeprefix("aten::").partition(".")[0])
    tensors = set() if numbers else {i for i, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor"}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        if tensors:
            args = tuple(_number(x) if i in tensors else x for i, x in enumerate(args))
        if random:  # by name, wherever it stands
            kwargs |= dict(zip(order, args, strict=False))
            args = ()
        flat, tree = tree_flatten((args, kwargs))
        device = _device_of(flat, kwargs)
        _on_one_device(name, flat, device)
        if random:
            drawn = _drawing(kwargs.get("generator"), device)

        odd = laid_as_here and any(isinstance(x, Tensor) and x.is_cuda and not _plain(x) for x in flat)
        told, stands = _told(op, flat, tree, ("cpu", "meta") if odd else ("meta",), random)
        if told is None and op._schema.returns:
            return _at_once(name, compute, flat, tree, device, drawn if random else None)

        same = {id(m): x for m, x in zip(stands, flat, strict=True) if isinstance(x, Tensor)}
        leaves, shape = tree_flatten(told)
        outs = [_output(m, same, device) for m in leaves]
        pairs = zip(outs, leaves, strict=True)
        made = [where(o) if isinstance(o, Tensor) and id(m) not in same else None for o, m in pairs]
        inputs = [where(x) if isinstance(x, Tensor) and x.is_cuda else None for x in flat]
        others = [None if w else _stays(x) for x, w in zip(flat, inputs, strict=True)]
        del flat, stands, same, args, kwargs, told, leaves, pairs

        def work() -> None:
            a, k = tree_unflatten([w.alias() if w else x for w, x in zip(inputs, others, strict=True)], tree)
            if "device" in k:
                k["device"] = "cpu"
            if random:
                k["generator"] = drawn()
            for value, out in zip(tree_flatten(compute(*a, **k))[0], made, strict=True):
                if out and value is not None:
                    out.alias().copy_(value)

        launch(device, work)
        return tree_unflatten(outs, shape)

    return kernel


def _is_strided(value: Tensor) -> None:
    if value.layout != torch.strided:
        raise NotImplementedError(f"simcuda has no tensors of layout {value.layout} (tools/simcuda/kernels.py)")


def _output(m: Any, same: dict[int, Tensor], device: torch.device) -> Any:
    if not isinstance(m, Tensor):
        return m
    if id(m) not in same:
        _is_strided(m)
        return torch.ops.aten.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=device)
    given = same[id(m)]
    if given.shape != m.shape:
        given.resize_(m.shape).as_strided_(m.shape, m.stride())
    return given


def _at_once(
    name: str,
    compute: Callable[..., Any],
    flat: list[Any],
    tree: Any,
    device: torch.device,
    drawn: Generators | None,
) -> Any:
    """Computes what has no meta kernel, or whose values say how large the result is: it waits, as such do on a GPU."""
    torch.cuda.current_stream(device).synchronize()
    inputs = [where(x).alias() if isinstance(x, Tensor) and x.is_cuda else x for x in flat]
    a, k = tree_unflatten(inputs, tree)
    if "device" in k:
        k["device"] = "cpu"
    if drawn is not None:
        k["generator"] = drawn()
    same = {id(alias): x for alias, x in zip(inputs, flat, strict=True)}

    def back(value: Any) -> Any:
        if id(value) in same or not isinstance(value, Tensor):
            return same.get(id(value), value)
        _is_strided(value)
        out = torch.ops.aten.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        target = where(out)
        launch(device, lambda: _write(target, value))
        return out

    leaves, shape = tree_flatten(compute(*a, **k))
    return tree_unflatten([back(value) for value in leaves], shape)


def _copy(native: Any) -> Callable[..., Tensor]:
    """Returns the kernel of ``copy_``. What CUDA's runtime copies is torch's own code; the rest goes by way of that."""

    def plain(a: Tensor, b: Tensor) -> bool:
        return a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous() and a.shape == b.shape

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        calls["aten::copy_"] = calls.get("aten::copy_", 0) + 1
        if (plain(self, source) and self.device != source.device) or not self.numel():
            return native.call_boxed(_CUDA, self, source, non_blocking)
        if self.device == source.device:
            to, of = where(self), where(source)

            launch(self.device, lambda: _write(to, of.alias()))
        elif source.is_cuda:
            there = source.to(self.dtype).expand(self.shape).contiguous()
            here = self if self.is_contiguous() else torch.empty(self.shape, dtype=self.dtype, device=self.device)
            native.call_boxed(_CUDA, here, there, non_blocking and here is self)
            if here is not self:
                self.copy_(here)
        else:
            there = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            native.call_boxed(_CUDA, there, source.contiguous(), non_blocking)
            self.copy_(there)
        return self

    return copy_


# ---- those that the CPU lacks, in terms of what it has


def _lstm_cell(
    inputs: Tensor, hidden: Tensor, cx: Tensor, ib: Tensor | None = None, hb: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = inputs + hidden + (0 if ib is None else ib) + (0 if hb is None else hb)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    gh: Tensor | None, gc: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, bias: bool
) -> tuple[Tensor | None, ...]:
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    gh = torch.zeros_like(cx) if gh is None else gh
    c = (torch.zeros_like(cx) if gc is None else gc) + gh * o * (1 - t * t)
    gates = torch.cat([c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), gh * t * o * (1 - o)], 1)
    return gates, c * f, gates.sum(0) if bias else None


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


#: Kernels that call other operators of the device, each of which is enqueued.
COMPOSED: dict[str, Callable[..., Any]] = {
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::native_dropout": _dropout,
    # which kernel of attention: the one of other operators
    "aten::_fused_sdp_choice": lambda *args, **kwargs: 0,
    "aten::mm.dtype": lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    "aten::bmm.dtype": lambda a, b, dtype: torch.bmm(a.to(dtype), b.to(dtype)),
}


def _decomposed(name: str) -> Callable[..., Any]:
    """Returns a kernel by torch's decomposition of an operator in Python, which is slow to import."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        from torch._decomp import decomposition_table

        return decomposition_table[_operator(name)](*args, **kwargs)

    return decompose


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"simcuda has no kernel for {name}: the CPU has none either (tools/simcuda/kernels.py)"
        )

    return refuse


#: What has neither a kernel on the CPU nor one that torch composes in C++, and a decomposition.
DECOMPOSED = {
    f"aten::{name}"
    for name in [
        "_fused_dropout",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "addmm.dtype",
        "baddbmm.dtype",
        "cudnn_batch_norm",
        "cudnn_batch_norm_backward",
    ]
}


def _operator(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


_kept: list[Any] = []
#: How many operators were replaced, and how.
counts: dict[str, int] = {}


def install() -> None:
    """Replaces every operator that is registered for CUDA. Once per process, before CUDA is used."""
    if not torch.backends.cuda.is_built():
        raise RuntimeError("simcuda wants a CUDA build of torch")
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"))
    on_cpu = set(torch._C._dispatch_get_registrations_for_dispatch_key("CPU"))
    explicit = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd"))
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are replaced
        for name in sorted({n for n in registered if n.startswith("aten::")} | {"aten::copy_", *WHOLE}):
            if name in NATIVE:
                continue
            how, kernel = _kernel(name, name in on_cpu, name in explicit)
            counts[how] = counts.get(how, 0) + 1
            library.impl(name.removeprefix("aten::"), kernel, "CUDA")
    torch.backends.cudnn.enabled = False
    _graphs_draw(torch.cuda.CUDAGraph)
    atexit.register(_runtime.simcuda_close)


def _kernel(name: str, on_cpu: bool, explicit: bool) -> tuple[str, Callable[..., Any]]:
    """Returns how an operator is replaced, and by what."""
    if name in ("aten::empty.memory_format", "aten::empty_strided"):
        return "filled", _fresh(torch.library.get_kernel(name, "CUDA"))
    if name == "aten::copy_":
        return "copied", _copy(torch.library.get_kernel(name, "CUDA"))
    if name in COMPOSED:
        return "composed", COMPOSED[name]
    if on_cpu or name in WHOLE:
        return "by the CPU's kernel", rule(_operator(name), name)
    if explicit:  # an accelerator without an own kernel has what torch composes
        slow = torch.library.get_kernel(name, "XLA")
        return "decomposed", lambda *args, **kwargs: slow.call_boxed(_CUDA, *args, **kwargs)
    if name in DECOMPOSED:
        return "decomposed", _decomposed(name)
    return "refused", _refusal(name)
