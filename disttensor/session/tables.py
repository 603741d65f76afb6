"""Tables: lines of cells as text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Returns lines of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{cell:<{n}}" for cell, n in zip(line, widths, strict=True)).rstrip() for line in lines)


def html(title: str, header: Sequence[object], rows: Iterable[Sequence[object]], heads: int = 0) -> str:
    """Returns a table of HTML, in which each cell is shown as it is: nothing in it counts as HTML.

    ``heads``: how many cells of each row name the row.
    """
    lines = [f"<caption>{escape(title)}</caption>", _line(header, len(header)), *(_line(row, heads) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _line(cells: Sequence[object], heads: int) -> str:
    tags = ["th"] * heads + ["td"] * (len(cells) - heads)
    return f"<tr>{''.join(f'<{tag}>{escape(str(c))}</{tag}>' for tag, c in zip(tags, cells, strict=True))}</tr>"
