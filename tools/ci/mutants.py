"""python tools/ci/mutants.py [NAME...] [--jobs N] [--list]

Breaks the product in a copy of this tree, by one mutant of tests/mutants/ after the other, and expects the tests to
notice.

A mutant says what it breaks ("What: the barrier returns at once") and which tests find it, a line for each ("Red:
tests/unit/test_codec.py::test_bounds"), and perhaps which rows of docs/dev/ROWS.md ("Row: T3"), which is
tests/kit/rows.py's to read, and what the tests need that `make test` has not ("Needs: slurm"): such a mutant is only
tried when it is named. Below stand its edits: a symbol, the code that is there and what is put in its place
(tests/kit/mutations.py). Each of the tests must be green without the mutant and must fail with it:
one that stays green makes it a survivor. A test that is named without its parameters fails if any of its
variants does. The exit code is 0 if all mutants were noticed.

An error that is not the test's own is no proof, and is listed as such: a mutant whose code is not there, a module that
can't be imported, a fixture that fails by anything but an assertion, a run that ends without a report. A hang counts
where pytest-timeout made it a failure. tests/mutants/README.md says how to add a mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kit"))

from checkout import ROOT
from mutations import Mutant, Product, read_all

#: Seconds that a test may take, unless it says otherwise itself: many a broken program hangs. And one of an engine's: a
#: session on simulated GPUs begins with 15 s of work.
HANG, HANG_OF_ENGINES = 30, 120
#: Seconds for the tests of one mutant, and for all tests together without any.
LIMIT, LIMIT_OF_ALL = 180, 1800
#: Errors of a program that is no program any more.
NO_PROGRAM = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError")
#: What a fixture raises that found something, in junit's words for it. (A hang in one may be anybody's.)
FOUND = re.compile(r'failed on (setup|teardown) with "(AssertionError|assert |Failed: (?!Timeout))')


class NoProofError(Exception):
    """A run says nothing about the tests."""


class Copy:
    """A copy of a tree, with what is not committed."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.path = folder / "tree"
        self._report = folder / "report.xml"
        self._log = folder / "log"
        folder.mkdir()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "PYTEST_"))}
        self.env.update(PYTHONPATH=str(self.path), GIT_CEILING_DIRECTORIES=str(folder))
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listing, cwd=root, text=True).split("\0"):
            if name and os.path.lexists(root / name):
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name, follow_symlinks=False)

    def check_imports(self) -> None:
        """Raises NoProofError unless programs import the copy: another tree may be installed."""
        program = "import disttensor, dtrun; print(disttensor.__file__, dtrun.__file__, sep='\\n')"
        said = subprocess.run(
            [sys.executable, "-c", program], cwd=self.path.parent, env=self.env, capture_output=True, text=True
        )
        if said.returncode or any(not Path(file).is_relative_to(self.path) for file in said.stdout.split()):
            raise NoProofError(f"the copy in {self.path} is not what is imported: {said.stdout}{said.stderr}")

    @contextlib.contextmanager
    def broken_by(self, mutant: Mutant) -> Iterator[None]:
        """While it lasts, the mutant is in the copy. Raises ValueError if its code is not there."""
        broken = {self.path / name: text for name, text in Product(self.path).broken(mutant).items()}
        before = [(file, file.read_bytes(), file.stat()) for file in broken]
        try:
            for file, text in broken.items():
                file.write_bytes(text)
            yield
        finally:
            for file, text, status in before:
                file.write_bytes(text)
                # with its old time, or what Python has cached of the broken one could be taken for its own
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run(self, tests: Sequence[str], limit: float, all_marks: bool = False) -> dict[str, bool]:
        """Runs tests (slow ones and engines' too with ``all_marks``): whether each was red, by its id.

        In the order of their files: what is to be without a session stands above what has the file's. Raises
        NoProofError.
        """
        tests = sorted(tests, key=self._place)
        self._report.unlink(missing_ok=True)
        hang = HANG_OF_ENGINES if all_marks else HANG
        options = ["-q", "-o", "junit_family=xunit1", "--tb=short", f"--timeout={hang}"]
        options += [f"-pno:{name}" for name in ("cacheprovider", "hypothesispytest")]  # the latter takes a second
        options += ["-m", ""] if all_marks else []
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={self._report}", *tests]
        with open(self._log, "w") as log:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=self.env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise NoProofError(f"the run did not end within {limit} s\n{self._tail()}") from None
            finally:
                self.end(process)
        if code not in (0, 1) or not self._report.exists():
            raise NoProofError(f"pytest ended with code {code}\n{self._tail()}")
        cases = [(_id(case), case) for case in ElementTree.parse(self._report).iter("testcase")]
        found = {}
        for test in tests:
            variants = [case for id, case in cases if id == test or id.startswith(f"{test}[")]
            if not variants:
                raise NoProofError(f"{test} is not run\n{self._tail()}")
            found[test] = _red(test, variants)
        return found

    def _place(self, test: str) -> tuple[str, int, str]:
        """Where a test stands: its file and line."""
        name, *inside = test.partition("[")[0].split("::")
        body: Sequence[ast.stmt] = (
            ast.parse((self.path / name).read_bytes()).body if (self.path / name).exists() else ()
        )
        line = 0
        for part in inside:
            found = [each for each in body if getattr(each, "name", "") == part]
            line, body = (found[-1].lineno, getattr(found[-1], "body", ())) if found else (0, ())
        return name, line, test

    def _tail(self) -> str:
        return "\n".join(f"    {line}" for line in self._log.read_text(errors="replace").splitlines()[-40:])

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kills what a run has left, in sessions of its own too: all that knows the copy."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.fsencode(self.path) in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)


def _id(case: ElementTree.Element) -> str:
    """The id of a test, for pytest, from what its report says."""
    file, inside = case.get("file", ""), case.get("classname", "")
    classes = inside.removeprefix(file.removesuffix(".py").replace("/", ".")).split(".")[1:]
    return "::".join([file, *classes, case.get("name", "")])


def _red(test: str, variants: Sequence[ElementTree.Element]) -> bool:
    """Whether one of a test's variants has failed. Raises NoProofError if nothing but something else has."""
    said = [
        (kind, e.get("message", "")) for v in variants for kind in ("skipped", "error", "failure") for e in v.iter(kind)
    ]
    for kind, message in said:
        if kind == "failure" and not message.startswith(NO_PROGRAM):
            return True
        if kind == "error" and FOUND.match(message):
            return True
    if said:
        raise NoProofError(f"{test}: {said[0][0]}: {said[0][1][:500]}")
    return False


def red_without(copies: Sequence[Copy], mutants: Sequence[Mutant], pool: ThreadPoolExecutor) -> set[str] | None:
    """The tests that mutants name and that are red without any of them; None where that can't be found out."""
    began = time.monotonic()
    tests = sorted({test for mutant in mutants for test in mutant.red})
    files = sorted({test.partition("::")[0] for test in tests})
    shares = [
        [test for test in tests if files.index(test.partition("::")[0]) % len(copies) == n] for n in range(len(copies))
    ]
    engines = any(mutant.needs for mutant in mutants)
    try:
        copies[0].check_imports()
        runs = pool.map(lambda copy, share: copy.run(share, LIMIT_OF_ALL, engines) if share else {}, copies, shares)
        red = [test for found in runs for test, is_red in found.items() if is_red]
    except NoProofError as error:
        print(f"without any mutant: {error}")
        return None
    for test in red:
        print(f"RED WITHOUT ANY MUTANT  {test}")
    seconds = time.monotonic() - began
    print(f"without any mutant: {len(tests) - len(red)} of {len(tests)} tests are green, {seconds:.0f} s", flush=True)
    return set(red)


def judge(copy: Copy, mutant: Mutant) -> tuple[str, str]:
    """(verdict, details) of a mutant; the verdict of one that was noticed is "killed"."""
    began = time.monotonic()
    try:
        with copy.broken_by(mutant):
            red = copy.run(mutant.red, LIMIT, bool(mutant.needs))
    except ValueError as error:
        return "DOES NOT APPLY", str(error)
    except NoProofError as error:
        return "NO PROOF", str(error)
    green = [test for test, is_red in red.items() if not is_red]
    count = f"({len(red) - len(green)} of {len(red)} red, {time.monotonic() - began:.1f} s)"
    return ("SURVIVED", f"{count} {mutant.what}; green: {', '.join(green)}") if green else ("killed", count)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """The exit code: 0 if all mutants were noticed."""
    parser = argparse.ArgumentParser(description="Breaks the product, and expects the tests to notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants, without .txt; default: all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants that are tried at a time")
    parser.add_argument("--list", action="store_true", help="only says what there is")
    options = parser.parse_args(argv)
    try:
        mutants = read_all(root, options.names)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.what}", *mutant.red, sep="\n    ")
        return 0
    for mutant in [] if options.names else [mutant for mutant in mutants if mutant.needs]:
        print(f"not tried  {mutant.name}  it needs {mutant.needs}: python tools/ci/mutants.py {mutant.name}")
        mutants.remove(mutant)
    began, verdicts = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        idle = deque(Copy(root, Path(folder, str(job))) for job in range(options.jobs))
        red = red_without([*idle], mutants, pool) if mutants else set()
        if red is None:
            return 1

        def judged(mutant: Mutant) -> tuple[str, str]:
            if spoilt := red.intersection(mutant.red):
                return "NO PROOF", f"red without it: {', '.join(sorted(spoilt))}"
            copy = idle.popleft()
            try:
                return judge(copy, mutant)
            finally:
                idle.append(copy)

        for mutant, (verdict, details) in zip(mutants, pool.map(judged, mutants), strict=True):
            verdicts.append(verdict)
            print(f"{verdict}  {mutant.name}  {details}", flush=True)
    killed = verdicts.count("killed")
    survived = verdicts.count("SURVIVED")
    errors = len(verdicts) - killed - survived
    print(f"{killed} killed, {survived} survived, {errors} errors, {time.monotonic() - began:.0f} s")
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
