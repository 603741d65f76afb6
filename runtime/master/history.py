"""The last commands that a node was sent, for the error that tells of its end.

The outbox keeps messages as they were encoded, a tenth of the memory of the commands; they are decoded when somebody
asks. So a message more costs one append, however many commands are in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..protocol import codec
from ..protocol import commands as c
from ..protocol.arguments import Message, holes
from ..protocol.traits import TRAITS, without_stream
from .failures import Site, line_of

#: The number of commands that are kept at least, while that many were sent.
KEPT = 2000
#: The number of them in the error that tells of a node's end.
SHOWN = 10
#: A message is kept as it is up to this many bytes, and this many for each of its commands; a longer one without data.
BYTES = 512
BYTES_PER_COMMAND = 128
#: The most functions that are named as those that ran at a node's end.
NAMED = 3
#: The most characters that are kept of a text in a long message.
TEXT = 100


class Sent(NamedTuple):
    """A command that a node was sent. ``done``: it is known to be done; others may be as well."""

    number: int
    node: int
    command: c.Command  #: perhaps without its data
    site: Site | None  #: where it was issued; None for what no line of the script's has issued
    done: bool
    defined: Mapping[int, c.Define]  #: the templates that the node knows

    @property
    def operator(self) -> str:
        """The operator, as in "aten::add.Tensor"; "f()" for a user's function; else the kind of command."""
        return name_of(self.command, self.defined)

    @property
    def place(self) -> str:
        """The place, as in "node:1"."""
        return f"a stream of node:{self.node}" if isinstance(self.command, c.On) else f"node:{self.node}"

    @property
    def counts(self) -> bool:
        """Returns whether a line has issued the command for its own sake, and not to serve another."""
        return self.site is not None and not TRAITS[type(self.command)].serves

    @property
    def beside(self) -> bool:
        """Returns whether a stream other than the default one takes the command."""
        return isinstance(self.command, c.On)

    @property
    def runs(self) -> bool:
        """Returns whether the command runs a function of the user's."""
        return isinstance(without_stream(self.command), c.Run)

    @property
    def words(self) -> str:
        """The operator and the line."""
        return f"{self.operator}, issued at {line_of(self.site)}"

    def __str__(self) -> str:
        what = self.operator if self.site is None else self.words
        return f"{self.number} on {self.place}: {what}{' (done)' if self.done else ''}"


def made_by(command: c.Command, defined: Mapping[int, c.Define]) -> Sequence[int]:
    """Returns the refs that a command makes. ``defined``: the templates; of a call whose template was forgotten since,
    the first output alone."""
    inner = without_stream(command)
    call = inner.call if isinstance(inner, c.Ask) else inner
    makes = TRAITS[type(inner)].makes
    if not isinstance(call, c.Call):
        return makes(inner, None)
    define = defined.get(call.template)
    return (call.out,) if define is None else makes(inner, _Results(define))


class _Results:
    """The operator of a template, as the master knows it: the refs that a call makes."""

    def __init__(self, define: c.Define) -> None:
        self._define = define

    def results(self, out: int, args: Sequence[c.Plain]) -> Sequence[int]:
        define = self._define
        if not define.outs:
            return ()
        further = args[sum(1 for _ in holes((*define.args, *(spec for _, spec in define.kwargs)))) :]
        return out, *(out - int(distance) for distance in further)  # type: ignore[arg-type]


def to_keep(first: int, message: bytes, commands: Sequence[c.Command]) -> bytes:
    """Returns the message to keep of a batch that was encoded as ``message``: itself, or a short one."""
    if len(message) <= BYTES + BYTES_PER_COMMAND * len(commands):
        return message
    # mostly it is uploads that make a message long: the others are kept as they are, at a tenth of the time
    kept = codec.encode(c.Batch(first, tuple([_without_bytes(it) if type(it) is c.Upload else it for it in commands])))
    if len(kept) <= BYTES + BYTES_PER_COMMAND * len(commands):
        return kept
    return codec.encode(c.Batch(first, tuple(map(_without_data, commands))))  # type: ignore[arg-type]


def _without_bytes(upload: c.Upload) -> c.Upload:
    """Empties an upload of its data. Its shape and dtype say how much that was."""
    return c.Upload(upload.out, upload.shape, upload.dtype, upload.device, b"")


def _without_data(message: Message) -> Message:
    """Empties all of a command that may be long, or that nobody should find here: data, keys, lists, states. A shape
    is short, and says the size."""
    less: dict[str, object] = {}
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if field == "shape":
            less[field] = value[: codec.MAX_TENSOR_DIMS]
        elif isinstance(value, (bytes, tuple)):
            less[field] = type(value)()
        elif isinstance(value, str):
            less[field] = value[:TEXT]
        elif isinstance(value, Message):
            less[field] = _without_data(value)
    return msgspec.structs.replace(message, **less)


def name_of(command: c.Command, defined: Mapping[int, c.Define]) -> str:
    """Returns the name of a command: its operator's, its function's, else its kind. ``defined``: the templates."""
    match command:
        case c.Call(template=template) | c.Ask(call=c.Call(template=template)):
            define = defined.get(template)
            return f"template {template}" if define is None else define.op
        case c.On(command=inner):
            return name_of(inner, defined)
        case c.Define(op=op):
            return f"the definition of {op}"
        case c.Collective(kind=kind):
            return kind
        case c.Run(what=what):
            return what
    return type(command).__name__


def doing(sent: Sequence[Sent], ran: Collection[int] = ()) -> str:
    """Returns what a node that is gone was doing, in words that follow the cause of its end; "" if that is nothing.

    ``ran``: the numbers of the commands whose functions it was running, where they are known. Of other commands only
    those are known that it had not reported as done, and a report may lag behind.
    """
    if functions := [each for each in sent if each.number in ran and each.runs and (each.beside or not each.done)]:
        others = len(functions) - NAMED
        more = f", and {others} other function{'s' if others > 1 else ''}" if others > 0 else ""
        return f" while it ran {'; '.join(each.words for each in functions[:NAMED])}{more}"
    waiting = [each for each in sent if each.counts and not each.done]
    if not waiting:
        return ""
    runs = [each for each in waiting if each.runs]
    if len(waiting) == 1 or len(runs) == 1:
        others = len(waiting) - 1
        more = f", and {others} other command{'s' if others > 1 else ''}" if others else ""
        return f"; not known to be done: {(runs or waiting)[0].words}{more}"
    return f"; not known to be done: {len(waiting)} commands, the first of them {waiting[0].words}"
