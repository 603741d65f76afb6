"""The first steps of a worker: from the fork in server.py, or from entry.py, to the call of its entry function."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import random
import signal
import sys
import traceback
from typing import NoReturn

from ...process import page
from ...process.lifetime import adopt_orphans, die_with_parent, name_process
from ...process.page import Page

#: The signal at which a worker writes the stacks of its threads.
STACKS = signal.SIGRTMIN + 6


def become_worker(
    server: int, rank: int, entry: str, lifeline: int, out: int, err: int, stacks: int, shared: Page, foreign: list[int]
) -> NoReturn:
    """Turns this fresh child of ``server`` into the worker of node ``rank`` and ends the process with its exit code.

    ``stacks``: a descriptor that the stacks of its threads are written to on the signal STACKS, whatever holds the GIL.
    ``shared``: the page by which the server sees what it is at. ``foreign`` are descriptors of the server's and of
    other workers': a life-line held here would keep a sibling alive.
    No exception may leave this function, as the child would run on in the server's loop.
    """
    code = 1
    try:
        page.mine = shared
        _prepare_process(server, rank, out, err, foreign)
        faulthandler.register(STACKS, file=stacks, all_threads=True)
        signal.signal(signal.SIGCONT, _stay_paused)
        code = _call(entry, lifeline)
    except BaseException:
        traceback.print_exc()
    finally:
        _exit(code)


def _stay_paused(*_: object) -> None:
    """Stops this process again where its server has stopped it, and somebody else has continued it."""
    while page.mine.paused:
        os.kill(os.getpid(), signal.SIGSTOP)


def work(entry: str) -> NoReturn:
    """Makes this process, which was started for it (``spawn.node_command``), a worker whose life-line is stdin."""
    code = 1
    try:
        lifeline = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's
        faulthandler.enable(all_threads=False)
        sys.argv = ["disttensor-worker"]
        code = _call(entry, lifeline)
    except BaseException:
        traceback.print_exc()
    finally:
        _exit(code)


def _exit(code: int) -> NoReturn:
    """Ends this process at once, when its printed output has left it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # user code closed it or took it away
            stream.flush()
    os._exit(code & 0xFF)


def _prepare_process(server: int, rank: int, out: int, err: int, foreign: list[int]) -> None:
    os.setpgid(0, 0)
    die_with_parent(server)
    adopt_orphans()  # so the server gets those of dead nodes only, and may end them (Server._reap)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.dup2(out, 1)
    os.dup2(err, 2)
    for fd in (out, err, *foreign):
        os.close(fd)
    # New objects, as the server's know what file they had; a line leaves at once, as it would on a terminal.
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(all_threads=False)  # a crash in C code leaves a traceback in the tail
    sys.argv = ["disttensor-worker"]
    name_process(f"dt-node-{rank}")
    gc.enable()
    # Forked siblings would draw the same "random" numbers where separate processes would not. torch starts every
    # process with one and the same seed, so it needs nothing.
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()


def _call(entry: str, lifeline: int) -> int:
    module, _, function = entry.partition(":")
    try:
        code = getattr(importlib.import_module(module), function)(lifeline)
    except SystemExit as e:
        code = e.code
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)  # sys.exit("text"), as the interpreter does it
    return 1
