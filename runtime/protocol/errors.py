"""Every exception of disttensor that is not a plain Python or torch type.

    DisttensorError
      NodeLost          a node died or was cut off; the tensors that it held are gone
      RemoteError       an operation failed on a node with a type that the master doesn't know
      CancelledError    a function on a node was interrupted, as the script has asked for
      ProtocolError     the other end broke the protocol (wrong version, gap in the sequence, unknown command)
      GeometryError     an operation gave a node's tensor another shape or other strides than its proxy has
      RanksDiffer       the nodes of a mesh have different values where the script asks for one
      NonFiniteError    an operation gave NaN or infinity, and the script has asked for an error then
      VerifyError       a node's result is not that of local torch (``verify=``)
      GraphError        a graph can't record something, or can't replay it as it was recorded
      StartError        nodes could not be started
      ForkError         a forked child used its parent's session
      ChannelError      a data channel's transfer failed:
        BusyError         the transfer id is in use already
        BrokenError       the peer is gone, or the bytes did not arrive complete; stays so
        ClosedError       this end was closed
        PoisonedError     the sender has nothing to send: the command that should have made the tensor failed

Mistakes of the user's (shapes, dtypes, operands on two nodes) are the types that torch raises for them:
``RuntimeError``, ``TypeError``, ``ValueError``.
"""

from __future__ import annotations

from typing import Any

#: What msgspec and json raise for bytes that are not what they should be. For text that is not
#: UTF-8 msgspec raises UnicodeDecodeError up to 0.22, which is a ValueError as its own errors are and not one of these,
#: and DecodeError from 0.23 on; RecursionError is for what is too deep.
UNDECODABLE = (ValueError, RecursionError)


#: The headings of what stands below the sentence of an error, in its text.
LAST_OUTPUT, LAST_COMMANDS = "its last output:", "the last commands that it was sent:"


class DisttensorError(RuntimeError):
    """The base of all of disttensor's own exceptions."""


class NodeLost(DisttensorError):
    """A node died or was cut off. The tensors that it held are lost; other nodes stay usable.

    Attributes: ``rank``, ``host``, ``pid``, ``cause`` (one line), ``tail`` (its last output lines) and ``commands``:
    the last ones that it was sent, ten at most, each with its number, place, operator and line of the program. Those
    that are known to be done end with "(done)"; of the others it may have done some. ``incarnation``: how many workers
    had been in the node's place before the one that is lost.
    """

    def __init__(
        self,
        rank: int,
        host: str = "?",
        pid: int = 0,
        cause: str = "",
        tail: tuple[str, ...] = (),
        commands: tuple[str, ...] = (),
        incarnation: int = 0,
    ) -> None:
        self.rank, self.host, self.pid, self.cause, self.tail = rank, host, pid, cause, tail
        self.commands, self.incarnation = commands, incarnation
        which = f", incarnation {incarnation}" if incarnation else ""
        text = f"node {rank} (host {host}, pid {pid}{which}) is lost: {cause or 'cause unknown'}"
        text += "; what it held is gone, other nodes stay usable"
        if tail:
            text += f"\n{LAST_OUTPUT}\n" + "\n".join(f"  {line}" for line in tail)
        if commands:
            text += f"\n{LAST_COMMANDS}\n" + "\n".join(f"  {line}" for line in commands)
        super().__init__(text)

    @classmethod
    def told_by_script(cls, rank: int, cause: str) -> NodeLost:
        """Returns the error of a loss of which the script has told this node: one that has no other rank than a node's,
        as an error that a user's function makes may have."""
        error = cls(rank, cause=cause)
        error._by_the_script = True
        return error

    #: whether the script has told of the loss, in an answer
    _by_the_script = False

    #: where the flight record of the loss is, or will be in a moment (docs/SEEING.md); "" for nowhere
    record = ""

    def fresh_copy(self) -> NodeLost:
        """Returns a fresh exception to raise: each raise has a traceback of its own."""
        error = NodeLost(*self._fields)
        if self.record:
            error.record = self.record
            error.add_note(f"flight record: {self.record}")
        return error

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.rank, self.host, self.pid, self.cause, self.tail, self.commands, self.incarnation

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self._fields


class RemoteError(DisttensorError):
    """An operation or a function failed on a node with an exception type that the master doesn't know.

    ``told``: the exception as an encoded value, for who has announced its class; empty where it has none.
    """

    told = b""


class CancelledError(DisttensorError):
    """A function on a node was interrupted, or did not begin, because the script does not want its result any more."""


class RanksDiffer(DisttensorError):
    """The nodes of a mesh have different values of a tensor whose one value was asked for."""


class ProtocolError(DisttensorError):
    """The other end broke the protocol: a wrong version, an unknown command, a gap or repeat in the sequence."""


class GeometryError(DisttensorError):
    """An operation gave a tensor on a node another shape, other strides or another dtype than its proxy states."""


class GraphError(DisttensorError):
    """Something can't be recorded into a graph, or a graph can't be replayed as it was recorded."""


class NonFiniteError(DisttensorError, FloatingPointError):
    """An operation has given NaN or infinity, while ``dt.seeing.check_finite`` was on.

    Attributes: ``operator``, ``node``, ``line`` (of the user's program), ``shape`` (of what it has given), how many
    of its elements are NaN (``nan``) and infinite (``inf``), and ``finite``: whether each of its operands was finite,
    eight at most; None for one that it has written.
    """

    def __init__(
        self,
        text: str,
        nan: int = 0,
        inf: int = 0,
        shape: tuple[int, ...] = (),
        finite: tuple[bool | None, ...] = (),
        operator: str = "",
        node: int = -1,
        line: str = "",
    ) -> None:
        super().__init__(text)
        self.nan, self.inf, self.shape, self.finite = nan, inf, tuple(shape), tuple(finite)
        self.operator, self.node, self.line = operator, node, line

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[Any, ...]]:
        where = (self.operator, self.node, self.line)
        return type(self), (str(self), self.nan, self.inf, self.shape, self.finite, *where)


class VerifyError(DisttensorError):
    """A node's result is not that of local torch, as ``init_master_worker(verify=...)`` has compared them.

    Attributes: ``operator``, ``node`` and ``line`` (of the user's program).
    """

    def __init__(self, text: str, operator: str = "", node: int = -1, line: str = "") -> None:
        super().__init__(text)
        self.operator, self.node, self.line = operator, node, line


class StartError(DisttensorError):
    """Nodes could not be started: names the rank, the host and the last output lines."""


class ForkError(DisttensorError):
    """A forked child used the session of its parent."""


class ChannelError(DisttensorError):
    """A data channel's transfer failed."""


#: The words of a transfer's error whose receiver had too little memory.
NO_MEMORY = "has no memory for it"


class PeerFailed(DisttensorError):
    """Another rank of a process group has failed, or is gone, and this one could not go on without it.

    ``rank``: the node whose loss is the reason, where it is one.
    """

    def __init__(self, text: str = "", rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class BusyError(ChannelError):
    """The transfer id is in use by another transfer with the same peer."""


class BrokenError(ChannelError):
    """The peer is gone or the bytes did not arrive whole. The connection stays broken.

    ``rank``: the peer that is lost, where that is known to be the reason.
    """

    #: which of the workers in that peer's place it was, where another one has come since
    _incarnation = -1

    def __init__(self, text: str = "", rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank

    def note_former(self, rank: int, incarnation: int) -> None:
        """Notes that it was a former worker in a peer's place that was lost."""
        self.rank, self._incarnation = rank, incarnation


class PoisonedError(ChannelError):
    """The sender has no tensor to send, because command ``seq`` of node ``rank`` failed."""

    def __init__(self, rank: int, seq: int) -> None:
        super().__init__(f"the sender has nothing to send: command {seq} of node {rank} failed")
        self.rank, self.seq = rank, seq

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.rank, self.seq)


class ClosedError(ChannelError):
    """This end of the channel was closed."""
