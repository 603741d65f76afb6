"""Tracebacks as Python and IPython show them: the user's lines, three frames of ours at most, the sentence last.

The programs are those whose tracebacks took 37 to 73 lines when newcomers met them, and the longest of our own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT, search_path
from limits import HANG

import disttensor

dt: Any = disttensor

#: Title -> (code, the sentence at its end, the lines that it may take). Each code is a function of the file below.
PROGRAMS = {
    "a layer that was left here": (
        "torch.nn.Linear(4, 4)(torch.ones(4, device='node:0'))",
        "RuntimeError: .*addmm.*",
        17,  # nine of them are torch's own, as for a local layer
    ),
    "a layer among others": (
        "torch.nn.Sequential(*map(torch.nn.Linear, (4, 5), (4, 5))).to('node:0')(torch.ones(2, 4, device='node:0'))",
        r"RuntimeError: mat1 and mat2 shapes cannot be multiplied \(2x4 and 5x5\)",
        28,  # and of these 18; the node is asked, as weights are transposed, and only its error is shown
    ),
    "a function that aborts": (
        "dt.run(abort, node=2)",
        r"disttensor\.\S+\.NodeLost: node 2 \(.*\) is lost: killed by SIGABRT while it ran abort\(\), .* stay usable",
        22,
    ),
    "a worker of a DataLoader that uses a node": (
        "list(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context='fork'))",
        r"disttensor\.\S+\.ForkError: .*",
        32,
    ),
    "a function that fails": ("dt.run(fail, 0, node=1)", "ZeroDivisionError: division by zero", 15),
    "one call of many": ("list(dt.map(fail, [1, 0]))", "ZeroDivisionError: division by zero", 15),
    "an operation whose error comes later": (
        "torch.ones(3, 3, device='node:1').gather(0, torch.full((1, 1), 7, device='node:1')).cpu()",
        "RuntimeError: index 7 is out of bounds for dimension 0 with size 3",
        10,
    ),
    "a collective of local tensors": ("dt.all_reduce([torch.ones(2), torch.ones(2)])", r"\w+: .*a local tensor.*", 8),
    "a lock in a function": ("dt.run(held, node=0)", r"TypeError: .*the global variable 'lock'.*", 11),
    "a graph that is built": (
        "dt.graphed(lambda x: x @ torch.ones(7, 7, device='node:0'))(torch.ones(3, 3, device='node:0'))",
        r"RuntimeError: mat1 and mat2 shapes cannot be multiplied \(3x3 and 7x7\)",
        12,
    ),
}

HEAD = """
import contextlib, io, os, sys, threading, traceback
import torch
import disttensor as dt

lock = threading.Lock()

def fail(by): return 1 / by

def abort(): os.abort()

def held(): return lock

class Data:
    def __len__(self): return 3
    def __getitem__(self, at): return on_node + at

dt.init_master_worker(nodes=3)
on_node = torch.ones(3, device="node:0")
"""

#: Shows each program's error by the hook that Python would call, folded and whole, then ends by one.
TAIL = """
def shown(error, how):
    os.environ["DISTTENSOR_TRACEBACK"] = how
    with contextlib.redirect_stderr(io.StringIO()) as written:
        sys.excepthook(type(error), error, error.__traceback__)
    return written.getvalue()

for title, program in PROGRAMS.items():
    try:
        program()
    except Exception as e:
        before = traceback.format_exception(e)
        print("#####", title, shown(e, ""), "#####", shown(e, "full"), "#####", "".join(before), sep="\\n")
        assert traceback.format_exception(e) == before, title  # the exception itself is as it was
    with contextlib.suppress(Exception):
        dt.synchronize()
thread = threading.Thread(target=lambda: dt.run(fail, 0, node=1), name="mine")
os.environ.pop("DISTTENSOR_TRACEBACK")
silent = threading.Thread(target=lambda: dt.graphed(lambda x: sys.exit(3))(on_node))  # as SystemExit is in a thread
with contextlib.redirect_stderr(io.StringIO()) as written:
    for each in (silent, thread):
        each.start()
        each.join()
print("#####", "a thread", written.getvalue(), sep="\\n")
fail_here = dt.run(fail, 0, node=0)
"""

_OURS = re.compile(rf'File "{re.escape(str(ROOT))}/(disttensor|runtime)/.*')


def run(path: Path, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path.write_text(code)
    env = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(path), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG)


def test_what_python_shows(tmp_path: Path) -> None:
    functions = "".join(f"    {title!r}: lambda: {code},\n" for title, (code, *_) in PROGRAMS.items())
    done = run(tmp_path / "program.py", f"{HEAD}\nPROGRAMS = {{\n{functions}}}\n{TAIL}")
    parts = done.stdout.split("#####\n")[1:]
    assert len(parts) == 3 * len(PROGRAMS) + 1, done.stdout + done.stderr
    for at, (title, (code, sentence, most)) in enumerate(PROGRAMS.items()):
        first, whole, before = parts[3 * at : 3 * at + 3]
        named, folded = first.split("\n", 1)
        assert named == title
        lines = folded.rstrip("\n").split("\n")
        assert len(_OURS.findall(folded)) <= 3, folded
        assert folded.count("inside disttensor; DISTTENSOR_TRACEBACK=full shows them]") == 1, folded
        assert re.fullmatch(sentence, lines[-1]), folded
        assert len(lines) <= most, folded
        assert any(code[:30] in line for line in lines), folded  # the user's own line
        assert whole == before, title
    thread = parts[-1].split("\n", 1)[1]
    assert thread.startswith("Exception in thread mine:\nTraceback (most recent call last):\n"), thread
    assert thread.endswith("ZeroDivisionError: division by zero\n\n"), thread
    assert "frames inside disttensor" in thread
    assert not _OURS.search(thread)
    # the one that ends the program, by the interpreter itself
    assert done.returncode == 1
    end = done.stderr[done.stderr.rindex('Traceback (most recent call last):\n  File "' + str(tmp_path)) - 900 :]
    assert end.endswith("ZeroDivisionError: division by zero\n"), end
    assert "    fail_here = dt.run(fail, 0, node=0)\n" in end
    assert "    def fail(by): return 1 / by\n" in end  # on the node, of the script's file


PLAIN = """
{}
import threading, sys
def inner(): raise ValueError("mine")
def outer():
    try: inner()
    except ValueError as e:
        e.add_note("a note")
        raise KeyError("yours") from e
thread = threading.Thread(target=inner, name="t"); thread.start(); thread.join()
if len(sys.argv) > 1: raise ExceptionGroup("two", [ValueError(1), TypeError(2)])
outer()
"""


@pytest.mark.parametrize("which", [(), ("group",)])
def test_what_is_not_ours_is_pythons_byte_for_byte(tmp_path: Path, which: tuple[str, ...]) -> None:
    with_us = run(tmp_path / "plain.py", PLAIN.format("import disttensor"), *which)
    without = run(tmp_path / "plain.py", PLAIN.format("import os"), *which)
    assert with_us.stderr == without.stderr
    assert "KeyError: 'yours'" in with_us.stderr or which
    assert with_us.returncode == without.returncode == 1


def test_a_hook_of_the_users_stays(tmp_path: Path) -> None:
    code = """
import sys, threading
def mine(*args): print("mine", len(args))
if "before" in sys.argv: sys.excepthook = threading.excepthook = mine
import disttensor as dt
if "after" in sys.argv: sys.excepthook, old = lambda *args: (print("mine", len(args)), old(*args)), sys.excepthook
dt.no_such_name
"""
    before, after = (run(tmp_path / "hooked.py", code, when) for when in ("before", "after"))
    assert (before.stdout, before.stderr) == ("mine 3\n", "")
    assert after.stdout == "mine 3\n"
    assert after.stderr.startswith("Traceback (most recent call last):")  # a hook that calls the one before it


def shown(error: BaseException) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as written:
        sys.excepthook(type(error), error, error.__traceback__)
    return written.getvalue()


def raised(program: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as told:  # noqa: PT011
        program()
    return told.value


def test_causes_groups_and_notes_show(nodes: object) -> None:
    def caused() -> None:
        try:
            dt.mesh(nodes=7)
        except Exception as e:
            e.add_note("of the user's")
            raise KeyError("yours") from e

    error = raised(caused)
    notes = [*error.__cause__.__notes__] if error.__cause__ else []
    text = shown(error)
    mine, yours = text.split("\nThe above exception was the direct cause of the following exception:\n")
    assert not _OURS.search(text)
    assert "\nof the user's\n" in mine
    assert str(error.__cause__) in mine
    assert yours.endswith("KeyError: 'yours'\n")
    assert [*error.__cause__.__notes__] == notes if error.__cause__ else False
    group = BaseExceptionGroup("both", [raised(caused), raised(lambda: dt.node(7).__enter__())])
    text = shown(raised(lambda: (_ for _ in ()).throw(group)))
    assert "ExceptionGroup: both (2 sub-exceptions)" in text
    assert text.count("inside disttensor") == 2
    assert text.count("DISTTENSOR_TRACEBACK=full") == 1
    assert not _OURS.search(text)
    # a context that ``from None`` hides is not ours to show
    hidden = raised(caused)
    hidden.__cause__, hidden.__suppress_context__ = None, True
    assert "inside disttensor" not in shown(hidden)


def test_an_exception_that_cannot_be_shown_is_pythons(nodes: object) -> None:
    class Odd(dt.DisttensorError):
        def __str__(self) -> str:
            raise ValueError("no words")

    def program() -> None:
        try:
            dt.node(7).__enter__()
        except ValueError as e:
            raise Odd from e

    error = raised(program)
    assert "<exception str() failed>\n" in shown(error)
    frames = traceback.extract_tb(error.__cause__.__traceback__ if error.__cause__ else None)
    assert any("/disttensor/" in frame.filename for frame in frames)


def test_notes_show_without_frames(nodes: object, monkeypatch: pytest.MonkeyPatch) -> None:

    def noted() -> None:
        try:
            dt.node(7).__enter__()
        except ValueError as e:
            e.add_note("of the user's")
            raise

    error = raised(noted)
    monkeypatch.setattr(sys, "tracebacklimit", 0, raising=False)
    assert shown(error).endswith("\nof the user's\n")


IPYTHON = """
import os, re, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
CELLS = [
    "import torch, disttensor as dt\\ndt.init_master_worker(nodes=2, launcher='inproc');",
    "x = torch.ones(3, 3, device='node:0')\\nx @ torch.ones(7, 7, device='node:0')",
    "def bad(by):\\n    return 1 / by",
    "dt.run(bad, 0, node=1)",
    "y = 1\\nz = torch.ones(3, 3, device='node:1').gather(0, torch.full((1, 1), 7, device='node:1'))",
    "z.cpu()",
    "dt.shutdown()\\ndt.init_master_worker(nodes=1, launcher='inproc');",
    "a = 1\\nx + 1",
    "try: bad(0)\\nexcept Exception as e: raise KeyError('mine') from e",
    "raise ExceptionGroup('two', [dt.submit(bad, 0, node=0).exception()])",
    "import traceback; print(len(traceback.extract_tb(sys.last_traceback)) > 3)",
    "%xmode plain\\nimport sys",
    "dt.node(7).__enter__()",
    "print(len(traceback.extract_tb(sys.last_traceback)) > 2)",
]
for cell in CELLS:
    print("#####")
    shell.run_cell(cell, store_history=True)
    sys.stdout.flush()
"""


def test_what_ipython_shows(tmp_path: Path) -> None:
    done = run(tmp_path / "shell.py", IPYTHON, IPYTHONDIR=str(tmp_path))
    parts = [part.strip("\n") for part in done.stdout.split("#####\n")[1:]]
    assert len(parts) == 14, done.stdout + done.stderr
    assert not _OURS.search(done.stdout)
    shape, fails, later, gone = parts[1], parts[3], parts[5], parts[7]
    for text in (shape, fails, later, gone, parts[12]):
        assert "inside disttensor; DISTTENSOR_TRACEBACK=full shows them]" in text, text
    assert "Cell In[2], line 2\n" in shape
    assert len(shape.splitlines()) <= 9, shape
    assert shape.endswith("\nRuntimeError: mat1 and mat2 shapes cannot be multiplied (3x3 and 7x7)")
    # a function of a cell, on a node
    assert "\n  issued: Cell In[4], line 1 in <module>\n    dt.run(bad, 0, node=1)\n" in fails
    assert "\n  Cell In[3], line 2, in bad\n    return 1 / by\n" in fails
    assert fails.endswith("\nZeroDivisionError: division by zero")
    # an operation that has failed in an earlier cell
    assert "\n  issued: Cell In[5], line 2 in <module>\n    z = torch.ones(3, 3, device='node:1').gather(" in later
    assert later.endswith("\nRuntimeError: index 7 is out of bounds for dimension 0 with size 3")
    assert len(gone.splitlines()) <= 9, gone
    assert re.search(r"\n\w*Error: .*session.*$", gone), gone
    assert "frames inside" not in parts[8]
    assert parts[8].endswith("KeyError: 'mine'")
    assert "frames inside disttensor; " in done.stderr  # IPython leaves groups to Python, which writes there
    assert "ExceptionGroup: two (1 sub-exception)" in done.stderr
    assert parts[13] == "True"  # for debuggers it is whole
