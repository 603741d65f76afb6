"""The classes that a call announces: objects of these may come back from its node, and of no others of the user's.

They are those of its arguments, at any depth, of its function's return annotation, and of ``returns=`` and ``raises=``;
and those that the annotations of their fields name. A node that names another class gets nothing made of it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from ..runtime.protocol.errors import ProtocolError, RemoteError
from ..runtime.protocol.values import Announced, Unannounced, decode, is_announcable


def announced_by(fn: Callable[..., Any], of_arguments: Iterable[type], returns: Any, raises: Any) -> Announced:
    """Returns what a call announces. Raises TypeError for ``returns`` and ``raises`` that name no class that can be."""
    announced = Announced()
    for what, form in (("returns", returns), ("raises", raises)):
        named = list(_classes_in(form))
        if form not in ((), None) and not named:
            raise TypeError(
                f"{what}={form!r:.100} names no dataclass, namedtuple, enum or exception of yours; plain data need not "
                "be announced, and other classes can't come back"
            )
        for cls in named:
            if what == "raises" and not issubclass(cls, BaseException):
                raise TypeError(
                    f"raises={form!r:.100}: {cls.__name__} is no exception; returns= is for what is returned"
                )
            announced.add(cls)  # or says why its objects can't come
    todo = [*announced, *of_arguments, *_classes_in(_return_of(fn))]
    seen = set[type]()
    while todo:
        cls = todo.pop()
        if cls in seen:
            continue
        seen.add(cls)
        try:
            announced.add(cls)
        except TypeError:
            continue  # nobody has asked for its objects to come back
        if dataclasses.is_dataclass(cls) or issubclass(cls, tuple):
            todo += _classes_in(list(_hints(cls).values()))
    return announced


def arguments_within(fn: Any) -> bool:
    """Returns whether a function has arguments of the call in itself."""
    return isinstance(fn, (partial, MethodType))


def raised(error: Exception, announced: Announced) -> Exception:
    """Returns the exception of an announced class for which a RemoteError stands, with its notes; else the error."""
    told = error.told if isinstance(error, RemoteError) else b""
    if not told:
        return error
    try:
        made = decode(told, [], announced)
    except Unannounced:
        error.add_note("  raises=[...] in the call, with this class, has it raised as what it is")
        return error
    except ProtocolError as e:
        error.add_note(f"  it can't be raised as what it is: {e}")
        return error
    if not isinstance(made, Exception):
        return error
    for note in getattr(error, "__notes__", ()):
        BaseException.add_note(made, note)
    return made


def _return_of(fn: Any) -> Any:
    """Returns what a function says that it returns; a class returns its objects."""
    while isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, type):
        return fn
    return _hints(fn).get("return", ())


def _hints(value: Any) -> dict[str, Any]:
    """Returns the annotations of a function or class, those in quotes too where their names can be found."""
    try:
        plain = dict(getattr(value, "__annotations__", None) or {})
        if not plain:
            return {}
        return typing.get_type_hints(value)
    except Exception:  # a name that is there for type checkers only, or local
        return plain


def _classes_in(form: Any) -> Iterator[type]:
    """Yields the classes that a type names: of ``list[Stats] | None`` Stats."""
    if isinstance(form, (list, tuple)):
        for part in form:
            yield from _classes_in(part)
    elif typing.get_origin(form) is not None:
        yield from _classes_in(typing.get_origin(form))
        yield from _classes_in(typing.get_args(form))
    elif isinstance(form, type) and is_announcable(form):
        yield form
