"""The classes of users whose objects cross a wire without pickle: what an object is made of, and how it is made.

Dataclasses, namedtuples, enums and exceptions. Who receives has the class already, has announced it, and makes the
object from plain data without a line of the class being run: no ``__init__``, ``__new__``, ``__post_init__``,
``__setattr__``, ``__setstate__``, property or ``__del__``. What a class is made of is looked up before anything has
come; what comes is names and values, and a name that is none of the class's is an error.
"""

from __future__ import annotations

import builtins
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ..errors import ProtocolError

#: The most attributes of an exception.
MAX_ATTRIBUTES = 256

_namespace = type.__dict__["__dict__"].__get__
mro_of = type.__dict__["__mro__"].__get__
_module, _qualname = type.__dict__["__module__"].__get__, type.__dict__["__qualname__"].__get__
_args = vars(BaseException)["args"]
#: Python's own exceptions, whose ``__new__`` those of users are made by.
_BUILTIN = frozenset(
    kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)
)
#: Why what comes may not fit a class that has its name.
_ANOTHER = "; the node has another class of that name: make their names differ"
#: Theirs whose objects are made of more than arguments and attributes: an ExceptionGroup has other exceptions.
_NOT_THESE = (BaseExceptionGroup, UnicodeError)


def name_of(cls: type) -> str:
    """Returns the name under which a class is announced: "train.Stats". A metaclass is not asked."""
    module = _module(cls)
    return f"{module if isinstance(module, str) else '?'}.{_qualname(cls)}"


class Unannounced(TypeError):
    """An object of a class has come that the receiver has not announced."""


class Blueprint(Protocol):
    """The plan of one class: what its objects are made of."""

    kind: str  #: "dataclass", "namedtuple", "enum" or "exception"
    cls: type
    hashable: bool  #: whether no line of the class's is run where an object is a key, or in a set

    def parts(self, value: Any) -> list[Any]:
        """Returns what an object is made of. Raises TypeError where that is not all that there is to it."""

    def make(self, parts: list[Any]) -> Any:
        """Makes an object of what ``parts`` has returned elsewhere. Raises ProtocolError for anything else."""


class Announced:
    """Classes that the receiver has announced, by name."""

    def __init__(self, classes: Iterable[type] = ()) -> None:
        """Raises TypeError for a class whose objects can't come."""
        self._by_name: dict[str, Blueprint | None] = {}
        for cls in classes:
            self.add(cls)

    def add(self, cls: type) -> None:
        """Announces a class. Raises TypeError for one whose objects can't come."""
        plan, name = blueprint(cls), name_of(cls)
        known = self._by_name.setdefault(name, plan)
        if known is not None and known.cls is not cls:
            self._by_name[name] = None  # which one is meant can't be told

    def __iter__(self) -> Iterator[type]:
        return (plan.cls for plan in self._by_name.values() if plan is not None)

    def __repr__(self) -> str:
        return f"<Announced {sorted(self._by_name)}>"

    def find(self, name: Any, kind: str) -> Blueprint:
        """Returns the blueprint of the class of this name. Raises Unannounced, ProtocolError for another kind."""
        plan = self._by_name.get(name)
        if plan is None:
            if not isinstance(name, str) or not name.isprintable() or len(name) > 1000:
                raise ProtocolError(f"{name!r:.100} is no name of a class")
            if name in self._by_name:
                raise Unannounced(f"what came is a {name}, and two different classes of that name were announced")
            raise Unannounced(f"what came is the {kind} {name}, which was not announced")
        if plan.kind != kind:
            raise ProtocolError(f"{name} is no {kind}{_ANOTHER}")
        return plan


@functools.lru_cache(1024)
def blueprint(cls: type) -> Blueprint:
    """Returns what objects of a class are made of. Raises TypeError, in words, for a class whose objects can't come."""
    if not isinstance(cls, type):
        raise TypeError(f"{cls!r:.100} is no class")
    if any("__del__" in _namespace(base) for base in mro_of(cls)):
        raise TypeError(f"{name_of(cls)} has a __del__, which would run for what others have sent")
    if issubclass(cls, BaseException):
        return _Exceptions(cls)
    if issubclass(cls, enum.Enum):
        return _Members(cls)
    if _is_namedtuple(cls):
        return _Tuples(cls)
    if isinstance(found_in(cls, "__dataclass_fields__"), dict):
        return _Dataclasses(cls)
    raise TypeError(f"{name_of(cls)} is no dataclass, namedtuple, enum or exception")


def found_in(cls: type, name: str) -> Any:
    """Returns an attribute of a class as it stands there, without asking a metaclass or a descriptor."""
    return next((_namespace(base)[name] for base in mro_of(cls) if name in _namespace(base)), None)


def _dict_of(cls: type) -> Callable[[Any], dict[str, Any]] | None:
    """Returns what gets an object's dictionary, which is C's own; None where objects have none."""
    for base in mro_of(cls):
        if "__dict__" in _namespace(base):
            getter = _namespace(base)["__dict__"]
            return getter.__get__ if type(getter) is types.GetSetDescriptorType else None
    return None


def _is_cached(cls: type, name: str) -> bool:
    return isinstance(found_in(cls, name), functools.cached_property)


def _hashes_plainly(cls: type) -> bool:
    """Returns whether ``__hash__`` and ``__eq__`` are Python's own, or those that @dataclass generates."""
    return all(_generated(cls, name) for name in ("__hash__", "__eq__"))


def _generated(cls: type, name: str) -> bool:
    for base in mro_of(cls):
        found = _namespace(base).get(name)
        if found is None:
            if name in _namespace(base):
                return False  # it is unhashable
            continue
        if base.__module__ in ("builtins", "enum"):
            return True
        return isinstance(found, types.FunctionType) and found.__code__.co_filename == "<string>"
    return False


class _Dataclasses:
    """Objects of a dataclass: the values of its fields, by name."""

    kind = "dataclass"

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.hashable = _hashes_plainly(cls)
        self._dict = _dict_of(cls)
        self._slots: dict[str, Any] = {}  #: C's own descriptors, of fields that are in slots
        fields = found_in(cls, "__dataclass_fields__")
        self._fields = [name for name, field in fields.items() if field._field_type.name == "_FIELD"]
        for name in self._fields:
            there = found_in(cls, name)
            if type(there) is types.MemberDescriptorType:
                self._slots[name] = there
            elif hasattr(type(there), "__set__") or hasattr(type(there), "__delete__"):
                raise TypeError(f"{name_of(cls)}.{name} is a field and a {type(there).__name__}, whose code would run")
            elif self._dict is None:
                raise TypeError(f"{name_of(cls)}.{name} is a field without a place: no slot, and no __dict__")
        self._others = _slots_but(cls, self._fields)
        _new(cls)

    def parts(self, value: Any) -> list[Any]:
        inside = {} if self._dict is None else self._dict(value)
        _check_rest(self.cls, inside.keys() - self._fields, value, self._others)
        found = {}
        for name in self._fields:
            try:
                found[name] = self._slots[name].__get__(value) if name in self._slots else inside[name]
            except (AttributeError, KeyError):
                raise TypeError(f"a {name_of(self.cls)} has no value for its field {name!r}") from None
        return [found]

    def make(self, parts: list[Any]) -> Any:
        match parts:
            case [dict(values)] if values.keys() == set(self._fields):
                pass
            case _:
                raise ProtocolError(f"a {name_of(self.cls)} is made of its {len(self._fields)} fields{_ANOTHER}")
        made = _new(self.cls)
        inside = {} if self._dict is None else self._dict(made)
        for name, value in values.items():
            if name in self._slots:
                self._slots[name].__set__(made, value)
            else:
                inside[name] = value
        return made


class _Tuples:
    """Objects of a namedtuple: its values, in order."""

    kind = "namedtuple"

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.hashable = _hashes_plainly(cls)
        self._count = len(found_in(cls, "_fields"))
        self._dict = _dict_of(cls)
        self._others = _slots_but(cls, ())
        try:
            tuple.__new__(cls, ())
        except TypeError as e:
            raise TypeError(f"{name_of(cls)} is no ordinary namedtuple: {e}") from None

    def parts(self, value: Any) -> list[Any]:
        inside = {} if self._dict is None else self._dict(value)
        _check_rest(self.cls, set(inside), value, self._others)
        found = list(tuple.__iter__(value))
        if len(found) != self._count:
            raise TypeError(f"a {name_of(self.cls)} has {len(found)} values for {self._count} fields")
        return found

    def make(self, parts: list[Any]) -> Any:
        if len(parts) != self._count:
            raise ProtocolError(f"a {name_of(self.cls)} has {self._count} values, not {len(parts)}{_ANOTHER}")
        return tuple.__new__(self.cls, parts)


class _Members:
    """Members of an enum: by name."""

    kind = "enum"

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.hashable = _hashes_plainly(cls)
        self._members: Mapping[str, Any] = found_in(cls, "_member_map_")

    def parts(self, value: Any) -> list[Any]:
        name = next((name for name, member in self._members.items() if member is value), None)
        if name is None:
            raise TypeError(f"a {name_of(self.cls)} that is no single member can't come; for x return x.value")
        return [name]

    def make(self, parts: list[Any]) -> Any:
        match parts:
            case [str(name)] if name in self._members:
                return self._members[name]
        raise ProtocolError(f"{parts!r:.100} is no member of {name_of(self.cls)}{_ANOTHER}")


class _Exceptions:
    """Exceptions: the arguments, and attributes by name."""

    kind = "exception"

    def __init__(self, cls: type[BaseException]) -> None:
        self.cls = cls
        self.hashable = _hashes_plainly(cls)
        if issubclass(cls, _NOT_THESE):
            raise TypeError(f"{name_of(cls)} is made of more than arguments and attributes")
        if cls in _BUILTIN:
            raise TypeError(f"{name_of(cls)} is Python's own, and need not be announced")
        base = next(base for base in mro_of(cls) if base in _BUILTIN)
        self._new: Callable[[type], Any] = found_in(base, "__new__")
        self._dict = _dict_of(cls)
        self._slots = {
            name: slot
            for kind in mro_of(cls)
            if kind is not object and kind is not BaseException
            for name, slot in _namespace(kind).items()
            if type(slot) in (types.MemberDescriptorType, types.GetSetDescriptorType)
            and not (name.startswith("__") and name.endswith("__"))
            and found_in(cls, name) is slot
        }
        if self._dict is None:
            raise TypeError(f"{name_of(cls)} hides its __dict__")
        self._new(cls)

    def parts(self, value: Any) -> list[Any]:
        found = {}
        for name, slot in self._slots.items():
            try:
                there = slot.__get__(value)
            except AttributeError:
                continue
            if there is not None:
                found[name] = there
        inside = {} if self._dict is None else self._dict(value)
        found.update((name, x) for name, x in inside.items() if self._takes(name))
        if len(found) > MAX_ATTRIBUTES:
            raise TypeError(f"a {name_of(self.cls)} has {len(found)} attributes, and {MAX_ATTRIBUTES} may come")
        return [list(_args.__get__(value)), found]

    def _takes(self, name: Any) -> bool:
        """Returns whether an attribute of this name may come: none that hides a method, or what Python itself uses."""
        if not isinstance(name, str) or (name.startswith("__") and name.endswith("__")):
            return False
        there = found_in(self.cls, name)
        return name in self._slots or there is None or not hasattr(type(there), "__get__") or _is_cached(self.cls, name)

    def make(self, parts: list[Any]) -> Any:
        match parts:
            case [list(args), dict(attributes), list(left)] if len(attributes) + len(left) <= MAX_ATTRIBUTES:
                pass
            case _:
                raise ProtocolError(f"a {name_of(self.cls)} is made of arguments and attributes")
        made = self._new(self.cls)
        _args.__set__(made, tuple(args))
        inside = {} if self._dict is None else self._dict(made)
        for name, value in attributes.items():
            if not self._takes(name):
                raise ProtocolError(f"{name!r:.100} is no attribute of a {name_of(self.cls)}")
            if name in self._slots:
                self._slots[name].__set__(made, value)
            else:
                inside[name] = value
        if left:
            BaseException.add_note(made, f"attributes that are no plain data stayed on the node: {left!s:.500}")
        return made


def _new(cls: type) -> Any:
    try:
        return object.__new__(cls)
    except TypeError as e:  # an abstract class, or one that stands on a type of C
        raise TypeError(f"a {name_of(cls)} can't be made of its fields alone: {e}") from None


def _slots_but(cls: type, fields: Iterable[str]) -> dict[str, Any]:
    """Returns slots of a class that are not among ``fields``."""
    return {
        name: slot
        for base in mro_of(cls)
        for name, slot in _namespace(base).items()
        if type(slot) is types.MemberDescriptorType and name not in fields
    }


def _check_rest(cls: type, names: Iterable[str], value: Any, slots: Mapping[str, Any]) -> None:
    """Raises TypeError where an object has attributes that are no fields: they would be lost."""
    rest = [name for name in names if not _is_cached(cls, name)]
    for name, slot in slots.items():
        try:
            slot.__get__(value)
        except AttributeError:
            continue
        rest.append(name)
    if rest:
        raise TypeError(
            f"a {name_of(cls)} has the attribute {min(rest)!r}, which is no field and would be lost; make it a field "
            "(field(init=False)), or a functools.cached_property"
        )


def is_announcable(cls: type) -> bool:
    """Returns whether a class is a dataclass, a namedtuple, an enum or a user's exception."""
    if issubclass(cls, (BaseException, enum.Enum)):
        return cls not in _BUILTIN
    return _is_namedtuple(cls) or isinstance(found_in(cls, "__dataclass_fields__"), dict)


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(found_in(cls, "_fields"), tuple)
