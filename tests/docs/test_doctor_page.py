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
from checkout import ROOT, search_path
from limits import HANG

from disttensor.cli import doctor, versions
from disttensor.cli.doctor import NONE, OK, WRONG, Row
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


def of_page() -> dict[str, Row]:
    """The rows that the page shows, by name."""
    block = re.search(r"(?ms)^    ok    versions .*?(?=^    All is well)", PAGE.read_text())
    assert block is not None
    rows: dict[str, Row] = {}
    for line in block[0].splitlines():
        state, name, text = line[4:10].strip(), line[10:28].strip(), line[28:].strip()
        if state:
            rows[name] = Row(name, state, text)
        elif text:
            last = next(reversed(rows))
            rows[last] = rows[last]._replace(found=f"{rows[last].found} {text}")
    return rows


def test_a_run_finds_what_the_page_shows(tmp_path: Path) -> None:
    done = run(
        "disttensor.doctor", "--json", DISTTENSOR_SECRET=SECRET, HOME=str(tmp_path / "somebody"), OMP_NUM_THREADS="1"
    )
    told = json.loads(done.stdout)
    found = {row["name"]: Row(**row) for row in told["rows"]}
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
    assert rows[0] == Row("torch", OK, "x")
    assert [row.state for row in rows[1:]] == ([WRONG] if found else [])
    assert all(found in row.found for row in rows[1:]), rows


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
