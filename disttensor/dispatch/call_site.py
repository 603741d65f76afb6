"""Finds the site of an operation: the line of the user's program that issued it. On the hot path: about 0.2 us."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

from ..proxy.meta import sites_by
from ..runtime.master.failures import Site, line_number
from ..session import waits

_HERE = os.path.abspath(sys.modules["disttensor"].__path__[0]) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PICKLE = os.sep + os.path.join("cloudpickle", "")  # calls back for the arguments of dt.run
_RUNTIME = os.path.dirname(os.path.realpath(os.path.join(_HERE, "runtime", "__init__.py"))) + os.sep

_frame = sys._getframe

#: id of a code object -> the object: the user's code, and that of torch and disttensor. By id, because hashing a code
#: object hashes its bytecode each time.
users: dict[int, CodeType] = {}
_others: dict[int, CodeType] = {}
#: id of a frame in which a backward runs -> the site of the call that has begun it, which `here` need not walk to. The
#: frame is there until it is out again, so the id stays its own
backwards: dict[int, Site | None] = {}
#: The code of such frames, which are in neither of the tables above.
_backward_codes: dict[int, CodeType] = {}
#: (id of a code object of ``users``, where in it) -> whether dynamo has written what is there
_dynamos: dict[tuple[int, int], bool] = {}


def is_users_file(name: str) -> bool:
    """Returns whether code of this file is the user's: not torch's, and not disttensor's."""
    return not name.startswith((_HERE, _TORCH, _RUNTIME, "<disttensor ", "<frozen ")) and _PICKLE not in name


def _is_users(code: CodeType) -> bool:
    if len(users) + len(_others) > 100_000:
        users.clear()
        _others.clear()
        _dynamos.clear()
    if id(code) in _backward_codes:
        return False
    mine = is_users_file(code.co_filename)
    (users if mine else _others)[id(code)] = code
    return mine


def here(depth: int = 2) -> Site | None:
    """Returns the site of the user's innermost frame, from ``depth`` callers up. None where there is none (a thread of
    torch's)."""
    frame = _frame(depth)
    others = _others
    try:
        while True:
            while id(frame.f_code) in others:
                frame = frame.f_back  # type: ignore[assignment]
            if id(frame.f_code) in users or (id(frame) not in backwards and _is_users(frame.f_code)):
                return (frame.f_code, frame.f_lasti)
            begun = backwards.get(id(frame))
            if begun is not None:
                return begun
            frame = frame.f_back  # type: ignore[assignment]
    except AttributeError:
        if frame is None:  # the outermost has no caller: a look for that at each would be a sixth of the walk
            return None
        raise


def runs_backwards(code: CodeType) -> None:
    """Declares the function whose frames ``backwards`` has."""
    _backward_codes[id(code)] = code


def calling_compiled(depth: int = 2) -> Site | None:
    """Returns what `here` does, but the line that calls what ``torch.compile`` has made where this begins in a graph:
    the code that dynamo writes has no lines for that, and says that it is the function's first."""
    frame = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if id(code) not in _others and (id(code) in users or _is_users(code)) and not _is_dynamos(code, frame.f_lasti):
            return (code, frame.f_lasti)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_dynamos(code: CodeType, at: int) -> bool:
    """Returns whether dynamo has written an instruction, rather than copied it from the user's code."""
    known = _dynamos.get((id(code), at))
    if known is None:
        written = sys.modules["torch._dynamo.convert_frame"].output_codes
        known = code in written and line_number((code, at)) == code.co_firstlineno
        _dynamos[id(code), at] = known
    return known


def site_of_thread(thread: int) -> Site | None:
    """Returns the site of the user's innermost frame in another thread, by its identifier."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if id(frame.f_code) in users or (id(frame.f_code) not in _others and _is_users(frame.f_code)):
            return (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None


sites_by(here)
waits.sites_by(here)
