"""Commands in, effects out, with no sockets: the ordinary ones, and every kind of nonsense."""

from __future__ import annotations

import math
import random
import re
import weakref
from typing import Any

import cloudpickle
import numpy
import pytest
import torch
from limits import HANG
from node_kit import ALL, FULL, Node

from disttensor.runtime.channel.base import Transfer
from disttensor.runtime.channel.payload import DTYPES, bytes_of
from disttensor.runtime.node import user_functions as functions
from disttensor.runtime.node.store import Promise
from disttensor.runtime.node.user_functions import key_of
from disttensor.runtime.protocol import codec, values
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.allow_list import AllowList
from disttensor.runtime.protocol.errors import PoisonedError, ProtocolError
from disttensor.runtime.protocol.failure_ids import Poison


@pytest.fixture
def node() -> Any:
    node = Node(simulate_cuda=2)
    yield node
    node.channel.close()
    node.master.close()


@pytest.fixture
def ready(node: Node) -> Node:
    """With templates, 1: twos and 2: threes."""
    assert node.do(*ALL, c.Call(1, 1, (2.0,)), c.Call(1, 2, (3.0,))) == []
    return node


def test_calls(ready: Node) -> None:
    assert ready.do(c.Call(2, 3, (2, 1)), c.Call(3, 4, (1, 10)), c.Call(4, 5, (2, -1))) == []
    assert ready[3].tolist() == [[50, 50], [50, 50]]
    assert ready[5].tolist() == [50, 50]
    assert ready[6].tolist() == [0, 0]
    ready.do(c.Call(8, 7, (6, 5)), c.Call(9, 8, (6, 1)))
    assert ready[7].shape == (4, 2)
    ready[8].zero_()
    assert ready[2].tolist() == [[3, 3], [0, 0]]


def test_asks(ready: Node) -> None:
    replies = ready.do(c.Call(5, 3, (2,)), c.Ask(11, c.Call(6, 4, (1,))))
    assert replies == [c.Answer(11, 8.0)]
    (reply,) = ready.do(c.Ask(12, c.Call(10, 5, (4,))))
    assert reply == c.Shapes(12, (c.Geometry((4, 2), (1, 4), 0, codec.dtype_id(torch.int64), "cpu"),))
    assert ready[5].shape == (4, 2)


def test_frees(ready: Node) -> None:
    ready.do(c.Free(1, (1,)))
    assert 1 not in ready
    assert 2 not in ready
    assert ready.do(c.Free(1, (1, 5)), c.Free(-4, ()), c.Free(2**62, (2**62,))) == []  # again, and what never was


def test_a_check_that_there_is_not(ready: Node) -> None:
    (told,) = ready.do(c.Switch((("check_finite", "sometimes"),)))
    assert isinstance(told, c.Failed)
    assert told.message == "there is no check 'sometimes'"
    assert ready.do(c.Switch((("check_finite", "inf"),)), c.Call(2, 3, (2, 1)), c.Switch((("check_finite", ""),))) == []


def test_memory_and_seed(ready: Node) -> None:
    assert ready.do(c.Memory(1, "")) == [c.MemoryUsage(1, 2, 32)]
    before = torch.get_rng_state()
    ready.do(c.Seed(5))
    expected = torch.Generator().manual_seed(5)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
    torch.set_rng_state(before)
    (reply,) = ready.do(c.Random(2, "cpu", b""))
    assert reply == c.RngState(2, before.numpy().tobytes())


def test_transfers(ready: Node) -> None:
    source = torch.arange(4.0).reshape(2, 2)
    ready.do(c.Recv(1, 3, -1, (2, 2), 0, "cuda:1"))
    ready.master.send(source, 0, 1)
    ready.do(c.Call(2, 4, (1, 3)))  # waits for it
    assert ready[4].tolist() == (source + 2).tolist()
    target = torch.empty(2, 2)
    got = ready.master.irecv(target, 0, 2)
    ready.do(c.Send(2, 4, -1), c.Sync(9))
    got.wait(HANG)
    assert target.tolist() == ready[4].tolist()


#: What an upload may be like, and its elements: they are sent in order, whatever lies in memory.
SOURCES: dict[str, tuple[torch.Tensor, Any]] = {
    "a matrix": (torch.arange(4.0).reshape(2, 2), [[0, 1], [2, 3]]),
    "transposed": (torch.arange(6.0).reshape(2, 3).t(), [[0, 3], [1, 4], [2, 5]]),
    "expanded": (torch.ones(1).expand(3), [1, 1, 1]),
    "a number": (torch.tensor(7), 7),
    "no elements": (torch.ones(2, 0, 3), [[], []]),
    "a part": (torch.arange(9.0)[4::2], [4, 6, 8]),
    "strides of one element": (torch.ones(1).as_strided((1, 1), (5, 7)), [[1]]),
    "a lazy conjugate": (torch.tensor([1 + 2j]).conj(), [1 - 2j]),
    "a lazy negative": (torch.tensor([1 + 2j]).conj().imag, [-2]),
    "zeros without memory": (torch._efficientzerotensor(3), [0, 0, 0]),
    "a parameter": (torch.nn.Parameter(torch.ones(2)), [1, 1]),
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_upload_by_command(name: str, ready: Node) -> None:
    source, elements = SOURCES[name]
    upload = c.Upload(3, tuple(source.shape), codec.dtype_id(source.dtype), "cpu", bytes_of(source))
    assert ready.do(upload) == []
    made = ready[3]
    assert (made.shape, made.dtype, made.tolist()) == (source.shape, source.dtype, elements)
    assert made.is_contiguous()
    assert not made.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_upload_of_any_dtype(dtype: torch.dtype, ready: Node) -> None:
    source = torch.arange(16, dtype=torch.uint8).view(dtype)
    assert ready.do(c.Upload(3, tuple(source.shape), codec.dtype_id(dtype), "cpu", bytes_of(source))) == []
    assert ready[3].dtype == dtype
    assert ready[3].view(torch.uint8).tolist() == list(range(16))


def test_what_has_no_bytes_of_its_own_is_no_upload() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for source in (freed, torch.ones(3, device="meta"), torch.ones(3).to_sparse()):
        with pytest.raises(TypeError, match="cannot travel"):
            bytes_of(source)


def test_what_was_sent_is_let_go_of_when_it_is_freed(ready: Node) -> None:
    memory = numpy.ones(4)
    alive = weakref.ref(memory)
    ready.executor.store.entries[3] = torch.from_numpy(memory)
    del memory
    ready.do(c.Send(1, 3, -1))
    ready.do(c.Free(3, ()))
    assert alive() is not None  # it is still to be sent
    target = torch.zeros(4, dtype=torch.float64)
    ready.master.recv(target, 0, 1)
    assert target.tolist() == [1, 1, 1, 1]
    ready.do(c.Free(99, ()))
    assert alive() is None


class Lingering(Transfer):
    """A send whose bytes leave when somebody waits for it, and not before."""

    def __init__(self, tensor: torch.Tensor, *to: int) -> None:
        self.tensor = tensor
        self.sent: list[Any] | None = None

    def wait(self, timeout: float | None = None) -> None:
        self.sent = self.sent or self.tensor.tolist()

    def is_completed(self) -> bool:
        return self.sent is not None

    def add_done_callback(self, fn: Any) -> None: ...


_kept: list[torch.Tensor] = []


def write_what_was_kept() -> None:
    _kept.pop().zero_()


@pytest.mark.parametrize("how", ["in place", "in place on a view", "asked", "by a function"])
def test_what_is_being_sent_is_not_written(ready: Node, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    sends: list[Lingering] = []

    def isend(tensor: torch.Tensor, *to: int) -> Transfer:
        sends.append(Lingering(tensor))
        return sends[-1]

    monkeypatch.setattr(ready.channel, "isend", isend)
    ready.do(c.Call(9, 3, (2, 0)), c.Send(1, 1, -1), c.Send(2, 2, -1))
    other = None
    if how == "in place":
        ready.do(c.Call(3, 9, (8, 0)))
    elif how == "in place on a view":
        ready.do(c.Call(3, 9, (6, 0)))
    elif how == "asked":
        ready.do(c.Define(20, "aten::mul_.Scalar", (c.Hole(True), c.Hole(False)), (), 1))
        ready.do(c.Ask(5, c.Call(20, 9, (8, 0))))
    else:  # which may reach any tensor
        _kept.append(ready[1])
        run(ready, write_what_was_kept)
        other = [[3, 3], [3, 3]]
    assert [s.sent for s in sends] == [[[2, 2], [2, 2]], other]
    assert ready[1][0].tolist() == [0, 0]


def test_stop(ready: Node) -> None:
    ready.do(c.StopNode())
    assert ready.executor.stopped
    assert 1 not in ready


# ---- failures --------------------------------------------------------------------------------------------------------


def test_failure_poisons_and_is_told_once(ready: Node) -> None:
    failed = ready.failed(c.Call(7, 3, (2, 1)))
    assert (failed.op, failed.seq) == ("aten::gather", len(ALL) + 2)
    assert failed.kind == "builtins.RuntimeError"
    assert "int64" in failed.message
    assert failed.traceback == "", "it has none of the user's lines"
    assert ready[3] == Poison(0, failed.seq)
    poison = Poison(0, failed.seq)
    assert ready.do(c.Call(2, 4, (1, 2)), c.Call(4, 5, (1, -1)), c.Call(3, 9, (5, 2))) == []
    assert [ready[r] for r in (4, 5, 6)] == [poison] * 3
    assert ready.do(c.Ask(5, c.Call(6, 9, (5,)))) == [c.Poisoned(5, 0, failed.seq)]
    assert isinstance(ready[1], torch.Tensor)


def test_a_failed_write_poisons_all_aliases(ready: Node) -> None:
    ready.do(c.Call(9, 3, (2, 0)))
    ready.do(c.Define(20, "aten::index_add_", (c.Hole(True), 0, c.Hole(True), c.Hole(True)), (), 0))
    failed = ready.failed(c.Call(20, 4, (3, 2, 2)))
    assert [ready[r] for r in (1, 3)] == [Poison(0, failed.seq)] * 2
    assert isinstance(ready[2], torch.Tensor)


def test_poison_of_a_sent_tensor_reaches_the_receiver(ready: Node) -> None:
    failed = ready.failed(c.Call(7, 3, (2, 1)))
    got = ready.master.irecv(torch.empty(2, 2), 0, 3)
    ready.do(c.Send(3, 3, -1))
    with pytest.raises(PoisonedError) as e:
        got.wait(HANG)
    assert e.value.rank == 0
    assert e.value.seq == failed.seq


NONSENSE: dict[str, tuple[tuple[c.Command, ...], str]] = {
    "unknown op": ((c.Define(30, "aten::no_such_op", (), (), 1),), "doesn't exist"),
    "unknown overload": ((c.Define(30, "aten::add.NoSuch", (), (), 1),), "doesn't exist"),
    "not an op": ((c.Define(30, "aten::__class__", (), (), 1),), "not exist|doesn't exist|not allowed"),
    "outside the list": ((c.Define(30, "torchvision::nms", (), (), 1),), "not allowed"),
    "profiler": ((c.Define(30, "profiler::_record_function_enter", ("x",), (), 1),), "not allowed"),
    "files": ((c.Define(30, "aten::from_file", ("/etc/passwd",), (), 1),), "not allowed"),
    "empty name": ((c.Define(30, "", (), (), 1),), "not allowed"),
    "strange name": ((c.Define(30, "os::system", ("true",), (), 1),), "not allowed"),
    "unknown template": ((c.Call(31, 3, ()),), "31"),
    "unknown ref": ((c.Call(2, 100, (1, 2)),), "9[98]"),
    "too few arguments": ((c.Call(2, 3, (1,)),), ""),
    "text for a tensor": ((c.Call(2, 3, ("x", 1)),), ""),
    "number for a list": ((c.Call(8, 3, (1,)),), ""),
    "dtype 255": ((c.Define(32, "aten::zeros", (c.Items((1,)),), (("dtype", c.DType(255)),), 1),), "dtype 255"),
    "layout 9": ((c.Define(32, "aten::zeros", (c.Items((1,)),), (("layout", c.Layout(9)),), 1),), "Layout"),
    "no device": ((c.Define(32, "aten::zeros", (c.Items((1,)),), (("device", c.Device("cuda:7")),), 1),), "cuda:7"),
    "strange device": ((c.Define(32, "aten::zeros", (c.Items((1,)),), (("device", c.Device("xyz")),), 1),), "xyz"),
    "wrong keyword": (
        (c.Define(32, "aten::zeros", (c.Items((1,)),), (("nope", 1),), 1), c.Call(32, 3, ())),
        "nope|unknown",
    ),
    "upload of other bytes": ((c.Upload(3, (2,), 0, "cpu", b"1234567"),), "7 bytes are none of"),
    "upload of a negative shape": ((c.Upload(3, (-1, 2), 0, "cpu", b""),), "negative"),
    "upload of dtype 255": ((c.Upload(3, (1,), 255, "cpu", b"1"),), "dtype 255"),
    "negative shape": ((c.Recv(5, 3, -1, (-1, 2), 0, "cpu"),), "negative"),
    "overflowing shape": ((c.Recv(5, 3, -1, (2**40, 2**40), 0, "cpu"),), "limit"),
    "huge shape": ((c.Recv(5, 3, -1, (2**45,), 0, "cpu"),), "limit"),
    "receive dtype 255": ((c.Recv(5, 3, -1, (1,), 255, "cpu"),), "dtype 255"),
    "receive from nobody": ((c.Recv(5, 3, 44, (1,), 0, "cpu"),), "44"),
    "send to nobody": ((c.Send(5, 1, 44),), "44"),
    "send what is not there": ((c.Send(5, 99, -1),), "99"),
    "adopt of nothing": ((c.Adopt(9, (3, 4)),), "9"),
    "piece that lies": ((c.Piece(b"k", b"data", True),), "damaged"),
    "function that is not there": ((c.Run(9, b"x", b"y", True, ""),), ""),
    "state of a wrong size": ((c.Random(9, "cpu", b"123"),), ""),
    "fewer outputs than said": ((c.Define(33, "aten::sum", (c.Hole(True),), (), 3), c.Call(33, 9, (8, 1, 2))), "3"),
}


@pytest.mark.fault(36)
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_fails_that_command_only(ready: Node, name: str) -> None:
    commands, text = NONSENSE[name]
    failed = ready.failed(*commands)
    assert len(failed.message) < 10_000
    assert re.search(text, failed.message), failed.message
    assert ready[1].tolist() == [[2, 2], [2, 2]]
    assert ready.do(c.Call(2, 50, (49, 48))) == []
    assert ready[50].tolist() == [[5, 5], [5, 5]]


def test_a_request_that_fails_is_answered(ready: Node) -> None:
    for request in (c.Ask(5, c.Call(6, 9, (1,))), c.Ask(5, c.Call(77, 9, ())), c.Run(5, b"x", b"y", True, "")):
        seq = ready.executor.seq
        kinds = ready.do(request)
        assert isinstance(kinds[0], c.Failed)
        assert kinds[1] == c.Poisoned(5, 0, seq)


@pytest.mark.parametrize("sending", [False, True])
@pytest.mark.parametrize("bad", ["abc", math.nan, math.inf, None])
def test_a_distance_that_is_none(ready: Node, bad: c.Plain, sending: bool) -> None:
    if sending:  # a write looks at what it would write first
        ready.do(c.Send(1, 2, -1))
    for call in (
        c.Call(2, 50, (bad, 1)),
        c.Call(3, 51, (bad, 1.0)),
        c.Call(4, 52, (bad, bad)),
        c.Call(8, 53, (52, bad)),
    ):
        (failed,) = ready.do(call)
        assert isinstance(failed, c.Failed)
        assert ready[call.out] == Poison(0, failed.seq)
    if sending:
        ready.master.recv(torch.empty(2, 2), 0, 1)
    ready.do(c.Call(2, 60, (59, 58)))
    assert ready[60].tolist() == [[5, 5], [5, 5]]


@pytest.mark.fault(36)
def test_random_calls_never_end_the_node(ready: Node) -> None:
    draw = random.Random(0)
    values: list[c.Plain] = [None, True, "x", 1.5, math.nan, -math.inf, 0, -1, 1, 2, 3, 2**62, -(2**62)]
    for out in range(100, 1500):
        args = tuple(draw.choice([*values, out - 1, out - 2]) for _ in range(draw.randrange(4)))
        ready.do(c.Call(draw.randrange(1, len(ALL) + 2), out, args))
    ready.do(c.Call(1, 2000, (1.0,)), c.Call(2, 2001, (1, 1)))
    assert ready[2001].tolist() == [[2, 2], [2, 2]]


def test_a_failed_write_beside_sparse_tensors(ready: Node) -> None:
    ready.executor.store.entries[40] = ready[1].to_sparse()
    ready.executor.store.entries[41] = ready[2].to_sparse()
    ready.do(c.Define(20, "aten::index_add_", (c.Hole(True), 0, c.Hole(True), c.Hole(True)), (), 0))
    for target in (1, 40):
        failed = ready.failed(c.Call(20, 50, (50 - target, 48, 48)))
        assert ready[target] == Poison(0, failed.seq)
    assert isinstance(ready[41], torch.Tensor)
    assert ready.do(c.Memory(1, "")) == [c.MemoryUsage(1, 2, 16)]


@pytest.mark.parametrize("stream", [0, 40])
def test_a_question_on_an_unknown_stream_is_answered(ready: Node, stream: int) -> None:
    if stream:
        ready.do(c.MakeStream(stream, "cpu", 0))
    before = len(ready.replies)
    ready.do(c.On(7, c.Ask(5, c.Call(6, 9, (8,)))), c.On(7, c.Call(2, 60, (59, 58))))
    ready.executor.close()
    ready.executor.join(HANG)
    asked, answer, called = ready.replies[before:]
    assert isinstance(asked, c.Failed)
    assert asked.message == "stream 7 is unknown"
    assert answer == c.Poisoned(5, 0, asked.seq)
    assert isinstance(called, c.Failed)
    assert ready[60] == Poison(0, called.seq), "what another stream was to make is not made by the default one"


@pytest.mark.parametrize("first", [1, -1, 10**6])
def test_a_gap_ends_the_node(node: Node, first: int) -> None:
    with pytest.raises(ProtocolError, match="lost or repeated"):
        node.executor.apply(c.Batch(first, ()))


def test_a_repeat_ends_the_node(ready: Node) -> None:
    with pytest.raises(ProtocolError, match="lost or repeated"):
        ready.executor.apply(c.Batch(0, (FULL,)))


def test_simulated_devices(node: Node) -> None:
    assert node.executor.device("cuda:1") == torch.device("cpu")
    with pytest.raises(RuntimeError, match="2 simulated"):
        node.executor.device("cuda:2")


def test_forget(ready: Node) -> None:
    ready.do(c.Forget((0, 1, 2, 3, 4)))
    assert "2" in ready.failed(c.Call(2, 9, (8, 7))).message
    ready.do(c.Call(5, 9, (8,)))
    assert ready[9].item() == 8


# ---- functions -------------------------------------------------------------------------------------------------------


def run(
    node: Node,
    function: Any,
    *args: Any,
    request: int = 3,
    world: c.World | None = None,
    apart: bool = False,
    first: int = 0,
) -> list[c.Reply]:
    code, arguments = cloudpickle.dumps(function), cloudpickle.dumps((args, {}))
    half, its = len(code) // 2, (c.Piece(key_of(arguments), arguments, True),)
    given = key_of(arguments) if apart else arguments
    return node.do(
        c.Piece(key_of(code), code[:half], False),
        c.Piece(key_of(code), code[half:], True),
        *(its if apart else ()),
        c.Run(request, key_of(code), given, True, "here", (first,) if first else (), world, apart=apart, first=first),
    )


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    ("world", "message"),
    [
        (c.World(1, c.RankList((1, 2)), 0, "gloo"), "can't have node 0 as a rank"),
        (c.World(1, c.RankList((0, 1)), 9, "gloo"), "not one that is not open"),
        (c.World(1, c.RankList((0, 1)), 0, "gloo"), "need the data channel 'gloo', not 'inproc'"),
        (c.World(1, c.RankList((0, 1)), 0, "gloo", c.MeshDims(("dp",), (2**62,), "cpu")), "does not have 2 ranks"),
    ],
)
def test_a_process_group_that_cannot_be_fails_that_function_only(ready: Node, world: c.World, message: str) -> None:
    failed, poisoned = run(ready, lambda: 1, request=4, world=world)
    assert isinstance(failed, c.Failed)
    assert message in failed.message
    assert isinstance(poisoned, c.Poisoned)
    assert isinstance(run(ready, lambda: 1, request=5)[0], c.Result)


@pytest.mark.parametrize("apart", [False, True])
def test_functions(ready: Node, apart: bool) -> None:
    (reply,) = run(ready, lambda n: {"x": [torch.ones(n), (n, 1.5, None, b"b")], 2: {1j}}, 3, apart=apart)
    assert isinstance(reply, c.Result)
    assert reply.tensors == (c.Geometry((3,), (1,), 0, 0, "cpu"),)
    assert values.decode(reply.data, ["T"]) == {"x": ["T", (3, 1.5, None, b"b")], 2: {1j}}
    ready.do(c.Adopt(3, (40,)))
    assert ready[40].tolist() == [1, 1, 1]
    (reply,) = run(ready, lambda: torch.ones(1), request=4)
    ready.do(c.Adopt(4, (0,)))
    run(ready, lambda: torch.ones(1), request=5)
    assert ready.do(c.Adopt(5, ()), c.Adopt(6, ())) == []  # of a Run that failed, perhaps
    assert "5" in ready.failed(c.Adopt(5, (41,))).message


def test_a_tensor_comes_before_the_arguments(ready: Node) -> None:
    (reply,) = run(ready, lambda t, n: t.tolist()[0] + [n], 7, first=2)
    assert isinstance(reply, c.Result)
    assert values.decode(reply.data, []) == [3, 3, 7]


def test_an_adoption_that_fails_is_no_request(ready: Node) -> None:
    """Nobody waits for an answer, and the script would take one for an offence."""
    seq = ready.executor.seq
    (failed,) = ready.do(c.Adopt(9, (41, 0)))
    assert isinstance(failed, c.Failed)
    assert ready[41] == Poison(0, seq)
    assert 0 not in ready


class Unloadable:
    """Can't be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("x",)

    def __call__(self) -> None: ...


def test_what_a_failed_function_was_sent_with_is_dropped(ready: Node) -> None:
    def fail() -> None:
        raise ValueError("boom")

    kept = ready.executor.functions._whole
    for function, args in ((fail, (1,)), (fail, ()), (Unloadable(), ()), (lambda x: x, (Unloadable(),))):
        for apart in (False, True):
            assert any(isinstance(r, c.Failed) for r in run(ready, function, *args, apart=apart))
            assert not kept
    run(ready, fail)  # sent again, though it is kept
    assert not kept


def test_functions_may_be_refused() -> None:
    node = Node(functions="none")
    replies = run(node, lambda: 1)
    assert isinstance(replies[0], c.Failed)
    assert "functions='none'" in replies[0].message
    assert not node.executor.functions._whole
    node.channel.close()
    node.master.close()


def test_pieces_of_a_function_have_a_limit(ready: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MAX_PICKLE", 100)
    ready.do(c.Piece(b"key", bytes(60), False))
    assert "exceed" in ready.failed(c.Piece(b"key", bytes(60), False)).message
    assert not ready.executor.functions._pieces, "what came of it is dropped"


def test_allow_list() -> None:
    allow = AllowList(["mine::*", "theirs::one"])
    assert allow.resolve("aten::add.Tensor") is torch.ops.aten.add.Tensor
    assert allow.resolve("aten::relu") is torch.ops.aten.relu.default
    with pytest.raises(ProtocolError, match=r"not allowed.*mine::\*"):
        allow.resolve("theirs::two")
    with pytest.raises(ProtocolError, match="doesn't exist"):
        allow.resolve("mine::op")


COUNTED = {
    "tensors": (3, (29, 1, 2), "aten::unbind.int gave 2 tensors where the master expects 3"),
    "too few refs": (2, (29,), "puts out 2 tensors, and a call of it names 1 refs"),
    "too many refs": (2, (29, 1, 2), "puts out 2 tensors, and a call of it names 3 refs"),
}


@pytest.mark.parametrize("stream", [0, 40])
@pytest.mark.parametrize("what", COUNTED)
def test_an_operator_that_gives_another_number_than_asked_for_is_answered_once(
    ready: Node, what: str, stream: int
) -> None:
    outs, args, text = COUNTED[what]
    two = c.Define(20, "aten::unbind.int", (c.Hole(True), 0), (), outs)  # it gives two of a (2, 2)
    ask: c.Command = c.Ask(5, c.Call(20, 30, args))
    before = len(ready.replies)
    ready.do(two, *([c.MakeStream(stream, "cpu", 0), c.On(stream, ask)] if stream else [ask]))  # type: ignore[arg-type]
    if (lanes := ready.executor._lanes) is not None:
        lanes.wait_for(lanes.busy())
    ready.executor.close()
    ready.executor.join(HANG)
    failed, answer = ready.replies[before:]
    assert isinstance(failed, c.Failed)
    assert text in failed.message
    assert answer == c.Poisoned(5, 0, failed.seq)


class _WhenAskedFor(Promise):
    """What a lane is writing: it is done as soon as somebody waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def wait(self, timeout: float | None = None) -> None:
        if not self.is_completed():
            self.keep(self._tensor)
        super().wait(timeout)


def test_a_replay_waits_for_what_writes_its_output_of_which_there_is_a_view(ready: Node) -> None:
    replay = c.Replay(1, 0, (), (), ())
    ready.do(c.GraphPart(1, (c.Call(2, 5, (4, 3)),), ()), c.EndGraph(1, (), (5,), (), "interpreter"), replay)
    ready.do(c.Call(9, 7, (2, 0)))
    assert ready[7].tolist() == [5, 5]
    ready.executor.store.entries[5] = _WhenAskedFor(ready[5])
    ready.do(c.Call(3, 8, (7, 10)), replay)
    assert ready[5].tolist() == [[23, 23]] * 2
    assert ready[7].tolist() == [23, 23]
