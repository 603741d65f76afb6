"""Modules that were reloaded here since nodes imported them: nodes run what the master has."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

import disttensor as dt
from disttensor.tasks.reloaded_modules import ReloadedModules

Write = Callable[..., ModuleType]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module and imports or reloads it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = set()
    times = count(1_000_000_000)  # by a file's time and size Python, on nodes too, tells whether it has compiled it

    def write(name: str, text: str) -> ModuleType:
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        time = next(times)
        os.utime(file, (time, time))
        importlib.invalidate_caches()
        if name in names:
            return importlib.reload(sys.modules[name])
        names.add(name)
        return importlib.import_module(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def names(modules: ReloadedModules) -> list[str]:
    return [module.__name__ for module in modules.stale()]


def test_what_is_stale(write: Write) -> None:
    helper = write("edited_helper", "def f(): return 1")
    user = write("edited_user", "import edited_helper, json\nfrom os import path\ndef g(): return edited_helper.f()")
    other = write("edited_other", "def h(): return 1")
    modules = ReloadedModules()
    modules.note_modules_of(user.g)
    modules.note_modules_of(other.h)
    modules.note_modules_of(path := Path)
    assert names(modules) == []
    write("edited_helper", "def f(): return 2")
    assert names(modules) == ["edited_helper", "edited_user"]
    fresh = ReloadedModules()
    fresh.note_modules_of(user.g)
    assert names(fresh) == []
    assert helper is sys.modules["edited_helper"]
    assert path is Path


def test_code_that_ipython_has_changed_in_place(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    module = write("edited_in_place", "def f(): return 1\nclass A:\n    def g(self): return 1")
    for function in (module.f, module.A.g):
        modules = ReloadedModules()
        modules.note_modules_of(module.f)
        function.__code__ = (lambda *_: 3).__code__
        assert names(modules) == ["edited_in_place"]


def test_a_file_that_was_only_edited(write: Write, tmp_path: Path) -> None:
    """A script that runs for days goes on with what it has imported."""
    module = write("edited_meanwhile", "def f(): return 1")
    modules = ReloadedModules()
    modules.note_modules_of(module.f)
    (tmp_path / "edited_meanwhile.py").write_text("def f(): return 2")
    assert names(modules) == []


def test_libraries_are_not_looked_at() -> None:
    modules = ReloadedModules()
    for value in (threading.Thread, cloudpickle.dumps, pytest, dt.run, Path):
        modules.note_modules_of(value)
    assert not modules._seen


def on_node(fn: Callable[[], Any]) -> Any:
    return dt.run(fn, node=1)


def by_a_queue(fn: Callable[[], Any]) -> Any:
    """Has a node take a function out of a queue of work, and call it."""
    queue = dt.tasks.WorkQueue()
    queue.put(fn)
    return dt.run(lambda queue: queue.get()(), queue, node=1)


@pytest.fixture(scope="module")
def reached(processes: None) -> None:
    """The node has its connection to what is shared before the tests look for leaks."""
    assert dt.run(dt.tasks.WorkQueue.qsize, dt.tasks.WorkQueue(), node=1) == 0


@pytest.mark.usefixtures("reached")
class TestOnNodes:
    @pytest.fixture(autouse=True)
    def path(self, tmp_path: Path) -> None:
        """Nodes look where this process does; they have begun before."""

        def insert(path: str) -> None:
            sys.path.insert(0, path)

        dt.run(insert, str(tmp_path), node=range(2))

    @pytest.mark.parametrize("run", [on_node, by_a_queue])
    def test_function_class_and_module(self, write: Write, run: Callable[..., Any]) -> None:
        text = "def f(): return {0}\nclass A:\n    def g(self): return {0} * 10\n"
        module = write("edited_on_nodes", text.format(1))
        user = write("edited_user_on_nodes", "import edited_on_nodes as m\ndef h(): return m.f() + 100")

        def through_module() -> int:
            return int(module.f())

        def all_of_it() -> list[Any]:
            return [run(fn) for fn in (module.f, module.A().g, user.h, through_module)]

        assert all_of_it() == [1, 10, 101, 1]
        module = write("edited_on_nodes", text.format(2))
        assert all_of_it() == [2, 20, 102, 2]
        module = write("edited_on_nodes", text.format(3))
        assert all_of_it() == [3, 30, 103, 3]
        assert not cloudpickle.list_registry_pickle_by_value()

    def test_what_cannot_go_by_value(self, write: Write) -> None:
        text = "import threading\nlock = threading.Lock()\ndef f():\n    with lock: return {}"
        module = write("edited_with_lock", text.format(1))
        assert dt.run(module.f) == 1
        module = write("edited_with_lock", text.format(2))
        with pytest.raises(TypeError, match="lock") as caught:
            dt.run(module.f)
        assert "nodes get edited_with_lock by value" in "".join(caught.value.__notes__)
        assert not cloudpickle.list_registry_pickle_by_value()
