"""The files of flight records: JSON that this user alone can read, in a folder that keeps the newest ones.

All is done by a descriptor of the folder, so that nothing comes between the look whose it is and the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Mapping
from itertools import count

from ..runtime.host.private_files import make_private_folder
from ..runtime.host.socket_folder import NotOurs, check_folder, folders

#: The variable that names the folder; "0" writes no files.
FLIGHT = "DISTTENSOR_FLIGHT"
#: How many files a folder keeps of each kind: of losses, and of long waits.
KEPT = 20

_NAME = re.compile(r"flight-\d{8}-\d{6}-\d+-\d+-(lost|wait)\.json")
_numbers = count(1)


class FlightFolder:
    """The folder where this process writes flight records."""

    def __init__(self, path: str, own: bool) -> None:
        """``own``: it is the default one, which has to be this user's alone."""
        self.path, self._own = path, own

    def __repr__(self) -> str:
        return f"<FlightFolder {self.path}>"

    def name(self, kind: str) -> str:
        """Returns the path of the next file. Names are in the order of time. ``kind``: "lost" or "wait"."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return os.path.join(self.path, f"flight-{stamp}-{os.getpid()}-{next(_numbers):06}-{kind}.json")

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, whole or not at all, and removes those that are too many. Raises OSError."""
        if self._own:
            above = os.path.dirname(self.path)
            make_private_folder(above)
            check_folder(above)
        make_private_folder(self.path)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if self._own else 0))
        try:
            self._check(os.fstat(folder))
            name = os.path.basename(path)
            unfinished = f".{name}"
            try:
                self._write(folder, unfinished, data)
                os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise
            self._remove_old(folder)
        finally:
            os.close(folder)

    def _check(self, found: os.stat_result) -> None:
        """Raises NotOurs for a folder of somebody else's; for the default one also where others can get at it."""
        if found.st_uid not in ({os.getuid()} if self._own else {os.getuid(), 0}):
            raise NotOurs(f"{self.path} is that of user {found.st_uid}, and this process is user {os.getuid()}'s")
        if self._own and found.st_mode & 0o077:
            raise NotOurs(f"others may use {self.path}: its mode is {stat.S_IMODE(found.st_mode):o}, and has to be 700")

    @staticmethod
    def _write(folder: int, name: str, data: bytes) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # the umask may have taken even this user's rights
            file.write(data)

    @staticmethod
    def _remove_old(folder: int) -> None:
        by_kind: dict[str, list[str]] = {}
        for name in sorted(os.listdir(folder)):
            if match := _NAME.fullmatch(name):
                by_kind.setdefault(match[1], []).append(name)
        for names in by_kind.values():
            for name in names[:-KEPT]:
                with contextlib.suppress(OSError):  # another job has removed it, or it is another user's
                    if os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid == os.getuid():
                        os.unlink(name, dir_fd=folder)


def flight_folder(environment: Mapping[str, str]) -> FlightFolder | None:
    """Returns the folder for flight records; None where none are to be written."""
    named = environment.get(FLIGHT, "")
    if named == "0":
        return None
    if named:
        return FlightFolder(os.path.abspath(named), False)
    return FlightFolder(os.path.join(folders()[0], "flight"), True)
