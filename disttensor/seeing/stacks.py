"""The stacks of the script's threads and of nodes'. Threads that work come first, named by what they are at.

A stack has files, lines and names of functions, and no value of any variable.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from ..runtime.host.launcher import Sight
from ..runtime.master.connection import Life
from ..runtime.master.doing import WAITS, Activity, activities
from ..runtime.master.failures import short_line
from ..runtime.master.node import Node
from ..runtime.process.cells import with_cells
from ..runtime.process.page import WORDS
from ..runtime.protocol import codec
from ..session.session import Session

#: Seconds in which a launcher looks at nodes; and between two looks for what it has seen.
SIGHTS, _LOOK = 3.0, 0.05
#: The most frames of a thread of the script.
_FRAMES = 100
#: How faulthandler begins the stack of a thread.
_HEAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b.*")


def script_stack() -> str:
    """Returns the stacks of this process's threads, except the one that asks: the main thread first."""
    frames, own, main = sys._current_frames(), threading.get_ident(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    blocks = []
    for thread in sorted(frames, key=lambda each: each != main):
        if thread != own:
            blocks.append("\n".join([f"thread {names.get(thread) or hex(thread)}:", *_lines(frames[thread])]))
    return "\n\n".join(blocks)


def _lines(frame: FrameType | None) -> Iterator[str]:
    for _ in range(_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        yield with_cells(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back


def node_stacks(session: Session, nodes: Sequence[Node]) -> dict[int, str]:
    """Returns the stacks of nodes by rank, whatever these are at. Waits until the launcher has seen them."""
    losses = session.link.losses
    if losses.launcher is None:
        text = "it is a thread of the script: its stack is there"
        return {node.rank: text for node in nodes}
    there = [node for node in nodes if node.life is Life.THERE]
    sights = _sights(session, there) if losses.sees else {}
    return {node.rank: _text(node, sights.get(node.rank), losses.sees) for node in nodes}


def _sights(session: Session, nodes: Sequence[Node]) -> dict[int, Sight]:
    link = session.link
    before = {node.rank: node.connection.sight for node in nodes}
    for node in nodes:
        link.losses.look(node)
    found: dict[int, Sight] = {}
    until = link.clock.now() + SIGHTS
    while len(found) < len(nodes) and link.clock.now() < until and not link.closed:
        if not link.losses.ask_launcher(_LOOK):
            link.clock.sleep(_LOOK)
        for node in nodes:
            sight = node.connection.sight
            if sight is not None and sight is not before[node.rank]:
                found[node.rank] = sight
    return found


def _text(node: Node, sight: Sight | None, sees: bool) -> str:
    if node.life is not Life.THERE:
        return ""
    if not sees:
        return "its launcher does not look at nodes"
    if sight is None:
        return f"its launcher has not seen it within {SIGHTS:g} s"
    works = {work.number: work for work in activities(node, sight)}
    beside = {each.thread: works[each.number] for each in sight.beside if each.number in works}
    first, last = list[str](), list[str]()
    for block in filter(None, sight.stack.split("\n\n")):
        head, *lines = block.splitlines()
        named = _HEAD.fullmatch(head)
        thread = int(named[1], 16) if named else 0
        serve = next((i for i, line in enumerate(lines) if "/runtime/node/" in line and " in serve" in line), None)
        work = beside.get(thread) or (None if serve is None else _own(node, sight))
        shown = lines if serve is None else lines[: serve + 1]  # what is below has led to the node's start
        text = "\n".join([f"thread {thread:#x}{_words(work)}:", *map(with_cells, shown)])
        (last if work is None or work.kind in WAITS else first).append(text)
    return "\n\n".join([*first, *last])


def _own(node: Node, sight: Sight) -> Activity:
    """Returns what the thread that takes commands is at."""
    return Activity(
        sight.kind, sight.seq, sight.seconds, False, None if sight.kind in WAITS else node.command(sight.seq)
    )


def _words(work: Activity | None) -> str:
    if work is None:
        return ""
    what = WORDS[work.kind] if 0 <= work.kind < len(WORDS) else "runs something"
    if work.sent is None:
        return f" {what}"
    line = short_line(work.sent.site)
    issued = f", issued at {line}" if line else ""
    return f" {what}: {codec.one_line(work.sent.operator)}{issued}, for {work.seconds:.1f} s"
