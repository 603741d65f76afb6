"""The stacks of the script's threads and of nodes'. Threads that work come first, named by what they are at.

A stack has files, lines and names of functions, and no value of any variable.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from ..runtime.host.launcher import Sight
from ..runtime.host.sights import WAITS, in_order, threads_of
from ..runtime.master.connection import Life
from ..runtime.master.doing import Activity, activities
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
    found = []
    for it in threads_of(sight.stack):
        work = beside.get(it.thread) or (_own(node, sight) if it.takes_commands else None)
        found.append((it, _words(work), work is not None and work.kind not in WAITS))
    return in_order(found)


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
