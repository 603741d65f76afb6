"""Operators that write arguments though their schemas do not say so: what a node knows of them is all that there are.

By PyTorch's own databases of operators and modules, on the CPU; those of CUDA's libraries have not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from disttensor.runtime.node.template import HIDDEN_WRITES

#: Arguments that are one's own: memory that another operator has given for this one alone.
SCRATCH = {("aten::mkldnn_rnn_layer_backward", "workspace")}


class Watch(TorchDispatchMode):
    """Notes which arguments an operator has changed that its schema does not call written."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(func._schema.arguments)]
        written = {
            t.untyped_storage()._cdata
            for a, value in named
            if a.alias_info is not None and a.alias_info.is_write
            for t in strided(value)
        }
        before = [
            (a.name, t, t.detach().clone())
            for a, value in named
            for t in strided(value)
            if t.untyped_storage()._cdata not in written
        ]
        out = func(*args, **kwargs)
        for name, tensor, copy in before:
            if not torch.equal(bits(tensor), bits(copy)):
                self.found.add((func._schema.name, name))
        return out


def strided(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.layout == torch.strided)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def calls() -> Iterator[Any]:
    """Functions that call operators and modules, forward and backward."""
    # torch's databases take seconds to import, also for the tests beside this one
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    for op in op_db:
        if op.supports_dtype(torch.float32, "cpu"):
            for s in op.sample_inputs("cpu", torch.float32):
                yield partial(op, s.input, *s.args, **s.kwargs)
    for info in module_db:
        for training in (True, False):
            for given in info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            ):
                module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
                yield partial(trained, module.train(training), given.forward_input)


def trained(module: torch.nn.Module, given: Any) -> None:
    for t in strided(module(*given.args, **given.kwargs)):
        if t.requires_grad:
            t.sum().backward(retain_graph=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_writes_in_secret_is_known() -> None:
    watch, ran = Watch(), 0
    for call in calls():
        with suppress(Exception), watch:  # samples that this CPU has no kernel for
            call()
            ran += 1
    known = {(op, name) for op, names in HIDDEN_WRITES.items() for name in names}
    assert ("aten::native_batch_norm", "running_mean") in watch.found
    assert watch.found - known - SCRATCH == set()
    assert ran > 5_000
