"""Tokens: a tensor on a node stands for an object there, which lives as long as the tensor does.

What a node keeps for the script from one function to the next (a dataset, a loop over it, an actor) has a token, whose
proxy the script holds. When the script drops the proxy the node frees the tensor, as ever, and the object's ``end`` is
called. So what a script forgets leaves nothing behind; and what was issued before with the token among its operands
still finds the object.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch


class Ends(Protocol):
    """An object that has something to do at its end."""

    def end(self) -> None:
        """Called when the token is gone, in whichever thread dropped it last. Must not wait."""


_numbers = count(1)
_kept: dict[int, tuple[Any, Ends | None]] = {}  #: by number; nodes that are threads share it


def token_of(value: Any, end: Ends | None = None) -> torch.Tensor:
    """Returns a tensor that keeps a value, which ``behind`` finds. ``end``: told when the tensor is gone."""
    memory = np.array([next(_numbers)])
    _kept[int(memory[0])] = value, end
    weakref.finalize(memory, _drop_token, int(memory[0])).atexit = False
    return torch.from_numpy(memory)


def behind(token: torch.Tensor) -> Any:
    """Returns the value that a token keeps."""
    return _kept[int(token)][0]


def _drop_token(number: int) -> None:
    _, end = _kept.pop(number)
    if end is not None:
        end.end()
