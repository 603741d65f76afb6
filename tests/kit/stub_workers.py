"""Workers for the tests of launching: what each does is named by its bundle's ``job``. They don't import torch."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys

from disttensor.runtime.protocol.bundle import read_bundle


def act(lifeline: int) -> int | None:
    bundle = read_bundle(lifeline)
    if bundle.job == "place":
        print(f"{bundle.local_rank} of {bundle.local_size}")
        return 0
    return getattr(Acts, bundle.job)(lifeline)


def wait(lifeline: int) -> int:
    """Until the end of the life-line, as a real worker."""
    while os.read(lifeline, 1):
        pass
    return 75


class Acts:
    """One method per kind of worker."""

    @staticmethod
    def serve(lifeline: int) -> int:
        print("serving")
        print("as well", file=sys.stderr)
        return wait(lifeline)

    @staticmethod
    def borrow(lifeline: int) -> None:
        """Imports a module of a folder that is not on this host."""
        sys.path.insert(0, "/nowhere/project")
        import lent

        print(lent.value, lent.__file__)

    @staticmethod
    def three(lifeline: int) -> int:
        print("\n".join(f"line {i}" for i in range(30)))
        print("unfinished", end="", flush=True)
        return 3

    @staticmethod
    def leave(lifeline: int) -> None:
        sys.exit("gone fishing")

    @staticmethod
    def crash(lifeline: int) -> None:
        ctypes.string_at(0)

    @staticmethod
    def stubborn(lifeline: int) -> None:
        """Ignores SIGTERM and the life-line, and has a child and an orphan in a session of its own that do as well."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        nap = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        near = subprocess.Popen([sys.executable, "-c", nap])
        far = subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)
        print("children", near.pid, far.pid)
        while True:  # a signal that is handled ends it
            signal.pause()

    @staticmethod
    def flood(lifeline: int) -> int:
        for i in range(40_000):
            print(f"{i:06} " + "x" * 40)
        return 0

    @staticmethod
    def quiet(lifeline: int) -> int:
        """Closes its output and lives on."""
        os.close(1)
        os.close(2)
        return wait(lifeline)

    @staticmethod
    def draw(lifeline: int) -> int:
        source = sys.modules.get("numpy.random", random)
        print("drew by", source.__name__, source.random())
        return 0
