"""The last commands that a node was sent: how many are kept, in which memory, and what is said of them."""

from __future__ import annotations

import tracemalloc

import pytest

from disttensor.runtime.master import command_queue
from disttensor.runtime.master.history import KEPT, SHOWN
from disttensor.runtime.master.node import Node
from disttensor.runtime.protocol import commands as c


def issue(node: Node, *commands: c.Command, sites: bool = True) -> None:
    """Issues commands at the line of this function, and sends them in one message."""
    for command in commands:
        node.outbox.add(command, (issue.__code__, 0) if sites else None)
    node.outbox.pack()
    node.outbox.ready.clear()


HERE = f"{__file__}:{issue.__code__.co_firstlineno} in issue"


def run(request: int, what: str = "f()") -> c.Run:
    return c.Run(request, b"", b"", True, what)


def kept(node: Node) -> int:
    """The bytes of the messages that are kept."""
    return sum(len(message) for *_, message in [*node.outbox._past, *node.outbox._flight])


def told(node: Node) -> list[str]:
    return [str(sent) for sent in node.last_commands()]


@pytest.mark.parametrize("size", [1, 7, command_queue.MAX_BATCH])
def test_the_last_commands_are_kept(size: int) -> None:
    node, count = Node(0), 0
    while count < 3 * KEPT:
        issue(node, *(c.Call(1, n, ()) for n in range(count, count + size)))
        count += size
        node.outbox.acknowledge(count)
    sent = node.last_commands(10**6)
    assert KEPT <= len(sent) < KEPT + size
    assert [each.number for each in sent] == list(range(count - len(sent), count))
    assert [each.number for each in node.last_commands(3)] == [count - 3, count - 2, count - 1]
    assert node.last_commands(0) == []


def test_their_memory_is_bounded() -> None:
    """Whatever functions and states a node is sent."""
    ordinary, loaded = Node(0), Node(1)
    for _ in range(64):
        issue(ordinary, *(c.Call(1, 1 << 30, (1, 2, 0.5)) for _ in range(128)))
        ordinary.outbox.acknowledge(ordinary.outbox.sent)
    assert kept(ordinary) < 24 * (KEPT + 128)
    for n in range(2 * KEPT):
        issue(loaded, [c.Piece(b"k" * 16, bytes(100_000), True), c.Random(n, "cpu", bytes(5_000)), run(n)][n % 3])
        loaded.outbox.acknowledge(n // 2 * 2)  # some of them are in flight
    assert kept(loaded) < 640 * KEPT
    assert [text.split()[3].strip(",") for text in told(loaded)[-4:]] == ["Piece", "Random", "f()", "Piece"]


def test_of_an_upload_the_size_is_kept_and_not_the_bytes() -> None:
    """The commands beside it are as they were, unless one of them is long, too."""
    for beside, kept_beside in (
        (c.Call(1, 5, (2,)), c.Call(1, 5, (2,))),
        (c.Run(4, b"", bytes(5000), True, "f()"), run(4)),
    ):
        node = Node(0)
        issue(node, c.Upload(9, (50, 20), 0, "cpu", bytes(4000)), beside)
        node.outbox.acknowledge(1)
        (_, them), *_ = node.outbox.last_messages()
        assert [command for command, _ in them] == [c.Upload(9, (50, 20), 0, "cpu", b""), kept_beside]


def test_what_is_said_of_each() -> None:
    node = Node(3)
    number = node.define("aten::mul.Tensor", (), (), 1, (issue.__code__, 0))
    issue(node, c.Call(number, 5, ()), c.Call(number + 1, 5, ()))
    issue(
        node,
        c.On(9, run(4)),
        c.Collective("all_reduce", 0, c.RankList(()), (), (), (), 0, 0, 0, "", 0, 0, 0, c.RankList(()), 0),
    )
    issue(node, c.Free(5, ()), sites=False)
    node.outbox.acknowledge(2)
    assert told(node) == [
        f"0 on node:3: the definition of aten::mul.Tensor, issued at {HERE} (done)",
        f"1 on node:3: aten::mul.Tensor, issued at {HERE} (done)",
        f"2 on node:3: template {number + 1}, issued at {HERE}",
        f"3 on a stream of node:3: f(), issued at {HERE}",
        f"4 on node:3: all_reduce, issued at {HERE}",
        "5 on node:3: Free",
    ]


def test_templates_that_were_dropped() -> None:
    node = Node(0)
    number = node.define("aten::mul.Tensor", (), (), 1, None)
    issue(node, c.Call(number, 5, ()))
    node.start_generation()
    node.start_generation()
    assert f"1 on node:0: template {number}, issued at {HERE}" in told(node)


@pytest.mark.parametrize("left", [0, 1])
def test_what_never_left_is_not_among_them(left: int) -> None:
    node = Node(0)
    issue(node, *[run(1)] * left)
    node.outbox.add(run(2), (issue.__code__, 0))
    node.outbox.pack()  # and the connection has ended
    doing, commands = node.last_words()
    assert doing == (f"; not known to be done: f(), issued at {HERE}" if left else "")
    assert commands == (f"0 on node:0: f(), issued at {HERE}",) * left


CALLS = [c.Call(1, n, ()) for n in range(3)]
MUL = f"template 1, issued at {HERE}"


@pytest.mark.parametrize(
    ("commands", "done", "running", "says"),
    [
        ([], 0, -1, ""),
        (CALLS, 3, -1, ""),
        (CALLS, 2, -1, f"; not known to be done: {MUL}"),
        (CALLS, 0, -1, f"; not known to be done: 3 commands, the first of them {MUL}"),
        ([*CALLS, run(8)], 3, -1, f"; not known to be done: f(), issued at {HERE}"),
        ([*CALLS, run(8)], 2, -1, f"; not known to be done: f(), issued at {HERE}, and 1 other command"),
        ([*CALLS, run(8)], 0, -1, f"; not known to be done: f(), issued at {HERE}, and 3 other commands"),
        ([c.Piece(b"", b"", True), run(8), c.Adopt(8, ())], 0, -1, f"; not known to be done: f(), issued at {HERE}"),
        (
            [run(8), run(9, "g()")],
            0,
            -1,
            f"; not known to be done: 2 commands, the first of them f(), issued at {HERE}",
        ),
        ([*CALLS, run(8)], 0, 3, f" while it ran f(), issued at {HERE}"),
        ([run(8), run(9, "g()")], 0, 1, f" while it ran g(), issued at {HERE}"),
        # what a node says need not be true
        (CALLS, 2, 1, f"; not known to be done: {MUL}"),
        (CALLS, 2, 10**12, f"; not known to be done: {MUL}"),
        ([run(8)], 1, 0, ""),
    ],
)
def test_what_a_node_was_doing(commands: list[c.Command], done: int, running: int, says: str) -> None:
    node = Node(0)
    issue(node, *commands)
    issue(node, c.Free(5, ()), sites=False)
    node.outbox.acknowledge(done)
    assert node.last_words(running)[0] == says


def test_functions_on_streams_are_named_however_far_others_are() -> None:
    """What comes behind them may be done. A node may name what it was never sent."""
    node = Node(0)
    issue(node, *(c.On(2, run(n, f"{'fghi'[n]}()")) for n in range(4)), *CALLS * 20)
    node.outbox.acknowledge(50)
    assert node.last_words(-1, (1, 10**12))[0] == f" while it ran g(), issued at {HERE}"
    assert node.last_words(5, (0, 1))[0] == f" while it ran f(), issued at {HERE}; g(), issued at {HERE}"
    assert node.last_words(-1, range(4))[0].endswith(f"; h(), issued at {HERE}, and 1 other function")


def test_all_that_is_in_flight_is_known() -> None:
    node = Node(0)
    node.outbox.add(CALLS[0], (run.__code__, 0))
    for n in range(KEPT + 1):
        issue(node, c.Call(1, n, ()))
    first = f"{__file__}:{run.__code__.co_firstlineno} in run"
    assert (
        node.last_words()[0]
        == f"; not known to be done: {KEPT + 2} commands, the first of them template 1, issued at {first}"
    )
    node.outbox.acknowledge(2)
    assert node.last_words()[0] == f"; not known to be done: {KEPT} commands, the first of them {MUL}"


def test_what_was_answered_is_done() -> None:
    node = Node(0)
    issue(node, c.Ask(6, CALLS[0]), c.Ask(7, CALLS[0]))
    node.outbox.acknowledge(1)
    node.connection.answered = 7
    assert node.last_words()[0] == ""


def test_the_error_has_the_last_of_those_that_lines_have_issued() -> None:
    node = Node(0)
    issue(node, *(c.Call(1, n, ()) for n in range(2 * SHOWN)))
    issue(node, c.Free(5, ()), c.Lost(1, "gone"), sites=False)
    assert [int(text.split()[0]) for text in node.last_words()[1]] == list(range(SHOWN, 2 * SHOWN))


def test_what_is_kept_is_small() -> None:
    """A hundred bytes for a Call, most of them those of its site."""
    node = Node(0)
    issue(node, *CALLS)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    for _ in range(KEPT // 4):
        issue(node, *(c.Call(1, 1 << 30, (n, 2)) for n in range(8)))
        node.outbox.acknowledge(node.outbox.sent)
    grown = sum(stat.size_diff for stat in tracemalloc.take_snapshot().compare_to(before, "filename"))
    tracemalloc.stop()
    assert grown < 150 * KEPT


def test_the_lines_that_made_tensors() -> None:
    """Of whatever makes some: an operator, a function, what keeps a generator's state; on a stream, too."""
    node = Node(0)
    number = node.define("aten::split.Tensor", (c.Hole(True), c.Hole(False)), (), 3, (issue.__code__, 0))
    writes = node.define("aten::add_.Tensor", (c.Hole(True), c.Hole(True)), (), 0, (issue.__code__, 0))
    call = c.Call(number, 20, (1, -1, -2, -3))  # of 19 in pieces of -1, to 20, 22 and 23
    issue(node, call, c.Call(writes, 30, (1, 2)), c.Ask(1, c.Call(number + 9, 40, ())))
    issue(node, c.Run(2, b"", b"", True, "f()", refs=(20, 22), outs=(50, 51), token=52))
    issue(node, c.On(7, c.Run(3, b"", b"", True, "f()", outs=(53,))), c.Keep(54, "cpu", False), c.Keep(55, "cpu", True))
    issue(node, c.Recv(0, 56, 1, (), 0, "cpu"), c.Run(4, b"", b"", True, "f()"), c.Adopt(4, (57, 0, 58)))
    issue(
        node, c.Collective("all_reduce", 0, c.RankList(()), (59,), (59,), (), 0, 0, 0, "", 0, 0, 0, c.RankList(()), 0)
    )
    assert sorted(node.makers(range(70))) == [20, 22, 23, 40, 50, 51, 52, 53, 54, 56, 57, 58]
    assert node.makers([51, 54, 99]) == {51: (issue.__code__, 0), 54: (issue.__code__, 0)}
    issue(node, c.Keep(60, "cpu", False), sites=False)
    assert node.makers([60]) == {}
