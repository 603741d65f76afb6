"""What a timeline has of commands whose times alone were noted: found in the messages in which they have left."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from disttensor.runtime.master.failures import Site
from disttensor.runtime.master.looking_in import COMMANDS, CommandTimes, NodeEvent
from disttensor.runtime.process.observing import IssueNotes
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.seeing.recording import MOST_BYTES
from disttensor.seeing.timed_commands import (
    UNKNOWN,
    IssuedCommand,
    NamedCommands,
    SentMessage,
    issued_commands,
    node_events,
    to_keep,
)

CODE = compile("0", "train.py", "exec")
CALL = c.Call(1, 2, ())


def site(at: int) -> Site:
    """A site of a call's own, as each call has one."""
    return CODE, at


def sent(node: int, number: int, *commands: tuple[c.Command, Site | None]) -> SentMessage:
    message = codec.encode(c.Batch(number, tuple(command for command, _ in commands)))
    return SentMessage(0.0, node, number, [its for _, its in commands], message)


# ---- the script ------------------------------------------------------------------------------------------------------


def noted(
    *each: tuple[tuple[int, ...], int, list[Any]], lines: Sequence[tuple[float, Site | None, int]] = ()
) -> IssueNotes:
    """Notes of threads, for nodes each, and of some lines of node 1."""
    notes = IssueNotes(1000)
    notes.thread = 7
    for nodes, thread, pairs in each:
        notes.of(nodes, thread).extend(pairs)
    for at, its, thread in lines:
        notes.lines += (at, [its], (1,), thread)
    return notes


def test_a_note_belongs_to_what_its_call_has_issued() -> None:
    """Two calls of one line differ; a call may issue a command twice; a Free has none."""
    one, two, old = site(4), site(4), site(4)
    notes = noted(((1,), 7, [1.0, one]), ((1,), 8, [2.0, two]))
    message = sent(1, 0, (CALL, old), (c.Seed(3), one), (CALL, two), (c.Free(2, ()), None), (c.Seed(4), two))
    assert issued_commands(notes, [message]) == [
        IssuedCommand(0.5, (1,), "", c.Call, old, 7),
        IssuedCommand(1.0, (1,), "", c.Seed, one, 7),
        IssuedCommand(2.0, (1,), "", c.Call, two, 8),
        IssuedCommand(2.0, (1,), "", c.Seed, two, 8),
    ]


def test_notes_of_one_call_belong_to_its_commands_in_their_order() -> None:
    its = site(4)
    found = issued_commands(
        noted(((1,), 7, [1.0, its, 2.0, its])), [sent(1, 0, (c.Seed(3), its), (CALL, its), (c.Sync(4), its))]
    )
    assert [(each.at, each.kind) for each in found] == [(1.0, c.Seed), (2.0, c.Call), (2.0, c.Sync)]


def test_what_no_line_has_issued_leaves_in_its_order() -> None:
    notes = noted(((1,), 7, [1.0, None, 3.0, None]), ((0, 1), 7, [2.0, None]))
    message = sent(1, 0, (c.Seed(3), None), (CALL, None), (c.Free(2, ()), None), (c.Sync(4), None))
    found = issued_commands(notes, [message])
    assert [(each.at, each.kind) for each in found] == [(1.0, c.Seed), (2.0, c.Call), (3.0, c.Sync)]


def test_what_goes_to_several_nodes_is_issued_once() -> None:
    its, on_one = site(4), site(5)
    notes = noted(((0, 1), 7, [2.0, its]), ((1,), 7, [1.0, on_one]))
    messages = [sent(0, 0, (CALL, its)), sent(1, 0, (c.On(9, CALL), on_one), (CALL, its))]
    assert issued_commands(notes, messages) == [
        IssuedCommand(1.0, (1,), "9", c.Call, on_one, 7),
        IssuedCommand(2.0, (0, 1), "", c.Call, its, 7),
    ]


def test_what_has_not_left_is_issued_all_the_same() -> None:
    its = site(4)
    assert issued_commands(noted(((1,), 7, [1.0, its])), []) == [IssuedCommand(1.0, (1,), "", object, its, 7)]


def times(
    notes: IssueNotes, *messages: SentMessage, pauses: Sequence[tuple[int, float]] = ()
) -> list[tuple[float, int]]:
    """The times and threads of what was issued."""
    return [(each.at, each.thread) for each in issued_commands(notes, messages, pauses, began=8.0)]


def test_what_was_not_noted_was_issued_between_two_that_were() -> None:
    """The last ones before their message has left, which they did together; the first ones after the begin."""
    a, b = site(1), site(2)
    commands = [
        (CALL, site(3)),
        (CALL, a),
        (c.Free(2, ()), None),
        (CALL, site(3)),
        (CALL, None),
        (CALL, site(3)),
        (CALL, b),
    ]
    first = sent(1, 0, *commands, (CALL, site(3)))._replace(at=21.0)
    later = sent(1, 8, (CALL, site(3)))._replace(at=31.0)
    found = times(noted(lines=[(10.0, a, 7), (18.0, b, 7), (22.0, None, 7)]), first, later)
    assert found == [(at, 7) for at in (9.0, 10.0, 12.0, 14.0, 16.0, 18.0, 19.5, 26.0)]


def test_a_thread_issues_nothing_before_its_wait_has_ended() -> None:
    """Nor before a part with a name begins that it issues in; waits of others, and later ones, say nothing of it."""
    a, b = site(1), site(2)
    message = sent(1, 0, (CALL, a), (CALL, site(3)), (CALL, b))._replace(at=21.0)
    notes = noted(lines=[(10.0, a, 7), (18.0, b, 7)])
    assert times(notes, message, pauses=[(7, 12.0), (7, 16.0), (8, 17.0), (7, 19.0)]) == [
        (10.0, 7),
        (17.0, 7),
        (18.0, 7),
    ]


def test_what_was_not_noted_goes_to_several_nodes_once() -> None:
    """Commands of one call that differ, as those of a collective of a list, are several."""
    its = site(4)
    messages = [sent(node, 0, (CALL, its), (c.Seed(node), its))._replace(at=9.0 + node) for node in (0, 1)]
    found = issued_commands(noted(), messages, began=8.0)
    assert sorted((each.kind.__name__, each.nodes) for each in found) == [
        ("Call", (0, 1)),
        ("Seed", (0,)),
        ("Seed", (1,)),
    ]


def test_a_message_that_left_before_the_note_of_another_thread_has_that_thread() -> None:
    a, b = site(1), site(2)
    message = sent(1, 0, (CALL, site(3)), (CALL, a), (CALL, site(3)), (CALL, b), (CALL, site(3)))._replace(at=21.0)
    found = times(noted(lines=[(10.0, a, 7), (18.0, b, 9)]), message)
    assert [thread for _, thread in found] == [7, 7, 9, 9, 9]


def test_what_was_noted_of_messages_that_were_forgotten_is_forgotten() -> None:
    old, its = site(1), site(2)
    notes = noted(lines=[(10.0, old, 7), (12.0, its, 7)])
    assert [each.site for each in issued_commands(notes, [sent(1, 40, (CALL, its))._replace(at=13.0)])] == [its]


# ---- a node ----------------------------------------------------------------------------------------------------------


def test_events_have_the_names_and_lines_of_the_messages() -> None:
    its = site(4)
    define = c.Define(2, "aten::mm", (), (), 1)
    messages = [
        sent(1, 5, (CALL, its), (define, None), (c.On(9, c.Call(2, 2, ())), its)),
        sent(1, 9, (c.Run(1, b"f", b"", False, "f()"), its), (c.Ask(1, CALL), its)),
    ]
    named = NamedCommands(messages, {1: c.Define(1, "aten::add.Tensor", (), (), 1)})
    times = [
        CommandTimes(4, array("d", [1.0, 2.0, 3.0, 4.0]), False),
        CommandTimes(9, array("d", [5.0, 6.0, 7.0]), True),
    ]
    assert [*node_events(1, times, named)] == [
        NodeEvent(1, "done", 2.0, 1.0, "", 4, UNKNOWN, -1, -1, 0, False, None),
        NodeEvent(1, "done", 3.0, 2.0, "", 5, "aten::add.Tensor", -1, -1, 0, False, its),
        NodeEvent(1, "done", 4.0, 3.0, "", 6, "Define", -1, -1, 0, False, None),
        NodeEvent(1, "begun", 4.0, 4.0, "", 7, "aten::mm", -1, -1, 0, False, its),
        NodeEvent(1, "done", 6.0, 5.0, "", 9, "f()", -1, -1, 0, False, its),
        NodeEvent(1, "done", 7.0, 6.0, "", 10, "aten::add.Tensor", -1, -1, 0, False, its),
    ]
    assert [what for _, what, _ in named.of([8, 11])] == [UNKNOWN, UNKNOWN]


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_a_long_message_is_kept_without_its_data() -> None:
    recv, piece = c.Recv(1, 2, 0, (300, 300), 6, "cpu", 0), c.Piece(b"key", bytes(5000), True)
    free = c.Free(2, (1,) * 5000)
    whole = sent(1, 3, (recv, None), (piece, None), (free, None))
    kept = to_keep(whole)
    assert (kept.number, kept.sites, len(kept.message) < 100) == (3, whole.sites, True)
    assert codec.decode_batch(kept.message).commands == (recv, c.Piece(b"", b"", True), c.Free(2, ()))
    short = sent(1, 3, (recv, None))
    assert to_keep(short) is short


def test_a_million_commands_are_kept() -> None:
    ref = 1 << 31
    call = c.Call(1 << 15, ref, (4000, 8000, 0.5))
    message = sent(1, 1 << 40, *[(call, None)] * 128).message
    assert len(message) * COMMANDS // 128 <= MOST_BYTES
