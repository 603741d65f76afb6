"""python tools/bench/bound.py [--files examples/quickstart.py tests/training] [--limit 120]

Which programs are bound by issue: each is run in a process of its own with a profile of each of its sessions, by
default the examples. Of a directory or file of tests, the sessions of each file count together. From the middle one of
the commands of a session, when all has been done once, to its end:

    busy     of the node that computed most: the share of the time in which it was in commands
    script   of the same node: the share in which it waited for the script, while that waited for nothing
    waits    the share in which the script waited for nodes
    per command  us that the script took for each command that it has issued, without these waits

A program is bound by the script where that node waited longer for the script than it was busy; by issue where the
script took no more than 100 us a command besides: then it did little else. Where it took more, it had work of its own,
such as data, or waited for a core, as there were more nodes than cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: The most microseconds for each command of a script that does little else than issue.
ISSUING = 100


class Seen(NamedTuple):
    """Sums over the sessions of a program."""

    seconds: float
    busy: float  #: of the busiest node of each session
    script: float  #: in which that node waited for the script
    waits: float  #: of the script
    commands: int

    @property
    def per_command(self) -> float:
        return (self.seconds - self.waits) / max(1, self.commands) * 1e6

    @property
    def bound_by(self) -> str:
        if self.script <= self.busy:
            return ""
        return "issue" if self.per_command <= ISSUING else "script"


# ---- in the process of a program -------------------------------------------------------------------------------------


def observe() -> None:
    """Has each session's profile written to the file that BOUND names, a line each."""
    from disttensor.seeing.shares import both, script_waits, seconds, shares_of

    module = importlib.import_module("disttensor.seeing.profile")  # the function of that name stands before it
    original = module.Profile

    class Observed(original):  # type: ignore[valid-type, misc]
        def end_recording(self, wait: bool = True) -> None:
            super().end_recording(wait)
            record = self._record
            if record is None or not record.issued:
                return
            record.issued = record.issued[len(record.issued) // 2 :]
            record.began = record.issued[0].at
            shares = [it for it in shares_of(record) if not it.missing]
            if not shares:
                return
            most = max(shares, key=lambda it: it.busy)
            commands = sum(1 for it in record.issued if it.site is not None)
            waits = seconds(both(script_waits(record), [(record.began, record.ended)]))
            seen = Seen(record.ended - record.began, most.busy, most.script, waits, commands)
            with open(os.environ["BOUND"], "a") as file:
                test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
                file.write(json.dumps([test, *seen]) + "\n")

    module.Profile = Observed  # type: ignore[attr-defined]


def run_program(path: str) -> None:
    """Runs one program, or the tests of a path."""
    observe()
    sys.path.insert(0, str((ROOT / path).parent))
    sys.argv = [path]
    if path.startswith("tests"):
        import pytest

        sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", path]))
    os.chdir(os.path.dirname(os.environ["BOUND"]))  # some write files
    runpy.run_path(str(ROOT / path), run_name="__main__")


# ---- all of them -----------------------------------------------------------------------------------------------------


def seen_of(path: str, limit: float) -> tuple[dict[str, Seen], str]:
    """Runs a program; returns its sums, of tests by file, and what is the matter: "" where it ended well."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        env = {**os.environ, "BOUND": str(told), "DISTTENSOR_TRACE": f"{folder}/t.json.gz"}
        command = [sys.executable, __file__, "--one", path]
        try:
            ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)
            matter = "" if ended.returncode == 0 else f"exit code {ended.returncode}: {ended.stderr[-100:].strip()}"
        except subprocess.TimeoutExpired:
            matter = f"not done after {limit:.0f} s"
        lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    found = defaultdict[str, list[list[float]]](list)
    for name, *figures in lines:
        found[name or path].append(figures)
    return {name: Seen._make(map(sum, zip(*each, strict=True))) for name, each in found.items()}, matter


def show(rows: Iterable[tuple[str, Seen]]) -> None:
    figures = f"{'s':>7} {'busy':>5} {'script':>6} {'waits':>5} {'commands':>9} {'us per command':>14}"
    print(f"{'program':46} {figures}  bound by")
    for name, it in rows:
        busy, script, waits = (f"{each / it.seconds:.0%}" for each in (it.busy, it.script, it.waits))
        figures = f"{it.seconds:7.2f} {busy:>5} {script:>6} {waits:>5} {it.commands:9,} {it.per_command:14.0f}"
        print(f"{name:46} {figures}  {it.bound_by}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", help="programs, and files or directories of tests, of this tree")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_program(options.one)
        return
    examples = [str(it.relative_to(ROOT)) for it in sorted(ROOT.glob("examples/**/*.py"))]
    rows, matters = list[tuple[str, Seen]](), list[str]()
    for path in options.files or examples:
        found, matter = seen_of(path, options.limit)
        rows += sorted(found.items())
        if matter or not found:
            matters.append(f"{path}: {matter or 'no session has issued anything'}")
    show(rows)
    print("\n".join(["", *matters]) if matters else "")


if __name__ == "__main__":
    main()
