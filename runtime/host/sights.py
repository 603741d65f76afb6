"""Reads the sight of a node's process (launcher.py: ``Sight``): for the script, and for the agent of a host alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from ..process.cells import with_cells
from ..process.page import IDLE, STREAMS
from .launcher import Sight

#: A node whose own threads have not run for so many seconds holds the GIL, or is stopped.
DEAF = 2.0
#: A node that is in the kernel for so many seconds waits there for a device; for a moment anything may be.
STUCK = 1.0
#: What the thread that takes commands is at when it does nothing itself.
WAITS = frozenset({IDLE, STREAMS})

#: Why a process does not run its own threads: its host has paused it as it hears nothing of the script's; somebody has
#: stopped it; one thread holds the GIL; it waits in the kernel for a device.
Hindrance: TypeAlias = Literal["", "paused", "stopped", "deaf", "device"]

#: How faulthandler begins the stack of a thread.
_HEAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b.*")


def hindrance(sight: Sight) -> Hindrance:
    """Returns what keeps a node's process from running its threads."""
    if sight.paused:
        return "paused"
    if sight.state in ("T", "t"):
        return "stopped"
    if sight.deaf > DEAF:
        return "deaf"
    return "device" if sight.state == "D" else ""


def hindered(sight: Sight, pid: int, state: str, seconds: float) -> tuple[str, str]:
    """Returns the state of a node that would be in ``state`` for so many seconds if nothing hindered it, and a note
    about what does; "" for nothing."""
    match hindrance(sight):
        case "paused":
            return "paused", "its host hears nothing of this one"
        case "stopped":
            return "stopped", f"`kill -CONT {pid}` has it go on"
        case "deaf":
            return state, f"no other thread of it has run for {sight.deaf:.0f} s, as this one holds the GIL"
        case "device" if seconds >= STUCK:
            return state, "it is in the kernel, for a device"
    return state, ""


# ---- stacks ----------------------------------------------------------------------------------------------------------


class ThreadStack(NamedTuple):
    """The stack of a thread of a node's."""

    thread: int  #: its identifier, as ``threading.get_ident`` gives it; 0: not known
    takes_commands: bool  #: it is the thread that takes the node's commands
    lines: list[str]  #: the innermost frame first; without those that have led to the node's start


def threads_of(stack: str) -> Iterator[ThreadStack]:
    """Yields the threads of a sight's ``stack``."""
    for block in filter(None, stack.split("\n\n")):
        head, *lines = block.splitlines()
        named = _HEAD.fullmatch(head)
        serve = next((i for i, line in enumerate(lines) if "/runtime/node/" in line and " in serve" in line), None)
        yield ThreadStack(
            int(named[1], 16) if named else 0, serve is not None, lines[: None if serve is None else serve + 1]
        )


def in_order(threads: Iterable[tuple[ThreadStack, str, bool]]) -> str:
    """Returns stacks as text, each with the words for what its thread is at: those that work (True) first."""
    first, last = list[str](), list[str]()
    for it, words, works in threads:
        text = "\n".join([f"thread {it.thread:#x}{words}:", *map(with_cells, it.lines)])
        (first if works else last).append(text)
    return "\n\n".join([*first, *last])
