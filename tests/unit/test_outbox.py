"""The queue of one node: order, frees after uses, message sizes, the window. No sockets, no threads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttensor.runtime.master import command_queue, outbox
from disttensor.runtime.master.outbox import Outbox
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import DisttensorError, NodeLost


def sent(messages: list[bytes]) -> list[c.Command]:
    """The commands of ``messages``, whose numbers have to follow one another."""
    out: list[c.Command] = []
    first = None
    for message in messages:
        assert len(message) <= codec.MAX_MESSAGE
        batch = codec.decode_batch(message)
        if first is not None:
            assert batch.first == first
        first = batch.first + len(batch.commands)
        out += batch.commands
    return out


def take(box: Outbox) -> list[bytes]:
    """The next messages, as the link hands them over."""
    box.pack()
    messages = list(box.ready)
    box.ready.clear()
    return messages


def call(n: int) -> c.Call:
    return c.Call(0, n, ())


def test_order_and_numbers() -> None:
    box = Outbox(0)
    for n in range(5):
        box.add(call(n))
    (message,) = take(box)
    assert sent([message]) == [call(n) for n in range(5)]
    assert box.sent == 5
    assert take(box) == []
    assert box.sent == 5
    box.add(call(9))
    (message,) = take(box)
    assert codec.decode_batch(message).first == 5


def test_what_is_dead_is_freed_before_the_next_command() -> None:
    """If that is to allocate much; what is held by a recording stays."""
    box = Outbox(0)
    box.add(call(1))
    box.hold_ref(4)
    box.dead.extend([7, 3, 4])
    box.free_dead()
    box.free_dead()
    box.add(call(2))
    assert sent(take(box)) == [call(1), c.Free(3, (4,)), call(2)]
    box.release([4])
    assert sent(take(box)) == [c.Free(4, ())]


def test_frees_come_last_and_sorted() -> None:
    box = Outbox(0)
    box.dead.extend([7, 3, 5])
    box.add(call(1))
    assert sent(take(box)) == [call(1), c.Free(3, (2, 2))]
    assert box.dead == []
    box.dead.append(2)
    assert sent(take(box)) == [c.Free(2, ())]


@given(st.lists(st.integers(1, 2**40), unique=True, min_size=1, max_size=300))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_frees_name_every_ref_once(refs: list[int]) -> None:
    box = Outbox(0)
    box.dead.extend(refs)
    freed = []
    for command in sent(take(box)):
        assert isinstance(command, c.Free)
        ref = command.first
        freed.append(ref)
        for d in command.distances:
            ref += d
            freed.append(ref)
    assert freed == sorted(refs)


def test_many_frees_fit_messages() -> None:
    box = Outbox(0)
    box.dead.extend(range(1, 2**40, 2**40 // 350_000))
    count = len(box.dead)
    messages = take(box)
    assert sum(1 + len(f.distances) for f in sent(messages)) == count
    assert len(messages) <= 8


def test_add_says_when_to_flush() -> None:
    box = Outbox(0)
    limits = []
    for _ in range(12):
        n = 1
        while not (box.add(call(n)) and len(box.commands) >= box.batch):
            n += 1
            if len(box.commands) >= box.limit:
                box.sweep()
        limits.append(n)
        take(box)
        box.acknowledge(box.sent)
    assert limits[0] <= command_queue.MIN_BATCH
    assert limits == sorted(limits)
    assert limits[-1] == command_queue.MAX_BATCH
    box.restart()
    box.add(call(0))
    assert box.add(call(1))
    assert len(box.commands) >= box.batch


class Ends(list[Any]):
    """A queue's list; another thread ends the queue when its length is read."""

    def __init__(self, box: Outbox) -> None:
        self.box = box

    def __len__(self) -> int:
        self.box.lose(NodeLost(0, "here", 1, "killed"))
        return super().__len__()


@pytest.mark.parametrize("meanwhile", ["an answer", "a sweep"])
def test_a_queue_that_ends_meanwhile_takes_nothing(meanwhile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads set the limit without a lock: the loss is told at the next command, and not after a batch of them."""
    box = Outbox(0)
    box.set_flush_threshold(2 * command_queue.MAX_BATCH)
    if meanwhile == "a sweep":
        box.queue = Ends(box)
        box.sweep()
    else:
        monkeypatch.setattr(Outbox, "idle", property(lambda self: self.lose(NodeLost(0, "here", 1, "killed")) is None))
        box.restart()
    assert (box.lost is None, box.batch, box.limit) == (False, 0, 0)


def test_what_died_is_freed_in_the_middle_of_a_batch() -> None:
    box = Outbox(0)
    box.set_flush_threshold(2 * command_queue.MAX_BATCH)
    for n in range(3 * command_queue.SWEEP):
        box.dead.append(n + 1)
        if box.add(call(n)):
            box.sweep()
    commands = codec.decode_batch(take(box)[0]).commands
    frees = [i for i, command in enumerate(commands) if isinstance(command, c.Free)]
    assert len(frees) >= 3
    assert frees[0] <= command_queue.SWEEP
    for i in frees:
        ref = commands[i].first
        for distance in (0, *commands[i].distances):
            ref += distance
            assert ref <= i + 1, "freed before the command that it died after"


def test_an_error_while_packing_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Outbox(0)
    for n in range(9):
        box.add(c.Piece(bytes([n]), b"x" * 400_000, True))
    encode, calls = codec.encode, []

    def encode_thrice(value: c.Batch) -> bytes:
        calls.append(value)
        if len(calls) > 3:
            raise MemoryError
        return encode(value)

    with monkeypatch.context() as patch:
        patch.setattr(codec, "encode", encode_thrice)
        with pytest.raises(MemoryError):
            box.pack()
    assert (box.sent, len(box.ready)) == (0, 0)
    assert [p.key for p in sent(take(box))] == [bytes([n]) for n in range(9)]  # type: ignore[union-attr]
    assert box.sent == 9


def test_large_commands_are_spread_over_messages() -> None:
    box = Outbox(0)
    for n in range(9):
        box.add(c.Piece(bytes([n]), b"x" * 400_000, True))
    messages = take(box)
    assert [p.key for p in sent(messages)] == [bytes([n]) for n in range(9)]  # type: ignore[union-attr]
    assert len(messages) >= 4


def test_a_command_that_fits_no_message() -> None:
    box = Outbox(0)
    box.add(c.Piece(b"", b"x" * (codec.MAX_MESSAGE + 1), True))
    box.add(c.Call(0, 1, (1 << 70,)))
    box.add(c.Call(0, 2, (1,)))
    commands = [command for message in take(box) for command in codec.decode_batch(message).commands]
    assert commands == [c.Free(0, ()), c.Free(0, ()), c.Call(0, 2, (1,))]  # the others go on, in their places
    assert isinstance(box.unsendable, DisttensorError)


def test_the_window_of_commands() -> None:
    box = Outbox(0)
    assert box.idle
    for n in range(outbox.MAX_COMMANDS):
        box.add(call(n))
    take(box)
    assert not box.full
    box.add(call(0))
    take(box)
    assert box.full
    assert not box.idle
    box.acknowledge(100)
    assert not box.full
    box.acknowledge(50)  # an older report
    assert box.done == 100
    box.acknowledge(box.sent)
    assert box.idle


def test_the_window_of_bytes() -> None:
    box = Outbox(0)
    while not box.full:
        box.add(c.Piece(b"", b"x" * 900_000, True))
        take(box)
    assert box.sent < 100
    box.acknowledge(box.sent - 1)
    assert not box.full


def upload(nbytes: int) -> c.Upload:
    return c.Upload(1, (nbytes,), 4, "cpu", bytes(nbytes))


def test_commands_with_data_leave_before_they_are_many() -> None:
    """A queue holds MAX_DATA and no more than a command's besides, beside however many commands without any."""
    box = Outbox(0)
    box.set_flush_threshold(2 * command_queue.MAX_BATCH)
    size = command_queue.MAX_DATA // 4
    for _ in range(2):
        due = []
        for _ in range(4):
            box.add(call(1))
            due.append(box.add_data(upload(size), None, size))
        assert due == [False, False, False, True]
        assert len(take(box)) == 1
        box.set_flush_threshold(2 * command_queue.MAX_BATCH)


def test_a_command_that_stands_for_many_leaves_as_they_would() -> None:
    box = Outbox(0)
    for _ in range(2):
        box.set_flush_threshold(2 * command_queue.MAX_BATCH)
        third = command_queue.MAX_BATCH // 3 + 1
        assert [box.add_many(call(1), None, third) for _ in range(3)] == [False, False, True]
        assert len(take(box)) == 1
    box.set_flush_threshold(2 * command_queue.MAX_BATCH)
    assert box.add_many(call(1), None, command_queue.MAX_BATCH)


def test_what_died_is_freed_before_a_command_that_stands_for_many() -> None:
    """Once so many have been queued: a node computes with few tensors more than the script has."""
    box = Outbox(0)
    box.set_flush_threshold(2 * command_queue.MAX_BATCH)
    for n in range(3):
        box.dead += range(10 * n + 1, 10 * n + 1 + command_queue.MIN_SWEEP)
        box.add_many(call(n), None, command_queue.SWEEP // 2)
    kinds = [type(command) for command in codec.decode_batch(take(box)[0]).commands]
    assert kinds == [c.Call, c.Free, c.Call, c.Free, c.Call]


def test_the_window_has_their_bytes() -> None:
    box = Outbox(0)
    while not box.full:
        if box.add_data(upload(1 << 16), None, 1 << 16):
            take(box)
    assert 0 < (box.sent << 16) - outbox.MAX_BYTES <= command_queue.MAX_DATA


def test_sites_live_as_long_as_their_commands_are_in_flight() -> None:
    box = Outbox(0)
    code = test_order_and_numbers.__code__
    for n in range(4):
        box.add(call(n), (code, n))
        take(box)
    assert [box.site(n) for n in range(4)] == [(code, n) for n in range(4)]
    box.acknowledge(2)
    assert box.running() == (code, 2)
    assert box.site(1) is None
    assert box.site(3) == (code, 3)
    assert box.site(99) is None


def test_how_long_ago_the_oldest_command_was_sent_that_is_not_done() -> None:
    box = Outbox(0)
    box.mark(5.0)
    assert box.oldest(0, 9.0) == 0.0
    for n, now in enumerate((10.0, 10.01, 20.0, 30.0)):
        box.add(call(n))
        take(box)
        box.mark(now)
    assert [box.oldest(done, 40.0) for done in range(5)] == [30.0, 20.0, 20.0, 10.0, 0.0]
    box.acknowledge(3)
    box.mark(41.0)
    assert box.oldest(3, 41.0) == 11.0
    box.acknowledge(4)
    box.mark(42.0)
    assert box.oldest(4, 42.0) == 0.0


def test_marks_stay_few() -> None:
    box = Outbox(0)
    for n in range(9_000):
        box.add(call(n))
        take(box)
        box.mark(n * 1.0)
    assert len(box._marks) < 1_000
    assert box.oldest(0, 9_000.0) == 9_000.0
    assert 10 <= box.oldest(8_900, 9_000.0) <= 100


def test_a_lost_node_queues_nothing_and_every_add_looks() -> None:
    box = Outbox(0)
    box.add(call(0))
    take(box)
    box.add(call(1))
    box.lose(NodeLost(0, cause="killed"))
    assert box.commands == []
    assert box.add(call(2))
    assert "lost" in repr(box)


def joined(*pieces: list[c.Command]) -> Outbox:
    """An outbox that has sent two commands, and has taken pieces that other nodes get, too."""
    box = Outbox(0)
    for _ in range(2):
        box.add(call(0))
    take(box)
    for commands in pieces:
        found, unsendable = outbox.in_pieces(commands, [None] * len(commands), None)
        assert unsendable is None
        box.add_pieces(found, len(commands))
    return box


@pytest.mark.parametrize("counts", [[1], [3, 5, 9], [15, 1], [200, 300], [70_000 // 4]])
def test_pieces_are_joined_to_one_message(counts: list[int]) -> None:
    box = joined(*([call(n) for n in range(count)] for count in counts))
    total = sum(counts)
    assert (box.sent, box.waiting, len(box.pieces)) == (2, total, len(box.pieces))
    box.join(outbox.Joints())
    messages = list(box.ready)
    assert sent(messages) == [call(n) for count in counts for n in range(count)]
    assert codec.decode_batch(messages[0]).first == 2
    assert len(messages) == -(-total // outbox.MAX_COMMANDS)
    assert (box.sent, box.waiting, len(box.pieces)) == (2 + total, 0, 0)
    numbers = [number for number, _ in reversed(list(box.last_messages()))]
    assert numbers[0] == 0
    assert box.site(2) is None
    box.acknowledge(box.sent)
    assert box.idle


def test_no_joined_message_is_too_long() -> None:
    box = joined(*([c.Piece(bytes([n]), b"x" * 300_000, True)] for n in range(9)))
    box.join(outbox.Joints())
    messages = list(box.ready)
    assert [p.key for p in sent(messages)] == [bytes([n]) for n in range(9)]  # type: ignore[union-attr]
    assert len(messages) == 9  # none that is joined has more than half of what a message may have


def test_what_waits_to_be_joined_counts_for_the_window() -> None:
    box = joined([call(n) for n in range(outbox.MAX_COMMANDS)])
    assert box.full
    box.lose(NodeLost("node 0 is gone", 0))
    assert (box.waiting, len(box.pieces), len(box.ready)) == (0, 0, 0)


def test_a_piece_fits_whatever_its_number_will_be() -> None:
    size = codec.MAX_MESSAGE - len(codec.encode(c.Batch(0, (c.Piece(b"", b"", True),))))
    for less in range(24):
        box = Outbox(0)
        box.sent = outbox.LONGEST - 10
        pieces, unsendable = outbox.in_pieces([c.Piece(b"", b"x" * (size - less), True)], [None], None)
        box.add_pieces(pieces, 1)
        box.join(outbox.Joints())
        assert len(box.ready[0]) <= codec.MAX_MESSAGE
        assert (unsendable is None) == (codec.decode_batch(box.ready[0]).commands != (c.Free(0, ()),))
