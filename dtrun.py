"""The command ``dtrun``, also as ``python -m dtrun``: what it does is in disttensor/run.py.

A module of its own at the top, so that dtrun starts in a tenth of a second: importing the package disttensor, which
``python -m disttensor.run`` does first, imports torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

#: First words that are not a script, and the module in disttensor/runtime/launch whose ``main`` knows what to do.
_COMMANDS = {"agent": "tree.agent", "worker": "rendezvous.worker_cli", "ray-agent": "starters.ray_agent"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs dtrun with these arguments (default: the process's) and gives its exit code."""
    if "disttensor" not in sys.modules:
        _hide_front_end()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        module = importlib.import_module(f"disttensor.runtime.launch.{_COMMANDS[arguments[0]]}")
        return int(module.main(arguments[1:]))
    run = importlib.import_module("disttensor.run")  # also a function's name, which importing it from there could give
    return int(run.main(arguments))


def _hide_front_end() -> None:
    """As a fork server does it, by the function in entry.py, which nothing can import before it has run."""
    package = importlib.util.find_spec("disttensor")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(f"no disttensor on the path {sys.path}")
    where = os.path.join(package.submodule_search_locations[0], "runtime", "launch", "entry.py")
    spec = importlib.util.spec_from_file_location("disttensor_boot", where)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{where} cannot be imported")
    boot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(boot)
    boot.hide_front_end()


if __name__ == "__main__":
    sys.exit(main())
