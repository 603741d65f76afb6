"""The slow way of operations, which says what the shortcuts have to do: torch's own to `dispatch`, and `run` there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from disttensor.dispatch import call_site, dispatch, op_table


@contextmanager
def slow_way() -> Iterator[None]:
    """Has no operation take a shortcut, and none learn one; afterwards those that were there are there again."""
    entries = list(op_table.entries.values())
    tables = [table for entry in entries for table in (entry.quick, entry.shortcuts, entry.forms)]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        with patch.object(dispatch, "remember"), patch.object(call_site, "backwards", {}):
            yield
    finally:
        for table, had in zip(tables, before, strict=True):
            table.update(had)  # type: ignore[arg-type]
