"""``torch.compile`` of programs that compute on nodes.

Dynamo takes proxies for ordinary tensors of the device "node", and the backends ``eager`` and ``aot_eager`` run the
graphs that it finds operator by operator. Inductor, the default, would make machine code for the master: a graph that
involves nodes is recorded instead, and played by one command (compiled_graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from .. import torch_patches
from ..proxy.proxy import DistributedTensor
from ..runtime.node.graphs.engines.registry import check_engine
from ..session import current
from . import at_import, foreach_optimizers

#: The module that each use of dynamo imports before it traces, and that nothing else imports. ``torch._dynamo`` itself
#: is no sign: torch imports that for the first meta kernel of a pointwise operator, and for the first step of an
#: optimizer.
_FIRST = "torch._dynamo.repro.after_dynamo"


def install() -> None:
    """Has dynamo learn about proxies when a program first compiles something; at once if it has done so already."""
    at_import.after(_FIRST, _prepare_dynamo)


def _prepare_dynamo() -> None:
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import builder

    torch_patches.install(torch_patches.COMPILING)
    foreach_optimizers.inline_when_compiling()
    trace_rules.add("disttensor")  # dynamo is not to trace the code below an operation
    # without this a subclass with a custom __torch_dispatch__ is an opaque object to dynamo: each use breaks the graph
    builder.VariableBuilder._type_dispatch()[DistributedTensor] = builder.VariableBuilder.wrap_tensor


def handled_types(original: tuple[type, ...]) -> tuple[type, ...]:
    return (*original, DistributedTensor)


def avoid_device_init(original: property) -> property:
    """Has a literal of our device traced as a local one and its copy there, as torch does for CUDA where there is no
    GPU."""
    return property(lambda mode: current.current() is not None or original.fget(mode))  # type: ignore[misc]


def infer_subclass_type(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def plain(value: Any) -> Any:
        """Returns None for a proxy, which dynamo is to trace without regard to its class."""
        return None if isinstance(value, DistributedTensor) else original(value)

    return plain


def taking_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def apply_options(self: Any, options: Any) -> None:
        """Takes the option that is for nodes, ``{"engine": "inductor"}``, and leaves inductor the others."""
        if options and "engine" in options:
            options = dict(options)
            self.engine_of_nodes = check_engine(options.pop("engine"))
        original(self, options)

    return apply_options


def comparing(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @wraps(original)
    def __eq__(self: Any, other: Any) -> Any:
        """Returns whether what one has compiled serves the other."""
        return original(self, other) and _engine(self) == _engine(other)

    return __eq__


def _engine(compiler: Any) -> str:
    return getattr(compiler, "engine_of_nodes", "interpreter")


def running(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def __call__(self: Any, model: Any, inputs: Any, **options: Any) -> Any:
        """Has inductor compile a graph; one that involves nodes is compiled for these."""
        values = [*inputs, *(node.meta.get("example_value") for node in model.graph.nodes)]
        if not any(isinstance(v, torch.Tensor) and v.device.type == "node" for v in values):
            return original(self, model, inputs, **options)
        from .compiled_graphs import compile_for_nodes  # imports much, which only this needs

        return compile_for_nodes(model, inputs, _engine(self))

    return __call__
