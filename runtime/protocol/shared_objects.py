"""Requests of functions on nodes about the objects that the script's process holds for all (``dt.tasks.Channel``), and
the answers. Each request has a number, and exactly one answer.

    node: Client  -- Asking (Put, Take, ...) -->  script: Service
                  <-- ObjectAnswer --
                  -- Withdraw -->  the answer comes now; -- Read --> so many bytes of answers have been read

A message of any length goes in pieces, each led by a byte: ``MORE``, or ``LAST``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from . import framing
from .arguments import Message
from .commands import Failed
from .errors import UNDECODABLE, ProtocolError
from .framing import Assembly, Decoder

#: The most bytes of an item: its plain data and its tensors together.
MAX_ITEM = 64 << 20
#: The most bytes of a request or an answer: an item, and what stands around it.
MAX_WHOLE = MAX_ITEM + (1 << 20)
#: The most tensors of an item.
MAX_TENSORS = 4096
#: The most channels that one ``select`` waits for.
MAX_SELECTED = 1024
#: The most handles of actors among the arguments of a call.
MAX_HANDLES = 1024
#: The most bytes of what tells of an error that an actor's method has raised.
MAX_RAISED = 4 << 20
MORE, LAST = b"\0", b"\1"

#: What an answer says: done; there is no item, or no room, now; closed; a node was lost; refused in words; the session
#: has ended.
OK, EMPTY, FULL, SHUT, LOST, REFUSED, ENDED = range(7)
#: And of a barrier: it is broken; all have come, and who is told so does the action.
BROKEN, ACT = 20, 21
#: And of a queue of work: an item was given up.
DROPPED = 30
#: And of an actor: its method has raised what the item tells.
RAISED = 40
#: What a ``DictEntry`` asks for: the value of a key; whether it is there; to set it, where it is absent, where it has a
#: version; to take it out, or the last one, or all; to wait until it is there.
GET, HAS, SET, SET_DEFAULT, SWAP, POP, POP_LAST, CLEAR, WAIT = range(9)

#: The most characters of a name, or of a reason.
MAX_WORDS = 300
#: The most dims of a tensor, and what each of its sizes, like every other number, is less than.
MAX_TENSOR_DIMS, MAX_SIZE = 64, 1 << 62
_Number = Annotated[int, Meta(ge=0, lt=MAX_SIZE)]
#: The number of the object that a request is about; each request has a field ``of``.
_One = Annotated[tuple[_Number, ...], Meta(min_length=1, max_length=1)]
_Words = Annotated[str, Meta(max_length=MAX_WORDS)]
#: The most bytes of a dictionary's key.
MAX_KEY = 64 << 10
_Key = Annotated[bytes, Meta(max_length=MAX_KEY)]


class Flat(Message, frozen=True):
    """A tensor's values, one after the other."""

    dtype: int
    shape: Annotated[tuple[_Number, ...], Meta(max_length=MAX_TENSOR_DIMS)]
    data: bytes


class Item(Message, frozen=True):
    """A value: plain data, with gaps for tensors, and these."""

    data: bytes
    tensors: Annotated[tuple[Flat, ...], Meta(max_length=MAX_TENSORS)] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that count for ``MAX_ITEM``."""
        return len(self.data) + sum(len(flat.data) + 64 for flat in self.tensors)


class Put(Message, frozen=True, tag=1):
    """Puts an item into a channel; waits for room, or not. ``back``: it was taken by nobody, and is the next again."""

    call: _Number
    of: _One
    item: Item
    wait: bool = True
    back: bool = False


class Take(Message, frozen=True, tag=2):
    """Takes the next item of the first of several channels that has one; waits for one, or not."""

    call: _Number
    of: Annotated[tuple[_Number, ...], Meta(min_length=1, max_length=MAX_SELECTED)]
    wait: bool = True


class Inspect(Message, frozen=True, tag=3):
    """Asks how many items there are, and whether the channel is closed; who wait, and whether a lock is held, a barrier
    broken; how many keys there are, and their bytes."""

    call: _Number
    of: _One


class Close(Message, frozen=True, tag=4):
    """Closes a channel. ``immediate`` drops its items, too."""

    call: _Number
    of: _One
    immediate: bool = False


class Withdraw(Message, frozen=True, tag=5):
    """Nobody waits for a request any more. Its answer comes at once, if it has not come yet."""

    call: _Number


class Read(Message, frozen=True, tag=6):
    """So many more bytes of answers were read."""

    nbytes: _Number


class ObjectAnswer(Message, frozen=True, tag=7):
    """The answer to a request: ``item`` was taken out of the object ``of``; ``count``, ``closed`` and ``left`` are what
    was asked. ``trusted``: it was the script that had put the item in, so that functions in it may be unpickled."""

    call: _Number
    said: int
    of: int = 0
    item: Item | None = None
    count: int = 0
    closed: bool = False
    why: str = ""
    left: int = 0
    trusted: bool = False
    keys: tuple[bytes, ...] = ()
    items: tuple[Item, ...] = ()
    handles: tuple[int, ...] = ()  #: the actors whose handles are in an item that an actor is given


class Acquire(Message, frozen=True, tag=20):
    """Acquires a lock for a holder: a function, or a thread; waits for it or not, ``forever`` or for a
    time."""

    call: _Number
    of: _One
    holder: _Number
    who: _Words  #: the holder in words
    wait: bool = True
    forever: bool = True


class Release(Message, frozen=True, tag=21):
    """Releases a lock. ``back``: nobody has used it; ``ended``: its holder has ended, if it still has it."""

    call: _Number
    of: _One
    holder: _Number
    back: bool = False
    ended: bool = False


class Arrive(Message, frozen=True, tag=22):
    """Waits at a barrier."""

    call: _Number
    of: _One
    who: _Words


class Passed(Message, frozen=True, tag=23):
    """The barrier's action is done: all may go on."""

    call: _Number
    of: _One


class Abort(Message, frozen=True, tag=24):
    """Breaks a barrier; with ``acting``, if the request of that number was told to do the action and has not."""

    call: _Number
    of: _One
    who: _Words
    why: _Words  #: what that has done
    acting: _Number | None = None


class Reset(Message, frozen=True, tag=25):
    """Empties a barrier, and mends it."""

    call: _Number
    of: _One


class Lease(Message, frozen=True, tag=30):
    """Takes the next item of a queue of work, for a holder, until it is done; waits for one, or not."""

    call: _Number
    of: _One
    holder: _Number
    who: _Words  #: the holder in words
    wait: bool = True


class TaskDone(Message, frozen=True, tag=31):
    """Ends the oldest lease of a holder, and puts what has come out among the answers; waits for room there."""

    call: _Number
    of: _One
    holder: _Number
    item: Item | None = None


class Return(Message, frozen=True, tag=32):
    """Gives back an item that a holder has leased, or all: they are the next again. ``counted``: that was one try."""

    call: _Number
    of: _One
    holder: _Number
    lease: _Number | None = None
    counted: bool = False
    why: _Words = ""  #: what the holder has done


class JoinQueue(Message, frozen=True, tag=33):
    """Waits until nothing of a queue of work is left to be done."""

    call: _Number
    of: _One


class DictEntry(Message, frozen=True, tag=40):
    """Reads or writes what a dictionary has for a key. ``do``: what; see ``GET`` and so on."""

    call: _Number
    of: _One
    do: Annotated[int, Meta(ge=GET, le=WAIT)]
    key: _Key = b""  #: the same bytes for keys that are equal
    shown: _Key = b""  #: the key as it was given
    item: Item | None = None
    version: _Number = 0  #: of the value that a ``SWAP`` replaces; 0 for none


class KeysPage(Message, frozen=True, tag=41):
    """Asks for keys in the order in which they came, behind one of them; with their values or not."""

    call: _Number
    of: _One
    after: _Number = 0
    values: bool = False


class Invoke(Message, frozen=True, tag=50):
    """Calls a method of an actor; the answer is what that has returned, or raised."""

    call: _Number
    of: _One
    method: _Words
    item: Item  #: its arguments
    handles: Annotated[tuple[_Number, ...], Meta(max_length=MAX_HANDLES)] = ()  #: one for each handle among these


class Serve(Message, frozen=True, tag=51):
    """An actor's node asks for the next call, and tells the end of the one before, if there was one."""

    call: _Number
    of: _One
    ended: _Number | None = None
    item: Item | None = None  #: what that has returned, or raised
    raised: bool = False


class AwaitAnswer(Message, frozen=True, tag=52):
    """A method of an actor waits for the answer to a request of its node, or does not wait any more."""

    call: _Number
    of: _One  #: the actor whose method it is
    pending: _Number | None = None


class Drop(Message, frozen=True, tag=53):
    """A node has one handle of an actor less."""

    call: _Number
    of: _One


class Retire(Message, frozen=True, tag=54):
    """An actor has ended."""

    call: _Number
    of: _One


Asking: TypeAlias = (
    Put | Take | Inspect | Close | Acquire | Release | Arrive | Passed | Abort | Reset | Lease | TaskDone | Return
    | JoinQueue | DictEntry | KeysPage | Invoke | Serve | AwaitAnswer | Drop | Retire
)  # fmt: skip
Request: TypeAlias = Asking | Withdraw | Read

encode = msgspec.msgpack.Encoder().encode
#: Decodes what a node asks, and the answer to it. Raises ProtocolError.
decode_request: Callable[[bytes], Request] = Decoder[Request](Request, "a request").decode
decode_answer: Callable[[bytes], ObjectAnswer] = Decoder[ObjectAnswer](ObjectAnswer, "an answer").decode
_raised = Decoder[Failed](Failed, "the account of an error")


def encode_request(request: Asking) -> bytes:
    """Encodes a request. Raises ValueError for one that the other end would refuse, and end the connection for."""
    try:
        message = encode(request)
        decode_request(message)
    except (ProtocolError, *UNDECODABLE) as e:
        raise ValueError(f"this can't be asked of what the script holds for all: {e}") from None
    if len(message) > MAX_WHOLE:
        raise ValueError(f"a request of {len(message)} bytes is over the limit of {MAX_WHOLE}")
    return message


def decode_raised(data: bytes) -> Failed:
    """Decodes what tells of an error that an actor's method has raised. Raises ProtocolError."""
    if len(data) > MAX_RAISED:
        raise ProtocolError(f"{len(data)} bytes tell of an error, and {MAX_RAISED >> 20} MiB may")
    return _raised.decode(data)


def pieces(message: bytes) -> Iterator[bytes]:
    """Cuts a message into pieces."""
    for piece, last in framing.pieces(message):
        yield (LAST if last else MORE) + piece


class Joining:
    """Joins the pieces of one sender's messages."""

    def __init__(self) -> None:
        self._message = Assembly(MAX_WHOLE, f"a message is longer than {MAX_WHOLE} bytes")

    def add(self, piece: bytes) -> bytes | None:
        """Takes a piece; returns the message that it ends, if it does. Raises ProtocolError for what is no piece, and
        for a message that is too long."""
        if piece[:1] not in (MORE, LAST):
            raise ProtocolError(f"a piece of {len(piece)} bytes begins with {piece[:1]!r}")
        return self._message.add(memoryview(piece)[1:], piece[:1] == LAST)
