"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str], shown: str = "{!r}") -> str:
    """Returns the end of a message: the known name nearest to ``word``, whatever its capitals; "" where none is near.

    ``shown`` is the format in which the name is written.
    """
    from difflib import get_close_matches  # dtrun starts without it

    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(str(word).lower(), by_lower, n=1)
    return f"; did you mean {shown.format(by_lower[near[0]])}?" if near else ""
