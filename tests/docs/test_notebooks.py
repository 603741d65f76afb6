"""Sessions in notebooks, with a real kernel: output in the cell, interrupt, restart, edited code.

What drives the kernels runs in a process of its own: jupyter's client leaves an event loop behind in a thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from checkout import ROOT, search_path
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from limits import HANG
from output_kit import unfolded
from processes import alive_after

EXAMPLES = ROOT / "examples"


def test_the_example(tmp_path: Path) -> None:
    alone("the_example", tmp_path)


def test_a_kernel(tmp_path: Path) -> None:
    alone("a_kernel", tmp_path)


def test_breakpoints(tmp_path: Path) -> None:
    alone("breakpoints", tmp_path)


def alone(function: str, tmp_path: Path) -> None:
    """Calls a function of this module with that directory."""
    code = f"import test_notebooks as t, pathlib; t.{function}(pathlib.Path({str(tmp_path)!r}))"
    environment = {**os.environ, "PYTHONPATH": search_path(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr


def environment(tmp_path: Path) -> dict[str, str]:
    """ipykernel takes what is written to descriptors, too, unless it is tested by pytest; colours are for people."""
    keep = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    runtime = tmp_path / "runtime"
    runtime.mkdir(exist_ok=True)
    own = {"IPYTHONDIR": tmp_path, "JUPYTER_RUNTIME_DIR": tmp_path, "XDG_RUNTIME_DIR": runtime}
    return {**keep, **{name: str(path) for name, path in own.items()}, "JPY_SESSION_NAME": "/somewhere/train.ipynb"}


def plain(text: str) -> str:
    """Without colours, numbers to three digits, and without the remark that depends on the machine."""
    text = re.sub(r"\x1b\[\d*m", "", text)
    text = re.sub(r"\d+\.\d+", lambda m: f"{float(m[0]):.3g}", text)
    return "".join(line for line in text.splitlines(keepends=True) if "nodes share" not in line)


def printed(outputs: list[Any]) -> list[str]:
    """What a cell has put out: stdout and stderr together, then its value."""
    streams = plain("".join(o["text"] for o in outputs if o["output_type"] == "stream"))
    streams = "".join(sorted(unfolded(streams.splitlines(keepends=True))))  # nodes may say the same at different times
    values = [o["data"]["text/plain"] for o in outputs if o["output_type"] == "execute_result"]
    return [text for text in (streams, *map(plain, values)) if text]


def the_example(tmp_path: Path) -> None:
    book = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    expected = [printed(cell.outputs) for cell in book.cells if cell.cell_type == "code"]
    nbclient.NotebookClient(book, timeout=HANG).execute(cwd=str(tmp_path), env=environment(tmp_path))
    found = [printed(cell.outputs) for cell in book.cells if cell.cell_type == "code"]
    assert found == expected, (found, expected)


class Kernel:
    """A kernel, and what its cells put out."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client: BlockingKernelClient = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(60)
        self.text = ""
        self.trace = ""  #: of the last error
        self.prompts: list[str] = []  #: by which cells have asked

    def run(
        self,
        code: str,
        interrupt_at: str = "",
        answers: Sequence[str] | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> str:
        """The printed text, or the error's name. Interrupts the cell when it has printed that, and ``before`` was
        called. ``answers``: what is typed where it asks; None: it can't ask."""
        self.text, out, left = "", [], list(answers or ())

        def answer(message: dict[str, Any]) -> None:
            self.prompts.append(message["content"]["prompt"])
            self.client.input(left.pop(0))

        def take(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                out.append(message["content"]["text"])
                if interrupt_at and interrupt_at in out[-1]:
                    before()
                    self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(
            code, timeout=HANG, output_hook=take, allow_stdin=answers is not None, stdin_hook=answer
        )["content"]
        self.text = plain("".join(out))
        self.trace = plain("\n".join(reply.get("traceback", ())))
        return str(reply["ename"]) if reply["status"] == "error" else self.text

    def close(self) -> None:
        self.client.stop_channels()


@contextlib.contextmanager
def kernel_in(tmp_path: Path) -> Iterator[Kernel]:
    manager = KernelManager()
    manager.start_kernel(env=environment(tmp_path), cwd=str(tmp_path))
    kernel = Kernel(manager)
    try:
        yield kernel
    finally:
        kernel.close()
        manager.shutdown_kernel(now=True)


START = "import os, time, torch, disttensor as dt\ndt.init_master_worker(nodes=2, threads=1);"
#: Of the script, of its nodes, and of the process that has forked them.
PIDS = """
import psutil
pids = [node["pid"] for node in dt.nodes()]
print(os.getpid(), *pids, psutil.Process(pids[0]).ppid())
"""


def a_kernel(tmp_path: Path) -> None:
    with kernel_in(tmp_path) as kernel:
        story(kernel, tmp_path)


STEP = """
def step(x):
    y = x + 1
    breakpoint()
    z = y * 2
    return z
print(dt.run(step, 20, node=1))
"""


def breakpoints(tmp_path: Path) -> None:
    """A debugger asks in the cell that waits, whose lines only the script has; where a cell can't ask, all goes on."""
    with kernel_in(tmp_path) as kernel:
        same(kernel.run(START), "")
        said = kernel.run(STEP, answers=["p y", "n", "c"])
        same(kernel.prompts, ["(node 1 pdb) "] * 3)
        position = "Cell In[2], line 4"
        head = f"node 1 is at a breakpoint in step(), {position}\n> {position} in step()\n-> z = y * 2\n21\n"
        same(said, f"{head}> Cell In[2], line 5 in step()\n-> return z\n42\n")
        said = kernel.run(STEP)
        assert said.endswith("node 1 goes on from its breakpoint: the input has ended\n42\n"), said


def same(found: object, expected: object) -> None:
    assert found == expected, (found, expected)


def dtrun(tmp_path: Path, *words: str) -> str:
    command = [sys.executable, "-m", "dtrun", *words]
    return subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=HANG).stdout


def from_another_terminal(tmp_path: Path) -> None:
    """`dtrun ps`, `status` and `stack` know the notebook, its cell and the line."""
    (path,) = (tmp_path / "runtime" / "disttensor").glob("*.sock")

    waits = r"node 1 at Cell In\[\d+\], line 2"
    shown = dtrun(tmp_path, "ps")
    assert re.search(rf"(?m)^{path.stem} +train\.ipynb +2 .* waits [\d.]+ s for {waits}$", shown), shown
    shown = dtrun(tmp_path, "status", path.stem)
    waits = r"waits for node 1 since [\d.]+ s at Cell In\[\d+\], line 2: dt\.run\(nap, node=1\),"
    assert re.match(rf"train\.ipynb on \S+, pid {path.stem}: {waits}", shown), shown
    assert re.search(r"(?m)^1 .* running nap\(\) .* +Cell In\[\d+\], line 2 ", shown), shown
    shown = dtrun(tmp_path, "stack", path.stem)
    main = next(it for it in shown.split("\n\n") if it.startswith("thread MainThread:"))
    assert re.search(r"(?m)^  Cell In\[\d+\], line 2 in <module>$", main), shown
    assert re.search(r"(?m)^  Cell In\[\d+\], line 1 in nap$", shown), shown


def story(kernel: Kernel, tmp_path: Path) -> None:
    same(kernel.run(START), "")
    # all of it, in its cell, in order; not in that of the next one
    many = "dt.run(print, *range(1000), sep='\\n', node=range(2))"
    for _ in range(3):
        kernel.run(many)
        for rank in (0, 1):
            ours = [line for line in kernel.text.splitlines() if re.match(rf"\[(2 nodes|node {rank})\]", line)]
            same([line.split()[-1] for line in ours], [str(i) for i in range(1000)])
    # an error of a node's function, with what it has printed before
    same(kernel.run("def fail(): print('oh'); 1 / 0\ndt.run(fail, node=1)"), "ZeroDivisionError")
    same(kernel.text, "[node 1] oh\n")
    where = r"(?s).*Cell In\[\d+\], line 2\n.*frames inside disttensor; .*issued: Cell In\[\d+\], line 2 in <module>\n"
    assert re.match(where + r"    dt\.run\(fail, node=1\)\n.*\n  Cell In\[\d+\], line 1, in fail\n", kernel.trace), (
        kernel.trace
    )
    same(kernel.trace.splitlines()[-1], "ZeroDivisionError: division by zero")
    same(re.findall(r"File.*/disttensor/.*", kernel.trace), [])
    # interrupted while it waits for a node, and while it computes
    nap = "def nap(): print('asleep'); time.sleep(600)\ndt.run(nap, node=1)"
    same(kernel.run(nap, "asleep", before=lambda: from_another_terminal(tmp_path)), "KeyboardInterrupt")
    work = "x = torch.ones(3, device='node:0')\nprint('go')\nwhile True: x = x + 1"
    same(kernel.run(work, "go"), "KeyboardInterrupt")
    same(kernel.run("print((torch.ones(3, device='node:0') + 1).tolist())"), "[2, 2, 2]\n")
    # a cell and a module that are edited
    for value in (1, 2):
        kernel.run(f"def cell(): return {value}")
        same(kernel.run("print(dt.run(cell, node=0))"), f"{value}\n")
    module = tmp_path / "edited_beside.py"
    module.write_text("def f(): return 1\ndef unused(): return 0\nclass A:\n    def g(self): return 10\n")
    kernel.run("%load_ext autoreload\n%autoreload 2")
    kernel.run("import edited_beside\ndef through(): return edited_beside.f()")
    show = "print(*(dt.run(f, node=0) for f in (edited_beside.f, edited_beside.A().g, through)))"
    same(kernel.run(show), "1 10 1\n")
    for i in (2, 3):
        module.write_text(f"def f(): return {i}\ndef unused(): return 0\nclass A:\n    def g(self): return {i}0\n")
        os.utime(module, (0, i * 1e9))  # a change of the same second would go unnoticed
        same(kernel.run(show), f"{i} {i}0 {i}\n")
    # the first cell, run again
    same(kernel.run(START), "RuntimeError")
    # restart, by force; then by itself
    pids = [int(pid) for pid in kernel.run(PIDS).split()]
    kernel.manager.restart_kernel(now=True)
    assert alive_after(5, pids) == []
    kernel.client.wait_for_ready(60)
    same(kernel.run(START), "")
    pids = [int(pid) for pid in kernel.run(PIDS).split()]
    os.kill(pids[0], signal.SIGKILL)
    assert alive_after(5, pids) == []
    # and from another terminal
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(60)
    same(kernel.run(START), "")
    pids = [int(pid) for pid in kernel.run(PIDS).split()]
    same(dtrun(tmp_path, "kill", str(pids[0])), f"job {pids[0]} has ended\n")
    assert alive_after(5, pids) == []
