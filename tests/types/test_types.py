"""What type checkers are told: right programs pass, and do at run time what their types say; wrong ones are rejected at
the line that is wrong.

A line that is wrong ends with what each checker calls that: ``# mypy: arg-type; pyright: reportArgumentType``. Each
checker looks at all files at once, with the options of setup.cfg and pyrightconfig.json, both of them strict.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from limits import HANG

import disttensor as dt

HERE = Path(__file__).parent
RIGHT, WRONG = (sorted((HERE / kind).glob("*.py")) for kind in ("right", "wrong"))
MARK = re.compile(r"  # mypy: ([\w-]+); pyright: (\w+)$")

#: What a checker has found: by file, by line, its names for it.
Found = dict[Path, dict[int, set[str]]]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=HANG,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )
    assert done.returncode == 1, done.stdout + done.stderr  # that of errors; others have checked nothing
    return done.stdout


def mypy() -> Found:
    found: Found = {}
    for line in run("mypy", "--no-pretty", *(str(path.relative_to(ROOT)) for path in [*RIGHT, *WRONG])).splitlines():
        if at := re.match(r"(.*?):(\d+): error: .*\[([\w-]+)\]$", line):
            found.setdefault(ROOT / at[1], {}).setdefault(int(at[2]), set()).add(at[3])
        else:
            assert ": note: " in line or line.startswith("Found "), line
    return found


def pyright() -> Found:
    found: Found = {}
    told = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(HERE)))
    assert told["summary"]["filesAnalyzed"] == len(RIGHT) + len(WRONG)
    for each in told["generalDiagnostics"]:
        line = each["range"]["start"]["line"] + 1
        found.setdefault(Path(each["file"]), {}).setdefault(line, set()).add(each.get("rule", each["message"]))
    return found


def expected(path: Path, checker: int) -> dict[int, str]:
    marks = {n: MARK.search(line) for n, line in enumerate(path.read_text().splitlines(), 1)}
    return {n: mark[checker] for n, mark in marks.items() if mark}


def test_there_are_as_many_as_were_asked_for() -> None:
    assert len(RIGHT) >= 12
    assert len(WRONG) >= 20
    assert all(expected(path, 1) for path in WRONG)
    assert not any(expected(path, 1) for path in RIGHT)


@pytest.mark.parametrize(("checker", "of"), [(1, mypy), (2, pyright)], ids=["mypy", "pyright"])
def test_right_programs_pass_and_wrong_ones_are_rejected_at_the_wrong_line(checker: int, of: Any) -> None:
    found = of()
    assert {path: found[path] for path in RIGHT if path in found} == {}
    for path in WRONG:
        wanted = expected(path, checker)
        there = found.get(path, {})
        assert there.keys() == wanted.keys(), (path.name, there)
        assert all(name in there[line] for line, name in wanted.items()), (path.name, wanted, there)
    assert {*found} == {*WRONG}  # and nothing of disttensor's own


# ---- what the right ones do ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        for node in range(2):  # what is made at first use
            torch.ones(1 << 20).to(f"node:{node}").to(f"node:{1 - node}").cpu()
        dt.fetch(torch.ones(1, device="node:0")).add_done_callback(lambda work: None)
        yield


def is_a(value: Any, form: Any) -> bool:
    """Whether a value is what a type says, as far down as it can be looked into."""
    kind, inner = typing.get_origin(form) or form, typing.get_args(form)
    if form is None:
        return value is None
    if kind in (types.UnionType, typing.Union):
        return any(is_a(value, one) for one in inner)
    if not isinstance(value, kind):
        return False
    if kind is tuple and inner[1:] != (...,):
        return len(value) == len(inner) and all(map(is_a, value, inner))
    if kind in (list, tuple):
        return all(is_a(each, inner[0]) for each in value)
    if isinstance(value, dt.futures.Work) and inner:
        return is_a(value.result(), inner[0])
    return True


@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_what_the_right_ones_assert_of_types_is_so(session: None, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At run time ``assert_type`` looks at nothing; here it does."""
    asked = []

    def assert_type(value: Any, form: Any) -> Any:
        asked.append(form)
        assert is_a(value, form), f"{value!r} is not a {form}"
        return value

    monkeypatch.setattr(typing, "assert_type", assert_type)
    runpy.run_path(str(path), run_name=path.stem)["main"]()
    dt.synchronize()
    assert asked


@pytest.mark.parametrize(
    ("value", "form"),
    [(1, str), ([1, "a"], list[int]), ((1,), tuple[int, str]), (None, int | str), ((1, 2), tuple[int]), (1.5, None)],
)
def test_what_is_not_so_would_be_found(value: Any, form: Any) -> None:
    assert not is_a(value, form)
