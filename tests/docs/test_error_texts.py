"""What errors say: docs/ERRORS.md is the transcript of the mistakes below; each names the line and the way out.

After a change of a text, `python tests/docs/test_error_texts.py` writes it anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from checkout import ROOT
from limits import HANG

TRANSCRIPT = ROOT / "docs" / "ERRORS.md"

#: What a user may do wrong, or have happen: a title, lines, and a word of what the text must say to do.
MISTAKES = [
    ("wrong shape", "a @ torch.ones(7, 7, device='node:1')", "3x3 and 7x7"),
    ("wrong dtype", "a @ a.long()", ""),
    ("operands on two nodes", "a + torch.ones(3, 3, device='node:0')", ".to("),
    ("operands on two devices of a node", "a + torch.ones(3, 3, device=dt.device(1, 'cuda:1'))", ".to("),
    ("local with remote", "a + torch.ones(3, 3)", "dist_send"),
    ("written to a local tensor", "torch.add(a, a, out=torch.ones(3, 3))", ".cpu()"),
    ("to numpy", "a.numpy()", ".cpu()"),
    ("node out of range", "torch.ones(3, device='node:7')", "node:0"),
    ("node out of range, in a context", "with dt.node(7): pass", "0 to 1"),
    ("no such CUDA device", "dt.device(1, 'cuda:9')", "it has"),
    ("no such CUDA device, of a tensor", "torch.ones(3, device='node:1').cuda(9)", "it has"),
    ("unknown op", "torch.ops.mine.double(a)", "allow_ops"),
    ("un-inferable op", "torch.ops.mine.pieces(a)", "disttensor.run"),
    ("index out of range, on the node", "a.gather(0, torch.full((1, 1), 7, device='node:1')).cpu()", ""),
    ("error that nobody asked about", "a.gather(0, torch.full((1, 1), 7, device='node:1')); dt.synchronize()", ""),
    ("out of memory on the node", "torch.empty(1 << 50, device='node:1').sum().item()", "memory"),
    ("sparse tensor", "torch.eye(3).to_sparse_csr().to('node:1')", "to_dense()"),
    ("pinned memory", "torch.ones(3, device='node:1', pin_memory=True)", "local"),
    ("checkpoint that is not there", "dt.checkpoint.load({'a': a}, '/nowhere')", "no complete checkpoint"),
    ("function that fails", "dt.run(lambda: 1 / 0, node=1)", "issued"),
    ("result that can't come back", "dt.run(object, node=1)", "plain data"),
    ("second session", "dt.init_master_worker()", "shutdown()"),
    ("use in a forked child", "in_a_child(lambda: a + 1)", "master"),
    ("node lost", "lose(); a.cpu()", "stay usable"),
    ("function that ends its node", "dt.run(leave, node=0)", "while it ran leave()"),
    ("use after shutdown", "dt.shutdown(); a + 1", "init_master_worker"),
    ("factory without a session", "torch.ones(3, device='node:0')", "init_master_worker"),
]

PROGRAM = """
import contextlib, os, pickle, re, select, signal, sys, traceback, warnings
import torch
import disttensor as dt

warnings.simplefilter("ignore")
library = torch.library.Library("mine", "DEF")
library.define("double(Tensor x) -> Tensor")
library.define("pieces(Tensor x) -> Tensor[]")

def in_a_child(program):
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            program()
        except Exception as e:
            os.write(writer, pickle.dumps((e, traceback.format_exc())))
        os._exit(0)
    os.close(writer)
    error, trace = pickle.loads(os.read(reader, 1 << 16))
    raise error

def lose():
    a.sum().item()
    os.kill(dt.nodes()[1]["pid"], signal.SIGKILL)
    with contextlib.suppress(dt.NodeLost):
        while True:
            dt.synchronize(1)

def leave():
    os._exit(3)

dt.init_master_worker(nodes=2, simulate_cuda=2, allow_ops=["mine::pieces"])
a = torch.ones(3, 3, device="node:1")
for number, (title, code, _) in enumerate(MISTAKES):
    name = f"line {number}"
    try:
        exec(compile(code, name, "exec"))
        said = "nothing"
    except Exception as e:
        where = [note for note in getattr(e, "__notes__", ()) if note.startswith(("  ", "node "))]
        text = "\\n".join([str(e), *where])
        trace = "".join(traceback.format_tb(e.__traceback__)) + text
        said = f"{type(e).__name__}: {text}"
        if name not in trace and "in_a_child" not in code:
            said = "NO LINE " + said
    with contextlib.suppress(Exception):
        dt.synchronize()
    print(f"## {title}\\n\\n    {code}\\n")
    print("\\n".join("> " + line if line else ">" for line in said.splitlines()), end="\\n\\n")
"""

#: What differs from run to run and from machine to machine.
VARYING = [
    (r"host [^,)]+, pid \d+", "host HOST, pid PID"),
    (r"no such folder on host \S+", "no such folder on host HOST"),
    (r"(?m)^>   \d+ on node:", ">   NUMBER on node:"),
    (r'[^ "\n]*/([\w.-]+\.py)', r"\1"),
    (r"\(at .*?\.cpp:\d+\)|\.cpp:\d+", ".cpp"),
    (r"0x[0-9a-f]+", "0x..."),
    (r"held .* tensors?; .* of .* are left", "held BYTES in NUMBER tensors; FREE of TOTAL are left"),
]


def transcript(directory: Path) -> str:
    path = directory / "program.py"
    path.write_text(f"MISTAKES = {MISTAKES!r}\n{PROGRAM}")
    root = str(TRANSCRIPT.parent.parent)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=HANG, env=env)
    said = done.stdout
    for pattern, instead in VARYING:
        said = re.sub(pattern, instead, said)
    return said + done.stderr


def sections(text: str) -> dict[str, str]:
    return dict(part.split("\n", 1) for part in text.split("## ")[1:])


def test_texts_are_those_of_the_transcript(tmp_path: Path) -> None:
    now, kept = sections(transcript(tmp_path)), sections(TRANSCRIPT.read_text())
    assert list(now) == list(kept)
    for title in now:
        assert now[title].strip() == kept[title].strip(), title


def test_each_says_where_and_what_to_do() -> None:
    kept = sections(TRANSCRIPT.read_text())
    for title, code, what in MISTAKES:
        assert code in kept[title]
        assert "> nothing" not in kept[title], title
        assert "NO LINE" not in kept[title], title
        assert what in kept[title].split(code, 1)[1], title


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(BrokenPipeError):
        TRANSCRIPT.write_text(
            "# Errors\n\nWhat they say, each after the line that raises it; `a` is a 3x3 tensor on node 1. "
            "`tests/docs/test_error_texts.py` compares.\n\n" + transcript(Path(directory)).rstrip() + "\n"
        )
