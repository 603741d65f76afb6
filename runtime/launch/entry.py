"""The entry script of a launch's processes: fork servers, roots, agents.

    python -P entry.py server SYS_PATH CONTROL_FD PARENT MODULE...      imports what workers need, then serves
    python -P entry.py root SYS_PATH CONTROL_FD PARENT
    python -P entry.py agent SYS_PATH MODULE...                         its wire is stdin and stdout
    python -P entry.py worker SYS_PATH ARGUMENT...                      dtrun worker
    python -P entry.py node SYS_PATH ENTRY                              one node, whose life-line is stdin

SYS_PATH is the master's (JSON), so that all find the same torch and the same disttensor; PARENT a pid to die with, or
0; MODULEs are imported before the first worker. Nothing of disttensor is imported before the path is set, and the front
end not at all: none of these processes use it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable

#: Torch does not get the device "node" in these processes (disttensor/torch_backend/at_import.py).
NAMES_NO_DEVICE = True


class _Watch:
    """Ends this process when the other end of the socket goes, until ``end``: the imports take a second."""

    def __init__(self, control: int) -> None:
        self._done = os.eventfd(0)
        self._poller = select.poll()
        self._poller.register(control, select.POLLRDHUP)
        self._poller.register(self._done, select.POLLIN)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        os.eventfd_write(self._done, 1)
        self._thread.join()
        os.close(self._done)

    def _run(self) -> None:
        if self._done not in dict(self._poller.poll()):
            os._exit(0)


def main(role: str, path: str, *arguments: str) -> int:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # dtrun blocks some signals while it starts this process
    sys.path[:] = json.loads(path)
    roles: dict[str, Callable[..., int]] = {
        "server": server, "root": root, "agent": agent, "worker": worker, "node": node,
    }  # fmt: skip
    return roles[role](*arguments)


def agent(*modules: str) -> int:
    from disttensor.runtime.launch.tree.agent import main

    return main(modules)


def worker(*arguments: str) -> int:
    from disttensor.runtime.launch.rendezvous.worker_cli import main

    return main(arguments)


def node(entry: str) -> int:
    from disttensor.runtime.launch.tree.fork_child import work

    return work(entry)


def root(control: str, parent: str) -> int:
    from disttensor.runtime.launch.tree.root import serve

    return serve(int(control), int(parent))


def server(control: str, parent: str, *modules: str) -> int:
    gc.disable()  # nothing becomes garbage here; the imports take a sixth less
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch = _Watch(int(control))
    try:
        from disttensor.runtime.launch.tree import server

        try:
            for name in modules:
                importlib.import_module(name)
        except Exception as e:
            traceback.print_exc()
            why = f"importing what they need failed: {type(e).__name__}: {e}"
            server.decline(int(control), why, traceback.format_exc().splitlines())
            return 1
    finally:
        watch.end()  # before the first fork: a fork copies no threads, but the locks that they hold
    return server.serve(int(control), int(parent))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
