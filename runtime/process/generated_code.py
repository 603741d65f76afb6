"""Functions made of text: the one place where Python source that this project has written becomes code.

What goes into such a text is names, indices, operators and literals that we wrote ourselves; what comes from elsewhere
goes in by name, through ``names``.
"""

from __future__ import annotations

from typing import Any


def function(name: str, text: str, names: dict[str, Any]) -> Any:
    """The function ``name`` that ``text`` defines, with ``names`` for its globals."""
    exec(compile(text, f"<disttensor {name}>", "exec"), names)
    return names[name]
