"""The watch for nodes that are slow beside the others of their mesh: the log names each once, a status shows them.

    the thread that flushes --> SlowWatch.look --glance--> nodes   every WINDOW seconds, while a mesh has work
                                           --> MeshWatch.look      who is slow, and why (slow.py)
                                               a thread            once one is slow: what takes it so long; the warning

Only for the line of the script every command of a node is looked at: for a second, of the slow one and of a usual one.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from statistics import median
from typing import NamedTuple

from ..runtime.master.connection import Life
from ..runtime.master.failures import short_line
from ..runtime.master.looking_in import NodeEvent
from ..runtime.master.node import Node
from ..runtime.node.collectives import RUNNERS
from ..runtime.process.page import COLLECTIVE, IDLE
from ..runtime.protocol import codec
from ..runtime.protocol.errors import DisttensorError
from ..session.session import Session
from .slow import WINDOW, MeshWatch, NodeLook, Slow
from .status import SlowStatus
from .watch_place import WatchPlace

#: Seconds between two looks whether the glances of nodes have come, and after which the others are not waited for.
LOOK, SEEN = 0.05, 1.0
#: Seconds after which a node that is slow again is told of again.
AGAIN = 600.0
#: Seconds for which the commands of a slow node are looked at, and in which it then answers.
WATCHED, ANSWER = 1.0, 2.0
#: The most events of a node that are kept meanwhile.
ROOM = 8192
#: The last commands by which two nodes are compared, and the share of them that is to be the same.
COMPARED, SAME = 500, 0.8
#: Seconds by which a command takes longer than usual that has stood still.
STOOD = 0.01
#: Seconds that a session's end waits for the thread.
_JOIN = 5.0

_log = logging.getLogger("disttensor")


class Longest(NamedTuple):
    """The command of a slow node that has taken most of the time by which it is behind."""

    line: str  #: such as "train.py:33"; "" where no line is known
    what: str  #: such as "aten::mm"
    stood: float  #: the seconds of the longest, where single ones stood still; else 0


class SlowNodes:
    """The nodes of one session that are slow, as they were seen last."""

    def __init__(self) -> None:
        self.rows: tuple[SlowStatus, ...] = ()


class SlowWatch:
    """The watch over the meshes of one session."""

    def __init__(self, session: Session, find: Callable[[Session, Slow], Longest | None] | None = None) -> None:
        """``find``: what takes a slow node so long, compared with a usual one."""
        self._session, self._clock = session, session.link.clock
        self._find = self._longest if find is None else find
        self._meshes: dict[tuple[int, ...], MeshWatch] = {}
        self._sent: dict[int, int] = {}  #: how many commands each node had been sent at the last glances
        self._looked = 0.0  #: when it was looked whether there is something to do
        self._asked = self._taken = 0.0  #: when glances were asked for, and those that were taken had been
        self._glanced: list[Node] = []  #: the nodes whose glances were asked for
        self._told: dict[int, float] = {}  #: by rank: when it was told of
        self._found: dict[int, Longest | None] = {}  #: of those that are slow
        self._where: dict[int, str] = {}  #: by rank: its coordinates
        self._ended, self._wanted = threading.Event(), threading.Event()  #: the latter ends the look at commands
        self._thread: threading.Thread | None = None
        self._off = False

    def look(self) -> None:
        """Looks at the nodes of meshes, if it is time for that. To be called again and again; raises nothing."""
        if self._off:
            return
        try:
            now = self._clock.now()
            if now - self._looked < LOOK:
                return
            self._looked = now
            if self._asked > self._taken:
                if now - self._asked >= SEEN or all(node.connection.seen_at >= self._asked for node in self._glanced):
                    self._taken = self._asked
                    self._compare()
            elif now - self._asked >= WINDOW:
                self._ask(now)
        except Exception:  # an error of this watch does not stop the job
            self._off = True
            _log.warning("slow nodes are not told of any more", exc_info=True)

    def end(self) -> None:
        """Ends the watch, with the session."""
        self._off = True
        self._ended.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def _ask(self, now: float) -> None:
        """Asks for a glance at each node of a mesh, unless none has had anything to do."""
        losses, ranks = self._session.link.losses, [rank for mesh in self._ranks() for rank in mesh]
        if not ranks or not losses.sees:
            return
        self._asked = now
        nodes = [self._session.nodes[rank] for rank in ranks]
        sent = {node.rank: node.outbox.sent for node in nodes}
        at_rest = sent == self._sent and all(node.outbox.idle for node in nodes)
        self._sent = sent
        if at_rest:
            self._taken = now
            for mesh in self._meshes.values():
                mesh.rest()
            return
        self._glanced = [node for node in nodes if node.life is Life.THERE]
        for node in self._glanced:
            losses.glance(node)

    def _ranks(self) -> Iterator[tuple[int, ...]]:
        """Yields the nodes of the largest meshes."""
        covered: set[int] = set()
        for place in sorted(self._session.places.meshes, key=lambda place: -len(place.ranks)):
            if len(place.ranks) > 1 and not covered & {*place.ranks}:
                covered.update(place.ranks)
                self._where.update((rank, place.where(i)) for i, rank in enumerate(place.ranks))
                yield tuple(place.ranks)

    def _compare(self) -> None:
        found: list[Slow] = []
        meshes = {ranks: self._meshes.get(ranks) or MeshWatch(ranks) for ranks in self._ranks()}
        self._meshes = meshes
        for ranks, mesh in meshes.items():
            nodes = [self._session.nodes[rank] for rank in ranks]
            seen = {
                node.rank: NodeLook(at.seen.use, node.outbox.sent)
                for node in nodes
                if (at := node.connection).seen is not None and at.seen_at >= self._asked and node.life is Life.THERE
            }
            found += [it for it in mesh.look(seen) if self._same_work(it)]
        for rank in self._found.keys() - {it.rank for it in found}:
            del self._found[rank]
        self._session.part(SlowNodes).rows = tuple(self._row(it) for it in found)
        for it in found:
            is_explaining = self._thread is not None and self._thread.is_alive()
            if it.rank not in self._found and not is_explaining:
                self._found[it.rank] = None
                thread = threading.Thread(target=self._explain, args=(it,), name="disttensor-slow", daemon=True)
                thread.start()
                self._thread = thread

    def _same_work(self, it: Slow) -> bool:
        """Returns whether a node does what the usual one does, as far as that is seen of their last commands."""
        if it.rank in self._found:
            return True
        mine, usual = (self._done_by(self._session.nodes[rank]) for rank in (it.rank, it.peer))
        return sum((mine & usual).values()) >= SAME * max(mine.total(), usual.total()) and _runs(mine) == _runs(usual)

    def _done_by(self, node: Node) -> Counter[tuple[bool, str]]:
        with self._session.link.lock:
            return Counter((each.runs, each.operator) for each in node.last_commands(COMPARED))

    def _row(self, it: Slow) -> SlowStatus:
        hello, longest = self._session.nodes[it.rank].said_hello, self._found.get(it.rank)
        line, what, stood = longest or Longest("", "", 0.0)
        cause = it.cause or (f"stalls of {1000 * stood:.0f} ms" if stood else "its commands take longer")
        return SlowStatus(
            it.rank, self._where[it.rank], "" if hello is None else hello.host, it.behind, cause, line, what
        )

    def _explain(self, it: Slow) -> None:
        """Finds what takes a node so long, and tells."""
        longest = None
        try:
            longest = self._find(self._session, it)
        except Exception:  # a node that can't answer is slow all the same
            _log.debug("what takes node %d so long is not known", it.rank, exc_info=True)
        if self._ended.is_set():
            return
        self._found[it.rank] = longest
        row, now = self._row(it), self._clock.now()
        held = self._session.part(SlowNodes)
        held.rows = tuple(row if each.node == it.rank else each for each in held.rows)
        if now - self._told.get(it.rank, -AGAIN) >= AGAIN:
            self._told[it.rank] = now
            _log.warning("%s", row)

    def _longest(self, session: Session, it: Slow) -> Longest | None:
        looking, rank, peer = session.link.looking, it.rank, it.peer
        if it.measure == "sends" and (within := self._collective_of(session.nodes[rank])) is not None:
            return within
        with session.part(WatchPlace).borrow() as wanted:
            if wanted is None:  # a profile is recorded
                return None
            try:
                self._wanted = wanted
                looking.watch([rank, peer], ["commands"], ROOM)
                if self._ended.is_set() or wanted.wait(WATCHED):
                    return None
                mine, usual = (looking.fetch(each, ANSWER).events for each in (rank, peer))
            except (DisttensorError, TimeoutError):  # who is without a core may not get to answer
                mine = usual = ()
            finally:
                with suppress(DisttensorError):
                    looking.watch([rank, peer], [])
        # who sends slowly does so in collectives, of which the others' parts take as long
        found = longest_of(mine, usual) if it.measure == "work" else longest_of(mine, (), joint=True)
        longest = None if found is None else self._longest_ended(session.nodes[rank], *found)
        if (
            longest is None or not longest.line
        ):  # it has ended none of a line's in that time: what it is at takes longest
            return self._under_way(session.nodes[rank]) or longest
        return longest

    def _longest_ended(self, node: Node, event: NodeEvent, stood: float) -> Longest:
        site = event.site
        if site is None:
            with self._session.link.lock:
                sent = node.command(event.number)
            site = None if sent is None else sent.site
        return Longest(short_line(site), codec.one_line(event.what), stood)

    def _collective_of(self, node: Node) -> Longest | None:
        """Returns the collective that a node is in, as seen from outside; None where it is in none."""
        with self._session.link.lock:
            seen = node.connection.seen
            sent = node.command(seen.seq) if seen is not None and seen.kind == COLLECTIVE else None
        return None if sent is None else Longest(short_line(sent.site), codec.one_line(sent.operator), 0.0)

    def _under_way(self, node: Node) -> Longest | None:
        """Returns the first command of a line's that a node is not known to have done; None where it has done all."""
        with self._session.link.lock:
            seen, first = node.connection.seen, node.outbox.done
            if seen is not None and seen.kind != IDLE:
                first = max(first, seen.seq)
            # operations are seen by the message that they have come in, which may begin with what no line has issued
            sent = next((it for it in map(node.command, count(first)) if it is None or it.site is not None), None)
        return None if sent is None else Longest(short_line(sent.site), codec.one_line(sent.operator), 0.0)


def _runs(done: Counter[tuple[bool, str]]) -> int:
    """Returns how many functions of the user's are among these commands."""
    return sum(n for (runs, _), n in done.items() if runs)


def longest_of(
    slow: Sequence[NodeEvent], usual: Sequence[NodeEvent], joint: bool = False
) -> tuple[NodeEvent, float] | None:
    """Returns the command of a slow node that has taken most of the time by which it is behind, and for how many
    seconds it stood still, if that is why; 0 if not. None where none is known.

    Of commands that other nodes take part in it is not known who has made them long: those are looked at alone, where
    they are ``joint``, or not at all.
    """
    mine, theirs = _by_command(slow, joint), _by_command(usual, joint)
    if not mine:
        return None
    more = {key: sum(map(_seconds, its)) - sum(map(_seconds, theirs.get(key, ()))) for key, its in mine.items()}
    middle = {key: median(map(_seconds, theirs.get(key, its))) for key, its in mine.items()}
    # what it is behind by is each command's, or that of a few which took far longer than the others
    by_each = sum(len(its) * max(0.0, median(map(_seconds, its)) - middle[key]) for key, its in mine.items())
    key, longest = max(
        ((key, max(its, key=_seconds)) for key, its in mine.items()), key=lambda it: _seconds(it[1]) - middle[it[0]]
    )
    stood = _seconds(longest) - middle[key]
    if not joint and stood >= STOOD and by_each < sum(max(0.0, each) for each in more.values()) / 2:
        return longest, stood
    return max(mine[max(more, key=lambda it: more[it])], key=_seconds), 0.0


def _by_command(events: Sequence[NodeEvent], joint: bool) -> dict[tuple[object, str], list[NodeEvent]]:
    done = [each for each in events if each.kind == "done" and (each.what in RUNNERS) == joint]
    found: dict[tuple[object, str], list[NodeEvent]] = {}
    for event in [each for each in done if each.site is not None] or done:  # what no line has issued serves those
        found.setdefault((event.site, event.what), []).append(event)
    return found


def _seconds(event: NodeEvent) -> float:
    return max(0.0, event.at - event.began)


def watch_for_slow_nodes(session: Session) -> None:
    """Has slow nodes of a session's meshes be told of, from now until the session's end."""
    watch = SlowWatch(session)
    session.link.idle.looks.append(watch.look)
    session.changes.callback(watch.end)
