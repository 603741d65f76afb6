"""Words and values of users' in messages: suggestions for misspelt names, and values at a bounded length."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable
from typing import Any


def did_you_mean(word: object, known: Iterable[str], shown: str = "{!r}") -> str:
    """Returns the end of a message: the known name nearest to ``word``, whatever its capitals; "" where none is near.

    ``shown`` is the format in which the name is written.
    """
    from difflib import get_close_matches  # dtrun starts without it

    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(str(word).lower(), by_lower, n=1)
    return f"; did you mean {shown.format(by_lower[near[0]])}?" if near else ""


class _Shown(reprlib.Repr):
    """Python's own bounded repr, with room for what people write, in which a tensor is what it is and not its values.

    Those would be lines of numbers, and the values of one on a node would have to be waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 16

    def repr1(self, x: Any, level: int) -> str:
        torch = sys.modules.get("torch")  # dtrun and agents start without it
        if torch is not None and isinstance(x, torch.Tensor):
            place = getattr(x, "_place", None)  # of a mesh, whose index as a device of torch's says nothing
            return f"a tensor {tuple(x.shape)} {x.dtype} on {x.device if place is None else place}"
        return super().repr1(x, level)


_repr = _Shown().repr


def shown(value: object) -> str:
    """Returns the repr of a value that may be anything, cut where it gets long, for a message. Does not wait."""
    text = _repr(value)
    return text if len(text) <= 400 else f"{text[:300]}...{text[-80:]}"
