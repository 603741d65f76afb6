"""The table of operators: an entry for each, and the custom handlers of some."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from torch._ops import OpOverload

from ..session import caches
from .op_plan import OpEntry

#: ``handler(entry, args, kwargs)``
Handler = Callable[[OpEntry, Any, Any], Any]
#: ``run(entry, args, kwargs, place)``
Run = Callable[[OpEntry, Any, Any, Any], Any]

#: id of an operator -> its entry. The entry holds the operator, so the id stays its own.
entries: dict[int, OpEntry] = {}
#: The table that ``dispatch`` looks operators up in: these entries, or others in their place (``surround``).
front: dict[int, OpEntry] = {}
_handlers: dict[OpOverload, Handler] = {}
_kinds: dict[str, Handler] = {}
_fallbacks: dict[str, Handler] = {}
_ordinary: list[Run] = []
#: What surrounds operations, if anything does; and what runs those that reach a node without a proxy among their
#: arguments.
_around: list[Handler] = []
factory: list[Run] = []


def handler(*ops: OpOverload) -> Callable[[Handler], Handler]:
    """Registers ``fn(entry, args, kwargs)`` as the custom handler of operators."""

    def register(fn: Handler) -> Handler:
        for op in ops:
            _handlers[op] = fn
        return fn

    return register


def handles(kind: str) -> Callable[[Handler], Handler]:
    """Registers the handler of all operators of a kind: "composite" (made of others), "python" (of a library, the same
    for all devices), "view" (gives one alias), "value" (gives no tensor)."""

    def register(fn: Handler) -> Handler:
        _kinds[kind] = fn
        return fn

    return register


def ordinary(fn: Run) -> Run:
    """Registers the function that runs an operator without its handler."""
    _ordinary[:] = factory[:] = [fn]
    return fn


def run_ordinary(entry: OpEntry, args: Any, kwargs: Any, place: Any) -> Any:
    """Runs an operator without its handler, for a handler that leaves a case to that."""
    return _ordinary[0](entry, args, kwargs, place)


def fallback(*names: str) -> Callable[[Handler], Handler]:
    """Registers a fallback for the overloads of aten operators, in-place ones too: at each call that has no plan it
    returns the result, or NotImplemented for signatures that it does not handle."""

    def register(fn: Handler) -> Handler:
        for name in names:
            _fallbacks[name] = _fallbacks[name + "_"] = fn
        return fn

    return register


def enter(op: OpOverload) -> OpEntry:
    """Returns the entry of an operator."""
    entry = entries.get(id(op))
    if entry is None:
        entry = OpEntry(op)
        kinds = ("python", entry.python), ("composite", entry.composite), ("view", entry.view), ("value", entry.value)
        kind = next((name for name, applies in kinds if applies), "")
        entry.handler = _handlers.get(op) or _kinds.get(kind)
        entry.fallback = _fallbacks.get(entry.name.partition(".")[0].removeprefix("aten::"))
        entries[id(op)] = entry
        front[id(op)] = _shown(entry)
    return entry


def enter_front(op: OpOverload) -> OpEntry:
    """Returns the entry of an operator in the table of ``dispatch``."""
    enter(op)
    return front[id(op)]


def surround(by: Handler | None, made: Run | None = None) -> None:
    """Has ``by(entry, args, kwargs)`` called in the place of each operation, and ``made(entry, args, kwargs, place)``
    in that of one that reaches a node without a proxy; None ends that.

    They go on by ``dispatch.handle`` and ``dispatch.run``. Nothing looks whether they are there: the table is another.
    """
    _around[:] = [] if by is None else [by]
    factory[:] = _ordinary if made is None else [made]
    for entry in list(entries.values()):
        entry.shortcuts.clear()  # what takes them passes the table by
        front[id(entry.op)] = _shown(entry)


def surrounded() -> bool:
    """Returns whether something surrounds operations."""
    return bool(_around)


def _shown(entry: OpEntry) -> OpEntry:
    """Returns what the table of ``dispatch`` has for an entry."""
    if not _around:
        return entry
    by, shown = _around[0], copy(entry)
    shown.handler = lambda _, args, kwargs: by(entry, args, kwargs)
    return shown


@caches.plans
def _drop_plans() -> None:
    for entry in list(entries.values()):
        entry.drop_plans()
