"""Time limits: their order, and a row of docs/dev/time-limits.md for each that stands in the code."""

from __future__ import annotations

import ast
import math
import re
import socket
from contextlib import suppress
from datetime import timedelta

import pytest
from checkout import ROOT
from sources import agree, below, refuse

from disttensor.runtime.channel.base import ChannelContext
from disttensor.runtime.channel.tcp.dial import tune_after
from disttensor.runtime.channel.tcp.peer import Limits
from disttensor.runtime.host.silence import ABOVE, Silence
from disttensor.runtime.host.tcp_info import _MOST_BETWEEN_TRIES, LATE, _tries, lasting, most_between_tries
from disttensor.runtime.protocol import bundle
from disttensor.runtime.transport import sockets

SETTINGS = [Silence(), Silence(2, 4, 8), Silence(10, 200, 300), Silence(0.1, 0.2, 0.3)]


@pytest.mark.parametrize("silence", SETTINGS, ids=str)
def test_who_says_why_is_heard_before_others_give_up(silence: Silence) -> None:
    """A node is paused, then lost, and only then anything of its end gives up: its data connections, and itself."""
    assert silence.beat < silence.pause < silence.lost < silence.lease
    assert silence.lost + LATE < silence.data
    assert silence.lease + LATE < silence.of_nodes(True)
    assert silence.lost + LATE < silence.of_nodes(False)


@pytest.mark.parametrize("silence", SETTINGS, ids=str)
def test_the_kernel_gives_no_data_connection_up_before_its_node(silence: Silence) -> None:
    with socket.socket() as connection:
        tune_after(connection, silence.data)
        idle, interval, asked = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * asked >= min(silence.data, 127 * interval)
        assert idle + interval * asked < silence.data + idle + interval
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        with suppress(OSError):  # before 6.15 Linux lacks this option, and goes on for long
            most = connection.getsockopt(socket.IPPROTO_TCP, _MOST_BETWEEN_TRIES)
            assert most == most_between_tries(silence.data + LATE, _tries())


#: (milliseconds between two tries at most, seconds until Linux 6.18 has ended a connection of which nothing was
#: answered, with 15 tries): as measured.
MEASURED = [(1000, 14.98), (1500, 21.34), (2000, 27.52), (3000, 40.16), (5000, 62.95)]


@pytest.mark.parametrize(("most", "seconds"), MEASURED)
def test_the_kernels_tries_last_as_long_as_is_computed(most: int, seconds: float) -> None:
    assert seconds - 2 < lasting(most, 15) < seconds


@pytest.mark.parametrize("tries", [15, 8, 30, 1])
@pytest.mark.parametrize("silence", SETTINGS, ids=str)
def test_the_kernels_tries_do_not_end_before_the_silence_is_counted(silence: Silence, tries: int) -> None:
    """It ends a connection with bytes under way after so many tries: none may end before that is said to be why."""
    for limit in (silence.lost, silence.data):
        most = most_between_tries(limit + LATE, tries)
        assert lasting(most, tries) > limit + LATE or most == 120_000
        assert most == 1000 or lasting(most - 1000, tries) <= limit + LATE, "as often as that allows"


@pytest.mark.parametrize("silence", SETTINGS, ids=str)
def test_the_kernel_gives_no_silent_connection_of_a_node_up_before_its_limit(silence: Silence) -> None:
    """The network may have gone right before the first probe: what was heard last was heard ``idle`` seconds before."""
    with sockets.context() as context:
        router = sockets.router(context, "tcp://127.0.0.1", None, silence=silence.lost)
        dealer = sockets.dealer(context, "tcp://127.0.0.1", None, b"name", silence.lost)
        for sock in (router, dealer):
            idle, asked = sock.TCP_KEEPALIVE_IDLE, sock.TCP_KEEPALIVE_INTVL * sock.TCP_KEEPALIVE_CNT
            assert silence.lost <= asked < silence.lost + sock.TCP_KEEPALIVE_INTVL
            assert idle + asked < silence.data
        assert 1000 * (silence.lost + dealer.TCP_KEEPALIVE_IDLE) <= dealer.TCP_MAXRT
        router.close()
        dealer.close()


def test_defaults_that_stand_elsewhere_are_those_of_the_table() -> None:
    default = Silence()
    assert bundle.Bundle("job", 0, "tcp://127.0.0.1:1").silence == sockets.SILENCE == default.lost
    assert bundle.Bundle("job", 0, "tcp://127.0.0.1:1").data_silence == default.data
    assert ChannelContext(0, "job", "127.0.0.1").silence == Limits().silent == default.data
    assert math.isclose(ABOVE, default.data - default.lost)


# ---- the table -------------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "dev" / "time-limits.md"
#: What a comment says of a number that is a time.
TIME = re.compile(r"\b(?:milli)?seconds?\b|\bminutes?\b|\b\d+ s\b", re.IGNORECASE)
#: From when on a time counts.
KINDS = {"look", "says", "end", "start", "progress"}

#: Numbers whose comments speak of times and that are none.
NO_TIMES = {
    "disttensor/collectives/issue.py:SMALL",
    "disttensor/startup/notebook.py:STILL",
    "runtime/channel/tcp/handshake.py:TAKEN",
    "runtime/channel/tcp/listener.py:_PENDING",
    "runtime/node/graphs/engines/child.py:LONG",
    "runtime/node/graphs/interpreter.py:PIECE",
}


def value(node: ast.expr) -> tuple[float, ...]:
    """The numbers of a literal; () where it is anything else."""
    match node:
        case ast.Tuple():
            parts = [value(part) for part in node.elts]
            return tuple(n for part in parts for n in part) if all(parts) else ()
        case ast.Call(func=ast.Name(id="timedelta")):
            try:
                return (eval(ast.unparse(node), {"timedelta": timedelta}).total_seconds(),)
            except NameError:
                return ()
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return (number,)
        case ast.BinOp(left=left, right=right) if value(left) and value(right):
            return (eval(ast.unparse(node)),)
        case ast.Call(func=ast.Name(id="float")):
            return ()
    return ()


def comment(lines: list[str], line: int) -> str:
    """The comment above a line, and the one that ends it."""
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join([*lines[first:line], lines[line].partition("#")[2]])


def times() -> dict[str, tuple[float, ...]]:
    """All numbers of modules and classes whose comments say that they are times, as "file:NAME"."""
    found: dict[str, tuple[float, ...]] = {}
    for file in below("runtime", "disttensor"):
        classes = [node for node in file.tree.body if isinstance(node, ast.ClassDef)]
        bodies = [("", file.tree.body), *((ast.get_docstring(node) or "", node.body) for node in classes)]
        for said, node in [(said, each) for said, body in bodies for each in body]:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                numbers, name = value(node.value), file.name + ":" + ast.unparse(target).strip("()")
                told = said + comment(file.lines, node.lineno - 1)
                is_time = TIME.search(told) or "timedelta" in ast.unparse(node.value)
                if any(numbers) and is_time and name not in NO_TIMES:
                    found[name] = numbers
    return found


def rows() -> dict[str, tuple[str, str]]:
    """The value and the kind of each row of the page."""
    table = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (\w+) \| \S", PAGE.read_text(), re.MULTILINE)
    return {name: (number.strip(), kind) for name, number, kind in table}


def test_each_time_that_stands_in_the_code_has_a_row() -> None:
    """With its value, and with when it begins to count: a limit from the start is too short on some busy machine."""
    code, page = times(), rows()
    assert len(code) > 60
    there = (f"{name} = {spoken(numbers)}" for name, numbers in code.items())
    agree(there, (f"{name} = {number}" for name, (number, _) in page.items()), f"{PAGE.name} has a row for each time")


def test_each_row_says_from_when_on_its_time_counts() -> None:
    strange = (f"{name}: {kind}" for name, (_, kind) in rows().items() if kind not in KINDS)
    refuse(strange, f"a row's kind is one of {', '.join(sorted(KINDS))}")


def spoken(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#: Seconds.\nX = 3.0", (3.0,)),
        ("#: It is\n#: two minutes.\nX, Y = 2, 60 * 2", (2, 120)),
        ("X = 3  #: a count", ()),
    ],
)
def test_the_scan(line: str, expected: tuple[float, ...]) -> None:
    """It finds what it is for, and nothing else."""
    lines, node = line.splitlines(), ast.parse(line).body[-1]
    assert isinstance(node, ast.Assign)
    numbers = value(node.value) if TIME.search(comment(lines, node.lineno - 1)) else ()
    assert numbers == expected
