"""Turns generated text into functions: the one place where Python source that this project has written becomes code.

Such a text is made of names, indices, operators and literals that this project wrote itself. Values from elsewhere
enter by name, through ``names``.
"""

from __future__ import annotations

from typing import Any


def function(name: str, text: str, names: dict[str, Any]) -> Any:
    """Compiles ``text``, which defines the function ``name``, and returns that function; ``names`` are its globals."""
    exec(compile(text, f"<disttensor {name}>", "exec"), names)
    return names[name]
