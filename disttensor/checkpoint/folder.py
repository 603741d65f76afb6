"""The folder of a checkpoint: what lies in it, and how a new checkpoint takes the place of the former one at once.

    .metadata                   torch's: all tensors' shapes, and where which part of them lies. The one that counts
    __0_4f1c2a90_0.distcp       torch's: what node 0 has written, in the save with this number; "s" is the script
    hashes_4f1c2a90.json        the hash of each shard, and of .metadata
    .saving_4f1c2a90/           there while that save is under way

All names but the first hold the number of the save, so that the files of a former checkpoint stay as they are until
the rename of ``.metadata``: before it the former one is the checkpoint, from then on the new one. What a save that was
killed has left is removed at the end of the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from ..runtime.node.checkpoint_files import Shard, sync_folder

_METADATA = ".metadata"
_OURS = "disttensor-"  #: a save's id in ``.metadata`` begins so; those of torch's own are UUIDs

_LEFT = re.compile(r"__.+\.distcp|hashes_[0-9a-f]{8}\.json|\.saving_[0-9a-f]{8}")


class Folder:
    """The folder of one save."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Takes the path; makes nothing. Raises TypeError for what is no path."""
        self.path = Path(os.path.abspath(os.fspath(path)))
        self._number = secrets.token_hex(4)
        self.claim = f".saving_{self._number}"
        self._made = False

    def prefix(self, node: int | None) -> str:
        """Returns what the names of a node's files begin with; None: those of the script."""
        return f"__{'s' if node is None else node}_{self._number}_"

    def begin(self) -> None:
        """Makes the folder and claims it. Raises OSError."""
        self._made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / self.claim).mkdir()

    def commit(self, metadata: Metadata, results: Sequence[WriteResult], hashes: Sequence[Shard]) -> None:
        """Has what was written be the checkpoint, at once, and removes the former one. Raises OSError."""
        claim = self.path / self.claim
        _Metadata(claim, self.path, f"{_OURS}{self._number}").finish(metadata, [list(results)])
        said = {
            "algorithm": "sha256",
            "metadata": hashlib.sha256((claim / _METADATA).read_bytes()).hexdigest(),
            "shards": [[shard.file, shard.offset, shard.length, shard.sha256] for shard in hashes],
        }
        with open(self.path / f"hashes_{self._number}.json", "w") as file:
            json.dump(said, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(str(self.path))
        os.replace(claim / _METADATA, self.path / _METADATA)
        sync_folder(str(self.path))
        if self._made:
            sync_folder(str(self.path.parent))
        self._sweep({shard.file for shard in hashes} | {f"hashes_{self._number}.json"})

    def _sweep(self, used: set[str]) -> None:
        """Removes what the former checkpoint consisted of, and what killed saves have left."""
        for name in os.listdir(self.path):
            if _LEFT.fullmatch(name) and name not in used:
                _remove(self.path / name)

    def abort(self) -> None:
        """Removes what this save has written. The former checkpoint is what it was."""
        with suppress(OSError):
            for name in os.listdir(self.path):
                if self._number in name and _LEFT.fullmatch(name):
                    _remove(self.path / name)
            if self._made:
                self.path.rmdir()


class _Metadata(FileSystemWriter):
    """torch's writer, which writes ``.metadata`` into a folder from where it is put into its place."""

    def __init__(self, folder: Path, path: Path, number: str) -> None:
        super().__init__(folder)
        self._meta = StorageMeta(checkpoint_id=str(path), save_id=number)

    def storage_meta(self) -> StorageMeta:
        return self._meta


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def read_metadata(path: Path) -> tuple[Metadata, dict[tuple[str, int], tuple[int, str]]]:
    """Returns a checkpoint's metadata, and by (file, offset) the length and hash of each shard: none where torch has
    written it.

    Raises FileNotFoundError where no checkpoint is, ValueError for one that is damaged.
    """
    file = path / _METADATA
    if not file.exists():
        there = "there is no such folder" if not path.exists() else "the folder has no .metadata, which is written last"
        raise FileNotFoundError(f"{path} is no complete checkpoint: {there}")
    try:
        metadata = FileSystemReader(path).read_metadata()
        assert isinstance(metadata, Metadata)
        number = str(metadata.storage_meta.save_id or "")  # type: ignore[union-attr]
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"{file} is damaged, or no metadata of a checkpoint ({type(error).__name__}: {error})"
        ) from None
    if not number.startswith(_OURS):
        return metadata, {}
    hashes = path / f"hashes_{number.removeprefix(_OURS)}.json"
    try:
        said: Any = json.loads(hashes.read_text())
        whole = hashlib.sha256(file.read_bytes()).hexdigest() == said["metadata"]
        found = {(str(f), int(offset)): (int(length), str(sha)) for f, offset, length, sha in said["shards"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{hashes}, the hashes of {path}, can't be read: {error}") from None
    if not whole:
        raise ValueError(f"{file} is damaged: its bytes are not those that were written (sha256)")
    return metadata, found
