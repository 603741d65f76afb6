"""``torch.compile`` of what computes on nodes.

Dynamo takes proxies for ordinary tensors of the device "node", and the backends ``eager`` and
``aot_eager`` run what it found operator by operator. Inductor, the default, would make machine code for the master:
what meets nodes is run as ``eager`` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..proxy.proxy import DistributedTensor
from ..session import current


def install() -> None:
    """Tells torch's tracers what proxies are. They are loaded by now: meta kernels need them (`infer.warm`)."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import builder

    trace_rules.add("disttensor")  # what runs below an operation is nothing to trace
    # a subclass with a dispatch of its own is an opaque object to dynamo otherwise, and each use breaks the graph,
    builder.VariableBuilder._type_dispatch()[DistributedTensor] = builder.VariableBuilder.wrap_tensor


def handled_types(original: tuple[type, ...]) -> tuple[type, ...]:
    return (*original, DistributedTensor)


def avoid_device_init(original: property) -> property:
    """A literal of our device is traced as a local one and its copy there, as torch does for CUDA where there is no
    GPU."""
    return property(lambda mode: current.current() is not None or original.fget(mode))  # type: ignore[misc]


def infer_subclass_type(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def plain(value: Any) -> Any:
        """None for what dynamo is to trace without regard of its class."""
        return None if isinstance(value, DistributedTensor) else original(value)

    return plain


def running(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def __call__(self: Any, model: Any, inputs: Any) -> Any:
        """What torch calls to have inductor compile a graph."""
        values = [*inputs, *(node.meta.get("example_value") for node in model.graph.nodes)]
        if not any(isinstance(v, torch.Tensor) and v.device.type == "node" for v in values):
            return original(self, model, inputs)
        warnings.warn(
            "torch.compile: inductor makes machine code for this process and can't for a node; tensors on nodes are "
            "computed operator by operator, with eager's numbers and speed. backend='eager' does so without this "
            "warning; disttensor.graphed(engine='inductor') compiles on the nodes",
            stacklevel=2,
        )
        return model.forward

    return __call__
