"""Kinds of collectives: what a row of the table needs elsewhere is there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from checkout import ROOT

from disttensor.channels import COLLECTIVES
from disttensor.runtime.channel import get_channel
from disttensor.runtime.collective import TABLE
from disttensor.runtime.node.collectives import RUNNERS, SHARES
from disttensor.runtime.protocol.channel_names import BUILTIN
from disttensor.runtime.protocol.collective_kinds import KINDS, Kind
from disttensor.verify.references import REFERENCES

PAGE = (ROOT / "docs" / "COLLECTIVES.md").read_text(encoding="utf-8")

RUNNER = "a function that runs it on a node, in runtime/node/collectives.py: RUNNERS"
SHARE = "a function for several tensors of a node, in runtime/node/collectives.py: SHARES"
REFERENCE = "a function that computes it here, in disttensor/verify/references.py: REFERENCES"
SIZES = "the algorithm by size, in runtime/collective/algorithm_table.py: TABLE"
WORDS = "a word in docs/COLLECTIVES.md"


def missing(
    kinds: Collection[Kind],
    runners: Collection[str],
    shares: Collection[str],
    references: Collection[str],
    table: Mapping[str, object],
    page: str,
) -> list[str]:
    """What kinds lack, in words, and what there is of kinds that are not in the table."""
    found = []
    for kind in kinds:
        for needed, there, what in (
            (True, kind.name in runners, RUNNER),
            (kind.shares, kind.name in shares, SHARE),
            (kind.values, kind.name in references, REFERENCE),
            (bool(kind.algorithms), kind.name in table, SIZES),
            (True, f"`{kind.users_name}" in page or f".{kind.users_name}(" in page, WORDS),
        ):
            if needed and not there:
                found.append(f"{kind.name} lacks {what}")
            elif there and not needed and what != WORDS:
                found.append(f"{kind.name} has {what}, and its row says that it has none")
    names = {kind.name for kind in kinds}
    found += [f"{name} has no row" for name in sorted({*runners, *shares, *references, *table} - names)]
    return found


def test_nothing_is_missing() -> None:
    assert missing(KINDS.values(), RUNNERS, SHARES, REFERENCES, TABLE, PAGE) == []
    assert tuple(kind.users_name for kind in KINDS.values()) == COLLECTIVES


def test_what_a_new_kind_lacks_is_said() -> None:
    scan = Kind("scan", algorithms=("ring", "tree"), reduces=True, shares=True)
    assert missing([*KINDS.values(), scan], RUNNERS, SHARES, REFERENCES, TABLE, PAGE) == [
        f"scan lacks {what}" for what in (RUNNER, SHARE, REFERENCE, SIZES, WORDS)
    ]
    kinds = [kind for kind in KINDS.values() if kind.name != "gather"]
    assert missing(kinds, RUNNERS, SHARES, REFERENCES, TABLE, PAGE) == ["gather has no row"]
    plain = [kind if kind.name != "broadcast" else Kind("broadcast") for kind in KINDS.values()]
    assert missing(plain, RUNNERS, SHARES, REFERENCES, TABLE, PAGE) == [
        f"broadcast has {what}, and its row says that it has none" for what in (SHARE, SIZES)
    ]


def test_the_table_by_size_names_algorithms_of_the_rows() -> None:
    for name, choices in TABLE.items():
        assert {way.algorithm for _, _, way in choices} <= set(KINDS[name].algorithms)


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_channel_s_own_collectives_have_rows(name: str) -> None:
    assert get_channel(name).capabilities.collectives <= set(KINDS)
