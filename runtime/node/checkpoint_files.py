"""Checkpoints' files, as a node (or the script, for its own tensors) writes and reads them: its part of them only.

They are those of torch.distributed.checkpoint: what torch's own FileSystemReader reads, here too, and its
FileSystemWriter would write, but that a file is written and hashed in one go.
What is to be written or read is planned by the script, which knows all tensors and sends these functions to nodes.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ..protocol.flat import as_bytes
from .checkpoint_disk import DISK, Disk, Files, opened_file
from .held import HeldTensor, apart

#: Bytes behind which the disk is told to write, while what follows is written and hashed.
_WRITEBACK = 1 << 25
#: Numbers in one row of a fingerprint, each of which has another factor.
_ROW = 1 << 12


class FileItem(NamedTuple):
    """A thing to be written: of a tensor ``sizes`` entries from ``offsets`` of the whole one on; None for bytes."""

    name: str
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...] | None

    @property
    def key(self) -> MetadataIndex:
        """Its name among torch's planners."""
        return MetadataIndex(self.name, self.offsets)


class Written(NamedTuple):
    """The place of an item of a plan in its file, and the hash of its bytes there."""

    file: str
    offset: int
    length: int
    sha256: str


class Shard(NamedTuple):
    """A shard's file and place in it, and the hash that its bytes should have; "" where none is known."""

    item: MetadataIndex
    file: str
    offset: int
    length: int
    sha256: str


def here() -> str:
    """Returns this host's name."""
    return socket.gethostname()


# ---- writing ---------------------------------------------------------------------------------------------------------


def save(
    folder: str,
    claim: str,
    prefix: str,
    items: Sequence[tuple[Any, ...]],
    values: Sequence[Any],
    replicas: Sequence[Any],
    sizes: Sequence[Sequence[int] | None],
) -> tuple[list[bytes], list[tuple[Any, ...]] | str]:
    """Writes as ``write`` does; returns the fingerprints of ``replicas`` (``sizes``: without padding), and what
    ``write`` returns. A replica is a tensor, or the index of that item.

    Tensors may be held: they are copied into memory of the CPU first, so that who writes them need not wait for the
    disk.
    """
    values = [
        _copied(x, FileItem(*item).sizes) if isinstance(x, HeldTensor) else x
        for x, item in zip(values, items, strict=True)
    ]
    found = []
    for replica, its in zip(replicas, sizes, strict=True):
        replica = values[replica] if isinstance(replica, int) else replica
        fingerprint = partial(_fingerprint, sizes=its)
        found.append(replica.read(fingerprint) if isinstance(replica, HeldTensor) else fingerprint(replica))
    return found, write(folder, claim, prefix, items, values)


def _copied(held: HeldTensor, sizes: Sequence[int] | None) -> torch.Tensor:
    return held.read(lambda tensor: apart(_own(tensor, sizes)))


def write(
    folder: str,
    claim: str,
    prefix: str,
    items: Sequence[tuple[Any, ...]],
    values: Sequence[Any],
    disk: Disk = DISK,
) -> list[tuple[Any, ...]] | str:
    """Writes items (those of ``FileItem``), whose tensors or bytes are ``values``, into one file of a folder, and waits
    until they are on the disk; returns what ``Written`` is made of for each.

    Returns this host's name, and leaves nothing, where the folder does not have ``claim``, by which the script knows
    it: it is another folder or not there, or the script has given the save up, and nobody is to hear of it then.
    Raises OSError that names the file and this host.
    """
    sees = partial(disk.is_folder, os.path.join(folder, claim))
    try:
        seen = sees()
    except PermissionError as error:
        raise PermissionError(
            error.errno,
            f"the user of host {here()} (uid {os.getuid()}) may not enter {folder}, which the script has made: a "
            "checkpoint is written by the nodes themselves, as one user or one group that may (chmod)",
        ) from None
    if not seen:
        return here()
    if not items:
        return []
    file = os.path.join(folder, f"{prefix}0.distcp")
    try:
        found = _write(folder, prefix, file, items, values, disk)
    except OSError:
        if sees():
            raise
    else:
        if sees():
            return found
    with suppress(OSError):
        disk.unlink(file)
    return here()


def _write(
    folder: str, prefix: str, file: str, items: Sequence[tuple[Any, ...]], values: Sequence[Any], disk: Disk
) -> list[tuple[Any, ...]]:
    written = []
    with named(file, "written"):
        with Files(disk).create_stream(file, "wb") as stream:
            hashed = _HashedFile(stream, disk)
            for item, value in zip(map(FileItem._make, items), values, strict=True):
                if isinstance(value, torch.Tensor):
                    _write_tensor(_plain(value, item.sizes), hashed)
                else:
                    hashed.write(value.getbuffer())
                written.append((os.path.basename(file), *hashed.end_item()))
            stream.flush()
            disk.fsync(stream.fileno())
        disk.sync_folder(folder)
    return written


class _HashedFile:
    """A file that is written, and the hashes of its items: they are made of the tensors' own memory, while the disk
    writes what lies before."""

    def __init__(self, stream: Any, disk: Disk) -> None:
        self._stream, self._disk = stream, disk
        self._at = self._begun = self._item = 0
        self._sha256 = hashlib.sha256()

    def write(self, data: memoryview) -> int:
        for begin in range(0, len(data), _WRITEBACK):
            piece = data[begin : begin + _WRITEBACK]
            self._stream.write(piece)
            self._at += len(piece)
            if self._at - self._begun >= _WRITEBACK:
                self._stream.flush()
                self._disk.begin_writeback(self._stream.fileno(), self._begun, self._at - self._begun)
                self._begun = self._at
            self._sha256.update(piece)
        return len(data)

    def end_item(self) -> tuple[int, int, str]:
        """Returns an item's place in the file, its length and its hash; what is written next is another's."""
        found = self._item, self._at - self._item, self._sha256.hexdigest()
        self._item, self._sha256 = self._at, hashlib.sha256()
        return found


def _write_tensor(tensor: torch.Tensor, file: Any) -> None:
    """Writes a tensor as torch.save does, without the sums (CRC-32) of zip, which torch does not compare.

    They take as long as the write itself, and torch's setting for them may be one of the whole process.
    """
    tensor = tensor.cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # else all of the storage that it is a part of would be written
    private: Any = torch.serialization
    writer = torch._C.PyTorchFileWriter(file, False, private._get_storage_alignment())
    try:
        private._save(tensor, writer, private.pickle, private.DEFAULT_PROTOCOL, False)
    finally:
        writer.write_end_of_file()


def _plain(value: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
    """Returns the values that are to be written."""
    return _own(value, sizes).resolve_conj().resolve_neg()


def _own(tensor: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
    """Returns the part of a shard that belongs to the whole tensor: all but the padding at its end. None: all of it."""
    tensor = tensor.detach()
    for dim, size in enumerate(sizes or ()):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def _fingerprint(tensor: torch.Tensor, sizes: Sequence[int] | None) -> bytes:
    """Returns a number that differs where the values of a shard, without its padding, do.

    It is made by sums, as fast as memory can be read. Any one change is found; what somebody has made to deceive is
    not.
    """
    data = as_bytes(_plain(tensor, sizes).contiguous())
    rest = data.numel() % 8
    tail = bytes(data[data.numel() - rest :].tolist())
    words = data[: data.numel() - rest].clone() if data.storage_offset() % 8 else data[: data.numel() - rest]
    words = words.view(torch.int64)
    rows = words[: words.numel() // _ROW * _ROW].view(-1, _ROW)
    last = words[rows.numel() :]
    total = [_weighted(rows.sum(0)), _weighted(rows.sum(1)), _weighted(last)]
    return b"".join(int(value).to_bytes(8, "big", signed=True) for value in total) + tail


def _weighted(values: torch.Tensor) -> int:
    """Returns the sum of int64 numbers times odd factors, modulo 2**64."""
    return int((values * (torch.arange(values.numel(), device=values.device) * 2 + 1)).sum())


# ---- reading ---------------------------------------------------------------------------------------------------------


def check(folder: str, shards: Sequence[Shard]) -> None:
    """Compares shards with their hashes, those that have one.

    Raises ValueError that names the shard, the file and this host where one is not what was written; OSError.
    """
    for file, mine in _by_file(folder, shards).items():
        with named(file, "read"), opened_file(file) as opened, _mapped(opened) as data:
            for shard in mine:
                if shard.offset + shard.length > len(data):
                    raise ValueError(
                        f"{file} ends at byte {len(data)}, and {_named_shard(shard)} should lie in its bytes "
                        f"{shard.offset} to {shard.offset + shard.length}, as host {here()} reads it; the checkpoint "
                        "is damaged"
                    )
                if shard.sha256 and _sha256(data, shard.offset, shard.length) != shard.sha256:
                    raise ValueError(
                        f"{_named_shard(shard)} is damaged: bytes {shard.offset} to {shard.offset + shard.length} of "
                        f"{file}, as host {here()} reads it, do not have the hash (sha256) that was written with "
                        "them; nothing was loaded"
                    )


def read(folder: str, shards: Sequence[Shard], items: Sequence[ReadItem], targets: dict[str, Any]) -> None:
    """Reads the parts of shards that ``items`` name, into ``targets``: a (tensor, sizes without padding) by name.

    Raises OSError, and ValueError for a shard that can't be read, which name the file and this host.
    """
    places = {shard.item: _StorageInfo(shard.file, shard.offset, shard.length) for shard in shards}
    for file, mine in _by_file(folder, shards).items():
        its = {shard.item for shard in mine}
        reader = FileSystemReader(folder)
        reader.fs = Files()
        reader.set_up_storage_reader(Metadata({}, storage_data=places), False)
        plan = LoadPlan([item for item in items if item.storage_index in its])
        with named(file, "read"):
            reader.read_data(plan, _Into(targets)).wait()


class _Into(DefaultLoadPlanner):
    """A planner whose plan is made already; it only hands out what is to be filled."""

    def __init__(self, targets: dict[str, Any]) -> None:
        super().__init__()
        self._targets = targets

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _own(*self._targets[index.fqn])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._targets[read_item.dest_index.fqn] = value


def _by_file(folder: str, shards: Sequence[Shard]) -> Mapping[str, list[Shard]]:
    files: dict[str, list[Shard]] = {}
    for shard in shards:
        files.setdefault(os.path.join(folder, shard.file), []).append(shard)
    return files


def _named_shard(shard: Shard) -> str:
    offset = shard.item.offset
    return repr(shard.item.fqn) + (f" from {tuple(offset)} on" if offset is not None and any(offset) else "")


# ---- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def named(file: str, done: str) -> Iterator[None]:
    """Has what goes wrong with a file name it, and this host."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(
            f"host {here()} does not see {file}: a checkpoint lies on a file system that all nodes and the script share"
        ) from None
    except OSError as error:
        raise type(error)(error.errno, f"{error.strerror}: {file} can't be {done} on host {here()}") from None


@contextmanager
def _mapped(file: io.BufferedReader) -> Iterator[memoryview]:
    """Has a file's bytes as memory."""
    if not os.fstat(file.fileno()).st_size:
        yield memoryview(b"")
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        yield data


def _sha256(data: memoryview, offset: int, length: int) -> str:
    with data[offset : offset + length] as part:  # the map can't end before its parts
        return hashlib.sha256(part).hexdigest()
