"""Reports of failed commands, as a node sends them to the master."""

from __future__ import annotations

import builtins
import errno
import os
import sys
import traceback
from collections.abc import Collection
from functools import partial

import torch

from ..protocol import commands as c
from ..protocol import values
from ..protocol.errors import NO_MEMORY, BrokenError, NodeLost, NonFiniteError, PeerFailed
from ..protocol.failure_ids import MAX_ARGS, MAX_NAME, MAX_TEXT, attempt

#: Python's own exception types, whose arguments are reported.
_BUILTIN = frozenset(
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)
)


def name_of(command: c.Command) -> str:
    """Returns the name of the command that has failed: the user's own words for a function, else the command's type."""
    return (command.what if isinstance(command, c.Run) else "") or type(command).__name__


#: Attributes as BaseException and OSError have them: a hostile class may do anything when it is asked for one.
_cause, _errno = vars(BaseException)["__cause__"].__get__, vars(OSError)["errno"].__get__


def is_shortage(error: BaseException | None) -> bool:
    """Returns whether there was too little memory for what has failed, or for what made it fail."""
    seen = 0
    while error is not None and seen < 10:
        kind = type(error)
        if issubclass(kind, (MemoryError, torch.OutOfMemoryError)):
            return True
        if issubclass(kind, OSError) and _errno(error) == errno.ENOMEM:
            return True
        # torch's allocator for CPUs has no type of its own
        words = {RuntimeError: "DefaultCPUAllocator", BrokenError: NO_MEMORY}.get(kind)
        if words is not None and words in str(error):
            return True
        error, seen = _cause(error), seen + 1
    return False


#: Our own errors that name the peer by whose loss they came, where they came by one.
_BY_A_LOSS = (BrokenError, NodeLost, PeerFailed)


def failure_report(
    number: int, op: str, error: Exception, holdings: c.Holdings | None = None, peers: Collection[int] = ()
) -> c.Failed:
    """Returns the report of command ``number``'s failure. ``holdings``: what the node holds, for want of memory;
    ``peers``: those of its own, one of which may be lost, as any node of whose loss the script has told it."""
    kind = attempt(lambda: f"{type(error).__module__}.{type(error).__qualname__}", "an exception's type")
    text = attempt(lambda: str(error), f"the text of this {kind}")
    # TracebackException parses source, and CPython 3.11 can fail in that (gh-106905)
    trace = attempt(lambda: _trace(error), "the traceback")
    text = _clean(text[:MAX_TEXT])
    try:
        args = _plain_args(error)
    except BaseException:
        args = ()
    args = () if args == (text,) else args
    # our own only: a hostile class may do anything when it is asked for an attribute. A user's function may raise one
    # of ours, with any rank
    rank = vars(error).get("rank") if type(error) in _BY_A_LOSS else None
    known = type(rank) is int and (rank in peers or vars(error).get("_by_the_script") is True)
    lost = rank if type(rank) is int and known else -1
    former = vars(error).get("_incarnation") if lost >= 0 else None
    return c.Failed(
        number, op, _clean(kind[:MAX_NAME]), text, _clean(trace[-MAX_TEXT:]), args, lost, holdings, _value(error),
        former if type(former) is int else -1,
    )  # fmt: skip


def _value(error: Exception) -> bytes:
    """Returns an exception of a user's class as an encoded value, for a script that has announced the class; or,
    where it can't be one, a text that says why."""
    if type(error) in _BUILTIN:
        return b""
    tensors: list[torch.Tensor] = []
    try:
        value = values.encode(error, tensors, "it has", beside=False)
        if not tensors and len(value) <= MAX_TEXT:
            return value
        why = "it has tensors" if tensors else f"it has {len(value)} bytes, and {MAX_TEXT >> 10} KiB may come"
    except (TypeError, ValueError) as e:
        why = attempt(partial(str, e), "why")
    except BaseException:
        return b""
    return values.encode(_clean(why[: MAX_TEXT >> 1]), [], beside=False)


def _clean(text: str) -> str:
    """Replaces what UTF-8 can't carry (lone surrogates)."""
    return text.encode("utf-8", "replace").decode()


_HERE = os.path.abspath(sys.modules["disttensor.runtime"].__path__[0]) + os.sep
_REAL = os.path.realpath(_HERE) + os.sep
#: Types that no operator and no user's function raises without a frame of its own.
_OUR_OWN = (AssertionError, AttributeError, KeyError, NameError)


def _trace(error: BaseException) -> str:
    """Formats the traceback, of this error and of those before it, from the first line on that is not the node's own.

    Empty where no such line exists, as for an operator, unless the error is a mistake of this project.
    """
    whole = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    todo, seen, users = [whole], {id(whole)}, False
    while todo:
        one = todo.pop()
        ours = next((i for i, frame in enumerate(one.stack) if not _is_ours(frame.filename)), len(one.stack))
        users = users or ours < len(one.stack)
        del one.stack[:ours]
        if not one.stack:
            one.stack = None  # type: ignore[assignment]  # so its heading is left out
        for other in (one.__cause__, one.__context__, *(one.exceptions or ())):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                todo.append(other)
    if not users and isinstance(error, _OUR_OWN):
        return "".join(traceback.format_exception(error))
    return "".join(whole.format()) if users else ""


def _is_ours(file: str) -> bool:
    return file.startswith((_HERE, _REAL, "<disttensor ", "<frozen importlib"))


def _plain_args(error: Exception) -> tuple[c.Plain | tuple[c.Plain, ...], ...]:
    """Returns the arguments that make the like of a built-in exception, or of a NonFiniteError: a KeyError's key, an
    OSError's number.

    Only if they are plain and short.
    """
    if type(error) is NonFiniteError:
        return str(error), error.nan, error.inf, error.shape, error.finite
    if type(error) not in _BUILTIN:
        return ()
    args = error.__reduce__()[1]  # an OSError's file name is not among its args
    flat = [x for arg in args for x in (arg if type(arg) is tuple else (arg,))]
    texts = [x for x in flat if type(x) is str]
    plain = all(type(x) in (str, int, float, bool, type(None)) for x in flat)
    long = any(type(x) is int and not -(1 << 63) <= x < 1 << 63 for x in flat)
    small = not long and len(flat) <= MAX_ARGS and sum(map(len, texts)) <= MAX_TEXT
    return tuple(args) if plain and small and all(_clean(x) == x for x in texts) else ()
