"""What is said to who sees it: an exception's text and notes, and the warnings that are logged."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator


def said(error: BaseException) -> str:
    """All of it, as at the end of a traceback."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


class Warned(logging.Handler):
    """Waits for a warning in which all of some patterns are."""

    def __init__(self, patterns: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.patterns, self.there, self.texts = patterns, threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if all(re.search(pattern, self.texts[-1]) for pattern in self.patterns):
            self.there.set()


@contextlib.contextmanager
def warned(*patterns: str) -> Iterator[Warned]:
    handler = Warned(list(patterns))
    log = logging.getLogger("disttensor")
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
