"""docs/LOCKS.md: its program prints what stands below it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

from checkout import ROOT

PAGE = (ROOT / "docs" / "LOCKS.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(PRINTED,) = re.findall(r"^prints\n\n((?:    .*\n)+)", PAGE, re.MULTILINE)


def test_the_program(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout == re.sub("^    ", "", PRINTED, flags=re.MULTILINE)
