"""Explains what a function lacks on a node: a value that can't be pickled, a module that the node does not find."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, TypeVar

from ..runtime.protocol.bundle import Bundle, as_name

#: The advice about a value that can't be pickled.
REMEDY = "make it inside of the function, or pass what it is made of"

#: The depth down to which a value's parts are searched.
_DEPTH = 8

_E = TypeVar("_E", bound=Exception)


def culprit(value: Any, what: str, fails: Callable[[Any], bool], depth: int = 0) -> str | None:
    """Returns, in words, the innermost part of a value that ``fails``; None if none of its parts fails by itself."""
    for name, part in _parts(value, what):
        if depth < _DEPTH and fails(part):
            return (
                culprit(part, name, fails, depth + 1)
                or f"{name} is a {type(part).__module__}.{type(part).__qualname__}"
            )
    return None


def _parts(value: Any, what: str) -> Iterator[tuple[str, Any]]:
    """Yields the parts that are pickled with a value: (in words, the part)."""
    if isinstance(value, FunctionType):
        name = f"{value.__qualname__.rpartition('<locals>.')[2]}()"
        try:
            found = inspect.getclosurevars(value)
        except (TypeError, ValueError):
            return
        yield from ((f"the variable {key!r} of {name}", part) for key, part in found.nonlocals.items())
        yield from ((f"the global variable {key!r} of {name}", part) for key, part in found.globals.items())
        named = inspect.signature(value, follow_wrapped=False).parameters.items()
        yield from ((f"the default of {key!r} of {name}", p.default) for key, p in named if p.default is not p.empty)
    elif isinstance(value, MethodType):
        yield f"the object whose method {value.__name__}() is", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("the function", value.func), *_parts((value.args, value.keywords), f"the arguments of {what}"))
    elif isinstance(value, dict):
        yield from ((f"{what}[{key!r:.40}]", part) for key, part in value.items())
    elif isinstance(value, tuple) and what.startswith("the arguments of ") and [*map(type, value)] == [tuple, dict]:
        yield from ((f"argument {i + 1} of {what[17:]}", part) for i, part in enumerate(value[0]))
        yield from ((f"the argument {key!r} of {what[17:]}", part) for key, part in value[1].items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{what}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(vars_of := getattr(value, "__dict__", None), dict):
        yield from ((f"the attribute {key!r} of {what}", part) for key, part in vars_of.items())


def advised(error: _E, plain: Bundle | None) -> _E:
    """Returns the error of a function that did not find a module, with a note on what to do if the script has it."""
    match = re.match(r"No module named '(\w+)", str(error)) if isinstance(error, ModuleNotFoundError) else None
    if match is None or plain is None:
        return error
    try:
        found = importlib.util.find_spec(match[1])
    except (ImportError, ValueError):
        found = None
    if found is None or not found.origin:
        error.add_note(f"  {match[1]} is not here either: pip install it on all hosts")
        return error
    folder = os.path.dirname(found.origin if not found.submodule_search_locations else os.path.dirname(found.origin))
    if folder in map(as_name, plain.sys_path):
        error.add_note(f"  here it is {found.origin}: install it on the node's host, too")
    else:
        error.add_note(
            f"  here it is {found.origin}, and nodes know sys.path as it was when the session began: "
            f"add {folder!r} before init_master_worker(), or in the function"
        )
    return error
