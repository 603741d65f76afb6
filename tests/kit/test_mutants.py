"""tools/ci/mutants.py on a small tree: what it takes for a proof, and what not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import KIT, ROOT
from mutations import Product, read_all
from processes import alive_after

TOOL = ROOT / "tools" / "ci" / "mutants.py"
FILE = "disttensor/__init__.py"
PRODUCT = """\
import os

def half(n):
    if n % 2:
        raise ValueError("odd")
    return n // 2
"""
TESTS = """\
import os
import subprocess

import disttensor
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_odd(n):
    if n % 2:
        with pytest.raises(ValueError):
            disttensor.half(n)

def test_half():
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(os.environ["LEFT"], "a") as file:
        print(left.pid, file=file)
    assert disttensor.half(4) == 2

class TestInAClass:
    def test_quarter(self):
        assert disttensor.half(disttensor.half(4)) == 1

@pytest.fixture
def checked():
    yield
    assert disttensor.half(4) == 2

def test_teardown(checked):
    pass

@pytest.fixture
def needed():
    return 1 // (disttensor.half(4) - 1)

def test_setup(needed):
    pass

def test_false():
    assert False

@pytest.mark.slow
def test_slow():
    assert disttensor.half(4) == 2
"""
SETTINGS = """\
[tool:pytest]
addopts = -m "not slow"
markers =
    slow: takes long
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A product, its tests, and no mutant yet. Nothing of it is committed."""
    for name, text in {FILE: PRODUCT, "dtrun.py": "", "setup.cfg": SETTINGS, "tests/test_half.py": TESTS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests" / "mutants").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for path in (TOOL, KIT / "mutations.py", KIT / "checkout.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path


def put(
    tree: Path,
    name: str,
    old: str,
    new: str,
    *red: str,
    symbol: str = "::half",
    file: str = FILE,
    needs: str = "",
    tests: str = "tests/test_half.py",
) -> None:
    """A mutant that puts ``new`` in the place of ``old``."""
    said = ["What: it is broken", *(f"Red: {tests}::{test}" for test in red)]
    said += [f"Needs: {needs}"] if needs else []
    said += ["", f"In: {file}{symbol}", f"-{old}", f"+{new}", ""]
    (tree / "tests" / "mutants" / f"{name}.txt").write_text("\n".join(said))


def mutants(tree: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of the tool, and what it prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LEFT": str(tree / "left")}
    command = [sys.executable, str(tree / "tools" / "ci" / "mutants.py"), *arguments]
    said = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    return said.returncode, said.stdout + said.stderr


def test_what_is_noticed(tree: Path) -> None:
    put(tree, "guard", "n % 2", "False", "test_odd")
    put(tree, "result", "n // 2", "n // 2 + 1", "test_half", "test_teardown", "TestInAClass::test_quarter")
    code, said = mutants(tree)
    assert code == 0, said
    assert "killed  guard  (1 of 1 red" in said
    assert "killed  result  (3 of 3 red" in said
    assert "2 killed, 0 survived, 0 errors" in said
    assert (tree / FILE).read_text() == PRODUCT
    left = (tree / "left").read_text().split()
    assert len(left) == 2
    assert not alive_after(2.0, map(int, left))


def test_what_needs_more_than_make_test_has_is_tried_by_its_name(tree: Path) -> None:
    put(tree, "long", "n // 2", "n", "test_slow", needs="slow")
    code, said = mutants(tree)
    assert (code, "killed  " in said) == (0, False), said
    assert "not tried  long  it needs slow" in said
    code, said = mutants(tree, "long")
    assert (code, "killed  long" in said) == (0, True), said


@pytest.mark.slow
def test_what_is_not(tree: Path) -> None:
    put(tree, "survivor", "n % 2", "False", "test_odd", "test_half")
    put(tree, "stale", 'ValueError("even")', "ValueError()", "test_odd")
    put(tree, "grammar", "return n // 2", "continue", "test_odd")
    put(tree, "import", "import os", "import nothing_of_this_name", "test_odd", symbol="")
    put(tree, "name", "n // 2", "nobody // 2", "test_half")
    put(tree, "fixture", "n // 2", "n // 4", "test_setup")
    put(tree, "good", "n // 2", "n", "test_half")
    code, said = mutants(tree, "--jobs", "2")
    assert code == 1
    lines = said.splitlines()
    assert any(line.startswith("SURVIVED  survivor  (1 of 2 red") and line.endswith("::test_half") for line in lines)
    assert any(line.startswith("DOES NOT APPLY  stale") for line in lines)
    for name in ("grammar", "import", "name", "fixture"):
        assert any(line.startswith(f"NO PROOF  {name}  ") for line in lines), said
    assert any(line.startswith("killed  good") for line in lines), "what came before is undone"
    assert "1 killed, 1 survived, 5 errors" in said


@pytest.mark.parametrize(
    ("test", "why"),
    [("test_false", "RED WITHOUT ANY MUTANT  tests/test_half.py::test_false"), ("test_gone", "not found")],
)
def test_what_is_named_has_to_be_green(tree: Path, test: str, why: str) -> None:
    put(tree, "guard", "n % 2", "False", "test_odd", test)
    code, said = mutants(tree)
    assert code == 1
    assert why in said
    assert "killed  guard" not in said


def test_tests_are_run_in_the_order_of_their_file(tree: Path) -> None:
    (tree / "tests" / "test_order.py").write_text(
        "import disttensor\nran = []\n\ndef test_z():\n    assert disttensor.half(4) == 2 and not ran\n\n"
        "class TestA:\n    def test_it(self):\n        ran.append(disttensor.half(2))\n        assert ran == [1]\n"
    )
    put(tree, "good", "n // 2", "n", "TestA::test_it", "test_z", tests="tests/test_order.py")
    code, said = mutants(tree)
    assert (code, "killed  good" in said) == (0, True), said


def test_a_named_test_that_is_red_keeps_no_other_mutant_from_a_verdict(tree: Path) -> None:
    put(tree, "guard", "n % 2", "False", "test_odd", "test_false")
    put(tree, "good", "n // 2", "n", "test_half")
    code, said = mutants(tree)
    assert code == 1
    assert "NO PROOF  guard  red without it: tests/test_half.py::test_false" in said
    assert "killed  good" in said
    assert "1 killed, 0 survived, 1 errors" in said


def test_mutants_have_a_form(tree: Path) -> None:
    put(tree, "tests", "assert False", "assert True", "test_false", file="tests/test_half.py")
    assert "tests/test_half.py is not of the product" in mutants(tree)[1]
    put(tree, "tests", "n // 2", "n")
    code, said = mutants(tree, "--list")
    assert code == 2
    assert 'tests.txt: it needs one line "What: ...", lines "Red: ..." and "In: ..." with an edit below' in said
    put(tree, "tests", "n // 2", "n", "test_half")
    assert mutants(tree, "--list") == (0, "tests: it is broken\n    tests/test_half.py::test_half\n")
    assert "there is no mutant gone" in mutants(tree, "gone")[1]


def test_each_is_a_program() -> None:
    """Seen at once, not when `make mutants` runs. (That its code is in the product: tests/unit/test_mutations.py.)"""
    product, wrong = Product(ROOT), []
    for mutant in read_all(ROOT):
        try:
            product.broken(mutant)
        except ValueError as error:
            wrong.append(f"{mutant.name}: {error}")
    assert wrong == []
