"""How a script may end: with work in flight, with proxies left over, while it connects; nothing of it stays behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

import pytest
from aftermath import Clock
from limits import HANG
from processes import alive_after
from variants import variants

Script = Callable[..., "subprocess.CompletedProcess[str]"]

WORK = """
import os, sys
import torch
import disttensor as dt

dt.init_master_worker(nodes=2, threads=1)
x = torch.ones(200, 200, device="node:1")
for _ in range(2000):
    x = (x @ x).clamp_(max=1)
y = x.to("node:0")
import aftermath
print(aftermath.now(), flush=True)
"""

ENDS = {
    "end": ("", 0),
    "exception": ("raise ValueError('mine')", 1),
    "interrupt": ("raise KeyboardInterrupt", 130),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "in a thread": ("import threading; threading.Thread(target=lambda: y + 1).start()", 0),
}


@pytest.mark.fault(19)
@pytest.mark.parametrize("how", variants(ENDS))
def test_the_end_with_work_in_flight(how: str, script: Script) -> None:
    line, code = ENDS[how]
    done = script(WORK + line)
    Clock(done.stdout).check(3.0, "the end of the script")
    assert done.returncode in (code, -2 if how == "interrupt" else code), done.stderr
    if how in ("end", "sys.exit", "os._exit"):
        assert "Traceback" not in done.stderr, done.stderr


LEFT_OVER = {
    "global": "kept = torch.ones(3, device='node:0')",
    "cycle": "a = [torch.ones(3, device='node:0')]; a.append(a)",
    "in a class": "class A: kept = torch.ones(3, device='node:1', requires_grad=True) * 2",
    "finalizer": """
class F:
    def __init__(self): self.x = torch.ones(3, device='node:1'); self.me = self
    def __del__(self): self.x
f = F()
""",
    "graph": "w = torch.ones(3, device='node:0', requires_grad=True); loss = (w * w).sum(); w.loss = loss",
    "module of the standard library": "os.kept = torch.ones(3, device='node:0')[1:]",
}


@pytest.mark.fault(20)
@pytest.mark.parametrize("what", variants(LEFT_OVER))
def test_proxies_that_are_left_at_the_end(what: str, script: Script) -> None:
    done = script(
        "import os\nimport aftermath\nimport torch\nimport disttensor as dt\ndt.init_master_worker(nodes=2)\n"
        + LEFT_OVER[what]
        + "\nprint(aftermath.now(), flush=True)\n"
    )
    Clock(done.stdout).check(3.0, "the end of the script")
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")


CHILD = """
import os, subprocess, sys
import disttensor as dt

def child():
    nap = ["sleep", "600"]
    r, w = os.pipe()
    if (between := os.fork()) == 0:  # a grandchild whose parent ends, in a session of its own, as daemons are
        os.setsid()
        if (pid := os.fork()) == 0:
            os.execvp(nap[0], nap)
        os.write(w, b"%d" % pid)
        os._exit(0)
    os.waitpid(between, 0)
    apart = subprocess.Popen(nap, start_new_session=True)
    return subprocess.Popen(nap).pid, apart.pid, int(os.read(r, 20)), os.getpid()

dt.init_master_worker(nodes=2)
import aftermath, processes
aftermath.probe(0)
pids, others = dt.run(child, node=1), dt.run(child, node=0)
print(*pids, *others, flush=True)
print(aftermath.now(), flush=True)
"""


KILLED = """
with aftermath.aftermath(0):
    os.kill(pids[-1], 9)
    try:
        dt.run(child, node=1)
    except dt.NodeLost:
        pass
    dead = processes.alive_after(aftermath.SETTLES, pids)
    assert dead == [], dead
    assert all(os.path.exists(f"/proc/{pid}") for pid in others)  # their node lives
"""

HOW = [KILLED, "os.kill(os.getpid(), 9)", "", "os._exit(0)"]


@pytest.mark.fault(15)
@pytest.mark.parametrize("how", variants(HOW))
def test_what_a_user_function_started_dies_with_its_node(how: str, script: Script) -> None:
    done = script(CHILD + how)
    assert done.stdout.count("\n") == 2, done.stderr
    assert "AssertionError" not in done.stderr, done.stderr
    pids, stamp = done.stdout.splitlines()
    assert alive_after(HANG, map(int, pids.split())) == []
    Clock(stamp).check(2.0, "the end of what the function has started")


IN_A_FINALIZER = """
import gc, os, signal, aftermath, torch, disttensor as dt

class Presses:
    def __init__(self): self.x, self.me = torch.ones(3, device="node:1"), self
    def __del__(self): os.kill(os.getpid(), signal.SIGINT)

hits = 0
with dt.init_master_worker(nodes=2, threads=1):
    for node in range(2):
        aftermath.probe(node)
    for way in ("dropped", "collected"):
        presses, before = Presses(), aftermath.Held((0, 1))
        if way == "dropped":
            presses.me = None
        clock = aftermath.Clock()
        try:
            del presses
            gc.collect()
            while True:  # not by item(): of a line that waits a thousand times for values the script is told
                torch.ones(3, device="node:1").sum()
                dt.synchronize()
        except KeyboardInterrupt:
            hits += 1
        clock.check(0.5, "Ctrl-C in a finalizer")
        for node in range(2):
            aftermath.probe(node)
        dt.synchronize()
        assert not [more for more in aftermath.Held((0, 1)).since(before) if "tensors" not in more]
    print(hits)
"""


@pytest.mark.fault(18)
def test_ctrl_c_in_a_finalizer(script: Script) -> None:
    """The interpreter swallows what a __del__ raises: it is raised where the script can catch it, once."""
    done = script(IN_A_FINALIZER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


CONNECTING = """
import os, signal, threading
import aftermath
import disttensor as dt
import torch

def press():
    global clock
    clock = aftermath.Clock()
    os.kill(os.getpid(), signal.SIGINT)

for after in (0.0, 0.05, 0.15, 0.3, 0.6, 0.9):
    timer = threading.Timer(after, press)
    try:
        timer.start()
        dt.init_master_worker(nodes=2)
        timer.join()
        torch.ones(3, device="node:1").sum().item()
    except KeyboardInterrupt:
        clock.check(0.5, "Ctrl-C")
        print("interrupted", flush=True)
    timer.join()
    dt.shutdown()
with dt.init_master_worker(nodes=2):
    print(torch.ones(3, device="node:1").sum().item(), flush=True)
"""


@pytest.mark.fault(18)
@pytest.mark.cold
def test_ctrl_c_while_nodes_start(script: Script) -> None:
    """Whenever it comes it is raised once, nothing is left over, and the next session works."""
    done = script(CONNECTING)
    assert done.stdout.split() == ["interrupted"] * 6 + ["3.0"], done.stderr
    assert done.returncode == 0, done.stderr


IN_A_FINALIZER_AT_THE_START = """
import os, signal, sys
import aftermath
import disttensor as dt
import torch

class Presses:
    def __del__(self): os.kill(os.getpid(), signal.SIGINT)

class Somewhere:  # the nodes are given the script's path, before they are started
    def __fspath__(self):
        Presses()
        return "/"

sys.path.append(Somewhere())
try:
    dt.init_master_worker(nodes=2)
    torch.ones(3, device="node:1").sum().item()
except KeyboardInterrupt:
    print("interrupted")
dt.shutdown()
sys.path.pop()
with dt.init_master_worker(nodes=2):
    print(torch.ones(3, device="node:1").sum().item())
"""


@pytest.mark.fault(18)
def test_ctrl_c_in_a_finalizer_while_nodes_start(script: Script) -> None:
    done = script(IN_A_FINALIZER_AT_THE_START)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n3.0\n", "")


IMPORTING = """
import os, signal, sys, threading
import torch
import disttensor as dt

class Presses:  # whoever looks for a module asks this one first
    left = 100
    def find_spec(self, *_):
        if threading.current_thread().name == "disttensor-warm":
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presses())
"""


@pytest.mark.cold
def test_ctrl_c_while_torch_imports_ends_the_script(script: Script) -> None:
    """As any other: the interpreter does not end below the imports, which C++ has called for and would abort it for."""
    done = script(IMPORTING + "dt.init_master_worker(nodes=1)\n")
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt", done.stderr
    assert done.returncode == -signal.SIGINT


GOING_ON = """
try:
    dt.init_master_worker(nodes=1)
except KeyboardInterrupt:
    print("sympy" in sys.modules, "torch._dynamo" in sys.modules)
with dt.init_master_worker(nodes=1):
    print(torch.ones(3, device="node:0").sum().item(), "torch._dynamo" in sys.modules)
"""


@pytest.mark.fault(18)
@pytest.mark.cold
def test_ctrl_c_does_not_wait_for_all_imports(script: Script) -> None:
    """For those that have begun, and the next session goes on with the others."""
    done = script(IMPORTING + GOING_ON)
    assert (done.returncode, done.stdout) == (0, "True False\n3.0 True\n"), done.stderr
