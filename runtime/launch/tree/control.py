"""The control frames between the processes of a launch: one set for every wire between them.

    master --> root           LaunchSpec, then Start, Kill, Look, Stop, EndSession, Flush, ReadOutput
    root   --> agent          these but ReadOutput, Modules, OutputAck, Beat; it passes them on, and Pause
    agent  --> root           AgentHello, Beat, then the fork server's frames, NodeOutput
    root   --> master         Ready, Began, Ended, LaunchFailed, Status, Capacity, SessionEnded, Flushed, Seen,
                              OutputRead

A master of local nodes speaks to a fork server directly (without LaunchSpec, Status, Capacity). Each struct goes as
msgpack; framed.py delimits them. Nothing is ever unpickled. The end of a stream is a message too: it means that the
other process is gone, even by SIGKILL.
"""

from __future__ import annotations

import msgspec

from ...host.launch_spec import LaunchSpec
from ...host.output_options import Output
from ...host.process_use import UNKNOWN, ProcessUse
from ...host.silence import Silence
from ...process.page import NOBODY, Beside
from ...protocol.bundle import Bundle

#: A bundle is 1 MiB at most (see protocol/bundle.py), a tail 20 short lines.
MAX_FRAME = 2 << 20
#: The most bytes of output on their way up (the window), but for one more piece of each node, and what is left at its
#: end or asked for by a Flush.
CREDIT = 1 << 18


class Start(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Fork a worker that calls ``entry`` ("module:function") with its life-line."""

    bundle: Bundle
    entry: str


class Modules(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The modules beside the script (shipping.py), for the nodes that are started after this."""

    packed: bytes


class Kill(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Send a signal to a worker's process group; nothing happens when it has ended already."""

    rank: int
    signal: int


class Stop(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Give the workers ``grace`` seconds, end those that are left, then end yourself."""

    grace: float
    code: int = 0  #: an agent's exit code: not 0 where nobody has asked for this end


class EndSession(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Do as with Stop, but stay for the session after this one: ``SessionEnded`` says that no worker is left."""

    grace: float


class OutputAck(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """So many bytes of node output have been shown or stored (credit for the flow control).

    Their server lets nodes wait while too many bytes are not acknowledged.
    """

    size: int


class Flush(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Show the output of nodes until now, then send Flushed."""

    id: int


class ReadOutput(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Send OutputRead: what these nodes have printed behind line ``after``, as far as it is kept (output/kept.py)."""

    id: int
    ranks: tuple[int, ...]
    after: int


class Beat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The root's heartbeat; an agent answers with its own. Who hears nothing for long acts as ``silence`` says.

    ``at`` is a time by the agent's clock: when it sent this beat; in the root's, when the agent sent the latest one
    that the root has heard. What was on its way for long says so by that.
    """

    silence: Silence = Silence()
    at: float = 0.0


class Pause(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Stop the processes of nodes, so that they run no command; or, with ``on`` False, have them go on."""

    on: bool


class Look(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Look at a worker from outside, and send Seen."""

    rank: int
    stacks: bool = True  #: with the stacks of its threads, which take a moment
    flight: bool = False  #: with its flight record, where no stacks are asked for


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Refuses an agent that cannot be used: it prints the reason and ends.

    Every version understands this, as AgentHello.
    """

    why: str


class AgentHello(msgspec.Struct, frozen=True, tag="Knock"):  # the tag of every version
    """An agent's first message. It decodes in every version, so it only ever gets fields with defaults."""

    protocol: int
    version: str = ""  #: disttensor's
    python: str = ""
    host: str = ""
    pid: int = 0
    slots: int = 0  #: how many nodes it may start; 0: the root knows
    first_rank: int = -1  #: the rank of its first node, where something outside has assigned ranks; else -1
    local_rank: int = -1  #: the place of its first node among all of its host, where something outside knows
    local_size: int = 0
    cores: int = 0  #: the number of cores that it may use
    gpus: int = 0
    executable: str = ""  #: its Python
    packages: dict[str, str] = {}  #: as in host/versions.py


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The server has imported the modules of workers. Sent before it looks at any order."""

    pid: int
    torch: str = ""  #: its version


class LaunchFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The server cannot start workers at all, and ends."""

    why: str
    tail: tuple[str, ...] = ()


class Began(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker runs."""

    rank: int
    pid: int
    host: str = ""  #: where; the root fills it in


class Ended(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker has ended and was reaped; pid 0 means that there never was one."""

    rank: int
    pid: int
    code: int
    cause: str
    tail: tuple[str, ...]
    host: str = ""  #: where; the root fills it in
    running: int = -1  #: the number of the command whose function it was running, as far as is known
    beside: tuple[int, ...] = ()  #: those of the functions that ran on its streams
    flight: bytes = b""  #: its flight record (process/flight.py)


class SessionEnded(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All workers have ended, as EndSession asked."""


class NodeOutput(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A piece of a node's output to its stdout (fd 1) or stderr (2), as it came: no prefix, any cut."""

    rank: int
    fd: int
    data: bytes


class Seen(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sight of a worker from outside, which needs nothing of the worker's own."""

    rank: int
    state: str  #: the state of its process as in /proc: "R", "S", "T", ...
    paused: bool = False  #: its host hears nothing of the master's, so it was stopped
    seq: int = 0  #: the number of the command that it was at last
    kind: int = 0  #: what it is at (process/page.py)
    peer: int = NOBODY  #: the peer that it waits for there
    seconds: float = 0.0  #: for how long
    deaf: float = 0.0  #: for how long its own threads have not run
    rss: int = 0  #: bytes of memory
    stack: str = ""  #: the stacks of its threads
    beside: tuple[Beside, ...] = ()  #: the functions that run on its streams
    stacks: bool = True  #: whether its stacks were asked for
    cpu: float = 0.0  #: seconds for which it has run on cores
    lived: float = 0.0  #: seconds since its start
    peak: int = 0  #: the most bytes of memory that it had
    last_line: str = ""  #: the last line of its output
    flight: bytes = b""  #: its flight record, where that was asked for
    use: ProcessUse = UNKNOWN  #: what it has used, and waited for


class Flushed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The output of nodes before this Flush is shown, or was sent before this."""

    id: int


class OutputRead(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The lines that ReadOutput has asked for."""

    id: int
    lines: tuple[tuple[int, int, str], ...]  #: each with its number and its node
    more: bool  #: whether there are further ones


class Status(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The state that these nodes are waiting on, for the error when they have waited too long."""

    ranks: tuple[int, ...]
    host: str  #: empty: not known yet
    what: str  #: as in "ssh has not connected yet"


class Capacity(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The number of nodes that could be started at once now, beside those that were."""

    free: int
    asked: int = 0  #: Starts that had come by then


class Listening(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The addresses at which agents find the root that they join, such as tcp://10.0.0.1:41233."""

    addresses: tuple[str, ...]


Order = (
    LaunchSpec
    | Output
    | Modules
    | Start
    | Kill
    | Look
    | Pause
    | Stop
    | EndSession
    | OutputAck
    | Flush
    | ReadOutput
    | Beat
    | Refuse
)
#: What a fork server says.
ServerNews = Ready | LaunchFailed | Began | Ended | SessionEnded | NodeOutput | Flushed | Seen
#: What an agent says.
AgentNews = AgentHello | Beat | ServerNews
#: What the master hears, of a root or a fork server.
News = AgentNews | Status | Capacity | Listening | OutputRead
