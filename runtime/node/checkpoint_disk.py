"""The file system as checkpoints use it: each call that they make is a method here, so that a test comes between two.

What is written is readable by those who may read its folder, and writable by its owner alone, whatever the umask. What
is read is an ordinary file: a FIFO or a device in its place is an error, and nothing waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import c_int64
from typing import Any, NamedTuple, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from ..host.private_files import make_private_folder
from ..process.lifetime import process_stat

#: ``int sync_file_range(int fd, off64_t offset, off64_t nbytes, unsigned int flags)``, which is Linux's, and its flag:
#: begin, wait not.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_SYNC_FILE_RANGE_WRITE = 2
#: Bytes that a file which is read at once may have.
_WHOLE = 1 << 34


class Process(NamedTuple):
    """A process, as others see that it has ended. ``boot``: of its host, and its namespace of pids."""

    host: str
    boot: str
    pid: int
    began: str


class Disk:
    """The calls, made to the kernel. Paths are strings; each method raises OSError as the call does."""

    # ---- folders and names -------------------------------------------------------------------------------------------

    def make_folder(self, path: str) -> bool:
        """Makes a folder of this user's alone, and those above it; returns whether it was not there."""
        there = os.path.isdir(path)
        make_private_folder(path)
        return not there

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        """Makes a folder of this mode, whatever the umask."""
        os.mkdir(path, mode)
        made = stat.S_IMODE(os.stat(path).st_mode)
        if made & 0o777 != mode:
            os.chmod(path, made & ~0o777 | mode)  # the folder above may have given it its group

    def rmdir(self, path: str) -> None:
        """Removes an empty folder."""
        os.rmdir(path)

    def is_folder(self, path: str) -> bool:
        """Returns whether there is a folder. Raises PermissionError where this user is not to know."""
        if os.path.isdir(path):
            return True
        try:
            os.stat(path)
        except PermissionError:
            raise
        except OSError:
            return False
        return False

    def listdir(self, path: str) -> list[str]:
        """Returns the names in a folder."""
        return os.listdir(path)

    def rename(self, path: str, to: str) -> None:
        """Gives a file or folder another name; a file that has this name already is replaced."""
        os.replace(path, to)

    def unlink(self, path: str) -> None:
        """Removes a file."""
        os.unlink(path)

    def sync_folder(self, path: str) -> None:
        """Has a folder's names be on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # ---- files -------------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Opens an ordinary file; one that is made gets this mode, whatever the umask.

        Raises OSError for what is not an ordinary file, at once.
        """
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
        try:
            kind = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(kind):
                code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
                raise OSError(code, f"Not an ordinary file but a {_kind(kind)}", path)
            if flags & os.O_EXCL and stat.S_IMODE(kind) != mode:
                with suppress(OSError):  # there are file systems without modes
                    os.fchmod(descriptor, mode)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def readable(self, folder: str) -> int:
        """Returns the mode of a file that those can read who can read its folder, and that nobody else can write."""
        return 0o600 | (os.stat(folder).st_mode & 0o044)

    def shared(self, folder: str) -> int:
        """Returns the mode of a file that those can write who can write to its folder."""
        return 0o600 | (os.stat(folder).st_mode & 0o066)

    def close(self, descriptor: int) -> None:
        """Closes a file; with the last copy of its descriptor the lock ends."""
        os.close(descriptor)

    def read(self, descriptor: int, size: int) -> bytes:
        """Returns up to ``size`` bytes from the file's beginning."""
        return os.pread(descriptor, size, 0)

    def write(self, descriptor: int, data: Any) -> int:
        """Writes behind what was written; returns how many bytes."""
        return os.write(descriptor, data)

    def truncate(self, descriptor: int) -> None:
        """Has a file be empty, and be written from its beginning."""
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)

    def fsync(self, descriptor: int) -> None:
        """Waits until a file is on the disk."""
        os.fsync(descriptor)

    def begin_writeback(self, descriptor: int, offset: int, length: int) -> None:
        """Has bytes of a file that were written go to the disk beside what comes next; ``fsync`` waits for them.

        Where a file system can't, ``fsync`` does all of it.
        """
        if _sync_file_range is not None:
            _sync_file_range(descriptor, c_int64(offset), c_int64(length), _SYNC_FILE_RANGE_WRITE)

    def is_at(self, descriptor: int, path: str) -> bool:
        """Returns whether an open file is the one that has this name now."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    # ---- locks and time ----------------------------------------------------------------------------------------------

    def lock(self, descriptor: int) -> bool | None:
        """Locks an open file and returns True; False if somebody has it locked, None if the file system has no locks.

        The lock ends with the descriptor, so with the process, however that ends.
        """
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP, and what else file systems say
            return None
        return True

    def unlock(self, descriptor: int) -> None:
        """Ends the lock for forked children as well, who have copies of the descriptor."""
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def touch(self, path: str) -> None:
        """Has the time of a file be now."""
        os.utime(path)

    def time_of(self, descriptor: int) -> float:
        """Returns when an open file was written or touched, by the clock of the file system's host."""
        return os.fstat(descriptor).st_mtime

    def clock(self) -> float:
        """Returns seconds that only go on."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def repeat(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        """Does something every few seconds, beside the program; returns what ends it. It may be ended twice."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(seconds):
                action()

        with suppress(RuntimeError):  # the interpreter ends, and there are no more threads
            threading.Thread(target=run, name="disttensor-saver", daemon=True).start()
        return over.set

    def process(self) -> Process:
        """Returns this process."""
        return Process(socket.gethostname(), _boot(), os.getpid(), began_of("self"))

    def lives(self, process: Process) -> bool:
        """Returns whether a process of this host, as it has run since it was booted, still runs."""
        return began_of(process.pid) == process.began

    # ---- all of it ---------------------------------------------------------------------------------------------------

    def read_file(self, path: str) -> bytes:
        """Returns all bytes of an ordinary file."""
        descriptor = self.open(path, os.O_RDONLY)
        try:
            with os.fdopen(os.dup(descriptor), "rb") as file:
                return file.read(_WHOLE)
        finally:
            self.close(descriptor)

    def write_all(self, descriptor: int, data: Any) -> None:
        """Writes all bytes of ``data``."""
        with memoryview(data) as left:
            done = 0
            while done < len(left):
                done += self.write(descriptor, left[done:])


DISK = Disk()


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def began_of(pid: int | str = "self") -> str:
    """Returns when a process of this host began, in the kernel's own words; "" for one that has ended."""
    try:
        said = process_stat(pid)
    except OSError:
        return ""
    return "" if said[0] in "ZX" else said[19]


def _kind(mode: int) -> str:
    names = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return names.get(stat.S_IFMT(mode), "device")


class Files(FileSystem):
    """The files of torch's readers and writers of checkpoints, by the calls of a ``Disk``."""

    def __init__(self, disk: Disk = DISK) -> None:
        self._disk = disk

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a file of a checkpoint to be read, or a new one to be written.

        What goes wrong when it is written is raised as it was: torch says of a full disk where its own bytes should be.
        """
        name = os.fspath(path)
        if mode == "rb":
            with opened_file(name, self._disk) as reader:
                yield cast(io.IOBase, reader)
            return
        folder = os.path.dirname(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        raw = _Raw(self._disk, self._disk.open(name, flags, self._disk.readable(folder)))
        try:
            writer = io.BufferedWriter(raw)
            try:
                yield cast(io.IOBase, writer)
                if not writer.closed:  # torch closes what nodes write
                    writer.flush()
            except Exception:
                if raw.error is not None:
                    raise raw.error from None
                raise
        finally:
            raw.close()


def opened_file(path: str, disk: Disk = DISK) -> io.BufferedReader:
    """Opens an ordinary file to be read."""
    return io.BufferedReader(_Raw(disk, disk.open(path, os.O_RDONLY)))


class _Raw(io.RawIOBase):
    """An open file whose writes are a disk's calls; it keeps the error of the first that failed."""

    def __init__(self, disk: Disk, descriptor: int) -> None:
        self._disk, self._descriptor = disk, descriptor
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._disk.write(self._descriptor, data)
        except OSError as error:
            self.error = self.error or error
            raise

    def readinto(self, buffer: Any) -> int:
        return os.readv(self._descriptor, [buffer])

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._descriptor, offset, whence)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._disk.close(self._descriptor)
