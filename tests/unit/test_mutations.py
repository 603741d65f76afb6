"""Mutants hold to symbols: each has its code in the product; and how code is found and replaced."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from mutations import Edit, File, Mutant, Product, find, read_all
from sources import source


def test_each_mutant_has_its_code_in_the_product() -> None:
    """After a change of the product, the nearest name says what to write instead (tests/mutants/README.md)."""
    product, gone = Product(ROOT, lambda path: source(path).tree), []
    for mutant in read_all(ROOT):
        for edit in mutant.edits:
            try:
                product.find(edit)
            except ValueError as error:
                gone.append(f"tests/mutants/{mutant.name}.txt: {error}")
    assert not gone, "\n".join(gone)


def test_each_test_that_a_mutant_names_is_there() -> None:
    """Its parameters are looked for by `make mutants`, which takes all of them or none."""
    gone = []
    for mutant in read_all(ROOT):
        for test in mutant.red:
            path, *names = test.partition("[")[0].split("::")
            within: Any = source(ROOT / path).tree if (ROOT / path).is_file() else None
            for name in names:
                found = (node for node in getattr(within, "body", ()) if getattr(node, "name", "") == name)
                within = next(found, None)
            if within is None:
                gone.append(f"tests/mutants/{mutant.name}.txt: {test}")
    assert not gone, "\n".join(gone)


def test_all_mutants_are_read() -> None:
    """A file with another ending would be none, and nobody would notice."""
    assert {path.suffix for path in (ROOT / "tests" / "mutants").iterdir()} == {".txt", ".md"}


PROGRAM = '''\
import os

LIMIT = 3


class Lock:
    """A lock."""

    limit: int = 2

    @property
    def free(self, n):
        if n > self.limit:
            raise ValueError("ä", n)  # of them
        elif n == 0:
            return None
        else:
            self.give(n)
        with self.mutex:
            text = """one
              two"""
            # why
            self.give(text)
        return n + 1

    def give(self, n):
        try:
            self.free(n)
        except KeyError:
            n = 0
        match n:
            case 1 if n:
                n = 2
            case _:
                n = 3
        self.free(n)
        self.free(n)

        def later():
            self.free(n - 1)

        return later
'''
FREE, GIVE = "In: a.py::Lock.free", "In: a.py::Lock.give"


def broken(folder: Path, program: str, *edits: str) -> str:
    (folder / "a.py").write_text(program)
    mutant = Mutant("x", "it is broken", ("test.py::test",), (), "", tuple(map(Edit.parse, edits)))
    return Product(folder).broken(mutant)["a.py"].decode()


#: The chain of conditions in `free`, from its second condition on, and the block that follows.
ELIF = PROGRAM[PROGRAM.index("elif") : PROGRAM.index("\n        with")]
WITH = PROGRAM[PROGRAM.index("with") : PROGRAM.index("\n        return n + 1")]
#: What `WITH` does within.
WITHIN = """\
text = \"\"\"one
              two\"\"\"
        # why
        self.give(text)"""
#: An edit, and what stands in the program after it instead of what.
EDITS = {
    "an expression": (f"{FREE}\n-n > self.limit\n+n > 7", "if n > self.limit:", "if (n > 7):"),
    "after an umlaut": (f'{FREE}\n-ValueError("ä", n)\n+KeyError("ö")', 'ValueError("ä", n)', '(KeyError("ö"))'),
    "one over lines": (f"{FREE}\n-n +\n-    1\n+n +\n+    2", "return n + 1", "return (n +\n    2)"),
    "a target": ("In: a.py::LIMIT\n-LIMIT\n+MAXIMUM", "LIMIT = 3", "(MAXIMUM) = 3"),
    "a constant": ("In: a.py::LIMIT\n-LIMIT = 3\n+LIMIT = 4", "LIMIT = 3", "LIMIT = 4"),
    "a field": ("In: a.py::Lock.limit\n-2\n+3", "limit: int = 2", "limit: int = (3)"),
    "of the module": ("In: a.py\n-import os\n+import sys", "import os", "import sys"),
    "a statement": (f"{FREE}\n-self.give(n)\n+pass", "    self.give(n)", "    pass"),
    "the only one": (f'{FREE}\n-raise ValueError("ä", n)', 'raise ValueError("ä", n)', "pass"),
    "one of many": (f"{FREE}\n-return n + 1", "        return n + 1\n", "        \n"),
    "put before": (f"{FREE}\n+n = 5\n return n + 1", "return n + 1", "n = 5\n        return n + 1"),
    "an elif": (f"{FREE}\n-if n == 0:\n+if n == 1:\n     ...\n else:\n     ...", "elif n == 0", "elif n == 1"),
    "no elif": (f"{FREE}\n-if n == 0:\n-    ...\n-else:\n-    ...", ELIF, ""),
    "elif to else": (
        f"{FREE}\n-if n == 0:\n+while n:\n     ...\n else:\n     ...",
        ELIF,
        "else:\n            while n:\n                return None\n            else:\n                self.give(n)",
    ),
    "a chain in a block": (
        f"{FREE}\n-if n > self.limit:\n+try:\n     ...\n-else:\n+finally:\n     ...",
        f'if n > self.limit:\n            raise ValueError("ä", n)  # of them\n        {ELIF}',
        'try:\n            raise ValueError("ä", n)\n        finally:\n            if n == 0:\n'
        "                return None\n            else:\n                self.give(n)",
    ),
    "what is in a block": (f"{FREE}\n-with self.mutex:\n-    ...\n+...", WITH, WITHIN),
    "a block within one": (
        f"{FREE}\n-with self.mutex:\n-    ...\n+if n:\n+    with a:\n+        ...",
        WITH,
        "if n:\n            with a:\n                "
        + WITHIN.replace("        # why", "                # why").replace("        self", "                self"),
    ),
    "except": (f"{GIVE}\n-except KeyError:\n+except OSError as e:\n     ...", "except KeyError", "except OSError as e"),
    "case": (f"{GIVE}\n-case 1 if n:\n+case 1 | 2:\n     ...", "case 1 if n", "case 1 | 2"),
    "no case": (f"{GIVE}\n-case 1 if n:\n-    n = 2", "case 1 if n:\n                n = 2\n", "\n"),
    "a head": (f"{FREE}\n-@property\n def free(self, n):\n     ...", "@property\n    def", "def"),
    "a method": ("In: a.py::Lock\n-def give(self, n):\n-    ...", PROGRAM[PROGRAM.index("def give") : -1], ""),
    "a function within": (f"{GIVE}.later\n-n - 1\n+n", "self.free(n - 1)", "self.free((n))"),
    "the last of three": (f"{GIVE}, 3 of 3\n-self.free(n)\n+self(n)", "self.free(n)\n\n", "(self(n))\n\n"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_an_edit_puts(name: str, tmp_path: Path) -> None:
    """The rest of the file stays as it is, with its comments."""
    edit, old, new = EDITS[name]
    assert PROGRAM.count(old) == 1
    assert broken(tmp_path, PROGRAM, edit) == PROGRAM.replace(old, new)


def test_several_edits(tmp_path: Path) -> None:
    edits = [f"{FREE}\n-n + 1\n+n", f"{FREE}\n-n > self.limit\n+True", "In: a.py::LIMIT\n-3\n+4"]
    expected = PROGRAM.replace("n + 1", "(n)").replace("n > self.limit", "(True)").replace("LIMIT = 3", "LIMIT = (4)")
    assert broken(tmp_path, PROGRAM, *edits) == expected


def test_a_move_and_a_reformat_leave_an_edit_standing(tmp_path: Path) -> None:
    edits = [
        f"{FREE}\n-if n > self.limit:\n-    ...\n-else:\n-    ...",
        f"{GIVE}\n-except KeyError:\n+except A:\n     ...",
    ]
    other = PROGRAM.replace("n > self.limit", "(\n            n  # so many\n            > self.limit\n        )")
    other = other.replace("except KeyError:", "except (KeyError):  # it is not there").replace('"ä", n', "'ä',\n n")
    start, method = other.index("    @property"), other.index("    def give")
    other = other[:start] + other[method:] + "\n" + other[start:method]
    texts = [broken(tmp_path, program, *edits) for program in (PROGRAM, other)]
    symbols = [File("a.py", text.encode()).symbols for text in texts]
    for name in ("Lock.free", "Lock.give"):
        one, moved = (siblings[at] for found in symbols for siblings, at in found[name])
        assert one.lineno != moved.lineno  # type: ignore[attr-defined]
        assert ast.dump(one) == ast.dump(moved)
    assert "except A:" in texts[1]


FAR = "runtime/b.py::Far.away"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ("In: a.py::Lock._free\n-n + 1\n+n", "a.py has no Lock._free; the nearest is Lock.free"),
        ("In: a.py::Locks.free\n-n + 1\n+n", "a.py has no Locks.free; the nearest is Lock.free"),
        ("In: a.py::Far.away\n-n + 1\n+n", f"a.py has no Far.away; there is {FAR}"),
        ("In: runtime/a.py::Far.away\n-n\n+1", f"no runtime/a.py; the nearest is runtime/b.py; there is {FAR}"),
        (f"{FREE}\n-n + 2\n+n", "a.py::Lock.free has no such code: 'n + 2'; the nearest is 'n + 1', line 24"),
        (f"{FREE}\n-return n + 2\n+return", "no such code: 'return n + 2'; the nearest is 'return n + 1', line 24"),
        (f"{GIVE}\n-case 1 if m:\n+case 1:\n     ...", "; the nearest is 'case 1 if n:"),
        (f"{GIVE}\n-self.free(n - 1)\n+pass", "a.py::Lock.give has no such code"),  # it is another symbol's
        ("In: a.py::Lock\n-n + 1\n+n", "a.py::Lock has no such code"),
        (f"{GIVE}\n-self.free(n)\n+pass", "has 'self.free(n)' 3 times, in lines 28, 36, 37, not 1"),
        (f"{GIVE}, 1 of 2\n-self.free(n)\n+pass", "3 times, in lines 28, 36, 37, not 2"),
        (f"{GIVE}, 4 of 3\n-self.free(n)\n+pass", "there is not a match 4 of 3"),
        (f"{FREE}\n-with self.mutex:\n-    ...\n+...\n+...", "more blocks"),
        (f"{FREE}\n-with self.mutex:\n-    ...\n+with a: ...", "on a line of its own"),
        (f"{GIVE}\n-except KeyError:\n-    n = 0", "a.py is not a program with this"),
    ],
)
def test_what_is_not_there_is_said_with_the_nearest(edit: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "b.py").write_text("class Far:\n    def away(self, n):\n        return n\n")
    (tmp_path / "dtrun.py").write_text("")
    with pytest.raises(ValueError, match=re.escape(why)):
        broken(tmp_path, PROGRAM, edit)


def test_two_edits_of_the_same(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 24: two edits change this"):
        broken(tmp_path, PROGRAM, f"{FREE}\n-n + 1\n+n", f"{FREE}\n-return n + 1\n+pass")


def test_one_that_shares_its_line() -> None:
    edit = Edit.parse("In: a.py\n-b()\n+import b")
    with pytest.raises(ValueError, match=r"line 1: 'b\(\)' does not stand on lines of its own"):
        find(edit, File("a.py", b"a(); b()"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("In: runtime/a.cc\n-a\n+b", 'a line "In: FILE.py::SYMBOL"'),
        ("In: runtime/a.py\nab\n+b", "not as 'ab'"),
        ("In: runtime/a.py\n+b", "the edit has no line of code to look for"),
        ("In: runtime/a.py\n-f(a)\n+f( a )  # other", "the code after is the code before"),
        ("In: runtime/a.py\n-a b\n+c", "this is not an expression, nor statements, nor clauses"),
        ("In: runtime/a.py\n-else:\n-    a\n+c", "this is not an expression"),
        ("In: tests/a.py\n-a\n+b", "tests/a.py is not of the product"),
    ],
)
def test_what_is_no_edit(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(f"What: it is broken\nRed: tests/a.py::test_a\n\n{text}\n")
    with pytest.raises(ValueError, match=re.escape(why)) as raised:
        Mutant.read(path)
    assert str(raised.value).startswith("mine.txt: ")
