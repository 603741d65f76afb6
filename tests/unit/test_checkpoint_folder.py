"""The folder of a checkpoint: who may save into it, what is removed, what is believed, and who can read it."""

from __future__ import annotations

import errno
import fcntl
import inspect
import io
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import folder_model
import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from folder_model import metadata_of
from fuzzing import FIXED, SEEDS
from quick import some
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from disttensor.checkpoint.folder import Folder, Hashes, read_checkpoint
from disttensor.checkpoint.turn import SaveClaim, Turn
from disttensor.runtime.node import checkpoint_files as files
from disttensor.runtime.node.checkpoint_disk import DISK, Disk
from disttensor.runtime.node.checkpoint_files import FileItem, Shard, Written

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    # a writer of torch's that a kill leaves flushes a file that is closed; Python 3.13 tells of that, older ones do not
    pytest.mark.filterwarnings("ignore:Exception ignored in. <torch.distributed.checkpoint.filesystem._StorageWriter"),
]


#: Of orders of calls: two that are the same in each run, and one of this commit's.
ORDERS = {"fixed": FIXED[0], "another": FIXED[1], "commit": [*SEEDS.values()][-1]}


@pytest.mark.fault(46)
@pytest.mark.parametrize("name", some([*ORDERS]))
def test_the_last_complete_checkpoint_is_never_lost(name: str) -> None:
    """Savers, their nodes and readers, any of which is killed or stands still between any two of its calls, with locks
    of all kinds."""
    first = 100 * ORDERS[name]
    counts = folder_model.orders(range(first, first + 40))
    assert counts["kills"] > 10
    assert counts["stops"] > 10
    assert counts["refused"] > 10
    assert counts["saved"] > 100


def begun(path: Path, disk: Disk = DISK) -> Folder:
    folder = Folder(path, disk)
    folder.begin()
    return folder


ITEM = FileItem("s", None, None)


def wrote(folder: Folder, data: bytes) -> Written:
    written = files.write(str(folder.path), folder.claim, folder.prefix(None), [ITEM], [io.BytesIO(data)])
    assert not isinstance(written, str)
    return Written(*written[0])


def committed(folder: Folder, data: bytes = b"data", written: Written | None = None) -> None:
    written = written or wrote(folder, data)
    metadata, results = metadata_of({"s": written})
    folder.commit(metadata, results, [Shard(ITEM.key, *written)])


def saved(path: Path, data: bytes = b"data") -> None:
    committed(begun(path), data)


def read(path: Path) -> tuple[bytes, Hashes]:
    """What is in a checkpoint, without a look at the hash; and the hashes."""

    def use(metadata: Any, hashes: Hashes) -> tuple[bytes, Hashes]:
        (info,) = metadata.storage_data.values()
        return (path / info.relative_path).read_bytes(), hashes

    return read_checkpoint(path, use)


# ---- one at a time ---------------------------------------------------------------------------------------------------


@contextmanager
def no_locks(monkeypatch: pytest.MonkeyPatch, code: int) -> Iterator[None]:
    """No file system has locks: the kernel answers with ``code``. 0: they have."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        if code:
            patch.setattr(fcntl, "flock", flock)
        yield


@pytest.mark.parametrize("code", [0, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_the_second_save_is_refused_by_name(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, by a link, with locks and without; the first is not harmed, and the next one is right."""
    saved(tmp_path / "c", b"former")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    with no_locks(monkeypatch, code):
        first = begun(tmp_path / "c")
        errors: list[BaseException] = []

        def second(path: Path) -> None:
            with pytest.raises(OSError, match="another thread of this script, since") as raised:
                begun(path)
            errors.append(raised.value)

        for path in (tmp_path / "c", tmp_path / "link"):
            thread = threading.Thread(target=second, args=(path,))
            thread.start()
            thread.join()
        assert [error.errno for error in errors] == [errno.EBUSY] * 2  # type: ignore[attr-defined]
        assert read(tmp_path / "c")[0] == b"former"
        committed(first, b"new")
        assert read(tmp_path / "c")[0] == b"new"
        saved(tmp_path / "link", b"newer")
        assert read(tmp_path / "c")[0] == b"newer"
        assert len(os.listdir(tmp_path / "c")) == 3


def owner(path: Path, **changes: Any) -> None:
    """Has another save have the turn."""
    process = DISK.process()._replace(
        **{name: changes.pop(name) for name in ("host", "boot", "pid") if name in changes}
    )
    who = SaveClaim("0123abcd", process, 0.0, **{"locked": False, **changes})
    claim(path, msgspec.json.encode(who))
    (path / ".saving_0123abcd").mkdir()


def claim(path: Path, data: bytes) -> Path:
    """Writes the claim of a save."""
    (path / ".saver").mkdir(parents=True, exist_ok=True)
    (path / ".saver" / "0123abcd").write_bytes(data)
    return path / ".saver" / "0123abcd"


class Waiting(Disk):
    """A disk with a clock of its own, of which what is waited for is seen."""

    def __init__(self) -> None:
        self.waited = 0.0
        self.meanwhile: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.waited += seconds
        self.meanwhile()

    def clock(self) -> float:
        return self.waited

    def time_of(self, descriptor: int) -> float:
        return 0.0  # nothing is ever touched, and a file that is made has this time


def test_one_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    """Its lock went with it; where there was none, its pid tells on this host."""
    for locked in (True, False):
        owner(tmp_path / "c", pid=2**22 + 1, locked=locked)
        disk = Waiting()
        folder = begun(tmp_path / "c", disk)
        assert disk.waited == 0
        assert not (tmp_path / "c" / ".saving_0123abcd").exists()  # it can't become the checkpoint any more
        folder.abort()
        assert [name for name in os.listdir(tmp_path / "c") if not name.startswith(".swept_")] == []


def test_one_of_another_host_that_is_not_heard_of_for_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner(tmp_path / "c", host="far", boot="another")
    disk = Waiting()
    with no_locks(monkeypatch, errno.ENOLCK):
        begun(tmp_path / "c", disk).abort()
    assert 59 < disk.waited < 62


def test_one_of_another_host_that_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of itself is shown, if it can be."""
    owner(tmp_path / "c", host="far", boot="another", pid=77)
    disk = Waiting()
    times = iter([0.0, 0.0, 0.0, 5.0])
    monkeypatch.setattr(disk, "time_of", lambda descriptor: next(times))
    with (
        no_locks(monkeypatch, errno.ENOLCK),
        pytest.raises(OSError, match="by process 77 on host far, since") as raised,
    ):
        begun(tmp_path / "c", disk)
    assert raised.value.errno == errno.EBUSY
    assert (tmp_path / "c" / ".saver" / "0123abcd").exists()
    assert disk.waited < 5
    owner(tmp_path / "d", host="\x1b[2J", boot="another")
    folder = Folder(tmp_path / "d", disk)
    assert "\x1b" not in folder._turn.next()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"number": 1}', b"\xff" * 5000])
def test_a_file_that_says_nothing(text: bytes, tmp_path: Path) -> None:
    claim(tmp_path / "c", text)
    saved(tmp_path / "c")
    assert read(tmp_path / "c")[0] == b"data"
    assert len(os.listdir(tmp_path / "c")) == 3


@pytest.mark.parametrize(
    ("call", "file"),
    [("mkdir", ""), ("open", r"/\w{8}"), ("write", r"/\w{8}")],
    ids=["mkdir", "open", "write"],
)
def test_a_claim_that_can_not_be_made_names_the_file_and_the_host(
    call: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel names no file where a write fails. Nothing is left."""

    disk = Disk()
    real = getattr(disk, call)

    def full(what: str | int, *args: Any) -> Any:
        if isinstance(what, str) and ".saver_" not in what:
            return real(what, *args)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, call, full)
    words = rf"No space left on device: .*/c/\.saver_\w{{8}}{file} can't be \w+ on host"
    with pytest.raises(OSError, match=words) as raised:
        begun(tmp_path / "c", disk)
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


class Between(Disk):
    """A disk on which something happens when a claim was looked at, and something else when it was to be removed."""

    def __init__(self, claim: Path, looked: Callable[[], None], removed: Callable[[], None]) -> None:
        self._claim, self._looked, self._removed = str(claim), looked, removed
        self.times = 0

    def close(self, descriptor: int) -> None:
        its = self.is_at(descriptor, self._claim)
        super().close(descriptor)
        if its:
            self.times += 1
            self._looked()

    def unlink(self, path: str) -> None:
        try:
            super().unlink(path)
        finally:
            if "/.saver/" in path:
                self.times += 1
                self._removed()


@pytest.mark.parametrize("code", [0, errno.ENOLCK])
def test_a_claim_that_follows_an_old_one_is_not_taken_away(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save stands still when it has found another one's claim to be over; meanwhile a third save takes that one's
    place, and keeps its turn."""
    owner(tmp_path / "c", host="far", boot="another")
    os.utime(tmp_path / "c" / ".saver" / "0123abcd", (1, 1))
    with no_locks(monkeypatch, code):
        first: list[Folder] = []

        def refused(disk: Disk = DISK) -> None:
            with pytest.raises(OSError, match="another thread of this script, since") as raised:
                begun(tmp_path / "c", disk)
            assert raised.value.errno == errno.EBUSY

        claim = tmp_path / "c" / ".saver" / "0123abcd"
        late = Between(claim, lambda: first.append(begun(tmp_path / "c")), refused)
        refused(late)
        assert late.times == 2
        committed(first[0], b"first")
    assert read(tmp_path / "c")[0] == b"first"
    assert len(os.listdir(tmp_path / "c")) == 3


def test_a_claim_that_a_sweep_has_emptied_is_none(tmp_path: Path) -> None:
    """A save removes what others have left; of one that is about to take its turn it may remove the claim, so that what
    becomes .saver is an empty folder. That is no turn, and it keeps nobody from it."""

    class Swept(Disk):
        def rename(self, path: str, to: str) -> None:
            if to.endswith("/.saver") and not emptied:
                emptied.extend(os.listdir(path))
                os.unlink(os.path.join(path, emptied[0]))
            super().rename(path, to)

    emptied: list[str] = []
    folder = begun(tmp_path / "c", Swept())
    assert len(emptied) == 1
    assert os.listdir(tmp_path / "c" / ".saver") == emptied
    committed(folder)
    assert len(os.listdir(tmp_path / "c")) == 3


@pytest.mark.parametrize("lives", [True, False])
def test_the_claim_of_an_earlier_version(lives: bool, tmp_path: Path) -> None:
    """It was a file, not a folder."""
    (tmp_path / "c").mkdir()
    old = SaveClaim("0123abcd", DISK.process()._replace(host="far", boot="another", pid=77), 0.0, True)
    (tmp_path / "c" / ".saver").write_bytes(msgspec.json.encode(old))
    with open(tmp_path / "c" / ".saver") as file:
        if lives:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(OSError, match="by process 77 on host far, since"):
                begun(tmp_path / "c")
            return
        os.utime(file.fileno(), (1, 1))
        saved(tmp_path / "c")
    assert len(os.listdir(tmp_path / "c")) == 3


def test_one_that_has_lost_its_turn_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still for a minute, without locks; what has taken its place stays."""
    with no_locks(monkeypatch, errno.ENOLCK):
        first = begun(tmp_path / "c")
        written = wrote(first, b"first")
        (old,) = (tmp_path / "c" / ".saver").iterdir()
        os.utime(old, (1, 1))
        second = begun(tmp_path / "c")
        with pytest.raises(
            OSError, match=r"has lost its turn to write .*another thread of this script, since"
        ) as raised:
            committed(first, written=written)
        committed(second, b"second")
        items = [ITEM], [io.BytesIO(b"late")]
        assert isinstance(files.write(str(first.path), first.claim, first.prefix(1), *items), str)
        first.abort()
        assert raised.value.errno == errno.EBUSY
        assert read(tmp_path / "c")[0] == b"second"
        third = begun(tmp_path / "c")
        first.abort()
        committed(third, b"third")
        assert read(tmp_path / "c")[0] == b"third"
    assert len(os.listdir(tmp_path / "c")) == 3


# ---- what is removed -------------------------------------------------------------------------------------------------


def test_only_what_a_checkpoint_consisted_of_is_removed(tmp_path: Path) -> None:
    """That of torch's as well, by its own list; what others have put there stays."""
    path = tmp_path / "c"
    dcp.save({"x": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    for name in ("__7_0.distcp", "__x.distcp", "notes.txt", "hashes_x.json", ".saving_x"):
        (path / name).write_bytes(b"mine")
    there = set(os.listdir(path))
    assert "__0_0.distcp" in there
    saved(path)
    assert there - set(os.listdir(path)) == {"__0_0.distcp"}


def test_what_fails_after_the_rename_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the checkpoint then, and stays it."""
    saved(tmp_path / "c", b"former")
    folder = begun(tmp_path / "c")
    synced: list[str] = []

    def sync(path: str) -> None:
        synced.append(path)
        if (tmp_path / "c" / ".metadata").read_bytes().find(folder.claim[8:].encode()) > 0:
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "sync_folder", lambda self, path: sync(path))
        with pytest.raises(OSError, match=r"Input/output error: .*/c can't be written on host"):
            committed(folder, b"new")
        folder.abort()
    assert synced
    assert read(tmp_path / "c")[0] == b"new"
    saved(tmp_path / "c", b"newer")
    assert len(os.listdir(tmp_path / "c")) == 3


# ---- what is believed ------------------------------------------------------------------------------------------------


DAMAGED = r"is damaged|can't be read"


def keys(path: Path) -> Any:
    """Of which shards the hashes are compared; None where it is told that something is wrong."""
    try:
        return read(path)[1].keys()
    except ValueError as error:
        if re.search(DAMAGED, str(error)):
            return None
        raise


@pytest.mark.fault(48)
def test_an_altered_metadata_is_never_another_kind_of_checkpoint(tmp_path: Path) -> None:
    """Whatever byte is altered: an error, or all hashes are there. Of the save's id each bit."""
    path = tmp_path / "c"
    saved(path)
    whole = (path / ".metadata").read_bytes()
    _, hashes = read(path)
    assert hashes
    at = whole.index(b"disttensor-")
    flips = [(at + i, 1 << bit) for i in range(19) for bit in range(8)]
    flips += [(i, 1 << i % 8) for i in range(0, len(whole), 3)]
    for where, bit in flips:
        (path / ".metadata").write_bytes(whole[:where] + bytes([whole[where] ^ bit]) + whole[where + 1 :])
        with pytest.raises(ValueError, match=DAMAGED):
            read(path)
    for start in range(0, len(whole), 16):
        (path / ".metadata").write_bytes(whole[:start] + bytes(16) + whole[start + 16 :])
        with pytest.raises(ValueError, match=DAMAGED):
            read(path)
    (file,) = path.glob("hashes_*")
    (path / ".metadata").write_bytes(whole)
    said = file.read_bytes()
    for i in range(0, len(said), 2):
        file.write_bytes(said[:i] + bytes([said[i] ^ 1]) + said[i + 1 :])
        if (kept := keys(path)) is not None:
            assert kept == hashes.keys()  # then the hash of a shard is another one, and it is damaged


def test_torchs_own_checkpoint_over_one_of_ours(tmp_path: Path) -> None:
    """Hashes that are left over are not its own."""
    saved(tmp_path / "c")
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert list((tmp_path / "c").glob("hashes_*"))
    assert read(tmp_path / "c")[1] == {}


KEY, NONE = ITEM.key, torch.Size((0,))
READ = ReadItem(LoadItemType.BYTE_IO, KEY, NONE, KEY, NONE, NONE)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sock(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.fault(48)
@pytest.mark.parametrize("make", [fifo, device, sock, loop, Path.mkdir])
def test_what_is_not_a_file_is_not_waited_for(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A .metadata, hashes, a shard; and a .saver, which a save replaces or names."""
    path = tmp_path / "c"
    saved(path)
    for name in sorted(os.listdir(path)):
        os.rename(path / name, tmp_path / "away")
        make(path / name)
        if name.endswith(".distcp"):
            shards = [Shard(KEY, name, 0, 4, "")]
            with pytest.raises(OSError, match=f"{name} can't be read on host"):
                files.check(str(path), shards)
            with pytest.raises(OSError, match=f"{name} can't be read on host"):
                files.read(str(path), shards, [READ], {})
        else:
            with pytest.raises((OSError, ValueError), match=name):
                read(path)
        if (path / name).is_dir():
            (path / name).rmdir()
        else:
            (path / name).unlink()
        os.rename(tmp_path / "away", path / name)
    for name in (".saver", ".saver/0123abcd"):
        make(path / name)
        if (path / ".saver").is_dir() and name == ".saver":
            saved(path)  # an empty folder claims nothing
            (path / ".saver").mkdir()
            continue
        with pytest.raises(OSError, match=r"\.saver"):
            begun(path)
        (path / name).unlink() if not (path / name).is_dir() else (path / name).rmdir()
        (path / ".saver").mkdir(exist_ok=True)
    assert read(path)[0] == b"data"


# ---- who can read it -------------------------------------------------------------------------------------------------


def modes(path: Path) -> dict[str, int]:
    return {re.sub("[0-9a-f]{8}", "N", p.name): stat.S_IMODE(p.stat().st_mode) for p in [path, *path.iterdir()]}


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_it_is_this_users_alone_unless_its_folder_says_otherwise(umask: int, tmp_path: Path) -> None:
    """Whatever the umask. Nobody else can write what is unpickled, whatever the folder."""
    path, before = tmp_path / "above" / "c", os.umask(umask)
    try:
        saved(path)
        assert modes(path) == {"c": 0o700, ".metadata": 0o600, "hashes_N.json": 0o600, "__s_N_0.distcp": 0o600}
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for folder, file in ((0o750, 0o640), (0o755, 0o644), (0o2770, 0o640), (0o777, 0o644)):
            path.chmod(folder)
            save = begun(path)
            (claim,) = (path / ".saver").iterdir()
            # who may write to the folder may take over what a killed save has left
            assert stat.S_IMODE((path / ".saver").stat().st_mode) & 0o777 == folder & 0o777
            assert stat.S_IMODE(claim.stat().st_mode) == 0o600 | folder & 0o066
            committed(save)
            assert set(modes(path).values()) == {folder, file}
    finally:
        os.umask(before)


def test_every_call_is_a_step() -> None:
    """What a save and a load do to the file system they do by ``Disk``, whose methods are the steps of the model."""
    for module in (Folder, Turn):
        source = Path(inspect.getfile(module)).read_text()
        assert not re.findall(r"\b(?:os\.(?!path\b|fspath|O_\w+|PathLike|close\(descriptor\))|shutil|fcntl)\w*", source)
        assert not re.findall(r"(?<![.\w])open\(", source)
    assert {name for name in vars(Disk) if not name.startswith("_")} == set(folder_model.STEPS)
