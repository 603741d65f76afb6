"""The error of an operation between a tensor that was left in the script and one on a node."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from ..proxy.proxy import operand_name
from ..session.places import Place


def left_here(operation: str, tensor: torch.Tensor, place: Place) -> RuntimeError:
    """Returns the error of an operation whose operand ``tensor`` is local, where others are at ``place``. A layer's
    parameter is named, as it is the module that is to be moved."""
    found = _owner(tensor)
    remedy = (
        f"send it with .to({place.written}) or .dist_send()"
        if found is None
        else f"it is {found[0]!r} of the layer {type(found[1]).__name__}, which is here: move the model with "
        f".to({place.written})"
    )
    return RuntimeError(
        f"{operation}: expected all tensors to be on the same device, but found {operand_name(tensor)} and "
        f"a tensor on {place}; {remedy}"
    )


def _owner(tensor: torch.Tensor) -> tuple[str, torch.nn.Module] | None:
    """Returns the module that computes now with a parameter or buffer of this memory, and the name of that; else
    None."""
    memory = _memory(tensor)
    for module in _computing():
        for named in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            for name, own in named:
                if own is tensor or (memory and _memory(own) == memory):
                    return name, module
    return None


def _computing() -> Iterator[torch.nn.Module]:
    """Yields the modules whose methods run now in this thread, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
            running = frame.f_locals.get("self")
            if isinstance(running, torch.nn.Module):
                yield running
        frame = frame.f_back  # type: ignore[assignment]


def _memory(tensor: torch.Tensor) -> int:
    """Returns the address of a local tensor's memory; 0 where it has none of its own."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
