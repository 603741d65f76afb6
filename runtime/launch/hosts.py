"""Hosts and how many nodes each may have, as ``--hosts`` and hostfiles name them.

    --hosts a:4,b:4        a*4,b*4        node[1]... are not expanded        [fd00::1]:4,user@c
    hostfile of Open MPI:  a slots=4      of MPICH:  a:4      comments from # on

A host that is named again has the slots of both. IPv6 addresses stand in brackets where slots follow a colon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..host.launch_spec import Host

#: Open MPI's words for the number of nodes; others of either MPI are about binding, which --bind says here.
_SLOTS = ("slots", "cpu", "count")
_IGNORED = ("max_slots", "max-slots", "binding", "ifname")

#: Host names that ssh, srun and sockets take. Not a dash in front: ssh would read an option.
_NAME = re.compile(
    r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%\w+)?)"
)


def parse_hosts(text: str, default: int = 1) -> list[Host]:
    """Parses ``a:4,b*4,c``; a host without a number has ``default`` slots. Raises ValueError."""
    return _merged(_host(part.strip(), default) for part in text.split(","))


def read_hostfile(path: str, default: int = 1) -> list[Host]:
    """Reads the hosts of an mpirun hostfile. Raises ValueError, which names file and line, and OSError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.partition("#")[0].split() for line in file]
    found = []
    for number, words in enumerate(lines, 1):
        try:
            if words:
                found.append(_line(words, default))
        except ValueError as e:
            raise ValueError(f"{path}, line {number}: {e}") from None
    if not found:
        raise ValueError(f"{path} names no host")
    return _merged(found)


def _line(words: list[str], default: int) -> Host:
    # "slots = 4" is the same as "slots=4"
    settings = re.findall(r"([^\s=]+)\s*=\s*([^\s=]+)|(\S+)", " ".join(words[1:]))
    host = _host(words[0], default)
    for key, value, other in settings:
        if key in _SLOTS:
            host = Host(host.name, _number(value))
        elif key not in _IGNORED:
            raise ValueError(f"{other or key!r} is unknown; a line is `host slots=4` or `host:4`".replace("''", "'"))
    return host


def _host(text: str, default: int) -> Host:
    name, slots = text, default
    if text.count(":") < 2 or "]" in text or "*" in text:  # else it is a bare IPv6 address
        match = re.fullmatch(r"(.*?)(?:[:*]([^]:*]*))?", text)
        if match and match[2] is not None:
            name, slots = match[1], _number(match[2])
    user, at, bare = name.rpartition("@")
    name = user + at + (bare[1:-1] if bare.startswith("[") and bare.endswith("]") else bare)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{text!r} is no host (a, a:4, user@a:4, [fd00::1]:4)")
    return Host(name, slots)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is no number of slots")
    return int(text)


def _merged(hosts: Iterable[Host]) -> list[Host]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, number) for name, number in slots.items()]
