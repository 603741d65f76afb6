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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..channel.counted import CountedChannel
from ..channel.gloo.channel import GlooChannel
from ..channel.gloo.store import MailboxStore, addresses_in, cut
from ..channel.opened import Channels
from ..host.interfaces import interfaces
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import BrokenError, CancelledError, DisttensorError, PeerFailed
from ..protocol.rank_lists import ranks_of
from .user_functions import Job, Tensors

#: Time limits: for ranks to connect once all of them have come, and for a collective (torch's default).
_CONNECT, _LIMIT = timedelta(seconds=15), timedelta(minutes=30)
#: Seconds to wait, after an error that another rank may have caused, for news of which one.
_NEWS = 5.0
#: Seconds for a function to see by itself that another rank has ended, before its connections are cut; and then to end
#: by itself, where NCCL is aborted, before it is interrupted.
_PATIENCE = 5.0
#: torch's numbers of groups along dims are counted from here.
_OURS = 1_000_000
#: Texts of errors that another rank may have caused.
_OF_OTHERS = re.compile(r"gloo|nccl|connection|socket|c10d|process ?group|timed out|timeout", re.IGNORECASE)

#: A key of torch's under which the id of a communicator of NCCL's is told: the group's name; which communicator it is,
#: or of which two ranks.
_ID = re.compile(r"(?:.*//)?([^/]+)//cuda//(\d+)(?::(\d+))?")

#: Environment variables of torch's, without which NCCL's watchdog would end this process where a peer is gone.
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

#: The mesh that the function which runs now sees its ranks as. Not of a thread, as torch's groups are none of a thread.
_seen: DeviceMesh | None = None


def seen() -> DeviceMesh | None:
    """Returns the mesh that the function which runs now sees its ranks as; None where it runs on no mesh."""
    return _seen


class ProcessGroups:
    """A node's process group.

    torch has one default group per process: it stays until another is needed, or a rank has failed.
    """

    def __init__(self, rank: int, channels: Channels) -> None:
        self._rank, self._channels = rank, channels
        self._now: _Group | None = None
        self._gone: set[int] = set()  #: numbers of the groups that this rank has given up

    def within(self, told: c.World, job: Job, interrupt: Callable[[], None]) -> Job:
        """Returns a job that runs ``job`` as a rank of the process group ``told``. Raises what ``_channel`` does.
        ``interrupt`` ends it with a CancelledError, if it runs."""
        self._channel(told)
        return partial(self._run, told, job, interrupt)

    def has(self, told: c.World) -> bool:
        """Returns whether the process group still exists: a function may destroy it, or one of a dim."""
        return self._now is not None and self._now.told.number == told.number and self._now.whole()

    def give_up(self, told: c.World, lost: int | None = None) -> None:
        """Withdraws this rank, which does not take part, or no longer does: the others need not wait for it. ``lost``:
        the node whose loss is the reason."""
        if told.number in self._gone:
            return
        try:
            channel = self._channel(told)
        except DisttensorError:  # that is why it does not take part, and nobody can wait for it
            return
        self._gone.add(told.number)
        if self._now is None or self._now.told.number != told.number:
            self.close()
            self._now = _Group(told, self._rank, channel)
        self._now.give_up(lost)
        self.close()

    def close(self) -> None:
        """Leaves the current group, if there is one."""
        group, self._now = self._now, None
        if group is not None:
            group.end()

    def _channel(self, told: c.World) -> GlooChannel:
        """Returns the channel of a process group. Raises ProtocolError for one that this node can't be in,
        DisttensorError where the channel is not gloo."""
        codec.check_world(told, self._rank)
        channel = self._channels.collective.get(told.channel)
        found = channel.inner if isinstance(channel, CountedChannel) else channel
        if not isinstance(found, GlooChannel):
            name = "one that is not open" if found is None else repr(found.name)
            raise DisttensorError(f"process groups need the data channel 'gloo', not {name}")
        return found

    def _run(self, told: c.World, job: Job, interrupt: Callable[[], None], tensors: Tensors) -> Any:
        try:
            if told.number in self._gone:  # another thread of the master has queued it in time
                raise PeerFailed("the process group broke off in the call before this one")
            if not self.has(told):
                self.close()
                self._now = _Group(told, self._rank, self._channel(told))
                self._now.begin()
            assert self._now is not None
            with self._now.using(told.mesh, interrupt):
                return job(tensors)
        except Exception as error:
            other = self._now.blamed(error) if self._now is not None else None
            self.give_up(told, None if other is None else other.rank)
            if other is not None:
                raise other from error
            raise


class _Store(MailboxStore):
    """A store where the ranks of a communicator of NCCL's meet before they hear its id.

    Within NCCL a rank that makes a communicator waits for the others, and nothing can end that: neither does torch's
    abort. Here it comes out where another one has ended.
    """

    def __init__(self, me: int, *of_store: Any) -> None:
        super().__init__(*of_store)
        self._me = me

    def set(self, key: str, value: str | bytes) -> None:
        self._meet(key)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self._meet(key)
        return super().get(key)

    def _meet(self, key: str) -> None:
        """Returns once all ranks that hear of the id under this key ask for it; at once for any other key."""
        ranks = _ranks_of_id(key)
        if self._me in ranks:
            super().set(f"{key} {self._me}", b"")
            super().wait([f"{key} {rank}" for rank in ranks])


def _ranks_of_id(key: str) -> list[int]:
    """Returns the ranks of the communicator whose id is told under a key; none for other keys."""
    found = _ID.fullmatch(key)
    if found is None:
        return []
    for group, name in dist.distributed_c10d._world.pg_names.items():
        if name == found[1]:
            ranks = dist.get_process_group_ranks(group)
            return [ranks[int(found[2])], ranks[int(found[3])]] if found[3] else ranks
    return []


class _Group:
    """torch's default process group, for one world, from its beginning to its end."""

    def __init__(self, told: c.World, rank: int, channel: GlooChannel) -> None:
        self.told, self._channel = told, channel
        self._ranks = ranks_of(told.ranks)
        self._me = self._ranks.index(rank)
        self._name = f"process group {told.number}"
        self._tell = channel.teller(self._ranks)
        self._store = _Store(self._me, self._name, channel.mailbox, self._tell, self._over)
        #: the groups that this rank is in, the whole one and those along dims of meshes, by their ranks
        self._along: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._made = 0  #: groups along dims, those of other ranks too
        self._meshes: dict[c.MeshDims, DeviceMesh] = {}
        self._idle = threading.Event()  #: set while no function runs in the group
        self._interrupt: Callable[[], None] | None = None  #: interrupts the function that runs in the group
        self._ended = False
        self._aborted = False  #: whether what NCCL had under way was ended: nobody is told that it has no results
        self._watcher = threading.Thread(target=self._watch, name="disttensor-process-group", daemon=True)

    def begin(self) -> None:
        """Initializes the group; returns when all ranks have come. Raises ``_over``'s error, and torch's errors."""
        if dist.is_initialized():
            raise DisttensorError("this node has a process group of its own, made by a function that ran here before")
        host = self._host(self._ranks[self._me])
        name = next((name for name, addresses in interfaces().items() if host in addresses), None)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if "nccl" in self.told.backend:
            for variable, value in _NCCL.items():
                os.environ.setdefault(variable, value)
        size, hook = len(self._ranks), sys.excepthook
        try:
            dist.init_process_group(
                self.told.backend, timeout=_CONNECT, store=self._store, rank=self._me, world_size=size
            )
        finally:
            sys.excepthook = hook  # each time torch puts another one around it
        dist.distributed_c10d._set_pg_timeout(_LIMIT)
        self._along[tuple(range(size))] = dist.distributed_c10d._get_default_group()
        dist.barrier()  # a rank that ends while others connect would keep them until their time limit
        self._watcher.start()

    @contextmanager
    def using(self, mesh: c.MeshDims | None, interrupt: Callable[[], None]) -> Iterator[None]:
        """Surrounds a function's run in the group, which sees its ranks as a mesh. Raises the error of ``_over``, and
        torch's errors."""
        global _seen
        self._idle.clear()
        try:
            if (over := self._over()) is not None:
                raise over
            _seen = None if mesh is None else self._seen_as(mesh)
            self._interrupt = interrupt
            try:
                yield
            except CancelledError as error:
                if self._aborted and (over := self._over()) is not None:  # by ``_watch``
                    raise over from error
                raise
            if self._aborted and (over := self._over()) is not None:
                raise over
        finally:
            _seen = self._interrupt = None
            self._idle.set()

    def whole(self) -> bool:
        """Returns whether torch still has the group, and those along dims of meshes."""
        there = dist.distributed_c10d._world.pg_map
        return bool(self._along) and all(group in there for group in self._along.values())

    def _seen_as(self, mesh: c.MeshDims) -> DeviceMesh:
        """Returns the ranks as torch's DeviceMesh. All ranks call this in one order, before a function that may not
        call ``device_mesh``, or may fail, on some of them."""
        if mesh not in self._meshes:
            ranks = torch.arange(len(self._ranks)).reshape(mesh.sizes)
            dims = [ranks.movedim(i, -1).reshape(-1, size).tolist() for i, size in enumerate(mesh.sizes)]
            if any(self._mine(lines) not in self._along for lines in dims):
                dist.barrier()  # none has failed: who connects to a rank that never comes waits until the time limit
                for lines in dims:
                    self._make(lines)
                dist.barrier()  # as in ``begin``
            groups = [self._along[self._mine(lines)] for lines in dims]
            self._meshes[mesh] = DeviceMesh.from_group(groups, mesh.device, ranks, mesh_dim_names=mesh.names)
        return self._meshes[mesh]

    def _mine(self, lines: list[list[int]]) -> tuple[int, ...]:
        """Returns the one of the lines of ranks along a dim that this rank is in."""
        return next(tuple(line) for line in lines if self._me in line)

    def _make(self, lines: list[list[int]]) -> None:
        """Makes the groups along a dim, as all ranks do now, unless they have made them before."""
        mine, torchs = self._mine(lines), dist.distributed_c10d._world
        if mine in self._along:
            return
        counted = torchs.group_count  # for names, and functions may have made groups on some of the ranks
        torchs.group_count = _OURS + self._made
        try:
            made = [dist.new_group(line, timeout=_CONNECT) for line in lines]
        finally:
            torchs.group_count = counted
        self._made += len(lines)
        self._along[mine] = made[lines.index(list(mine))]
        dist.distributed_c10d._set_pg_timeout(_LIMIT, self._along[mine])

    def blamed(self, error: Exception) -> PeerFailed | None:
        """Returns the error of another rank's end, if that may have caused ``error``; waits for news of it."""
        if not isinstance(error, RuntimeError):
            return None
        if not isinstance(error, BrokenError) and not _OF_OTHERS.search(str(error)):
            return None
        deadline = time.monotonic() + _NEWS
        while (over := self._over()) is None and time.monotonic() < deadline:
            time.sleep(0.01)  # the end of gloo's connection may be seen before the news
        if over is None:
            return None
        return PeerFailed(f"rank {self._me} of {len(self._ranks)} broke off: {over}", over.rank)

    def give_up(self, lost: int | None = None) -> None:
        """Tells the other ranks, unless one of them has told all, and ends the connections. No function runs then."""
        if not self._channel.mailbox.has(f"{self._name};over"):
            self._tell(f"{self._name};over", f"{self._me} {-1 if lost is None else lost}".encode())
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
            rank, lost = map(int, mailbox.get(key, lambda: None).split())
            why = "has failed" if lost < 0 else f"has lost node {lost}"
            return BrokenError(f"rank {rank}, on node {self._ranks[rank]}, {why}", None if lost < 0 else lost)
        return self._channel.lost([rank for i, rank in enumerate(self._ranks) if i != self._me])

    def _watch(self) -> None:
        """Waits for the first rank's end, and then cuts the connections here.

        Another rank may wait for one whose function has returned. While a function runs, gloo sees the ends of those
        that it waits for by itself; it waits for others in a group that has lost nobody. NCCL's results are missing
        then, which nobody is told: a function that goes on without them is interrupted.
        """

        def over() -> BrokenError | None:
            return BrokenError("it has ended here") if self._ended else self._over()

        with suppress(BrokenError):
            self._channel.mailbox.get(f"{self._name};over", over)
        self._idle.wait(_PATIENCE)
        if not self._ended:
            self._cut()
        if self._aborted and not self._idle.wait(_PATIENCE) and (interrupt := self._interrupt) is not None:
            interrupt()

    def _cut(self) -> None:
        hosts = list(dict.fromkeys(self._host(rank) for rank in self._ranks))
        ours = addresses_in(self._store.told, [self._host(self._ranks[self._me])])
        cut(ours, addresses_in(self._store.heard, hosts) - ours)
        if "nccl" in self.told.backend and dist.is_initialized():
            self._aborted = True
            for group in list(dist.distributed_c10d._world.pg_map):  # functions make some of their own
                with suppress(Exception):  # one may be gloo's alone
                    group._get_backend(torch.device("cuda")).abort()

    def _host(self, rank: int) -> str:
        return self._channel.host_of(rank)
