"""Programs that start from a process which has imported torch (tests/kit/warm.py) are what ordinary ones are."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leaks
import orphans
import pytest
import warm
from limits import HANG
from processes import alive_after

#: Prints what a program can see of how it was started.
PROBE = """
import json, os, resource, signal, sys
fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
print(json.dumps({
    "name": __name__, "file": globals().get("__file__"), "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path,
    "cwd": os.getcwd(), "environ": dict(os.environ), "parent": os.getppid(),
    "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)], "group": os.getpgid(os.getppid()),
    "handlers": {s.name: str(signal.getsignal(s)) for s in signal.valid_signals() if isinstance(s, signal.Signals)},
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "limits": [resource.getrlimit(n) for n in range(16)], "cores": sorted(os.sched_getaffinity(0)),
    "umask": oct(os.umask(0)), "open": [fd for fd in fds if fd in (0, 1, 2, %d)],
    "streams": [(s.name, s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)],
    "stdin": sys.stdin.read() if sys.stdin else None,
    "disttensor": "disttensor" in sys.modules,
}))
"""


@pytest.fixture(autouse=True)
def everybody_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked for most before."""
    monkeypatch.setattr(warm._state, "asked", Counter())


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """What comes of a warm start and of an ordinary one."""
    before = warm.started()
    with_zygote = run()
    assert warm.started() > before
    with warm.cold():
        return with_zygote, run()


def test_those_that_are_asked_for_most_have_a_zygote() -> None:
    def run(number: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(number)}
        command = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
        assert int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout) == number

    for number in (21, 21, 22, 22, 23, 23):
        run(number)
    three = warm.held()[0]
    assert len(three) == warm._MOST == 3
    run(24)
    run(24)
    assert warm.held()[0] == three
    run(24)
    (gone,) = three - warm.held()[0]
    assert alive_after(0, [gone]) == []


@pytest.mark.parametrize("kind", ["file", "-c", "-m", "-P file"])
def test_it_sees_what_an_ordinary_one_sees(kind: str, tmp_path: Path) -> None:
    out, into = os.pipe()
    text = PROBE % out
    (tmp_path / "probe.py").write_text(text)
    how = {
        "file": ["probe.py"],
        "-c": ["-c", text],
        "-m": ["-m", "probe"],
        "-P file": ["-P", str(tmp_path / "probe.py")],
    }
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "more"), "SAID": "yes"}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

    def run() -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, *how[kind], "one", "two words"],
            cwd=tmp_path,
            env=environment,
            input="told",
            pass_fds=(out,),
            capture_output=True,
            text=True,
            timeout=HANG,
            start_new_session=kind == "-c",
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    try:
        ours, ordinary = both(run)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(out)
        os.close(into)
    assert ours["parent"] == os.getpid()
    assert ours["stdin"] == "told"
    assert ours == ordinary


#: Says when what it leaves is torn down.
LEFT = """
class A:
    def __del__(self):
        print("gone")
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('in words')", 1),
        ("def f(): 1 / 0\nf()", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os._exit(9)", 9),
        ("import atexit, threading, time; atexit.register(print, 'last')\n"
         "threading.Thread(target=lambda: print('thread')).start()", 0),
        ("this is no program", 1),
        ("print('kept'); import sys; sys.stderr.write('half a line')", 0),
        ("import torch\nclass A:\n    def __del__(self):\n        try: import torch\n"
         "        except ImportError as error: print(error)\na = A()", 0),
        ("import atexit, torch; atexit.register(lambda: print(__import__('torch.nn').nn.Linear))", 0),
        ("import ctypes; libc = ctypes.CDLL(None); libc.__cxa_atexit(libc.puts, b'a library', None)", 0),
        ("import ctypes; libc = ctypes.CDLL(None); libc.__cxa_atexit(libc.abort, None, None)", -signal.SIGABRT),
        (f"import torch.distributed\n{LEFT}torch.distributed.left = A()", 0),
    ],
)  # fmt: skip
def test_it_ends_as_an_ordinary_one(program: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)

    def run() -> tuple[int, str, list[str]]:
        command = [sys.executable, str(tmp_path / "program.py")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
        # an interrupt passes through two frames of warm.py
        lines = [line for line in done.stderr.splitlines() if "warm.py" not in line and not line.startswith("    ")]
        return done.returncode, done.stdout, lines

    ours, ordinary = both(run)
    assert ours[0] == code
    assert ours == ordinary


@pytest.mark.parametrize("starts", ["itself", "another"])
def test_where_ends_are_the_subject_all_is_torn_down(starts: str) -> None:
    """Elsewhere what the zygote has brought stays as it is."""
    code = f"import torch{LEFT}torch.left = A()"
    if starts == "another":
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"

    def run() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG).stdout

    assert run() == ""
    with warm.whole_ends():
        assert both(run) == ("gone\n", "gone\n")
    assert run() == ""


#: Prints the signal that comes with the parent's end, and the blocked ones.
SET = """
import ctypes, signal
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
print(number.value, sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))))
"""


def test_what_disttensors_own_functions_set_before_the_start() -> None:
    def settle() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

    def run() -> str:
        command = [sys.executable, "-c", SET]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG, preexec_fn=settle).stdout

    settle.__module__ = "disttensor.runtime"
    ours, ordinary = both(run)
    assert ours == ordinary == f"{int(signal.SIGTERM)} [{int(signal.SIGUSR2)}]\n"
    settle.__module__ = __name__  # somebody else's may do anything: such a program is an ordinary one
    before = warm.started()
    assert run() == ordinary
    assert warm.started() == before


def test_who_ends_with_its_parent_ends_where_that_is_gone_before(tmp_path: Path) -> None:
    """It asks the kernel to be ended with its parent when this may have ended already."""
    code = """
import ctypes, os, signal, subprocess, sys
def settle():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
settle.__module__ = "disttensor.runtime"
program = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], preexec_fn=settle)
print(program.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert alive_after(HANG, [int(done.stdout)]) == []


def test_what_it_starts_is_its_child_and_warm_as_well(tmp_path: Path) -> None:
    inner = "import os, sys; print(os.getppid(), 'torch' in sys.modules)"
    code = f"""
import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", {inner!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    (pid,), (parent, has) = (line.split() for line in done.stdout.splitlines())
    assert (pid, has) == (parent, "True")


def test_what_cannot_be_warm_is_ordinary(tmp_path: Path) -> None:
    """A module that stands before one of the zygote's is the program's; so is a variable that is read at the start."""
    (tmp_path / "torch.py").write_text("value = 'mine'")
    code = "import sys, torch; print(torch.value)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, env=env)
    assert done.stdout == "mine\n", done.stderr
    with warm.cold():
        done = subprocess.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], capture_output=True)
    assert done.stdout == b"False\n"


def test_a_zygote_ends_with_its_process() -> None:
    """Also where that is killed; and nobody's end of file waits for it."""
    code = "import warm, os, signal; print(*warm.held()[0], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    (pid,) = map(int, done.stdout.split())
    assert done.returncode == -signal.SIGKILL
    assert alive_after(HANG, [pid]) == []


def test_several_threads_start_programs() -> None:
    found: list[str] = []

    def start(k: int) -> None:
        code = f"import os; print({k}, os.getppid())"
        found.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG).stdout)

    threads = [threading.Thread(target=start, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{k} {os.getpid()}\n" for k in range(8)]


def test_a_program_leaves_no_zygote_to_whoever_adopts() -> None:
    with orphans.adopting():
        subprocess.run([sys.executable, "-c", "pass"], check=True)  # this process has a zygote for it from now on
        before = orphans._children()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        assert orphans._children() <= before


@pytest.mark.parametrize("when", ["meanwhile", "later"])
def test_an_orphan_that_comes_here_is_waited_for(when: str) -> None:
    """As a zygote does whose program ends while another program is started: it stayed a zombie of the test process."""
    code = """
import subprocess, sys
inner = "import os; print(os.getpid(), flush=True); os.read(0, 1)"
subprocess.run([sys.executable, "-c", inner])
"""
    with warm.cold():
        program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with program, program.stdin as asks, program.stdout as said:  # type: ignore[union-attr]
        pid = int(said.readline())
        with orphans.adopting():
            program.kill()
            program.wait()
            if when == "meanwhile":
                asks.close()
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if when == "later":
            asks.close()
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            leaks.Held.now()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("first", ["marked", "unmarked"])
def test_one_that_is_left_is_found(first: str) -> None:
    """By the guard against leaks: also where its parent is gone, and where the first for which its zygote was started
    has an environment without this process's mark."""
    environment = dict(os.environ)
    if first == "unmarked":
        environment["OMP_NUM_THREADS"] = "25"
        subprocess.run([sys.executable, "-c", "pass"], env=leaks.unmarked(environment), check=True)
    before = leaks.Held.now()
    inner = "import signal; print('here', flush=True); signal.pause()"
    code = f"""
import subprocess, sys
stays = subprocess.Popen([sys.executable, "-c", {inner!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)
print(stays.pid, stays.stdout.readline())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=HANG, env=environment)
    pid = int(done.stdout.split()[0])
    assert any(f"process {pid}:" in left for left in leaks.Held.now().since(before))
    os.kill(pid, signal.SIGKILL)
    leaks.check(before, "a program that was left")
