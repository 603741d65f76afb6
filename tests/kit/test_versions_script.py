"""tools/ci/versions.sh, as far as it goes without making an environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from checkout import ROOT


@pytest.mark.parametrize(
    ("cases", "says"),
    [(["3.98:"], "python3.98 is missing"), (["3.99:2.13", "3.98:", "3.99:"], "python3.98 and python3.99 are missing")],
    ids=["one", "two"],
)
def test_missing_interpreters_are_said(cases: list[str], says: str, tmp_path: Path) -> None:
    """In one sentence, before anything is made; and that is no success."""
    script = [str(ROOT / "tools/ci/versions.sh"), *cases]
    done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"versions.sh: {says}")
    assert done.stderr.count("\n") == 1
