"""The versions that have to be the same on two hosts of a job: the one place that compares them, and words the refusal.

The root compares when an agent has said hello, the script when a node has, and ``dtrun --check`` before there is a job:
each with the sentences of ``refusal``, which name both hosts and both versions.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from ..protocol.bundle import PROTOCOL, VERSION

#: The packages that a node needs, and their modules.
PACKAGES = {"torch": "torch", "numpy": "numpy", "cloudpickle": "cloudpickle", "msgspec": "msgspec", "pyzmq": "zmq"}

#: What a newer major version of a package pickles so that an older one does not load it.
_PICKLES = {"numpy": "arrays", "cloudpickle": "functions"}

#: The first version of the package cryptography that works on given memory, as channel/cipher.py has it do.
LEAST_CIPHER = 47
#: What installs it.
INSTALL_CIPHER = "pip install 'disttensor[encrypt]'"

_MISSING = re.compile(r"No module named '?(\w+)")


class Versions(NamedTuple):
    """A host, and what it has. An empty text, or a package that is left out, is one of which nothing is known."""

    host: str
    python: str
    protocol: int
    disttensor: str = ""
    executable: str = ""
    packages: Mapping[str, str] = {}  #: versions by name; "" for a package that is not there


def own(packages: Mapping[str, str] | None = None) -> Versions:
    """Returns the versions of this process. It imports no package, and looks for them unless they are given."""
    executable = sys.executable if sys.executable.isprintable() else ""
    packages = _installed() if packages is None else packages
    return Versions(socket.gethostname(), platform.python_version(), PROTOCOL, VERSION, executable, packages)


@cache
def _installed() -> dict[str, str]:
    from importlib import metadata  # the greater part of the time that all of this takes

    found = {}
    for package, module in PACKAGES.items():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # a folder that pip has left is not it
            found[package] = ""
            continue
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # it was put there in another way
            continue
    return found


def refusal(here: Versions, there: Versions) -> str:
    """Returns the reason why a host cannot take part in a job of this one, with what to do; empty if it can."""
    return "; ".join(_differences(here, there))


def _differences(here: Versions, there: Versions) -> Iterator[str]:
    start = started(here)
    if _parts(there.python)[:2] != _parts(here.python)[:2]:
        yield (
            f"{there.host} has Python {there.python}, and {start} Python {here.python}: functions are sent as "
            "bytecode, and each minor version has its own; dtrun --python names the Python there"
        )
        return  # what else there is belongs to that Python
    if there.protocol != here.protocol:
        yield f"{there.host} has {_disttensor(there)}, and {start} {_disttensor(here)}: install one version on both"
    if missing := [package for package, version in there.packages.items() if not version]:
        yield lacking(here, there.host, there.executable, missing)
    for package, theirs in there.packages.items():
        mine = here.packages.get(package)
        if not theirs or not mine:
            continue
        if package == "torch" and _release(theirs) != _release(mine):
            yield f"{there.host} has torch {theirs}, and {start} torch {mine}: install one version on both"
        elif package in _PICKLES and _parts(theirs)[:1] < _parts(mine)[:1]:
            yield (
                f"{there.host} has {package} {theirs}, and {start} {package} {mine}: {_PICKLES[package]} that are sent "
                f"from here do not load there; {_install(here, there.executable, [package])} there"
            )


def started(here: Versions) -> str:
    """Returns this host's name for such a sentence, which says what is not there first."""
    return f"{here.host}, where the job was started, has"


def lacking(here: Versions, host: str, python: str, packages: Sequence[str]) -> str:
    """Returns the sentence about packages that a host's Python, an executable, does not have."""
    mine = _listed([f"{package} {version}".strip() for package, version in _pinned(here, packages)])
    return (
        f"{host} has no {_listed(packages)} for {python or 'its Python'}, and {started(here)} {mine}: "
        f"{_install(here, python, packages)} there"
    )


def missing_package(text: str) -> str:
    """Returns the package that Python did not find, as its error says; "" for none, and for one of somebody else's."""
    for module in _MISSING.findall(text):
        if module in ("dtrun", "disttensor"):
            return "disttensor"
        for package, name in PACKAGES.items():
            if name == module:
                return package
    return ""


def no_cipher_in(version: str) -> str:
    """Returns the reason why a process can't encrypt with this version of the package cryptography; empty if it can.
    "": the package is not there."""
    if not version:
        return f"the package cryptography is not installed there: {INSTALL_CIPHER}"
    if _parts(version)[:1] >= (LEAST_CIPHER,):
        return ""
    least = f"{LEAST_CIPHER} or later is needed"
    return f"the package cryptography is of version {version} there, and {least}: {INSTALL_CIPHER}"


def _pinned(here: Versions, packages: Sequence[str]) -> list[tuple[str, str]]:
    return [(p, here.disttensor if p == "disttensor" else here.packages.get(p, "")) for p in packages]


def _install(here: Versions, python: str, packages: Sequence[str]) -> str:
    """Returns the command that installs what this host has."""
    wanted = [f"{package}=={_release(version)}" if version else package for package, version in _pinned(here, packages)]
    return f"`{f'{python} -m ' if python else ''}pip install {' '.join(wanted)}`"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _disttensor(of: Versions) -> str:
    return f"disttensor {of.disttensor} (protocol {of.protocol})" if of.disttensor else f"protocol {of.protocol}"


def _release(version: str) -> str:
    """Returns a version without its build: what is behind "+" says for which CUDA, or none, torch is built."""
    return version.partition("+")[0]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", _release(version))[:3]))
