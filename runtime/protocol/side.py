"""Words of the side channel, the second connection of a node, by which it can be told something whatever it is at.

Commands wait for those before them; a word does not. So a word is never about what has to be told in its turn: it ends
waiting that is in vain, and changes nothing else.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .arguments import Message
from .errors import UNDECODABLE, ProtocolError


class Gone(Message, frozen=True, tag=1):
    """A peer is lost: what it has not sent by now does not come. The command Lost says so in its turn, too."""

    rank: int
    why: str


class Cancel(Message, frozen=True, tag=2):
    """The script does not wait for a function any more: it is to be interrupted, or not to begin."""

    request: int


#: What the master tells a node. A breakpoint will be a word, too.
Word: TypeAlias = Gone | Cancel

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


def decode(message: bytes) -> Word:
    """Decodes a word. Raises ProtocolError."""
    try:
        return _decoder.decode(message)
    except UNDECODABLE as e:
        raise ProtocolError(f"a word of {len(message)} bytes is not of this protocol: {e}") from None
