"""Objects that are sent once, and arguments that stand for them."""

from __future__ import annotations

from typing import assert_type

import disttensor as dt
from disttensor.tasks import Ref


def look_up(table: dict[str, int], key: str) -> int:
    return table[key]


def main() -> None:
    table = dt.tasks.share({"a": 1, "b": 2})
    assert_type(table, Ref[dict[str, int]])
    assert_type(table.value, dict[str, int])
    assert_type(dt.run(look_up, table, "a"), int)
    assert_type(dt.run(look_up, table, "a", node=1), int)
    assert_type(dt.submit(look_up, table, "b", node=1).result(), int)
    assert_type(dt.run(look_up, table, "b", node=[0, 1]), list[int])
