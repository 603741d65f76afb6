"""docs/dev/gpu.md: what ran on a GPU, on simulated devices, and nowhere; and the rows that `make gpu` prints."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT
from limits import HANG
from sources import below

from disttensor.cli import gpu_trial
from disttensor.cli.doctor import OK, CheckRow, shown

PAGE = ROOT / "docs" / "dev" / "gpu.md"
TABLE = ROOT / "tools" / "ci" / "gpu_table.py"
HEAD = "| what | run by | on a GPU | simulated | never |"


def rows(text: str) -> list[list[str]]:
    lines = text.split(HEAD, 1)[1].splitlines()[2:]
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines if line.startswith("| ")]


ROWS = rows(PAGE.read_text())


def named(cell: str) -> list[str]:
    return re.findall(r"`(tests/[^`]+)`", cell)


@cache
def marks_of(path: Path) -> dict[str, set[str]]:
    """The marks of each test of a file, its file's among them."""

    def of(node: ast.AST) -> set[str]:
        return set(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node)))

    body = ast.parse(path.read_text()).body
    whole = {m for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark" for m in of(n)}
    tests = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    return {n.name: whole.union(*map(of, n.decorator_list)) for n in tests if n.name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_each_cell_says_what_is_there(row: list[str]) -> None:
    _, by, on_a_gpu, simulated, never = row
    assert on_a_gpu == "never" or re.fullmatch(r"20\d\d-\d\d-\d\d, \d+ x \S.*", on_a_gpu)
    assert simulated == "-" or named(simulated)
    assert never, 'what has run nowhere; "-" if that is nothing'
    assert never.startswith("all of it") is (on_a_gpu == "never" and simulated == "-")
    for test in named(simulated):
        file, _, name = test.partition("::")
        assert "simcuda" in marks_of(ROOT / file)[name], test
    for file in named(by):
        assert "gpu" in set().union(*marks_of(ROOT / file).values()), file
    steps = re.findall(r"`([^`]+)`", by.partition("the doctor's ")[2])
    assert set(steps) <= {step.name for step, _ in gpu_trial.STEPS} - {"GPUs"}
    assert named(by) or steps or by == "-"


def test_whatever_is_marked_has_a_row() -> None:
    files = {file.path for file in below("tests") if "pytest.mark.gpu" in file.text}
    marked = {str(path.relative_to(ROOT)) for path in files if "gpu" in set().union(*marks_of(path).values())}
    assert marked == {file for row in ROWS for file in named(row[1])}
    steps = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1].partition("the doctor's ")[2])}
    # of the first one, and of peers and streams alone, which other rows stand on
    assert steps == {step.name for step, _ in gpu_trial.STEPS} - {"GPUs", "peer access"}


def test_nothing_claims_what_never_was() -> None:
    ran = [row for row in ROWS if row[2] != "never"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert ("**No row has ever run on a GPU.**" in PAGE.read_text()) is (not ran)
    assert ("has never run on a GPU" in readme) is (not ran)


#: By the README's words for what is simulated: a word of the rows that it stands for.
SAID = {
    "nodes bound to GPUs": "bound",
    "copies": "CUDA IPC",
    "streams": "streams",
    "CUDA graphs": "CUDA graphs",
    "NCCL": "NCCL, of",
    "memory": "memory_allocated",
    "training": "training",
}


def test_the_readme_says_which_column_holds_for_what() -> None:
    """In one sentence, which names the three, and nothing that its column does not have."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    sentence = next(s for s in re.split(r"(?<=[.:]) ", readme) if "docs/dev/gpu.md" in s)
    of = re.fullmatch(r".*?\*on a GPU\* holds for (.+), \*simulated\* for (.+), \*never\* for (.+)\.", sentence)
    assert of, sentence
    assert (of[1] == "nothing yet") is all(row[2] == "never" for row in ROWS)
    assert re.split(", | and ", of[2]) == [*SAID]
    for word in SAID.values():
        found = [row for row in ROWS if word in row[0]]
        assert found, word
        assert all(named(row[3]) for row in found), word
    for word in ("speed", "kernels"):
        assert word in of[3]
        assert any(word in row[4] or (word in row[0] and row[4].startswith("all of it")) for row in ROWS), word


def printed(tmp_path: Path, device: str, doctor: str, tests: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "doctor").write_text(doctor)
    (tmp_path / "tests").write_text(tests)
    words = [sys.executable, str(TABLE), device, str(tmp_path / "doctor"), str(tmp_path / "tests")]
    return subprocess.run(words, capture_output=True, text=True, timeout=HANG)


WELL = "".join(f"{shown(CheckRow(step.name, OK, 'something'))}\n" for step, _ in gpu_trial.STEPS)
CASE = '<testcase classname="{}" name="test_it">{}</testcase>'
REPORT = "<testsuites><testsuite>{}</testsuite></testsuites>"


def test_rows_are_dated_where_all_was_well(tmp_path: Path) -> None:
    """One file has failed, one was skipped, one has a class; one of the doctor's rows is not sure, one is wrong."""
    fate = {
        "tests.graphs.test_engine_cuda": "",
        "tests.launch.test_binding.TestClass": "",
        "tests.streams.test_streams_cuda": "<failure/>",
        "tests.channels.test_channel_nccl": "<skipped/>",
        "tests.channels.test_channel_cuda_ipc": "",
    }
    report = REPORT.format("".join(CASE.format(*each) for each in fate.items()))
    told = WELL.replace("ok    speed", "-     speed").replace("ok    training", "WRONG training")
    done = printed(tmp_path, "2 x NVIDIA H100", told, report)
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert [row[:2] + row[3:] for row in found] == [row[:2] + row[3:] for row in ROWS]
    changed = {row[1] for row, before in zip(found, ROWS, strict=True) if row != before}
    dates = {row[2] for row in found} - {"never"}
    assert len(dates) == 1
    assert re.fullmatch(r"20\d\d-\d\d-\d\d, 2 x NVIDIA H100", dates.pop())
    assert changed == {
        "the doctor's `numbers`",
        "`tests/launch/test_binding.py`, the doctor's `nodes`",
        "`tests/channels/test_channel_cuda_ipc.py`, the doctor's `CUDA IPC` and `channel shm`",
        "the doctor's `channel tcp`",
        "`tests/graphs/test_engine_cuda.py`, the doctor's `CUDA graphs` and `graphs of nodes`",
        "the doctor's `memory of nodes`",
    }
    alone = rows(printed(tmp_path, "1 x NVIDIA H100", WELL, report).stdout)
    assert "1 x" in next(row[2] for row in alone if row[1].endswith("where there is one GPU"))


#: Stands for the Python of a machine with two GPUs, and answers what gpu.sh asks of it.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    *is_available*) [ "$GPUS" = 2 ] ;;
    *get_device_name*) echo "2 x NVIDIA H100" ;;
    "-m disttensor.doctor --gpu") cat "$FOLDER/doctor"; exit "$DOCTOR" ;;
    "-m pytest -q -m gpu --junitxml="*) all=$*; cp "$FOLDER/tests" "${all##*=}"; exit "$TESTS" ;;
    tools/ci/gpu_table.py*) exec "$REAL" "$@" ;;
    *) echo "asked for $*" >&2; exit 99 ;;
esac
"""


@pytest.mark.parametrize(("doctor", "tests", "code"), [(0, 0, 0), (1, 0, 1), (0, 1, 1)])
def test_make_gpu_prints_the_rows(tmp_path: Path, doctor: int, tests: int, code: int) -> None:
    """Whatever the doctor and the tests find; what is not well is its exit code."""
    done = made_gpu(tmp_path, DOCTOR=doctor, TESTS=tests)
    assert done.returncode == code, done.stderr
    told, _, table = done.stdout.partition("The table of docs/dev/gpu.md:")
    assert WELL in told
    dated = [row[1] for row in rows(table) if row[2].endswith(", 2 x NVIDIA H100")]
    assert "`tests/launch/test_binding.py`, the doctor's `nodes`" in dated
    assert "the doctor's `speed`" in dated
    assert not any("test_engine_cuda" in by for by in dated)


def test_make_gpu_says_that_there_is_none(tmp_path: Path) -> None:
    done = made_gpu(tmp_path, GPUS=0)
    assert done.returncode == 0, done.stderr
    assert "NOT TESTED: CUDA (torch sees no device)" in done.stderr
    assert not done.stdout


def made_gpu(tmp_path: Path, **settings: int) -> subprocess.CompletedProcess[str]:
    """What `make gpu` runs, on such a machine: all of the doctor's rows are well, and one file of tests."""
    (tmp_path / "doctor").write_text(WELL)
    (tmp_path / "tests").write_text(REPORT.format(CASE.format("tests.launch.test_binding", "")))
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    env = {**os.environ, "GPUS": "2", "FOLDER": str(tmp_path), "REAL": sys.executable}
    env |= {name: str(value) for name, value in settings.items()}
    return subprocess.run(
        [str(ROOT / "tools" / "ci" / "gpu.sh"), str(python)], env=env, capture_output=True, text=True, timeout=HANG
    )


def test_simulated_devices_date_nothing(tmp_path: Path) -> None:
    done = printed(tmp_path, "1 x simcuda device 0", WELL, REPORT.format(""))
    assert done.returncode == 1
    assert "these devices are simulated" in done.stderr
