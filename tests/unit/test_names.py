"""Public names: where they are, and the old names of what has moved."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
import warnings
from pathlib import Path

import pytest

import disttensor as dt
from disttensor import moved, public

#: Documented modules that ``import disttensor`` gives, too.
MODULES = {"selfcheck"}


def test_every_public_name_is_somewhere_and_nothing_else() -> None:
    there = {name for name in vars(public) if not name.startswith("_")} - {"annotations"}
    assert there == {*dt.__all__} | MODULES
    assert len(dt.__all__) == len(set(dt.__all__))


def test_type_checkers_see_each_name() -> None:
    """Of a typed package a strict checker takes what is imported "as" itself, and nothing else."""
    tree = ast.parse(Path(public.__file__).read_text())
    names = [alias for node in tree.body if isinstance(node, ast.ImportFrom) and node.level for alias in node.names]
    assert [alias.name for alias in names if alias.asname is None] == []


def test_dir_shows_what_is_public() -> None:
    assert [name for name in dir(dt) if not name.startswith("__")] == sorted(dt.__all__)


def test_a_misspelt_name_is_told_the_right_one() -> None:
    with pytest.raises(AttributeError, match="did you mean 'all_reduce'"):
        dt.all_reduc  # noqa: B018


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """After importing every module: an import binds a module's name in its package."""
    for found in pkgutil.iter_modules(dt.__path__):
        if found.name in dt.__all__:
            value = getattr(dt, found.name)
            assert found.name == "run" or value is importlib.import_module(f"disttensor.{found.name}"), found.name


@pytest.mark.parametrize("name", moved.MOVED)
def test_what_has_moved_is_found_with_a_warning(name: str) -> None:
    new = importlib.import_module(f"disttensor.{moved.MOVED[name]}")
    spec = new.__spec__
    sys.modules.pop(f"disttensor.{name}", None)
    with pytest.warns(DeprecationWarning, match=f"import disttensor.{moved.MOVED[name]} instead"):
        old = importlib.import_module(f"disttensor.{name}")
    assert old is new
    assert new.__spec__ is spec


def test_what_never_was_is_not_found() -> None:
    with warnings.catch_warnings(), pytest.raises(ModuleNotFoundError, match=r"disttensor\.nothing"):
        importlib.import_module("disttensor.nothing")
