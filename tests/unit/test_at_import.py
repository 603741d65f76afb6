"""What is called as soon as a module is there: once, whoever imports it and whenever."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from disttensor.torch_backend import at_import


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's modules are found; afterwards there are none, and nothing waits for one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before, waited = {*sys.modules}, {**at_import._awaited}
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]
    at_import.drop_awaited()
    for name, then in waited.items():
        at_import.after(name, then)


def test_it_is_called_before_the_import_returns(folder: Path) -> None:
    (folder / "awaited.py").write_text("value = 1")
    seen = []
    at_import.after("awaited", lambda: seen.append(sys.modules["awaited"].value))
    assert seen == []
    module = importlib.import_module("awaited")
    assert seen == [1]  # the whole module is there
    assert isinstance(module.__loader__, SourceFileLoader)  # as without us
    importlib.reload(module)
    assert seen == [1]


def test_it_is_called_at_once_for_what_is_there() -> None:
    seen: list[str] = []
    at_import.after("sys", lambda: seen.append("now"))
    assert seen == ["now"]


def test_each_has_its_own(folder: Path) -> None:
    (folder / "awaited").mkdir()
    (folder / "awaited" / "__init__.py").write_text("")
    (folder / "awaited" / "part.py").write_text("")
    seen: list[str] = []
    for name in ("awaited", "awaited.part"):
        at_import.after(name, lambda name=name: seen.append(name))  # type: ignore[misc]
    importlib.import_module("awaited.part")
    assert seen == ["awaited", "awaited.part"]


def test_an_import_that_fails_is_waited_for_again(folder: Path) -> None:
    (folder / "awaited.py").write_text("raise ValueError('broken')")
    seen: list[str] = []
    at_import.after("awaited", lambda: seen.append("there"))
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("awaited")
    assert seen == []
    (folder / "awaited.py").write_text("value = 2  # and longer than it was")
    importlib.import_module("awaited")
    assert seen == ["there"]


def test_what_it_raises_is_raised_by_the_import(folder: Path) -> None:
    (folder / "awaited.py").write_text("")

    def refuse() -> None:
        raise RuntimeError("no such torch")

    at_import.after("awaited", refuse)
    with pytest.raises(RuntimeError, match="no such torch"):
        importlib.import_module("awaited")


def test_a_module_that_is_not_to_be_found_is_missing_as_ever(folder: Path) -> None:
    seen: list[str] = []
    at_import.after("awaited", lambda: seen.append("there"))
    with pytest.raises(ModuleNotFoundError, match="No module named 'awaited'"):
        importlib.import_module("awaited")
    (folder / "awaited.py").write_text("")
    importlib.invalidate_caches()
    importlib.import_module("awaited")
    assert seen == ["there"]


def test_a_node_waits_for_nothing(folder: Path) -> None:
    (folder / "awaited.py").write_text("")
    seen: list[str] = []
    at_import.after("awaited", lambda: seen.append("there"))
    at_import.drop_awaited()
    importlib.import_module("awaited")
    assert seen == []
