"""How many inputs tests try: all in each run but that of `make unit`."""

from __future__ import annotations

import re

import pytest
import quick
from checkout import ROOT


def test_a_quick_run_tries_a_fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "QUICK", False)
    assert [quick.inputs(count) for count in (1, 4, 100)] == [1, 4, 100]
    assert quick.some(["a", "b"]) == ["a", "b"]
    monkeypatch.setattr(quick, "QUICK", True)
    assert [quick.inputs(count) for count in (1, 4, 100)] == [1, 1, 20]
    assert quick.some(["a", "b"]) == ["a"]


def test_only_make_unit_is_quick() -> None:
    recipes = re.findall(r"(?m)^([a-z-]+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text())
    assert [target for target, recipe in recipes if "DISTTENSOR_TESTS_QUICK" in recipe] == ["unit"]
    assert "DISTTENSOR_TESTS_QUICK" not in (ROOT / ".ci" / "run").read_text()
