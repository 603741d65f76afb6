"""Nodes on hosts that ssh reaches, which is OpenSSH's client: its settings, keys and jump hosts are the user's.

    root --> stdin, stdout of `ssh host exec python -P -m dtrun agent` --> sshd --> agent --> fork server --> nodes

Secrets go down stdin. The end of ssh, or of its connection, is the end of the agent's stdin and by that of the agent.
When the network is cut nobody is told: here ssh ends by ServerAliveInterval, there the agent does, which hears nothing
(tree/agent.py).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from functools import cached_property

from ...host.addresses import LOOPBACK, way_to
from ...host.launch_spec import Host, Plan
from ...protocol.errors import StartError
from .piped import NearbyEngine
from .root_launcher import PlannedLauncher

#: Names a program to call in ssh's place.
SSH = "DISTTENSOR_SSH"

#: What ssh is told behind the user's own options, of which the first counts.
_OPTIONS = (
    "BatchMode=yes",  # nobody is there to answer questions
    "ConnectTimeout=20",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=2",
    "ControlMaster=no",  # else what it leaves in the background would outlive the job; one that runs already is used
    "ClearAllForwardings=yes",
    "ForwardX11=no",
    "ForwardAgent=no",
    "RequestTTY=no",
    "RemoteCommand=none",
    "Compression=no",
)

#: An address that is nobody's (RFC 5737), to find the way that leads anywhere.
_ANYWHERE = "192.0.2.1"

#: A word in what failed -> what to do about it.
_ADVICE = {
    "Host key verification failed": "its key is not known here: connect once by hand, `ssh {host}`",
    "Permission denied": "a key that needs no password has to lead there: `ssh -o BatchMode=yes {host} true` must work",
    "Could not resolve hostname": "its name is not known here",
    "No module named dtrun": "disttensor is not installed for {python} there",
    "Unknown option: -P": "Python 3.11 is needed there; dtrun --python names another one",
    "No such file or directory": "dtrun --python names the Python there",
    "command not found": "dtrun --python names the Python there",
}


def is_here(name: str) -> bool:
    """Whether a host's name is this one's, or means it everywhere. Asks no name server."""
    own = socket.gethostname()
    return name in {own, own.partition(".")[0], "localhost", "127.0.0.1", "::1"}


def ssh_command(plan: Plan) -> list[str]:
    """The program, with the user's options before ours."""
    program = shlex.split(plan.options.get("ssh") or os.environ.get(SSH) or "ssh")
    ours = [word for option in _OPTIONS for word in ("-o", option)]
    return [*program, *shlex.split(plan.options.get("ssh_options", "")), *ours]


class SshEngine(NearbyEngine):
    """Starts one ssh per host, and an agent without ssh on this one, as mpirun does."""

    def called(self, host: Host) -> str:
        return "the agent" if is_here(host.name) else "ssh"

    def command(self, host: Host) -> list[str]:
        if not is_here(host.name):
            return [*self._ssh, "--", host.name, self._agent]
        return ["/bin/sh", "-c", self._agent] if self.plan.python else super().command(host)

    @cached_property
    def _ssh(self) -> list[str]:
        return ssh_command(self.plan)

    @cached_property
    def _agent(self) -> str:
        """For a login shell of any kind. Nothing in it is secret: everybody there can read it."""
        path = os.environ.get("PYTHONPATH")
        variables = ["env", f"PYTHONPATH={path}"] if path else []
        return "exec " + shlex.join([*variables, self._python, "-P", "-m", "dtrun", "agent"])

    @property
    def _python(self) -> str:
        return self.plan.python or sys.executable

    def unanswered(self, host: Host) -> str:
        text = super().unanswered(host)
        if is_here(host.name):
            return text
        return f"{text}; is it up, and is there no firewall between? `ssh {host.name} true` has to end at once"

    def advice(self, host: str, code: int, lines: list[str]) -> str:
        text = "\n".join(lines)
        for word, advice in _ADVICE.items():
            if word in text:
                return advice.format(host=host, python=self._python)
        return ""


class SshLauncher(PlannedLauncher):
    """A plan's hosts, by ssh. Raises ValueError for a plan without hosts."""

    def __init__(self, plan: Plan) -> None:
        if not plan.hosts:
            raise ValueError("launcher='ssh' needs hosts: hosts='a:4,b:4', or dtrun --hosts a:4,b:4")
        super().__init__(plan)

    def ways(self) -> tuple[str, ...]:
        """The addresses that lead to the hosts; the loopback one only if no other is among them, for want of which
        nodes on this host would tell nodes on others to find them there."""
        found: dict[str, None] = {}
        # the last is for hosts that only ssh knows, as behind a jump host
        others = addresses_by_ssh(self.plan)
        for name in (*others, _ANYWHERE):
            if name != _ANYWHERE or (others and not found):
                with contextlib.suppress(OSError):
                    found[way_to(name)] = None
        return tuple(address for address in found if not _is_loopback(address)) or (LOOPBACK,)


def addresses_by_ssh(plan: Plan) -> list[str]:
    """What ssh's configuration says that the other hosts' addresses are; their names if it says nothing."""
    command = [*ssh_command(plan), "-G", "--"]
    hosts = [host.name for host in plan.hosts if not is_here(host.name)]
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
