"""Whose turn it is to save into a folder: one save at a time has it, whichever thread, process or host it is of.

    .saver          of the save that has its turn: who it is. Locked by it (flock), and touched every few seconds

A save that can lock it has its turn, and keeps it until its process ends. Where the file system has no locks, a save
that has made the file (O_EXCL) has its turn, until it has not touched it for a minute: then it stands still or is gone,
and the next one takes its place. The time is that of the file system's host, which has one clock.

No checkpoint depends on it: ``folder.py`` refuses a save that has lost its turn when it is to become the checkpoint.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from ..runtime.node.checkpoint_disk import Disk, Process
from ..runtime.process.signals import uninterrupted

NAME = ".saver"

#: Seconds between two touches, and those after which a save that has not touched its file has lost its turn.
TOUCH, OLD = 5.0, 60.0
#: The same where its lock is ours: it has ended, unless the file system's locks are each host's own and both have it.
OLD_UNLOCKED = 3 * TOUCH
#: Seconds between two looks at another one's file; and those for which one that is empty may be about to be written.
LOOK, BEGINS = 0.5, 2.0


class Owner(msgspec.Struct, frozen=True):
    """The save that has its turn, as its file says. ``locked``: whether it could lock the file."""

    number: str
    process: Process
    since: float
    locked: bool


class _Seen(NamedTuple):
    """Another one's file, as it was at a look. ``ahead``: by how much the file system's clock is ahead of ours."""

    owner: Owner | None
    touched: float
    first: float
    ahead: float


class Turn:
    """The turn of one save."""

    def __init__(self, folder: str, number: str, disk: Disk) -> None:
        self._folder, self._number, self._disk = folder, number, disk
        self._path = os.path.join(folder, NAME)
        self._descriptor: int | None = None
        self._locked = False
        self._guard = threading.Lock()  #: held while the descriptor is used beside the save, or given up
        self._end_touching: Callable[[], None] = lambda: None

    def take(self) -> None:
        """Takes the turn. Raises OSError: EBUSY, naming the one that has it; FileNotFoundError where the folder is not
        there."""
        seen: _Seen | None = None
        while (found := self._try(seen)) is not self:
            if found is not None:
                self._disk.sleep(LOOK)
            seen = found  # type: ignore[assignment]
        self._end_touching = self._disk.repeat(TOUCH, self._touch)

    def end(self) -> None:
        """Gives the turn back, if it was taken. Twice is fine."""
        self._end_touching()
        with self._guard:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):
            if self._disk.is_at(descriptor, self._path):
                if self._locked:  # nobody else takes it
                    self._disk.unlink(self._path)
                else:
                    self._take_away(decode_owner(self._disk.read(descriptor, 4096)))
        self._disk.unlock(descriptor)
        self._disk.close(descriptor)

    def forked(self) -> None:
        """Lets go of what a forked child has of it: the lock would outlive the parent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    # ---- one try -----------------------------------------------------------------------------------------------------

    @uninterrupted
    def _try(self, seen: _Seen | None) -> Turn | _Seen | None:
        """Returns itself with the turn, what is to be looked at again, or None where something has changed since."""
        disk = self._disk
        descriptor, made = self._open()
        kept = False
        try:
            locked = disk.lock(descriptor)
            if not disk.is_at(descriptor, self._path):
                return None  # it was removed, or is another one's by now
            if locked is False or not made:
                owner = decode_owner(disk.read(descriptor, 4096))
                found = self._look(owner, locked, descriptor, seen)
                if isinstance(found, _Seen):
                    return found
                if locked is None:
                    self._take_away(owner, found)
                    return None
                disk.truncate(descriptor)
            self._locked = locked is True
            self._write(descriptor)
            self._descriptor, kept = descriptor, True
            return self
        finally:
            if not kept:
                disk.close(descriptor)

    def _open(self) -> tuple[int, bool]:
        while True:
            flags = os.O_RDWR | os.O_NOFOLLOW
            try:
                return self._disk.open(
                    self._path, flags | os.O_CREAT | os.O_EXCL, self._disk.shared(self._folder)
                ), True
            except FileExistsError:
                with suppress(FileNotFoundError):
                    return self._disk.open(self._path, flags), False

    def _write(self, descriptor: int) -> None:
        owner = Owner(self._number, self._disk.process(), time.time(), self._locked)
        self._disk.write_all(descriptor, msgspec.json.encode(owner))

    def _look(self, owner: Owner | None, locked: bool | None, descriptor: int, seen: _Seen | None) -> _Seen | float:
        """Returns what is seen of one that may have its turn; where that is over, when its file was touched last.

        Raises OSError (EBUSY). Whatever time passes between any two calls, none seems older than it is.
        """
        disk = self._disk
        if locked is False:  # it lives
            seen = seen or _Seen(None, 0.0, disk.clock(), 0.0)
            if owner is not None or disk.clock() - seen.first > BEGINS:
                raise self._busy(owner)
            return seen
        mine, limit, here = disk.process(), OLD, False
        if owner is not None:
            here = bool(mine.boot) and owner.process.boot == mine.boot
        ahead = self._ahead() if seen is None else seen.ahead
        now = disk.clock()
        touched = disk.time_of(descriptor)
        if locked and owner is None:
            return touched  # it has ended before it had written its name
        if owner is not None:
            if locked and owner.locked:
                if _kernel(owner.process) == _kernel(mine) != "":
                    return touched
                limit = OLD_UNLOCKED
            elif here and not disk.lives(owner.process):
                return touched
        if now + ahead - touched >= limit:
            return touched
        if here or (seen is not None and (owner, touched) != (seen.owner, seen.touched)):
            raise self._busy(owner)
        return seen or _Seen(owner, touched, now, ahead)

    def _ahead(self) -> float:
        """Returns by how much the file system's clock is ahead of ours, or less."""
        disk, path = self._disk, self._aside
        descriptor = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            disk.touch(descriptor)
            return disk.time_of(descriptor) - disk.clock()
        finally:
            disk.close(descriptor)
            with suppress(FileNotFoundError):
                disk.unlink(path)

    @property
    def _aside(self) -> str:
        return f"{self._path}_{self._number}"

    def _take_away(self, owner: Owner | None, touched: float | None = None) -> None:
        """Removes the file of a save that was not touched since then, and no other's: of two that do it one has it."""
        disk = self._disk
        with suppress(FileNotFoundError):
            disk.rename(self._path, self._aside)
            descriptor = disk.open(self._aside, os.O_RDONLY)
            try:
                found = decode_owner(disk.read(descriptor, 4096)), disk.time_of(descriptor)
            finally:
                disk.close(descriptor)
            if found[0] != owner or touched not in (None, found[1]):  # another one has it meanwhile, or it lives
                with suppress(OSError):
                    disk.link(self._aside, self._path)
            disk.unlink(self._aside)

    def _touch(self) -> None:
        with self._guard, suppress(OSError):
            if self._descriptor is not None:
                self._disk.touch(self._descriptor)

    def next(self) -> str:
        """Returns who has the turn now, in words."""
        owner = None
        with suppress(OSError):
            owner = decode_owner(self._disk.read_file(self._path))
        return self._words(owner) if owner is not None and owner.number != self._number else "another save"

    def _words(self, owner: Owner) -> str:
        process, mine = owner.process, self._disk.process()
        who = f"process {process.pid} on host {process.host}" if process != mine else "another thread of this script"
        at = time.strftime("%H:%M:%S", time.localtime(owner.since))
        return f"{who}, since {at} ({max(0.0, time.time() - owner.since):.0f} s)"

    def _busy(self, owner: Owner | None) -> OSError:
        who = "another save, which has just begun" if owner is None else self._words(owner)
        return OSError(
            errno.EBUSY,
            f"{self._folder} is being saved to by {who}: one save at a time writes a checkpoint; wait for that one, or "
            "save to another path",
        )


def _kernel(process: Process) -> str:
    return process.boot.partition(" ")[0]


def decode_owner(data: bytes) -> Owner | None:
    """Returns what a file says; None for one that is empty, or half written, or says something else."""
    try:
        owner = msgspec.json.decode(data, type=Owner)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    texts = (owner.number, *owner.process[:2], owner.process.began)
    return owner if all(text.isprintable() for text in texts) and owner.process.pid > 0 else None
