"""The registry of decoders: all that makes something of bytes which another process, a file or the environment gave.

Each has messages that are valid, the errors that it documents, and the places in the product that it stands for.
``USES_WITHOUT`` has the other places, with why nothing hostile comes there; test_decoders.py looks for what is in
neither.
"""

from __future__ import annotations

import contextlib
import gzip
import inspect
import io
import json
import os
import re
import socket
import struct
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import msgspec
import torch
import value_kit
from fuzzing import JSON, MSGPACK, jsons, messages, packed
from hypothesis import strategies as st
from wire_values import of_type

import disttensor as dt
from disttensor.checkpoint.turn import decode_owner
from disttensor.cli import checked_options, host_check
from disttensor.runtime.channel.carrier import Carrier
from disttensor.runtime.channel.gloo.channel import GlooCarrier
from disttensor.runtime.channel.gloo.store import addresses_in
from disttensor.runtime.channel.library_groups import Mailbox
from disttensor.runtime.channel.mpi.channel import MpiCarrier
from disttensor.runtime.channel.nccl.channel import NcclSharing
from disttensor.runtime.channel.payload import byte_view
from disttensor.runtime.channel.shm.cuda_ipc import CudaSharing
from disttensor.runtime.channel.shm.direct import NodeSharing, ScriptSharing
from disttensor.runtime.channel.shm.segments import DESCRIPTOR, Mappings, Segment
from disttensor.runtime.channel.shm.sharing import Sharing
from disttensor.runtime.channel.tcp import handshake
from disttensor.runtime.channel.tcp.dial import split_address
from disttensor.runtime.channel.tcp.frames import BYE, DATA, SIZE, Frame, Opener, Sealer, nbytes_of
from disttensor.runtime.channel.tcp.kept import Kept, TcpConnection
from disttensor.runtime.channel.tcp.reader import PeerReader, Receive, ReceiveTicket
from disttensor.runtime.channel.tcp.shield import CHECKSUM, ENCRYPT, Checked, Sealed, Shield
from disttensor.runtime.endpoints import frames as endpoint_frames
from disttensor.runtime.host import affinity, job_sockets, mpi_env, slurm_env
from disttensor.runtime.host.addresses import split
from disttensor.runtime.host.job_window import JobWindow
from disttensor.runtime.host.launch_spec import Host, LaunchSpec, spec_of_dtrun
from disttensor.runtime.host.output_options import Output, OutputChoice
from disttensor.runtime.host.precedence import SETTINGS
from disttensor.runtime.launch.hosts import parse_hosts, read_hostfile
from disttensor.runtime.launch.output.lines import Lines, Tail, without_escapes
from disttensor.runtime.launch.rendezvous import credentials, rendezvous, torchrun, worker_cli
from disttensor.runtime.launch.starters.piped import _Marked
from disttensor.runtime.launch.starters.ray_agent import RayAgentStart, read_told
from disttensor.runtime.launch.tree import control
from disttensor.runtime.launch.tree.framed import MARK, FramedSocket
from disttensor.runtime.launch.tree.shipping import Sources, unpack
from disttensor.runtime.master.failures import Failure, Failures
from disttensor.runtime.process import flight
from disttensor.runtime.process.page import COMMANDS, Page
from disttensor.runtime.protocol import codec, shared_objects, side, values
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.allow_list import AllowList
from disttensor.runtime.protocol.bundle import Bundle, as_name, as_text, read_bundle
from disttensor.runtime.protocol.errors import BrokenError, ChannelError, ProtocolError, StartError
from disttensor.runtime.protocol.shared_objects import Joining
from disttensor.runtime.shared import values as shared_values
from disttensor.runtime.transport import tunnel, tunnel_io
from disttensor.seeing.chrome_trace import ChromeTrace, encode
from disttensor.seeing.flight import _plain
from disttensor.seeing.recording import NodeRecord, ProfileRecord
from disttensor.seeing.torch_trace import TorchFile, plain, trace_of
from disttensor.startup.settings import Settings


@dataclass(frozen=True)
class Decoder:
    """One decoder."""

    name: str
    valid: st.SearchStrategy[bytes]  #: messages that it has to understand, most of them
    decode: Callable[[bytes], object]  #: raises what is in ``allowed`` and nothing else, whatever it is given
    allowed: tuple[type[BaseException], ...] = ()
    covers: Sequence[str] = ()  #: places that decode, as file:function
    examples: int = 40  #: of each seed

    @property
    def folder(self) -> str:
        """Its folder of the corpus."""
        return re.sub(r"[^a-z]+", "-", self.name.lower().replace("'", ""))


def _joined(*parts: st.SearchStrategy[bytes], by: bytes = b"") -> st.SearchStrategy[bytes]:
    return st.tuples(*parts).map(by.join)


def _texts(*known: str) -> st.SearchStrategy[bytes]:
    return st.sampled_from([text.encode() for text in known])


def _variables(**known: Sequence[str]) -> st.SearchStrategy[bytes]:
    """Environments, as /proc/PID/environ has them."""
    chosen = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in known.items()})
    return chosen.map(lambda found: b"\0".join(f"{k}={v}".encode() for k, v in found.items()))


def _environment(data: bytes) -> dict[str, str]:
    pairs = (part.partition(b"=") for part in data.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if name and equals}


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.touch(mode=0o600)
        path.write_bytes(data)
        yield path


def _descriptor(data: bytes) -> int:
    """A descriptor from which these bytes can be read, and then the end."""
    fd = os.memfd_create("fuzz")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


# ---- master and node -------------------------------------------------------------------------------------------------

_G = c.Geometry((2, 3), (3, 1), 0, 0, "cpu")
_HELLO = c.Hello(
    11, "job", 1, "host", "2.13.0", "3.11", ("cpu", "cuda:0"), False, c.Addresses("127.0.0.1:5", "127.0.0.1:6"),
    c.Abilities("AVX2", True, True, True, 91002, (12, 8), True, ((9, 0),)),
)  # fmt: skip
_RESULT = values.encode([1, "\u00e9", torch.ones(1), (1, 2**70), {"x": {(1,): {2}}}], [])
#: One of each kind of value; those of classes are of announced ones, but for the last.
_CLASSES = value_kit.CLASSES
_CROSSING = [values.encode(value, []) for value in (*value_kit.VALUES, value_kit.Unannounced())]
_HOLDINGS = c.Holdings(1, 24, 100, 200, (c.Held(7, 24, "float32 (2, 3)"),))
_REPORTS = [
    c.Report(5, (reply,))
    for reply in (
        c.TookPart((10, 11)),
        c.Answer(1, "\u00e9"), c.Shapes(2, (_G, None)), c.Result(3, _RESULT, (_G,)), c.Done(9), c.Poisoned(4, 0, 1),
        c.Mapped(1, (0, 2), (_RESULT, _RESULT), (3,), 0.5),
        c.Failed(1, "aten::add", "builtins.RuntimeError", "no", "tb", ("no", (1, 2.5))), _HELLO,
        c.TrafficCounts(1, (("tcp", "data", 0, (1, 2, 0.5), (1, 2, 0.5)),)), c.RngState(1, b"x"),
        c.MemoryUsage(1, 2, 3),
        c.MemoryFigures(1, (("allocated_bytes.all.peak", 5),), _HOLDINGS, True),
        c.Failed(1, "aten::add", "builtins.MemoryError", "no", "", (), -1, _HOLDINGS),
        c.StorageInfo(1, 2, 3, 4, 5, (1,)), c.Downloaded(1, (2, 1), 4, b"ab"),
        c.GraphEngines(1, (("interpreter", ""),)), c.Unusable(1, ("no",)),
        c.Opened(1, c.Addresses("127.0.0.1:5", "127.0.0.1:6")),
    )
]  # fmt: skip

_MESH = c.MeshDims(("dp", "tp"), (1, 2), "cpu")
_BATCHES = [
    c.Batch(0, commands)
    for commands in (
        (c.Define(1, "aten::zeros", (c.Items((4, 4)),), (("dtype", c.DType(0)),), 1), c.Call(1, 1, ())),
        (c.Ask(1, c.Call(1, 3, (1, 2.5, "x"))), c.Free(1, (1,)), c.On(7, c.Send(1, 1, -1))),
        (c.Recv(2, 5, -1, (2, 2), 0, "cpu"), c.Sync(4), c.Memory(2, "cpu"), c.Lost(1, "\u00e9")),
        (c.MemoryStats(3, "cpu", "reset", 10), c.MemoryStats(4, "cuda:0")),
        (c.GraphPart(1, (c.Call(0, 1, ()),), ((0, 0, 0),)), c.EndGraph(1, (), (1,), (), "x"),
         c.Replay(1, 5, (), (), ())),
        (c.Collective("all_reduce", 1, c.RankList((0,), (2,), (1,)), (1,), (1,), (4, 4), 0, 0, 0, "ring", 0, 0, -1,
                      c.RankList(()), 0),),
        (c.Run(1, b"k", b"a", True, "what", (1,), c.World(1, c.RankList((0, 1)), 0, "gloo", _MESH)),
         c.Open(1, 1, "tcp")),
        (c.Peer(1, c.Addresses("127.0.0.1:5", "127.0.0.1:6"), bytes(32)), c.Usable(2, ("tcp", "shm"))),
    )
]  # fmt: skip


def _batch(data: bytes) -> None:
    batch = codec.decode_batch(data)
    message = codec.encode(batch)
    assert codec.encode(codec.decode_batch(message)) == message


def _report(data: bytes) -> None:
    """What the master makes of a report."""
    for reply in codec.decode_report(data).replies:
        codec.check_reply(reply)
        match reply:
            case c.Result():
                values.decode(reply.data, [object()] * len(reply.tensors))
            case c.Mapped():
                values.decode(values.encoded_list(reply.results), [])
            case c.Answer():
                codec.from_value(reply.value)
            case c.Failed():
                failures = Failures()
                failures.keep(Failure(0, "host", 1, reply, None))
                (failure,) = failures.values()
                error = failure.exception([failure])
                assert isinstance(error, Exception)
                assert len(str(failure)) < 1 << 17


def _answer_beside(data: bytes) -> None:
    answer = side.decode_answer(data)
    for event in answer.events if isinstance(answer, side.Gathered) else ():
        assert len(side.moments_in(event)) <= len(event.moments)


def _nested(plain: bytes) -> bytes:
    """A list of a tensor, a tuple and a list, of which the last two are ``plain``."""
    return bytes(4) + b"\x93\xc7\x00\x01\xc7" + bytes([len(plain) % 256, 2]) + plain + plain


def _bundle(data: bytes) -> None:
    fd = _descriptor(data)
    try:
        read_bundle(fd)
    finally:
        os.close(fd)


# ---- launchers -------------------------------------------------------------------------------------------------------

_BUNDLE = Bundle("job", 0, "tcp://127.0.0.1:41233", env={"A": "\u00e9"}, sys_path=("/x",))
_ORDERS = [
    control.Start(_BUNDLE, "module:function"), control.Modules(b"xx"), control.Kill(1, 15), control.Stop(1.5),
    control.Flush(1), control.ReadOutput(1, (0,), -10), control.Refuse("why"),
    LaunchSpec("ssh", (Host("a", 4),), env={"A": "b"}, output=Output(tee="3")),
]  # fmt: skip
_NEWS = [
    control.AgentHello(6, "0.1", "3.11", "host", 1, 2), control.Ready(1, "2.13"), control.LaunchFailed("why", ("a",)),
    control.Began(0, 1, "h"), control.Ended(0, 1, 2, "cause", ("tail",)), control.NodeOutput(0, 1, b"xx"),
    control.Status((0,), "host", "what"), control.Capacity(1, 2), control.Listening(("tcp://a:1",)), control.Flushed(1),
    control.OutputRead(1, ((1, 0, "text"),), False),
]  # fmt: skip


def _frames(bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    whole = bodies.map(lambda body: len(body).to_bytes(4, "big") + body)
    return st.lists(whole, min_size=1, max_size=3).map(b"".join)


def _heard(kinds: object) -> Callable[[bytes], None]:
    def hear(data: bytes) -> None:
        with FramedSocket(kinds, _descriptor(data)) as wire:
            for message in wire.hear():
                assert isinstance(message, kinds)  # type: ignore[arg-type]

    return hear


def _marked(data: bytes) -> None:
    with _Marked(_descriptor(data)) as wire:
        wire.hear()


def _tunnel(data: bytes) -> None:
    """Messages of the other end, one after the other; something is on its way to it."""
    end = tunnel_io.End()
    try:
        end.theirs.setblocking(False)
        end.theirs.send(b"on its way")
        end.read()
        for message in data.split(b"\n"):
            end.handle_message(message)
            end.write()
            end.wants()
            assert 0 <= end.away <= tunnel_io.WINDOW + (1 << 16)
            assert len(end.waiting) <= tunnel_io.WINDOW + (1 << 16)
    finally:
        end.ours.close()
        end.theirs.close()


def _modules(data: bytes) -> None:
    unpack(data).digest()


def _output(data: bytes) -> None:
    lines, tail = Lines(), Tail()
    for at in range(0, len(data), 7):
        tail.add(1 + at % 2, data[at : at + 7])
        for line in lines.feed(data[at : at + 7]):
            without_escapes(line)
    lines.take_unfinished()
    assert all(text.isprintable() or text for text in tail.lines())


# ---- data channels ---------------------------------------------------------------------------------------------------

_KEY = bytes(range(32))
_HEADS = st.builds(
    Frame,
    st.one_of(st.integers(DATA, BYE), st.integers(0, 255)), st.sampled_from([0, 1, 2**64 - 1]), st.integers(0, 255),
    st.sampled_from([0, 4, 2**63, 2**64 - 1]), st.sampled_from([0, 1, 16, 2**63, 2**64 - 1]),
)  # fmt: skip


def _head(data: bytes) -> None:
    header = data[:SIZE].ljust(SIZE, b"\0")
    nbytes_of(header)
    Opener(_KEY).open(header, data[SIZE:])


class _Reading:
    """A peer with a receive of four floats, for a reader."""

    me, rank, failure, carrier, reader = 0, 1, None, None, None
    empty = staticmethod(torch.empty)

    def __init__(self) -> None:
        self.failed: list[type[ChannelError]] = []
        self.kept = Kept()

    def claim(self, transfer: int, patient: bool, connection: TcpConnection) -> Receive:
        tensor = torch.empty(4)
        return Receive(tensor, 0, 4, byte_view(tensor), ReceiveTicket(self))  # type: ignore[arg-type]

    def unclaim(self) -> None: ...
    def return_claim(self, transfer: int, entry: Receive) -> None: ...
    def count(self, frame: Frame, awaited: bool = False) -> None: ...
    def refuse(self, frame: Frame) -> None: ...
    def refused(self, frame: Frame) -> None: ...

    def fail(self, kind: type[ChannelError], why: str) -> None:
        if not self.failed:  # as a peer, which fails once
            self.failed.append(kind)

    def acknowledge(self, receipt: int) -> None:
        self.kept.acknowledge(receipt)

    def lose(self, connection: TcpConnection, error: Exception, wanted: bool = True) -> None:
        self.fail(BrokenError, "")

    def lost(self, error: Exception) -> str:
        return "lost"


def _connection(mode: int, shield: Callable[[], Shield | None], data: bytes) -> None:
    """Bytes of a peer that has the key: 34 bytes of fields are sealed here, what follows them is sent as it is."""
    fields, rest = data[:34].ljust(34, b"\0"), data[34:]
    kind, dtype, received, transfer, numel, nbytes = struct.unpack("<BBQQQQ", fields)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        extra = rest if kind in (4, 5) else b""
        theirs.send(Sealer(_KEY).seal(Frame(kind, transfer, dtype, numel, nbytes), extra, received) + rest)
        theirs.shutdown(socket.SHUT_WR)
        peer = _Reading()
        reader = PeerReader(peer, SimpleNamespace(sock=mine), _KEY, mode, shield())  # type: ignore[arg-type]
        try:
            while True:
                reader._step_or_fail(patient=True)
        except (ProtocolError, EOFError):
            assert peer.failed == [BrokenError]
            raise


def _sealed(frame: Frame) -> bytes:
    return struct.pack("<BBQQQQ", frame.kind, frame.dtype, 0, frame.transfer, frame.numel, frame.nbytes)


def _greeting(data: bytes) -> None:
    hello = handshake.PeerHello.parse(data[: handshake.HELLO].ljust(handshake.HELLO, b"\0"))
    assert hello is None or handshake.answer(hello, bytes(32), "job", 0, _KEY) is None


_ANSWER = handshake.NONCE + handshake.VERDICT


def _verdict(data: bytes) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        handshake.call(mine, _KEY, "job", 1, 0, 0)


def _xor(data: bytes, other: bytes) -> bytes:
    """``data``, whose first bytes say what is other than in ``other``."""
    return bytes(a ^ b for a, b in zip(data.ljust(len(other), b"\0"), other, strict=False)) + data[len(other) :]


def _segment(data: bytes) -> None:
    segment, mappings = Segment(100), Mappings()
    try:
        mappings.open(_xor(data[:DESCRIPTOR], segment.describe()), int.from_bytes(data[DESCRIPTOR:][:8], "little"))
    finally:
        mappings.close()
        segment.retire()


def _endpoint(data: bytes) -> None:
    """What another program sends to an endpoint."""
    reader = endpoint_frames.MessageReader()
    while data:
        room = reader.room()[: len(data)]
        room[:], data = data[: len(room)], data[len(room) :]
        come = reader.took(len(room))
        if come is not None and isinstance(come.said, endpoint_frames.EndpointValue):
            endpoint_frames.unpack(come)


#: Messages as ``pack`` makes them, and of the structs' types.
_ENDPOINT = st.one_of(
    st.sampled_from(
        [
            b"".join(endpoint_frames.pack(x))
            for x in (None, [1, {"a": (2.0, b"3")}], torch.ones(2, 3), [torch.zeros(0), torch.tensor(True)])
        ]
    ),
    _frames(st.one_of(packed(kind) for kind in get_args(endpoint_frames.Said))),
)


#: Items as shared_values.pack makes them.
_ITEMS = packed(
    shared_objects.Item,
    *(
        shared_values.pack(x)
        for x in (None, [1, {"a": (2.0, b"3")}], torch.ones(2, 3), [torch.zeros(0), torch.tensor(True)])
    ),
)


#: Requests of several fields, which hardly any message of chance gets right.
_REQUESTS: dict[Any, list[Any]] = {
    shared_objects.Put: [shared_objects.Put(1, (0,), shared_values.pack(1))],
    shared_objects.Lease: [shared_objects.Lease(1, (0,), 2, "f()")],
    shared_objects.TaskDone: [shared_objects.TaskDone(1, (0,), 2, shared_values.pack("x"))],
    shared_objects.Return: [shared_objects.Return(1, (0,), 2, 3, True, "raised ValueError")],
    shared_objects.DictEntry: [shared_objects.DictEntry(1, (0,), do, b"k", b"k") for do in range(9)],
    shared_objects.KeysPage: [shared_objects.KeysPage(1, (0,), 2, True)],
    shared_objects.Invoke: [shared_objects.Invoke(1, (0,), "step", shared_values.pack(((1,), {})), (2, 2))],
    shared_objects.Serve: [shared_objects.Serve(1, (0,), 2, shared_values.pack("x"), True)],
    shared_objects.AwaitAnswer: [shared_objects.AwaitAnswer(1, (0,), 2)],
}

#: Answers with items, for the same reason.
_ANSWERS = [
    shared_objects.ObjectAnswer(1, 2),
    shared_objects.ObjectAnswer(1, 2, 3, shared_values.pack(1), 4, True, "it is closed", 5, True),
    shared_objects.ObjectAnswer(1, 2, keys=(b"k",), items=(shared_values.pack("x"),)),
    shared_objects.ObjectAnswer(1, 0, 0, shared_values.pack(((1,), {})), 3, why="step", handles=(2, 2)),
]

#: What makes a value of an item that was decoded as part of an answer.
_UNPACKS = (
    "runtime/shared/actor_calls.py:Calling.result",
    "runtime/shared/actor_calls.py:_do.job",
    "runtime/shared/channel_handles.py:select",
    "runtime/shared/handles.py:checked",
    "runtime/shared/table_handles.py:SharedDict._pages",
    "runtime/shared/table_handles.py:SharedDict._value",
    "runtime/shared/work_queue_handles.py:WorkQueue.get",
)


_JOB_REQUESTS = [
    job_sockets.JobRequest("summary"), job_sockets.JobRequest("kill", (1, 2)), job_sockets.JobRequest("output", (), 7)
]  # fmt: skip


def _flights() -> list[bytes]:
    """Flight records of nodes, at the start, and at work."""
    page = Page()
    found = [page.flight()]
    page.begin_command(7, COMMANDS)
    for kind in range(1, len(flight.KINDS)):
        page.ring.write(page.ring.slot(), 5.0 + kind, kind, 10 * kind, 0.25, kind, kind)
        found.append(page.flight())
    return found


_FLIGHTS = _flights()


_TORCH_FILES = st.builds(
    TorchFile,
    st.lists(
        st.fixed_dictionaries(
            {"ph": st.sampled_from("XXsfiCM"), "ts": st.floats(0, 1e9), "dur": st.floats(-1, 1e9), "pid": st.just(5)},
            optional={
                "name": st.sampled_from(["aten::mm", "process_labels", "thread_name"]), "tid": st.integers(0, 2),
                "id": st.integers(0, 2), "args": st.sampled_from([{}, {"labels": "CPU"}, {"External id": 7}]),
            },
        ),
        max_size=5,
    ),
    st.integers(0, 2**63 - 1),
)  # fmt: skip
_MOMENTS = [(1_000_000_000, 1.0), (2_000_000_000, 2.0)]


def _torch_timeline(data: bytes) -> None:
    """It is laid beside what else is known of the node, into the file of all."""
    trace = trace_of(0, gzip.compress(data, 0), (_MOMENTS, {5: "MainThread"}))
    record = ProfileRecord(1.0, 2.0, 10**18, (), (), (), (), (), (), {0: NodeRecord(0)}, {}, {})
    encode(ChromeTrace(record, [trace]).to_dict(1, "tcp", {}), "")


def _torch_moments(data: bytes) -> None:
    try:
        told = msgspec.json.decode(data)
    except (ValueError, RecursionError):  # it comes as a value
        return
    trace_of(0, gzip.compress(b'{"traceEvents": []}'), told)


def _job_request(data: bytes) -> None:
    answer = JobWindow()._reply(data)
    assert isinstance(answer, job_sockets.Refusal)
    assert answer.why


def _item(data: bytes) -> None:
    try:
        found = msgspec.msgpack.decode(data, type=shared_objects.Item)
    except (ValueError, RecursionError):
        raise ProtocolError("no item") from None
    shared_values.unpack(found)


def _hears(make: Callable[[Callable[[bytes], None]], Carrier]) -> Callable[[bytes], None]:
    """A decoder of the words that the peer's carrier says: the first byte, and a segment's description beside it."""

    def hear(data: bytes) -> None:
        said: list[bytes] = []
        carrier = make(said.append)
        segment = Segment(1)
        try:
            with mock.patch.object(torch.UntypedStorage, "_new_shared_cuda", side_effect=RuntimeError("no device")):
                if shared := isinstance(carrier, Sharing) and data[:1] in (b"?", b"+"):
                    carrier.hear(data[:1] + _xor(data[1 : 1 + DESCRIPTOR], segment.describe())[: len(data) - 1])
                carrier.hear(data)
            if shared:
                carrier.open(data[1 : 1 + carrier.size].ljust(carrier.size, b"\0"), 5)
        finally:
            if isinstance(carrier, Sharing):
                carrier.close()
            segment.retire()

    return hear


def _library(rank: int = 0) -> Any:
    world = SimpleNamespace(rank=0, tags=100)
    return SimpleNamespace(rank=rank, mailbox=Mailbox(), world=world, broken={}, over=lambda peer: None)


_NOTHING = bytes(DESCRIPTOR)  # the difference to a valid description
_EXPORT = JSON.encode(["GPU-uuid", "aGFuZGxl", 1024, 0, "Y291bnRlcg==", 0, "ZXZlbnQ=", True])
_OFFERED = messages(JSON, st.just(JSON.decode(_EXPORT))).map(lambda export: b"+" + bytes(DESCRIPTOR + 16) + export)
_WORDS = st.one_of(_texts("!", "?"), st.just(b"?" + _NOTHING))


# ---- files and the environment ---------------------------------------------------------------------------------------

_INVITATION = credentials.Invitation(("tcp://10.0.0.1:41233",), "k" * 40, "p" * 40, "s" * 40, "host", 1, "now", "here")
_HOSTS = _texts("a:4,b*4,c", "[fd00::1]:4,user@c", "fe80::1%eth0", "a", "10.0.0.1:2")
_SLURM = {
    "SLURM_CLUSTER_NAME": ["hal"], "SLURM_JOB_ID": ["17"], "SLURM_NTASKS": ["4", "0"], "SLURM_STEP_ID": ["0"],
    "SLURM_STEP_NUM_NODES": ["2"], "SLURM_STEP_NUM_TASKS": ["4"], "SLURM_STEP_TASKS_PER_NODE": ["3,1", "2(x2)"],
    "SLURM_PROCID": ["3"], "SLURM_LOCALID": ["0"], "SLURM_NODEID": ["1", "2", "-1"], "SLURM_CPUS_ON_NODE": ["8"],
    "SLURM_TASKS_PER_NODE": ["2(x2)"], "SLURM_RESTART_COUNT": ["1"],
}  # fmt: skip
_RANKS = {
    "MASTER_ADDR": ["a"], "MASTER_PORT": ["29500"], "RANK": ["0", "3"], "WORLD_SIZE": ["4"], "LOCAL_RANK": ["1"],
    "LOCAL_WORLD_SIZE": ["2"], "TORCHELASTIC_USE_AGENT_STORE": ["True"], "TORCHELASTIC_RUN_ID": ["x"],
    "GROUP_RANK": ["0"],
}  # fmt: skip
_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(dt.init_master_worker).parameters.items()}
_METHODS = _texts(
    "env://", "slurm://", "tcp://a:29500?rank=1&world_size=3", "file:///tmp/x", "slurm:///x", "local://",
    "tcp://[fd00::1]:29500", "torchrun://a:29500",
)  # fmt: skip


def _connection_file(data: bytes) -> None:
    with _file(data) as path:
        credentials.read_connection_file(path, 0)


def _secret_file(data: bytes) -> None:
    with (
        _file(data) as path,
        mock.patch.dict(os.environ, {"DISTTENSOR_SECRET_FILE": str(path)}),
        mock.patch.object(credentials, "_PAUSE", 0),
    ):
        credentials.derived(credentials.shared_secret(), "port 1")


def _secret_variable(data: bytes) -> None:
    text = os.fsdecode(data.replace(b"\0", b""))
    with mock.patch.dict(os.environ, {"DISTTENSOR_SECRET": "x" + text}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert credentials.shared_secret()


def _hostfile(data: bytes) -> None:
    with _file(data) as path:
        read_hostfile(os.fspath(path))


def _slurm(data: bytes) -> None:
    environ = _environment(data)
    task = slurm_env.task(environ)
    slurm_env.one_of_several(environ)
    slurm_env.divided(1, 2, environ)
    assert slurm_env.task_count(environ) >= 0
    if task is not None:
        slurm_env.connection_file(task.name, environ)


def _meeting(data: bytes) -> None:
    method, _, environ = data.partition(b"\0")
    with mock.patch.object(slurm_env, "own_addresses", return_value=()):
        found = rendezvous.find_rendezvous(os.fsdecode(method), environ=_environment(environ))
    if found is not None:
        str(found), found.options, found.assigned


def _mpi(data: bytes) -> None:
    with mock.patch.dict(os.environ, _environment(data)):
        mpi_env.place.__wrapped__()


def _plan(data: bytes) -> None:
    with mock.patch.dict(os.environ, {"DISTTENSOR_PLAN": os.fsdecode(data.replace(b"\0", b""))}):
        spec_of_dtrun()


def _settings(data: bytes) -> None:
    Settings.of(_DEFAULTS, _environment(data), None)


def _affinity(data: bytes) -> None:
    with mock.patch.dict(os.environ, _environment(data)):
        affinity.plan("core", 1, 4, affinity.this_host.__wrapped__())


def _arguments(data: bytes) -> list[str]:
    return [os.fsdecode(part) for part in data.split(b"\0")]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Options are checked, and nothing is made, looked up or printed."""
    with (
        mock.patch.object(checked_options, "make_private_folder"),
        mock.patch.object(os, "mkdir", side_effect=AssertionError("a folder is made")),
        mock.patch.object(checked_options, "_is_here", return_value=True),
        mock.patch.object(checked_options, "read_hostfile", side_effect=OSError("no such file")),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


def _options(data: bytes) -> None:
    with _alone():
        try:
            checked_options.parse(_arguments(data))
        except SystemExit as end:
            if end.code not in (0, 2):
                raise AssertionError(end.code) from end
            raise


def _worker_options(data: bytes) -> None:
    with _alone(), mock.patch.dict(os.environ, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}):
        worker_cli._where(worker_cli._parser().parse_args(_arguments(data)))


def _store(data: bytes) -> None:
    there = SimpleNamespace(wait=lambda keys, timeout: None, get=lambda key: data)
    with mock.patch.object(torchrun, "_store", return_value=there):
        torchrun.look_up("host", 1, "meeting", 1.0)


def _reached(data: bytes) -> None:
    """The addresses of an invitation: nobody is there."""

    def nobody(host: str, port: int, **how: Any) -> None:
        host.encode("idna")
        raise socket.gaierror(-2, "nobody")

    with mock.patch.object(socket, "getaddrinfo", nobody):
        tunnel._reach(_arguments(data), ("p", "s"), "k", 0.0)


def _text_of(decode: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: decode(os.fsdecode(data))


def _choice(text: str) -> None:
    OutputChoice(text).has(1, 2)


_FLAGS = [
    "-n", "--nproc-per-node", "--simulate-cuda", "--backend", "--bind", "--env", "--hosts", "--hostfile", "--launcher",
    "--launcher-option", "--python", "--ssh-options", "--interface", "--timeout", "--nnodes", "--node-rank",
    "--master-addr", "--master-port", "--rdzv-endpoint", "--connection-file", "--log-dir", "-t", "-r", "--standalone",
]  # fmt: skip
_VALUES = ["2", "a:4", "local", "1:2", "A=b", "0", "3", "0:1,1:2", "host:29500", "core", "gpu", "/x"]
_ARGV = st.lists(st.sampled_from([*_FLAGS, *_VALUES, __file__]), max_size=6).map(
    lambda words: "\0".join(words).encode()
)
_PAIRS = st.tuples(st.sampled_from(_FLAGS[:-1]), st.sampled_from(_VALUES)).map(
    lambda pair: "\0".join([*pair, __file__]).encode()
)
_WORKER = st.tuples(
    st.sampled_from(
        ["-n", "--connection-file", "--master-addr", "--master-port", "--init-method", "--rank", "--timeout"]
    ),
    st.sampled_from([*_VALUES, "env://", "tcp://a:1"]),
).map(lambda pair: "\0".join(pair).encode())  # fmt: skip

DECODERS: tuple[Decoder, ...] = (
    Decoder(
        "batch",
        packed(c.Batch, *_BATCHES),
        _batch,
        (ProtocolError,),
        covers=(
            "runtime/protocol/codec.py:",
            "runtime/protocol/framing.py:Decoder.__init__",
            "runtime/protocol/framing.py:Decoder.decode",
        ),
        examples=150,
    ),
    Decoder(
        "word beside",
        packed(side.Gone),
        side.decode,
        (ProtocolError,),
        covers=(
            "runtime/protocol/side.py:",
            "runtime/node/side_channel.py:SideChannel._hear",
        ),
    ),
    Decoder(
        "answer beside",
        st.one_of(packed(side.Gathered), packed(side.Described)),
        _answer_beside,
        (ProtocolError,),
    ),
    Decoder(
        "request of what is shared",
        st.one_of(packed(kind, *_REQUESTS.get(kind, ())) for kind in get_args(shared_objects.Request)),
        shared_objects.decode_request,
        (ProtocolError,),
        covers=("runtime/protocol/shared_objects.py:",),
    ),
    Decoder(
        "request to a job",
        messages(JSON, st.sampled_from(_JOB_REQUESTS)).map(lambda line: line + b"\n"),
        _job_request,
        covers=("runtime/host/job_window.py:JobWindow._reply",),
    ),
    Decoder(
        "answer of a job",
        jsons(
            job_sockets.JobSummary
            | job_sockets.OutputAnswer
            | job_sockets.StackAnswer
            | job_sockets.Refusal
            | job_sockets.TraceAnswer
        ),
        partial(job_sockets.decode_answer, job_sockets.FoundJob(1, "")),
        (job_sockets.JobSocketError,),
        covers=("runtime/host/job_sockets.py:decode_answer",),
    ),
    Decoder(
        "flight record of a node",
        st.sampled_from(_FLIGHTS),
        lambda data: [json.dumps(_plain(it), allow_nan=False) for it in flight.decode(data)],
        covers=(
            "runtime/process/flight.py:decode",
            "runtime/process/flight.py:_record",
            "disttensor/seeing/flight.py:_node",
        ),
    ),
    Decoder(
        "timeline of torch's profiler",
        messages(JSON, _TORCH_FILES),
        _torch_timeline,
        (ProtocolError,),
        covers=("disttensor/seeing/torch_trace.py:decode_file",),
        examples=20,
    ),
    Decoder(
        "timeline of torch's profiler, compressed",
        messages(JSON, _TORCH_FILES).map(gzip.compress),
        plain,
        (ProtocolError,),
        covers=("disttensor/seeing/torch_trace.py:plain",),
        examples=20,
    ),
    Decoder(
        "moments beside a timeline of torch's profiler",
        messages(JSON, st.just([_MOMENTS, {}])),
        _torch_moments,
        (ProtocolError,),
        covers=("disttensor/seeing/torch_trace.py:trace_of",),
        examples=20,
    ),
    Decoder(
        "answer of what is shared",
        packed(shared_objects.ObjectAnswer, *_ANSWERS),
        shared_objects.decode_answer,
        (ProtocolError,),
    ),
    Decoder(
        "pieces of what is shared",
        st.binary(max_size=40).map(lambda data: shared_objects.LAST + data),
        lambda data: Joining().add(data),
        (ProtocolError,),
    ),
    Decoder(
        "what an actor's method has raised",
        packed(c.Failed, *(told for told in _REPORTS if isinstance(told, c.Failed))),
        shared_objects.decode_raised,
        (ProtocolError,),
        covers=("runtime/protocol/shared_objects.py:decode_raised",),
    ),
    Decoder("item", _ITEMS, _item, (ProtocolError,), covers=_UNPACKS),
    Decoder("report", packed(c.Report, *_REPORTS), _report, (ProtocolError,), examples=150),
    Decoder(
        "value",
        messages(MSGPACK, of_type(list[c.Plain])).map(_nested),
        lambda data: values.decode(data, [1]),
        (ProtocolError,),
    ),
    Decoder(
        "value that is known",
        st.sampled_from(_CROSSING),
        lambda data: values.weight(data, []) and values.decode(data, [], _CLASSES),
        (ProtocolError, values.Unannounced),
        examples=150,
        covers=(
            "runtime/protocol/values/counting.py:_number",
            "runtime/protocol/values/decoding.py:",
            "runtime/protocol/values/decoding.py:decode",
            "runtime/protocol/values/decoding.py:_head",
            "runtime/protocol/values/decoding.py:_Decoding.__init__",
            "runtime/protocol/values/decoding.py:_Decoding.value",
            "runtime/protocol/values/decoding.py:_Decoding._extension",
            "runtime/protocol/values/plain_types.py:_int",
        ),
    ),
    Decoder(
        "bundle",
        _frames(jsons(Bundle, _BUNDLE)),
        _bundle,
        (EOFError, ValueError),
        covers=("runtime/protocol/bundle.py:read_bundle",),
    ),
    Decoder(
        "checked host",
        st.sampled_from(
            [b'{"python": "3.11.7", "time": 1.5, "port": 4711, "protocol": 16, "torch": "2.13.0"}', b'{"a": ""}']
        ),
        host_check.told_of,
        (ProtocolError,),
        covers=("disttensor/cli/host_check.py:told_of",),
        examples=80,
    ),
    Decoder(
        "orders",
        _frames(packed(control.Order, *_ORDERS)),
        _heard(control.Order),
        (ProtocolError,),
        covers=(
            "runtime/launch/tree/framed.py:FramedSocket.__init__",
            "runtime/launch/tree/framed.py:FramedSocket._decode",
            "runtime/protocol/framing.py:length",
        ),
        examples=80,
    ),
    Decoder("news", _frames(packed(control.News, *_NEWS)), _heard(control.News), (ProtocolError,), examples=80),
    Decoder(
        "news of an agent by ssh",
        _frames(packed(control.News, *_NEWS)).map(lambda frames: b"Welcome!\n" + MARK + frames),
        _marked,
        (ProtocolError,),
    ),
    Decoder(
        "tunnel",
        st.lists(st.sampled_from([b"Dabc", b"A" + (10).to_bytes(8, "big"), b"E", b"A\1", b"A"])).map(b"\n".join),
        _tunnel,
        covers=("runtime/transport/tunnel_io.py:End.handle_message",),
    ),
    Decoder(
        "messages of another program",
        _ENDPOINT,
        _endpoint,
        (ProtocolError,),
        covers=(
            "runtime/endpoints/frames.py:",
            "runtime/endpoints/frames.py:decode_head",
            "runtime/endpoints/wires.py:Wires._handle_message",
        ),
    ),
    Decoder(
        "modules",
        packed(Sources).map(zlib.compress),
        _modules,
        (ValueError,),
        covers=("runtime/launch/tree/shipping.py:unpack", "runtime/launch/tree/shipping.py:import_shipped"),
    ),
    Decoder("output of a node", _texts("a\x1b[1mb\r50%\r60%\n", "x\b\n", "\x1b]0;title\x07y"), _output),
    Decoder(
        "header",
        st.tuples(_HEADS, st.binary(max_size=4)).map(lambda it: Sealer(_KEY).seal(*it)),
        _head,
        (ProtocolError,),
        covers=("runtime/channel/tcp/frames.py:nbytes_of", "runtime/channel/tcp/frames.py:Opener.open"),
    ),
    *(
        Decoder(
            name,
            _joined(_HEADS.map(_sealed), st.binary(max_size=80)),
            partial(_connection, mode, shield),
            (ProtocolError, EOFError),
        )
        for name, mode, shield in (
            ("connection of a peer", 0, lambda: None),
            ("connection with checksums", CHECKSUM, Checked),
            ("encrypted connection", ENCRYPT, lambda: Sealed(_KEY)),
        )
    ),
    Decoder(
        "handshake's hello",
        st.binary(min_size=handshake.HELLO - 4, max_size=handshake.HELLO - 4).map(lambda it: b"DTt4" + it),
        _greeting,
        covers=("runtime/channel/tcp/handshake.py:PeerHello.parse",),
    ),
    Decoder(
        "handshake's verdict",
        st.binary(min_size=_ANSWER, max_size=_ANSWER),
        _verdict,
        (EOFError, BrokenError),
        covers=("runtime/channel/tcp/handshake.py:call",),
    ),
    Decoder(
        "segment",
        st.just(_NOTHING + bytes([50]) + bytes(7)),
        _segment,
        (ProtocolError, OSError),
        covers=("runtime/channel/shm/segments.py:unpacked",),
    ),
    Decoder("words of shm", _WORDS, _hears(Sharing), (ProtocolError, OSError)),
    Decoder(
        "words of a node that is read",
        st.one_of(_WORDS, st.just(b"#" + bytes(24) + _NOTHING)),
        _hears(lambda say: ScriptSharing(os.getpid, say)),
        (ProtocolError, OSError),
        covers=("runtime/channel/shm/direct.py:ScriptSharing._find_mark",),
        examples=80,
    ),
    Decoder(
        "words of a script that reads",
        st.one_of(_WORDS, _texts("@", "=")),
        _hears(NodeSharing),
        (ProtocolError, OSError),
        examples=80,
    ),
    Decoder(
        "words of shm with CUDA",
        st.one_of(_WORDS, _OFFERED),
        _hears(CudaSharing),
        (ProtocolError, OSError),
        covers=(
            "runtime/channel/shm/cuda_ipc.py:imported",
            "runtime/channel/shm/cuda_ipc.py:CudaSharing.open",
        ),
        examples=80,
    ),
    Decoder(
        "words of MPI",
        st.one_of(st.just(b"?" + bytes(12)), st.just(b"!" + bytes(12)), st.just(b"x" + bytes(8) + b"why")),
        _hears(lambda say: MpiCarrier(_library(), 1, say)),
        (ProtocolError,),
        covers=("runtime/channel/mpi/channel.py:MpiCarrier.hear", "runtime/channel/mpi/channel.py:MpiCarrier.open"),
    ),
    Decoder(
        "words of gloo",
        _texts("met", "key\0value"),
        _hears(lambda say: GlooCarrier(_library(), 1, say)),
        (ProtocolError,),
        covers=("runtime/channel/library_groups.py:entry",),
    ),
    Decoder(
        "words of nccl",
        st.one_of(_WORDS, _texts("=key\0value", "@key\0value")),
        _hears(lambda say: NcclSharing(_library(), 1, say)),
        (ProtocolError, OSError),
    ),
    Decoder(
        "gloo's addresses",
        st.just(b"\x02\0\x12\x34\x7f\0\0\1"),
        lambda data: addresses_in([data], ["127.0.0.1", "::1"]),
        covers=("runtime/channel/gloo/store.py:addresses_in",),
    ),
    Decoder("peer's address", _texts("127.0.0.1:5", "[::1]:5,10.0.0.1:6"), _text_of(split_address), (ValueError,)),
    Decoder("address", _texts("tcp://10.0.0.1:41233", "tcp://[::1]:5"), _text_of(split), (ValueError,)),
    Decoder("addresses to join", _texts("tcp://10.0.0.1:41233", "tcp://[::1]:5\0tcp://a:1"), _reached, (BrokenError,)),
    Decoder(
        "connection file",
        jsons(credentials.Invitation, _INVITATION),
        _connection_file,
        (StartError,),
        covers=("runtime/launch/rendezvous/credentials.py:decode_invitation",),
        examples=60,
    ),
    Decoder(
        "who saves a checkpoint",
        _texts('{"number":"0123abcd","process":["a","b 1",7,"8"],"since":1.5,"locked":true}'),
        decode_owner,
        covers=("disttensor/checkpoint/turn.py:decode_owner",),
    ),
    Decoder("secret file", _texts("0123456789abcdef", " x\n"), _secret_file, (StartError,)),
    Decoder("secret in the environment", _texts("0123456789abcdef"), _secret_variable),
    Decoder(
        "what Ray's actors are told",
        jsons(RayAgentStart, RayAgentStart(_INVITATION, 2, 0)),
        read_told,
        (StartError,),
        covers=("runtime/launch/starters/ray_agent.py:read_told",),
    ),
    Decoder(
        "torchrun's store",
        _texts("tcp://10.0.0.1:41233 tcp://[::1]:5"),
        _store,
        (StartError,),
        covers=("runtime/launch/rendezvous/torchrun.py:look_up",),
    ),
    Decoder("hosts", _HOSTS, _text_of(parse_hosts), (ValueError,), examples=60),
    Decoder("hostfile", _texts("a slots=4\nb:4 # x\n", "a slots = 4 max_slots=8\n"), _hostfile, (ValueError, OSError)),
    Decoder("Slurm's environment", _variables(**_SLURM), _slurm, examples=100),
    Decoder(
        "init_method", _joined(_METHODS, _variables(**_RANKS, **_SLURM), by=b"\0"), _meeting, (ValueError,), examples=80
    ),
    Decoder("mpiexec's environment", _variables(PMI_RANK=["1"], PMI_SIZE=["4"], OMPI_COMM_WORLD_RANK=["x"]), _mpi),
    Decoder(
        "plan of dtrun",
        jsons(LaunchSpec, LaunchSpec("ssh", (Host("a", 4),))),
        _plan,
        (ValueError,),
        covers=("runtime/host/launch_spec.py:spec_of_dtrun", "runtime/protocol/bundle.py:_texts"),
    ),
    Decoder(
        "settings",
        _variables(**{row.variable: ["2", "tcp", ""] for row in SETTINGS if row.variable}),
        _settings,
        (ValueError, TypeError),
    ),
    Decoder(
        "affinity", _variables(CUDA_VISIBLE_DEVICES=["0,1", "GPU-x", "-1"], DISTTENSOR_OWN=["gpus,cores"]), _affinity
    ),
    Decoder("options of dtrun", st.one_of(_ARGV, _PAIRS), _options, (SystemExit,), examples=80),
    Decoder("options of dtrun worker", _WORKER, _worker_options, (SystemExit, ValueError)),
    Decoder(
        "name in a bundle",
        _texts("\0ff2f", "\0", "/tmp", "PATH"),
        _text_of(lambda text: as_text(as_name(text))),
        (ValueError,),
        covers=("runtime/protocol/bundle.py:as_name",),
    ),
    Decoder("streams of nodes", _texts("3", "0:1,1:2", ""), _text_of(_choice), (ValueError,)),
    Decoder(
        "operators",
        _texts("aten::add.Tensor", "aten::relu", "prims::add"),
        lambda data: AllowList().resolve(data.decode(errors="replace")),
        (ProtocolError,),
    ),
)

_OWN = "what this process, or one that it has started and that runs the same code, has written itself"
_PAGE = "numbers of fixed sizes, each of which means something; any text made of them is checked where it is used"
_KERNEL = "the kernel's answer to a call"
_LIBRARY = "a library's, which made it of nothing that came from elsewhere"
_MPIS = "MPI's messages: their processes belong to one mpiexec, which starts them and which nobody else can join"
_ENCODED = "a text that was encoded just before, without what can't be"
_CHECKS = "the contract of launchers, whose processes are its own"

#: Places that decode and are in no decoder's ``covers``.
USES_WITHOUT: dict[str, str] = {
    "disttensor/tasks/announcing.py:raised": "values.decode, which is fuzzed",
    "disttensor/tasks/calls.py:FunctionCall._value": "values.decode, which is fuzzed",
    "disttensor/tasks/calls.py:FunctionCall.item_results": "values.decode, which is fuzzed, of values put together",
    "runtime/node/user_functions.py:Outcome.value": "what this node itself has encoded",
    "disttensor/cli/doctor.py:_Trial.rows": "what a program prints that this one has started",
    "disttensor/checkpoint/folder.py:_hashes": "a checkpoint is trusted, for torch unpickles its .metadata",
    "disttensor/checkpoint/folder.py:_check_torchs": "hexadecimal digits, which a pattern has found",
    "runtime/host/launch_spec.py:text_of": _OWN,
    "disttensor/startup/notebook.py:_unread": _KERNEL,
    "runtime/channel/nccl/library.py:Communicator._check": _LIBRARY,
    "runtime/channel/shm/cuda_ipc.py:export": _OWN,
    "runtime/channel/tcp/dial.py:unacknowledged": _KERNEL,
    "disttensor/seeing/breakpoints.py:Prompter._ask": _ENCODED,
    "disttensor/seeing/report_page.py:in_html": _ENCODED,
    "disttensor/seeing/report_page.py:page_of": _ENCODED,
    "disttensor/seeing/run_report.py:cut": _ENCODED,
    "disttensor/seeing/time_buckets.py:_text": _ENCODED,
    "runtime/process/cells.py:script_name": _ENCODED,
    "disttensor/seeing/breakpoints.py:_print": _ENCODED,
    "runtime/node/debugger_talk.py:Talk._send_state": _ENCODED,
    "runtime/node/debugger_talk.py:Talk.stop_at": _ENCODED,
    "runtime/contracts/launcher_stage.py:Master.turn": _CHECKS,
    "runtime/contracts/launcher_stage.py:Puppet.hear": _CHECKS,
    "runtime/contracts/launcher_worker.py:_Worker.serve": _CHECKS,
    "disttensor/cli/jobs.py:_stack": "job_sockets.decode_answer, which is fuzzed",
    "disttensor/cli/jobs.py:_status": "job_sockets.decode_answer, which is fuzzed",
    "disttensor/cli/jobs.py:_trace": "what a job of this user's, or of root's, has compressed itself",
    "disttensor/cli/top.py:_ask": "job_sockets.decode_answer, which is fuzzed",
    "runtime/host/job_sockets.py:peer_of": _KERNEL,
    "runtime/host/affinity.py:_uuids": _LIBRARY,
    "runtime/host/interfaces.py:interfaces": _KERNEL,
    "runtime/host/tcp_info.py:bytes_received": _KERNEL,
    "runtime/host/tcp_info.py:Unanswered.lasts": _KERNEL,
    "runtime/host/mpi_env.py:world": _MPIS,
    "runtime/launch/entry.py:main": _OWN,
    "runtime/launch/output/lines.py:": _OWN,
    "runtime/launch/starters/mpi.py:MpiProcesses.gather.one_came": _MPIS,
    "runtime/launch/starters/mpi_node.py:_work": _MPIS,
    "runtime/launch/starters/ray.py:RayStarter._hear": _OWN,
    "runtime/launch/starters/ray_driver.py:NodeActor.where": _OWN,
    "runtime/launch/starters/ray_driver.py:_listen": _OWN,
    "runtime/launch/tree/spawn.py:inherited_server": _KERNEL,
    "runtime/node/failures.py:_clean": _OWN,
    "runtime/node/graphs/engines/builder.py:Build.load": f"{_OWN}; it is renamed when it is complete",
    "runtime/node/graphs/engines/child.py:main": _OWN,
    "runtime/node/graphs/engines/listing.py:parse": _OWN,
    "runtime/node/samples.py:_seed": "a hash of numbers",
    "runtime/node/warned.py:telling.tell": "what was encoded just before, so that any text can be sent",
    "runtime/process/flight.py:own": "a ring of this process",
    "runtime/process/page.py:Page.flight": _PAGE,
    "runtime/process/page.py:Page.has_begun": _PAGE,
    "runtime/process/page.py:Page.beside": _PAGE,
    "runtime/process/page.py:Page.read": _PAGE,
    "runtime/process/page.py:Page.running": _PAGE,
    "runtime/process/page.py:Page.tally": _PAGE,
    "runtime/protocol/keys.py:curve_pair": _LIBRARY,
    "runtime/protocol/keys.py:curve_pair_of": _LIBRARY,
    "runtime/transport/spoke.py:_connect": _LIBRARY,
    "runtime/transport/zap.py:ZapHandler._answer": _LIBRARY,
    "runtime/transport/zap.py:ZapHandler._note_event": _LIBRARY,
    "runtime/transport/zmq.py:_raw_keys": _OWN,
}
