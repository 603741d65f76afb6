"""A node without a process: an executor that is given commands, and templates for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from limits import HANG

from disttensor.runtime.channel import get_channel
from disttensor.runtime.channel.base import ChannelContext, DataChannel, PeerInfo
from disttensor.runtime.channel.opened import Channels
from disttensor.runtime.node.executor import CommandExecutor
from disttensor.runtime.node.process_groups import ProcessGroups
from disttensor.runtime.node.user_functions import Functions
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.allow_list import AllowList


class Node:
    """An executor, its replies, and a master's end of the channel."""

    def __init__(
        self,
        simulate_cuda: int = 0,
        functions: str = "any",
        allow: tuple[str, ...] = (),
        over: Callable[[DataChannel], DataChannel] = lambda channel: channel,
    ) -> None:
        """``over`` makes the node's end of the channel out of the one that leads to ``master``."""
        self.replies: list[c.Reply] = []
        make = get_channel("inproc")
        job = f"test-{id(self)}"
        self.channel = make(ChannelContext(0, job, "127.0.0.1"))
        self.master = make(ChannelContext(-1, job, "127.0.0.1"))
        self.channel.connect({-1: PeerInfo(-1, self.master.address(), bytes(32))})
        self.master.connect({0: PeerInfo(0, self.channel.address(), bytes(32))})
        end = over(self.channel)
        channels = Channels(lambda name, number, joint: end, "inproc")
        groups = ProcessGroups(0, channels)
        self.executor = CommandExecutor(
            0, self.replies.append, channels, AllowList(allow), Functions(functions, groups), simulate_cuda
        )

    def do(self, *commands: c.Command) -> list[c.Reply]:
        """Applies a batch through the codec; gives the replies to it."""
        before = len(self.replies)
        batch = c.Batch(self.executor.seq, commands)
        self.executor.apply(codec.decode_batch(codec.encode(batch)))
        return self.replies[before:]

    def close(self) -> None:
        """Ends the executor and both ends of the channel."""
        self.executor.close()
        self.channel.close()
        self.master.close()
        self.executor.join(HANG)

    def __getitem__(self, ref: int) -> Any:
        return self.executor.store.entries[ref]

    def __contains__(self, ref: int) -> bool:
        return ref in self.executor.store.entries

    def failed(self, *commands: c.Command) -> c.Failed:
        """Applies what has to fail once, and checks that the node goes on."""
        failures = [r for r in self.do(*commands) if isinstance(r, c.Failed)]
        assert len(failures) == 1, failures
        assert self.do(c.Sync(77)) == [c.Done(77)]
        return failures[0]


FULL = c.Define(1, "aten::full", (c.Items((2, 2)), c.Hole(False)), (("dtype", c.DType(0)),), 1)
ADD = c.Define(2, "aten::add.Tensor", (c.Hole(True), c.Hole(True)), (), 1)
MUL_ = c.Define(3, "aten::mul_.Scalar", (c.Hole(True), c.Hole(False)), (), 0)
MAX = c.Define(4, "aten::max.dim", (c.Hole(True), 1), (), 2)
SUM = c.Define(5, "aten::sum", (c.Hole(True),), (), 1)
ITEM = c.Define(6, "aten::_local_scalar_dense", (c.Hole(True),), (), 0)
GATHER = c.Define(7, "aten::gather", (c.Hole(True), 0, c.Hole(True)), (), 1)
CAT = c.Define(8, "aten::cat", (c.Items((c.Hole(True), c.Hole(True))), 0), (), 1)
SELECT = c.Define(9, "aten::select.int", (c.Hole(True), 0, c.Hole(False)), (), 1)
NONZERO = c.Define(10, "aten::nonzero", (c.Hole(True),), (), 1)
ALL = (FULL, ADD, MUL_, MAX, SUM, ITEM, GATHER, CAT, SELECT, NONZERO)
