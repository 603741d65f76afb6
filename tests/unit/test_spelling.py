"""Values of users' in messages."""

from __future__ import annotations

import torch

from disttensor.runtime.process.spelling import shown


def test_values_in_messages_are_short() -> None:
    assert [shown(v) for v in (7, "a", [1, 2], {"a": 1}, None, (3,))] == [
        "7",
        "'a'",
        "[1, 2]",
        "{'a': 1}",
        "None",
        "(3,)",
    ]
    x = torch.zeros(3, 4, dtype=torch.int64)
    assert shown(x) == "a tensor (3, 4) torch.int64 on cpu"
    assert shown(torch.nn.Parameter(x.float())) == "a tensor (3, 4) torch.float32 on cpu"
    assert shown([x, {"y": x}]) == f"[{shown(x)}, {{'y': {shown(x)}}}]"
    for long in ("x" * 10_000, list(range(10_000)), [x] * 10_000, torch.nn.Sequential(*[torch.nn.Linear(1, 1)] * 99)):
        assert len(shown(long)) <= 400
        assert "..." in shown(long)
