"""Nodes on hosts that ssh reaches, by OpenSSH's client: its settings, keys and jump hosts are the user's.

    root --> stdin, stdout of `ssh host exec python -P -m dtrun agent` --> sshd --> agent --> fork server --> nodes

Secrets go down stdin. The end of ssh, or of its connection, is the end of the agent's stdin and by that of the agent.
When the network is cut nobody is told: here ssh ends by ServerAliveInterval, there the agent does, which hears nothing
(tree/agent.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import socket
import subprocess
import sys
from functools import cached_property
from typing import TYPE_CHECKING

from ...host import versions
from ...host.addresses import LOOPBACK, way_to
from ...host.launch_spec import Host, LaunchSpec
from ...process.renamed import old_names
from ...protocol.errors import StartError
from .piped import LocalAgentStarter
from .root_launcher import RootLauncher

#: The environment variable that names a program to call in ssh's place.
SSH = "DISTTENSOR_SSH"

#: Options for ssh, after the user's own; the first setting of each counts.
_OPTIONS = (
    "BatchMode=yes",  # nobody is there to answer questions
    "ConnectTimeout=20",
    "ServerAliveCountMax=2",
    "ControlMaster=no",  # else its background process would outlive the job; one that runs already is used
    "ClearAllForwardings=yes",
    "ForwardX11=no",
    "ForwardAgent=no",
    "RequestTTY=no",
    "RemoteCommand=none",
    "Compression=no",
)

#: An address that is nobody's (RFC 5737), to find the way that leads anywhere.
_ANYWHERE = "192.0.2.1"

#: A text in the output of what failed -> advice.
_ADVICE = {
    "Host key verification failed": "its key is not known here: connect once by hand, `ssh {host}`",
    "Permission denied": "a key that needs no password has to lead there: `ssh -o BatchMode=yes {host} true` must work",
    "Could not resolve hostname": "its name is not known here",
}

#: A text in a line about the Python there, of the shell that was to run it -> what that means, and what to name.
_NO_PYTHON = {
    "no such file": ("has no {python}", "the Python there"),
    "not found": ("has no {python}", "the Python there"),
    "permission denied": ("may not run {python}", "a Python that this user may run"),
}


def is_here(name: str) -> bool:
    """Returns whether a host's name is this one's, or means it everywhere. Asks no name server."""
    own = socket.gethostname()
    return name in {own, own.partition(".")[0], "localhost", "127.0.0.1", "::1"}


def ssh_command(spec: LaunchSpec) -> list[str]:
    """Returns the program and its options, the user's before those of this module."""
    program = shlex.split(spec.options.get("ssh") or os.environ.get(SSH) or "ssh")
    # ssh's own limit is above the root's (host/silence.py), which can say what has happened
    options = (*_OPTIONS, f"ServerAliveInterval={math.ceil(spec.silence.lost)}")
    ours = [word for option in options for word in ("-o", option)]
    return [*program, *shlex.split(spec.options.get("ssh_options", "")), *ours]


def advice_of(host: str, lines: list[str]) -> str:
    """Returns what to do about the output of an ssh that has failed, or an empty text."""
    text = "\n".join(lines)
    return next((advice.format(host=host) for word, advice in _ADVICE.items() if word in text), "")


def differing(host: str, lines: list[str], python: str) -> str:
    """Returns the sentence about a host whose Python is not there, is too old or lacks a package, by the output of an
    ssh that has failed; empty for all else."""
    here = versions.own()
    if package := versions.missing_package("\n".join(lines)):
        return versions.lacking(here, host, python, [package])
    found = ("has a Python of before 3.11, {python}", "another one") if "Unknown option: -P" in lines else None
    for line in [line.lower() for line in lines if python in line]:
        found = found or next((words for text, words in _NO_PYTHON.items() if text in line), None)
    if found is None:
        return ""
    what, other = found[0].format(python=python), found[1]
    return f"{host} {what}, and {versions.started(here)} Python {here.python}: dtrun --python names {other}"


class SshStarter(LocalAgentStarter):
    """Starts one ssh per host, and an agent without ssh on this one, as mpirun does."""

    def called(self, host: Host) -> str:
        return "the agent" if is_here(host.name) else "ssh"

    def command(self, host: Host) -> list[str]:
        if not is_here(host.name):
            return [*self._ssh, "--", host.name, self._agent]
        return ["/bin/sh", "-c", self._agent] if self.spec.python else super().command(host)

    @cached_property
    def _ssh(self) -> list[str]:
        return ssh_command(self.spec)

    @cached_property
    def _agent(self) -> str:
        """The agent's command, for a login shell of any kind. Nothing in it is secret: everybody there can read it."""
        path = os.environ.get("PYTHONPATH")
        variables = ["env", f"PYTHONPATH={path}"] if path else []
        return "exec " + shlex.join([*variables, self._python, "-P", "-m", "dtrun", "agent"])

    @property
    def _python(self) -> str:
        return self.spec.python or sys.executable

    def unanswered(self, host: Host) -> str:
        text = super().unanswered(host)
        if is_here(host.name):
            return text
        return f"{text}; is it up, and is there no firewall between? `ssh {host.name} true` has to end at once"

    def advice(self, host: str, code: int, lines: list[str]) -> str:
        return advice_of(host, lines)

    def differing(self, host: str, lines: list[str]) -> str:
        return differing(host, lines, self._python)


class SshLauncher(RootLauncher):
    """The launcher "ssh": nodes on the launch spec's hosts. Raises ValueError for one without hosts."""

    def __init__(self, spec: LaunchSpec) -> None:
        if not spec.hosts:
            raise ValueError("launcher='ssh' needs hosts: hosts='a:4,b:4', or dtrun --hosts a:4,b:4")
        super().__init__(spec)

    def ways(self) -> tuple[str, ...]:
        """Returns the addresses that lead to the hosts; the loopback one only if there is no other.

        For want of another, nodes on this host would tell nodes on others to find them at the loopback address.
        """
        found: dict[str, None] = {}
        # the last is for hosts that only ssh knows, as behind a jump host
        others = addresses_by_ssh(self.spec)
        for name in (*others, _ANYWHERE):
            if name != _ANYWHERE or (others and not found):
                with contextlib.suppress(OSError):
                    found[way_to(name)] = None
        return tuple(address for address in found if not _is_loopback(address)) or (LOOPBACK,)


def addresses_by_ssh(spec: LaunchSpec) -> list[str]:
    """Returns the other hosts' addresses by ssh's configuration; their names if it says nothing."""
    command = [*ssh_command(spec), "-G", "--"]
    hosts = [host.name for host in spec.hosts if not is_here(host.name)]
    try:
        asked = [
            subprocess.Popen(
                [*command, host], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            for host in hosts
        ]
    except OSError as e:
        raise StartError(f"ssh could not be started: {e}") from e
    found = []
    for host, process in zip(hosts, asked, strict=True):
        lines = process.communicate()[0].decode(errors="replace").splitlines()
        names = [line.split()[1] for line in lines if line.startswith("hostname ")]
        found.append(names[0] if names else host.rpartition("@")[2])
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


if not TYPE_CHECKING:  # to type checkers, any name would be there
    __getattr__ = old_names(__name__, {"SshEngine": "SshStarter"})
