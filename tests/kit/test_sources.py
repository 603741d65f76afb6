"""Scans of the sources: each file is read and parsed once, a rule tells all that offends against it."""

from __future__ import annotations

import ast

import pytest
import sources
from checkout import KIT, ROOT
from sources import Source, agree, below, product, refuse, source

#: Tests that look for Python files themselves: for what.
THEMSELVES = {
    "tests/docs/test_architecture.py": "names of files, which pages may name",
    "tests/docs/test_build.py": "names of files, which a wheel has to have",
    "tests/docs/test_patterns.py": "programs that it runs",
    "tests/docs/test_readme.py": "examples, and which of them the reference names",
    "tests/kit/mutations.py": "the files of any tree, that of a test too",
    "tests/kit/sources.py": "it is what the others ask",
    "tests/ops/test_other_branches.py": "torch's sources",
    "tests/ops/test_without_process_groups.py": "torch's sources",
    "tests/types/test_types.py": "programs for type checkers",
}

PROGRAM = """
@cache
def outer():
    class Inner:
        def method(self): return call(1)
    return other.call(2)
call(3)
"""


def test_all_files_are_there_once() -> None:
    names = [file.name for file in product()]
    assert len(names) == len(set(names)) > 400
    assert {"dtrun.py", "disttensor/public.py", "runtime/node/executor.py"} <= {*names}
    assert not [name for name in names if name.startswith("disttensor/runtime/")]


def test_a_file_is_read_and_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = [], ast.parse
    monkeypatch.setattr(ast, "parse", lambda text, name: parsed.append(name) or parse(text, name))
    path = KIT / "checkout.py"
    monkeypatch.setattr(sources, "source", sources.cache(sources.source.__wrapped__))
    for _ in range(3):
        file = sources.source(path)
        assert len([*file.nodes(ast.Import, ast.ImportFrom)]) == 3
        assert file.tree.body
    assert parsed == ["tests/kit/checkout.py"]
    assert source(path) is source(path)
    assert below("tests") is below("tests")


def test_a_module_is_named_as_it_is_imported() -> None:
    assert source(ROOT / "runtime" / "channel" / "base.py").module == "disttensor.runtime.channel.base"
    assert source(ROOT / "disttensor" / "meshes" / "__init__.py").module == "disttensor.meshes"
    assert source(ROOT / "dtrun.py").module == "dtrun"


def test_nodes_and_what_they_stand_in() -> None:
    file = Source("program.py", PROGRAM)
    found = {node.args[0].value: file.around(node) for node in file.nodes(ast.Call)}
    assert found == {1: ("outer", "Inner", "method"), 2: ("outer",), 3: ()}
    assert [(type(node).__name__, node.name) for node in file.nodes(ast.ClassDef, ast.FunctionDef)] == [
        ("ClassDef", "Inner"),
        ("FunctionDef", "outer"),
        ("FunctionDef", "method"),
    ]
    (decorator,) = file.nodes(ast.FunctionDef).__next__().decorator_list
    assert file.around(decorator) == ("outer",)
    assert file.at(decorator) == "program.py:2"


def test_a_rule_tells_all_that_offends() -> None:
    refuse([], "nothing stands alone")
    with pytest.raises(pytest.fail.Exception) as told:
        refuse((f"a.py:{line}" for line in range(300)), "nothing stands alone")
    assert str(told.value).splitlines() == ["nothing stands alone", *(f"  a.py:{line}" for line in range(300))]


def test_a_list_tells_what_is_missing_and_what_is_gone() -> None:
    agree(["a", "b", "a"], {"b", "a"}, "all are listed")
    with pytest.raises(pytest.fail.Exception) as told:
        agree(["b", "a", "d"], ["a", "c"], "all are listed")
    assert str(told.value).splitlines() == [
        "all are listed",
        "  b: is not listed",
        "  d: is not listed",
        "  c: is listed, and not there",
    ]


def looks_itself(file: Source) -> bool:
    """Whether a file looks for Python files: `folder.rglob("*.py")`."""
    if "glob(" not in file.text:
        return False
    calls = (node for node in file.nodes(ast.Call) if isinstance(node.func, ast.Attribute) and node.args)
    return any(
        call.func.attr in ("glob", "rglob")
        and any(isinstance(part, ast.Constant) and str(part.value).endswith(".py") for part in ast.walk(call.args[0]))
        for call in calls
    )


def test_scans_take_files_from_here() -> None:
    """Else each of them reads and parses the whole tree again."""
    agree((file.name for file in below("tests") if looks_itself(file)), THEMSELVES, "scans ask tests/kit/sources.py")


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone, and tells that at the end of a whole run only."""
    names = [file.path.name for file in below("tests") if file.path.name.startswith("test_")]
    refuse(sorted({name for name in names if names.count(name) > 1}), "a file of tests has a name of its own")
