"""Programs as another user of this machine, who has no rights that root has. Only root can start such."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from checkout import ROOT

#: Debian's "nobody", and its group.
UID = 65534

#: Python may lie where only root gets to, as in root's home. The other user's processes have a view of the file
#: system in which these places, and nothing beside them, can be reached: mounts that nobody else has.
_UNCOVER = """\
set -e
{mounts}
exec setpriv --reuid {uid} --regid {uid} --clear-groups -- "$@"
"""


def uncovering() -> str:
    """Shell commands for a namespace of mounts of its own: afterwards other users, too, get to Python and the tests."""
    hidden: dict[Path, list[Path]] = {}
    for path in {Path(sys.base_prefix).resolve(), Path(sys.prefix), ROOT}:
        above = [folder for folder in path.parents if not folder.stat().st_mode & 0o001]
        if above:
            hidden.setdefault(above[-1], []).append(path)
    mounts = ["mount -t tmpfs -o mode=755 none /run"]
    for number, (cover, paths) in enumerate(hidden.items()):
        for index, path in enumerate(paths):
            mounts += [
                f"mkdir -p /run/{number}/{index}",
                f"mount --bind {shlex.quote(str(path))} /run/{number}/{index}",
            ]
        mounts.append(f"mount -t tmpfs -o mode=755 none {shlex.quote(str(cover))}")
        for index, path in enumerate(paths):
            there = shlex.quote(str(path))
            mounts += [f"mkdir -p {there}", f"mount --bind /run/{number}/{index} {there}"]
    return "\n".join(mounts)


def as_other_user() -> list[str]:
    """What to put before a command, so that it is another user's. It stays the process that it is started as."""
    script = _UNCOVER.format(mounts=uncovering(), uid=UID)
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


def why_not() -> str:
    """Why there can be no other user's programs; empty if there can."""
    return "this user is not root, and cannot start programs as another user" if os.getuid() else ""
