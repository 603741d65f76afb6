"""Tables for people: columns of text, which the package rich folds where a terminal is narrower than they are; HTML.
And figures for them.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape

#: What pads a cell to a width: ``str.ljust`` or ``str.rjust``.
Side = Callable[[str, int], str]


def columns(rows: Sequence[Sequence[str]], sides: Sequence[Side] = ()) -> str:
    """Returns the rows as lines whose cells stand below each other; ``sides`` are the columns', by default all left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = sides or [str.ljust] * len(widths)
    return "\n".join(
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip() for row in rows
    )


def show(rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, of which the first row is the head.

    On a terminal that is narrower than the table, cells go on in the next line if rich is there (the extra ``see``).
    """
    text = columns(rows)
    width, height = shutil.get_terminal_size()
    if not sys.stdout.isatty() or all(len(line) <= width for line in text.splitlines()):
        print(text)
        return
    try:
        from rich.console import Console
        from rich.table import Column, Table
        from rich.text import Text
    except ImportError:
        print(text)
        return
    head = [Column(Text(name), overflow="fold") for name in rows[0]]
    table = Table(*head, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for row in rows[1:]:
        table.add_row(*map(Text, row))  # no text has markup
    Console(width=width, height=height).print(table)


def size(n: int) -> str:
    """Returns a number of bytes in words, as torch says it: "512 bytes", "1.50 GiB"."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << shift:
            return f"{n / (1 << shift):.2f} {unit}"
    return f"{n} bytes"


def duration(seconds: float) -> str:
    """Returns a time: to a tenth of a second, from a minute on in minutes."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{seconds:.1f} s" if seconds < 60 else f"{minutes}:{rest:02} min"


def html(title: str, header: Sequence[object], rows: Iterable[Sequence[object]], heads: int = 0) -> str:
    """Returns a table of HTML, in which each cell is shown as it is: nothing in it counts as HTML.

    ``heads``: how many cells of each row name the row.
    """
    lines = [f"<caption>{escape(title)}</caption>", _line(header, len(header)), *(_line(row, heads) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _line(cells: Sequence[object], heads: int) -> str:
    tags = ["th"] * heads + ["td"] * (len(cells) - heads)
    return f"<tr>{''.join(f'<{tag}>{escape(str(c))}</{tag}>' for tag, c in zip(tags, cells, strict=True))}</tr>"
