"""Settings of Sphinx, for ``make docs``: pages as they are in the repository, and the reference from docstrings.

The repository is the source folder, so that links between pages, and to programs, are the same in both.
"""

from __future__ import annotations

import re
from typing import Any

import disttensor

project = "disttensor"
author = copyright = "The disttensor developers"
release = version = disttensor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "tests/mutants/README.md"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"disttensor {release}"

autodoc_default_options = {"members": True}
autodoc_typehints = "none"
napoleon_use_ivar = True

#: A word in stars, a name in backquotes, or a star that is meant as such.
STARS = re.compile(r"(\*\w(?:[^*]*\w)?\*|``.*?``)|\*")


def as_markup(app: object, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Makes reStructuredText of a docstring, which is plain text: what is indented is a program, or names arguments."""
    written: list[str] = []
    before, program = "", False
    for line in lines:
        if line.startswith("    ") and not program and before and not written[-1] and not before.startswith(" "):
            program = not re.match(r" +[\w*, ]+: ", line)
            written += ["::", ""] if program else ["Args:"]
        program = program and (not line or line.startswith(" "))
        written.append(line if program else STARS.sub(lambda found: found[1] or r"\*", line))
        before = line or before
    lines[:] = written


def setup(app: Any) -> None:
    """Has it done before napoleon looks at a docstring."""
    app.connect("autodoc-process-docstring", as_markup, priority=100)
