"""What nodes have printed, taken apart again."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: What node 0 of a host says where there are more nodes than cores, which depends on the machine.
SHARING = re.compile(r"\[node 0\] disttensor: \S+: \d+ nodes share \d+ cores?\n")

_PREFIX = re.compile(r"\[(?:node (\d+)|(\d+) nodes|nodes ([\d,-]+))\] (.*)", re.DOTALL)


def unfolded(lines: Iterable[str]) -> list[str]:
    """``[2 nodes] x`` as ``[node 0] x`` and ``[node 1] x``; what others have printed stays as it is."""
    out = []
    for line in lines:
        match = _PREFIX.fullmatch(line)
        if match is None or match[1] is not None:
            out.append(line)
            continue
        spans = [span.partition("-") for span in (match[3] or f"0-{int(match[2]) - 1}").split(",")]
        ranks = [rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)]
        out += [f"[node {rank}] {match[4]}" for rank in ranks]
    return out
