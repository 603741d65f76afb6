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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor

from ..proxy.proxy import DistributedTensor
from ..session import current


def install() -> None:
    """Tells torch's tracers what proxies are. They are loaded by now: meta kernels need them (`infer.warm`)."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import builder

    wrapper = torch._TorchCompileInductorWrapper
    setattr(wrapper, "__call__", _running(wrapper.__call__))  # noqa: B010 - mypy refuses the assignment
    trace_rules.add("disttensor")  # what runs below an operation is nothing to trace
    # a subclass with a dispatch of its own is an opaque object to dynamo otherwise, and each use breaks the graph,
    builder.VariableBuilder._type_dispatch()[DistributedTensor] = builder.VariableBuilder.wrap_tensor
    setattr(builder, "infer_subclass_type", _plain(builder.infer_subclass_type))  # noqa: B010
    # and make_fx (torch.func.linearize) would record what dispatch does instead of the operation
    proxy_tensor.HANDLED_TYPES += (DistributedTensor,)  # type: ignore[assignment]
    # a literal of our device is traced as a local one and its copy there: made at once, it would be no fake tensor, and
    # a compiled function would keep it beyond its session. As torch does for CUDA where there is no GPU
    original = FakeTensorMode.avoid_device_init
    setattr(  # noqa: B010 - mypy refuses the assignment
        FakeTensorMode,
        "avoid_device_init",
        property(lambda mode: current.current() is not None or original.fget(mode)),  # type: ignore[attr-defined]
    )


def _plain(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def infer_subclass_type(value: Any) -> Any:
        """None for what dynamo is to trace without regard of its class."""
        return None if isinstance(value, DistributedTensor) else original(value)

    return infer_subclass_type


def _running(original: Callable[..., Any]) -> Callable[..., Any]:
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
