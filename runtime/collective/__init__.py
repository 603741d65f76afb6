"""Collectives over any data channel, as functions that every rank that takes part calls. ``wire`` says how they
talk and fail, ``choice`` which algorithm is used when."""

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
from .exchange import IDS, LOST, Wire
from .native import native
from .reduction import ReduceOp, check

__all__ = [
    "IDS",
    "LOST",
    "NATIVE",
    "TABLE",
    "ReduceOp",
    "Way",
    "Wire",
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
