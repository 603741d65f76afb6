"""Collectives over any data channel, as functions that every rank that takes part calls.

``exchange`` defines how ranks talk and fail, ``algorithm_table`` which algorithm is used when.
"""

from __future__ import annotations

from .algorithm_table import NATIVE, TABLE, Way, choose
from .calls import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    sendreceive,
)
from .exchange import IDS, LOST, Exchange
from .native import native
from .reduction import ReduceOp, check

__all__ = [
    "IDS",
    "LOST",
    "NATIVE",
    "TABLE",
    "Exchange",
    "ReduceOp",
    "Way",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "check",
    "choose",
    "gather",
    "native",
    "reduce",
    "reduce_scatter",
    "scatter",
    "sendreceive",
]
