"""Objects that a node keeps for any number of functions. The script runs ``keep`` there; ``get`` is for them.

Each has a tensor that stands for it, the *token*: when the script drops what it has of that, the object goes too.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import numpy as np
import torch

_numbers = count(1)
_kept: dict[int, Any] = {}  #: by number; nodes that are threads share it


def keep(value: Any) -> torch.Tensor:
    """Keeps an object; returns its token."""
    memory = np.array([next(_numbers)])
    _kept[int(memory[0])] = value
    weakref.finalize(memory, _kept.pop, int(memory[0])).atexit = False
    return torch.from_numpy(memory)


def get(token: torch.Tensor) -> Any:
    """Returns the object behind a token: the same for all who ask."""
    return _kept[int(token)]
