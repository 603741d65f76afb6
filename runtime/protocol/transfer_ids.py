"""Numbers of transfers as both ends read them: of most, the order at both ends is the same.

A peer that sends another number than the next one is broken or lies. Its connection is given up at once: a receiver
would wait for good, and with it all that comes behind on that connection.
"""

from __future__ import annotations

#: Added to the numbers of copies between two peers, which both are told in one order.
ORDERED = 1 << 60
#: The first number of collectives: each has a block of so many, of which both peers use the next one.
COLLECTIVES = 1 << 62
BLOCK = 1 << 20


def sequence_of(transfer: int) -> int:
    """Returns the name of the sequence that the transfer has its place in; 0 if it may come at any time."""
    if transfer >= COLLECTIVES:
        return transfer // BLOCK
    return 1 if ORDERED <= transfer < 2 * ORDERED else 0


def spoken(transfer: int) -> int:
    """Returns the number as messages name it."""
    return transfer - ORDERED if ORDERED <= transfer < 2 * ORDERED else transfer
