"""Checks of public functions' arguments: their errors name the wrong one, its value, and what is meant instead."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

from ..runtime.process.spelling import did_you_mean, shown

_F = TypeVar("_F", bound=Callable[..., Any])


def spelled(function: _F) -> _F:
    """Returns the function with a check: an unknown keyword raises TypeError that names the nearest known one."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    + (did_you_mean(name, known, "{}=") or f"; it has {', '.join(known)}")
                )
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def elsewhere(**meant: str) -> Callable[[_F], _F]:
    """Returns a decorator with a check: a keyword that the function does not have, and that users expect of it, raises
    TypeError that says what is meant."""

    def checking(function: _F) -> _F:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            for name in kwargs:
                if name in meant:
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}; did you mean "
                        f"{meant[name]}?"
                    )
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return checking


def needing(example: str, *names: str) -> Callable[[_F], _F]:
    """Returns a decorator of a function or an ``__init__`` with a check: a call without one of the arguments ``names``
    raises TypeError that shows ``example``, a call that is right."""

    def checking(function: _F) -> _F:
        order = list(inspect.signature(function).parameters)
        called = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            for name in names:
                if name not in kwargs and name not in order[: len(args)]:
                    raise TypeError(f"{called}() needs {name}, as in {example}")
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return checking


def by_name_only(example: str) -> Callable[[_F], _F]:
    """Returns a decorator with a check: a call with positional arguments raises TypeError that shows ``example``."""

    def checking(function: _F) -> _F:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if args:
                raise TypeError(
                    f"{function.__name__}({', '.join(map(shown, args))}): each size has the name of its dim, as in "
                    f"{example}"
                )
            return function(**kwargs)

        return call  # type: ignore[return-value]

    return checking


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Raises ValueError for a value that is none of the known ones."""
    if value not in known:
        raise ValueError(
            f"{name} {shown(value)} is unknown (known: {', '.join(map(repr, known))}){did_you_mean(value, known)}"
        )


def whole_number(name: str, value: Any, least: int | None = 0) -> int:
    """Returns ``value`` as an int. Raises TypeError for what is no whole number, ValueError for one below ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} is a whole number, not {shown(value)}")
    if least is not None and number < least:
        raise ValueError(f"{name}={number}: at least {least} is needed")
    return number


def flag(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is True or False (0 and 1 will do)."""
    if value not in (True, False):
        raise TypeError(f"{name} is True or False, not {shown(value)}")


def seconds(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a number of seconds, ValueError unless it is above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds, not {shown(value)}")
    if not value > 0:
        raise ValueError(f"{name}={value}: more than 0 seconds are needed")


def seconds_of(timeout: float | timedelta | None) -> float | None:
    """Returns a timeout, as torch.distributed takes it, in seconds."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def span(name: str, value: Any) -> int | tuple[int, int]:
    """Returns a number of nodes, or a pair of the least and the most, after a check. Raises TypeError, ValueError."""
    if not isinstance(value, tuple):
        try:
            return whole_number(name, value, 1)
        except TypeError:
            raise TypeError(
                f"{name} is a whole number, or a pair of the least and the most, not {shown(value)}"
            ) from None
    if len(value) != 2:
        raise ValueError(f"{name}={shown(value)}: a pair of the least and the most is needed")
    least, most = (whole_number(name, number, 1) for number in value)
    if least > most:
        raise ValueError(f"{name}={shown(value)}: the least comes first; did you mean {(most, least)}?")
    return least, most


def text(name: str, value: Any, example: str) -> None:
    """Raises TypeError for what is no text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a text such as {example!r}, not {shown(value)}")


def texts(name: str, value: Any, example: str) -> None:
    """Raises TypeError for what is no list of texts. A single text is none either: its letters would be taken for
    texts."""
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{name} is a list of texts such as [{example!r}], not {shown(value)}")


def mapping(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a mapping whose keys are texts."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a dict, not {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} has a key that is no text: {key!r}")
