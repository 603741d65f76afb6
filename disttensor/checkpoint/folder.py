"""The folder of a checkpoint: what lies in it, and how a new checkpoint takes the place of the former one at once.

    .metadata                   torch's: all tensors' shapes, and where which part of them lies. The one that counts
    __0_4f1c2a90_0.distcp       torch's: what node 0 has written, in the save with this number; "s" is the script
    hashes_4f1c2a90.json        the hash of each shard, and of .metadata
    .saving_4f1c2a90/           there while that save is under way: it may become the checkpoint
    .saver/                     whose turn it is to save (turn.py)

All names but the first hold the number of the save, so that the files of a former checkpoint stay as they are until
the rename of ``.metadata``: before it the former one is the checkpoint, from then on the new one. What a save that was
killed has left is removed at the end of the next one.

What may be removed does not depend on who has the turn, for a file system may tell two saves that they have it, and one
that stood still goes on when it has lost it. The new ``.metadata`` is renamed out of ``.saving_``, so a save whose
``.saving_`` was given another name can't become the checkpoint any more, and each save becomes it once at most. So what
has the number of a save without ``.saving_`` that is not the checkpoint never is it again.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from ..runtime.node.checkpoint_disk import DISK, Disk
from ..runtime.node.checkpoint_files import Shard, here, named
from ..runtime.process.signals import uninterrupted
from .turn import Turn

_METADATA = ".metadata"
_OURS = "disttensor-"  #: a save's id in ``.metadata`` begins so; those of torch's own are UUIDs

#: What has the number of a save in its name.
_NUMBERED = re.compile(
    r"__(?:\d+|s)_([0-9a-f]{8})_\d+\.distcp|hashes_([0-9a-f]{8})\.json|\.(?:saving|swept|saver)_([0-9a-f]{8})"
)
_HASHES = re.compile(r"hashes_[0-9a-f]{8}\.json")
_TORCHS = re.compile(r"__\d+_\d+\.distcp")

#: What is in a ``.metadata`` of ours, and in one of torch's that has tensors or values.
_OURS_WITHIN = re.compile(rb"disttensor-([0-9a-f]{8})|__(?:\d+|s)_([0-9a-f]{8})_\d+\.distcp")
_TORCHS_WITHIN = re.compile(rb"__\d+_\d+\.distcp")

#: So often another save, which has failed, may remove the folder that it had made before this one is in it.
_TRIES = 100

_T = TypeVar("_T")

#: By (file, offset) the length and hash of each shard; none where torch has written the checkpoint.
Hashes = dict[tuple[str, int], tuple[int, str]]


class Folder:
    """The folder of one save."""

    def __init__(self, path: str | os.PathLike[str], disk: Disk = DISK) -> None:
        """Takes the path; makes nothing. Raises TypeError for what is no path."""
        self.path = Path(os.path.abspath(os.fspath(path)))
        self._disk = disk
        self._number = secrets.token_hex(4)
        self.claim = f".saving_{self._number}"
        self._turn = Turn(str(self.path), self._number, disk)
        self._made = False

    def prefix(self, node: int | None) -> str:
        """Returns what the names of a node's files begin with; None: those of the script."""
        return f"__{'s' if node is None else node}_{self._number}_"

    def begin(self) -> None:
        """Makes the folder and takes the turn. Raises OSError: EBUSY where another save has it."""
        try:
            self._take_turn()
            with named(self._at(self.claim), "made"):
                self._disk.mkdir(self._at(self.claim))
            self._refuse_others(self._disk.listdir(str(self.path)))
        except BaseException:
            self.abort()
            raise

    def _take_turn(self) -> None:
        for left in reversed(range(_TRIES)):
            self._made = self._disk.make_folder(str(self.path)) or self._made
            try:
                return self._turn.acquire()
            except FileNotFoundError:
                if not left:
                    raise

    def commit(self, metadata: Metadata, results: Sequence[WriteResult], hashes: Sequence[Shard]) -> None:
        """Has what was written be the checkpoint, at once, and removes the former one. Raises OSError."""
        data = _pickled(metadata, results, StorageMeta(checkpoint_id=str(self.path), save_id=self._id))
        said = {
            "algorithm": "sha256",
            "metadata": hashlib.sha256(data).hexdigest(),
            "shards": [[shard.file, shard.offset, shard.length, shard.sha256] for shard in hashes],
        }
        self._write(f"hashes_{self._number}.json", json.dumps(said).encode())
        self._write(f"{self.claim}/{_METADATA}", data)
        self._disk.sync_folder(str(self.path))
        former = self._current()
        self._become()
        with named(str(self.path), "written"):
            self._disk.sync_folder(str(self.path))
            if self._made:
                self._disk.sync_folder(str(self.path.parent))
        self._sweep(former)
        self.abort()

    @property
    def _id(self) -> str:
        return f"{_OURS}{self._number}"

    def _at(self, name: str) -> str:
        return str(self.path / name)

    def _write(self, name: str, data: bytes) -> None:
        disk, path = self._disk, self._at(name)
        with self._still_its_turn(), named(path, "written"):
            descriptor = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, disk.readable(str(self.path)))
            try:
                disk.write_all(descriptor, data)
                disk.fsync(descriptor)
            finally:
                disk.close(descriptor)

    def _become(self) -> None:
        """Has this save be the checkpoint. Raises OSError, if it is not."""
        with self._still_its_turn(), named(self._at(_METADATA), "written"):
            try:
                self._disk.rename(self._at(f"{self.claim}/{_METADATA}"), self._at(_METADATA))
            except OSError:
                if not self.counts():  # a file system that is asked twice, for an answer was lost, has it done once
                    raise

    @contextmanager
    def _still_its_turn(self) -> Iterator[None]:
        """Explains what fails because another save has taken the turn."""
        try:
            yield
        except FileNotFoundError as error:
            if self.has_claim():
                raise
            raise self.lost() from error

    def lost(self) -> OSError:
        """Returns the error of a save whose turn another one has taken."""
        return OSError(
            errno.EBUSY,
            f"this save, of a script on host {here()}, has lost its turn to write {self.path}: it had not been heard "
            f"of for a minute, as a script that stood still; {self._turn.next()} has taken it",
        )

    def has_claim(self) -> bool:
        """Returns whether this save may still become the checkpoint."""
        try:
            self._disk.listdir(self._at(self.claim))
        except FileNotFoundError:
            return False
        return True

    def _current(self) -> bytes:
        """Returns the ``.metadata`` that counts; nothing where there is none."""
        with suppress(FileNotFoundError):
            return self._disk.read_file(self._at(_METADATA))
        return b""

    def counts(self) -> bool:
        """Returns whether this save is the checkpoint, or may be: its files must stay."""
        try:
            return self._id.encode() in self._current()
        except OSError:
            return True

    def _refuse_others(self, names: Sequence[str]) -> set[str]:
        """Has no other save whose names these are become the checkpoint; returns the numbers of these."""
        numbers = {number for name in names if (number := _number_of(name))} - {self._number}
        for number in list(numbers):
            try:
                self._disk.rename(self._at(f".saving_{number}"), self._at(f".swept_{number}"))
            except FileNotFoundError:  # most have none
                continue
            except OSError:
                numbers.discard(number)
        return numbers

    def _sweep(self, former: bytes) -> None:
        """Removes what the former checkpoint consisted of, and what killed saves have left. What can't be removed stays
        until the next save."""
        with suppress(OSError):
            names = self._disk.listdir(str(self.path))
            if not self.has_claim():
                return  # another one has its turn, and was so when it began: what is its own may be among these
            numbers = self._refuse_others(names)
            now = self._current()
            gone = {number for number in numbers if number.encode() not in now}
            for name in {*names, *(f".swept_{number}" for number in gone)}:
                number = _number_of(name)
                if number in gone or (_TORCHS.fullmatch(name) and _names(former, name) and not _names(now, name)):
                    self._remove(name)

    def _remove(self, name: str) -> None:
        path = self._at(name)
        with suppress(OSError):
            if not name.startswith((".saving_", ".swept_", ".saver_")):
                self._disk.unlink(path)
                return
            for each in self._disk.listdir(path):
                self._disk.unlink(os.path.join(path, each))
            self._disk.rmdir(path)

    @uninterrupted
    def abort(self) -> None:
        """Removes what this save has written, unless it is the checkpoint, and gives the turn back. Twice is fine."""
        keep = self.counts()
        with suppress(OSError):
            for name in self._disk.listdir(str(self.path)):
                if _number_of(name) == self._number and (name.startswith(".s") or not keep):
                    self._remove(name)
        self._turn.release()
        if self._made and not keep:
            with suppress(OSError):
                self._disk.rmdir(str(self.path))

    def forked(self) -> None:
        """Lets go of it in a forked child."""
        self._turn.forked()


def _number_of(name: str) -> str | None:
    found = _NUMBERED.fullmatch(name)
    return found and next(filter(None, found.groups()))


def _names(pickled: bytes, name: str) -> bool:
    """Returns whether a pickle has this text, which is found without unpickling it."""
    text = name.encode()
    return any(len(text).to_bytes(size, "little") + text in pickled for size in (1, 4))


# ---- torch's metadata ------------------------------------------------------------------------------------------------


class _Memory(FileSystem):
    """One file in memory, for torch's writer and reader of ``.metadata``."""

    def __init__(self, data: bytes = b"") -> None:
        self.file = io.BytesIO(data)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        yield self.file

    def exists(self, path: Any) -> bool:
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        pass


class _Writer(FileSystemWriter):
    """torch's writer, with an id of ours."""

    def __init__(self, meta: StorageMeta) -> None:
        super().__init__("", sync_files=False)
        self.fs = self.memory = _Memory()
        self._meta = meta

    def storage_meta(self) -> StorageMeta:
        return self._meta


def _pickled(metadata: Metadata, results: Sequence[WriteResult], meta: StorageMeta) -> bytes:
    """Returns ``.metadata`` as torch writes it."""
    writer = _Writer(meta)
    writer.finish(metadata, [list(results)])
    return writer.memory.file.getvalue()


def _unpickled(data: bytes) -> Metadata:
    reader = FileSystemReader("")
    reader.fs = _Memory(data)
    metadata = reader.read_metadata()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"it has a {type(metadata).__name__}")
    return metadata


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path, use: Callable[[Metadata, Hashes], _T], disk: Disk = DISK) -> _T:
    """Returns what ``use`` does of a checkpoint's metadata and hashes. Where a save has replaced the checkpoint
    meanwhile, so that its files are gone, ``use`` is called anew, of the new one.

    Raises FileNotFoundError where no checkpoint is, ValueError for one that is damaged, OSError; and as ``use``.
    """
    while True:
        data = _metadata_of(path, disk)
        try:
            return use(*_read(path, data, disk))
        except (OSError, ValueError):
            if _metadata_of(path, disk) == data:
                raise


def _metadata_of(path: Path, disk: Disk) -> bytes:
    file = path / _METADATA
    try:
        with named(str(file), "read"):
            return disk.read_file(str(file))
    except FileNotFoundError:
        there = (
            f"there is no such folder on host {here()}"
            if not path.exists()
            else "the folder has no .metadata, which is written last"
        )
        raise FileNotFoundError(f"{path} is no complete checkpoint: {there}") from None


def _read(path: Path, data: bytes, disk: Disk) -> tuple[Metadata, Hashes]:
    """Returns what a checkpoint with these bytes of ``.metadata`` says.

    They are compared with their hash before they are unpickled, and each shard has to have one: whatever in them was
    altered, they stay those of a checkpoint of ours. A pickle with one wrong byte may take all memory.
    """
    file = path / _METADATA
    digest = hashlib.sha256(data).hexdigest()
    found = {name: _hashes(path / name, disk) for name in disk.listdir(str(path)) if _HASHES.fullmatch(name)}
    its = [(name, said[1]) for name, said in found.items() if not isinstance(said, Exception) and said[0] == digest]
    if not its:
        _check_torchs(path, data, found)
    try:
        metadata = _unpickled(data)
        shards = {(str(each.relative_path), int(each.offset)) for each in (metadata.storage_data or {}).values()}
    except Exception as error:
        raise ValueError(
            f"{file} is damaged, or no metadata of a checkpoint ({type(error).__name__}: {error})"
        ) from None
    for name, hashes in its:
        if shards - hashes.keys():
            raise ValueError(f"{path / name} is damaged: it lacks hashes of shards that {_METADATA} has")
        return metadata, hashes
    return metadata, {}


def _check_torchs(path: Path, data: bytes, found: Mapping[str, object]) -> None:
    """Raises ValueError for a ``.metadata`` that has no hash here, and is not one that torch has written: a number of a
    save is in it, be it in one name of a file only, or there are hashes and no name of a file of torch's."""
    numbers = {number.decode() for pair in _OURS_WITHIN.findall(data) for number in pair if number}
    if not numbers and not (found and not _TORCHS_WITHIN.search(data)):
        return
    its = [name for name in found if not numbers or _number_of(name) in numbers]
    for name in its:
        if isinstance(found[name], Exception):
            raise ValueError(f"{path / name}, the hashes of {path}, can't be read: {found[name]}")
    if not its:
        lacks = " or ".join(sorted(f"hashes_{number}.json" for number in numbers))
        raise ValueError(f"{path / lacks}, the hashes of {path}, can't be read: there is no such file")
    raise ValueError(f"{path / _METADATA} is damaged: its bytes are not those that were written (sha256)")


def _hashes(file: Path, disk: Disk) -> tuple[str, Hashes] | Exception:
    """Returns the hash of ``.metadata`` and those of the shards, as a file says; or why it can't be read."""
    try:
        said: Any = json.loads(disk.read_file(str(file)))
        shards = {(str(f), int(offset)): (int(length), str(sha)) for f, offset, length, sha in said["shards"]}
        if said["algorithm"] != "sha256":
            raise ValueError(f"its algorithm is {said['algorithm']!r}, not 'sha256'")
        return str(said["metadata"]), shards
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return error
