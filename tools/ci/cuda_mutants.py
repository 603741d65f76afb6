"""python tools/ci/cuda_mutants.py [--lines] [--list] [--runs 3] [--file PART...] [--test TEST...]

Deletes, one after the other, what orders the work of CUDA's streams and says on which device it is, in the files of
FILES: each call of ``wait_event``, ``wait_stream``, ``record_stream``, ``record`` and ``synchronize``, each ``with``
that enters a device, a stream or a capture, and each call of our own functions that do one of these. The tests of
tests/simcuda that come by the line have to notice: on devices whose streams are as late as can be, and whose memory is
poisoned. `make simcuda`'s environment runs it (docs/dev/simcuda.md):
``.venv-simcuda/bin/python tools/ci/cuda_mutants.py``.

A run of the tests first says which of them come by which line; a line that no test comes by is printed as such. The
smallest test of each line is tried (SMALLEST below), which has no session of processes; with ``--all`` all that come
by, in an hour or more. A deletion is tried up to ``--runs`` times, each with another seed for the delays. The exit code
is 0 where all are noticed that KEPT (below) does not explain. ``--file`` takes some of the deletions, ``--test`` some
of the tests, as for a new test.

With ``--lines`` nothing is deleted: it says which lines of the product that name ``torch.cuda`` no test comes by, of
those in BY (below), or of all with ``--all``. The exit code is 0 where UNSEEN (below) explains each of them.
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
#: Methods of CUDA's streams, events and tensors; and our own ones that call them, whose names nothing else has.
CALLS = {"wait_event", "wait_stream", "record_stream", "record", "synchronize"}
CALLS |= {"join_default", "follow_default", "take_over"}
#: What a ``with`` of a device, a stream or a capture calls.
GUARDS = {"torch.cuda.device", "torch.cuda.stream", "torch.cuda.graph"}
#: Tests that run torch alone come by none of it.
TESTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests" / "simcuda").glob("test_*.py")
    if path.name not in ("test_operators.py", "test_runtime.py", "test_torch_on_it.py")
)
_ORDER, _GRAPHS = "tests/simcuda/test_simcuda_order.py::test_order", "tests/simcuda/test_simcuda_graphs.py"
#: By the beginnings of sites' names: the test that takes the least time, of those that notice their deletion.
SMALLEST = {
    "runtime/channel/nccl/": f"{_ORDER}[nccl]",
    "runtime/channel/shm/cuda_ipc.py": f"{_ORDER}[ipc]",
    "runtime/host/cuda_devices.py": f"{_ORDER}[actors]",
    "runtime/node/actors.py": f"{_ORDER}[actors]",
    "runtime/node/graphs/engines/cuda.py": f"{_GRAPHS}::test_programs_of_two_devices_and_one_that_cannot_be_captured",
    "runtime/node/graphs/graphs.py::NodeGraphs._refill_outputs": f"{_ORDER}[outputs]",
    "runtime/node/graphs/graphs.py": f"{_ORDER}[replays]",
    "runtime/node/held.py": f"{_ORDER}[held]",
    "runtime/node/state.py::NodeState._swap": f"{_ORDER}[generators]",
    "runtime/node/state.py": f"{_ORDER}[synchronized]",
    "runtime/node/streams/cuda_lane.py::Cuda": f"{_ORDER}[lanes]",
    "runtime/node/streams/cuda_lane.py::wait": f"{_ORDER}[lanes]",
    "runtime/node/streams/cuda_lane.py": f"{_ORDER}[tensors]",
    "runtime/node/streams/scheduler.py::Scheduler._replay": f"{_ORDER}[replays]",
    "runtime/node/streams/": f"{_ORDER}[streams]",
}
#: Seconds for all tests once, and for those of one deletion: many a program hangs with it.
LIMIT_OF_ALL, LIMIT = 3600, 240
#: Seconds for a test without a deletion, which has its own limits for what hangs; and with one.
LIMIT_OF_A_TEST, HANG = 600, 120
#: Deletions that nothing can notice, with the reason why the call is there.
KEPT: dict[str, str] = {
    "runtime/node/streams/scheduler.py::Scheduler.idle: keep_for_default(tensor)": (
        "a node's new streams wait for the default one, so only a function's own stream could have the memory too early"
    ),
}

#: The files whose lines that name torch.cuda ``--lines`` looks for.
PRODUCT = ("disttensor/**/*.py", "runtime/**/*.py")
#: The tests that come by them, in minutes.
BY = [
    "tests/simcuda/test_nccl.py::test_the_data_channel",
    "tests/simcuda/test_scripts.py::test_a_session_has_a_node_for_each_gpu",
    "tests/simcuda/test_simcuda_doctor.py::test_the_row_of_the_devices_that_nodes_would_have",
    "tests/simcuda/test_simcuda_doctor.py::test_two_devices",
    f"{_GRAPHS}::test_programs_of_two_devices_and_one_that_cannot_be_captured",
    *(f"tests/simcuda/test_simcuda_nodes.py::test_program[{name}]" for name in ("generators", "shm", "shortage")),
    _ORDER,
]
#: Lines that no test comes by, with the reason.
UNSEEN: dict[str, str] = {}


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
    files = {path: ast.parse(path.read_bytes()) for pattern in FILES for path in sorted(root.glob(pattern))}
    ours: set[tuple[str, str]] = set()  #: modules and functions
    while True:  # who calls one of ours is one, too
        more = {
            (path.stem, node.name)
            for path, tree in files.items()
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and next(_within(node, "", _names(path.stem, tree, ours)), None) is not None
        }
        if more == ours:
            break
        ours = more
    found: list[Site] = []
    for path, tree in files.items():
        file = str(path.relative_to(root))
        for symbol, node, guard in _within(tree, "", _names(path.stem, tree, ours)):
            name = f"{file}::{symbol}: {ast.unparse(node)}"
            start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
            count = sum(site.name.partition(" #")[0] == name for site in found)
            found.append(Site(file, f"{name} #{count + 1}" if count else name, guard, start, end))
    return found


def lines(root: Path) -> list[Site]:
    """Returns the first place of each line where the product reads ``torch.cuda``. What only type checkers read does
    not count."""
    found: list[Site] = []
    for path in (path for pattern in PRODUCT for path in sorted(root.glob(pattern))):
        text = path.read_bytes()
        if b"torch.cuda" not in text:
            continue
        said, file = text.decode().splitlines(), str(path.relative_to(root))
        seen: set[int] = set()
        for symbol, node in sorted(_read(ast.parse(text), ""), key=lambda pair: (pair[1].lineno, pair[1].col_offset)):
            if node.lineno in seen:
                continue
            seen.add(node.lineno)
            name = f"{file}::{symbol}: {said[node.lineno - 1].strip()}"
            count = sum(site.name.partition(" #")[0] == name for site in found)
            start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
            found.append(Site(file, f"{name} #{count + 1}" if count else name, False, start, end))
    return found


_TORCH = ast.dump(ast.Name("torch", ast.Load()))


def _read(node: ast.AST, symbol: str) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        symbol = f"{symbol}.{node.name}".lstrip(".")
    if isinstance(node, ast.Attribute) and (node.attr, ast.dump(node.value)) == ("cuda", _TORCH):
        yield symbol, node
    if isinstance(node, ast.JoinedStr):  # one site: before Python 3.12 an f-string's parts may not have its quotes
        if any(next(_read(value, symbol), None) for value in node.values):
            yield symbol, node
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _read(child, symbol)


def _names(module: str, tree: ast.Module, ours: set[tuple[str, str]]) -> set[str]:
    """Returns how a module may call functions of ours: its own, imported ones, and those of imported modules."""
    names = {function for where, function in ours if where == module}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            where = (node.module or "").rpartition(".")[2]
            for alias in node.names:
                name = alias.asname or alias.name
                names |= {name} if (where, alias.name) in ours else set()
                names |= {f"{name}.{function}" for module, function in ours if module == alias.name}
    return names


def _within(node: ast.AST, symbol: str, ours: set[str], guard: bool = False) -> Iterator[tuple[str, ast.Call, bool]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        symbol = f"{symbol}.{node.name}".lstrip(".")
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        method = isinstance(node.func, ast.Attribute) and node.func.attr in CALLS
        if name in ours or (name in GUARDS if guard else method):
            yield symbol, node, guard
    for child in ast.iter_child_nodes(node):
        entered = isinstance(node, ast.withitem) and child is node.context_expr
        yield from _within(child, symbol, ours, entered)


def smallest(site: Site) -> str:
    """Returns the test of SMALLEST that a site has: the first whose key its name begins with."""
    return next((test for name, test in SMALLEST.items() if site.name.startswith(name)), "")


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

    def run(self, tests: Sequence[str], limit: float, deleted: bool = True, **env: str) -> dict[str, float]:
        """Runs tests, with something ``deleted`` up to the first that fails. Returns the seconds of each green one."""
        report = self._folder / "report"
        report.unlink(missing_ok=True)
        options = ["-q", "-n", "2", "-p", "no:cacheprovider", "-p", "cuda_mutants_report", "-m", "simcuda"]
        options += [f"--timeout={HANG}", "-x"] if deleted else [f"--timeout={LIMIT_OF_A_TEST}"]
        paths = os.pathsep.join([str(self._folder), str(self.copy.path)])
        with open(self._folder / "log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.copy.path,
                # bytecode is kept, as in simcuda.sh
                env={**self.copy.env, **env, "REPORT": str(report), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": ""},
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
            green = self.run(tests, LIMIT_OF_ALL, deleted=False, CAME=str(came))
        found: list[set[str]] = [set() for _ in every]
        for line in came.read_text().splitlines() if came.exists() else ():
            number, _, test = line.partition("\t")
            found[int(number)].add(test.rpartition(" ")[0])
        return [tests & green.keys() for tests in found], green

    def tell(self, seconds: dict[str, float], began: float) -> None:
        """Prints what ``come_by`` has found of the tests."""
        print(f"{len(seconds)} tests are green without a deletion, {time.monotonic() - began:.0f} s", flush=True)
        if self.red or not seconds:
            red = [f"RED WITHOUT A DELETION  {test}" for test in sorted(self.red)]
            print(self.tail(), *red, sep="\n", flush=True)

    def judge(self, site: Site, tests: Sequence[str], runs: int) -> str:
        """Says whether tests notice a deletion: "killed", "SURVIVED", or "NO TEST" where none comes by."""
        if not tests:
            return "NO TEST"
        with self.changed([(site, '__import__("contextlib").nullcontext()' if site.guard else "None")]):
            for seed in range(1, runs + 1):
                if len(self.run(tests, LIMIT, SIMCUDA_SEED=str(seed))) < len(tests):
                    return "killed"
        return "SURVIVED"


def _come_by_lines(every: Sequence[Site], chosen: Sequence[str]) -> int:
    """Prints the lines that none of these tests comes by. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="cuda-lines-") as folder:
        tests, began = Runs(Path(folder)), time.monotonic()
        came, seconds = tests.come_by(every, chosen)
        tests.tell(seconds, began)
    unseen = [site.name for site, by in zip(every, came, strict=True) if not by]
    for name in unseen:
        print(f"NO TEST  {name}  {UNSEEN.get(name, '')}".rstrip())
    seen = len(every) - len(unseen)
    print(f"{seen} of {len(every)} lines that name torch.cuda, {seen / max(1, len(every)):.1%}")
    return 1 if not seen or any(name not in UNSEEN for name in unseen) else 0


def main() -> int:
    """The exit code: 0 if all deletions are noticed."""
    parser = argparse.ArgumentParser(description="Deletes what orders CUDA's streams; tests have to notice.")
    parser.add_argument("--lines", action="store_true", help="says which lines no test comes by")
    parser.add_argument("--list", action="store_true", help="only says which these are")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs of the tests for each")
    parser.add_argument("--file", action="append", default=[], metavar="PART", help="only those whose name has it")
    parser.add_argument("--all", action="store_true", help="all tests that come by, and not only the smallest")
    parser.add_argument("--test", action="append", default=[], help="only these: files, or pytest's ids")
    options = parser.parse_args()
    found = lines(ROOT) if options.lines else sites(ROOT)
    every = [s for s in found if not options.file or any(part in s.name for part in options.file)]
    if options.list:
        print(*(site.name for site in every), sep="\n")
        return 0
    if options.lines:
        return _come_by_lines(every, options.test or (TESTS if options.all else BY))
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="cuda-mutants-") as folder:
        tests, began = Runs(Path(folder)), time.monotonic()
        few = not (options.all or options.test)
        chosen = sorted({smallest(site) for site in every} - {""}) if few else options.test or TESTS
        came, seconds = tests.come_by(every, chosen)
        tests.tell(seconds, began)
        for site, by in zip(every, came, strict=True):
            began = time.monotonic()
            by = by & {smallest(site)} if few else by
            verdicts.append(tests.judge(site, sorted(by, key=lambda test: seconds[test]), options.runs))
            took = f"({len(by)} tests, {time.monotonic() - began:.0f} s)"
            print(f"{verdicts[-1]}  {site.name}  {took}  {KEPT.get(site.name, '')}".rstrip(), flush=True)
    print(*(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted({*verdicts})), sep=", ")
    unexplained = [v for v, site in zip(verdicts, every, strict=True) if v != "killed" and site.name not in KEPT]
    return 1 if unexplained or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
