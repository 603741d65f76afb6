"""Checks what agents say, before the root uses any of it: an agent speaks for its own nodes only.

A joined agent holds the key that all joined hosts share, and any agent may be broken. What it says wrongly is a
ProtocolError, by which its host is lost and no other. Kinds of news that no agent sends are none of ``AgentNews``, so
they are not even decoded; what passes here is about nodes of that branch, in an order that is possible, and bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ...host.output_options import STREAMS
from ...process.flight import MOST
from ...protocol.errors import ProtocolError
from ..output.lines import LONG, TAIL_LINES, TAIL_WIDTH, plain
from .control import (
    CREDIT,
    AgentHello,
    AgentNews,
    Beat,
    Began,
    Ended,
    Flushed,
    LaunchFailed,
    NodeOutput,
    Ready,
    Seen,
    SessionEnded,
)
from .dealing import RankAssignment
from .host_starter import Branch

#: The most nodes of one agent, and the most cores or GPUs of one host.
NODES, CORES = 4096, 1 << 16
#: The most packages of which an agent tells the version.
PACKAGES = 64
#: No rank is as high.
RANKS = 1 << 24
#: No process has a higher number, whatever the kernel's settings (PID_MAX_LIMIT).
PIDS = 1 << 22
#: The most characters of a host's name (as in DNS), of a version, of a reason, and of the stacks of a node.
NAME, VERSION, REASON, STACK = 255, 100, 4000, 16 << 10
#: The most bytes of a node's output that its fork server sends beyond the window: what is left of its two streams at
#: its end, or asked for by a Flush (`Source.close`, `Server._flush`); and as much again.
LAST = 2 * 2 * 80 * LONG


def check_news(
    branch: Branch,
    news: AgentNews,
    seats: RankAssignment,
    flushing: Mapping[int, Collection[Branch]],
    ending: Collection[Branch],
) -> AgentNews:
    """Returns the news of a branch's agent as the root may use it: with texts that do nothing to a terminal.

    Args:
        branch: who says it.
        news: what is said.
        seats: which nodes are whose.
        flushing: by the id of a Flush, the branches that have not answered it yet.
        ending: the branches that are to end the session, and have not yet.

    Raises ProtocolError for what this agent cannot truly say now.
    """
    if isinstance(news, AgentHello):
        if branch.agent_hello is not None:
            raise ProtocolError("a second hello")
        _check_hello(news)
        return news
    kind = type(news).__name__
    if branch.agent_hello is None:
        raise ProtocolError(f"{kind} before a hello")
    if isinstance(news, NodeOutput | Began | Ended | Seen) and seats.branch_of(news.rank) is not branch:
        raise ProtocolError(f"{kind} of node {news.rank}, which is not one of its own")
    if isinstance(news, Ended | Seen) and len(news.flight) > MOST:
        raise ProtocolError(f"a flight record of {len(news.flight)} bytes of node {news.rank}: at most {MOST}")
    match news:
        case NodeOutput() if news.fd not in STREAMS:
            raise ProtocolError(
                f"output of node {news.rank} to stream {news.fd}; there are {', '.join(map(str, STREAMS))}"
            )
        case NodeOutput() if branch.owed > CREDIT:
            most = CREDIT + len(seats.of(branch)) * LAST
            if branch.owed + len(news.data) > most:
                raise ProtocolError(f"more than {most} bytes of output before the root has taken any")
        case Began() if news.rank in seats.pids:
            raise ProtocolError(f"node {news.rank} has begun twice")
        case Began():
            _check("pid", news.pid, 1, PIDS)
        case Ended():
            if news.pid != seats.pids.get(news.rank, 0):
                raise ProtocolError(f"the end of process {news.pid}, which is not that of node {news.rank}")
            _check("exit code", news.code, -128, 255)
            return msgspec.structs.replace(news, cause=plain(news.cause, REASON), tail=_tail(news.tail))
        case Beat() if not branch.beats:
            raise ProtocolError("a beat that answers none")
        case Seen() if branch.looks[news.rank] <= 0:
            raise ProtocolError(f"the sight of node {news.rank}, which it was not asked for")
        case Seen():
            if len(news.state) != 1 or not news.state.isascii() or not news.state.isprintable():
                raise ProtocolError(f"the state {news.state[:100]!a} of a process")
            lines = news.stack[:STACK].splitlines()
            stack, last = "\n".join(plain(line, TAIL_WIDTH) for line in lines), plain(news.last_line, TAIL_WIDTH)
            return msgspec.structs.replace(news, stack=stack, last_line=last)
        case LaunchFailed():
            return LaunchFailed(plain(news.why, REASON), _tail(news.tail))
        case Ready() if branch.ready:
            raise ProtocolError("a fork server that is ready twice")
        case SessionEnded() if branch not in ending:
            raise ProtocolError("the end of a session that was not to end")
        case Flushed() if branch not in flushing.get(news.id, ()):
            raise ProtocolError(f"an answer to Flush {news.id}, which it was not asked, or has answered")
    return news


def _check_hello(hello: AgentHello) -> None:
    """Checks what agents of all versions say of themselves."""
    for name, text, most in (
        ("host", hello.host, NAME), ("version", hello.version, VERSION), ("python", hello.python, VERSION),
        ("executable", hello.executable, REASON), *(("a package", p, VERSION) for p in hello.packages),
        *((package, version, VERSION) for package, version in hello.packages.items()),
    ):  # fmt: skip
        if len(text) > most or not text.isprintable():
            raise ProtocolError(f"{name}={text[:100]!a} of {len(text)} characters: at most {most}, all printable")
    _check("packages", len(hello.packages), 0, PACKAGES)
    _check("pid", hello.pid, 1, PIDS)
    _check("slots", hello.slots, 0, NODES)
    _check("first_rank", hello.first_rank, -1, RANKS)
    _check("local_rank", hello.local_rank, -1, NODES)
    _check("local_size", hello.local_size, 0, NODES)
    _check("cores", hello.cores, 0, CORES)
    _check("gpus", hello.gpus, 0, CORES)


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ProtocolError(f"{name}={value}; it is {least} to {most}")


def _tail(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(plain(line, TAIL_WIDTH) for line in lines[-TAIL_LINES:])
