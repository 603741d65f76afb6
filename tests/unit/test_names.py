"""Public names: where they are, and the old names of what has moved."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkout import ROOT
from sources import Source, agree, product, refuse, source

import disttensor as dt
from disttensor import moved, public
from disttensor.runtime.channel import DataChannel, Transfer
from disttensor.runtime.host.launcher import Launcher
from disttensor.runtime.launch.output.printer import Printer

THEMES = (
    "channels",
    "checkpoint",
    "collectives",
    "data",
    "errors",
    "factories",
    "futures",
    "graphs",
    "meshes",
    "nn",
    "seeing",
    "session",
    "streams",
    "tasks",
    "testing",
    "training",
    "verify",
    "views",
)
#: The themes that are modules of the first level and are imported by their first use.
LATER = ("checkpoint", "factories", "nn", "seeing", "testing", "training", "verify", "views")
FIRST = [name for name in dir(dt) if not name.startswith("__") and name not in LATER]
#: So many names the first level has at most. The twelve types of tensors are not counted.
BUDGET = 40
PAGE = (ROOT / "docs" / "dev" / "NAMES.md").read_text()


#: By theme: names that Python has too, which stay out of ``__all__``.
PYTHONS = {"seeing": {"breakpoint"}}


def of_theme(theme: str) -> set[str]:
    module = importlib.import_module(f"disttensor.{theme}")
    listed = set(getattr(module, "__all__", ()))
    return listed | PYTHONS.get(theme, set()) if listed else {name for name in vars(module) if not name.startswith("_")}


def section(title: str) -> str:
    """What the page says under a heading."""
    return PAGE.split(f"\n{title}\n", 1)[1].split("\n#", 1)[0]


def named(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def test_the_page_of_docstrings_has_every_theme() -> None:
    """docs/API.md, which `make docs` fills."""
    told = re.findall(r"(?m)^\.\. automodule:: disttensor\.(\w+)$", (ROOT / "docs" / "API.md").read_text())
    assert sorted(told) == sorted(THEMES)


def test_every_public_name_is_somewhere_and_nothing_else() -> None:
    there = {name for name in vars(public) if not name.startswith("_")} - {"annotations"}
    assert there == set(FIRST)
    assert len(dt.__all__) == len(set(dt.__all__))


def test_dir_shows_each_documented_module() -> None:
    """TAB behind ``dt.`` finds them."""
    themes = re.findall(r"^### `dt\.(\w+)`$", PAGE, re.MULTILINE)
    assert sorted(themes) == sorted(THEMES)
    assert {*themes} <= {*dir(dt)}


def test_type_checkers_see_what_dir_shows() -> None:
    """They take names of the first level by what it imports for them, and no other."""
    tree = source(Path(dt.__file__)).tree
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    named = [alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert [alias.name for alias in named if alias.name != alias.asname] == []
    types = {name for name in dt.factories.__all__ if name.endswith("Tensor")}
    assert {alias.name for alias in named} == {*FIRST, *LATER, *types}


def test_the_first_level_has_room_for_what_is_to_come() -> None:
    now, _, coming = section("## The first level").partition("To come, and counted: ")
    assert sorted(named(now.partition("\n\n`init` is")[0])) == FIRST
    counted = sorted({*FIRST, *named(coming.partition("(")[0])})
    assert len(counted) <= BUDGET, f"{len(counted)} names at the first level, {BUDGET} are its budget: {counted}"
    assert not {*named(coming.partition("(")[0])} & {*FIRST}


def listed(theme: str) -> list[str]:
    """The names of a theme on the page."""
    return named(section(f"### `dt.{theme}`").rstrip().rpartition("\n\n")[2])


def test_the_page_lists_each_theme() -> None:
    there = (f"dt.{theme}.{name}" for theme in THEMES for name in of_theme(theme))
    agree(there, (f"dt.{theme}.{name}" for theme in THEMES for name in listed(theme)), "NAMES.md lists all of a theme")


def test_no_class_has_the_name_of_another() -> None:
    """Who reads ``Group`` in a traceback, a repr or a message knows which. One that is private to its file may be as
    another one's; so may those of one file that stand for each other, as for versions of Python."""
    files: dict[str, dict[str, str]] = {}
    for file in product():
        for found in file.nodes(ast.ClassDef):
            if not found.name.startswith("_"):
                files.setdefault(found.name, {})[file.name] = file.at(found)
    twice = (f"{name}: {', '.join(at.values())}" for name, at in sorted(files.items()) if len(at) > 1)
    refuse(twice, "the name of a class says which one it is")


#: As the whole name of a function these say neither what it does nor to what.
SAY_NOTHING = {
    *("adopt", "adopted", "again", "began", "begun", "came", "come", "coming", "drop", "dropped", "ended", "forget"),
    *(
        "forgotten",
        "gave",
        "give",
        "given",
        "held",
        "hold",
        "note",
        "noted",
        "said",
        "say",
        "settle",
        "settled",
        "take",
    ),
    *("taken", "tell", "told"),
}
#: These say it of a method that has nothing else to begin or end than its own object.
OF_ITSELF = ("begin", "end")


def says_nothing(file: Source) -> Iterator[str]:
    """The functions and methods whose names are such a word, with underscores or without. Local ones are left out."""
    for scope in (file.tree, *file.nodes(ast.ClassDef)):
        for each in scope.body:
            if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            args, name = each.args, each.name.strip("_")
            others = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs) if arg.arg != "timeout"]
            alone = isinstance(scope, ast.ClassDef) and len(others) == 1
            if name in SAY_NOTHING or (name in OF_ITSELF and not alone):
                yield f"{file.at(each)}: {each.name}({', '.join(others)})"


def test_a_name_says_what_is_done_and_to_what() -> None:
    """docs/dev/NAMES.md, "Names of functions"."""
    refuse((each for file in product() for each in says_nothing(file)), "a method's name says what it does and to what")


def test_names_that_say_nothing_are_found() -> None:
    text = """
class Turn:
    def begin(self): ...
    def end(self, timeout=None): ...
    def _end(self, why): ...
    def take(self): ...
    def take_turn(self):
        def tell(): ...
    @property
    def _told(self): ...
def end(): ...
async def forget(): ...
"""
    found = [each.partition(": ")[2] for each in says_nothing(Source("disttensor/turn.py", text))]
    assert found == ["end()", "forget()", "_end(self, why)", "take(self)", "_told(self)"]


class OldLauncher(Launcher):
    def show(self, output: Any) -> None: ...

    def start(self, bundles: Any) -> None: ...

    def events(self) -> Any: ...

    def fileno(self) -> int:
        return -1

    def flush(self, timeout: float) -> None: ...

    def stop(self, grace: float) -> None: ...


def test_methods_that_others_define_work_by_their_old_names() -> None:
    """A launcher, data channel or strategy of a user's, as it was written for the release before."""
    ended = list[int]()
    methods = {"end": lambda self, rank: ended.append(rank)}
    with pytest.warns(DeprecationWarning, match=r"Mine\.end: Launcher\.end is end_worker now") as told:
        mine: Any = type("Mine", (OldLauncher,), methods)()
    assert told[0].filename == __file__
    mine.end_worker(3)
    assert ended == [3]
    renamed = [(DataChannel, "forget", "mark_lost"), (Transfer, "note", "add_background_callback")]
    renamed += [(dt.training.Strategy, "begin", "begin_training"), (dt.training.Strategy, "forget", "drop_workers")]
    for base, old, new in renamed:
        with pytest.warns(DeprecationWarning, match=rf"Mine\.{old}: {base.__name__}\.{old} is {new} now"):
            found = type("Mine", (base,), {old: ended.append})
        assert vars(found)[new] == ended.append
        type("Mine", (base,), {old: 1, new: 2})  # one that knows both


def test_a_printer_takes_output_by_the_old_names() -> None:
    """As a launcher of a user's calls it (docs/LAUNCHING.md)."""
    printer = Printer()
    for old, new in (("begin", "begin_node"), ("take", "feed"), ("end", "end_node")):
        with (
            patch.object(Printer, new) as called,
            pytest.warns(DeprecationWarning, match=rf"Printer\.{old} is {new} now") as told,
        ):
            getattr(printer, old)(0)
        assert told[0].filename == __file__
        called.assert_called_once_with(0)


def test_a_star_shadows_nothing() -> None:
    space: dict[str, object] = {}
    exec("from disttensor import *", space)
    ours = {name for name in space if not name.startswith("__")}
    assert ours == set(dt.__all__)
    for theirs in (vars(builtins), torch.__all__):
        assert not ours & set(theirs)
    for theme in THEMES:
        assert not set(getattr(importlib.import_module(f"disttensor.{theme}"), "__all__", ())) & set(vars(builtins))


def test_the_types_of_issue_241_stay_at_the_first_level() -> None:
    """Without a warning, which would be an error here, and not in ``dir``."""
    types = [name for name in dt.factories.__all__ if name.endswith("Tensor")]
    assert len(types) == 12
    assert all(getattr(dt, name) is getattr(dt.factories, name) for name in types)
    assert not {*types} & {*FIRST, *moved.NAMES}
    with pytest.raises(AttributeError, match="did you mean 'FloatTensor'"):
        dt.FlotTensor  # noqa: B018


def lost(name: str) -> Iterator[str]:
    """What is wrong with an old name of the first level."""
    theme, _, attribute = moved.NAMES[name].rpartition(".")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        old = getattr(dt, name)
    if [(each.category, each.filename) for each in told] != [(DeprecationWarning, __file__)]:
        yield f"dt.{name} warns of {[str(each) for each in told]}"
    elif not str(told[0].message).startswith(f"disttensor.{name} is "):
        yield f"dt.{name} says: {told[0].message}"
    if old is not getattr(importlib.import_module(f"disttensor.{theme}".rstrip(".")), attribute):
        yield f"dt.{name} is not dt.{moved.NAMES[name]}"
    if name in FIRST:
        yield f"dt.{name} is shown at the first level"
    if f"| `dt.{name}` |" not in PAGE:
        yield f"dt.{name} is missing on the page"


def test_an_old_name_is_found_with_a_warning() -> None:
    refuse((each for name in moved.NAMES for each in lost(name)), "an old name is the new one, and warns")


def test_torch_node_shows_what_is_public() -> None:
    names = [name for name in dir(torch.node) if not name.startswith("__")]
    assert [name for name in names if name.startswith("_")] == []
    assert [name for name in names if inspect.ismodule(getattr(torch.node, name))] == []
    assert {"device", "synchronize", "memory_allocated", "manual_seed", "current_device"} <= set(names)


def test_type_checkers_see_each_name() -> None:
    """Of a typed package a strict checker takes what is imported "as" itself, and nothing else."""
    tree = source(Path(public.__file__)).tree
    names = [alias for node in tree.body if isinstance(node, ast.ImportFrom) and node.level for alias in node.names]
    assert [alias.name for alias in names if alias.asname is None] == []


def test_dir_shows_what_is_public() -> None:
    assert set(dt.__all__) < set(FIRST)
    assert all(getattr(dt, name) is not None for name in FIRST)


def test_a_misspelt_name_is_told_the_right_one() -> None:
    with pytest.raises(AttributeError, match="did you mean 'all_reduce'"):
        dt.all_reduc  # noqa: B018


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """After importing every module: an import binds a module's name in its package."""
    for found in pkgutil.iter_modules(dt.__path__):
        if found.name in FIRST:
            value = getattr(dt, found.name)
            assert found.name == "run" or value is importlib.import_module(f"disttensor.{found.name}"), found.name


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("training", "Event", "TrainingEvent"),
        ("runtime.host.launch_spec", "Plan", "LaunchSpec"),
        ("runtime.host.launch_spec", "plan_of_dtrun", "spec_of_dtrun"),
        ("runtime.launch.tree.host_starter", "Engine", "HostStarter"),
        ("runtime.launch.starters.piped", "PipedEngine", "PipedStarter"),
        ("runtime.launch.starters.ssh", "SshEngine", "SshStarter"),
        ("runtime.launch.starters.root_launcher", "PlannedLauncher", "RootLauncher"),
        ("runtime.launch.starters.server_launcher", "ServedLauncher", "ServerLauncher"),
    ],
)
def test_what_others_may_build_on_is_found_by_its_old_name(module: str, old: str, new: str) -> None:
    found = importlib.import_module(f"disttensor.{module}")
    with pytest.warns(DeprecationWarning, match=rf"{old} is {new} now") as told:
        assert getattr(found, old) is getattr(found, new)
    assert told[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        found.Nothing  # noqa: B018
