"""The setters of torch's switches, in the script: what they set is set on the nodes, at the same place among commands.

Torch has no hook for that, so the setters are replaced (torch_patches). Nothing is read per operation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from ..dispatch import handlers
from ..runtime.process import torch_switches
from ..session import current


def following(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a setter that tells the nodes."""

    @wraps(original)
    def set_and_tell(*args: Any, **kwargs: Any) -> Any:
        """Sets a switch of torch's; the nodes follow at once."""
        with _change(original, args):
            return original(*args, **kwargs)

    return set_and_tell


def of_attributes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the setter of attributes such as ``torch.backends.cudnn.deterministic``, which tells the nodes."""

    @wraps(original)
    def set_and_tell(prop: Any, owner: Any, value: Any) -> Any:
        """Sets a switch of torch's; the nodes follow at once."""
        with _change(prop.setter, (value,)):
            return original(prop, owner, value)

    return set_and_tell


@contextlib.contextmanager
def _change(setter: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
    session = None if threading.current_thread().name.startswith("node ") else current.current()
    if session is not None:
        session.settle_threads()  # what was issued before is computed under the old value
    yield
    follow_fill()
    if session is not None:
        name = getattr(setter, "__name__", "").removeprefix("_set_")
        session.switches.follow(dict(zip((name,), args, strict=False)) if name in torch_switches.OLDER else None)


def follow_fill() -> None:
    """Has empty tensors made where the script makes them, and not at their first use, while torch fills them: a node
    fills those that it makes while its switches say so."""
    filled = torch.are_deterministic_algorithms_enabled() and torch._C._get_deterministic_fill_uninitialized_memory()
    handlers.make_empties_at_once(filled)
