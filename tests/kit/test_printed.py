"""A page's figures hold on each CPU, and nothing else does."""

from __future__ import annotations

import pytest
from printed import as_shown


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("loss 1.6292\n", "loss 1.6291\n"),
        ("tensor([1.6291497, -0.2])", "tensor([1.6291500, -0.2])"),
        ("tensor([-0.0001, 12.3457])", "tensor([0.0000, 12.3456])"),
        ("step 3: 5234.561 of 8", "step 3: 5234.569 of 8"),
        ("4.1235e-07", "4.1234e-07"),
        ("1.629150152206421 1.0343559980392456", "1.6291497945785522 1.0343559980392456"),
    ],
)
def test_the_last_digit_may_differ(printed: str, shown: str) -> None:
    assert printed != shown
    assert as_shown(printed, shown) == shown


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("loss 1.6293", "loss 1.6291"),
        ("0.5", "0.6"),
        ("tensor([2.])", "tensor([3.])"),
        ("step 3: 1.6291", "step 4: 1.6291"),
        ("1.62910", "1.6291"),
        ("1.6291500", "1.62915"),
        ("1.629250152206421", "1.6291497945785522"),
        ("1.6291 1.6291", "1.6291"),
        ("lost 1.6291", "loss 1.6291"),
        ("-1.6291", "1.6291"),
        ("torch 2.13.0", "torch 2.14.0"),
        ("0.9999", "1.0001"),
        ("nan", "1.0000"),
        ("4.1234e-07", "4.1234e-06"),
        ("1.6291  1.7", "1.6291 1.7"),
    ],
)
def test_nothing_else_does(printed: str, shown: str) -> None:
    assert as_shown(printed, shown) != shown
