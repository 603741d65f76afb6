"""``dtrun --check --hosts a,b``: whether hosts can take part in a job, before one is started there.

Each host is asked by ssh, or by another command that leads there, as a job would do it, for its versions and its clock,
and opens some ports for a moment, which the others try to reach; so does this host, as nodes connect to the script
(host_probe.py is what runs there). Nobody who connects is told anything, and nothing that comes is read.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..runtime.host import versions
from ..runtime.host.addresses import LOOPBACK, way_to
from ..runtime.host.interfaces import addresses_of
from ..runtime.host.launch_spec import Host, LaunchSpec
from ..runtime.launch.registry import get_starter
from ..runtime.launch.starters.command import CommandStarter, on_host
from ..runtime.protocol.errors import ProtocolError
from .host_probe import PROGRAM, REACH

#: Seconds for a host to answer, unless --timeout says otherwise; a first import of torch there may take a while.
PATIENCE = 60.0
#: Seconds by which clocks may differ.
SKEW = 1.0


@dataclass
class HostFindings:
    """The answer of a host, or why there is none."""

    host: str
    told: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  #: each with what to do
    remarks: list[str] = field(default_factory=list)  #: about what a job gets along with
    skew: float = 0.0  #: seconds by which its clock is ahead of this host's

    def row(self) -> tuple[str, ...]:
        """Returns the host's line of the table."""
        told = self.told
        clock = f"{self.skew:+.2f} s" if told else "-"
        shown = [str(told.get(key) or "-") for key in ("python", "package torch", "disttensor", "protocol")]
        return (self.host, *shown, clock, "; ".join([*(self.problems or ["ok"]), *self.remarks]))


def told_of(line: bytes) -> dict[str, Any]:
    """Returns what a host has told: names with texts, to be shown, and numbers. Raises ProtocolError for all else."""
    try:
        told = msgspec.json.decode(line, type=dict[str, str | float])
    except ValueError as e:
        raise ProtocolError(str(e)) from None
    texts = [text for pair in told.items() for text in pair if isinstance(text, str)]
    if not all([text.isprintable() and len(text) <= 300 for text in texts]):
        raise ProtocolError("a text that cannot be shown")
    return {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in told.items()}


class _Asked:
    """A host that is being asked: its process, and the lines that it has said."""

    def __init__(self, host: Host, spec: LaunchSpec, starter: type[CommandStarter] | None) -> None:
        """``starter`` leads to the host; None: it is this one."""
        line = on_host(spec, "-c", PROGRAM)
        command = ["/bin/sh", "-c", line] if starter is None else starter.reach(spec, host.name, line)
        self._spec, self._starter = spec, starter
        self.found = HostFindings(host.name)
        self.begun = time.time()
        self.answered = 0.0
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._errors = b""
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        if self._process.stderr is not None:
            self._errors = self._process.stderr.read(1 << 16)

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """Returns what the host says next, or None, with the reason among its problems."""
        said: list[bytes] = []

        def read() -> None:
            if self._process.stdout is not None:
                while line := self._process.stdout.readline(1 << 16):
                    if line.startswith(b"dtrun-check "):  # others are a login shell's
                        said.append(line[12:])
                        return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(max(0.0, deadline - time.monotonic()))
        self.answered = time.time()
        if said:
            try:
                return told_of(said[0])
            except ProtocolError as e:
                self.found.problems.append(f"it has answered something else ({e}): is that Python, in --python?")
                return None
        if reader.is_alive():
            self._process.kill()
            self.found.problems.append("it has not answered in time; is it up, and is there no firewall between?")
        else:
            code = self._process.wait()
            self._reader.join(1.0)
            lines = self._errors.decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
            way, name = self._starter or CommandStarter, self.found.host
            advice = way.advice(name, lines)
            self.found.problems.append(
                way.differing(self._spec, name, lines) or lines[-1] + (f": {advice}" if advice else "")
            )
        return None

    def send_line(self, words: object) -> None:
        """Sends a line to the host."""
        with contextlib.suppress(OSError):  # it has ended: its answer tells that
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(words).encode() + b"\n")
                self._process.stdin.flush()

    def end(self) -> None:
        """Ends the process, and with its standard input the one on the host."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)
        if self._process.stderr is not None:
            self._process.stderr.close()


def mismatches(told: dict[str, Any], here: versions.Versions) -> list[str]:
    """Returns what of a host's versions does not fit this one's, each with what to do: a job's own sentences."""
    name, said, protocol = str(told.get("name", "?")), str(told.get("no_disttensor", "")), told.get("protocol")
    packages = {each: str(told[f"package {each}"]) for each in versions.PACKAGES if f"package {each}" in told}
    if said:  # then nobody knows its protocol
        protocol = here.protocol
        if versions.missing_package(said) == "disttensor":
            packages = {"disttensor": "", **packages}
    there = versions.Versions(
        name, str(told.get("python")), protocol if isinstance(protocol, int) else 0, str(told.get("disttensor", "")),
        str(told.get("executable", "")), packages,
    )  # fmt: skip
    why = versions.refusal(here, there)
    if said and not why:
        why = f"{name} does not import disttensor ({said}): reinstall it for {there.executable} there"
    return [why] if why else []


def _no_cipher(told: dict[str, Any], here: str) -> str:
    """Returns the sentence about a host that can't encrypt what goes to another one; empty if it can."""
    why = versions.no_cipher_in(str(told.get("package cryptography", versions.LEAST_CIPHER)))
    return why and (
        f"{told.get('name')} cannot encrypt what it sends to other hosts, as a job of {here} has it do: {why}, or "
        "--trusted-network says that nobody else can use the network"
    )


def check_hosts(spec: LaunchSpec, patience: float, trusted: bool = False) -> list[HostFindings]:
    """Asks all hosts of a launch spec at once, and returns what was found. ``trusted``: tensors cross the network in
    clear.

    Raises StartError without an ssh, ValueError for an interface that is not this host's, and for a launcher that
    reaches no host by a command.
    """
    starter = get_starter(spec)
    if not issubclass(starter, CommandStarter):
        raise ValueError(
            f"--check asks hosts by the command that leads to them, and --launcher {spec.launcher} has none"
        )
    mine = versions.own()
    addresses = starter.addresses(spec)
    others = list(addresses)
    named = [_Asked(host, spec, starter) for host in spec.hosts]
    script = [each for each in named if starter.is_here(each.found.host)][:1]
    asked = [
        *named,
        *([] if script else [_Asked(Host("localhost", 1), msgspec.structs.replace(spec, python=""), None)]),
    ]
    here = script[0] if script else asked[-1]
    try:
        deadline = time.monotonic() + patience
        for each in asked:
            told = each.answer(deadline)
            if told is None:
                continue
            each.found.told = told
            each.found.problems += mismatches(told, mine)
            if others and not trusted and (why := _no_cipher(told, mine.host)):
                each.found.problems.append(why)
            there = told.get("time")
            # written between the two moments, which may lie apart, so that only what lies outside counts
            if isinstance(there, (int, float)) and math.isfinite(there):
                each.found.skew = max(0.0, there - each.answered) or min(0.0, there - each.begun)
            if abs(each.found.skew) > SKEW:
                way = "ahead of" if each.found.skew > 0 else "behind"
                each.found.remarks.append(
                    f"the clock of {told.get('name')} is {abs(each.found.skew):.0f} s {way} that of {mine.host}: a job "
                    "works, and the times in logs and of files differ; use NTP"
                )
        _try_doors([each for each in asked if each.found.told], here, addresses, addresses_of(spec.interface))
    finally:
        for each in asked:
            each.end()
    return [each.found for each in named]


def _try_doors(up: Sequence[_Asked], here: _Asked, addresses: dict[str, str], listen: Sequence[str]) -> None:
    """Has hosts try to reach each other, and this one; ``addresses`` are those of the others by name, ``listen`` those
    on which this host's script would listen, if --interface says so."""
    for each in up:
        doors = []
        for other in up:
            address = addresses.get(other.found.host) or _way_to(addresses.get(each.found.host, LOOPBACK), listen)
            if other is not each and address:
                doors.append((other.found.host, address, ports_of(other.found.told)))
        each.send_line(doors)
    deadline = time.monotonic() + 2 * REACH + len(up)
    for each in up:
        for name, why in (each.answer(deadline) or {}).items():
            if not why:
                continue
            other = next((other for other in up if other.found.host == name), here)
            what = (
                f"({why}): nodes need all ports of {other.found.told.get('range')} between hosts; look for a firewall"
            )
            if each is here:
                other.found.problems.append(f"this host does not reach it {what}")
            else:
                each.found.problems.append(f"it does not reach {'this host' if other is here else name} {what}")


def _way_to(address: str, listen: Sequence[str]) -> str:
    """Returns the address of this host at which another one finds it; "" if there is no telling."""
    if listen:
        return listen[0]
    with contextlib.suppress(OSError):  # a name that only ssh knows, or nobody
        return way_to(address)
    return ""


def ports_of(told: dict[str, Any]) -> dict[str, list[int]]:
    """Returns the ports that a host says it has opened, by kind."""
    said = {kind: str(told.get(kind, "")).split() for kind in ("IPv4", "IPv6")}
    found = {
        kind: [int(word) for word in words[:3] if re.fullmatch(r"[0-9]{1,5}", word) and 0 < int(word) < 1 << 16]
        for kind, words in said.items()
    }
    return {kind: ports for kind, ports in found.items() if ports}


def rows(found: Sequence[HostFindings]) -> list[tuple[str, ...]]:
    """Returns the rows of a table, one for each host below the head."""
    return [("host", "python", "torch", "disttensor", "protocol", "clock", "what to do"), *(f.row() for f in found)]
