"""Mutants: what the files of tests/mutants/ say, where in the product that stands, and the product broken by it.

A mutant holds to symbols and to the tree of the syntax, not to lines: it stays when its code moves within the file, or
is formatted anew. tests/mutants/README.md has the form; tools/ci/mutants.py runs them.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

#: Where mutants lie, in the tree.
FOLDER = Path("tests", "mutants")
#: What a mutant may change.
PRODUCT = re.compile(r"(disttensor/(?!runtime/)|runtime/|examples/|tools/bench/|dtrun\.py$)")
#: What a mutant says of itself, a line for each.
HEAD = ("What", "Red", "Row", "Needs")
#: Where an edit is: the file, the symbol if it is in one, and which of how many matches is meant.
WHERE = re.compile(r"In: (?P<file>\S+?\.py)(::(?P<symbol>\w+(\.\w+)*))?(, (?P<number>\d+) of (?P<of>\d+))?")

DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: What stands in lists that an edit can take parts of.
ITEMS = (ast.stmt, ast.excepthandler, ast.match_case)
#: Attributes that are not part of the syntax: an assignment's target and a name that is read are the same code.
ASIDE = ("ctx", "kind", "type_comment")


# ---- code ------------------------------------------------------------------------------------------------------------


class Code:
    """The text of a program, as lines of bytes (the parser counts columns in bytes), and its tree."""

    def __init__(self, text: bytes, tree: ast.Module | None = None) -> None:
        self.lines = text.split(b"\n")
        self.tree = ast.parse(text) if tree is None else tree

    def start(self, node: ast.AST) -> tuple[int, int]:
        """The line and the column at which a statement, clause or expression begins, with its decorators."""
        if isinstance(node, ast.match_case):  # the parser does not say where "case" stands
            line = next(n for n in range(node.pattern.lineno, 0, -1) if self.lines[n - 1].lstrip().startswith(b"case"))
            return line, _indentation(self.lines[line - 1])
        line = min(each.lineno for each in [node, *getattr(node, "decorator_list", ())])  # type: ignore[attr-defined]
        return line, node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> tuple[int, int]:
        if isinstance(node, ast.match_case):
            node = node.body[-1]
        return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]

    def between(self, start: tuple[int, int], end: tuple[int, int]) -> list[bytes]:
        lines = self.lines[start[0] - 1 : end[0]]
        lines[-1] = lines[-1][: end[1]]
        lines[0] = lines[0][start[1] :]
        return lines

    def is_elif(self, node: ast.AST) -> bool:
        line, column = self.start(node)
        return isinstance(node, ast.If) and self.lines[line - 1].startswith(b"elif", column)

    @cached_property
    def _within_strings(self) -> set[int]:
        """Lines that begin inside of a string, whose indentation is a part of it."""
        texts = [node for node in ast.walk(self.tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
        return {line for node in texts for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)}

    def laid(self, nodes: Sequence[ast.AST], column: int, blocks: Iterable[tuple[Code, Any]] = ()) -> list[bytes]:
        """The lines of these statements, indented to a column, with blocks of other code for each ``...``."""
        start = self.start(nodes[0])
        holes = {hole.lineno: (hole, *block) for hole, block in zip(_holes(nodes), blocks, strict=False)}
        shift, laid = column - start[1], []
        if self.is_elif(nodes[0]):
            start = start[0], start[1] + len("el")
        for number, line in enumerate(self.between(start, self.end(nodes[-1])), start[0]):
            if number in holes:
                hole, code, block = holes[number]
                if self.lines[number - 1][: hole.col_offset].strip():
                    raise ValueError("in the code that is put, ... is to stand on a line of its own")
                laid += code.laid(block, hole.col_offset + shift)
            elif number == start[0]:
                laid.append(b" " * column + line)
            elif number in self._within_strings or not line.strip():
                laid.append(line)
            else:
                laid.append(b" " * (_indentation(line) + shift) + line.lstrip())
        return laid


def _indentation(line: bytes) -> int:
    return len(line) - len(line.lstrip())


def _holes(nodes: Iterable[ast.AST]) -> Iterator[ast.Expr]:
    """Each ``...`` that is a statement, in the order in which `_same` finds blocks."""
    for node in nodes:
        if _is_hole(node):
            yield node  # type: ignore[misc]
        else:
            for field in node._fields:
                value = getattr(node, field, None)
                each = value if isinstance(value, list) else [value]
                yield from _holes(each for each in each if isinstance(each, ast.AST))


def _is_hole(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def _same(want: Any, found: Any, blocks: list[list[ast.AST]]) -> bool:
    """Whether both are the same syntax; a block that is ``...`` is the same as any, which is then added to blocks."""
    if isinstance(want, list) and isinstance(found, list):
        if len(want) == 1 and _is_hole(want[0]) and found:
            blocks.append(found)
            return True
        return len(want) == len(found) and all(_same(w, f, blocks) for w, f in zip(want, found, strict=True))
    if type(want) is not type(found):
        return False
    if not isinstance(want, ast.AST):
        return bool(want == found)
    fields = (field for field in want._fields if field not in ASIDE)
    return all(_same(getattr(want, field, None), getattr(found, field, None), blocks) for field in fields)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and those below it, except definitions, which are symbols, and parts that no edit can replace."""
    rest = [node]
    while rest:
        node = rest.pop()
        yield node
        if not isinstance(node, (ast.JoinedStr, ast.pattern)):
            rest += [child for child in ast.iter_child_nodes(node) if not isinstance(child, DEFINITIONS)]


def _lists(node: ast.AST) -> Iterator[list[ast.AST]]:
    """The blocks and the lists of clauses of a node, and of what is below except definitions."""
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, list) and value and isinstance(value[0], ITEMS):
            yield value
            for each in value:
                if not isinstance(each, DEFINITIONS):
                    yield from _lists(each)


class File(Code):
    """A file of the product with its symbols: for each name its definitions, each as a list and an index."""

    def __init__(self, name: str, text: bytes, tree: ast.Module | None = None) -> None:
        super().__init__(text, tree)
        self.name = name
        self.symbols: dict[str, list[tuple[list[ast.AST], int]]] = {}
        self._collect(self.tree, "")

    def _collect(self, scope: ast.AST, prefix: str) -> None:
        for siblings in _lists(scope):
            for at, node in enumerate(siblings):
                names: list[str] = []
                if isinstance(node, DEFINITIONS):
                    names = [node.name]
                    self._collect(node, f"{prefix}{node.name}.")
                elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(scope, (ast.Module, ast.ClassDef)):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = [target.id for target in targets if isinstance(target, ast.Name)]
                for name in names:
                    self.symbols.setdefault(prefix + name, []).append((siblings, at))

    def windows(self, symbol: str, size: int) -> Iterator[tuple[list[ast.AST], list[ast.AST]]]:
        """Each run of so many statements or clauses that a symbol has, and the list that the run is in."""
        roots = self.symbols[symbol] if symbol else []
        for siblings, at in roots:
            if size == 1:
                yield siblings[at : at + 1], siblings
        for scope in [siblings[at] for siblings, at in roots] or [self.tree]:
            for siblings in _lists(scope):
                for at in range(len(siblings) - size + 1):
                    yield siblings[at : at + size], siblings

    def expressions(self, symbol: str) -> Iterator[ast.AST]:
        for scope in [siblings[at] for siblings, at in self.symbols[symbol]] if symbol else [self.tree]:
            yield from (node for node in _own(scope) if isinstance(node, ast.expr))


# ---- edits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snippet:
    """An expression, or statements, or clauses (``except``, ``case``) of an edit."""

    code: Code
    nodes: list[ast.AST]

    @classmethod
    def expression(cls, text: str) -> Snippet | None:
        """Returns None for text that is not an expression; one may go over several lines without brackets around it."""
        try:
            code = Code(text.encode())
        except SyntaxError:
            try:
                code = Code(f"({text}\n)".encode())
            except SyntaxError:
                return None
        only = code.tree.body[0] if len(code.tree.body) == 1 else None
        return cls(code, [only.value]) if isinstance(only, ast.Expr) else None

    @classmethod
    def statements(cls, text: str) -> Snippet:
        """Raises ValueError."""
        try:
            code = Code(text.encode())
            return cls(code, list(code.tree.body))
        except SyntaxError as error:
            why = error
        for clauses in ("try:\n    pass\n" + text, "match _:\n" + textwrap.indent(text, " ")):
            try:
                code = Code(clauses.encode())
            except SyntaxError:
                continue
            only = code.tree.body[0] if len(code.tree.body) == 1 else None
            if isinstance(only, ast.Try) and only.handlers and not only.orelse and not only.finalbody:
                return cls(code, list(only.handlers))
            if isinstance(only, ast.Match):
                return cls(code, list(only.cases))
        raise ValueError(f"this is not an expression, nor statements, nor clauses ({why.msg}): {text!r}")


@dataclass(frozen=True)
class Edit:
    """Code of a symbol, and what is put in its place."""

    file: str
    symbol: str
    before: Snippet
    after: Snippet
    expression: bool
    number: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.file}::{self.symbol}" if self.symbol else self.file

    @classmethod
    def parse(cls, text: str) -> Edit:
        """Raises ValueError."""
        where, *lines = text.split("\n")
        found = WHERE.fullmatch(where)
        if found is None:
            raise ValueError(f'a line "In: FILE.py::SYMBOL" or "In: FILE.py::SYMBOL, 2 of 3", not {where!r}')
        if strange := [line for line in lines if line[:1] not in ("", " ", "-", "+")]:
            raise ValueError(f'below "In:" lines begin with " ", "-" or "+", not as {strange[0]!r}')
        old, new = (
            textwrap.dedent("\n".join(line[1:] for line in lines if line[:1] != sign)).strip("\n") for sign in "+-"
        )
        if not old:
            raise ValueError(f"{where}: the edit has no line of code to look for")
        before, after = Snippet.expression(old), Snippet.expression(new)
        expression = before is not None and after is not None
        if before is None or after is None:
            before, after = Snippet.statements(old), Snippet.statements(new)
        if ast.dump(ast.Module(before.nodes, [])) == ast.dump(ast.Module(after.nodes, [])):  # type: ignore[arg-type]
            raise ValueError(f"{where}: the code after is the code before")
        numbers = int(found["number"] or 1), int(found["of"] or 1)
        return cls(found["file"], found["symbol"] or "", before, after, expression, *numbers)


@dataclass(frozen=True)
class Found:
    """Where an edit is in a file: from where to where, and what is put there."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: bytes

    @property
    def lines(self) -> range:
        return range(self.start[0], self.end[0] + 1)


def find(edit: Edit, file: File) -> Found:
    """Raises ValueError if the symbol has the code not as often as the edit says."""
    want = edit.before.nodes
    matches: list[tuple[list[ast.AST], list[ast.AST], list[list[ast.AST]]]] = []
    for nodes, siblings in _candidates(edit, file):
        blocks: list[list[ast.AST]] = []
        if all(_same(w, f, blocks) for w, f in zip(want, nodes, strict=True)):
            matches.append((nodes, siblings, blocks))
    matches.sort(key=lambda match: file.start(match[0][0]))
    if not 1 <= edit.number <= edit.of:
        raise ValueError(f"{edit}: there is not a match {edit.number} of {edit.of}")
    if len(matches) != edit.of:
        lines = ", ".join(str(file.start(nodes[0])[0]) for nodes, _, _ in matches)
        if not matches:
            raise ValueError(f"{edit} has no such code: {_text(want)!r}{_nearest_code(edit, file)}")
        raise ValueError(
            f"{edit} has {_text(want)!r} {len(matches)} times, in lines {lines}, not {edit.of}: say more of the code "
            f'around it, or "In: {edit}, 1 of {len(matches)}"'
        )
    nodes, siblings, blocks = matches[edit.number - 1]
    start, end = file.start(nodes[0]), file.end(nodes[-1])
    if edit.expression:
        (value,) = edit.after.nodes
        lines = edit.after.code.between(edit.after.code.start(value), edit.after.code.end(value))
        return Found(start, end, b"(" + b"\n".join(lines) + b")")
    if file.lines[start[0] - 1][: start[1]].strip():
        raise ValueError(f"{file.name}, line {start[0]}: {_text(want)!r} does not stand on lines of its own")
    if sum(1 for _ in _holes(edit.after.nodes)) > len(blocks):
        raise ValueError(f"{edit}: the code after has more blocks ... than the code before")
    return Found(start, end, _replacement(edit.after, file, nodes, siblings, blocks))


def _candidates(edit: Edit, file: File) -> Iterator[tuple[list[ast.AST], list[ast.AST]]]:
    if edit.expression:
        kind = type(edit.before.nodes[0])
        return (([node], [node]) for node in file.expressions(edit.symbol) if type(node) is kind)
    return file.windows(edit.symbol, len(edit.before.nodes))


def _replacement(
    after: Snippet, file: File, nodes: list[ast.AST], siblings: list[ast.AST], blocks: list[list[ast.AST]]
) -> bytes:
    """The text for statements or clauses of a file: after what indents the first of them, and as deep as that."""
    column = file.start(nodes[0])[1]
    is_elif = file.is_elif(nodes[0])
    if not after.nodes:
        return b"" if is_elif or len(nodes) < len(siblings) else b"pass"
    word, deeper = b"", 0
    if is_elif:
        word, deeper = (b"el", 0) if [type(node) for node in after.nodes] == [ast.If] else (b"else:\n", 4)
    lines = after.code.laid(after.nodes, column + deeper, [(file, block) for block in blocks])
    return word + b"\n".join(lines)[0 if deeper else column :]


def _text(nodes: Iterable[ast.AST]) -> str:
    text = "\n".join(_text_of(node) for node in nodes)
    return text if len(text) <= 200 else text[:197] + "..."


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.match_case):  # which ast.unparse takes for a part only
        return ast.unparse(ast.Match(ast.Name("_"), [node])).partition("\n")[2].lstrip()
    return ast.unparse(node)


def _nearest_code(edit: Edit, file: File) -> str:
    there = {_text(nodes): nodes for nodes, _ in _candidates(edit, file)}
    found = difflib.get_close_matches(_text(edit.before.nodes), there, 1)
    return f"; the nearest is {found[0]!r}, line {file.start(there[found[0]][0])[0]}" if found else ""


# ---- mutants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """What a file breaks, the tests that find it, the rows that it breaks, what its tests need, and how."""

    name: str
    what: str
    red: tuple[str, ...]
    rows: tuple[str, ...]
    needs: str
    edits: tuple[Edit, ...]

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """Raises ValueError for a file that is not a mutant."""
        try:
            return cls._parse(path.stem, path.read_text())
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None

    @classmethod
    def _parse(cls, name: str, text: str) -> Mutant:
        head, *edits = re.split(r"(?m)^(?=In: )", text)
        said: dict[str, list[str]] = {key: [] for key in HEAD}
        for line in filter(None, head.splitlines()):
            key, colon, value = line.partition(": ")
            if not colon or key not in said:
                form = ", ".join(f'"{key}: ..."' for key in HEAD)
                raise ValueError(f'above the lines "In: ..." there are lines {form}, not {line!r}')
            said[key].append(value.strip())
        if len(said["What"]) != 1 or not said["Red"] or not edits:
            raise ValueError('it needs one line "What: ...", lines "Red: ..." and "In: ..." with an edit below')
        for test in said["Red"]:
            if "::" not in test:
                raise ValueError(f"{test} is not a test's id")
        parsed = tuple(map(Edit.parse, edits))
        for edit in parsed:
            if not PRODUCT.match(edit.file):
                raise ValueError(f"{edit.file} is not of the product")
        rows = tuple(" ".join(said["Row"]).split())
        return cls(name, said["What"][0], tuple(said["Red"]), rows, " ".join(said["Needs"]), parsed)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(edit.file for edit in self.edits))


def read_all(root: Path, names: Sequence[str] = ()) -> list[Mutant]:
    """The mutants of these names, or all. Raises ValueError."""
    paths = {path.stem: path for path in sorted((root / FOLDER).glob("*.txt"))}
    if unknown := [name for name in names if name not in paths]:
        raise ValueError(f"there is no mutant {', '.join(unknown)}{_nearest(unknown[0], paths)}; see --list")
    return [Mutant.read(paths[name]) for name in names or paths]


class Product:
    """The files of a tree that mutants change, each read and parsed once. ``parsed`` gives the trees of the syntax of
    files at these paths, where somebody has them anyway."""

    def __init__(self, root: Path, parsed: Callable[[Path], ast.Module] | None = None) -> None:
        self._root, self._parsed = root, parsed
        self._files: dict[str, File] = {}

    def file(self, name: str) -> File:
        """Raises ValueError."""
        if name not in self._files:
            try:
                path = self._root / name
                text = path.read_bytes()
                self._files[name] = File(name, text, None if self._parsed is None else self._parsed(path))
            except FileNotFoundError:
                raise ValueError(f"there is no {name}{_nearest(name, self._names())}") from None
        return self._files[name]

    def find(self, edit: Edit) -> Found:
        """Where an edit is. Raises ValueError, with the nearest name if what it names is gone."""
        try:
            file = self.file(edit.file)
        except ValueError as error:
            raise ValueError(f"{error}{self._elsewhere(edit)}") from None
        if edit.symbol and edit.symbol not in file.symbols:
            near = _nearest(edit.symbol, file.symbols)
            raise ValueError(f"{edit.file} has no {edit.symbol}{near}{self._elsewhere(edit)}")
        return find(edit, file)

    def broken(self, mutant: Mutant) -> dict[str, bytes]:
        """The texts of the files that a mutant changes, with what it does. Raises ValueError."""
        texts = {}
        for name in mutant.files:
            found = sorted((self.find(edit) for edit in mutant.edits if edit.file == name), key=lambda f: f.start)
            lines = list(self.file(name).lines)
            for one, other in itertools.pairwise(found):
                if other.start < one.end:
                    raise ValueError(f"{name}, line {other.start[0]}: two edits change this")
            for each in reversed(found):
                (first, start), (last, end) = each.start, each.end
                text = lines[first - 1][:start] + each.text + lines[last - 1][end:]
                lines[first - 1 : last] = text.split(b"\n")
            texts[name] = b"\n".join(lines)
            try:
                ast.parse(texts[name])
            except SyntaxError as error:
                raise ValueError(f"{name} is not a program with this: {error.msg}, line {error.lineno}") from None
        return texts

    def _names(self) -> list[str]:
        tops = [self._root / top for top in ("disttensor", "runtime", "examples", "tools/bench")]
        files = [self._root / "dtrun.py", *(path for top in tops for path in sorted(top.rglob("*.py")))]
        return [name for file in files if PRODUCT.match(name := file.relative_to(self._root).as_posix())]

    def _elsewhere(self, edit: Edit) -> str:
        """The other files, if any, that have the symbol of an edit."""
        last = edit.symbol.rpartition(".")[2]
        defined = re.compile(rf"(?m)^\s*((async )?def |class )?{last}\b".encode())
        names = [name for name in self._names() if last and defined.search((self._root / name).read_bytes())]
        there = [f"{name}::{edit.symbol}" for name in names if edit.symbol in self.file(name).symbols]
        return f"; there is {' and '.join(there[:3])}" if there else ""


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(names), 1)
    return f"; the nearest is {found[0]}" if found else ""
