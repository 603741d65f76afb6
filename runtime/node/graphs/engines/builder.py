"""Builds compiled programs: takes them from the cache folder, or compiles them, one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from functools import cache
from getpass import getuser
from tempfile import gettempdir

import torch

from ....host.private_files import make_private_folder
from .child import NO_COMPILER
from .compiled import Library

#: The version of the cache: counts changes that make old folders useless (of CompiledCall, of how programs are traced).
VERSION = 6

NO_COMPILER_TEXT = "no C++ compiler that works was found on this node (torch looks for g++ and clang++, or $CXX)"

_CHILD = os.path.join(os.path.dirname(__file__), "child.py")


class Build:
    """The build of one program. ``done`` is set once ``folder`` or ``why`` says how it went."""

    def __init__(self, text: str, folder: str, threads: int) -> None:
        self.text, self.folder, self.threads = text, folder, threads
        self.plan: dict[str, object] | None = None
        self.why = ""  #: the reason for which there is no plan
        self.done = threading.Event()

    def load(self) -> bool:
        """Takes the plan from the folder, if it is there; returns whether it is."""
        try:
            with open(os.path.join(self.folder, "plan.json")) as file:
                plan = json.load(file)
        except FileNotFoundError:
            return False
        if "unfit" in plan:
            self.why = plan["unfit"]
        else:
            self.plan = plan
        self.done.set()
        return True

    def library(self) -> Library:
        """Loads the compiled code. Raises RuntimeError."""
        path = os.path.join(self.folder, "model.so")
        run: Library = torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1).run
        return run


class Builder:
    """Builds programs one after the other, on a thread of its own that exists while there is something to build."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: waiting builds; a program that was dropped meanwhile is not built
        self._waiting: deque[weakref.ref[Build]] = deque()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0  #: when that was started
        self._closed = False
        self._no_compiler = False
        self.warned = False  #: the warning that there is no compiler was given

    def build(self, text: str) -> Build:
        """Starts building a program (``listing.dump``); one that the cache folder has is done at once."""
        threads = torch.get_num_threads()
        build = Build(text, os.path.join(folder(), key(text, threads)), threads)
        if not build.load():
            with self._lock:
                self._waiting.append(weakref.ref(build))
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="disttensor-build", daemon=True)
                    thread.start()  # raises where the system has none for it: the next one tries again
                    self._thread = thread
        return build

    @property
    def under_way(self) -> tuple[int, float]:
        """How many programs are compiled, or wait for that; and for how many seconds the one that is has been."""
        with self._lock:
            compiled = self._process is not None
            return len(self._waiting) + compiled, time.monotonic() - self._began if compiled else 0.0

    def close(self) -> None:
        """Ends the compilation under way, and waits for that."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill(self._process)
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                build = self._waiting.popleft()()
            if build is not None:
                try:
                    self._build(build)
                except Exception as e:  # no process could be started, no room on the disk: replays go on
                    build.why = f"{type(e).__name__}: {e}"
                build.done.set()
            del build

    def _build(self, build: Build) -> None:
        with self._lock:
            if self._closed or self._no_compiler:
                build.why = "the node ends" if self._closed else NO_COMPILER_TEXT
                return
            path = json.dumps([p for p in sys.path if isinstance(p, str)])
            self._began = time.monotonic()
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", _CHILD, path, build.folder, str(build.threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(build.text.encode() + b"\n")
                process.stdin.flush()
            said = process.stderr.read().decode(errors="replace").strip()
            code = process.wait()
        finally:
            with self._lock:
                self._process = None
            _kill(process)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stderr.close()
        if code == 0 and build.load():
            return
        if code == NO_COMPILER:
            self._no_compiler = True
            build.why = NO_COMPILER_TEXT
        else:
            build.why = f"compiling failed ({code}): {said.splitlines()[-1] if said else 'nothing was said'}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process, which leads a session of its own, and the compilers that it runs."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def folder() -> str:
    """Returns the cache folder, in torch's own.

    Raises PermissionError unless nobody else can put code into either: a user who may write the outer one could put a
    folder of theirs in the place of this one.
    """
    try:
        user = getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    root = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(gettempdir(), f"torchinductor_{user}")
    path = os.path.join(root, "disttensor")
    for one in (root, path):
        make_private_folder(one)
        status = os.stat(one)
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{one} is not this user's alone: code is loaded from it (TORCHINDUCTOR_CACHE_DIR names another folder)"
            )
    return path


def key(text: str, threads: int) -> str:
    """Returns the cache key of a program: equal for programs that one library can serve."""
    parts = (text, str(threads), _machine(), str(VERSION))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


@cache
def _machine() -> str:
    """Describes the machine that generated code is made for."""
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    return f"{torch.__version__} {torch.version.git_version} {platform.machine()} {flags}"
