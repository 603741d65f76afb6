"""Saving: the script plans who writes what, the nodes write it, and the script has it be the checkpoint at the end."""

from __future__ import annotations

import io
import logging
import math
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ..dispatch.call_site import here
from ..errors.argument_checks import flag, spelled
from ..futures import Work
from ..meshes.cut import whole_shape
from ..proxy.proxy import where_is
from ..runtime.channel.ticket import Ticket
from ..runtime.master.failures import line_of, short_line
from ..runtime.master.route import waits
from ..runtime.node import checkpoint_files as files
from ..runtime.node.checkpoint_files import FileItem, Shard, Written
from ..runtime.process import undertakings
from ..runtime.process.gc_pause import no_collection
from ..runtime.process.signals import uninterrupted, wait_in_looks
from ..runtime.protocol.errors import RanksDiffer
from ..session import current
from ..session.places import MeshPlace, NodePlace
from ..session.session import Session
from ..streams import Stream, current_stream, stream
from ..tasks.calls import Calls, first_of
from .folder import Folder
from .parts import TensorChunk, parts_of
from .state import State, StateEntry

_log = logging.getLogger("disttensor")

#: Seconds after which the end of a session says which checkpoint it waits for, and the longest ones between two lines.
_SAYS, _SAYS_LAST = 5.0, 60.0


@spelled
def save(state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, check_replicas: bool = True) -> None:
    """Saves a program's state as a checkpoint of torch.distributed.checkpoint, and waits until it is on the disk.

        >>> dt.checkpoint.save({"model": model, "optim": optimizer, "step": 100}, "/shared/run1")

    Args:
        state_dict: a dict of modules, optimizers, other objects with ``state_dict()`` (a scheduler), tensors, values
            that can be pickled, and dicts and lists of tensors and values. Tensors are on meshes, on nodes or local.
        path: a folder on a file system that the script and all nodes share. A checkpoint that is there is replaced at
            the end, at once.
        check_replicas: False: ranks that should have the same values are not compared, and of any one of them these are
            written.

    Each node writes its parts of what is cut along a dim of a mesh, and a share of what all ranks have. No tensor on a
    node passes through the script. Names are those that ``get_state_dict`` of torch.distributed.checkpoint.state_dict
    gives: a job of another form, or one process, loads it, and ``load`` what these have written.

    Raises TypeError or ValueError for what can't be saved; RanksDiffer where ranks have different values of what should
    be one; OSError that names the file and the host; NodeLost; the error that made a tensor fail; and what an earlier
    ``async_save`` has failed with, if nobody asked. What was at ``path`` is there unchanged then.
    """
    with _Job(state_dict, path, check_replicas, "save") as job:
        job.begin_writes(beside=False)
        job.end()


@spelled
def async_save(
    state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, check_replicas: bool = True
) -> Work[None]:
    """Saves as ``save`` does while the program goes on; returns a Work. Its ``wait()`` returns when all is on the disk.

        >>> work = dt.checkpoint.async_save({"model": model, "optim": optimizer}, "/shared/run1")
        >>> train()
        >>> work.wait()
        True

    What is saved is the state at the time of this call: nodes copy what they are to write into their CPUs' memory and
    write it beside what comes next; a command that writes a tensor before that has it copied first. This returns at
    once, but where an earlier ``async_save`` is under way: it waits for that one's end, so that there is one copy at
    most.

    Args and errors are those of ``save``; those of nodes and files are raised by the Work, or, if nobody asks it, by
    the next save or at the session's end.
    """
    saves = current.session().part(Saves)
    with saves.lock, _Job(state_dict, path, check_replicas, "async_save") as job:
        job.begin_writes(beside=True)
        saving = _Saving(job, saves)
    return saving


class Saves:
    """The saves of one session that are under way."""

    #: The script's end waits for them as long as they take: what is not on the disk then is lost.
    outlasts = True

    def __init__(self) -> None:
        self.last: _Saving | None = None  #: the one that goes on beside the script, or did
        self.lock = threading.RLock()  #: held by a thread that begins one
        self.jobs: list[_Job] = []  #: all of them, those of other threads as well

    def forked(self) -> None:
        """Makes a new lock in a forked child: the thread that held the other one may not be there. The child lets go of
        the folders, for it would have them locked when the script has ended."""
        self.last, self.lock = None, threading.RLock()
        for job in self.jobs:
            job.folder.forked()
        self.jobs = []

    def wait(self) -> None:
        """Waits for the save under way; raises its error, if nobody has asked for it."""
        last = self.last
        if last is not None:
            last.wait_without_raising()
            error = last.unasked()
            if error is not None:
                error.add_note("  this is what an earlier async_save has failed with; its Work was not asked")
                raise error

    def finish(self, deadline: float | None) -> list[Exception]:
        """Waits for the saves under way, whatever the ``deadline``, and says so after some seconds; returns the last
        one's error, if nobody has asked for it.

        Called at the session's end. Ctrl-C ends the waiting: its note names what was not written.
        """
        say = _SAYS
        for job in list(self.jobs):
            try:
                while not wait_in_looks(job.over.wait, job.over.is_set, say):
                    _log.warning(
                        "the end of the session waits for the checkpoint %s, which is not written yet (saved at %s); "
                        "Ctrl-C gives it up, and leaves what was there before",
                        job.folder.path,
                        line_of(job.site),
                    )
                    say = min(2 * say, _SAYS_LAST)
            except BaseException as error:
                error.add_note(
                    f"  the checkpoint {job.folder.path} was not written: the end did not wait for it any more"
                )
                raise
        if self.last is None:
            return []
        self.last.wait_without_raising()
        unasked = self.last.unasked()
        return [] if unasked is None else [unasked]


class _Saving(Work[None]):
    """A save that goes on beside the script, in a thread of its own."""

    @uninterrupted
    def __init__(self, job: _Job, saves: Saves) -> None:
        self._session, self._ended = job.session, Ticket()
        self._transfer = self._ended
        self._node = min(job.nodes, default=0)
        self._text = f"checkpoint {job.folder.path}"
        self._job: _Job | None = job
        self._error: BaseException | None = None
        self._asked = False
        self._thread = threading.Thread(target=self._run, name="disttensor-checkpoint", daemon=True)
        self._thread.start()  # before anybody has the Work: a save of another thread may wait for it at once
        job.goes_on, saves.last = True, self

    def _run(self) -> None:
        job, self._job = self._job, None  # a Work that is kept keeps no tensors
        assert job is not None
        try:
            job.end()
        except BaseException as error:
            self._error = error
        finally:
            del job
            self._ended.finish()

    def wait_without_raising(self, timeout: float | None = None) -> None:
        """Waits for its end, for ``timeout`` seconds at most, and raises nothing for it."""
        wait_in_looks(self._thread.join, lambda: not self._thread.is_alive(), timeout)

    def unasked(self) -> Exception | None:
        """Returns its error, once: the second call, and one after somebody has asked for it, returns None."""
        asked, self._asked = self._asked, True
        return self._error if isinstance(self._error, Exception) and not asked else None

    def _await_end(self, timeout: float | None) -> None:
        if not self._ended.is_completed():  # else this may be its own thread, in a callback
            self.wait_without_raising(timeout)
        if not self._ended.is_completed():
            raise TimeoutError(f"the {self._text} was not written within {timeout:g} s; it is still under way")

    def _end(self, timeout: float | None) -> None:
        self._await_end(timeout)
        self._value()

    def _value(self) -> Any:
        self._asked = True
        if self._error is not None:
            raise self._error


class _Job:
    """One save: what is written by whom, and the steps that lead to a checkpoint."""

    def __init__(self, state_dict: Mapping[str, Any], path: Any, check_replicas: bool, what: str) -> None:
        """Decides who writes what; nothing is sent or written yet."""
        flag("check_replicas", check_replicas)
        waits(f"checkpoint.{what}")
        self.session: Session = current.session()
        self._saves = self.session.part(Saves)
        self._saves.wait()
        self.site = here(3)
        self.over = threading.Event()  #: set when it has ended, in whichever way
        self.goes_on = False  #: whether a thread of its own ends it
        self.folder = Folder(path)
        state = State(state_dict)
        self._places: dict[int | None, Any] = {None: None}  #: those of nodes, by number; None is the script
        self._items: dict[int | None, list[FileItem]] = {None: []}
        self._values: dict[int | None, list[Any]] = {None: []}  #: the tensors, or bytes, of the items
        self._wholes: dict[str, TensorWriteData] = {}  #: what is said of tensors as a whole
        self._paths = state.paths
        #: of each node that has shards which others have, too: these, or the index of one that it writes
        self._replicas: dict[int, tuple[list[torch.Tensor | int], list[tuple[int, ...] | None]]] = {}
        #: for each shard that several ranks have: its name, and (node, index among the node's replicas, rank)
        self._same: list[tuple[str, MeshPlace, list[tuple[int, int, int]]]] = []
        with no_collection():  # all that it makes is kept, and a collection in the middle takes as long as the rest
            self._plan(state, check_replicas)
        self._calls = Calls(self.session, self.site)

    def __enter__(self) -> _Job:
        return self

    @uninterrupted
    def __exit__(self, *exc: object) -> None:
        """Ends a save that an interrupt has stopped between two of its steps: the session's end waits for each one
        that is not."""
        if not self.goes_on and not self.over.is_set():
            self._give_up()

    @property
    def nodes(self) -> list[int]:
        """The nodes that have a part in it."""
        return [node for node in self._places if node is not None]

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def _plan(self, state: State, check_replicas: bool) -> None:
        shards: list[tuple[int, str, StateEntry, list[tuple[int, TensorChunk]]]] = []
        for name, entry in state.entries.items():
            if not isinstance(entry.value, torch.Tensor):
                buffer = io.BytesIO()
                torch.save(entry.value, buffer)
                self._values[None].append(buffer)
                self._items[None].append(FileItem(name, None, None))
                continue
            shape = torch.Size(whole_shape(entry.value, entry.cuts))
            chunk = ChunkStorageMetadata(shape, shape)  # of each part another one
            self._wholes[name] = TensorWriteData(chunk, TensorProperties(dtype=entry.value.dtype), shape)
            by_offsets: dict[tuple[int, ...], list[tuple[int, TensorChunk]]] = {}
            parts = list(enumerate(parts_of(entry.value, entry.cuts)))
            filled = [(rank, part) for rank, part in parts if math.prod(part.sizes)] or parts[:1]
            for rank, part in filled:
                by_offsets.setdefault(part.offsets, []).append((rank, part))
            size = entry.value.element_size()
            shards += [(math.prod(p[0][1].sizes) * size, name, entry, p) for p in by_offsets.values()]
        load: dict[int, int] = {}
        for nbytes, name, entry, ranks in sorted(shards, key=lambda shard: -shard[0]):
            # of those that have it the one that has the least to write
            part = min((part for _, part in ranks), key=lambda part: load.get(_node(part), 0))
            load[_node(part)] = load.get(_node(part), 0) + nbytes
            self._write(name, entry, part)
            if check_replicas and len(ranks) > 1:
                self._compare(name, entry, ranks, part)

    def _write(self, name: str, entry: StateEntry, part: TensorChunk) -> None:
        node = self._take_in(part.place)
        self._values[node].append(entry.value)
        self._items[node].append(FileItem(name, part.offsets, part.sizes))

    def _compare(
        self, name: str, entry: StateEntry, ranks: list[tuple[int, TensorChunk]], written: TensorChunk
    ) -> None:
        where = []
        for rank, part in ranks:
            node = self._take_in(part.place)
            values, sizes = self._replicas.setdefault(node, ([], []))
            where.append((node, len(values), rank))
            values.append(len(self._items[node]) - 1 if part is written else entry.value)
            sizes.append(_padded(entry.value, part.sizes))
        place: Any = where_is(entry.value)
        self._same.append((name, place, where))

    def _take_in(self, place: NodePlace | None) -> Any:
        node = None if place is None else place.node
        if node not in self._places:
            self._places[node], self._values[node], self._items[node] = place, [], []
        return node

    def _torchs(self) -> tuple[Metadata, dict[int | None, SavePlan]]:
        """Returns torch's metadata of the checkpoint, and its plans."""
        plans: list[SavePlan] = []
        for items in self._items.values():
            made = []
            for item in items:
                data = self._wholes.get(item.name)
                if data is not None:
                    chunk = ChunkStorageMetadata(torch.Size(item.offsets or ()), torch.Size(item.sizes or ()))
                    data = replace(data, chunk=chunk)
                kind = WriteItemType.BYTE_IO if data is None else WriteItemType.SHARD
                made.append(WriteItem(item.key, kind, tensor_data=data))
            plans.append(SavePlan(made, planner_data={} if plans else self._paths))
        finished, metadata = DefaultSavePlanner().create_global_plan(plans)
        return metadata, dict(zip(self._items, finished, strict=True))

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def begin_writes(self, beside: bool) -> None:
        """Has the nodes begin, on a stream of its own if they are to write ``beside`` what comes next."""
        folder, claim, prefix = str(self.folder.path), self.folder.claim, self.folder.prefix
        calls = self._calls
        try:
            self._saves.jobs.append(self)
            self.folder.begin()
            for n in self.nodes:
                replicas, sizes = self._replicas.get(n, ([], []))
                written = self._items[n], self._values[n]
                calls.add(self._places[n], files.save, folder, claim, prefix(n), *written, replicas, sizes)
            if not beside:
                calls.begin_calls(draws=False)
                return
            own = [x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x for x in self._values[None]]
            self._values[None] = own
            with ExitStack() as streams:
                for node in self.nodes:
                    lane = Stream(node, "cpu")
                    lane.wait_stream(current_stream(node))
                    streams.enter_context(stream(lane))
                calls.begin_calls(draws=False, holds=True)
        except BaseException:
            self._give_up()
            raise

    def end(self) -> None:
        """Writes the script's own part, waits for the nodes, and has all be the checkpoint."""
        with undertakings.mine.during(self._words, short_line(self.site)):
            self._end()

    def _words(self) -> str:
        ended, count = self._calls.count_ended()
        return f"saving the checkpoint {self.folder.path}: {ended} of {count} nodes have written their parts"

    def _end(self) -> None:
        try:
            own = self._write_own()
            outcomes = self._calls.outcomes()  # of all, even where one has failed
            failed = [result for result in (own, *outcomes) if isinstance(result, Exception)]
            if failed:
                raise first_of(failed)
            said = [own, *(its for _, its in outcomes)]
            self._seen_by_all(said)
            self._same_everywhere({n: prints for n, (prints, _) in zip(self.nodes, outcomes, strict=True)})
            results: list[WriteResult] = []
            shards: list[Shard] = []
            metadata, plans = self._torchs()
            for node, its in zip([None, *self.nodes], said, strict=True):
                for item, one in zip(plans[node].items, its, strict=True):
                    written = Written(*one)
                    info = _StorageInfo(written.file, written.offset, written.length)
                    results.append(WriteResult(item.index, written.length, info))
                    shards.append(Shard(item.index, *written))
            self.folder.commit(metadata, results, shards)
        except BaseException as error:
            self._give_up()
            if isinstance(error, Exception):
                now = "was not written; what was there before still is"
                if self.folder.counts():
                    now = "is written, and may not be on the disk yet"
                error.add_note(f"  the checkpoint {self.folder.path} {now}")
            raise
        self._unregister()

    def _write_own(self) -> Any:
        """Returns what ``write`` returns for the script's own part, or its error: nodes are writing meanwhile."""
        folder = self.folder
        try:
            return files.write(
                str(folder.path), folder.claim, folder.prefix(None), self._items[None], self._values[None]
            )
        except Exception as error:
            return error

    def _seen_by_all(self, said: list[Any]) -> None:
        """Raises OSError where a host, whose name it has said, does not see the claim."""
        for node, host in zip([None, *self.nodes], said, strict=True):
            if isinstance(host, str):
                if not self.folder.has_claim():
                    raise self.folder.lost()
                error = FileNotFoundError(
                    f"host {host} does not see the folder {self.folder.path} that the script has made on host "
                    f"{files.here()}: a checkpoint is written by the nodes themselves, into a folder on a file system "
                    "that they and the script share"
                )
                if node is not None:
                    error.add_note(f"  failed: on node {node} (host {host})\n  issued: {line_of(self.site)}")
                raise error

    def _same_everywhere(self, said: dict[int, list[bytes]]) -> None:
        """Raises RanksDiffer where ranks have different values of what should be one."""
        for name, place, where in self._same:
            found: dict[bytes, int] = {}
            for node, index, rank in where:
                found.setdefault(said[node][index], rank)
            if len(found) > 1:
                first, second, *_ = found.values()
                raise RanksDiffer(
                    f"{name!r} has {len(found)} different values on the ranks of {place}, such as those at "
                    f"{place.where(first)} and {place.where(second)}, and a checkpoint has one: "
                    "dt.meshes.agree_(model) has all ranks take the first one's buffers, "
                    "dt.training.average_parameters(model) the mean of parameters, dt.meshes.agree_(x) makes one of "
                    "any tensor. check_replicas=False saves any one rank's"
                )

    def _give_up(self) -> None:
        """Removes what was written. Whatever that raises, the save is over: the session's end would wait for it."""
        with ExitStack() as steps:
            steps.callback(self._unregister)
            steps.callback(self.folder.abort)
            self._calls.__exit__()

    def _unregister(self) -> None:
        self._calls.__exit__()
        if self in self._saves.jobs:
            self._saves.jobs.remove(self)
        self.over.set()


def _padded(tensor: torch.Tensor, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the sizes of a part, if the shard has padding behind it."""
    return None if sizes == tuple(tensor.shape) else sizes


def _node(part: TensorChunk) -> int:
    return -1 if part.place is None else part.place.node
