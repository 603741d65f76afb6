"""`python -O` takes asserts away: no guard is one, and strangers, liars and hostile bytes are refused as ever."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from limits import HANG
from sources import Source, product, refuse, source

#: Files in which those speak who must not be believed: of the quick ones the tests of rows are taken, else all.
QUICK = [
    "transport/test_transport_security.py",
    "transport/test_replies.py",
    "transport/test_tunnel.py",
    "channels/test_channel_tcp_faults.py",
    "unit/test_codec.py",
    "unit/test_executor.py",
    "unit/test_invitation.py",
    "launch/test_join.py",
]
SLOW = [
    "faults/test_attacked.py",
    "faults/test_other_user.py",
    "fuzz",
    "launch/test_hostile_agents.py",
    "launch/test_init_methods.py",
    "channels/test_protection.py",
]


@pytest.mark.fault(41)
@pytest.mark.timeout(300)  # for tools/ci/mutants.py as well, whose limit is less
@pytest.mark.parametrize(
    "suites", [QUICK, *(pytest.param([suite], marks=pytest.mark.slow) for suite in SLOW)], ids=["quick", *SLOW]
)
def test_hostile_suites(suites: list[str]) -> None:
    """In programs, nodes and tests alike. Asserts of tests stay: pytest makes other statements of them."""
    run = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    if suites is QUICK:
        run += ["-m", "fault and not (slow or netns or mpi or slurm or ssh or ray or gpu)"]
    without = ["-W", "ignore:assertions not in test modules"]  # as said of all that pytest does not rewrite
    environment = {**os.environ, "PYTHONOPTIMIZE": "1"}
    done = subprocess.run(
        [*run, *without, *(f"tests/{suite}" for suite in suites)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * HANG,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > (50 if suites is QUICK else 0)


FALSE = """
def test_false():
    assert __debug__, "asserts of the product are gone"
def test_kit():
    import transport_kit
    transport_kit.check(1, 2)
"""


def test_asserts_of_tests_stay_and_others_go(tmp_path: Path) -> None:
    """What the test above relies on."""
    (tmp_path / "test_false.py").write_text(FALSE)
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-c", os.devnull, "test_false.py"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "kit")},
    )  # fmt: skip
    assert "AssertionError: asserts of the product are gone" in done.stdout
    assert "AssertionError: 1 instead of 2" in done.stdout
    assert "2 failed" in done.stdout


#: Folders of what takes the bytes of others: no assert at all stands there.
GUARDS = tuple(
    f"runtime/{folder}"
    for folder in ("transport", "protocol", "channel/tcp", "channel/shm", "launch/tree", "launch/rendezvous", "master")
)


def narrows(test: ast.expr) -> bool:
    """Whether an assert only tells mypy a type: `x is not None`, `isinstance(x, Kind)`."""
    return bool(re.fullmatch(r"[\w.]+ is not None|isinstance\([\w.]+, \w+\)", ast.unparse(test)))


@pytest.mark.fault(41)
def test_no_check_is_an_assert() -> None:
    checks = (
        f"{file.at(node)}: {ast.unparse(node)}"
        for file in product()
        for node in file.nodes(ast.Assert)
        if not narrows(node.test) or guards(file)
    )
    refuse(checks, "no check is an assert, which python -O takes away")


def guards(file: Source) -> bool:
    return file.name.startswith(GUARDS)


def test_the_scan_finds_checks() -> None:
    text = "assert x is not None\nassert isinstance(self.y, Reg)\nassert n < 3, 'large'\nassert isinstance(x, A) or y"
    found = Source("program.py", text).nodes(ast.Assert)
    assert [node.lineno for node in found if not narrows(node.test)] == [3, 4]
    assert guards(source(ROOT / "runtime" / "transport" / "zmq.py"))
    assert not guards(source(ROOT / "runtime" / "node" / "executor.py"))
