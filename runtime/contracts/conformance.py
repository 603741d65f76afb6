"""The common parts of the suites that test a user's own channel or launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ConformanceError(AssertionError):
    """A class does not do what its base class promises."""


def need(condition: object, what: str) -> None:
    """Raises ConformanceError, which says what is wrong, unless the condition holds."""
    if not condition:
        raise ConformanceError(what)


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    """Expects the block to raise such an exception, with all these words in its message. Raises ConformanceError."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        need(not missing, f"the {kind.__name__} should name {missing}: {error}")
    else:
        raise ConformanceError(f"{kind.__name__} was not raised")
