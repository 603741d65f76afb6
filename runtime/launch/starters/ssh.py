"""Nodes on hosts that ssh reaches, by OpenSSH's client: its settings, keys and jump hosts are the user's.

    root --> stdin, stdout of `ssh host exec python -P -m dtrun agent` --> sshd --> agent --> fork server --> nodes

Secrets go down stdin. The end of ssh, or of its connection, is the end of the agent's stdin and by that of the agent.
When the network is cut nobody is told: here ssh ends by ServerAliveInterval, there the agent does, which hears nothing
(tree/agent.py).
"""

from __future__ import annotations

import math
import os
import shlex
import socket
import subprocess
from typing import TYPE_CHECKING

from ...host.launch_spec import Host, LaunchSpec
from ...process.renamed import old_names
from ...protocol.errors import StartError
from .command import CommandStarter
from .piped import agent_here

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

#: A text in the output of what failed -> advice.
_ADVICE = {
    "Host key verification failed": "its key is not known here: connect once by hand, `ssh {host}`",
    "Permission denied": "a key that needs no password has to lead there: `ssh -o BatchMode=yes {host} true` must work",
    "Could not resolve hostname": "its name is not known here",
}


def ssh_command(spec: LaunchSpec) -> list[str]:
    """Returns the program and its options, the user's before those of this module."""
    program = shlex.split(spec.options.get("ssh") or os.environ.get(SSH) or "ssh")
    # ssh's own limit is above the root's (host/silence.py), which can say what has happened
    options = (*_OPTIONS, f"ServerAliveInterval={math.ceil(spec.silence.lost)}")
    ours = [word for option in options for word in ("-o", option)]
    return [*program, *shlex.split(spec.options.get("ssh_options", "")), *ours]


class SshStarter(CommandStarter):
    """Starts one ssh per host, and an agent without ssh on this one, as mpirun does."""

    @classmethod
    def reach(cls, spec: LaunchSpec, host: str, line: str) -> list[str]:
        return ["/bin/sh", "-c", line] if cls.is_here(host) else [*ssh_command(spec), "--", host, line]

    @classmethod
    def is_here(cls, host: str) -> bool:
        """Returns whether a host's name is this one's, or means it everywhere. Asks no name server."""
        own = socket.gethostname()
        return host in {own, own.partition(".")[0], "localhost", "127.0.0.1", "::1"}

    @classmethod
    def addresses(cls, spec: LaunchSpec) -> dict[str, str]:
        """Returns the other hosts' addresses by ssh's configuration; their names if it says nothing."""
        command = [*ssh_command(spec), "-G", "--"]
        names = super().addresses(spec)
        try:
            asked = [
                subprocess.Popen(
                    [*command, host], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
                for host in names
            ]
        except OSError as e:
            raise StartError(f"ssh could not be started: {e}") from e
        for host, process in zip(list(names), asked, strict=True):
            lines = process.communicate()[0].decode(errors="replace").splitlines()
            if found := [line.split()[1] for line in lines if line.startswith("hostname ")]:
                names[host] = found[0]
        return names

    def called(self, host: Host) -> str:
        return "the agent" if self.is_here(host.name) else "ssh"

    def command(self, host: Host) -> list[str]:
        here = self.is_here(host.name) and not self.spec.python
        return agent_here(self.spec) if here else super().command(host)

    def unanswered(self, host: Host) -> str:
        text = super().unanswered(host)
        if self.is_here(host.name):
            return text
        return f"{text}; is it up, and is there no firewall between? `ssh {host.name} true` has to end at once"

    @classmethod
    def advice(cls, host: str, lines: list[str]) -> str:
        text = "\n".join(lines)
        return next((advice.format(host=host) for word, advice in _ADVICE.items() if word in text), "")


if not TYPE_CHECKING:  # to type checkers, any name would be there
    __getattr__ = old_names(__name__, {"SshEngine": "SshStarter"})
