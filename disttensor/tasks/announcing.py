"""The classes that a call announces: objects of these may come back from its node, and of no others of the user's.

They are those of its arguments, at any depth, of its function's return annotation, and of ``returns=`` and ``raises=``;
and those that the annotations of their fields name. A node that names another class gets nothing made of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..runtime.process.spelling import shown
from ..runtime.protocol.errors import ProtocolError, RemoteError
from ..runtime.protocol.values import Announced, Unannounced, decode, is_announcable, name_of

#: The empty tuple, of which Python has one: it names no classes.
_NOTHING: tuple[()] = ()
#: Annotations in quotes, as a module's all are that imports ``annotations``, which name nothing of the user's.
_PLAIN = frozenset({"None", "bool", "int", "float", "str", "bytes", "list", "dict", "tuple", "set", "object"})


class Announcing(NamedTuple):
    """A call, as far as it says whose objects may come back from it."""

    fn: Any  #: the user's function, whose return annotation counts
    returns: Any = ()
    raises: Any = ()
    where: str = "the call"  #: the line that has ``returns=`` and ``raises=``, in words


def announced_by(call: Announcing, of_arguments: Iterable[type] = ()) -> Announced:
    """Returns what a call announces. Raises TypeError for ``returns`` and ``raises`` that name no class that can be."""
    announced, returned = Announced(), _return_of(call.fn)
    if not of_arguments and call.returns is call.raises is returned is _NOTHING:  # most calls
        return announced
    for what, form in (("returns", call.returns), ("raises", call.raises)):
        if type(form) is tuple and not form:
            continue
        named = list(_classes_in(form))
        if form not in ((), None) and not named:
            raise TypeError(
                f"{what}={shown(form)} names no dataclass, namedtuple, enum or exception of yours; plain data and "
                "Python's own exceptions need not be announced, and other classes can't come back"
            )
        for cls in named:
            if what == "raises" and not issubclass(cls, BaseException):
                raise TypeError(
                    f"raises={shown(form)}: {cls.__name__} is not an exception; returns= is for what is returned"
                )
            announced.add(cls)  # or says why its objects can't come
    todo = [*announced, *of_arguments, *_classes_in(returned)]
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


def raised(error: Exception, announced: Announced, where: str) -> Exception:
    """Returns the exception of an announced class for which a RemoteError stands, with its notes; else the error.
    ``where``: as in Announcing."""
    told = error.told if isinstance(error, RemoteError) else b""
    if not told:
        return error
    try:
        made = decode(told, [], announced)
    except Unannounced:
        note = f"  raises=[...] in {where}, with this class, has it raised as what it is"
        if note not in getattr(error, "__notes__", ()):  # one that several Works raise
            error.add_note(note)
        return error
    except ProtocolError as e:
        error.add_note(f"  it can't be raised as what it is: {e}")
        return error
    if not isinstance(made, Exception):
        kind = str(error).partition(":")[0]
        if isinstance(made, str) and any(name_of(cls) == kind for cls in announced):
            error.add_note(f"  it can't be raised as what it is: {made:.1000}")
        return error
    for note in getattr(error, "__notes__", ()):
        BaseException.add_note(made, note)
    return made


def _return_of(fn: Any) -> Any:
    """Returns what a function says that it returns; a class returns its objects."""
    while isinstance(fn, partial):
        fn = fn.func
    if type(fn) is FunctionType and not fn.__dict__:  # most functions, without a look at all of their annotations
        form = fn.__annotations__.get("return")
        if form is None or type(form) is type:
            return () if form is None else form
        if type(form) is str and form in _PLAIN and form not in fn.__globals__:
            return ()
    if type(fn) is BuiltinFunctionType:
        return ()
    if isinstance(fn, type):
        return fn
    if isinstance(fn, torch.nn.Module):
        fn = fn.forward
    hints = _hints(fn)
    if "return" not in hints and isinstance(called := type(fn).__call__, FunctionType):  # an object with a __call__
        hints = _hints(called)
    return hints.get("return", ())


def _hints(value: Any) -> dict[str, Any]:
    """Returns the annotations of a function or class, those in quotes too where their names can be found."""
    try:
        return typing.get_type_hints(value) if isinstance(value, type) or value.__annotations__ else {}
    except Exception:
        return _hints_one_by_one(value)


def _hints_one_by_one(value: Any) -> dict[str, Any]:
    """Returns the annotations but for those with a name that is there for type checkers only, or local."""
    found: dict[str, Any] = {}
    value = inspect.unwrap(getattr(value, "__func__", value))
    if not isinstance(value, (type, FunctionType)):
        return found
    for owner in reversed(value.__mro__) if isinstance(value, type) else [value]:
        names = getattr(owner, "__globals__", None) or vars(sys.modules.get(owner.__module__, typing))
        for name, form in (getattr(owner, "__annotations__", None) or {}).items():
            with suppress(Exception):
                found |= typing.get_type_hints(SimpleNamespace(__annotations__={name: form}), names)
    return found


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
