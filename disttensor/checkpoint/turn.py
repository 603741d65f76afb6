"""Whose turn it is to save into a folder: one save at a time has it, whichever thread, process or host it is of.

    .saver/4f1c2a90     the claim of the save with this number, which has its turn: who it is. Touched every few seconds
    .saver_4f1c2a90/    there while that save tries: what becomes .saver

A claim lies in a folder, for two steps that only one of many can do, whatever the others do meanwhile: the rename of a
folder to ``.saver`` fails while another claim lies in it, and a claim is removed by the number of its save. So a save
that stood still after it had found a claim to be over never takes away the next one. (One file with a name that all
know can't have that: it may be another one's between the look and the removal.)

A claim is over when its process has ended. Where the file system has locks (flock) the claim is locked as long as that
lives; elsewhere the claim is over when it was not touched for a minute: its save stands still or is gone. The time is
that of the file system's host, which has one clock.

No checkpoint depends on it: ``folder.py`` refuses a save that has lost its turn when it is to become the checkpoint.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from ..runtime.node.checkpoint_disk import Disk, Process
from ..runtime.node.checkpoint_files import named
from ..runtime.process.signals import uninterrupted

NAME = ".saver"

#: Seconds between two touches, and those after which a save that has not touched its claim has lost its turn.
TOUCH, OLD = 5.0, 60.0
#: The same where its lock is ours: it has ended, unless the file system's locks are each host's own and both have it.
OLD_UNLOCKED = 3 * TOUCH
#: Seconds between two looks at another one's claim.
LOOK = 0.5


class SaveClaim(msgspec.Struct, frozen=True):
    """The save that has its turn, as its claim says. ``locked``: whether it could lock the claim."""

    number: str
    process: Process
    since: float
    locked: bool


class _Seen(NamedTuple):
    """Another one's claim, as it was at a look. ``ahead``: by how much the file system's clock is ahead of ours."""

    owner: SaveClaim | None
    touched: float
    first: float
    ahead: float


class Turn:
    """The turn of one save."""

    def __init__(self, folder: str, number: str, disk: Disk) -> None:
        self._folder, self._number, self._disk = folder, number, disk
        self._path = os.path.join(folder, NAME)
        self._claim = os.path.join(self._path, number)
        self._has_it = False
        self._descriptor: int | None = None  #: of the claim, while its lock is ours
        self._end_touching: Callable[[], None] = lambda: None

    def acquire(self) -> None:
        """Takes the turn. Raises OSError: EBUSY, naming the one that has it; FileNotFoundError where the folder is not
        there."""
        seen: _Seen | None = None
        while not self._has_it:
            seen = self._try(seen)
            if seen is not None:
                self._disk.sleep(LOOK)
        self._touch()  # it may have stood still since the claim was written
        self._end_touching = self._disk.repeat(TOUCH, self._touch)

    def release(self) -> None:
        """Gives the turn back, if it was taken. Twice is fine."""
        self._end_touching()
        has_it, self._has_it = self._has_it, False
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:  # first: NFS keeps a file that is open, by another name
            self._disk.unlock(descriptor)
            self._disk.close(descriptor)
        if has_it:
            with suppress(OSError):
                self._disk.unlink(self._claim)
                self._disk.rmdir(self._path)

    def forked(self) -> None:
        """Lets go of what a forked child has of it: the lock would outlive the parent."""
        self._has_it = False
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    # ---- one try -----------------------------------------------------------------------------------------------------

    @uninterrupted
    def _try(self, seen: _Seen | None) -> _Seen | None:
        """Takes the turn, if nobody has it; returns what is to be looked at again, or None where something changes."""
        for claim in self._claims():
            return self._look_at(claim, seen)
        disk, descriptor = self._disk, self._make()
        try:
            locked = disk.lock(descriptor) is True
            owner = SaveClaim(self._number, disk.process(), time.time(), locked)
            with named(self._claim_aside, "written"):
                disk.write_all(descriptor, msgspec.json.encode(owner))
            try:
                disk.rename(self._aside, self._path)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return None  # another one was first
                raise
            # Not there where the sweep of another save took it out of its folder before the rename.
            self._has_it = disk.is_at(descriptor, self._claim)
            if self._has_it and locked:
                self._descriptor = descriptor
            return None
        finally:
            if self._descriptor is None:
                disk.close(descriptor)
            self._clear()

    def _claims(self) -> list[str]:
        """Returns the paths of the claims: one, or none."""
        try:
            return [os.path.join(self._path, name) for name in self._disk.listdir(self._path)]
        except FileNotFoundError:
            return []
        except NotADirectoryError:  # the claim of an earlier version
            return [self._path]

    @property
    def _aside(self) -> str:
        return f"{self._path}_{self._number}"

    @property
    def _claim_aside(self) -> str:
        """The path of the claim as long as it is aside."""
        return os.path.join(self._aside, self._number)

    def _make(self) -> int:
        """Makes a claim aside, and returns its descriptor. Raises FileNotFoundError also where another save's sweep has
        removed its folder."""
        mode = self._disk.shared(self._folder)
        with named(self._aside, "made"):
            self._disk.mkdir(self._aside, mode | (mode & 0o444) >> 2)
        try:
            with named(self._claim_aside, "made"):
                return self._disk.open(self._claim_aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        except BaseException:
            self._clear()
            raise

    def _clear(self) -> None:
        """Removes what is aside."""
        with suppress(OSError):  # after a rename it is not there
            self._disk.unlink(self._claim_aside)
        with suppress(OSError):
            self._disk.rmdir(self._aside)

    def _look_at(self, claim: str, seen: _Seen | None) -> _Seen | None:
        """Looks at another one's claim, and removes it if that one's turn is over. Raises OSError (EBUSY)."""
        disk = self._disk
        try:
            descriptor = disk.open(claim, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            locked = disk.lock(descriptor)
            found = self._look(decode_owner(disk.read(descriptor, 4096)), locked, descriptor, seen)
        finally:
            disk.close(descriptor)
        if found is None:
            with suppress(FileNotFoundError):
                disk.unlink(claim)
        return found

    def _look(self, owner: SaveClaim | None, locked: bool | None, descriptor: int, seen: _Seen | None) -> _Seen | None:
        """Returns what is seen of one that may have its turn, or None where that is over. Raises OSError (EBUSY).

        Whatever time passes between any two calls, none seems older than it is.
        """
        if locked is False:  # it lives
            raise self._busy(owner)
        disk = self._disk
        mine, limit, here = disk.process(), OLD, False
        if owner is not None:
            here = bool(mine.boot) and owner.process.boot == mine.boot
        ahead = self._ahead() if seen is None else seen.ahead
        now = disk.clock()
        touched = disk.time_of(descriptor)
        if locked and owner is None:
            return None  # it says nothing: it is none of a save that lives
        if owner is not None:
            if locked and owner.locked:
                if _kernel(owner.process) == _kernel(mine) != "":
                    return None
                limit = OLD_UNLOCKED
            elif here and not disk.lives(owner.process):
                return None
        if now + ahead - touched >= limit:
            return None
        if here or (seen is not None and (owner, touched) != (seen.owner, seen.touched)):
            raise self._busy(owner)
        return seen or _Seen(owner, touched, now, ahead)

    def _ahead(self) -> float:
        """Returns by how much the file system's clock is ahead of ours, or less."""
        descriptor = self._make()
        try:
            self._disk.touch(self._claim_aside)
            return self._disk.time_of(descriptor) - self._disk.clock()
        finally:
            self._disk.close(descriptor)
            self._clear()

    def _touch(self) -> None:
        with suppress(OSError):
            self._disk.touch(self._claim)

    def next(self) -> str:
        """Returns who has the turn now, in words."""
        owner = None
        with suppress(OSError):
            for claim in self._claims():
                owner = decode_owner(self._disk.read_file(claim))
        return self._words(owner) if owner is not None and owner.number != self._number else "another save"

    def _words(self, owner: SaveClaim) -> str:
        process, mine = owner.process, self._disk.process()
        who = f"process {process.pid} on host {process.host}" if process != mine else "another thread of this script"
        at = time.strftime("%H:%M:%S", time.localtime(owner.since))
        return f"{who}, since {at} ({max(0.0, time.time() - owner.since):.0f} s)"

    def _busy(self, owner: SaveClaim | None) -> OSError:
        who = "another save, which has just begun" if owner is None else self._words(owner)
        return OSError(
            errno.EBUSY,
            f"{self._folder} is being saved to by {who}: one save at a time writes a checkpoint; wait for that one, or "
            "save to another path",
        )


def _kernel(process: Process) -> str:
    return process.boot.partition(" ")[0]


def decode_owner(data: bytes) -> SaveClaim | None:
    """Returns what a file says; None for one that is empty, or half written, or says something else."""
    try:
        owner = msgspec.json.decode(data, type=SaveClaim)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    texts = (owner.number, *owner.process[:2], owner.process.began)
    return owner if all(text.isprintable() for text in texts) and owner.process.pid > 0 else None
