"""Runs functions on several nodes as one program of torch.distributed, with its default process group initialized.

The ranks find each other over the authenticated connections of the channel "gloo" (gloo/store.py), which also
report a rank's end. A rank that fails tells the others and ends its gloo connections: so a rank that waits for it in
a collective comes out with an error of gloo's, which is told to the master as ``PeerFailed``.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..channel.counted import CountedChannel
from ..channel.gloo.channel import GlooChannel
from ..channel.gloo.store import MailboxStore, addresses_in, cut
from ..channel.opened import Channels
from ..host.interfaces import interfaces
from ..protocol import commands as c
from ..protocol.errors import BrokenError, DisttensorError, PeerFailed
from .user_functions import Job, Tensors

#: Time limits: for ranks to connect once all of them have come, and for a collective (torch's default).
_CONNECT, _LIMIT = timedelta(seconds=15), timedelta(minutes=30)
#: Seconds to wait, after an error that another rank may have caused, for news of which one.
_NEWS = 5.0
#: Seconds for a function to see by itself that another rank has ended, before its connections are cut.
_PATIENCE = 5.0
#: Texts of errors that another rank may have caused.
_OF_OTHERS = re.compile(r"gloo|nccl|connection|socket|c10d|process ?group|timed out|timeout", re.IGNORECASE)

#: Environment variables of torch's, without which NCCL's watchdog would end this process where a peer is gone.
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class ProcessGroups:
    """A node's process group.

    torch has one default group per process: it stays until another is needed, or a rank has failed.
    """

    def __init__(self, rank: int, channels: Channels) -> None:
        self._rank, self._channels = rank, channels
        self._now: _Group | None = None
        self._gone: set[int] = set()  #: numbers of the groups that this rank has given up

    def within(self, told: c.World, job: Job) -> Job:
        """Returns a job that runs ``job`` as a rank of the process group ``told``."""
        return partial(self._run, told, job)

    def has(self, told: c.World) -> bool:
        """Returns whether the process group still exists: a function may destroy it."""
        return self._now is not None and self._now.told.number == told.number and dist.is_initialized()

    def give_up(self, told: c.World) -> None:
        """Withdraws this rank, which does not take part, or no longer does: the others need not wait for it."""
        if told.number in self._gone:
            return
        self._gone.add(told.number)
        if self._now is None or self._now.told.number != told.number:
            self.close()
            self._now = _Group(told, self._rank, self._channels)
        self._now.give_up()
        self.close()

    def close(self) -> None:
        """Leaves the current group, if there is one."""
        group, self._now = self._now, None
        if group is not None:
            group.end()

    def _run(self, told: c.World, job: Job, tensors: Tensors) -> Any:
        try:
            if told.number in self._gone:  # another thread of the master has queued it in time
                raise PeerFailed("the process group broke off in the call before this one")
            if not self.has(told):
                self.close()
                self._now = _Group(told, self._rank, self._channels)
                self._now.begin()
            assert self._now is not None
            with self._now.using():
                return job(tensors)
        except Exception as error:
            other = self._now.blamed(error) if self._now is not None else None
            self.give_up(told)
            if other is not None:
                raise other from error
            raise


class _Group:
    """torch's default process group, for one world, from its beginning to its end."""

    def __init__(self, told: c.World, rank: int, channels: Channels) -> None:
        channel = channels.collective[told.channel]
        found = channel.inner if isinstance(channel, CountedChannel) else channel
        if not isinstance(found, GlooChannel):
            raise DisttensorError(f"process groups need the data channel 'gloo', not {found.name!r}")
        self.told, self._channel = told, found
        self._me = told.ranks.index(rank)
        self._name = f"process group {told.number}"
        self._tell = found.teller(told.ranks)
        self._store = MailboxStore(self._name, found.mailbox, self._tell, self._over)
        self._idle = threading.Event()  #: set while no function runs in the group
        self._ended = False
        self._watcher = threading.Thread(target=self._watch, name="disttensor-process-group", daemon=True)

    def begin(self) -> None:
        """Initializes the group; returns when all ranks have come. Raises ``_over``'s error, and torch's errors."""
        if dist.is_initialized():
            raise DisttensorError("this node has a process group of its own, made by a function that ran here before")
        host = self._host(self.told.ranks[self._me])
        name = next((name for name, addresses in interfaces().items() if host in addresses), None)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if "nccl" in self.told.backend:
            for variable, value in _NCCL.items():
                os.environ.setdefault(variable, value)
        size, hook = len(self.told.ranks), sys.excepthook
        try:
            dist.init_process_group(
                self.told.backend, timeout=_CONNECT, store=self._store, rank=self._me, world_size=size
            )
        finally:
            sys.excepthook = hook  # each time torch puts another one around it
        dist.distributed_c10d._set_pg_timeout(_LIMIT)
        dist.barrier()  # a rank that ends while others connect would keep them until their time limit
        self._watcher.start()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Surrounds a function's run in the group. Raises the error of ``_over``."""
        self._idle.clear()
        try:
            if (over := self._over()) is not None:
                raise over
            yield
        finally:
            self._idle.set()

    def blamed(self, error: Exception) -> PeerFailed | None:
        """Returns the error of another rank's end, if that may have caused ``error``; waits for news of it."""
        if not isinstance(error, RuntimeError):
            return None
        if not isinstance(error, BrokenError) and not _OF_OTHERS.search(str(error)):
            return None
        deadline = time.monotonic() + _NEWS
        while (over := self._over()) is None and time.monotonic() < deadline:
            time.sleep(0.01)  # the end of gloo's connection may be seen before the news
        return PeerFailed(f"rank {self._me} of {len(self.told.ranks)} broke off: {over}") if over is not None else None

    def give_up(self) -> None:
        """Tells the other ranks, unless one of them has told all, and ends the connections. No function runs then."""
        if not self._channel.mailbox.has(f"{self._name};over"):
            self._tell(f"{self._name};over", str(self._me).encode())
        if dist.is_initialized():
            self._cut()

    def end(self) -> None:
        self._ended = True
        self._idle.set()
        self._channel.mailbox.wake()
        if self._watcher.is_alive():
            self._watcher.join()
        if dist.is_initialized():
            with suppress(Exception):  # connections that were cut may raise
                dist.destroy_process_group()
        # this count is in the names of the next groups; one that failed has counted, too
        dist.distributed_c10d._world.group_count = 0
        self._channel.mailbox.clear(f"{self._name}/")
        self._channel.mailbox.clear(f"{self._name};")

    def _over(self) -> BrokenError | None:
        """Returns the reason for which the group can't go on, or None."""
        mailbox, key = self._channel.mailbox, f"{self._name};over"
        if mailbox.has(key):
            rank = int(mailbox.get(key, lambda: None))
            return BrokenError(f"rank {rank}, on node {self.told.ranks[rank]}, has failed", self.told.ranks[rank])
        return self._channel.lost([rank for i, rank in enumerate(self.told.ranks) if i != self._me])

    def _watch(self) -> None:
        """Waits for the first rank's end, and then cuts the connections here.

        Another rank may wait for one whose function has returned. While a function runs, gloo sees the others' ends by
        itself, and may hang if its own connections are cut; but better then than not at all.
        """

        def over() -> BrokenError | None:
            return BrokenError("it has ended here") if self._ended else self._over()

        with suppress(BrokenError):
            self._channel.mailbox.get(f"{self._name};over", over)
        self._idle.wait(_PATIENCE)
        if not self._ended:
            self._cut()

    def _cut(self) -> None:
        hosts = list(dict.fromkeys(self._host(rank) for rank in self.told.ranks))
        ours = addresses_in(self._store.told, [self._host(self.told.ranks[self._me])])
        cut(ours, addresses_in(self._store.heard, hosts) - ours)
        if "nccl" in self.told.backend and dist.is_initialized():
            with suppress(Exception):
                dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).abort()

    def _host(self, rank: int) -> str:
        return self._channel.host_of(rank)
