"""Data channels, which carry tensor bytes between peers. ``base`` defines their interface."""

from __future__ import annotations

from .base import MASTER, Capabilities, ChannelContext, DataChannel, PeerInfo, Transfer
from .registry import channel_names, get_channel, name_for_nodes, register_channel

__all__ = [
    "MASTER",
    "Capabilities",
    "ChannelContext",
    "DataChannel",
    "PeerInfo",
    "Transfer",
    "channel_names",
    "get_channel",
    "name_for_nodes",
    "register_channel",
]
