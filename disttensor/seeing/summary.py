"""The nodes of a mesh in one line: who waits for whom, what stands out, and how many do the same."""

from __future__ import annotations

from collections.abc import Sequence

from .status import NodeStatus, of, phrase

#: The most nodes that are named for one thing.
NAMED = 3


def says(names: Sequence[str], rows: Sequence[NodeStatus]) -> str:
    """Returns what the nodes of a mesh are at. ``names``: their coordinates, such as "dp=3"."""
    by_rank = {row.rank: name for name, row in zip(names, rows, strict=True)}
    groups: dict[tuple[bool, str], list[str]] = {}
    for name, row in zip(names, rows, strict=True):
        groups.setdefault(_phrase_of(row, by_rank), []).append(name)
    parts = []
    for (stands_out, text), members in sorted(groups.items(), key=lambda group: (not group[0][0], len(group[1]))):
        if len(members) == len(rows) > 1:
            parts.append(f"all {text}")
        elif stands_out:
            parts.append(f"{_listed(members)} {text}")
        else:
            parts.append(f"{len(members)} {text}" if len(members) > 1 else f"{members[0]} {text}")
    return "; ".join(parts)


def _phrase_of(row: NodeStatus, by_rank: dict[int, str]) -> tuple[bool, str]:
    """Returns what is said of a node, and whether it has to be named with it."""
    if row.state == "waiting" and row.waits_for is not None:
        return True, f"waiting for {by_rank.get(row.waits_for) or of(row.waits_for)}"
    if row.state in ("idle", "starting"):
        return False, row.state
    if row.state == "running":
        return False, " ".join(filter(None, ("running", row.what, row.line)))
    return True, phrase(row)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} others" if more > 0 else "")
