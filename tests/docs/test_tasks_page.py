"""docs/TASKS.md: its programs print what stands below them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest
from checkout import ROOT

PAGE = (ROOT / "docs" / "TASKS.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PRINTED = re.findall(r"^prints\n\n((?:    .*\n)+)", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("program", "printed"), list(zip(PROGRAMS, PRINTED, strict=True)))
def test_a_program(script: Callable[..., subprocess.CompletedProcess[str]], program: str, printed: str) -> None:
    done = script(program)
    assert done.stdout == re.sub("^    ", "", printed, flags=re.MULTILINE), done.stderr
