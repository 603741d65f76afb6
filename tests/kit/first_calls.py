"""First calls once more: what the script knows of operators' calls is forgotten, as it is where a session begins."""

from __future__ import annotations

from disttensor.dispatch.op_table import entries


def forget() -> None:
    """Drops all plans, and what was found out about meta kernels."""
    for entry in entries.values():
        entry.drop_plans()
