"""A file of a checkpoint: each byte of a tensor is written and hashed where it lies, once, and torch reads it."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from disttensor.runtime.node import checkpoint_files as files
from disttensor.runtime.node.checkpoint_disk import Disk
from disttensor.runtime.node.checkpoint_files import FileItem, Written


class Counted:
    """What is passed over, as (address, bytes): by hashes, and by writes to the disk, whose calls have their names."""

    def __init__(self) -> None:
        self.hashed: list[tuple[int, int]] = []
        self.written: list[tuple[int, int]] = []
        self.calls: list[str] = []
        self.begun: list[tuple[int, int]] = []  #: offset and length of what the disk was told to write

    def sha256(self) -> Any:
        real = hashlib.sha256()

        def update(data: memoryview) -> None:
            self.hashed.append(at(data))
            real.update(data)

        return SimpleNamespace(update=update, hexdigest=real.hexdigest)


class CountingDisk(Disk):
    def __init__(self, counted: Counted) -> None:
        self._counted = counted

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._counted.calls.append("open")
        return super().open(path, flags, mode)

    def write(self, descriptor: int, data: Any) -> int:
        self._counted.calls.append("write")
        self._counted.written.append(at(data))
        return super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._counted.calls.append("fsync")
        super().fsync(descriptor)

    def begin_writeback(self, descriptor: int, offset: int, length: int) -> None:
        self._counted.calls.append("begin_writeback")
        self._counted.begun.append((offset, length))
        assert os.fstat(descriptor).st_size >= offset + length
        super().begin_writeback(descriptor, offset, length)


def at(data: Any) -> tuple[int, int]:
    """Returns where bytes lie, and how many they are."""
    view = memoryview(data)
    array = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0)
    return array.data_ptr(), view.nbytes


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(files, "hashlib", found)
    return found


def write(folder: Path, values: list[Any], disk: Disk, sizes: list[tuple[int, ...]] | None = None) -> list[Written]:
    (folder / "claim").mkdir()
    sizes = sizes or [tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in values]
    items = [
        FileItem(str(n), (0,) * x.dim(), size) if isinstance(x, torch.Tensor) else FileItem(str(n), None, None)
        for n, (x, size) in enumerate(zip(values, sizes, strict=True))
    ]
    found = files.write(str(folder), "claim", "__0_", items, values, disk)
    assert not isinstance(found, str)
    return [Written(*each) for each in found]


def parts(folder: Path, written: list[Written]) -> list[bytes]:
    return [(folder / it.file).read_bytes()[it.offset : it.offset + it.length] for it in written]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_tensor_is_passed_over_twice_where_it_lies(counted: Counted, tmp_path: Path) -> None:
    """Once to be written, once to be hashed: no copy, no look at the file, no third pass."""
    tensors = [torch.rand(300_000), torch.rand(500, 300).bfloat16()]
    found = write(tmp_path, [*tensors, io.BytesIO(b"bytes" * 100)], CountingDisk(counted))
    whole = (tmp_path / found[0].file).read_bytes()
    for passed in (counted.hashed, counted.written):
        assert sum(length for _, length in passed) == len(whole)
        assert [it for it in passed if it[1] > 100_000] == [(x.data_ptr(), x.nbytes) for x in tensors]
    assert counted.calls.count("open") == counted.calls.count("fsync") == 1
    assert counted.calls[0] == "open"
    assert counted.calls[-1] == "fsync"
    assert [it.sha256 for it in found] == [hashlib.sha256(part).hexdigest() for part in parts(tmp_path, found)]
    assert b"".join(parts(tmp_path, found)) == whole


SAVED: dict[str, Callable[[], tuple[torch.Tensor, tuple[int, ...]]]] = {
    "plain": lambda: (torch.rand(20, 30), (20, 30)),
    "parameter": lambda: (torch.nn.Parameter(torch.rand(20, 30)), (20, 30)),
    "part": lambda: (torch.rand(2000, 30)[7:27], (20, 30)),
    "padded": lambda: (torch.rand(25, 30), (20, 30)),
    "transposed": lambda: (torch.rand(30, 20).t(), (20, 30)),
    "conjugate": lambda: (torch.rand(20, 30, dtype=torch.complex64).conj(), (20, 30)),
    "scalar": lambda: (torch.tensor(2.5), ()),
    "nothing": lambda: (torch.empty(0, 3), (0, 3)),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_torch_would_have_written(name: str, counted: Counted, tmp_path: Path) -> None:
    """torch loads it, and ``torch.save`` would write the same, except the sums of zip, which are not made."""
    x, sizes = SAVED[name]()
    own = (x.detach()[: sizes[0]] if sizes else x).resolve_conj().clone()
    (part,) = parts(tmp_path, write(tmp_path, [x], Disk(), [sizes]))
    found = torch.load(io.BytesIO(part), weights_only=True)
    assert torch.equal(found, own)
    assert (found.dtype, found.stride(), found.requires_grad) == (own.dtype, own.stride(), False)
    real = io.BytesIO()
    torch.save(own, real)
    with ZipFile(io.BytesIO(part)) as ours, ZipFile(real) as theirs:
        assert [it.filename for it in ours.infolist()] == [it.filename for it in theirs.infolist()]
        assert [it.header_offset for it in ours.infolist()] == [it.header_offset for it in theirs.infolist()]
        assert not any(it.CRC for it in ours.infolist())
    assert len(part) == len(real.getvalue())


def test_the_disk_begins_before_the_end(counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is much: each piece once, before it is hashed, and a tensor in pieces. What is little waits for fsync."""
    monkeypatch.setattr(files, "_WRITEBACK", 100_000)
    tensors = [torch.rand(60_000), *(torch.rand(10) for _ in range(5)), torch.rand(30_000)]
    found = write(tmp_path, tensors, CountingDisk(counted))
    ends = [offset + length for offset, length in counted.begun]
    assert [0, *ends[:-1]] == [offset for offset, _ in counted.begun]
    assert [length // 100_000 for _, length in counted.begun] == [1, 1, 1]
    assert found[-1].offset + found[-1].length - ends[-1] < 100_000
    assert [it.sha256 for it in found] == [hashlib.sha256(part).hexdigest() for part in parts(tmp_path, found)]
