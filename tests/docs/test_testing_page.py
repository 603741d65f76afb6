"""docs/TESTING.md: its program prints what stands below it, and its tests pass."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

from checkout import ROOT
from printed import as_shown

from disttensor import testing

PAGE = (ROOT / "docs" / "TESTING.md").read_text()
SHOWN = re.compile(r"```python\n(.*?)```\s*prints\n\n((?:    [^\n]*\n)+)", re.DOTALL)


def test_the_program(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    program, shown = SHOWN.findall(PAGE)[0]
    done = script(program)
    shown = textwrap.dedent(shown)
    assert as_shown(done.stdout, shown) == shown, done.stderr


def test_the_tests(tmp_path: Path, script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Each file by itself, as pytest runs them."""
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1:]):
        (tmp_path / f"test_{number}.py").write_text(text)
    done = script(f"import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(tmp_path)!r}]))")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_all_that_there_is_is_named() -> None:
    names = set(re.findall(r"`(\w+)\(", PAGE[PAGE.index("## What there is") :]))
    assert names == set(testing.__all__) - {"NodeLog", "Queued", "Usage"}
