"""The vocabulary of the control channel. Frozen structs, no logic.

    master -> node   Batch(first, commands)     commands are numbered from 0 per node; `first` is the first one's number
    node -> master   Report(done, replies)      `done` commands have been applied; replies are the exception

Refs in a Call are written as distances from ``out``, which keeps them short: recent operands take one byte.
A Call names a *template*, defined once: an operator with its static arguments, and holes for tensors and numbers.
"""

from __future__ import annotations

from typing import TypeAlias

from .arguments import *  # noqa: F403 - whoever needs commands needs these
from .arguments import Expected, Geometry, Plain, Spec, Value, Wire

# ---- commands: master -> node --------------------------------------------------------------------------------------


class Call(Wire, frozen=True, tag=10):
    """Runs a template. ``args``: a distance ``out - ref`` per tensor hole and a number per number hole, in order,
    then the distance of each output after the first. A template without outputs uses ``out`` as a base only."""

    template: int
    out: int
    args: tuple[Plain, ...]


class First(Call, frozen=True, tag=58):
    """The first Call of a signature, which fails where the node has other tensors than the master takes it to have.

    ``gives`` and ``keeps``: what each output is, and each argument that the operator writes, afterwards; by their place
    in ``kinds``.
    """

    kinds: tuple[Expected, ...]
    gives: tuple[int, ...]
    keeps: tuple[int, ...]


class Define(Wire, frozen=True, tag=11):
    """Defines a template: ``op`` as "aten::add.Tensor", its arguments, and how many tensors it puts out."""

    template: int
    op: str
    args: tuple[Spec, ...]
    kwargs: tuple[tuple[str, Spec], ...]
    outs: int


class Forget(Wire, frozen=True, tag=12):
    """Drops the templates numbered below ``below``: the master has started new ones, and nothing names those."""

    below: int


class Free(Wire, frozen=True, tag=13):
    """Drops refs: ``first`` and each next one by its distance from the one before."""

    first: int
    distances: tuple[int, ...]


class Ask(Wire, frozen=True, tag=14):
    """Runs a template and answers: with its plain value (Answer), or its outputs' geometry (Shapes)."""

    request: int
    call: Call


class Send(Wire, frozen=True, tag=15):
    """Sends the tensor to a peer through a data channel: its number is 0 for the session's own."""

    transfer: int
    ref: int
    peer: int
    channel: int = 0


class Recv(Wire, frozen=True, tag=16):
    """Receives a tensor from a peer; later commands that use ``out`` wait for it."""

    transfer: int
    out: int
    peer: int
    shape: tuple[int, ...]
    dtype: int
    device: str
    channel: int = 0


class Piece(Wire, frozen=True, tag=17):
    """A piece of a pickled function or of its arguments, collected under ``key``."""

    key: bytes
    data: bytes
    last: bool


class World(Wire, frozen=True):
    """Nodes with a process group of torch.distributed's, in the order of its ranks."""

    number: int  #: counts the process groups of a session
    ranks: tuple[int, ...]
    channel: int  #: the number of the data channel by which they find each other
    backend: str  #: torch's name of it


class Run(Wire, frozen=True, tag=18):
    """Runs a user's function: ``function`` and ``arguments`` name collected pieces; answers with Result."""

    request: int
    function: bytes
    arguments: bytes
    keep: bool  #: the function will be run again (it holds no tensors)
    what: str  #: the function in words, for errors
    refs: tuple[int, ...] = ()  #: of the tensors that the function and its arguments name
    world: World | None = None  #: it is run as a rank of that


class Adopt(Wire, frozen=True, tag=19):
    """Gives refs to the tensors that a Run returned, in order; 0 drops one, and no refs drop what there may be."""

    request: int
    refs: tuple[int, ...]


class Seed(Wire, frozen=True, tag=20):
    """Seeds the node's default generators as torch.manual_seed does."""

    seed: int


class Random(Wire, frozen=True, tag=21):
    """Answers with the state of a device's generator (state empty) or sets it."""

    request: int
    device: str
    state: bytes


class Keep(Wire, frozen=True, tag=29):
    """The state of a device's generator becomes a tensor, which stays on the node; or is set to that tensor again."""

    ref: int
    device: str
    restore: bool


class Sync(Wire, frozen=True, tag=22):
    """Answers with Done once everything before it is done, transfers included."""

    request: int


class Memory(Wire, frozen=True, tag=23):
    """Answers with the number of live tensors and the bytes of their storages on ``device`` ("" for all)."""

    request: int
    device: str


class Storage(Wire, frozen=True, tag=28):
    """Answers with numbers of the storage that a tensor is in: one that names it, its address, its bytes."""

    request: int
    ref: int


class Count(Wire, frozen=True, tag=39):
    """Answers with what the node's data channels have carried so far."""

    request: int


class Open(Wire, frozen=True, tag=56):
    """Opens one more data channel; answers with its address and, in the next line, that for collectives."""

    request: int
    channel: int
    name: str


class Usable(Wire, frozen=True, tag=57):
    """Answers why these channels (``ops``: operators) can't be used here, a line for each: an empty one if it can."""

    request: int
    names: tuple[str, ...]
    ops: bool = False


class Peer(Wire, frozen=True, tag=24):
    """A peer's data channel: its address (as in a Hello), and the key that only the two of them have."""

    rank: int
    address: str
    key: bytes
    channel: int = 0


class Lost(Wire, frozen=True, tag=25):
    """A peer is gone: transfers with it fail."""

    rank: int
    why: str


class Default(Wire, frozen=True, tag=27):
    """The master's default dtype (torch.set_default_dtype) is this one from now on."""

    dtype: int


class Stream(Wire, frozen=True, tag=31):
    """Makes a stream, under ``ref``: a lane of a CPU, or a CUDA stream of this priority. A Free ends it."""

    ref: int
    device: str
    priority: int


class Record(Wire, frozen=True, tag=32):
    """Makes an event, under ``ref``: it is done when all is that was issued to the stream before it.

    ``device`` is that of the stream, which tells the default streams of a node's devices apart."""

    ref: int
    device: str
    timing: bool


class Wait(Wire, frozen=True, tag=33):
    """The stream goes on when the event under ``ref`` is done."""

    ref: int


class Signal(Wire, frozen=True, tag=34):
    """When the event under ``ref`` is done, sends a tensor without elements to a peer, whose Await takes it."""

    transfer: int
    ref: int
    peer: int


class Await(Wire, frozen=True, tag=35):
    """The stream goes on when a peer's Signal has come."""

    transfer: int
    peer: int


class Query(Wire, frozen=True, tag=36):
    """Answers whether the event under ``ref`` is done."""

    request: int
    ref: int


class Elapsed(Wire, frozen=True, tag=37):
    """Answers with the milliseconds between two events, or None if one of them is not done."""

    request: int
    first: int
    second: int


class Join(Wire, frozen=True, tag=38):
    """Answers with Done once the event under ``ref`` is done."""

    request: int
    ref: int


class Collective(Wire, frozen=True, tag=60):
    """Takes part in a collective of ``ranks``; all of them are told the same ``kind``, ``transfer`` and options.

    ``lengths``: the elements of ``inputs``, then of ``outs``, which are written. ``root``: the place in ``ranks`` of
    whom it is about; of a shift, by how many. ``carry``: the dtype that travels, -1 for the tensors' own. ``hosts``:
    which host each rank is on, if that matters. ``done``: a transfer to the master that tells of the end, 0 for none;
    with one, what comes after need not wait. ``channel``: the number of the data channel. ``shares``, where ranks have
    others than one tensor: how many tensors each has; of an all_gather into one tensor, how many elements.
    """

    kind: str
    transfer: int
    ranks: tuple[int, ...]
    inputs: tuple[int, ...]
    outs: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: int
    op: int
    root: int
    algorithm: str
    base: int
    chunk: int
    carry: int
    hosts: tuple[int, ...]
    done: int
    channel: int = 0
    shares: tuple[int, ...] = ()


class Part(Wire, frozen=True, tag=50):
    """Commands that a graph has recorded, in order, after those of earlier parts. ``numbers``: which numbers of Calls
    each replay gives anew, as (command in this part, index of its argument, number)."""

    graph: int
    commands: tuple[Call | First | Send | Recv | Seed | Keep | Collective, ...]
    numbers: tuple[tuple[int, int, int], ...]


class Graph(Wire, frozen=True, tag=51):
    """Ends a graph's recording. ``inputs``: refs for which each replay names others. ``outputs``: what it makes that
    stays, under the same refs for every replay. ``returned``: the same, but each replay names other refs."""

    graph: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    returned: tuple[int, ...]
    engine: str


class Replay(Wire, frozen=True, tag=52):
    """Does all that a graph has recorded. Its transfers are numbered from ``transfer``."""

    graph: int
    transfer: int
    numbers: tuple[Plain, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class On(Wire, frozen=True, tag=30):
    """Does a command on a stream of the node that is not its default one."""

    stream: int
    command: (
        Call | First | Ask | Send | Recv | Run | Seed | Random | Keep | Storage | Record | Wait | Await | Replay
        | Collective
    )  # fmt: skip


class Discard(Wire, frozen=True, tag=53):
    """Drops a graph."""

    graph: int


class Engines(Wire, frozen=True, tag=54):
    """Answers with what runs each part of a graph: lines of "engine: why no other"."""

    request: int
    graph: int


class Stop(Wire, frozen=True, tag=26):
    """The last command: drop everything and end."""


Command: TypeAlias = (
    Call
    | First
    | Define
    | Forget
    | Free
    | Ask
    | Send
    | Recv
    | Piece
    | Run
    | Adopt
    | Seed
    | Random
    | Keep
    | Sync
    | Memory
    | Storage
    | Count
    | Open
    | Usable
    | Peer
    | Lost
    | Default
    | Stream
    | Record
    | Wait
    | Signal
    | Await
    | Query
    | Elapsed
    | Join
    | Collective
    | On
    | Part
    | Graph
    | Replay
    | Discard
    | Engines
    | Stop
)


class Batch(Wire, frozen=True, tag=1):
    first: int
    commands: tuple[Command, ...]


# ---- replies: node -> master ---------------------------------------------------------------------------------------


class Abilities(Wire, frozen=True):
    """What a node's torch chooses kernels by, beside operands: the CPU's instructions, its libraries, its GPUs."""

    cpu: str  #: torch's name of the instructions that its own kernels use, as "AVX2"
    onednn: bool  #: torch has the library
    bfloat16: bool  #: which computes in this on the node's CPU
    float16: bool  #: and in this
    cudnn: int = 0  #: the library's version as a number, as 91002; 0 where torch has none
    cuda: tuple[int, int] = (0, 0)  #: the version that torch is built for
    flash: bool = False  #: torch is built with flash attention for CUDA
    capabilities: tuple[tuple[int, int], ...] = ()  #: of each CUDA device; (0, 0) of a simulated one


class Hello(Wire, frozen=True, tag=40):
    """A worker's first words. The rank is not among them: it comes from the authenticated connection."""

    protocol: int
    job: str
    pid: int
    host: str
    torch: str
    python: str
    devices: tuple[str, ...]
    simulated: bool  #: its CUDA devices are CPU memory
    channel: str  #: the address of its data channel and, in the next line, of that for collectives
    abilities: Abilities
    gpus: tuple[str, ...] = ()  #: what its CUDA devices are, in words that are theirs on the whole host


class Answer(Wire, frozen=True, tag=41):
    request: int
    value: Value


class Shapes(Wire, frozen=True, tag=42):
    request: int
    outs: tuple[Geometry | None, ...]  #: None where the operator gave none


class Result(Wire, frozen=True, tag=43):
    """What a user's function returned: msgpack with tensors as extension values, and their geometry."""

    request: int
    data: bytes
    tensors: tuple[Geometry, ...]
    kept: bool = True  #: the world that it was run in is still there


class Failed(Wire, frozen=True, tag=44):
    """Command number ``seq`` failed; its outputs are poisoned. Sent once, when it happened. Of the commands that a
    graph replays each has a number of its own (master/failures.py: ``replayed``)."""

    seq: int
    op: str
    kind: str  #: the exception type, as "builtins.RuntimeError"
    message: str
    traceback: str  #: empty where nothing of the user's is in it
    args: tuple[Plain | tuple[Plain, ...], ...] = ()  #: of a type of Python's own, if they are more than its message


class Poisoned(Wire, frozen=True, tag=45):
    """The answer to a request for something poisoned: the failure ``seq`` on node ``rank`` caused it."""

    request: int
    rank: int
    seq: int


class Done(Wire, frozen=True, tag=46):
    request: int


#: Calls, bytes, seconds.
Figures: TypeAlias = tuple[int, int, float]


class Counts(Wire, frozen=True, tag=47):
    """Of each data channel and peer: the channel's name, what it is used for, the peer, what was sent, and received."""

    request: int
    rows: tuple[tuple[str, str, int, Figures, Figures], ...]


Reply: TypeAlias = Hello | Answer | Shapes | Result | Failed | Poisoned | Done | Counts


class Report(Wire, frozen=True, tag=2):
    done: int
    replies: tuple[Reply, ...]
