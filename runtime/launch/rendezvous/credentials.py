"""The credentials of a node that joins a job: the addresses of the job's root, and keys that authenticate both ends.

    root                                                  somewhere else
      keys = fresh()            -> connection file --->     read_connection_file()      keys go by a file, 0600
      keys = derived(secret)    <- secret file ------->     derived(secret)             both ends know host:port already

The keys open the connection and nothing else: each node gets keys of its own over the connection that they
authenticate. Nothing of this is ever an argument or, unless the user insists, an environment variable.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import stat
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...host.addresses import split
from ...host.private_files import make_private_folder
from ...process.lifetime import process_stat
from ...protocol.errors import UNDECODABLE, StartError
from ...protocol.keys import curve_pair, curve_pair_of
from ..output.lines import plain

#: The file of the secret that all of a user's hosts share, unless DISTTENSOR_SECRET_FILE says otherwise.
SECRET_FILE = "~/.config/disttensor/secret"

#: The forms of a CURVE key (Z85) and of an address, and the most characters of a text, and addresses of a root.
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ADDRESS = re.compile(r"tcp://([\w.%-]+|\[[\w.:%]+\]):\d{1,5}", re.ASCII)
_LONG, _MOST = 255, 64

#: What to do where a connection file is another job's.
_ELSEWHERE = "give this job another path (dtrun --connection-file, init_method=)"

#: Seconds between two tries to read a file that is not there yet.
_PAUSE = 0.1


class Keys(NamedTuple):
    """The root's key pair, and the one that all joining agents share."""

    server: tuple[str, str]
    guest: tuple[str, str]


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The addresses and keys by which to join one job. ``repr`` hides the secret."""

    addresses: tuple[str, ...]  #: of the root, such as tcp://10.0.0.1:41233; the first that answers is taken
    server_key: str  #: the root's public key
    public_key: str  #: the key pair of joining agents
    secret_key: str
    host: str = ""  #: the host that has made it
    pid: int = 0
    made: str = ""  #: the time when it was made, in words
    place: str = ""  #: the boot and the pid namespace in which that pid is valid

    def __repr__(self) -> str:
        return f"<Invitation to {', '.join(self.addresses)}>"

    def whose(self) -> str:
        """Names the process that has made it, in words."""
        return f"process {self.pid} on host {self.host} ({self.made})"

    @property
    def over(self) -> bool:
        """True if its maker is known to have ended; only processes that see the maker's pid can know."""
        return self.place == _place() and _has_ended(self.pid)


def fresh() -> Keys:
    """Makes keys that nobody else has."""
    return Keys(curve_pair(), curve_pair())


def derived(secret: bytes, meeting: str) -> Keys:
    """Derives the keys that all who know ``secret`` have in common for one ``meeting``, such as "port 29500"."""
    key = hashlib.blake2b(secret).digest()

    def pair(role: str) -> tuple[str, str]:
        return curve_pair_of(hashlib.blake2b(f"{role}\0{meeting}".encode(), key=key, digest_size=32).digest())

    return Keys(pair("disttensor root"), pair("disttensor guest"))


def invite(keys: Keys, addresses: tuple[str, ...]) -> Invitation:
    """Makes an invitation to this process."""
    made = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return Invitation(addresses, keys.server[0], *keys.guest, socket.gethostname(), os.getpid(), made, _place())


def decode_invitation(data: bytes) -> Invitation:
    """Decodes an invitation (JSON). Raises ValueError for what is none, or leads nowhere."""
    try:
        return check_invitation(msgspec.json.decode(data, type=Invitation))
    except UNDECODABLE as e:
        raise ValueError(f"it does not hold what this version of disttensor writes: {plain(str(e), 200)}") from None


def check_invitation(invitation: Invitation) -> Invitation:
    """Returns an invitation by which one can try to join. Raises ValueError for another."""
    check_addresses(invitation.addresses)
    for name in ("server_key", "public_key", "secret_key"):
        if not _KEY.fullmatch(getattr(invitation, name)):
            raise ValueError(f"its {name} is no CURVE key of 40 characters")
    for name in ("host", "made", "place"):
        text = getattr(invitation, name)
        if len(text) > _LONG or not text.isprintable():
            raise ValueError(f"its {name} is {text[:_LONG]!a}: at most {_LONG} characters, all printable")
    return invitation


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises ValueError unless these are addresses of a root: one or more, as tcp://10.0.0.1:41233."""
    if not 0 < len(addresses) <= _MOST:
        raise ValueError(f"{len(addresses)} addresses; there are 1 to {_MOST}")
    for address in addresses:
        if len(address) > _LONG or not _ADDRESS.fullmatch(address) or not split(address)[1] > 0:
            raise ValueError(f"{address[:_LONG]!a} is no address such as tcp://10.0.0.1:41233")


def _has_ended(pid: int) -> bool:
    """Returns whether there is no such process, or only a zombie, which stays where nobody waits for it."""
    try:
        return process_stat(pid)[0] in "ZX"
    except OSError:
        return True


def _place() -> str:
    """Identifies this boot of this machine, and its pid namespace."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


# ---- connection files ------------------------------------------------------------------------------------------------


class ConnectionFile:
    """A file that this process has made, for joining agents to read; ``remove`` it when none may come any more.

    Raises StartError when there is one already: its job may still run.
    """

    def __init__(self, path: str | Path, invitation: Invitation) -> None:
        self.path = Path(path).absolute()
        _make_folder(self.path.parent)
        try:
            self._id = _create(self.path, msgspec.json.encode(invitation) + b"\n")
        except FileExistsError:
            raise StartError(_left_over(self.path)) from None
        except OSError as e:
            raise StartError(f"the connection file {self.path} cannot be made: {e.strerror}") from e

    def remove(self) -> None:
        """Removes the file. Twice is fine, and so is a file that is gone, or another's by now."""
        with contextlib.suppress(OSError):
            if _id(os.stat(self.path, follow_symlinks=False)) == self._id:
                os.unlink(self.path)


def _left_over(path: Path) -> str:
    try:
        there = read_connection_file(path, 0)
    except StartError as e:
        return f"there is a file already where the connection file is to be: {e}; {_ELSEWHERE}"
    if there.over:
        return f"{path} was left over by {there.whose()}, which has ended: remove it"
    return f"{path} is the connection file of {there.whose()}: {_ELSEWHERE}, or remove it if that has ended"


def read_connection_file(path: str | Path, timeout: float) -> Invitation:
    """Reads a connection file; waits up to ``timeout`` seconds for it, as its job may begin later.

    Raises StartError when it is not there, is not this user's alone, is not a connection file, or is left over from a
    job that has ended.
    """
    path, deadline = Path(path).absolute(), time.monotonic() + timeout
    while True:
        data = _read_private(path, "connection file")
        why = "it is empty"
        try:
            if data:
                invitation = decode_invitation(data)
                if invitation.over and timeout:
                    raise StartError(f"{path} was left over by {invitation.whose()}, which has ended: remove it")
                return invitation
        except ValueError as e:  # it may be half written
            why = str(e)
        if time.monotonic() >= deadline:
            if data is None:
                raise StartError(f"there is no connection file {path} after {timeout:g} s: has its job been started?")
            raise StartError(f"{path} is no connection file: {why}")
        time.sleep(_PAUSE)


# ---- the secret that a user's hosts share ----------------------------------------------------------------------------


def shared_secret() -> bytes:
    """Returns the user's secret.

    That of the file, which is made if there is none; in the last resort of the environment. Raises StartError for a
    file that others can read, or that cannot be made.
    """
    text = os.environ.pop("DISTTENSOR_SECRET", "")
    if text:
        warnings.warn(
            "DISTTENSOR_SECRET is in the environment of this process, where others may see it: "
            "put it into a file of mode 0600 and name that in DISTTENSOR_SECRET_FILE",
            stacklevel=2,
        )
        return os.fsencode(text)  # which may be no UTF-8
    path = secret_file()
    try:
        data = _read_private(path, "secret file")
    except StartError as e:
        raise StartError(f"{e}; DISTTENSOR_SECRET_FILE names another") from None
    if data is None:
        _make_folder(path.parent)
        try:
            with contextlib.suppress(FileExistsError):  # another process has made it just now
                _create(path, secrets.token_hex(32).encode() + b"\n")
        except OSError as e:
            raise StartError(f"the secret file {path} cannot be made: {e.strerror}") from e
    for _ in range(50):
        data = (_read_private(path, "secret file") or b"").strip()
        if data:
            return data
        time.sleep(_PAUSE)  # it is being written
    raise StartError(f"the secret file {path} is empty: remove it, or put a secret into it")


def secret_file() -> Path:
    """Returns the path of the secret file, whether it exists or not."""
    return Path(os.environ.get("DISTTENSOR_SECRET_FILE") or SECRET_FILE).expanduser().absolute()


# ---- files that are nobody else's ------------------------------------------------------------------------------------


def _make_folder(folder: Path) -> None:
    try:
        make_private_folder(folder)
    except OSError as e:
        raise StartError(f"the folder {folder} cannot be made: {e.strerror}") from e


def _create(path: Path, data: bytes) -> tuple[int, int]:
    """Makes a new file of mode 0600. Raises FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
        os.write(fd, data)
        os.fsync(fd)
        return _id(os.fstat(fd))
    finally:
        os.close(fd)


def _read_private(path: Path, what: str) -> bytes | None:
    """Returns a file's bytes; None if there is none. Raises StartError unless it is this user's, and nobody else's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise StartError(f"the {what} {path} cannot be read: {e.strerror}") from e
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StartError(f"the {what} {path} is no ordinary file")
        if found.st_uid != os.geteuid():
            raise StartError(f"the {what} {path} belongs to user {found.st_uid}, and this process to {os.geteuid()}")
        if found.st_mode & 0o077:
            raise StartError(
                f"the {what} {path} has mode {stat.S_IMODE(found.st_mode):04o}: others can get at it (chmod 600 it, "
                "and if they could read it, make a new one)"
            )
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _id(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
