"""docs/VERIFYING.md: its program prints what stands below it."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Callable

from checkout import ROOT

PAGE = (ROOT / "docs" / "VERIFYING.md").read_text()
SHOWN = re.compile(r"```python\n(.*?)```\s*prints\n\n((?:    [^\n]*\n)+)", re.DOTALL)


def test_the_program(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    program, shown = SHOWN.findall(PAGE)[0]
    done = script(program)
    assert done.stdout == textwrap.dedent(shown), done.stderr
