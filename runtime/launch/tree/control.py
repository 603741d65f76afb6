"""What the processes of a job's launching tell each other: one set of frames for every wire between them.

    master -- Plan, then Start, Kill, Stop, Rest ----> root -- the same, Modules, Took, Beat --> agent --> fork server
           <-- Ready, Began, Ended, Unfit, Doing, Capacity      <-- Knock, the same, NodeOutput ----------       <--

A master of local nodes speaks to a fork server directly (without Plan, Doing, Capacity). Each struct goes as msgpack; how
its end is found is the wire's matter (framed.py). Nothing is ever unpickled. The end of a wire is a message too: who
sees it knows that the other process is gone, even by SIGKILL.
"""

from __future__ import annotations

import msgspec

from ...host.launch_spec import Plan
from ...host.output_options import Output
from ...protocol.bundle import Bundle

#: A bundle is 1 MiB at most (see protocol/bundle.py), a tail 20 short lines.
MAX_FRAME = 2 << 20


class Start(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Fork a worker that calls ``entry`` ("module:function") with its life-line."""

    bundle: Bundle
    entry: str


class Modules(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What lies beside the script (shipping.py), for the nodes that are started after this."""

    packed: bytes


class Kill(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Send a signal to a worker's process group; nothing happens when it has ended already."""

    rank: int
    signal: int


class Stop(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Give the workers ``grace`` seconds, end those that are left, then end yourself."""

    grace: float
    code: int = 0  #: an agent's exit code: not 0 where nobody has asked for this end


class Rest(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """As Stop, but stay for the session after this one: ``SessionEnded`` says that no worker is left."""

    grace: float


class Took(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """So many bytes of what nodes said have found their place; their server lets them wait while too many have not."""

    size: int


class Flush(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Show what nodes have printed by now, then say Flushed."""

    id: int


class Beat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The root is there. An agent that hears nothing for long has been cut off, and ends."""


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """To an agent that cannot be used: it says why and ends. As Knock, understood by every version."""

    why: str


class Knock(msgspec.Struct, frozen=True, tag=True):
    """An agent's first word. It decodes in every version, so it only ever gets fields with defaults."""

    protocol: int
    version: str = ""  #: disttensor's
    python: str = ""
    host: str = ""
    pid: int = 0
    slots: int = 0  #: how many nodes it may start; 0: the root knows
    wish: int = -1  #: the rank of its first node, where something outside has dealt them; else -1
    local_rank: int = -1  #: of its first node among all of its host, where something outside knows
    local_size: int = 0
    cores: int = 0  #: that it may use
    gpus: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The server has imported what workers need. Sent before it looks at any order."""

    pid: int
    torch: str = ""  #: its version


class Unfit(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
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


class SessionEnded(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All workers have ended, as Rest wanted."""


class NodeOutput(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A piece of what a node has written to its stdout (fd 1) or stderr (2), as it came: no prefix, any cut."""

    rank: int
    fd: int
    data: bytes


class Flushed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What nodes had printed when this Flush came is shown, or was said before this."""

    id: int


class Doing(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What these nodes are waiting for, for the error when they have waited too long."""

    ranks: tuple[int, ...]
    host: str  #: empty: not known yet
    what: str  #: as in "ssh has not connected yet"


class Capacity(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """How many nodes could be started at once now, beside those that were."""

    free: int
    asked: int = 0  #: Starts that had come by then


class Listening(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Where agents find the root that they join, such as tcp://10.0.0.1:41233."""

    addresses: tuple[str, ...]


Order = Plan | Output | Modules | Start | Kill | Stop | Rest | Took | Flush | Beat | Refuse
News = Knock | Ready | Unfit | Began | Ended | SessionEnded | NodeOutput | Flushed | Doing | Capacity | Listening
