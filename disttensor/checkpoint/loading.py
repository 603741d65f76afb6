"""Loading: the script plans who reads what, and the nodes read it into the tensors that they have."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..dispatch.call_site import here
from ..errors.argument_checks import flag, spelled
from ..meshes.cut import whole_shape
from ..runtime.master.route import waits
from ..runtime.node import checkpoint_files as files
from ..runtime.node.checkpoint_files import Shard
from ..runtime.process import undertakings
from ..runtime.process.spelling import did_you_mean
from ..session import current
from ..tasks.calls import Calls, first_of
from .folder import Hashes, read_checkpoint
from .parts import parts_of
from .saving import Saves
from .state import State, StateEntry


class _Words(str):
    """The text of a KeyError, which Python shows as a repr."""

    __slots__ = ()
    __repr__ = str.__str__


@spelled
def load(
    state_dict: MutableMapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    check_hashes: bool = True,
) -> None:
    """Loads a checkpoint into a program's state, and waits for it.

        >>> state = {"model": model, "optim": optimizer, "step": 0}
        >>> dt.checkpoint.load(state, "/shared/run1")
        >>> state["step"]
        100

    Args:
        state_dict: as of ``save``. Tensors, those of modules and of optimizers too, are filled where they are, whatever
            mesh or process the checkpoint is of; an optimizer need not have made a step. Other values are put into the
            dict in place of those that are there.
        path: the folder of a checkpoint of ``save``, or of ``torch.distributed.checkpoint.save``, which all nodes see.
        strict: False: what is not in the checkpoint stays as it is.
        check_hashes: False: shards are not compared with the hashes that ``save`` has written.

    Each node reads its own parts. The folder's ``.metadata``, and values that are no tensors, are unpickled in the
    script by torch, as ``torch.distributed.checkpoint.load`` does: load what you trust.

    Raises FileNotFoundError where there is no complete checkpoint, or a node does not see it; ValueError that names the
    shard and the file for one that is damaged: nothing was loaded then; KeyError for what it does not have; ValueError
    for a tensor of another shape; OSError; NodeLost.
    """
    flag("strict", strict)
    flag("check_hashes", check_hashes)
    waits("checkpoint.load")
    session = current.session()
    session.part(Saves).wait()
    folder = Path(os.path.abspath(os.fspath(path)))
    site = here(3)

    def take(metadata: Metadata, hashes: Hashes) -> None:
        state = State(state_dict)
        state.prepare(metadata)
        plan = _Plan(folder, metadata, hashes if check_hashes else {})
        plan.fill(state, strict)
        plan.run(session, site, check_hashes)
        for name, value in plan.values():
            state.put(name, value)
        state.give_back()

    read_checkpoint(folder, take)


class _Plan:
    """The plan of one load: for each node (None: the script) what it reads, and into which tensors."""

    def __init__(self, folder: Path, metadata: Metadata, hashes: Hashes) -> None:
        self._folder, self._metadata, self._hashes = folder, metadata, hashes
        self._places: dict[int | None, Any] = {None: None}
        self._items: dict[int | None, list[ReadItem]] = {None: []}
        self._targets: dict[int | None, dict[str, Any]] = {None: {}}
        self._shards: dict[int | None, dict[MetadataIndex, Shard]] = {None: {}}

    def fill(self, state: State, strict: bool) -> None:
        """Plans the reading of a state. Raises KeyError for what is not in the checkpoint, ValueError for what has
        another shape there."""
        stored = self._metadata.state_dict_metadata
        missing = [name for name in state.entries if name not in stored]
        if missing and strict:
            shown = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise KeyError(
                _Words(
                    f"{self._folder} has no {shown}{did_you_mean(missing[0], stored)}; with strict=False what is not "
                    "there stays as it is"
                )
            )
        for name, entry in state.entries.items():
            if name in stored:
                self._entry(name, entry, stored[name])

    def _entry(self, name: str, entry: StateEntry, stored: Any) -> None:
        if isinstance(stored, BytesStorageMetadata) or not isinstance(entry.value, torch.Tensor):
            if isinstance(stored, TensorStorageMetadata):
                made = torch.zeros(stored.size, dtype=stored.properties.dtype, device="cpu")  # a value was a tensor
                self._tensor(name, StateEntry(made), stored)
                self._targets[None][name] = (made, made.shape)
                return
            if isinstance(entry.value, torch.Tensor):
                raise ValueError(f"{name!r} is a tensor here, and another value in {self._folder}")
            index = MetadataIndex(name)
            zero = torch.Size((0,))
            self._add(None, ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero))
            return
        self._tensor(name, entry, stored)

    def _tensor(self, name: str, entry: StateEntry, stored: TensorStorageMetadata) -> None:
        shape = whole_shape(entry.value, entry.cuts)
        if tuple(stored.size) != shape:
            raise ValueError(f"{name!r} is {shape} here, and {tuple(stored.size)} in {self._folder}")
        for part in parts_of(entry.value, entry.cuts):
            node = None if part.place is None else part.place.node
            if node not in self._places:
                self._places[node], self._items[node] = part.place, []
                self._targets[node], self._shards[node] = {}, {}
            self._targets[node][name] = (entry.value, part.sizes)
            for item in create_read_items_for_chunk_list(name, stored, [part.chunk]):
                self._add(node, item)

    def _add(self, node: int | None, item: ReadItem) -> None:
        info = self._metadata.storage_data[item.storage_index]
        length, sha256 = self._hashes.get((info.relative_path, info.offset), (info.length, ""))
        self._items[node].append(item)
        shard = Shard(item.storage_index, info.relative_path, info.offset, length, sha256)
        self._shards[node][item.storage_index] = shard

    def run(self, session: Any, site: Any, check_hashes: bool) -> None:
        """Has all be read: first the hashes, everywhere, so that a checkpoint that is damaged changes nothing."""
        folder = str(self._folder)
        shards = {node: list(mine.values()) for node, mine in self._shards.items()}
        if check_hashes:
            self._everywhere(
                session, site, "checking", files.check, {node: (folder, mine) for node, mine in shards.items()}
            )
        arguments = {node: (folder, shards[node], self._items[node], self._targets[node]) for node in shards}
        self._everywhere(session, site, "loading", files.read, arguments)

    def _everywhere(
        self, session: Any, site: Any, what: str, fn: Any, arguments: dict[int | None, tuple[Any, ...]]
    ) -> None:
        with Calls(session, site) as calls:
            for node, mine in arguments.items():
                if node is not None:
                    calls.add(self._places[node], fn, *mine)
            calls.begin_calls(draws=False)
            with undertakings.mine.during(partial(self._words, what, calls)):
                failed = []
                try:
                    fn(*arguments[None])
                except Exception as error:
                    failed.append(error)
                failed += [result for result in calls.outcomes() if isinstance(result, Exception)]
        if failed:
            raise first_of(failed)

    def _words(self, what: str, calls: Calls) -> str:
        ended, count = calls.count_ended()
        return f"{what} the checkpoint {self._folder}: {ended} of {count} nodes have read their parts"

    def values(self) -> Iterable[tuple[str, Any]]:
        """Yields the values that are no tensors, unpickled by torch, and the tensors that were read in their place."""
        for name, value in self._targets[None].items():
            if isinstance(value, io.BytesIO):
                unpickler = DefaultLoadPlanner(flatten_state_dict=False)
                unpickler.state_dict = {}
                index = MetadataIndex(name)
                zero = torch.Size((0,))
                unpickler.load_bytes(ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero), value)
                yield name, unpickler.state_dict[name]
            else:
                yield name, value[0]
