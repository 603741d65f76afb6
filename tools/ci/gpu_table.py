"""Prints the table of docs/dev/gpu.md anew, after a run on a GPU: ``gpu_table.py DEVICE DOCTOR TESTS``.

A row gets today's date and the device where all that it names was well: each test of its files has run and passed, and
each of the doctor's rows is "ok". The others stay as they are. What the devices of simcuda do is not written down.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dev" / "gpu.md"
#: The words of a cell whose row is that of a machine with one GPU.
ONE = "where there is one GPU"
HEAD = "| what | run by | on a GPU | simulated | never |"


def table(text: str) -> list[list[str]]:
    """Returns the cells of each row of the page's table."""
    lines = text[text.index(HEAD) :].splitlines()[2:]
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines if line.startswith("| ")]


def tests_of(cell: str) -> list[str]:
    """Returns the files of tests that a cell names."""
    return re.findall(r"`(tests/[\w/]+\.py)`", cell)


def steps_of(cell: str) -> list[str]:
    """Returns the doctor's rows that a cell names."""
    _, _, named = cell.partition("the doctor's ")
    return re.findall(r"`([^`]+)`", named)


def passed(xml: str) -> dict[str, bool]:
    """Returns of each file of tests whether all of its tests have run and passed, from pytest's report."""
    found: dict[str, bool] = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        parts = case.get("classname", "").split(".")
        last = max(i for i, part in enumerate(parts) if part.startswith("test_") or i == 0)
        file = "/".join(parts[: last + 1]) + ".py"
        well = not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        found[file] = found.get(file, True) and well
    return found


def well(text: str) -> set[str]:
    """Returns the names of the rows that the doctor has printed as "ok"."""
    return {line[6:24].strip() for line in text.splitlines() if line.startswith("ok    ")}


def filled(row: list[str], today: str, tests: dict[str, bool], steps: set[str]) -> list[str]:
    """Returns a row, with the date and the device where all that it names was well."""
    files, named = tests_of(row[1]), steps_of(row[1])
    if not (files or named) or not all(tests.get(file) for file in files) or not steps.issuperset(named):
        return row
    if ONE in row[1] and ", 1 x " not in today:
        return row
    return [*row[:2], today, *row[3:]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints the table of docs/dev/gpu.md after a run on a GPU.")
    parser.add_argument("device", help="its name, and how many there are")
    parser.add_argument("doctor", type=Path, help="what `python -m disttensor.doctor --gpu` has printed")
    parser.add_argument("tests", type=Path, help="what `pytest -m gpu --junitxml` has written")
    options = parser.parse_args()
    if "simcuda" in options.device:
        sys.exit("these devices are simulated: nothing of this belongs into the column 'on a GPU'")
    today = f"{time.strftime('%Y-%m-%d')}, {options.device}"
    tests, steps = passed(options.tests.read_text()), well(options.doctor.read_text())
    print("The table of docs/dev/gpu.md:\n", HEAD, "|---|---|---|---|---|", sep="\n")
    for row in table(PAGE.read_text()):
        print(f"| {' | '.join(filled(row, today, tests, steps))} |")


if __name__ == "__main__":
    main()
