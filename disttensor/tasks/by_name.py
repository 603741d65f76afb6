"""Objects of torch that a function names, and that cloudpickle would take apart: they go to nodes by their names.

Torch puts objects of its own classes in the place of modules (``torch.ops``, ``torch.backends.cudnn``), and makes its
operators when they are asked for; a node has all of them under the same names.
"""

from __future__ import annotations

import copyreg
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

#: The class of classes that pybind11 makes, which nothing can take apart.
_BOUND = "pybind11_type"


def reduced(value: Any) -> tuple[Callable[[str], Any], tuple[str]] | None:
    """Returns a function and its argument that give the object by its name; None for what has no such name, and for
    what cloudpickle names by itself."""
    if isinstance(value, type) and (reduce := copyreg.dispatch_table.get(type(value))) is not None:
        return reduce(value)  # type: ignore[return-value]  # cloudpickle would look at the class first
    for name in _names(value):
        try:
            found = pkgutil.resolve_name(name)
        except Exception:  # a module may do anything when it is imported, or asked for a name
            continue
        if found is value:
            return pkgutil.resolve_name, (name,)
    return None


def _names(value: Any) -> Iterator[str]:
    """Yields the names under which an object may be found."""
    if isinstance(value, ModuleType):
        if type(value) is not ModuleType and type(value).__reduce__ is object.__reduce__:
            yield value.__name__
            if isinstance(value, torch._classes._ClassNamespace):
                yield f"torch:classes.{value.name}"
    elif isinstance(value, OpOverload):
        yield f"{_of_packet(value.overloadpacket)}.{value._overloadname}"
    elif isinstance(value, OpOverloadPacket):
        yield _of_packet(value)
    elif isinstance(value, HigherOrderOperator):
        yield f"torch:ops.higher_order.{value.name()}"
    elif isinstance(value, type) and type(value).__name__ == _BOUND:
        for module in (value.__module__, "torch._C"):  # torch moves them to modules, where they lose their "_"
            for name in (value.__qualname__, value.__name__):
                yield f"{module}:{name}"


def _of_packet(packet: OpOverloadPacket) -> str:
    return f"torch:ops.{packet._qualified_op_name.replace('::', '.')}"
