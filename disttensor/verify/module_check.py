"""``dt.verify.check(model, *args)``: what of a module will not run on a node, or waits for one, found without a node.

The module runs once on torch's meta device, as which the script knows tensors on nodes anyway: no memory, no values.
What would need a value is noted and given a made-up one, so that the run goes on to the module's end.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..dispatch.call_site import here
from ..dispatch.first_call import layout_of
from ..dispatch.meta_inference import asks_always, gives_value
from ..runtime.master.failures import line_of
from ..runtime.process.cells import position
from ..runtime.process.tables import columns
from ..runtime.protocol.allow_list import AllowList
from ..session import current

#: Elements, at most, of local stand-ins that are made where there is no meta kernel.
FEW = 1 << 22
#: Operators that take local operands beside remote ones: copies, and indices.
_MIXED = ("aten::copy_", "aten::_to_copy", "aten::index", "aten::_index_put_impl_", "aten::index_put")
_COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

#: What a finding means: the module does not run on a node; it runs, and the script waits there each time; or the first
#: time for operands of these shapes.
FAILS, WAITS, ASKS = "fails", "waits", "asks once"
_DO = {
    "value": "keep it a tensor (torch.where, masks), or look at it once in many steps",
    "shape": "use a mask or a fixed size, or run this part on the node: dt.run",
    "copy": "leave it on the node, or fetch it beside computation: dt.fetch",
    "local": "make it a buffer (register_buffer), or give device=x.device",
    "layout": "use x.to_dense() and strided tensors",
    "library": "init_master_worker(allow_ops=[{library!r}]), and import the library on the nodes",
    "meta": "nothing has to be done: shapes are asked for once",
    "memory": "spread it: dt.fully_shard, dt.training.Pipeline, or layers on several nodes",
    "small": "give smaller examples",
    "error": "run this part on the node (dt.run), or on x.cpu()",
}


@dataclass(frozen=True)
class Finding:
    """One thing that a module does which is no ordinary operation on a node."""

    kind: str  #: "fails", "waits" or "asks once"
    what: str  #: what it is
    module: str  #: the module in which it was, by its name in the model; empty for the model itself
    line: str  #: the user's line
    do: str  #: what to do
    times: int = 1  #: how often it came in one forward and backward pass


@dataclass
class CheckReport:
    """The findings of ``dt.verify.check``. Prints as a table."""

    findings: list[Finding] = field(default_factory=list)
    parameters: int = 0  #: bytes of the module's parameters and buffers
    operators: int = 0  #: operations that would be commands

    @property
    def ok(self) -> bool:
        """Returns whether the module runs on a node as far as was seen; it may wait there."""
        return not self.of(FAILS)

    def of(self, kind: str) -> list[Finding]:
        """Returns the findings of a kind: "fails", "waits" or "asks once"."""
        return [each for each in self.findings if each.kind == kind]

    def __str__(self) -> str:
        head = f"{self.operators} operations, {self.parameters:,} bytes of parameters and buffers: "
        if not self.findings:
            return head + "all of it runs on a node, and the script waits for nothing"
        rows = [("", "what", "where", "what to do")]
        for each in self.findings:
            times = f" ({each.times} times)" if each.times > 1 else ""
            rows.append((each.kind, each.what + times, " ".join(filter(None, (each.module, each.line))), each.do))
        head += "it runs on a node" if self.ok else "it does not run on a node as it is"
        return f"{head}\n{columns(rows)}"


def check(model: Callable[..., Any], *args: Any, memory: int | None = None, **kwargs: Any) -> CheckReport:
    """Runs a module, or a function of tensors, once without memory or values, and reports what will not run on a node.

        >>> class Clipped(torch.nn.Linear):
        ...     def forward(self, x):
        ...         y = super().forward(x)
        ...         return y / 2 if y.abs().max() > 1 else y
        >>> [finding.what for finding in dt.verify.check(Clipped(4, 4), torch.ones(2, 4)).findings]
        ["a tensor's value (aten::_local_scalar_dense)"]

    Args:
        model: the module, anywhere: here, on the meta device, or on a node. It is not changed, and no node is needed.
        *args, **kwargs: what it is called with. Of tensors only shapes and dtypes matter.
        memory: the bytes that a node has. Default: what node 0 has free now, if there is a session.

    Found are operators that nodes do not run, values and shapes that the script has to wait for (``.item()``, ``if``,
    ``nonzero``), copies to the script, local tensors that are no buffers, layouts that are not strided, what raises
    (``.numpy()``), in hooks and in the backward pass too, and more parameters than memory. Of an ``if`` on a tensor
    only one branch is seen.
    """
    made: dict[int, torch.Tensor] = {}
    if isinstance(model, torch.nn.Module) and any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        model = copy.deepcopy(model).to("meta")  # gets its shapes from a first call
        first = tree_map(lambda v: _meta(v, made), (args, kwargs))
        model(*first[0], **first[1])
    mode = _Mode(model)
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(model, torch.nn.Module):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in tensors.items():
            mode.layout(tensor, f"parameter or buffer {name}")
            mode.report.parameters += tensor.numel() * tensor.element_size()
    available = _free() if memory is None else memory
    if available is not None and mode.report.parameters > available:
        mode.find(FAILS, f"{mode.report.parameters:,} bytes of parameters; a node has {available:,}", "memory")
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            mode.layout(leaf, "an argument")
    if not mode.report.ok and any(each.do == _DO["layout"] for each in mode.report.findings):
        return mode.report
    args, kwargs = tree_map(lambda v: _meta(v, made), (args, kwargs))
    there = {name: _meta(tensor, made) for name, tensor in tensors.items()}
    try:
        with mode:
            out = torch.func.functional_call(model, there, args, kwargs) if there else model(*args, **kwargs)  # type: ignore[arg-type]
            outs = [v for v in tree_leaves(out) if isinstance(v, torch.Tensor) and v.requires_grad]
            mode.backward = not mode.report.ok  # then it meets the forward pass's local tensors again
            if outs:
                torch.autograd.backward(outs, [torch.zeros_like(v) for v in outs])
    except _Stop:
        pass
    except Exception as e:
        words = str(e).partition("\n")[0].replace("meta tensor", "tensor on a node")
        mode.find(FAILS, f"{type(e).__name__}: {words}", "error", line=_raised_at(e))
    return mode.report


def _free() -> int | None:
    """Returns the bytes that node 0 has free, or None without a session."""
    session = current.current()
    if session is None or not session.nodes:
        return None
    return int(torch.node.mem_get_info("node:0")[0])  # type: ignore[attr-defined]


def _meta(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """Returns a tensor on the meta device in place of a tensor, the same for the same one."""
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in made:
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        like = torch.nn.Parameter(like, value.requires_grad) if isinstance(value, torch.nn.Parameter) else like
        made[id(value)] = like.requires_grad_(value.requires_grad)
    return made[id(value)]


def _raised_at(error: BaseException) -> str:
    """Returns the user's innermost line in an error's traceback."""
    found, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not file.startswith((*torch.__path__, *sys.modules["disttensor"].__path__)):
            found = f"{position(file, at.tb_lineno)} in {at.tb_frame.f_code.co_qualname}"
        at = at.tb_next
    return found


def _remote(tensors: Iterable[Any]) -> list[torch.Tensor]:
    return [v for v in tensors if isinstance(v, torch.Tensor) and v.device.type == "meta"]


class _Stop(Exception):
    """Ends the run of a module: what has been found last says why."""


class _Mode(TorchDispatchMode):
    """Sees each operation: those with tensors of the meta device would be commands to a node."""

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.report = CheckReport()
        self.backward = False  #: whether local tensors are no news
        self._names = {id(m): name for name, m in model.named_modules()} if isinstance(model, torch.nn.Module) else {}
        session = current.current()
        self._allow = AllowList() if session is None else session.allow

    def find(self, kind: str, what: str, do: str, line: str | None = None, **words: str) -> None:
        """Notes a finding, or counts it once more."""
        where = line_of(site) if line is None and (site := here(2)) is not None else line or ""
        found = Finding(kind, what, self._module(), where, _DO[do].format(**words))
        for i, each in enumerate(self.report.findings):
            if replace(each, times=1) == found:
                self.report.findings[i] = replace(each, times=each.times + 1)
                return
        self.report.findings.append(found)

    def _module(self) -> str:
        """Returns the name of the innermost module that runs."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            if (name := self._names.get(id(frame.f_locals.get("self")))) is not None:
                return str(name)
            frame = frame.f_back
        return ""

    def layout(self, tensor: torch.Tensor, what: str) -> bool:
        """Returns whether a tensor can be on a node; if not, that is a finding."""
        layout = layout_of(tensor)
        if layout is not torch.strided:
            self.find(FAILS, f"{what} has the layout {layout}", "layout")
        return layout is torch.strided

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        if not _remote(operands):
            return func(*args, **kwargs)
        name = func.name()
        to = kwargs.get("device")
        if name == "aten::_to_copy" and to is not None and to.type == "cpu":
            self.find(WAITS, "a copy to the script", "copy")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "aten::copy_" and args[0].device.type == "cpu":
            self.find(WAITS, "a copy to the script", "copy")
            return args[0]
        self.report.operators += 1
        local = [v for v in operands if v.device.type != "meta" and v.dim()]
        if local and not name.startswith(_MIXED) and not self.backward:
            shapes = ", ".join(f"{tuple(v.shape)} {v.dtype}" for v in local)
            self.find(FAILS, f"a local tensor ({shapes}) beside one on the node, in {name}", "local")
        if local:
            args, kwargs = tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, (args, kwargs))
        if not self._allow.allows(name) and not _is_composite(name):
            library = f"{name.partition('::')[0]}::*"
            self.find(FAILS, f"operator {name}, which nodes do not run", "library", library=library)
        if gives_value(func):
            self.find(WAITS, f"a tensor's value ({name})", "value")
            return _value(func, args)
        if asks_always(func):
            self.find(WAITS, f"a shape that depends on the data ({name})", "shape")
            return self._by_stand_ins(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except NotImplementedError:
            if torch.Tag.dynamic_output_shape in func.tags:  # an index that is a mask
                self.find(WAITS, f"a shape that depends on the data ({name})", "shape")
                return self._by_stand_ins(func, args, kwargs)
            out = self._by_stand_ins(func, args, kwargs)
            self.find(ASKS, f"no meta kernel for {name}", "meta")
            return out
        self._strided(out, name)
        return out

    def _strided(self, out: Any, name: str) -> None:
        """Ends the run where an operator gives what cannot be on a node."""
        if not all([self.layout(v, f"the result of {name}") for v in tree_leaves(out) if isinstance(v, torch.Tensor)]):
            raise _Stop

    def _by_stand_ins(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Returns what an operator gives for small local tensors, as tensors on the meta device."""
        size = sum(math.prod(v.shape) for v in _remote(tree_leaves((args, kwargs))))
        if size > FEW:
            self.find(FAILS, f"nothing is known of what follows {func.name()} of {size:,} elements", "small")
            raise _Stop

        def stand(v: Any) -> Any:
            if isinstance(v, torch.device):
                return torch.device("cpu")
            if not isinstance(v, torch.Tensor):
                return v
            return torch.ones(v.shape, dtype=v.dtype)

        args, kwargs = tree_map(stand, (args, kwargs))
        out = func(*args, **kwargs)
        self._strided(out, func.name())
        return tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, out)


def _is_composite(name: str) -> bool:
    """Returns whether an operator is made of torch's, and so runs part by part."""
    with suppress(RuntimeError):
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _COMPOSITE)
    return False


def _value(func: OpOverload, args: Any) -> Any:
    """Returns a made-up value of the type that an operator gives."""
    if func.name() == "aten::_local_scalar_dense":
        dtype = args[0].dtype
        if dtype is torch.bool:
            return True
        return 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1
    kinds = {"bool": True, "int": 1, "float": 1.0, "number": 1.0, "complex": 1j, "str": ""}
    values = [kinds.get(str(r.type)) for r in func._schema.returns]
    return values[0] if len(values) == 1 else tuple(values) or None
