"""Words of the side channel, the second connection of a node, by which it can be told something whatever it is at.

Commands wait for those before them; a word does not. So a word is never about what has to be told in its turn: it ends
waiting that is in vain, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from .arguments import Message
from .framing import Decoder


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
#: Decodes a word. Raises ProtocolError.
decode: Callable[[bytes], Word] = Decoder[Word](Word, "a word").decode
