"""Sequences of commands that decode and make no sense: each works or is reported, and the node goes on."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import cloudpickle
import msgspec
import pytest
import torch
from fuzzing import SEEDS, fuzz
from hypothesis import strategies as st
from limits import HANG
from node_kit import ALL, Node
from wire_values import of_type

from disttensor.runtime.channel.base import Capabilities, DataChannel, PeerInfo, Transfer
from disttensor.runtime.channel.ticket import Ticket, failed, poisoned
from disttensor.runtime.node.user_functions import key_of
from disttensor.runtime.process import torch_switches
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import BrokenError, ProtocolError
from disttensor.runtime.protocol.traits import TRAITS, request_of, without_stream

#: Examples of each seed, of so many commands at most.
EXAMPLES, COMMANDS = 150, 14
#: Bytes that the process may have beyond what it has: an allocation that is believed fails by it.
ROOM = 4 << 30
#: Bytes by which its memory may have grown at most at any time.
GROWTH = 256 << 20

#: Peers that answer at once: with zeros, with an error, with poison. All others are unknown.
ZEROS, BROKEN, POISON = -1, 1, 2


class Prompt(DataChannel):
    """The end of a channel whose peers never let anybody wait."""

    name, capabilities = "inproc", Capabilities()

    def __init__(self, channel: DataChannel) -> None:
        self._channel = channel

    def address(self) -> str:
        return self._channel.address()

    def connect(self, peers: Mapping[int, PeerInfo]) -> None: ...
    def mark_lost(self, peer: int, why: str) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...

    def isend(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        codec.dtype_id(tensor.dtype)
        return self._answer(peer)

    def irecv(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        tensor.zero_()
        return self._answer(peer)

    def refuse(self, peer: int, transfer: int, rank: int, seq: int) -> None:
        self._answer(peer)

    def _answer(self, peer: int) -> Transfer:
        ticket = Ticket()
        match peer:
            case -1:
                ticket.finish()
            case 1:
                return failed(BrokenError, "rank 1 is lost")
            case 2:
                ticket.fail(poisoned(1, 7), "")
            case _:
                raise ValueError(f"rank {peer} is not a peer")
        return ticket


# ---- commands --------------------------------------------------------------------------------------------------------


def ranks(*lists: tuple[int, ...]) -> st.SearchStrategy[c.RankList]:
    """These lists, and by steps others, with many ranks or none at all."""
    steps = [(), (), (2,), (1, 2), (0,), (-1,), (2**40,), (2**31, 2**31)]
    return st.one_of(
        st.builds(c.RankList, st.sampled_from(lists)),
        st.builds(c.RankList, st.sampled_from(lists), st.sampled_from(steps), st.sampled_from(steps)),
    )


SMALL = st.integers(1, 12)
REFS = st.one_of(SMALL, SMALL, st.sampled_from([0, -1, 99, 2**62, -(2**62), 2**63 - 1]))
#: Numbers in places of all kinds.
INTS = st.sampled_from([0, 1, 2, -1, 3, 255, 2**31, 2**40, 2**62, -(2**62), 2**63 - 1, -(2**63)])
HUGE = st.sampled_from([2**40, 2**44, 2**45, 2**61, 2**63 - 1])
SHAPES = st.one_of(
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.lists(st.one_of(HUGE, st.integers(-2, 3)), max_size=3).map(tuple),
    st.just((2,) * 70),
)
DTYPES = st.one_of(st.just(0), st.integers(0, 255), st.sampled_from([-1, 2**62]))
DEVICES = st.sampled_from(["cpu", "cuda:0", "cuda:1", "cuda:7", "meta", "xyz", "", "\u00e9", "cpu:3"])
PEERS = st.sampled_from([ZEROS, ZEROS, BROKEN, POISON, 0, 44, 2**62])
CHANNELS = st.sampled_from([0, 0, 0, 1, -1, 2**62])
TEXT = st.sampled_from(["", "x", "interpreter", "tcp", "aten::add.Tensor", "x" * 1000, "\x00", "\u00e9"])
NUMBERS: st.SearchStrategy[c.Plain] = st.one_of(
    REFS, INTS, st.sampled_from([None, True, 1.5, float("nan"), float("-inf"), "x", 1e308])
)
OPERATORS = [
    "aten::zeros", "aten::empty.memory_format", "aten::full", "aten::as_strided", "aten::expand", "aten::cat",
    "aten::index_add_", "aten::select.int", "aten::mul_.Scalar", "aten::resize_", "aten::_local_scalar_dense",
    "aten::split.Tensor", "aten::nonzero", "aten::add.Tensor", "aten::add.out", "aten::eye", "aten::_foreach_add_.List",
    "aten::no_such", "aten::from_file", "os::system", "",
]  # fmt: skip
SPECS = st.one_of(
    st.sampled_from([None, True, 0, 1, -1, 2**45, -(2**62), 1.5, "x", "mean"]),
    st.builds(c.Hole, st.booleans()),
    SHAPES.map(c.Items),
    st.lists(st.builds(c.Hole, st.booleans()), max_size=3).map(lambda holes: c.Items(tuple(holes))),
    st.builds(c.DType, DTYPES),
    st.builds(c.Device, DEVICES),
    st.builds(c.Layout, st.integers(-1, 9)),
    st.builds(c.MemoryFormat, st.integers(-1, 9)),
)
KEYWORDS = st.tuples(st.sampled_from(["dtype", "device", "layout", "alpha", "out", "nope"]), SPECS)
#: Those of ``ALL`` are 1 to 10; others may take the place of some of them.
TEMPLATES = st.one_of(st.integers(1, 13), st.sampled_from([0, -1, 99, 2**62]))
PICKLES = [b"", b"no pickle", cloudpickle.dumps(len), cloudpickle.dumps(((), {})), cloudpickle.dumps(((3,), {}))]
PICKLE = st.sampled_from(PICKLES)

calls = st.builds(c.Call, TEMPLATES, SMALL, st.lists(NUMBERS, max_size=4).map(tuple))
#: Calls that work, if their operands do.
sound = st.one_of(
    st.builds(lambda out: c.Call(1, out, (2.0,)), SMALL),
    st.builds(lambda out, a, b: c.Call(2, out, (out - a, out - b)), SMALL, SMALL, SMALL),
    st.builds(lambda out, a: c.Call(3, out, (out - a, 0.5)), SMALL, SMALL),
    st.builds(lambda out, a: c.Call(9, out, (out - a, 0)), SMALL, SMALL),
)
defines = st.builds(
    c.Define, st.integers(4, 13), st.sampled_from(OPERATORS), st.lists(SPECS, max_size=4).map(tuple),
    st.lists(KEYWORDS, max_size=2).map(tuple), st.integers(-1, 3),
)  # fmt: skip
asks = st.builds(c.Ask, st.just(0), st.one_of(calls, sound, st.builds(lambda a: c.Call(6, 20, (20 - a,)), SMALL)))
sends = st.builds(c.Send, INTS, REFS, PEERS, CHANNELS)
uploads = st.builds(c.Upload, SMALL, SHAPES, DTYPES, DEVICES, st.binary(max_size=64))
receives = st.builds(c.Recv, INTS, SMALL, PEERS, SHAPES, DTYPES, DEVICES, CHANNELS)
firsts = st.builds(
    c.First, TEMPLATES, SMALL, st.lists(NUMBERS, max_size=3).map(tuple),
    st.lists(of_type(c.Expected), max_size=2).map(tuple), st.lists(INTS, max_size=2).map(tuple),
    st.lists(INTS, max_size=2).map(tuple),
)  # fmt: skip
keeps = st.builds(c.Keep, SMALL, DEVICES, st.booleans())
randoms = st.builds(c.Random, st.just(0), DEVICES, st.sampled_from([b"", b"x", bytes(5056)]))
runs = st.builds(
    c.Run, st.just(0), PICKLE.map(key_of), st.one_of(PICKLE, PICKLE.map(key_of)), st.booleans(), TEXT,
    st.lists(REFS, max_size=2).map(tuple),
    st.one_of(st.none(), st.builds(
        c.World, INTS, ranks((0, 1), (0, 1), (0,), (), (1, 2), (0, 0)), CHANNELS, TEXT,
        st.one_of(st.none(), st.builds(
            c.MeshDims, st.sampled_from([("dp",), ("a", "b"), ("a", "a"), ()]),
            st.sampled_from([(2,), (1, 2), (2, 1), (2**62, 4), (0, -1), ()]), st.sampled_from(["cpu", "cuda", ""]),
        )),
    )),
    items=st.booleans(), apart=st.booleans(), first=st.one_of(st.just(0), REFS),
)  # fmt: skip
records = st.builds(c.Record, SMALL, DEVICES, st.booleans())
replays = st.builds(
    c.Replay, st.integers(1, 3), INTS, st.lists(NUMBERS, max_size=2).map(tuple), st.lists(REFS, max_size=2).map(tuple),
    st.lists(REFS, max_size=2).map(tuple),
)  # fmt: skip
collectives = st.builds(
    c.Collective, st.sampled_from(["all_reduce", "broadcast", "barrier", "all_gather", "shift", "nope"]),
    st.sampled_from([0, 5, 2**40]), ranks((0,), (0, 1), (1, 2), (), (0, 0), (0, 44)),
    st.lists(REFS, max_size=2).map(tuple), st.lists(REFS, max_size=2).map(tuple), st.lists(INTS, max_size=3).map(tuple),
    DTYPES, st.integers(-1, 9), INTS, st.sampled_from(["", "ring", "tree", "native", "nope"]), st.integers(-1, 2),
    st.sampled_from([0, -1, 4]), st.sampled_from([-1, 0, 99]), ranks((), (0,), (0, 1)),
    st.sampled_from([0, 0, 3]), CHANNELS, st.sampled_from([(), (1,), (-1, 2)]),
    st.sampled_from([(), (), (1,), (2,), (1, 1), (0,), (-1, 2), (2**62,)]),
)  # fmt: skip
switches = st.builds(
    c.Switch,
    st.lists(
        st.tuples(
            st.sampled_from([*torch_switches.SWITCHES, "", "nope"]), st.one_of(NUMBERS, TEXT, st.just((1, None)))
        ),
        max_size=2,
    ).map(tuple),
)
parts = st.builds(
    c.GraphPart, st.integers(1, 3),
    st.lists(st.one_of(calls, sound, sends, receives, keeps, switches), max_size=4).map(tuple),
    st.lists(st.tuples(INTS, INTS, INTS), max_size=2).map(tuple),
)  # fmt: skip
graphs = st.builds(
    c.EndGraph, st.integers(1, 3), *(st.lists(REFS, max_size=2).map(tuple) for _ in range(3)),
    st.sampled_from(["interpreter", "interpreter", "nope", ""]),
)  # fmt: skip
on_streams: dict[type, st.SearchStrategy[Any]] = {
    c.Call: st.one_of(calls, sound), c.First: firsts, c.Ask: asks, c.Send: sends, c.Recv: receives,
    c.Upload: uploads, c.Download: st.builds(c.Download, st.just(0), REFS), c.Run: runs,
    c.Seed: st.builds(c.Seed, INTS), c.Random: randoms, c.Keep: keeps,
    c.Storage: st.builds(c.Storage, st.just(0), REFS),
    c.Digest: st.builds(c.Digest, st.just(0), REFS),
    c.Swap: st.builds(c.Swap, st.integers(-1, 3), st.sampled_from(["cpu", "cuda:0", "cuda:9", ""]), st.integers(-5, 5),
                     st.lists(st.tuples(st.integers(0, 2), st.integers(-5, 5)), max_size=2).map(tuple)),
    c.Record: records, c.Wait: st.builds(c.Wait, REFS), c.Await: st.builds(c.Await, INTS, PEERS), c.Replay: replays,
    c.Collective: collectives,
}  # fmt: skip
ANY: dict[type, st.SearchStrategy[Any]] = {
    **on_streams,
    c.Define: defines, c.Forget: st.builds(c.Forget, st.lists(st.sampled_from([0, 3, 12, -1, 2**62])).map(tuple)),
    c.Free: st.builds(c.Free, REFS, st.lists(st.one_of(st.integers(-3, 3), INTS), max_size=3).map(tuple)),
    c.Piece: st.one_of(
        PICKLE.map(lambda data: c.Piece(key_of(data), data, True)),
        st.builds(c.Piece, PICKLE.map(key_of), PICKLE, st.booleans()),
    ),
    c.Adopt: st.builds(c.Adopt, INTS, st.lists(REFS, max_size=2).map(tuple)),
    c.MemoryStats: st.builds(
        c.MemoryStats, st.just(0), DEVICES, st.sampled_from(["", "count", "reset", "accumulated", "trim", "no"]),
        st.integers(-2, 3)),
    c.Sync: st.just(c.Sync(0)), c.Memory: st.builds(c.Memory, st.just(0), DEVICES), c.Count: st.just(c.Count(0)),
    c.Open: st.builds(c.Open, st.just(0), st.sampled_from([0, 1, -1]), TEXT),
    c.Usable: st.builds(c.Usable, st.just(0), st.lists(TEXT, max_size=2).map(tuple), st.booleans()),
    c.Peer: st.builds(c.Peer, INTS, st.just(c.Addresses("nowhere", "")), st.binary(max_size=3), CHANNELS),
    c.Lost: st.builds(c.Lost, st.integers(3, 5), TEXT),
    c.Again: st.builds(c.Again, st.integers(3, 5), st.integers(0, 3), st.integers(0, 5)),
    c.Default: st.builds(c.Default, DTYPES),
    c.Switch: switches,
    c.MakeStream: st.builds(
        c.MakeStream, st.sampled_from([7, 8, 8, 0, -1]), st.sampled_from(["cpu", "cuda:0", "xyz"]), INTS
    ),
    c.Signal: st.builds(c.Signal, INTS, REFS, PEERS), c.Query: st.builds(c.Query, st.just(0), REFS),
    c.Elapsed: st.builds(c.Elapsed, st.just(0), REFS, REFS), c.Join: st.builds(c.Join, st.just(0), REFS),
    c.On: st.builds(
        c.On, st.sampled_from([7, 8, 8, 3, -1]),
        st.sampled_from(list(on_streams)).flatmap(on_streams.__getitem__)),
    c.GraphPart: parts, c.EndGraph: graphs, c.Discard: st.builds(c.Discard, st.integers(1, 3)),
    c.Engines: st.builds(c.Engines, st.just(0), st.integers(1, 3)),
}  # fmt: skip
#: Commands that a hostile sequence leaves out: what for.
LEFT_OUT = {c.StopNode: "it ends the node, and is what the last one does"}
#: A quarter of them works, so that the others have something to spoil, and a quarter is for streams; not by ``one_of``,
#: which would count the kinds of each. Half of the nodes begin with a stream.
KINDS = [*ANY, *ANY, *[None] * len(ANY), *[c.On] * len(ANY)]
SEQUENCES = st.builds(
    lambda streams, commands: [*streams, *commands],
    st.sampled_from([[], [c.MakeStream(8, "cpu", 0)]]),
    st.lists(
        st.sampled_from(KINDS).flatmap(lambda kind: sound if kind is None else ANY[kind]),
        min_size=1,
        max_size=COMMANDS,
    ),
)


def test_every_command_is_among_them() -> None:
    assert ANY.keys() | LEFT_OUT.keys() == set(get_args(c.Command))
    on = next(field for field in msgspec.structs.fields(c.On) if field.name == "command")
    assert on_streams.keys() == set(get_args(on.type))


# ---- a node that is given them ---------------------------------------------------------------------------------------


def _numbered(commands: list[c.Command]) -> Iterator[c.Command]:
    """The commands, whose questions get numbers of their own."""
    for number, command in enumerate(commands, 100):
        if isinstance(command, c.On) and hasattr(command.command, "request"):
            yield c.On(command.stream, msgspec.structs.replace(command.command, request=number))
        elif hasattr(command, "request") and not isinstance(command, c.Adopt):
            yield msgspec.structs.replace(command, request=number)
        else:
            yield command


def _questions(commands: list[c.Command]) -> list[int]:
    inner = [command.command if isinstance(command, c.On) else command for command in commands]
    return [x.request for x in inner if hasattr(x, "request") and not isinstance(x, c.Adopt)]


def _answered(reply: c.Reply) -> tuple[int, ...]:
    """The numbers of the questions that a reply answers: none of a failure, several of the parts in collectives."""
    if isinstance(reply, c.Failed):
        return ()
    return reply.requests if isinstance(reply, c.TookPart) else (reply.request,)


@contextlib.contextmanager
def _node() -> Iterator[Node]:
    node = Node(simulate_cuda=2, over=Prompt)
    try:
        yield node
    finally:
        node.executor.close()
        node.executor.join(HANG)
        node.channel.close()
        node.master.close()


def _settle(node: Node) -> None:
    """Waits until all that was issued is done."""
    if (lanes := node.executor._lanes) is not None:
        lanes.wait_for(lanes.busy())
        lanes.drain()


def _grows() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def sequence(commands: list[c.Command], gap: int) -> None:
    commands = list(_numbered(commands))
    with _node() as node:
        node.do(*ALL, c.Call(1, 1, (2.0,)), c.Call(1, 2, (3.0,)))
        half = len(commands) // 2
        node.do(*commands[:half])
        if gap:
            with pytest.raises(ProtocolError, match="lost or repeated"):
                node.executor.apply(c.Batch(node.executor.seq + gap, tuple(commands)))
        node.do(*commands[half:])
        _settle(node)
        replies = node.replies
        for reply in replies:
            (back,) = codec.decode_report(codec.encode(c.Report(0, (reply,)))).replies
            codec.check_reply(back)
        questions = _questions(commands)
        answers = [(number, reply) for reply in replies for number in _answered(reply) if number in questions]
        assert sorted(number for number, _ in answers) == questions, "each is answered once"
        asked = {request_of(command): TRAITS[type(without_stream(command))] for command in commands}
        for number, reply in answers:
            assert isinstance(reply, (*asked[number].answers, c.Poisoned))
        _probe(node)
        _drop_all(node)


def _probe(node: Node) -> None:
    """The node still computes, to the bit."""
    node.do(
        c.Define(1001, "aten::full", (c.Items((2, 3)), c.Hole(False)), (("dtype", c.DType(0)),), 1),
        c.Define(1002, "aten::add.Tensor", (c.Hole(True), c.Hole(True)), (), 1),
        c.Call(1001, 1001, (0.1,)),
        c.Call(1001, 1002, (0.7,)),
        c.Call(1002, 1003, (2, 1)),
    )
    _settle(node)
    entry = node[1003]
    found = entry if isinstance(entry, torch.Tensor) else entry.result(lambda error: error)
    expected = torch.full((2, 3), 0.1, dtype=torch.float32) + torch.full((2, 3), 0.7, dtype=torch.float32)
    assert torch.equal(found, expected)


def _drop_all(node: Node) -> None:
    """Nothing is left of what is freed."""
    graphs = [c.Discard(number) for number in (1, 2, 3)]
    frees = [c.Free(ref, ()) for ref in list(node.executor.store.entries)]
    node.executor.apply(c.Batch(node.executor.seq, (*graphs, *frees, c.Sync(99))))  # of refs over 64 bits, too
    _settle(node)
    node.do(c.Sync(98))
    store = node.executor.store
    assert store.entries == {}
    assert store.pending == {}
    assert store.sending == []


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A node's settings are the process's here; and what is not refused fails at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        mine = int(file.read().split()[0]) * resource.getpagesize()
    dtype, state, before = torch.get_default_dtype(), torch.get_rng_state(), _grows()
    resource.setrlimit(resource.RLIMIT_AS, (mine + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)
    assert _grows() - before < GROWTH


@pytest.mark.fault(36)
@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS.keys())
def test_hostile_commands_work_or_are_reported(seed: int) -> None:
    fuzz(seed, EXAMPLES, sequence, SEQUENCES, st.sampled_from([0, 0, 1, -1, 10**6]))


HUGE_ONES: dict[str, Callable[[int], tuple[c.Command, ...]]] = {
    "receive": lambda n: (c.Recv(1, 3, ZEROS, (n,), 0, "cpu"),),
    "receive by a device": lambda n: (c.Recv(1, 3, ZEROS, (n,), 0, "cuda:0"),),
    "call": lambda n: (c.Define(20, "aten::zeros", (c.Items((n,)),), (), 1), c.Call(20, 3, ())),
    "expanded": lambda n: (
        c.Define(20, "aten::expand", (c.Hole(True), c.Items((n, 2, 2))), (), 1),
        c.Define(21, "aten::clone", (c.Hole(True),), (), 1),
        c.Call(20, 3, (2,)),
        c.Call(21, 4, (1,)),
    ),
    "in a graph": lambda n: (
        c.Define(20, "aten::zeros", (c.Items((n,)),), (), 1),
        c.GraphPart(1, (c.Call(20, 3, ()),), ()),
        c.EndGraph(1, (), (3,), (), "interpreter"),
        c.Replay(1, 5, (), (), ()),
    ),
}


@pytest.mark.fault(36)
@pytest.mark.parametrize("size", [2**44, 2**62, 2**63 - 1])
@pytest.mark.parametrize("name", HUGE_ONES)
def test_a_huge_tensor_is_refused_before_its_memory_is_touched(name: str, size: int) -> None:
    with _node() as node:
        node.do(*ALL, c.Call(1, 1, (2.0,)))
        failures = [reply for reply in node.do(*HUGE_ONES[name](size)) if isinstance(reply, c.Failed)]
        assert len(failures) == 1
        assert len(failures[0].message) < 10_000
        _probe(node)
        _drop_all(node)
