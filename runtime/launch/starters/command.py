"""Nodes on hosts that a command leads to, such as ssh, `kubectl exec` or `docker exec`: all there is to say is which.

    class PodStarter(CommandStarter):
        @classmethod
        def reach(cls, spec, host, line):
            return ["kubectl", "exec", "-i", host, "--", "/bin/sh", "-c", line]

    register_launch_method(LaunchMethod("kubectl", starter=PodStarter))

    root --> stdin, stdout of that command --> agent --> fork server --> nodes

Secrets go down stdin. The end of the command, or of its connection, is the end of the agent's stdin and by that of the
agent.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from abc import abstractmethod

from ...host import versions
from ...host.addresses import LOOPBACK, way_to
from ...host.launch_spec import Host, LaunchSpec
from ..registry import get_starter
from .piped import PipedStarter
from .root_launcher import RootLauncher

#: An address that is nobody's (RFC 5737), to find the way that leads anywhere.
_ANYWHERE = "192.0.2.1"

#: A text in a line about the Python there, of the shell that was to run it -> what that means, and what to name.
_NO_PYTHON = {
    "no such file": ("has no {python}", "the Python there"),
    "not found": ("has no {python}", "the Python there"),
    "permission denied": ("may not run {python}", "a Python that this user may run"),
}


class CommandStarter(PipedStarter):
    """Starts one command per host of the launch spec, which runs an agent there."""

    @classmethod
    @abstractmethod
    def reach(cls, spec: LaunchSpec, host: str, line: str) -> list[str]:
        """Returns the command line that has a shell on the host run ``line``, with its stdin, stdout and stderr.

        Nothing in ``line`` is secret: everybody can read it.
        """

    @classmethod
    def addresses(cls, spec: LaunchSpec) -> dict[str, str]:
        """Returns the addresses of those hosts that are not this one, by their names."""
        return {host.name: host.name.rpartition("@")[2] for host in spec.hosts if not cls.is_here(host.name)}

    @classmethod
    def is_here(cls, host: str) -> bool:
        """Returns whether a host is this machine itself."""
        return False

    def called(self, host: Host) -> str:
        return os.path.basename(self.reach(self.spec, host.name, "")[0])

    def command(self, host: Host) -> list[str]:
        return self.reach(self.spec, host.name, on_host(self.spec, "-P", "-m", "dtrun", "agent"))

    @classmethod
    def differing(cls, spec: LaunchSpec, host: str, lines: list[str]) -> str:
        """Returns the sentence about a host whose Python is not there, is too old or lacks a package, by the output of
        a command that has failed; empty for all else."""
        here, python = versions.own(), spec.python or sys.executable
        if package := versions.missing_package("\n".join(lines)):
            return versions.lacking(here, host, python, [package])
        found = ("has a Python of before 3.11, {python}", "another one") if "Unknown option: -P" in lines else None
        for line in [line.lower() for line in lines if python in line]:
            found = found or next((words for text, words in _NO_PYTHON.items() if text in line), None)
        if found is None:
            return ""
        what, other = found[0].format(python=python), found[1]
        return f"{host} {what}, and {versions.started(here)} Python {here.python}: dtrun --python names {other}"


def on_host(spec: LaunchSpec, *arguments: str) -> str:
    """Returns the line by which a shell of any kind on a host runs Python, and with it what lies on PYTHONPATH here."""
    path = os.environ.get("PYTHONPATH")
    variables = ["env", f"PYTHONPATH={path}"] if path else []
    return "exec " + shlex.join([*variables, spec.python or sys.executable, *arguments])


class CommandLauncher(RootLauncher):
    """Has a root start the agents of a method's CommandStarter. Raises ValueError for a launch spec without hosts."""

    def __init__(self, spec: LaunchSpec) -> None:
        if not spec.hosts:
            raise ValueError(f"launcher={spec.launcher!r} needs hosts: hosts='a:4,b:4', or dtrun --hosts a:4,b:4")
        super().__init__(spec)

    def ways(self) -> tuple[str, ...]:
        """Returns the addresses that lead to the hosts; the loopback one only if there is no other.

        For want of another, nodes on this host would tell nodes on others to find them at the loopback address.
        """
        found: dict[str, None] = {}
        starter = get_starter(self.spec)
        # the last is for hosts that only the command knows, as behind a jump host
        others = starter.addresses(self.spec).values() if issubclass(starter, CommandStarter) else ()
        for name in (*others, _ANYWHERE):
            if name != _ANYWHERE or (others and not found):
                with contextlib.suppress(OSError):
                    found[way_to(name)] = None
        return tuple(address for address in found if not _is_loopback(address)) or (LOOPBACK,)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
