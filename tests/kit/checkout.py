"""Where things lie in this checkout, for tests and for the programs that they start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
#: What a program that a test starts finds modules of the tests in.
KIT = TESTS / "kit"


def search_path(*first: str | os.PathLike[str]) -> str:
    """A PYTHONPATH for a program that uses modules of the tests: ``first``, theirs, and what there is already."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(os.fspath, first), str(KIT), *([given] if given else [])])
