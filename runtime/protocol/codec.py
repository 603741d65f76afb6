"""Encodes and decodes commands, and converts Python arguments to wire arguments and back.

Everything that arrives is decoded into the types of commands.py or refused with ProtocolError; nothing is unpickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch

from . import commands as c
from .arguments import Addresses
from .dtypes import DTYPES, IDS, NAMES
from .errors import ProtocolError
from .framing import Decoder
from .rank_lists import ranks_of

#: A message is at most this long; the socket factory cuts longer ones off.
MAX_MESSAGE = 1 << 20

#: The most CUDA devices of a node, and characters of a host's name (as in DNS) and of a data channel's address.
MAX_DEVICES, MAX_HOST, MAX_ADDRESS = 64, 255, 4096
#: The most dims of a mesh.
MAX_DIMS = 64
#: The most dims of a tensor that is copied, or that a proxy is made of.
MAX_TENSOR_DIMS = 64
#: The most bytes of a tensor that is copied.
MAX_COPY = 1 << 46
#: The bytes of a tensor's hash.
DIGEST = 16
#: The most characters of a reason why something can't be used.
MAX_REASON = 4096
#: The most characters of what a debugger says at once, and of the name of the file where it has stopped.
MAX_DEBUGGED, MAX_PATH = 1 << 18, 4096
#: The most figures of a device's memory, and characters of the name of one; the most tensors that a node names as its
#: largest, and characters of a tensor's dtype and shape.
MAX_FIGURES, MAX_FIGURE, MAX_HELD, MAX_WHAT = 1000, 100, 1000, 200

#: The number of elements or bytes that torch can count with room to spare. (An expanded tensor has no such memory.)
_COUNTABLE = 1 << 62
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}\S{0,100}")
_WORD = re.compile(r"[\w .-]{1,40}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,3})?")
LAYOUTS: tuple[torch.layout, ...] = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
FORMATS: tuple[torch.memory_format, ...] = (
    torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d,
)  # fmt: skip

_LAYOUT_ID = {d: i for i, d in enumerate(LAYOUTS)}
_FORMAT_ID = {d: i for i, d in enumerate(FORMATS)}

_encoder = msgspec.msgpack.Encoder()

encode: Callable[[c.Batch | c.Report | c.Reply], bytes] = _encoder.encode


def size(command: c.Command) -> int:
    """Returns the number of bytes that a command takes on the wire."""
    return len(_encoder.encode(command))


def body(message: bytes, first: int, count: int) -> bytes:
    """Returns the commands of an encoded batch: ``count`` of them, numbered from ``first``."""
    return message[len(_head(first, count)) :]


def batch(first: int, count: int, bodies: Iterable[bytes]) -> bytes:
    """Returns an encoded batch of the commands of several, ``count`` in all, numbered from ``first``."""
    return b"".join((_head(first, count), *bodies))


@lru_cache(256)
def _head(first: int, count: int) -> bytes:
    """Returns what stands before the commands of an encoded batch."""
    head = _encoder.encode(c.Batch(first, ()))[:-1]  # no commands are one byte, that of their number
    if count < 16:
        return head + bytes((0x90 | count,))
    return head + (b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big"))


#: Decodes a batch of commands, and a node's report. Raises ProtocolError.
decode_batch: Callable[[bytes], c.Batch] = Decoder[c.Batch](c.Batch, "a message").decode
decode_report: Callable[[bytes], c.Report] = Decoder[c.Report](c.Report, "a message").decode


def to_spec(value: object) -> c.Spec:
    """Converts a static argument of an operator to its wire form. Raises TypeError for a type that may not cross."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise OverflowError(f"integer argument {value} does not fit 64 bits")
        return value
    if isinstance(value, (list, tuple)):
        return c.Items(tuple(map(to_spec, value)))
    if isinstance(value, c.Message):
        return value  # type: ignore[return-value]  # a hole, or a device named already
    if isinstance(value, torch.dtype):
        return c.DType(dtype_id(value))
    if isinstance(value, torch.layout):
        return c.Layout(_LAYOUT_ID[value])
    if isinstance(value, torch.memory_format):
        return c.MemoryFormat(_FORMAT_ID[value])
    if isinstance(value, complex):
        return c.Complex(value.real, value.imag)
    if isinstance(value, torch.device):
        return c.Device(str(value))
    raise TypeError(
        f"an argument of type {type(value).__module__}.{type(value).__qualname__} can't go to a node: {value!r}"
    )


def dtype_id(dtype: torch.dtype) -> int:
    """Returns the dtype's number. Raises TypeError for a dtype that this protocol doesn't carry."""
    try:
        return IDS[dtype]
    except KeyError:
        raise TypeError(f"tensors of {dtype} can't go to a node") from None


def dtype_of(id: int) -> torch.dtype:
    """Returns the dtype of a number. Raises ProtocolError for an unknown number."""
    dtype = DTYPES.get(id)
    if dtype is None:
        raise ProtocolError(f"dtype {NAMES[id] if 0 <= id < len(NAMES) else id} is unknown")
    return dtype


def to_value(value: object) -> c.Value:
    """Converts a plain result (number, bool, text, None, complex) to its wire form. Raises TypeError for others."""
    if isinstance(value, complex):
        return c.Complex(value.real, value.imag)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a value of type {type(value).__name__} is not plain data")


def from_value(value: c.Value) -> object:
    return complex(value.real, value.imag) if isinstance(value, c.Complex) else value


def check_reply(reply: c.Reply) -> None:
    """Refuses metadata that no tensor can have and devices that cannot exist. Raises ProtocolError."""
    REPLIES[type(reply)].check(reply)


def printable(text: str) -> str:
    """Returns somebody else's text without what does something to a terminal."""
    return "".join(ch if ch.isprintable() else "?" for ch in text)


def one_line(text: str) -> str:
    """Returns a text as the master takes it for a reason: one line of printable characters, of MAX_REASON at most."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 4] + " ..."


def _check_reasons(texts: Iterable[str]) -> None:
    for text in texts:
        _check_text("a reason, or a name in a list", text, MAX_REASON)


def _check_sizes(*sizes: int) -> None:
    if min(sizes) < 0:
        raise ProtocolError(f"sizes, addresses and strides are not negative, and these are {sizes!s:.200}")


def _check_breakpoint(said: c.AtBreakpoint) -> None:
    _check_sizes(said.stop, said.line)
    _check_text("the name of a function at a breakpoint", said.what, MAX_REASON)
    if len(said.text) > MAX_DEBUGGED or len(said.file) > MAX_PATH:
        raise ProtocolError(f"a debugger's text of {len(said.text)} characters, in a file named by {len(said.file)}")


def _check_hello(hello: c.Hello) -> None:
    if len(hello.devices) > MAX_DEVICES + 1:
        raise ProtocolError(
            f"{len(hello.devices)} devices are over the limit of {MAX_DEVICES} CUDA devices of one node"
        )
    if hello.devices != ("cpu", *(f"cuda:{i}" for i in range(len(hello.devices) - 1))):
        raise ProtocolError(f"devices are cpu, cuda:0, cuda:1 and so on, not {hello.devices!s:.200}")
    if len(hello.gpus) > MAX_DEVICES:
        raise ProtocolError(f"{len(hello.gpus)} GPUs are over the limit of {MAX_DEVICES}")
    for what, text in (
        ("host", hello.host),
        ("job", hello.job),
        ("python", hello.python),
        ("PCIe root", hello.pcie_root),
        *(("gpu", g) for g in hello.gpus),
    ):
        _check_text(f"the node's {what}", text, MAX_HOST)
    _check_text("the reason why it can't encrypt", hello.no_cipher, MAX_REASON)
    if not 0 <= hello.pid < 1 << 32:
        raise ProtocolError(f"{hello.pid} is no pid")
    if not -1 <= hello.numa < 1 << 16:
        raise ProtocolError(f"{hello.numa} is not the number of a NUMA node")
    if len(hello.memory) not in (0, len(hello.devices)) or any(size < 0 for size in hello.memory):
        raise ProtocolError(f"{hello.memory!s:.200} is not the memory of {len(hello.devices)} devices")
    _check_addresses(hello.addresses)
    _check_abilities(hello)


def _check_addresses(addresses: Addresses) -> None:
    for address in (addresses.transfers, addresses.collectives):
        _check_text("an address of a data channel", address, MAX_ADDRESS)


def _check_text(what: str, text: str, most: int) -> None:
    """Refuses text that would flood a message or play with the user's terminal. Raises ProtocolError."""
    if len(text) > most or not text.isprintable():
        raise ProtocolError(f"{what} is at most {most} printable characters, not {len(text)} as {text[:100]!r}")


def _check_abilities(hello: c.Hello) -> None:
    told = hello.abilities
    numbers = (told.cudnn, *told.cuda, *(n for pair in told.capabilities for n in pair))
    if not _VERSION.fullmatch(hello.torch):
        raise ProtocolError(f"{hello.torch[:100]!r} is no version of torch")
    if not _WORD.fullmatch(told.cpu):
        raise ProtocolError(f"{told.cpu[:100]!r} names no instructions of a CPU")
    if len(told.capabilities) != len(hello.devices) - 1:
        raise ProtocolError(f"{len(told.capabilities)} capabilities of {len(hello.devices) - 1} CUDA devices")
    if not all(0 <= n < 10_000_000 for n in numbers):
        raise ProtocolError(f"versions and capabilities are small numbers, not {numbers!s:.200}")
    if (told.bfloat16 or told.float16) and not told.onednn:
        raise ProtocolError("a torch without oneDNN has no dtypes of that library's")


def _check_geometries(tensors: Iterable[c.Geometry | None]) -> None:
    for tensor in tensors:
        if tensor is not None:
            check_geometry(tensor)


def check_geometry(g: c.Geometry) -> None:
    """Refuses the metadata of a tensor that no proxy can stand for; a node asks before it sends them. Raises
    ProtocolError."""
    itemsize = dtype_of(g.dtype).itemsize
    check_shape(tuple(n or 1 for n in g.shape), itemsize, _COUNTABLE)  # next to a 0 too, sizes have to be countable
    extent = g.offset + sum(max(n - 1, 1) * s for n, s in zip(g.shape, g.stride, strict=False))
    if len(g.stride) != len(g.shape) or min(g.stride, default=0) < 0 or g.offset < 0 or extent * itemsize > _COUNTABLE:
        raise ProtocolError(f"no tensor of shape {g.shape} has strides {g.stride!s:.500} and offset {g.offset}")
    if not 0 <= g.bits <= 3 or (g.bits & 1 and not dtype_of(g.dtype).is_complex):
        raise ProtocolError(f"no tensor of {dtype_of(g.dtype)} has the lazy bits {g.bits}")
    if not _DEVICE.fullmatch(g.device):
        raise ProtocolError(f"{g.device[:100]!r} is no device")


def _check_figures(told: c.MemoryFigures) -> None:
    if len(told.figures) > MAX_FIGURES:
        raise ProtocolError(f"{len(told.figures)} figures of memory are over the limit of {MAX_FIGURES}")
    for name, figure in told.figures:
        _check_text("the name of a figure", name, MAX_FIGURE)
        _check_sizes(figure)
    _check_holdings(told.holdings)


def _check_holdings(told: c.Holdings | None) -> None:
    if told is None:
        return
    _check_sizes(told.tensors, told.bytes, told.free, told.total, *(held.bytes for held in told.largest))
    if len(told.largest) > MAX_HELD:
        raise ProtocolError(f"{len(told.largest)} tensors are over the limit of {MAX_HELD}")
    for held in told.largest:
        _check_text("a tensor's dtype and shape", held.what, MAX_WHAT)


def _check_mapped(told: c.Mapped) -> None:
    _check_sizes(0, *told.done, *told.back)
    if len(told.done) != len(told.results) or not 0 <= told.seconds < math.inf:
        raise ProtocolError(f"{len(told.results)} results of {len(told.done)} items, in {told.seconds} s")


def _check_digest(digested: c.Digested) -> None:
    if len(digested.digest) != DIGEST:
        raise ProtocolError(f"a hash has {DIGEST} bytes, not {len(digested.digest)}")


def _check_state(state: c.RngState) -> None:
    if not state.state:
        raise ProtocolError("a generator's state is not empty")


def _check_counts(counts: c.TrafficCounts) -> None:
    for name, use, _, *figures in counts.rows:
        _check_reasons((name, use))
        for calls, size, seconds in figures:
            _check_sizes(calls, size)
            if not 0 <= seconds < math.inf:
                raise ProtocolError(f"calls of a data channel take some seconds, not {seconds}")


def _nothing(reply: c.Reply) -> None:
    """Checks nothing: decoding has."""


class ReplyTraits(NamedTuple):
    """The traits of one kind of reply: a row of ``REPLIES``."""

    #: answers a request, for which somebody waits: it leaves the node at once, and not at the end of a batch
    awaited: bool
    #: refuses what no honest node says, by ProtocolError
    check: Callable[[Any], None]


#: One row per reply. By the exact type, which is what decoding makes. What a reply says of numbers of commands and of
#: nodes the link checks, which knows how many there are; a tensor's elements are checked where they were asked for, by
#: its shape; a value is the user's, and may be any.
REPLIES: dict[type[c.Reply], ReplyTraits] = {
    c.Hello: ReplyTraits(False, _check_hello),
    c.Answer: ReplyTraits(True, _nothing),
    c.MemoryUsage: ReplyTraits(True, lambda reply: _check_sizes(reply.tensors, reply.bytes)),
    c.MemoryFigures: ReplyTraits(True, _check_figures),
    c.StorageInfo: ReplyTraits(
        True, lambda reply: _check_sizes(reply.name, reply.address, reply.bytes, reply.offset, *reply.stride)
    ),
    c.Digested: ReplyTraits(True, _check_digest),
    c.Downloaded: ReplyTraits(True, _nothing),
    c.RngState: ReplyTraits(True, _check_state),
    c.GraphEngines: ReplyTraits(
        True, lambda reply: _check_reasons(text for program in reply.programs for text in program)
    ),
    c.Opened: ReplyTraits(True, lambda reply: _check_addresses(reply.addresses)),
    c.Unusable: ReplyTraits(True, lambda reply: _check_reasons(reply.reasons)),
    c.Shapes: ReplyTraits(True, lambda reply: _check_geometries(reply.outs)),
    c.Result: ReplyTraits(True, lambda reply: _check_geometries(reply.tensors)),
    c.Mapped: ReplyTraits(False, _check_mapped),
    c.Failed: ReplyTraits(False, lambda reply: _check_holdings(reply.holdings)),
    c.Warned: ReplyTraits(False, _nothing),
    c.AtBreakpoint: ReplyTraits(False, _check_breakpoint),
    c.Poisoned: ReplyTraits(True, _nothing),
    c.Done: ReplyTraits(True, _nothing),
    c.TookPart: ReplyTraits(False, _nothing),  # the lane of collectives says when it leaves
    c.TrafficCounts: ReplyTraits(True, _check_counts),
}


def check_world(world: c.World, rank: int) -> None:
    """Refuses a process group that a node is not in, or whose ranks don't form its mesh. Raises ProtocolError."""
    ranks, mesh = ranks_of(world.ranks), world.mesh
    if rank not in ranks or len(set(ranks)) < len(ranks):
        raise ProtocolError(f"a process group of the nodes {ranks!s:.200}, each once, can't have node {rank} as a rank")
    if mesh is None:
        return
    if not 0 < len(mesh.names) == len(mesh.sizes) <= MAX_DIMS or len(set(mesh.names)) < len(mesh.names):
        raise ProtocolError(
            f"a mesh has 1 to {MAX_DIMS} dims with names of their own, not {len(mesh.sizes)} with the names "
            f"{mesh.names!s:.200}"
        )
    if min(mesh.sizes) < 1 or math.prod(mesh.sizes) != len(ranks):
        raise ProtocolError(f"a mesh of the sizes {mesh.sizes!s:.200} does not have {len(ranks)} ranks")
    if mesh.device not in ("cpu", "cuda"):
        raise ProtocolError(f"a mesh is on 'cpu' or 'cuda', not on {mesh.device!r:.40}")


def check_shape(shape: tuple[int, ...], itemsize: int, limit: int = MAX_COPY) -> None:
    """Refuses a shape before anything is allocated for it. Raises ProtocolError."""
    if why := over(shape, itemsize, limit):
        raise ProtocolError(why)


def dtype_of_data(id: int, shape: tuple[int, ...], data: bytes) -> torch.dtype:
    """Returns the dtype of this number, of a tensor whose elements are these bytes. Raises ProtocolError where they are
    not as many, for a shape that is none, and as ``dtype_of``."""
    dtype = dtype_of(id)
    check_shape(shape, dtype.itemsize)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ProtocolError(f"{len(data)} bytes are none of {dtype} {shape}")
    return dtype


@lru_cache(4096)
def check_copy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuses a copy that the receiver would refuse: at the user's line, before either end knows of it. Raises
    RuntimeError, as torch does for a tensor that it can't make."""
    if why := over(tuple(shape), dtype.itemsize, MAX_COPY):
        raise RuntimeError(f"can't copy a tensor to another process: {why}")


def over(shape: tuple[int, ...], itemsize: int, limit: int) -> str:
    """Returns the reason why a shape is none that can cross; "" where it can."""
    if len(shape) > MAX_TENSOR_DIMS:
        return f"a shape of {len(shape)} dimensions is over the limit of {MAX_TENSOR_DIMS}"
    total = itemsize
    for n in shape:
        if n < 0:
            return f"shape {shape} has a negative size"
        total *= n
    return f"shape {shape} is over the limit of {limit} bytes" if total > limit else ""
