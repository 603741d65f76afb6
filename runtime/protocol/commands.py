"""The vocabulary of the control channel. Frozen structs, no logic.

    master -> node   Batch(first, commands)     commands are numbered from 0 per node; `first` is the first one's number
    node -> master   Report(done, replies, busy)  `done` commands have been applied; replies are the exception

Refs in a Call are written as distances from ``out``, which keeps them short: recent operands take one byte.
A Call names a *template*, defined once: an operator with its static arguments, and holes for tensors and numbers.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from .arguments import *  # noqa: F403 - modules that use commands use these
from .arguments import Addresses, Expected, Geometry, Holdings, Message, Plain, Spec, Value

# ---- commands: master -> node --------------------------------------------------------------------------------------


class Call(Message, frozen=True, tag=10):
    """Runs a template. ``args``: a distance ``out - ref`` per tensor hole and a number per number hole, in order,
    then the distance of each output after the first. A template without outputs uses ``out`` as a base only."""

    template: int
    out: int
    args: tuple[Plain, ...]


class First(Call, frozen=True, tag=58):
    """The first Call of a signature, which fails where the node has other tensors than the master takes it to have.

    ``gives`` and ``keeps``: the metadata of each output, and of each argument that the operator writes, after the call,
    as indices of ``kinds``.
    """

    kinds: tuple[Expected, ...]
    gives: tuple[int, ...]
    keeps: tuple[int, ...]


class Define(Message, frozen=True, tag=11):
    """Defines a template: ``op`` as "aten::add.Tensor", its arguments, and how many tensors it puts out."""

    template: int
    op: str
    args: tuple[Spec, ...]
    kwargs: tuple[tuple[str, Spec], ...]
    outs: int
    foreseen: bool = False  #: whether the master warns of its calls, so that the node's own warnings say nothing new


class Forget(Message, frozen=True, tag=12):
    """Drops templates: the master has started new ones, and no plan names the old ones."""

    templates: tuple[int, ...]


class Free(Message, frozen=True, tag=13):
    """Drops refs: ``first`` and each next one by its distance from the one before."""

    first: int
    distances: tuple[int, ...]


class Ask(Message, frozen=True, tag=14):
    """Runs a template and answers: with its plain value (Answer), or its outputs' geometry (Shapes)."""

    request: int
    call: Call


class Send(Message, frozen=True, tag=15):
    """Sends the tensor to a peer through a data channel: its number is 0 for the session's own."""

    transfer: int
    ref: int
    peer: int
    channel: int = 0


class Recv(Message, frozen=True, tag=16):
    """Receives a tensor from a peer; later commands that use ``out`` wait for it."""

    transfer: int
    out: int
    peer: int
    shape: tuple[int, ...]
    dtype: int
    device: str
    channel: int = 0


class Upload(Message, frozen=True, tag=78):
    """Makes a tensor of bytes that come with the command."""

    out: int
    shape: tuple[int, ...]
    dtype: int
    device: str
    data: bytes


class Download(Message, frozen=True, tag=80):
    """Asks for a tensor's bytes, as it lies when it is contiguous; the node answers Downloaded."""

    request: int
    ref: int


class Piece(Message, frozen=True, tag=17):
    """A piece of a pickled function, or of long arguments, collected under ``key``."""

    key: bytes
    data: bytes
    last: bool


class MeshDims(Message, frozen=True):
    """The dims by which nodes are a mesh, which they are row by row."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    device: str  #: torch's type of the device that tensors of the mesh are on: "cpu" or "cuda"


class RankList(Message, frozen=True):
    """Ranks of nodes, in order (rank_lists.py): ``starts``; for the first count and step, in place of each so many,
    from it on by steps; for the next ones, in place of each of these, and so on."""

    starts: tuple[int, ...]
    counts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


class World(Message, frozen=True):
    """Nodes with a process group of torch.distributed's, in the order of its ranks."""

    number: int  #: counts the process groups of a session
    ranks: RankList
    channel: int  #: the number of the data channel by which they find each other
    backend: str  #: torch's name of the process group's backend
    mesh: MeshDims | None = None  #: the mesh that the function sees its ranks as


class Run(Message, frozen=True, tag=18):
    """Runs a user's function, whose collected pieces ``function`` names; answers with Result."""

    request: int
    function: bytes
    arguments: bytes  #: pickled; of long ones (``apart``) the key of their pieces
    keep: bool  #: the function will be run again (it holds no tensors)
    what: str  #: the function in words, for errors
    refs: tuple[int, ...] = ()  #: refs of the tensors that the function and its arguments name
    world: World | None = None  #: the process group of which it is run as a rank
    outs: tuple[int, ...] = ()  #: refs of the tensors that it returns, where those are known: no Adopt gives them any
    token: int = 0  #: the ref of its whole result, which other functions of the node may use; 0: none
    beside: bool = True  #: large parts of its result may come as tensors of bytes
    mesh: MeshDims | None = None  #: the mesh on which it was run, of which the node is number ``index``
    index: int = 0
    holds: bool = False  #: it gets tensors as they are now, by ``Held``: what comes next may write them meanwhile
    nodes: int = 0  #: how many nodes the session has when it is issued, without those that are lost
    #: the arguments are a list of pickles, one for each item of a chunk: the function is called for one after the
    #: other. What answers it is for the last one that has begun; Mapped says what has become of the rest
    items: bool = False
    apart: bool = False  #: the arguments have come in pieces
    first: int = 0  #: the ref of a tensor that comes before the arguments; 0: none


class Adopt(Message, frozen=True, tag=19):
    """Gives refs to the tensors that a Run returned, in order; 0 drops one, and no refs drop what there may be."""

    request: int
    refs: tuple[int, ...]


class Seed(Message, frozen=True, tag=20):
    """Seeds the node's default generators as torch.manual_seed does: those that are in use, and with ``all`` those of
    all places."""

    seed: int
    all: bool = False


class Swap(Message, frozen=True, tag=67):
    """Puts another generator in use as the device's default one: the node's own (0), or one of a mesh. Its state is the
    one that it had when it was in use last, else that of ``seed``; where ``seeds`` names the node, of that one, always.
    """

    place: int
    device: str
    seed: int
    seeds: tuple[tuple[int, int], ...] = ()  #: (node, seed)


class Random(Message, frozen=True, tag=21):
    """Answers with the state of a device's generator (state empty) or sets it."""

    request: int
    device: str
    state: bytes


class Keep(Message, frozen=True, tag=29):
    """Makes the state of a device's generator a tensor, which stays on the node; with ``restore`` sets it to that
    tensor."""

    ref: int
    device: str
    restore: bool


class Sync(Message, frozen=True, tag=22):
    """Answers with Done once all commands before it are done, transfers included."""

    request: int


class Memory(Message, frozen=True, tag=23):
    """Asks for the number and bytes of the live tensors on ``device`` ("" for all); the node answers MemoryUsage."""

    request: int
    device: str


class MemoryStats(Message, frozen=True, tag=68):
    """Asks for the statistics of a device's memory, as torch.cuda names them; the node answers MemoryFigures.

    ``first``: what it does before: "" for nothing, "count" begins to count peaks if it does not yet, "reset" has them
    begin anew, "accumulated" the sums, "trim" gives memory back that is not used.
    """

    request: int
    device: str
    first: str = ""
    largest: int = 0  #: the most tensors that it is to name


class Storage(Message, frozen=True, tag=28):
    """Asks for the storage that a tensor is in; the node answers StorageInfo."""

    request: int
    ref: int


class Digest(Message, frozen=True, tag=65):
    """Asks for the hash of a tensor's bytes, as it lies when it is contiguous; the node answers Digested."""

    request: int
    ref: int


class Count(Message, frozen=True, tag=39):
    """Asks for the traffic that the node's data channels have counted so far; the node answers TrafficCounts."""

    request: int


class Open(Message, frozen=True, tag=56):
    """Opens one more data channel; the node answers Opened."""

    request: int
    channel: int
    name: str


class Usable(Message, frozen=True, tag=57):
    """Asks which of these data channels (``ops``: operators) the node can use; it answers Unusable."""

    request: int
    names: tuple[str, ...]
    ops: bool = False


class Peer(Message, frozen=True, tag=24):
    """A peer's data channel: its addresses, and the key that only the two peers have."""

    rank: int
    addresses: Addresses
    key: bytes
    channel: int = 0


class Lost(Message, frozen=True, tag=25):
    """Tells that a peer is lost: transfers with it fail."""

    rank: int
    why: str


class Again(Message, frozen=True, tag=76):
    """Tells that another worker has come in the place of a lost node: a peer, or the one that is told."""

    rank: int
    incarnation: int  #: how many workers there were before it
    before: int  #: the ref below which a tensor that the node does not have is gone with the loss


class Default(Message, frozen=True, tag=27):
    """Tells the master's default dtype (torch.set_default_dtype), from now on."""

    dtype: int


class Switch(Message, frozen=True, tag=75):
    """Sets switches of torch's that hold for the node's whole process (process/torch_switches.py), as the script has
    set its own, from now on; and the node's own one of finite.py."""

    settings: tuple[tuple[str, Plain | tuple[Plain, ...]], ...]


class MakeStream(Message, frozen=True, tag=31):
    """Makes a stream, under ``ref``: a lane of a CPU, or a CUDA stream of this priority. A Free ends it."""

    ref: int
    device: str
    priority: int


class Record(Message, frozen=True, tag=32):
    """Makes an event, under ``ref``: it is done when everything is that was issued to the stream before it.

    ``device`` is that of the stream, which tells the default streams of a node's devices apart.
    """

    ref: int
    device: str
    timing: bool


class Wait(Message, frozen=True, tag=33):
    """Has the stream wait until the event under ``ref`` is done."""

    ref: int


class Signal(Message, frozen=True, tag=34):
    """When the event under ``ref`` is done, sends a tensor without elements to a peer, whose Await takes it."""

    transfer: int
    ref: int
    peer: int


class Await(Message, frozen=True, tag=35):
    """Has the stream wait for a peer's Signal."""

    transfer: int
    peer: int


class Query(Message, frozen=True, tag=36):
    """Answers whether the event under ``ref`` is done."""

    request: int
    ref: int


class Elapsed(Message, frozen=True, tag=37):
    """Answers with the milliseconds between two events, or None if one of them is not done."""

    request: int
    first: int
    second: int


class Join(Message, frozen=True, tag=38):
    """Answers with Done once the event under ``ref`` is done."""

    request: int
    ref: int


class Collective(Message, frozen=True, tag=60):
    """Takes part in a collective of ``ranks``; all of them are told the same ``kind``, ``transfer`` and options.

    ``sizes``: of the groups that ``ranks`` has one after the other, each of which does the collective by itself; one
    number is the size of each, and no number says that all are one group. A node takes part in the one that it is in.
    ``lengths``: the elements of ``inputs``, then of ``outs``, which are written. ``root``: the root's place in the
    group; of a shift, its distance. ``carry``: the dtype that travels, -1 for the tensors' own. ``hosts``: the
    number of each rank's host, in the place of a rank, if hosts matter. ``request``: is answered with TookPart, 0 for
    none; with one, later commands need not wait. ``channel``: the number of the data channel.
    ``shares``, where not every rank has one tensor: the number of each rank's tensors; in an all_gather into one
    tensor, of its elements.
    """

    kind: str
    transfer: int
    ranks: RankList
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
    hosts: RankList
    request: int
    channel: int = 0
    shares: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class GraphPart(Message, frozen=True, tag=50):
    """Commands that a graph has recorded, in order, after those of earlier parts.

    ``numbers``: the numbers in Calls that each replay gives anew, as (command in this part, index of its argument,
    number).
    """

    graph: int
    commands: tuple[Call | First | Send | Recv | Seed | Swap | Keep | Collective | Switch, ...]
    numbers: tuple[tuple[int, int, int], ...]


class EndGraph(Message, frozen=True, tag=51):
    """Ends a graph's recording.

    ``inputs``: refs for which each replay names others. ``outputs``: refs of the tensors that it makes and that stay,
    the same for every replay. ``returned``: refs of such tensors for which each replay names others. A replay is the
    same for all nodes of a graph, so ``inputs`` and ``returned`` are, too, with 0 for what is on other nodes.
    """

    graph: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    returned: tuple[int, ...]
    engine: str


class Replay(Message, frozen=True, tag=52):
    """Runs the commands that a graph has recorded. Its transfers are numbered from ``transfer``."""

    graph: int
    transfer: int
    numbers: tuple[Plain, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class On(Message, frozen=True, tag=30):
    """Runs a command on a stream of the node that is not its default one."""

    stream: int
    command: (
        Call | First | Ask | Send | Recv | Upload | Download | Run | Seed | Swap | Random | Keep | Storage | Digest
        | Record | Wait | Await | Replay | Collective
    )  # fmt: skip


class Discard(Message, frozen=True, tag=53):
    """Drops a graph."""

    graph: int


class Engines(Message, frozen=True, tag=54):
    """Asks for the engine that runs each program of a graph; the node answers GraphEngines."""

    request: int
    graph: int


class StopNode(Message, frozen=True, tag=26):
    """The last command: drops everything and ends the node."""


Command: TypeAlias = (
    Call
    | First
    | Define
    | Forget
    | Free
    | Ask
    | Send
    | Recv
    | Upload
    | Download
    | Piece
    | Run
    | Adopt
    | Seed
    | Swap
    | Random
    | Keep
    | Sync
    | Memory
    | MemoryStats
    | Storage
    | Digest
    | Count
    | Open
    | Usable
    | Peer
    | Lost
    | Again
    | Default
    | Switch
    | MakeStream
    | Record
    | Wait
    | Signal
    | Await
    | Query
    | Elapsed
    | Join
    | Collective
    | On
    | GraphPart
    | EndGraph
    | Replay
    | Discard
    | Engines
    | StopNode
)


class Batch(Message, frozen=True, tag=1):
    """Commands in order; ``first`` is the number of the first one."""

    first: int
    commands: tuple[Command, ...]


# ---- replies: node -> master ---------------------------------------------------------------------------------------


class Abilities(Message, frozen=True):
    """The facts by which a node's torch chooses kernels, beside operands: the CPU's instructions, its libraries, its
    GPUs."""

    cpu: str  #: torch's name of the instructions that its own kernels use, as "AVX2"
    onednn: bool  #: whether torch has the library
    bfloat16: bool  #: whether oneDNN computes in bfloat16 on the node's CPU
    float16: bool  #: and in float16
    cudnn: int = 0  #: the library's version as a number, as 91002; 0 where torch has none
    cuda: tuple[int, int] = (0, 0)  #: the version that torch is built for
    flash: bool = False  #: whether torch is built with flash attention for CUDA
    #: the compute capability of each CUDA device; (0, 0) of a simulated one
    capabilities: tuple[tuple[int, int], ...] = ()


class Hello(Message, frozen=True, tag=40):
    """A worker's first message. The rank is not in it: it comes from the authenticated connection."""

    protocol: int
    job: str
    pid: int
    host: str
    torch: str
    python: str
    devices: tuple[str, ...]
    simulated: bool  #: whether its CUDA devices are CPU memory
    addresses: Addresses  #: its addresses in the session's own data channel
    abilities: Abilities
    gpus: tuple[str, ...] = ()  #: names of its CUDA devices, each one's own on the whole host
    no_cipher: str = ""  #: the reason why it can't encrypt payloads; empty if it can
    numa: int = -1  #: the NUMA node of its default device; -1 where the kernel does not say one
    pcie_root: str = ""  #: the PCIe root of its first GPU; empty without
    memory: tuple[int, ...] = ()  #: the bytes of memory of each of its devices, 0 where nothing tells; empty: not told


class Answer(Message, frozen=True, tag=41):
    """The plain value that an Ask's operator returned."""

    request: int
    value: Value


class MemoryUsage(Message, frozen=True, tag=48):
    """The number of tensors that are alive on the node, and the bytes of their storages."""

    request: int
    tensors: int
    bytes: int


class MemoryFigures(Message, frozen=True, tag=69):
    """The statistics of a device's memory. ``counted``: it has counted peaks since before it was asked."""

    request: int
    figures: tuple[tuple[str, int], ...]
    holdings: Holdings
    counted: bool


class StorageInfo(Message, frozen=True, tag=49):
    """The storage that a tensor is in, and how the tensor lies in it, which a kernel may have chosen."""

    request: int
    name: int  #: the same for all tensors that share it, while one of them lives
    address: int
    bytes: int
    offset: int
    stride: tuple[int, ...]


class Digested(Message, frozen=True, tag=66):
    """The 128-bit hash of a tensor's bytes."""

    request: int
    digest: bytes


class Downloaded(Message, frozen=True, tag=81):
    """The elements of a tensor, which is small."""

    request: int
    shape: tuple[int, ...]
    dtype: int
    data: bytes


class RngState(Message, frozen=True, tag=61):
    """The state of a generator, as ``torch.Generator.get_state`` gives it."""

    request: int
    state: bytes


class GraphEngines(Message, frozen=True, tag=62):
    """The engine that ran each program of a graph last, and why it is not the requested one ("" if not known)."""

    request: int
    programs: tuple[tuple[str, str], ...]


class Opened(Message, frozen=True, tag=63):
    """The answer to Open: the node's addresses in the data channel, which is open now."""

    request: int
    addresses: Addresses


class Unusable(Message, frozen=True, tag=64):
    """The reason why the node can't use each data channel or operator that was asked for; empty if it can."""

    request: int
    reasons: tuple[str, ...]


class Shapes(Message, frozen=True, tag=42):
    """The geometry of the tensors that an Ask's operator returned."""

    request: int
    outs: tuple[Geometry | None, ...]  #: None where the operator gave none


class Result(Message, frozen=True, tag=43):
    """The result of a user's function: an encoded value (protocol/values), and the tensors beside it."""

    request: int
    data: bytes
    tensors: tuple[Geometry, ...]
    kept: bool = True  #: whether the process group that it was run in still exists


class Mapped(Message, frozen=True, tag=82):
    """Tells of items of a Run's chunk, by their places in it: the results of some, as encoded values, and which ones
    have not begun and will not. It tells of each item once, and never of the one that the Run's own answer is for."""

    request: int
    done: tuple[int, ...]
    results: tuple[bytes, ...]  #: of these, in the same order
    back: tuple[int, ...]  #: those that have not begun
    seconds: float  #: for how long the chunk has run


class Failed(Message, frozen=True, tag=44):
    """Command number ``seq`` failed; its outputs are poisoned. Sent once, when it happened.

    Each command that a graph replays has a number of its own (``replayed`` in protocol/failure_ids.py).
    """

    seq: int
    op: str
    kind: str  #: the exception type, as "builtins.RuntimeError"
    message: str
    traceback: str  #: empty where it shows no code of the user's
    #: the exception's arguments, which are of types of Python's own, if they are more than its message
    args: tuple[Plain | tuple[Plain, ...], ...] = ()
    lost: int = -1  #: the peer by whose loss it failed, if that is known; else -1
    holdings: Holdings | None = None  #: what the node held, where it failed for want of memory
    value: bytes = b""  #: the exception, if it is none of Python's own, as an encoded value (protocol/values)
    #: of ``lost``: which worker in its place, where what the command has used was gone with an earlier one; else -1
    incarnation: int = -1


class Warned(Message, frozen=True, tag=74):
    """Command number ``seq`` has made a warning, which changes nothing."""

    seq: int
    kind: str  #: the category, as "builtins.UserWarning"
    text: str
    module: str = ""  #: the module that warns; "" for a kernel, and for a function that warns its caller


class AtBreakpoint(Message, frozen=True, tag=77):
    """A function's debugger has printed something, which is shown: it asks for a line, steps on, or is over."""

    stop: int  #: the number of the debugger on its node; others that stop have their own
    state: Literal["asks", "steps", "over"]
    text: str  #: what it has printed since it last said something; where it asks, its prompt is the last line
    file: str  #: the place at which the function has stopped
    line: int
    what: str  #: the function, such as "step()"


class Poisoned(Message, frozen=True, tag=45):
    """The answer to a request for something poisoned: the failure ``seq`` on node ``rank`` caused it."""

    request: int
    rank: int
    seq: int


class Done(Message, frozen=True, tag=46):
    """The answer to a command whose end the master waits for."""

    request: int


#: Calls, bytes, seconds.
Figures: TypeAlias = tuple[int, int, float]


class TookPart(Message, frozen=True, tag=85):
    """The answer to collectives, in their order: the node has done its part in each."""

    requests: tuple[int, ...]


class TrafficCounts(Message, frozen=True, tag=47):
    """The traffic of each data channel with each peer.

    A row: the channel's name, its use ("transfers", "collectives"), the peer, what was sent, what was received.
    """

    request: int
    rows: tuple[tuple[str, str, int, Figures, Figures], ...]


Reply: TypeAlias = (
    Hello
    | Answer
    | MemoryUsage
    | MemoryFigures
    | StorageInfo
    | Digested
    | Downloaded
    | RngState
    | GraphEngines
    | Opened
    | Unusable
    | Shapes
    | Result
    | Mapped
    | Failed
    | Warned
    | AtBreakpoint
    | Poisoned
    | Done
    | TookPart
    | TrafficCounts
)


class Report(Message, frozen=True, tag=2):
    """Tells how many commands are done, and brings the replies of some."""

    done: int
    replies: tuple[Reply, ...]
    busy: float = 0.0  #: seconds for which the node has worked, and not waited; 0 where it doesn't know
