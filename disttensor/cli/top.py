"""`dtrun top`: the status of a job on a whole terminal, redrawn; keys choose a node, and look at it.

Screen   what is to be seen: a status, the chosen node, the last lines of output --> lines of text, as wide and high
         as the terminal. No I/O
watch    the terminal: keys, its size, and what it was before
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ..runtime.host.job_sockets import (
    FoundJob,
    JobRequest,
    JobSocketError,
    Killed,
    OutputAnswer,
    OutputLine,
    StackAnswer,
    StatusAnswer,
)
from ..runtime.launch.output.lines import plain
from .asking import NotDone, answer, clock

#: Seconds between two looks at the job.
REDRAW = 0.5
#: Seconds in which the job answers each.
PATIENCE = 2.0
#: The lines of output that are kept, and the most that stand below the nodes unless they are asked for.
OUTPUT, BELOW = 1000, 5

#: What nodes are sorted by, in turn: the heading, and what comes first.
SORTS: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = (
    ("node", lambda node: node["rank"]),
    ("behind", lambda node: -(node["behind"] or 0)),
    ("cpu", lambda node: -(node["cpu"] or 0.0)),
    ("rss", lambda node: -(node["rss"] or 0)),
    ("held", lambda node: -(node["bytes"] or 0)),
)
_KEYS = "q quit  n node  s sort  p stack  l output  k kill"
#: Escape sequences: to the other screen without a cursor, and back; to its first place; the rest of a line, and of it.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J", "\x1b[?25h\x1b[?1049l"
_HOME, _REST, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _REVERSE, _PLAIN = "\x1b[1m", "\x1b[7m", "\x1b[0m"


class Screen:
    """The view of a job, with the choices that keys have made."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {"script": None, "nodes": []}
        self.seconds = 0.0  #: since the job's begin
        self.output: deque[OutputLine] = deque(maxlen=OUTPUT)
        self.chosen: int | None = None  #: the rank of the node that keys are about; None: all
        self.sort = 0
        self.view = "nodes"  #: "nodes", "stack" or "output"
        self.stack: list[str] = []
        self.asks = False  #: whether the chosen node is to be killed
        self.note = ""  #: what went wrong last

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The nodes in the order in which they are shown."""
        return sorted(self.status["nodes"], key=SORTS[self.sort][1])

    def choose_next(self) -> None:
        """Chooses the next node of those that are shown; after the last one none."""
        ranks = [node["rank"] for node in self.nodes]
        at = ranks.index(self.chosen) + 1 if self.chosen in ranks else 0
        self.chosen = ranks[at] if at < len(ranks) else None

    def lines(self, width: int, height: int) -> list[tuple[str, str]]:
        """Returns what stands on a terminal of this size, as (style, text) of each line; no text is wider."""
        found = [("", self._head(width))]
        if self.view == "stack":
            found += [("", text) for text in self.stack or ["..."]]
        elif self.view == "output":
            found += [("", text) for text in self._output(height - 2)]
        else:
            below = self._output(min(BELOW, max(0, height - 6)))
            found += self._table(width, height - 2 - len(below))
            found += [("", text) for text in below]
        del found[max(1, height - 1) :]
        found += [("", "")] * (height - 1 - len(found))
        found.append(("", self._foot()))
        return [(style, " ".join(plain(text, width).splitlines()).replace("\t", " ")) for style, text in found[:height]]

    def _head(self, width: int) -> str:
        script, nodes = self.status["script"], self.status["nodes"]
        if script is None:
            return "..."
        hosts = len({node["host"] for node in nodes if node["host"]})
        lost = sum(node["state"] == "lost" for node in nodes)
        text = (
            f"{script['name']}  pid {script['pid']}  {len(nodes)} node{'s' * (len(nodes) != 1)} on {hosts} "
            f"host{'s' * (hosts != 1)}{f', {lost} lost' if lost else ''}  up {clock(self.seconds)}"
        )
        if script["commands"] is not None:
            text += f"  {script['commands']:,} commands"
        return text + _KEYS.rjust(width - len(text)) if len(text) + len(_KEYS) + 2 <= width else text

    def _foot(self) -> str:
        if self.asks:
            return f"kill node {self.chosen}? y n"
        about = "" if self.chosen is None else f"node {self.chosen}  "
        sort = "" if self.sort == 0 else f"by {SORTS[self.sort][0]}  "
        return about + sort + (self.note or _KEYS)

    def _output(self, most: int) -> list[str]:
        lines = [it for it in self.output if self.chosen in (None, it.rank)]
        return [f"[node {it.rank}] {it.text}" for it in lines[-most:]] if most > 0 else []

    def _table(self, width: int, most: int) -> list[tuple[str, str]]:
        """Returns the rows of the script and the nodes: of too many those around the chosen one."""
        script = self.status["script"]
        rows = (
            []
            if script is None
            else [(None, "main", script["host"], _waits(script), "-", "-", _size(script["rss"]), "-")]
        )
        rows += [(node["rank"], *_row(node)) for node in self.nodes]
        cells = [_HEADS, *(row[1:] for row in rows)]
        wide = [max(len(row[i]) for row in cells) for i in range(len(_HEADS))]
        wide[1] = min(wide[1], max(4, width // 8))
        wide[_STATE] = max(10, width - sum(wide) + wide[_STATE] - 2 * (len(wide) - 1))
        shown, left = rows, 0
        if len(rows) > most - 1:
            room = max(1, most - 2)
            at = next((i for i, row in enumerate(rows) if row[0] == self.chosen and self.chosen is not None), 0)
            first = max(0, min(at - room // 2, len(rows) - room))
            shown, left = rows[first : first + room], len(rows) - room
        found = [(_BOLD, _joined(_HEADS, wide))]
        for rank, *row in shown:
            found.append((_REVERSE if rank is not None and rank == self.chosen else "", _joined(row, wide)))
        return [*found, ("", f"and {left} more; n chooses the next node")] if left else found


_HEADS = ("NODE", "HOST", "STATE", "BEHIND", "CPU", "RSS", "HELD")
_STATE = 2


def _joined(row: Sequence[str], wide: Sequence[int]) -> str:
    cells = []
    for i, (text, width) in enumerate(zip(row, wide, strict=True)):
        short = text if len(text) <= width else f"{text[: max(0, width - 3)]}..."
        cells.append(short.ljust(width) if i <= _STATE else short.rjust(width))
    return "  ".join(cells).rstrip()


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    state = node["state"].upper() if node["state"] == "lost" else node["state"]
    if node["waits_for"] is not None:
        state += f" for node {node['waits_for']}" if node["waits_for"] >= 0 else " for the script"
    words = [state, node["what"], f"{node['seconds']:.0f} s" if node["seconds"] >= 1 else "", node["line"]]
    text = " ".join(filter(None, words)) + (f": {node['note']}" if node["note"] else "")
    lost = node["state"] == "lost"
    cpu = "-" if lost or node["cpu"] is None else f"{100 * node['cpu']:.0f}%"
    held = "-" if lost or node["tensors"] is None else f"{node['tensors']} / {_size(node['bytes'])}"
    rss = "-" if lost else _size(node["rss"])
    behind = "-" if lost or node["behind"] is None else f"{node['behind']:,}"
    return f"{node['rank']}", node["host"], text, behind, cpu, rss, held


def _waits(script: dict[str, Any]) -> str:
    if script["commands"] is None:
        return "runs there: `dtrun top` there has more"
    if not script["waits"]:
        return "runs"
    wait = script["waits"][0]
    return " ".join(
        filter(None, (f"waits {wait['seconds']:.1f} s for node {wait['node']}", wait["code"], wait["line"]))
    )


def _size(count: int | None) -> str:
    """Returns a number of bytes in four or five characters."""
    if count is None:
        return "-"
    for unit in ("B", "K", "M", "G"):
        if count < 1000:
            return f"{count:.0f}{unit}" if unit in "BKM" or count >= 100 else f"{count:.1f}{unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.1f}T"


# ---- the terminal ----------------------------------------------------------------------------------------------------


def watch(job: FoundJob) -> int:
    """Shows a job on this terminal until q, Ctrl-C or the job's end, and returns the exit code. Raises NotDone where
    there is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise NotDone("top needs a terminal; `dtrun status` prints once")
    screen, end = Screen(), ""
    with _terminal() as (keys, wake):
        try:
            _run(job, screen, keys, wake)
        except (JobSocketError, NotDone) as e:
            end = str(e)
    if end:
        print(end, file=sys.stderr)
    return 0


def _run(job: FoundJob, screen: Screen, keys: int, wake: int) -> None:
    """Draws until q. Raises JobSocketError at the job's end."""
    poller = select.poll()
    poller.register(keys, select.POLLIN)
    poller.register(wake, select.POLLIN)
    again = 0.0
    while True:
        if time.monotonic() >= again:
            _ask(job, screen)
            again = time.monotonic() + REDRAW
        _draw(screen)
        for fd, event in poller.poll(1000 * max(0.0, again - time.monotonic())):
            if fd == wake:
                os.read(wake, 64)  # its size has changed
                continue
            typed = os.read(keys, 64).decode(errors="replace") if event & select.POLLIN else "q"
            if not all(_press(job, screen, key) for key in typed or "q"):
                return


def _ask(job: FoundJob, screen: Screen) -> None:
    try:
        it = answer(job, JobRequest("status"), StatusAnswer, PATIENCE)
        screen.status, screen.seconds, screen.note = msgspec.json.decode(it.status), it.seconds, ""
        after = screen.output[-1].number if screen.output else -OUTPUT // 10
        with contextlib.suppress(NotDone):  # a launcher that keeps none
            screen.output.extend(answer(job, JobRequest("output", (), after), OutputAnswer, PATIENCE).lines)
    except JobSocketError as e:
        if not os.path.exists(job.path):
            raise
        screen.note = str(e)


def _press(job: FoundJob, screen: Screen, key: str) -> bool:
    """Does what a key is for. Returns False for the end."""
    if screen.asks:
        screen.asks = False
        if key == "y" and screen.chosen is not None:
            with _noting(screen):
                answer(job, JobRequest("kill", (screen.chosen,)), Killed, PATIENCE)
        return True
    match key:
        case "q":
            return False
        case "n":
            screen.choose_next()
            screen.stack.clear()
            if screen.view == "stack":
                screen.view = "nodes"
        case "s":
            screen.sort = (screen.sort + 1) % len(SORTS)
        case "l":
            screen.view = "nodes" if screen.view == "output" else "output"
        case "p" if screen.view == "stack":
            screen.view = "nodes"
        case "p":
            screen.view = "stack"
            with _noting(screen):
                rank = -1 if screen.chosen is None else screen.chosen
                found = answer(job, JobRequest("stack", (rank,)), StackAnswer)
                screen.stack = [line for it in found.processes for line in (it.title, *it.text.splitlines())]
        case "k":
            screen.asks = screen.chosen is not None
            if screen.chosen is None:
                screen.note = "n chooses the node that is to be killed"
    return True


@contextlib.contextmanager
def _noting(screen: Screen) -> Iterator[None]:
    try:
        yield
    except (JobSocketError, NotDone) as e:
        screen.note = str(e)


def _draw(screen: Screen) -> None:
    width, height = os.get_terminal_size(1)
    drawn = [
        f"{style}{text}{_PLAIN if style else ''}{_REST}" for style, text in screen.lines(max(20, width), max(4, height))
    ]
    sys.stdout.write(_HOME + "\r\n".join(drawn) + _BELOW)
    sys.stdout.flush()


@contextlib.contextmanager
def _terminal() -> Iterator[tuple[int, int]]:
    """Has the terminal show another screen, without echo and line by line, in a ``with`` block; afterwards it is as it
    was, however the block ends. Yields its descriptor, and one that is readable when its size has changed."""
    before = termios.tcgetattr(0)
    changed, changes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    on_size = signal.signal(signal.SIGWINCH, lambda *_: None)
    on_end = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    wakeup = signal.set_wakeup_fd(changes, warn_on_full_buffer=False)
    try:
        now = termios.tcgetattr(0)
        now[3] &= ~(termios.ICANON | termios.ECHO)
        now[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave a terminal of this kind to the shell
        termios.tcsetattr(0, termios.TCSADRAIN, now)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        yield 0, changed
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, on_end)
        signal.signal(signal.SIGWINCH, on_size)
        os.close(changed)
        os.close(changes)
