"""Finds the site of an operation: the line of the user's program that issued it. On the hot path: about 0.2 us."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

from ..proxy.meta import sites_by
from ..runtime.master.failures import Site
from ..session import waits

_HERE = os.path.abspath(sys.modules["disttensor"].__path__[0]) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PICKLE = os.sep + os.path.join("cloudpickle", "")  # calls back for the arguments of dt.run
_RUNTIME = os.path.dirname(os.path.realpath(os.path.join(_HERE, "runtime", "__init__.py"))) + os.sep

#: id of a code object -> the object: the user's code, and that of torch and disttensor. By id, because hashing a code
#: object hashes its bytecode each time.
users: dict[int, CodeType] = {}
_others: dict[int, CodeType] = {}


def _is_users(code: CodeType) -> bool:
    if len(users) + len(_others) > 100_000:
        users.clear()
        _others.clear()
    name = code.co_filename
    mine = not name.startswith((_HERE, _TORCH, _RUNTIME, "<frozen ")) and _PICKLE not in name
    (users if mine else _others)[id(code)] = code
    return mine


def here(depth: int = 2) -> Site | None:
    """Returns the site of the user's innermost frame, from ``depth`` callers up. None where there is none (a thread of
    torch's)."""
    frame = sys._getframe(depth)
    others = _others
    while frame is not None:
        if id(frame.f_code) not in others and (id(frame.f_code) in users or _is_users(frame.f_code)):
            return (frame.f_code, frame.f_lasti)
        frame = frame.f_back  # type: ignore[assignment]
    return None


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
