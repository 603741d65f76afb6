"""python tools/ci/cuda_mutants.py [--list] [--runs 3] [--file PART...] [--test TEST...]

Deletes, one after the other, what orders the work of CUDA's streams and says on which device it is: each call of
``wait_event``, ``wait_stream``, ``record_stream``, ``record``, ``synchronize`` and ``finish``, and each ``with`` that
enters a device, a stream or a capture, in the files of FILES. The tests of tests/simcuda that come by the line have to
notice: on devices whose streams are as late as can be, and whose memory is poisoned. `make simcuda`'s environment runs
it (docs/dev/simcuda.md): ``.venv-simcuda/bin/python tools/ci/cuda_mutants.py``.

A run of the tests first says which of them come by which line; a line that no test comes by is printed as such. A
deletion is tried up to ``--runs`` times, each with another seed for the delays. The exit code is 0 where all are
noticed that KEPT (below) does not explain. ``--file`` takes some of the deletions, ``--test`` some of the tests, as for
a new test, or where nobody can wait for all of them.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kit"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkout import ROOT
from mutants import Copy
from simcuda_kit import libraries

FILES = ("runtime/channel/**/*.py", "runtime/node/**/*.py", "runtime/host/cuda_devices.py")
CALLS = {"wait_event", "wait_stream", "record_stream", "record", "synchronize", "finish"}
#: What a ``with`` of a device, a stream or a capture calls.
GUARDS = {"torch.cuda.device", "torch.cuda.stream", "torch.cuda.graph", "cuda_lane.on", "cuda_devices.on"}
#: Tests that run torch alone come by none of it.
TESTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests" / "simcuda").glob("test_*.py")
    if path.name not in ("test_operators.py", "test_runtime.py", "test_torch_on_it.py")
)
#: Seconds for all tests once, and for those of one deletion: many a program hangs with it.
LIMIT_OF_ALL, LIMIT = 3600, 240
#: Deletions that nothing can notice, with the reason why the call is there.
KEPT: dict[str, str] = {}


class Site(NamedTuple):
    """A call, or the expression that a ``with`` enters, as (line, column) of its text. ``name``: the file, the symbol
    and the code, which stay where lines are added."""

    file: str
    name: str
    guard: bool
    start: tuple[int, int]
    end: tuple[int, int]


def sites(root: Path) -> list[Site]:
    """Returns all that may be deleted, by the rule."""
    found = []
    for pattern in FILES:
        for path in sorted(root.glob(pattern)):
            file = str(path.relative_to(root))
            for symbol, node, guard in _within(ast.parse(path.read_bytes()), ""):
                name = f"{file}::{symbol}: {ast.unparse(node)}"
                start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
                count = sum(site.name.partition(" #")[0] == name for site in found)
                found.append(Site(file, f"{name} #{count + 1}" if count else name, guard, start, end))
    return found


def _within(node: ast.AST, symbol: str) -> Iterator[tuple[str, ast.expr, bool]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        symbol = f"{symbol}.{node.name}".lstrip(".")
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in CALLS:
        yield symbol, node, False
    if isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func) in GUARDS:
                yield symbol, item.context_expr, True
    for child in ast.iter_child_nodes(node):
        yield from _within(child, symbol)


def replaced(text: bytes, changes: Sequence[tuple[Site, str]]) -> bytes:
    """Returns the text with other code in place of sites; ``{}`` is what stood there."""
    lines = text.split(b"\n")

    def at(place: tuple[int, int]) -> int:
        return sum(len(line) + 1 for line in lines[: place[0] - 1]) + place[1]

    for site, code in sorted(changes, key=lambda change: change[0].start, reverse=True):
        start, end = at(site.start), at(site.end)
        text = text[:start] + code.encode().replace(b"{}", text[start:end]) + text[end:]
    return text


#: Says to the file CAME that a test comes by a site: its name is in the environment of all its processes.
_SAYS = """(open(__import__("os").environ["CAME"], "a").write(
    f"%d\\t{__import__('os').environ.get('PYTEST_CURRENT_TEST', '')}\\n"), {})[1]"""

#: A plugin that writes what a run has found.
_PLUGIN = """
import os
def pytest_runtest_logreport(report):
    with open(os.environ["REPORT"], "a") as file:
        print(report.when, report.outcome, report.duration, report.nodeid, sep="\\t", file=file)
"""


class Runs:
    """The tests of tests/simcuda, in a copy of the tree."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.red: set[str] = set()  #: tests of the last run that were not green
        self.copy = Copy(ROOT, folder / "copy")
        (ROOT / "build").mkdir(exist_ok=True)
        (self.copy.path / "build").symlink_to(ROOT / "build")
        libraries()  # the simulated runtime is built once, and no test waits for it
        self.copy.check_imports()
        (folder / "cuda_mutants_report.py").write_text(_PLUGIN)

    def run(self, tests: Sequence[str], limit: float, stop: bool = False, **env: str) -> dict[str, float]:
        """Runs tests, with ``stop`` up to the first that fails. Returns the seconds of each that was green."""
        report = self._folder / "report"
        report.unlink(missing_ok=True)
        options = ["-q", "-n", "2", "-p", "no:cacheprovider", "-p", "cuda_mutants_report", "-m", "simcuda"]
        options += ["--timeout=120", *(["-x"] if stop else [])]
        paths = os.pathsep.join([str(self._folder), str(self.copy.path)])
        with open(self._folder / "log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.copy.path,
                env={**self.copy.env, **env, "REPORT": str(report), "PYTHONPATH": paths},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            with suppress(subprocess.TimeoutExpired):  # what has no report was not green
                process.wait(limit)
            self.copy.end(process)
        said = [line.split("\t") for line in report.read_text().splitlines()] if report.exists() else []
        self.red = red = {test for _, outcome, _, test in said if outcome != "passed"}
        return {test: float(took) for when, _, took, test in said if when == "call" and test not in red}

    def tail(self) -> str:
        """Returns the end of what the last run has printed."""
        return "\n".join((self._folder / "log").read_text(errors="replace").splitlines()[-40:])

    @contextmanager
    def changed(self, changes: Sequence[tuple[Site, str]]) -> Iterator[None]:
        """While it lasts, other code stands in place of sites."""
        before = []
        try:
            for file in {site.file for site, _ in changes}:
                path = self.copy.path / file
                before.append((path, path.read_bytes(), path.stat()))
                path.write_bytes(replaced(before[-1][1], [change for change in changes if change[0].file == file]))
            yield
        finally:
            for path, text, status in before:
                path.write_bytes(text)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def come_by(self, every: Sequence[Site], tests: Sequence[str]) -> tuple[list[set[str]], dict[str, float]]:
        """Runs all these tests. Returns by site which of them come by it, and the seconds of each that was green."""
        came = self._folder / "came"
        with self.changed([(site, _SAYS % number) for number, site in enumerate(every)]):
            green = self.run(tests, LIMIT_OF_ALL, CAME=str(came))
        found: list[set[str]] = [set() for _ in every]
        for line in came.read_text().splitlines() if came.exists() else ():
            number, _, test = line.partition("\t")
            found[int(number)].add(test.rpartition(" ")[0])
        return [tests & green.keys() for tests in found], green

    def judge(self, site: Site, tests: Sequence[str], runs: int) -> str:
        """Says whether tests notice a deletion: "killed", "SURVIVED", or "NO TEST" where none comes by."""
        if not tests:
            return "NO TEST"
        with self.changed([(site, '__import__("contextlib").nullcontext()' if site.guard else "None")]):
            for seed in range(1, runs + 1):
                if len(self.run(tests, LIMIT, stop=True, SIMCUDA_SEED=str(seed))) < len(tests):
                    return "killed"
        return "SURVIVED"


def main() -> int:
    """The exit code: 0 if all deletions are noticed."""
    parser = argparse.ArgumentParser(description="Deletes what orders CUDA's streams; tests have to notice.")
    parser.add_argument("--list", action="store_true", help="only says what would be deleted")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs of the tests for each")
    parser.add_argument("--file", action="append", default=[], metavar="PART", help="only those whose name has it")
    parser.add_argument("--test", action="append", default=[], help="only these: files, or pytest's ids")
    options = parser.parse_args()
    every = [s for s in sites(ROOT) if not options.file or any(part in s.name for part in options.file)]
    if options.list:
        print(*(site.name for site in every), sep="\n")
        return 0
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="cuda-mutants-") as folder:
        tests, began = Runs(Path(folder)), time.monotonic()
        came, seconds = tests.come_by(every, options.test or TESTS)
        print(f"{len(seconds)} tests are green without a deletion, {time.monotonic() - began:.0f} s", flush=True)
        if tests.red or not seconds:
            red = [f"RED WITHOUT A DELETION  {test}" for test in sorted(tests.red)]
            print(tests.tail(), *red, sep="\n", flush=True)
        for site, by in zip(every, came, strict=True):
            began = time.monotonic()
            verdicts.append(tests.judge(site, sorted(by, key=lambda test: seconds[test]), options.runs))
            took = f"({len(by)} tests, {time.monotonic() - began:.0f} s)"
            print(f"{verdicts[-1]}  {site.name}  {took}  {KEPT.get(site.name, '')}".rstrip(), flush=True)
    print(*(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted({*verdicts})), sep=", ")
    unexplained = [v for v, site in zip(verdicts, every, strict=True) if v != "killed" and site.name not in KEPT]
    return 1 if unexplained or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
