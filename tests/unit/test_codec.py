"""The wire format: whatever the master or a node can say survives the trip, and nothing else is understood."""

from __future__ import annotations

import math
import re
from typing import get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import inputs
from wire_values import i64, of_type

from disttensor.runtime.master.history import BYTES, BYTES_PER_COMMAND, TEXT, to_keep
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.dtypes import DTYPES, IDS, NAMES
from disttensor.runtime.protocol.errors import ProtocolError

settings.register_profile("fast", max_examples=inputs(60), deadline=None, derandomize=True, database=None)
settings.load_profile("fast")

COMMANDS: dict[type, st.SearchStrategy[c.Command]] = {kind: of_type(kind) for kind in get_args(c.Command)}
REPLIES: dict[type, st.SearchStrategy[c.Reply]] = {kind: of_type(kind) for kind in get_args(c.Reply)}


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda k: k.__name__)
@settings(max_examples=inputs(40), deadline=None, derandomize=True, database=None)
@given(st.data())
def test_commands_round_trip(kind: type, data: st.DataObject) -> None:
    batch = c.Batch(data.draw(i64), tuple(data.draw(st.lists(COMMANDS[kind], max_size=3))))
    message = codec.encode(batch)
    back = codec.decode_batch(message)
    assert back == batch
    assert repr(back) == repr(batch)  # tells 1 from 1.0 from True
    assert codec.encode(back) == message


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda k: k.__name__)
@settings(max_examples=inputs(20), deadline=None, derandomize=True, database=None)
@given(st.data())
def test_commands_without_data_are_short_and_of_their_kind(kind: type, data: st.DataObject) -> None:
    command = data.draw(COMMANDS[kind])
    long = msgspec.structs.replace(
        command,
        **{
            name: value * 10_000
            for name in command.__struct_fields__
            if isinstance(value := getattr(command, name), (bytes, str, tuple))
        },
    )
    (kept,) = codec.decode_batch(to_keep(7, b"x" * 10_000, [long])).commands
    assert type(kept) is kind
    assert len(codec.encode(c.Batch(7, (kept,)))) < 4 * (4 * TEXT + 100)
    message = codec.encode(c.Batch(7, (command,)))
    is_short = len(message) <= BYTES + BYTES_PER_COMMAND  # a part of a graph that was drawn may be long by itself
    assert (to_keep(7, message, [command]) == message) is is_short


@pytest.mark.parametrize("kind", REPLIES, ids=lambda k: k.__name__)
@settings(max_examples=inputs(40), deadline=None, derandomize=True, database=None)
@given(st.data())
def test_replies_round_trip(kind: type, data: st.DataObject) -> None:
    report = c.Report(data.draw(i64), tuple(data.draw(st.lists(REPLIES[kind], max_size=3))))
    back = codec.decode_report(codec.encode(report))
    assert back == report
    assert repr(back) == repr(report)


def test_numbers_keep_type_and_bits() -> None:
    numbers = (1, 1.0, True, 0.0, -0.0, False, 0, math.inf, -math.inf, 5e-324, 2**63 - 1, -(2**63))
    (back,) = codec.decode_batch(codec.encode(c.Batch(0, (c.Call(0, 1, numbers),)))).commands
    assert [(type(n), str(n)) for n in back.args] == [(type(n), str(n)) for n in numbers]
    (back,) = codec.decode_batch(codec.encode(c.Batch(0, (c.Call(0, 1, (math.nan,)),)))).commands
    assert math.isnan(back.args[0])


@given(st.binary(max_size=200))
@settings(max_examples=inputs(300))
def test_garbage(message: bytes) -> None:
    for decode in (codec.decode_batch, codec.decode_report):
        try:
            decoded = decode(message)
        except ProtocolError:
            continue
        assert isinstance(decoded, (c.Batch, c.Report))


@pytest.mark.fault(35)
@given(st.lists(st.one_of(*COMMANDS.values()), min_size=1, max_size=3), st.data())
@settings(max_examples=inputs(150))
def test_damaged_messages(commands: list[c.Command], data: st.DataObject) -> None:
    """Cut, or with one byte changed: refused, or a batch of commands; never anything else."""
    message = bytearray(codec.encode(c.Batch(0, tuple(commands))))
    at = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(ProtocolError):
        codec.decode_batch(bytes(message[:at]))
    message[at] ^= data.draw(st.integers(1, 255))
    try:
        batch = codec.decode_batch(bytes(message))
    except ProtocolError:
        return
    assert all(isinstance(x, get_args(c.Command)) for x in batch.commands)


NONSENSE = [
    b"",
    b"\xc1",
    msgspec.msgpack.encode([1, 0, [[99]]]),
    msgspec.msgpack.encode([1, 0, [[10, 1]]]),
    msgspec.msgpack.encode([1, 0, [[10, 1, 2, [], 4]]]),
    msgspec.msgpack.encode([1, 0, [[10, "1", 2, []]]]),
    msgspec.msgpack.encode([1, 0, [[10, 1, 2, [[1, True]]]]]),
    msgspec.msgpack.encode([3, 0, []]),
    msgspec.msgpack.encode({"first": 0}),
    msgspec.msgpack.encode([1, 0, []]) + b"x",
    b"\x91" * 100_000,
    msgspec.msgpack.encode([1, 0, [[10, 1, 2, [msgspec.msgpack.Ext(1, b"x")]]]]),
]


@pytest.mark.parametrize("message", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense(message: bytes) -> None:
    with pytest.raises(ProtocolError, match="protocol"):
        codec.decode_batch(message)
    with pytest.raises(ProtocolError):
        codec.decode_report(message)


def test_text_that_is_none() -> None:
    message = codec.encode(c.Batch(0, (c.Lost(0, "\u00e9"),)))
    with pytest.raises(ProtocolError):
        codec.decode_batch(message[:-1] + b"A")


def test_a_report_is_no_batch() -> None:
    with pytest.raises(ProtocolError):
        codec.decode_batch(codec.encode(c.Report(0, ())))
    with pytest.raises(ProtocolError):
        codec.decode_report(codec.encode(c.Batch(0, ())))
    with pytest.raises(ProtocolError):
        codec.decode_batch(codec.encode(c.Batch(0, (c.Done(1),))))  # type: ignore[arg-type]


#: Torch has no kernel that copies one of these: they mark what lies in bytes of another.
MARKS = re.compile(r"torch\.u?int[1-7]")


def test_dtypes() -> None:
    """Each of this torch has a number, or is a mark that torch itself does not copy."""
    for number, dtype in DTYPES.items():
        assert codec.dtype_id(dtype) == number
        assert codec.dtype_of(number) is dtype
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert [str(dtype) for dtype in every - set(IDS) if not MARKS.fullmatch(str(dtype))] == []
    for bad in (-1, len(NAMES), 255, 2**40, *(set(range(len(NAMES))) - set(DTYPES))):
        with pytest.raises(ProtocolError, match="dtype"):
            codec.dtype_of(bad)


def test_to_spec() -> None:
    assert codec.to_spec([1, (2.0, None)]) == c.Items((1, c.Items((2.0, None))))
    assert codec.to_spec(torch.float32) == c.DType(0)
    assert codec.to_spec(1 + 2j) == c.Complex(1.0, 2.0)
    assert codec.to_spec(torch.channels_last) == c.MemoryFormat(2)
    assert codec.to_spec(torch.strided) == c.Layout(0)
    with pytest.raises(TypeError, match="object"):
        codec.to_spec(object())
    with pytest.raises(OverflowError):
        codec.to_spec(2**63)
    assert codec.from_value(codec.to_value(1 - 2j)) == 1 - 2j
    with pytest.raises(TypeError):
        codec.to_value([1])


@pytest.mark.fault(36)
@pytest.mark.parametrize("shape", [(-1,), (2**62, 2**62), (2**46,), (1,) * 65, (3, -2)])
def test_shapes_that_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="shape"):
        codec.check_shape(shape, 4)


def test_shapes_that_are_not() -> None:
    for shape in ((), (0,), (0, 2**40), (3, 4), (1,) * 64):
        codec.check_shape(shape, 8)


@pytest.mark.parametrize(
    ("ranks", "mesh", "message"),
    [
        ((1, 2), None, "of the nodes (1, 2), each once, can't have node 0 as a rank"),
        ((0, 1, 1), None, "each once"),
        ((), None, "each once"),
        ((0, 1), c.MeshDims((), (), "cpu"), "1 to 64 dims"),
        ((0, 1), c.MeshDims(("dp", "tp"), (2,), "cpu"), "1 to 64 dims with names of their own, not 1 with the names"),
        ((0, 1), c.MeshDims(("dp", "dp"), (1, 2), "cpu"), "names of their own"),
        ((0, 1), c.MeshDims(tuple(map(str, range(65))), (1,) * 64 + (2,), "cpu"), "1 to 64 dims"),
        ((0, 1), c.MeshDims(("dp",), (3,), "cpu"), "a mesh of the sizes (3,) does not have 2 ranks"),
        ((0, 1), c.MeshDims(("dp", "tp"), (-1, -2), "cpu"), "does not have 2 ranks"),
        ((0,), c.MeshDims(("a", "b"), (2**62, 0), "cpu"), "does not have 1 ranks"),
        ((0, 1), c.MeshDims(("dp",), (2,), "xpu:0"), "a mesh is on 'cpu' or 'cuda', not on 'xpu:0'"),
    ],
)
def test_process_groups_that_are_refused(ranks: tuple[int, ...], mesh: c.MeshDims | None, message: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(message)):
        codec.check_world(c.World(1, c.RankList(ranks), 0, "gloo", mesh), 0)


def test_process_groups_that_are_not() -> None:
    for mesh in (
        None,
        c.MeshDims(("dp",), (2,), "cuda"),
        c.MeshDims(tuple(map(str, range(64))), (1,) * 63 + (2,), "cpu"),
    ):
        codec.check_world(c.World(1, c.RankList((5, 0)), 0, "gloo", mesh), 0)


@pytest.mark.row("M24")
def test_an_add_is_small() -> None:
    assert codec.size(c.Call(200, 1_000_000, (1, 5))) <= 16
