"""What an exception says to who sees it: its text and its notes."""

from __future__ import annotations


def said(error: BaseException) -> str:
    """All of it, as at the end of a traceback."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
