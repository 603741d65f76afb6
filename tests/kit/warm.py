"""Python programs that tests start, without the seconds in which each imports torch: forks of a process that has it.

    pytest process                  zygote (this file as a program)            the program
    Popen([sys.executable, ..]) --socketpair--> fork, fork ------------------> a child of the pytest process
       pid <-----------------------------                                        with a zygote of its own, so that
                                                                                 what it starts is warm as well

`install` has ``subprocess.Popen`` start what is Python, and can be told from nothing but its speed, in this way: the
child has the same parent, arguments, environment, directory, descriptors, session and signals as an ordinary one, and
runs the program as ``__main__`` in a module of its own. Only third-party modules are there already; disttensor is
imported anew. What differs: /proc/PID/cmdline and environ are the zygote's, and torch's import is over at once. So a
test of these things is `cold` (a marker of conftest.py); and whatever `_fits` does not know is started as ever.

A program's end is its own, too: its threads are awaited, atexit's functions run, what it has imported and made is torn
down, and so are the libraries that it has loaded. What the zygote has brought is left: modules, finalizers, libraries,
as it would take a fifth of a second of CPU to take it apart. A test about ends is marked `whole_ends`: there all goes.

What was tried and does not work: forking from the pytest process itself (it has threads); a single zygote for all (a
process that a program starts has to be that one's child, and only an ancestor can be given a process's orphan).
"""

from __future__ import annotations

import array
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orphans

#: What a zygote has imported: all third-party modules that a session needs.
IMPORTS = ("numpy", "torch", "torch._dynamo", "zmq", "msgspec", "cloudpickle")
#: Variables that Python or a library reads when it starts; where one differs a program has another zygote, or none.
_EARLY = ("PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS", "GOMP",
          "TORCH", "PYTORCH", "ATEN", "DNNL", "ONEDNN", "LD_", "CUDA")  # fmt: skip
#: Those of them that are followed after the start.
_LATE = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES")
#: Roles of launch/entry.py that start no Python programs themselves, and so need no zygote.
_LEAVES = ("server",)
#: How many zygotes a pytest process has at a time; each has 300 MB.
_MOST = 3
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_CORE)
#: The variable with the marks of the test processes that a process comes from (leaks.py).
MARK = "STARTED_BY_TESTS"

_SET_PDEATHSIG, _GET_PDEATHSIG = 1, 2
_libc = ctypes.CDLL(None)

_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


# ---- this side: who starts programs ----------------------------------------------------------------------------------


class Zygote:
    """The other end of a zygote's socket."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock: socket.socket | None = sock
        self.pid = pid

    def spawn(self, request: dict[str, Any], fds: Sequence[int]) -> int | None:
        """The pid of a new child of this process that is what the request says; None where the zygote is gone."""
        if self.sock is None:
            return None
        try:
            with orphans.adopting():
                data = json.dumps(request).encode()
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                self.sock.sendmsg([struct.pack("I", len(data))], rights)
                self.sock.sendall(data)
                answer = _exactly(self.sock, 4)
            # as after an exec: it leads its session, if it is to, before anybody looks
            _exactly(self.sock, 1)
        except OSError:
            answer = b""
        if len(answer) < 4:
            self.close()
            return None
        return int(struct.unpack("i", answer)[0])

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def end(self) -> None:
        """Returns when this child has ended; what it has started goes on."""
        self.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # the number is a child's still
            os.kill(self.pid, signal.SIGKILL)  # a fork of this process may still hold the socket
            os.waitpid(self.pid, 0)


class _State:
    """Of this process: the zygotes by what they have of the environment, and how it was when it started them."""

    def __init__(self) -> None:
        self.zygotes: dict[str, Zygote] = {}
        self.lock = threading.Lock()
        self.owner = os.getpid()
        self.makes = False  #: may start further zygotes
        self.asked: Counter[str] = Counter()  #: how often for each: those that are asked for most have a place
        self.off = 0  #: how many have asked for cold starts
        self.whole = 0  #: how many have asked for ends at which all is torn down
        self.started = 0  #: how many programs have been started warm


_state = _State()


def install() -> None:
    """Has this process's Popen start Python programs warm from now on."""
    _state.makes = True
    atexit.register(_close)
    subprocess.Popen._execute_child = _warm  # type: ignore[attr-defined]


def _close() -> None:
    for zygote in _state.zygotes.values():
        zygote.close()


def _end() -> None:
    """Ends a program's zygotes with it. One that were left would be somebody's orphan, and stay a zombie of whoever
    starts a program just then (orphans.py)."""
    for zygote in _state.zygotes.values():
        zygote.end()


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Programs are started as ever meanwhile."""
    _state.off += 1
    try:
        yield
    finally:
        _state.off -= 1


@contextlib.contextmanager
def whole_ends() -> Iterator[None]:
    """Programs that are started meanwhile, and what these start, take all apart at their ends."""
    _state.whole += 1
    try:
        yield
    finally:
        _state.whole -= 1


def held() -> tuple[set[int], set[int]]:
    """The pids of this process's zygotes and the descriptors that lead to them: no test has to give these back."""
    zygotes = list(_state.zygotes.values())
    return {z.pid for z in zygotes}, {z.sock.fileno() for z in zygotes if z.sock is not None}


def started() -> int:
    """How many programs this process has started warm."""
    return _state.started


def _warm(self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
          startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
          errread: int, errwrite: int, *rest: Any) -> None:  # fmt: skip
    restore_signals, gid, gids, uid, umask, start_new_session, process_group = rest
    pid = None
    ordinary = (shell, executable, gid, gids, uid) == (False, None, None, None, None)
    ordinary = ordinary and (preexec_fn is None or preexec_fn.__module__.partition(".")[0] == "disttensor")
    ordinary = ordinary and close_fds and restore_signals and umask < 0 and process_group in (-1, None)
    # what Popen has been given stays open for it to fall back on
    if ordinary and not isinstance(args, (str, bytes)) and _state.owner == os.getpid() and not _state.off:
        argv = [os.fsdecode(a) for a in args]
        environ = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        program = _program(argv)
        folder = os.path.abspath(os.fsdecode(cwd)) if cwd is not None else os.getcwd()
        if program is not None and os.path.isdir(folder) and _fits(program, environ, folder):
            with _state.lock:
                zygote = _zygote(environ)
                if zygote is not None:
                    wanted = [(own if own >= 0 else std, std)
                              for std, own in enumerate((p2cread, c2pwrite, errwrite))]  # fmt: skip
                    wanted += [(fd, fd) for fd in pass_fds if fd > 2]
                    wanted = [(own, number) for own, number in wanted if _is_open(own)]
                    mask, dies = _made(preexec_fn)
                    request = {
                        "argv": argv,
                        "program": program,
                        "environ": environ,
                        "cwd": folder,
                        "fds": [number for _, number in wanted],
                        "session": bool(start_new_session),
                        "mask": mask,
                        "dies": dies,
                        "asker": os.getpid(),
                        "ignored": [s for s in (1, 2, 3, 15) if signal.getsignal(s) is signal.SIG_IGN],
                        "affinity": sorted(os.sched_getaffinity(0)),
                        "whole": bool(_state.whole),
                    }
                    pid = zygote.spawn(request, [own for own, _ in wanted])
    if pid is None:
        _execute(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                 p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest)  # fmt: skip
        return
    _state.started += 1
    self.pid, self._child_created = pid, True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _made(preexec_fn: Callable[[], object] | None) -> tuple[list[int], int]:
    """The blocked signals, and the one that comes with the parent's end: what disttensor's own functions set.

    They can be called in a child of this process only: so one is made for it, which tells of itself.
    """
    if preexec_fn is None:
        return [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])], 0
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            preexec_fn()
            dies = ctypes.c_int()
            _libc.prctl(_GET_PDEATHSIG, ctypes.byref(dies), 0, 0, 0)
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            os.write(tell, json.dumps([[int(s) for s in blocked], dies.value]).encode())
        finally:
            os._exit(0)
    os.close(tell)
    with open(told, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    mask, dies_with = json.loads(answer)
    return mask, dies_with


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _program(argv: list[str]) -> dict[str, Any] | None:
    """What ``python ..`` is to run: ``kind`` is "-c", "-m" or "file". None for what only a real one can do."""
    if not argv or argv[0] != sys.executable:
        return None
    safe, i = False, 1
    while i < len(argv) and argv[i] in ("-P", "-B"):
        safe, i = safe or argv[i] == "-P", i + 1
    if i == len(argv) or (argv[i].startswith("-") and argv[i] not in ("-c", "-m")):
        return None
    if argv[i] in ("-c", "-m"):
        if i + 1 == len(argv):
            return None
        return {"kind": argv[i], "what": argv[i + 1], "arguments": argv[i + 2 :], "safe": safe}
    return {"kind": "file", "what": argv[i], "arguments": argv[i + 1 :], "safe": safe}


def _fits(program: dict[str, Any], environ: dict[str, str], folder: str) -> bool:
    """Whether a fork of a zygote would be what a new process is."""
    what = program["what"]
    if program["kind"] == "-c" and len(what) > 100_000:
        return False
    if program["kind"] == "file" and not (what.endswith(".py") and os.path.isfile(os.path.join(folder, what))):
        return False
    # a module that stands before the one which the zygote has
    first = folder if program["kind"] != "file" else os.path.dirname(os.path.join(folder, what))
    path = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    names = {name.partition(".")[0] for name in IMPORTS}
    for entry in ([] if program["safe"] else [first]) + path:
        if any(os.path.exists(os.path.join(entry, name + end)) for name in names for end in ("", ".py")):
            return False
        if os.path.exists(os.path.join(entry, "sitecustomize.py")):
            return False
    return True


def _key(environ: dict[str, str]) -> str:
    early = {k: v for k, v in sorted(environ.items()) if k.startswith(_EARLY) and k not in _LATE}
    return json.dumps([early, [resource.getrlimit(limit) for limit in _LIMITS]])


def _zygote(environ: dict[str, str]) -> Zygote | None:
    """One that has started with what is read early of this environment, and with this process's limits."""
    key = _key(environ)
    zygote = _state.zygotes.get(key)
    if zygote is not None and zygote.sock is None:
        return None
    if zygote is None and _state.makes:
        _state.asked[key] += 1
        if len(_state.zygotes) == _MOST:
            least = min(_state.zygotes, key=_state.asked.__getitem__)
            if _state.asked[least] >= _state.asked[key]:
                return None
            _state.zygotes.pop(least).end()
        zygote = _state.zygotes[key] = _start(environ)
    elif zygote is not None:
        _state.asked[key] += 1
    return zygote


def _start(environ: dict[str, str]) -> Zygote:
    ours, theirs = socket.socketpair()
    with theirs, cold():
        kept = {k: v for k, v in environ.items() if k not in ("PYTHONPATH", MARK)}
        if MARK in os.environ:  # what this process starts is its own, whatever the first program's environment has
            kept[MARK] = os.environ[MARK]
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, env=kept, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, cwd="/")
    process.returncode = 0  # nobody waits for it: it ends with this process
    return Zygote(ours, process.pid)


# ---- the other side: a zygote, and what becomes of its forks ---------------------------------------------------------


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := sock.recv(size - len(data))):
        data += piece
    return data


def _receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    try:
        head, rights, _, _ = sock.recvmsg(4, socket.CMSG_SPACE(4 * 64))
    except OSError:
        return None, []
    fds = array.array("i")
    for _level, _type, data in rights:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    head += _exactly(sock, 4 - len(head)) if head else b""
    if len(head) < 4:
        return None, list(fds)
    data = _exactly(sock, struct.unpack("I", head)[0])
    return (json.loads(data) if data else None), list(fds)


def _serve(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks for whoever is at the other end, and returns in each fork."""
    for number in (signal.SIGINT, signal.SIGQUIT):  # the terminal's are for the program
        signal.signal(number, signal.SIG_IGN)
    while True:
        request, fds = _receive(sock)
        if request is None:
            os._exit(0)
        wait, go = os.pipe()
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.close(go)
                if not os.read(wait, 1):
                    os._exit(0)
                for fd in (wait, told, tell):
                    os.close(fd)
                return request, fds
            os.write(tell, struct.pack("i", pid))
            os._exit(0)
        for fd in (wait, tell, *fds):
            os.close(fd)
        os.waitpid(between, 0)  # from here on, who asked is the parent of the new one
        with contextlib.suppress(OSError):
            sock.sendall(os.read(told, 4))
        os.write(go, b"!")
        os.close(told)
        os.close(go)


def _place(fds: list[int], numbers: list[int]) -> None:
    """Puts each descriptor at its number. 0, 1 and 2 are closed if they are not among these."""
    high = max([*fds, *numbers, 2]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high) for fd in fds]
    for fd in {*fds, 0, 1, 2}:
        with contextlib.suppress(OSError):
            os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def _settle(request: dict[str, Any], fds: list[int], sock: socket.socket) -> None:
    """Gives this fork what a new process has from its parent, and tells that one."""
    asked = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, max([*request["fds"], *fds, 2]) + 1)
    sock.close()
    _place(fds, request["fds"])
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["affinity"])
    os.environ.clear()
    os.environ.update(request["environ"])
    _state.__init__()  # type: ignore[misc]
    _state.whole = int(request["whole"])
    with contextlib.suppress(OSError):
        os.write(asked, b"!")
    os.close(asked)


def _split(request: dict[str, Any]) -> socket.socket | None:
    """Forks a zygote for this process off, of what it is now, before it runs anything. In that: its socket."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        for number in request["fds"]:  # nobody's end of file is to wait for this one
            os.close(number)
        null = os.open(os.devnull, os.O_RDWR)
        for std in {0, 1, 2} - {null}:
            os.dup2(null, std)
        if null > 2:
            os.close(null)
        return theirs
    theirs.close()
    _state.zygotes[_key(request["environ"])] = Zygote(ours, pid)
    atexit.register(_end)
    subprocess.Popen._execute_child = _warm  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=ours.close)
    return None


def _signals(request: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    if number := request["dies"]:
        _libc.prctl(_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != request["asker"]:
            os.kill(os.getpid(), number)


#: Of stdin, stdout and stderr; the locale decides.
_ERRORS = [getattr(stream, "errors", None) for stream in (sys.stdin, sys.stdout, sys.stderr)]


def _streams() -> None:
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream, errors = None, _ERRORS[number]
        if _is_open(number):
            raw = io.FileIO(number, mode, closefd=False)
            raw.name = f"<{name}>"
            unbuffered = mode == "w" and bool(os.environ.get("PYTHONUNBUFFERED"))
            stream = io.TextIOWrapper(
                raw if unbuffered else io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw),  # type: ignore
                encoding="utf-8",
                errors=errors,
                line_buffering=not unbuffered and (number == 2 or raw.isatty()),
                write_through=unbuffered,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _prepare(request: dict[str, Any]) -> Callable[[], object]:
    """What runs the program, as ``__main__``."""
    program, what = request["program"], request["program"]["what"]
    kind = program["kind"]
    sys.argv = [what if kind == "file" else kind, *program["arguments"]]
    sys.orig_argv = request["argv"]
    added = [p for p in request["environ"].get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = added + sys.path
    if not program["safe"]:
        first = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.abspath(what)))
        sys.path.insert(0, first)
    importlib.invalidate_caches()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if kind == "-m":
        import runpy

        return lambda: runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    name, text = "<string>", what.encode()
    if kind == "file":
        name = main.__file__ = os.path.abspath(what)
        with io.open_code(name) as file:
            text = file.read()
    return lambda: exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


def _run(call: Callable[[], object]) -> None:
    """Calls the program; what it raises is printed as ever, without a line of this file."""
    try:
        call()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


# ---- how a program ends ----------------------------------------------------------------------------------------------


class _Kept:
    """What stands for a module when its program ends: it is none, so the interpreter does not clear it."""


def _keep(brought: list[types.ModuleType]) -> None:
    """The last that atexit calls, as it is the first that is registered. Imports find what they have found before."""
    if _state.whole:
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(brought))  # nobody gives this back: they outlive the interpreter
    for module in brought:
        if sys.modules.get(module.__name__) is module:
            stand_in = _Kept()
            stand_in.__dict__ = module.__dict__
            sys.modules[module.__name__] = stand_in  # type: ignore[assignment]


def _third_party() -> list[types.ModuleType]:
    """But torch.distributed: what a program puts there, such as groups with threads, ends with it."""
    return [
        module
        for name, module in sys.modules.items()
        if name.partition(".")[0] not in sys.stdlib_module_names
        and name not in ("__main__", "warm")
        and not name.startswith("torch.distributed")
        and isinstance(vars(module), dict)
    ]


def _leave_libraries() -> None:
    """Ends this process with the status that it has when whatever libc is told of from here on has been called.

    That is what libraries that are loaded later have to do; those that are there already are left as they are.
    """
    _libc.on_exit(ctypes.cast(_libc._exit, ctypes.c_void_p), None)
    _libc.__cxa_atexit(ctypes.cast(_libc.fflush, ctypes.c_void_p), None, None)  # the latest is called first


def _main(fd: int) -> None:
    brought: list[types.ModuleType] = []
    atexit.register(_keep, brought)
    gc.disable()
    for name in IMPORTS:
        importlib.import_module(name)
    import torch

    # what the first session of a process has torch import (dispatch/meta_inference.py)
    x = torch.empty(2, 2, device="meta")
    torch.ops.aten.mul.Tensor(torch.ops.aten.mm.default(x, x), 2.0)
    brought += _third_party()
    finalizers = list(weakref.finalize._registry)  # type: ignore[attr-defined]
    for each in finalizers:  # torch's of its operators
        each.atexit = False
    gc.enable()
    gc.collect()
    gc.freeze()
    if threading.active_count() > 1:  # numpy's OpenBLAS has some, too, and a handler that stops them around a fork
        os._exit(1)  # it must not be forked: programs are started as ever
    sock: socket.socket | None = socket.socket(fileno=fd)
    while sock is not None:
        request, fds = _serve(sock)
        _settle(request, fds, sock)
        arguments = request["program"]["arguments"]
        sock = None if arguments[:1] and arguments[0] in _LEAVES else _split(request)
    if request["whole"]:
        for each in finalizers:
            each.atexit = True
    else:
        _leave_libraries()
    _signals(request)
    _streams()
    _run(_prepare(request))


if __name__ == "__main__":
    sys.modules["warm"] = sys.modules["__main__"]
    sys.path.pop(0)  # the kit's folder
    _main(int(sys.argv[1]))
