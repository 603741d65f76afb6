"""python -m disttensor.doctor: what it finds, what is wrong, and docs/DOCTOR.md, which shows what a run has printed.

After a change of a text, `python tests/docs/test_doctor_page.py` runs it and writes the page's output anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkout import ROOT, search_path
from limits import HANG

from disttensor.cli import doctor, gpu_trial, versions
from disttensor.cli.doctor import NONE, OK, WRONG, CheckRow
from disttensor.runtime.protocol.bundle import PROTOCOL, VERSION

PAGE = ROOT / "docs" / "DOCTOR.md"
SECRET = "correct-horse-battery"

#: Rows whose text tells of the machine and of nothing else.
OF_THE_MACHINE = {"versions", "memory", "processes", "locked memory", "ssh", "clock", "environment", "torch", "devices"}


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": search_path(), **environment}
    return subprocess.run(
        [sys.executable, "-m", *words], env=env, capture_output=True, text=True, timeout=HANG, cwd=ROOT
    )


def shape(text: str) -> str:
    """A text without what differs from machine to machine: numbers, sizes, names of interfaces."""
    text = " ".join(text.split())
    text = re.sub(r"interfaces: [\w, -]+|there is no other interface", "INTERFACES", text)
    text = re.sub(r"IPv4 and IPv6|IPv4, not by IPv6 \([^)]*\)", "KINDS", text)
    return re.sub(r"[\d,.]*\d|any number of", "N", re.sub(r"\b[MG]iB", "BYTES", text))


def of_page() -> dict[str, CheckRow]:
    """The rows that the page shows, by name."""
    block = re.search(r"(?ms)^    ok    versions .*?(?=^    All is well)", PAGE.read_text())
    assert block is not None
    rows: dict[str, CheckRow] = {}
    for line in block[0].splitlines():
        state, name, text = line[4:10].strip(), line[10:28].strip(), line[28:].strip()
        if state:
            rows[name] = CheckRow(name, state, text)
        elif text:
            last = next(reversed(rows))
            rows[last] = rows[last]._replace(found=f"{rows[last].found} {text}")
    return rows


def test_a_run_finds_what_the_page_shows(tmp_path: Path) -> None:
    done = run(
        "disttensor.doctor", "--json", DISTTENSOR_SECRET=SECRET, HOME=str(tmp_path / "somebody"), OMP_NUM_THREADS="1"
    )
    told = json.loads(done.stdout)
    found = {row["name"]: CheckRow(**row) for row in told["rows"]}
    assert SECRET not in done.stdout
    assert "DISTTENSOR_SECRET" in found["environment"].found
    assert "somebody" not in done.stdout
    wrong = [row for row in found.values() if row.state == WRONG]
    assert told["well"] is not bool(wrong)
    assert done.returncode == bool(wrong)
    assert all(row.do for row in wrong)
    # what is so on any machine that runs these tests
    for name in ("versions", "torch", "self-test", "channel tcp", "channel shm"):
        assert found[name].state in ((OK, NONE) if name == "torch" else (OK,)), found[name]
    assert f"disttensor {VERSION}, protocol {PROTOCOL}, Python " in found["versions"].found
    page = of_page()
    assert [*page] == [*found]
    for name, row in found.items():
        if name not in OF_THE_MACHINE and row.state == page[name].state:
            assert shape(" ".join(doctor.shown(row)[24:].split())) == shape(page[name].found), name


def test_an_error_does_not_name_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is what is sent to others."""
    monkeypatch.setattr(socket, "gethostname", lambda: "alices.lab.example")
    monkeypatch.setenv("HOME", "/data/alice")
    text = (
        "NodeLost: node 1 (host alices, pid 7) is lost: [alices] no /data/alice/x, no /home/alice/y; node 0 on "
        "alices.lab.example did not start: tcp://10.1.2.3:500 and [fe80::1]:80 fail, 127.0.0.1:5 and [::1]:5 do not; "
        "numpy 1.2.3.4, channel all"
    )
    assert doctor.without_names(text) == (
        "NodeLost: node 1 (host HOST, pid 7) is lost: [HOST] no ~/x, no /home/USER/y; node 0 on "
        "HOST did not start: tcp://ADDRESS:500 and ADDRESS:80 fail, 127.0.0.1:5 and [::1]:5 do not; "
        "numpy 1.2.3.4, channel all"
    )


def test_the_page_is_as_it_is_printed() -> None:
    rows = of_page()
    text = "\n".join(f"    {line}".rstrip() for row in rows.values() for line in doctor.shown(row).splitlines())
    shown = PAGE.read_text().split("    ok    versions", 1)[1].split("\n\n    All is well", 1)[0]
    assert re.sub(r"\s*>\s*|\s+", " ", text) == re.sub(r"\s*>\s*|\s+", " ", "    ok    versions" + shown)


def test_a_limit_that_is_too_low_is_found() -> None:
    """The rows of this process's own limits, with other limits."""
    rows = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (40, 40)); from disttensor.cli import doctor\n"
    code = rows + "print(*[row.state for row in doctor.limits() if row.name == 'descriptors'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, cwd=ROOT)
    assert done.stdout == "WRONG\n", done.stderr


@pytest.mark.parametrize(
    ("code", "found"),
    {
        "crashes": ("print('oh dear', file=sys.stderr, flush=True); os.abort()", "exit code -6: oh dear"),
        "hangs": ("signal.pause()", "it has not ended in 1 s: it has said nothing"),
        "ends": ("", ""),
    }.values(),
    ids=("crashes", "hangs", "ends"),
)
def test_a_trial_that_does_not_end_well_is_a_row(code: str, found: str) -> None:
    row = "dict(name='torch', state='ok', found='x', do='')"
    head = f"import json, os, signal, sys\nprint('noise'); print('disttensor-row ' + json.dumps({row}), flush=True)\n"
    patience = 1.0 if "pause" in code else HANG
    rows = list(doctor.tried([sys.executable, "-c", head + code], patience))
    assert rows[0] == CheckRow("torch", OK, "x")
    assert [row.state for row in rows[1:]] == ([WRONG] if found else [])
    assert all(found in row.found for row in rows[1:]), rows


STEPS = """
import json, os, signal, sys
names = ["one", "two", "three"]
for name in names[names.index(sys.argv[2]) + 1 if sys.argv[1:] else 0:]:
    step = dict(name=name, limit=LIMIT if name == "two" else 1000, do="mend " + name)
    print("disttensor-begins " + json.dumps(step), flush=True)
    if name == "two":
        CODE
    print("disttensor-row " + json.dumps(dict(name=name, state="ok", found=str(os.getpid()), do="")), flush=True)
"""


@pytest.mark.parametrize(
    ("code", "limit", "found"),
    {
        "crashes": ("print('oh dear', file=sys.stderr, flush=True); os.abort()", 1000, "with exit code -6: oh dear"),
        "hangs": ("signal.pause()", 0.5, "it has not ended in 1 s: it has said nothing"),
        "has broken its process": ("", 1000, ""),
    }.values(),
    ids=("crashes", "hangs", "has broken its process"),
)
def test_what_comes_after_a_step_that_goes_wrong_is_tried(code: str, limit: float, found: str) -> None:
    code = (
        code or "print('disttensor-row ' + json.dumps(dict(name=name, state='WRONG', found='', do='x'))); sys.exit(75)"
    )
    program = STEPS.replace("CODE", code).replace("LIMIT", str(limit))
    one, two, three = doctor.tried([sys.executable, "-c", program], HANG, 2.0)
    assert (one.name, one.state, three.name, three.state) == ("one", OK, "three", OK)
    assert one.found != three.found  # another process
    assert (two.name, two.state) == ("two", WRONG)
    assert found in two.found
    assert two.do == ("mend two" if found else "x")


def test_a_crash_at_the_end_is_no_row_s_twice() -> None:
    program = STEPS.replace("CODE", "pass").replace("LIMIT", "1000") + "if not sys.argv[1:]: os.abort()"
    rows = list(doctor.tried([sys.executable, "-c", program], HANG))
    assert [row.name for row in rows] == ["one", "two", "three", "after three"]
    assert "exit code -6" in rows[-1].found


def test_without_a_gpu_one_row_says_so() -> None:
    done = run("disttensor.doctor", "--gpu", "--json", CUDA_VISIBLE_DEVICES="")
    told = json.loads(done.stdout)
    assert (done.returncode, told["well"]) == (1, False)
    *_, last = (CheckRow(**row) for row in told["rows"])
    assert [row["name"] for row in told["rows"]] == ["versions", "environment", "GPUs"]
    assert last.state == WRONG
    assert last.found.startswith("torch sees no GPU, so none was tried: ")
    assert last.do
    if torch.version.cuda is None:
        block = re.search(r"(?m)(?:^    .*\n)+", PAGE.read_text().split("the exit code is 1:\n\n")[1])
        assert block is not None
        page, shown = (" ".join(text.split()) for text in (block[0], doctor.shown(last)))
        assert page.replace("2.13.0+cpu", torch.__version__) == shown


def test_the_page_has_each_step_of_the_gpus() -> None:
    shown = re.findall(r"(?m)^\| `([^`]+)` \| .* \| (\d+) s \|$", PAGE.read_text())
    assert shown == [(step.name, f"{step.limit:.0f}") for step, _ in gpu_trial.STEPS]
    # each step by its name, as a row leaves it eighteen columns, and what to do where it fails
    assert all(step.do and len(step.name) < 18 for step, _ in gpu_trial.STEPS)


def test_versions_are_printed() -> None:
    here, by_dtrun = run("disttensor"), run("dtrun", "--version")
    assert here.stdout == by_dtrun.stdout == versions.table() + "\n"
    assert (here.returncode, by_dtrun.returncode) == (0, 0)
    assert re.search(rf"(?m)^disttensor +{re.escape(VERSION)}\nprotocol +{PROTOCOL}\nPython +3\.", here.stdout)
    for name in ("torch", "pyzmq", "numpy", "system"):
        assert re.search(rf"(?m)^{name} +\S", here.stdout), name


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    """As ``| head -1``: what reads has closed its end before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "disttensor"], stdout=out, stderr=subprocess.PIPE, text=True, timeout=HANG, cwd=ROOT
        )
    assert (done.returncode, done.stderr) == (0, "")


if __name__ == "__main__":
    done = subprocess.run([sys.executable, "-m", "disttensor.doctor"], capture_output=True, text=True, cwd=ROOT)
    shown = "\n".join(f"    {line}".rstrip() for line in done.stdout.rstrip().splitlines())
    with contextlib.suppress(BrokenPipeError):
        text = re.sub(r"(?ms)^    ok    versions .*?^    All is well\.|^OUTPUT$", lambda _: shown, PAGE.read_text())
        PAGE.write_text(text)
