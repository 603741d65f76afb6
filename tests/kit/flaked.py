"""tests/flaked.txt: the tests that have ever failed by chance. ``pytest --flaked`` runs these of what it is given."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from checkout import TESTS

#: What pytest-repeat adds to a test's name.
_COUNTED = re.compile(r"(\[|-)\d+-\d+\]$")


def names() -> list[str]:
    """Of tests, without parameters where all variants are meant; a "*" among parameters stands for any."""
    lines = (TESTS / "flaked.txt").read_text().splitlines()
    return [line.partition(" ")[0] for line in lines if line and not line.startswith("#")]


def is_named(test: str, name: str) -> bool:
    """Whether a test, by the id that pytest gives it, is one that ``name`` stands for."""
    test = _COUNTED.sub(lambda found: "]" if found[1] == "-" else "", test)
    return fnmatchcase(test, name.replace("[", "[[]")) or (
        not name.endswith("]") and (test.startswith((f"{name}[", f"{name}::")))
    )
