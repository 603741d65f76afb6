"""Pickles of functions that were sent, kept while all that they were made from is the same.

    find(fn, ...)   the pickle of a function that can't have changed since; else None, and it is pickled anew
    keep(fn, ...)   keeps a pickle that was made, with the parts that the function had before

A function that goes by name is its module and its name. One that goes by value, as those of a script, is what
cloudpickle takes it apart into: its code, defaults, cells, attributes, annotations, and the globals that its code
names; functions among these likewise. Each of these is known by its identity, so it must be something that can't
change: a number, a text, a tuple of such, a module, a class that is imported by its name. A function that refers to
anything else, such as a list or an object, is pickled for each call.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter, is_
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    GenericAlias,
    ModuleType,
    NoneType,
    UnionType,
)
from typing import Any

#: The most functions whose pickles are kept, and the most bytes of one.
KEPT, LARGEST = 256, 1 << 20
#: How often in a row a function is looked at that was found changed.
TRIES = 8

#: Objects of these classes are what they are.
_FIXED = frozenset({NoneType, bool, int, float, complex, str, bytes, EllipsisType})
#: The functions that may be kept.
_KINDS = (FunctionType, BuiltinFunctionType, partial)
#: What cloudpickle takes from a function's globals besides those that its code names.
_OF_MODULE = ("__package__", "__name__", "__path__", "__file__")

#: Returns what a pickler takes an object apart into; NotImplemented for one that it names.
Reduce = Callable[[Any], Any]


class KeptPickle:
    """The pickle of a function, its key, and the classes that the arguments within it announce."""

    __slots__ = ("classes", "data", "fn", "key", "parts", "used")

    def __init__(self, fn: Any, data: bytes, key: bytes, classes: Iterable[type], parts: FunctionParts) -> None:
        self.fn, self.data, self.key, self.classes, self.parts = fn, data, key, frozenset(classes), parts
        self.used = False  #: whether it was found since it was made


class KeptPickles:
    """The kept pickles of one session."""

    def __init__(self) -> None:
        self._kept: dict[int, KeptPickle] = {}  #: by id of the function, which is kept with it
        self._met: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  #: how often it was pickled
        self._lock = threading.RLock()  #: held while one of these changes

    def forked(self) -> None:
        """Makes a new lock in a forked child: the thread that held the other one may not be there."""
        self._lock = threading.RLock()

    def find(self, fn: Any, by_value: set[str]) -> KeptPickle | None:
        """Returns the pickle of a function, unless something that it was made from may have changed. ``by_value``: the
        modules whose functions cloudpickle takes apart, as users may have it do."""
        kept = self._kept.get(id(fn))
        if kept is None or kept.parts.by_value != by_value or not kept.parts.are_same():
            return None
        kept.used = True
        return kept

    def parts_to_keep(self, fn: Any, reduce: Reduce, by_value: set[str]) -> FunctionParts | None:
        """Returns the parts of a function that is about to be pickled, if its pickle is to be kept: it has come before,
        and of all parts can be known whether they are the same."""
        if type(fn) not in _KINDS:
            return None
        with self._lock:
            former = self._kept.pop(id(fn), None)
            met = 1 if former is not None and former.used else self._met.get(fn, 0)
            if met > TRIES:
                return None
            self._met[fn] = met + 1
        return parts_of(fn, reduce, by_value) if met else None  # most of those that a loop makes come once

    def keep(self, fn: Any, data: bytes, key: bytes, classes: Iterable[type], parts: FunctionParts) -> None:
        """Keeps the pickle of a function that had these parts before it was pickled."""
        if len(data) > LARGEST or not parts.are_same():  # a thread may have changed them meanwhile
            return
        with self._lock:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[id(fn)] = KeptPickle(fn, data, key, classes, parts)


class FunctionParts:
    """The objects from which the pickle of a function was made."""

    def __init__(self, by_value: set[str]) -> None:
        self.by_value = by_value
        #: (what gives parts of an object, the object, these parts)
        self.read: list[tuple[Callable[[Any], Iterable[Any]], Any, tuple[Any, ...]]] = []
        self.keys: list[tuple[dict[str, Any], tuple[str, ...]]] = []  #: dicts, and all of their keys in order
        self.absent: list[tuple[dict[str, Any], frozenset[str]]] = []  #: dicts, and keys that they have not
        self.named: list[tuple[Any, str, str]] = []  #: objects that go by name, with their module's name and their own
        self.unnamed: list[tuple[Any, str, str]] = []  #: functions that would go by name, if they were there
        self.modules: list[tuple[ModuleType, str]] = []
        self.imports: tuple[int, str] | None = None  #: shows whether modules were imported; None: that is not a part

    def are_same(self) -> bool:
        """Returns whether all of them are what they were."""
        try:
            for read, owner, parts in self.read:
                if not all(map(is_, read(owner), parts)):
                    return False
            for owner, keys in self.keys:
                if tuple(owner) != keys:
                    return False
            for owner, names in self.absent:
                if not owner.keys().isdisjoint(names):
                    return False
            for value, module, name in self.named:
                if not _is_named(value, module, name):
                    return False
            for value, module, name in self.unnamed:
                if _is_there(value, module, name):
                    return False
            for found, name in self.modules:
                if found.__name__ != name or name not in sys.modules:
                    return False
        except Exception:  # an attribute, a cell or a module is gone, or a module's __getattr__ has raised something
            return False
        return self.imports is None or self.imports == _imports()


def parts_of(fn: Any, reduce: Reduce, by_value: set[str]) -> FunctionParts | None:
    """Returns the parts of a function; None where one may change without being another object."""
    taking = _Taking(reduce, by_value)
    try:
        taking.take_part(fn)
    except Exception:  # _Unsure, or what a class or a module says when it is asked
        return None
    return taking.parts


class _Unsure(Exception):
    """Something is among the parts of a function that may change, or that is not known here."""


class _Taking:
    """The way through the parts of a function."""

    def __init__(self, reduce: Reduce, by_value: set[str]) -> None:
        self.parts = FunctionParts(by_value)
        self._reduce = reduce
        self._seen: dict[int, Any] = {}  #: by id; the objects, so that no other one gets it

    def take_part(self, value: Any) -> None:
        """Adds an object and its parts. Raises _Unsure."""
        kind = type(value)
        if kind in _FIXED or value is NoneType or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if kind is FunctionType:
            self._take_function(value)
        elif kind is partial:
            self.parts.read.append((_within, value, _within(value)))
            fn, args, kwargs, attributes = _within(value)
            self._take_all((fn, *args))
            for each in (kwargs, attributes) if attributes is not None else (kwargs,):
                self._take_dict(each)
        elif kind is tuple or kind is frozenset:
            self._take_all(value)
        elif kind is GenericAlias:
            self._take_all((value.__origin__, *value.__args__))
        elif kind is UnionType:
            self._take_all(value.__args__)
        elif kind is CodeType:
            self._take_all(value.co_consts)
        elif kind is ModuleType:
            if value.__name__ not in sys.modules or value.__name__ in self.parts.by_value:
                raise _Unsure
            self.parts.modules.append((value, value.__name__))
        elif isinstance(value, type | BuiltinFunctionType):
            self._take_named(value)
        else:
            raise _Unsure

    def _take_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.take_part(value)

    def _take_named(self, value: Any) -> None:
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if self._reduce(value) is not NotImplemented or type(module) is not str or type(name) is not str:
            raise _Unsure
        if not _is_named(value, module, name):
            raise _Unsure
        self.parts.named.append((value, module, name))

    def _take_function(self, fn: FunctionType) -> None:
        match self._reduce(fn):
            case (_, (_, dict() as base, *_), (dict(), {"__globals__": dict() as named} as slots), None, None, _):
                pass
            case _:
                self._take_named(fn)
                return
        module, name = fn.__module__, fn.__qualname__
        if type(module) is not str:  # cloudpickle looks into all modules
            raise _Unsure
        if not (module == "__main__" or "<locals>" in name or _is_there(fn, module, name)):
            self.parts.unnamed.append((fn, module, name))
        # what is imported follows from the rest; cells are looked into below
        names = [str(name) for name in slots if name not in ("__globals__", "_cloudpickle_submodules", "__closure__")]
        read = attrgetter("__code__", "__globals__", "__dict__", "__closure__", *names)
        self.parts.read.append((read, fn, read(fn)))
        for part in (fn.__code__, fn.__dict__, *(getattr(fn, name) for name in names)):
            (self._take_dict if type(part) is dict else self.take_part)(part)
        cells = fn.__closure__ or ()
        held = tuple(_contents(cells))  # raises where one is empty as yet
        if held:
            self.parts.read.append((_contents, cells, held))
        space, there = fn.__globals__, (*named, *base)
        values = tuple(map(space.__getitem__, there))
        self.parts.read.append((partial(map, space.__getitem__), there, values))
        self.parts.absent.append((space, frozenset({*_names_in(fn.__code__), *_OF_MODULE}.difference(space))))
        if any(isinstance(value, ModuleType) for value in (*values, *held)):
            self.parts.imports = _imports()  # cloudpickle has a node import what the code may name of a package
        self._take_all((*values, *held))

    def _take_dict(self, owner: dict[Any, Any]) -> None:
        keys = tuple(owner)
        if not all(type(key) is str for key in keys):
            raise _Unsure
        self.parts.keys.append((owner, keys))
        if keys:
            self.parts.read.append((partial(map, owner.__getitem__), keys, tuple(owner.values())))
            self._take_all(owner.values())


def _within(fn: partial[Any]) -> tuple[Any, ...]:
    """Returns what a partial has: its function, arguments, keywords, and attributes or None."""
    reduced: Any = fn.__reduce__()  # as its __dict__ would be made by a look at it
    within: tuple[Any, ...] = reduced[2]
    return within


_content = attrgetter("cell_contents")


def _contents(cells: Iterable[Any]) -> Iterable[Any]:
    return map(_content, cells)


def _is_named(value: Any, module: str, name: str) -> bool:
    """Returns whether an object is what a name gives, and has that name."""
    named = value.__module__ == module != "__main__" and value.__qualname__ == name
    return named and _is_there(value, module, name)


def _is_there(value: Any, module: str, name: str) -> bool:
    """Returns whether a name gives an object."""
    try:
        found: Any = attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return False
    return found is value


def _imports() -> tuple[int, str]:
    return len(sys.modules), next(reversed(sys.modules))


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names in code, and in that of functions within it."""
    yield from code.co_names
    for part in code.co_consts:
        if type(part) is CodeType:
            yield from _names_in(part)
