"""The versions of what a job is made of, as ``python -m disttensor`` and ``dtrun --version`` print them."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from ..runtime.protocol.bundle import PROTOCOL, VERSION

#: What disttensor cannot do without, and what it uses where it is there.
_NEEDED = ("torch", "pyzmq", "msgspec", "cloudpickle", "numpy")
_OPTIONAL = ("cryptography", "mpi4py", "ray", "ipykernel", "transformers")


def versions() -> dict[str, str]:
    """Returns the names of programs and libraries with their versions. Imports none of them."""
    found = {"disttensor": VERSION, "protocol": str(PROTOCOL), "Python": platform.python_version()}
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in _NEEDED:
                found[name] = "missing"
    return {**found, "system": f"{platform.system()} {platform.release()} {platform.machine()}"}


def table() -> str:
    """Returns the versions, one a line."""
    found = versions()
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in found.items())


def put_out(text: str) -> None:
    """Prints a text. A reader that ends early, such as ``| head -1``, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # at the end Python would try to write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> int:
    """Prints the versions, and returns the exit code."""
    put_out(table())
    return 0
