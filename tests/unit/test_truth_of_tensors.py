"""No code of ours asks a tensor for its truth, its length, or whether it equals another one, unless it means that.

Such a question raises for most tensors, answers by their values for those of one element, and waits for a node if it is
a proxy. What only a GPU's node runs would show it nowhere else. The scan goes by annotations: parameters, variables,
attributes and results that are tensors, or that have them.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping

import pytest
from sources import Source, below, refuse

#: Classes and aliases that are tensors, or may be.
TENSORS = {"Tensor", "DistributedTensor", "Parameter", "Value", "Entry"}
#: Aliases of what has tensors, and dictionaries of them.
HOLDERS, TABLES = {"Tensors", "Results"}, {"Values"}
#: What asks for one truth, length or order of its argument, or of each element of it.
OF_ONE = {"bool", "len", "float", "int"}
OF_EACH = {"any", "all", "sorted", "min", "max"}
#: Places that mean it: a file, a text of the line, and why.
MEANT: dict[tuple[str, str], str] = {
    ("disttensor/tasks/calls.py", "if self._into:"): "a list",
    ("disttensor/training/replicas.py", "return tensor != first"): "element by element",
    ("runtime/channel/mpi/group.py", "len("): "numbers of bytes: what MPI sends is flat",
    ("runtime/collective/shared_pages.py", "bool(one)"): "one byte, on a CPU",
    ("runtime/node/shared_objects.py", "int(token)"): "a token is a number",
    ("runtime/node/tokens.py", "int(token)"): "a token is a number",
}

#: A tensor, and what has none; a list of tensors is "each " + ONE, a dictionary "under " + ONE, and so on.
ONE, OTHER = "tensor", ""
EACH, UNDER = "each ", "under "


def kind(annotation: ast.expr | None) -> str:
    """Returns what an annotation stands for."""
    match annotation:
        case ast.Constant(value=str(text)):
            return kind(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, right=right):
            return min(filter(None, (kind(left), kind(right))), key=len, default=OTHER)
        case ast.Subscript(value=ast.Name(id=of) | ast.Attribute(attr=of), slice=inner):
            if of in ("Callable", "type", "Literal"):
                return OTHER
            if of in ("dict", "Mapping", "MutableMapping", "OrderedDict", "defaultdict"):
                found = kind(inner.elts[-1]) if isinstance(inner, ast.Tuple) else OTHER
                return UNDER + found if found else OTHER
            parts = map(kind, inner.elts if isinstance(inner, ast.Tuple) else [inner])
            found = min(filter(None, parts), key=len, default=OTHER)
            return EACH + found if found else OTHER
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return (
                ONE if name in TENSORS else EACH + ONE if name in HOLDERS else UNDER + ONE if name in TABLES else OTHER
            )
    return OTHER


def inside(whole: str, of: str = EACH) -> str:
    """Returns what the elements of a list, or with UNDER of a dictionary, are."""
    return whole.removeprefix(of) if whole.startswith(of) else OTHER


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements, with those inside of them."""
    for node in body:
        yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from statements(getattr(node, name, []))


class Known:
    """What the annotations of a tree say: of results by the function's name, of attributes by theirs."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        """``trees``: by their modules, as paths without suffix."""
        self.functions: dict[tuple[str, str], str] = {}  #: of modules
        for module, tree in trees.items():
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    self.functions[module, node.name] = kind(node.returns)
        results: dict[str, set[str]] = {}
        attributes: dict[str, set[str]] = {}
        for node in (node for tree in trees.values() for node in statements(tree.body)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found = kind(node.returns)
                if any(ast.unparse(d) == "property" for d in node.decorator_list):
                    attributes.setdefault(node.name, set()).add(found)
                elif not any("contextmanager" in ast.unparse(d) for d in node.decorator_list):
                    results.setdefault(node.name, set()).add(found)
            elif isinstance(node, ast.AnnAssign):
                name = node.target.attr if isinstance(node.target, ast.Attribute) else getattr(node.target, "id", "")
                attributes.setdefault(name, set()).add(kind(node.annotation))
        self.results = {name: kinds.pop() for name, kinds in results.items() if len(kinds) == 1}
        self.attributes = {name: kinds.pop() for name, kinds in attributes.items() if len(kinds) == 1}


class Scan(ast.NodeVisitor):
    """Finds the questions in one function or module; ``names`` are those that it is known to have."""

    def __init__(self, known: Known, module: str) -> None:
        self.known, self.module = known, module
        self.imported: dict[str, tuple[str, str]] = {}
        self.scopes: list[dict[str, str]] = [{}]
        self.found: list[tuple[int, str]] = []

    # ---- what expressions are ---------------------------------------------------------------------------------------

    def of(self, node: ast.expr | None) -> str:
        match node:
            case ast.Name(id=name):
                return next((scope[name] for scope in reversed(self.scopes) if name in scope), OTHER)
            case ast.Attribute(attr=name):
                return self.known.attributes.get(name, OTHER)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                self.scopes[-1][name] = found = self.of(value)
                return found
            case ast.Call(func=ast.Name(id="map"), args=[fn, *_]):
                found = self.of(ast.Call(fn, [], []))
                return EACH + found if found else OTHER
            case ast.Call(func=ast.Name(id="filter" | "list" | "tuple" | "iter" | "reversed" | "set"), args=[*_, last]):
                return self.of(last)
            case ast.Call(func=ast.Attribute(value=whole, attr="values")):
                found = inside(self.of(whole), UNDER)
                return EACH + found if found else OTHER
            case ast.Call(func=ast.Attribute(value=whole, attr="pop" | "get" | "popleft")):
                return inside(self.of(whole)) or inside(self.of(whole), UNDER)
            case ast.Call(func=ast.Name(id=fn)):
                return self.known.functions.get(self.imported.get(fn, (self.module, fn)), OTHER)
            case ast.Call(func=ast.Attribute(attr=fn)):
                return self.known.results.get(fn, OTHER)
            case ast.Subscript(value=whole, slice=index):
                found = self.of(whole)
                return found if isinstance(index, ast.Slice) and found != ONE else inside(found) or inside(found, UNDER)
            case ast.IfExp(body=body, orelse=other):
                return min(filter(None, (self.of(body), self.of(other))), key=len, default=OTHER)
            case ast.Starred(value=whole):
                return inside(self.of(whole))
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                found = min(filter(None, map(self.of, elements)), key=len, default=OTHER)
                return EACH + found if found else OTHER
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                self.scopes.append({})
                self.loops(node.generators)
                found = self.of(node.elt)
                self.scopes.pop()
                return EACH + found if found else OTHER
        return OTHER

    def loops(self, generators: list[ast.comprehension]) -> None:
        for loop in generators:
            self.bind(loop.target, loop.iter)

    def bind(self, target: ast.expr, iterable: ast.expr) -> None:
        """Notes what a loop's variable is."""
        match target, iterable:
            case ast.Name(id=name), _:
                self.scopes[-1][name] = inside(self.of(iterable))
            case ast.Tuple(elts=[_, *_] as names), ast.Call(func=ast.Name(id="zip"), args=parts):
                for each, part in zip(names, parts, strict=False):
                    self.bind(each, part)
            case ast.Tuple(elts=[first, second]), ast.Call(func=ast.Name(id="enumerate"), args=[part, *_]):
                self.bind(first, ast.Constant(0))
                self.bind(second, part)
            case ast.Tuple(elts=[key, value]), ast.Call(func=ast.Attribute(value=whole, attr="items")):
                self.bind(key, ast.Constant(0))
                if isinstance(value, ast.Name):
                    self.scopes[-1][value.id] = inside(self.of(whole), UNDER)
            case ast.Tuple(elts=names), _:
                for each in names:
                    self.bind(each, ast.Constant(0))

    # ---- what binds names -------------------------------------------------------------------------------------------

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        path = [] if not node.level else self.module.split("/")[: -node.level]
        origin = "/".join([*path, *(node.module or "").split(".")]).removeprefix("disttensor/runtime")
        for name in node.names:  # the front end's link to the engine
            self.imported[name.asname or name.name] = ("runtime" + origin if origin[:1] == "/" else origin, name.name)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        scope = {a.arg: kind(a.annotation) for a in every}
        for several, form in ((given.vararg, EACH), (given.kwarg, UNDER)):
            if several is not None and (found := kind(several.annotation)):
                scope[several.arg] = form + found
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.scopes[-1][target.id] = self.of(node.value)
            elif isinstance(target, ast.Tuple):
                self.bind(target, ast.Constant(0))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.scopes[-1][node.target.id] = kind(node.annotation)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension_of(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp) -> None:
        self.scopes.append({})
        self.loops(node.generators)
        for test in (test for loop in node.generators for test in loop.ifs):
            self.truth(test)
        self.generic_visit(node)
        self.scopes.pop()

    visit_ListComp = visit_GeneratorExp = visit_SetComp = visit_DictComp = visit_comprehension_of

    # ---- what asks --------------------------------------------------------------------------------------------------

    def ask(self, node: ast.expr, what: str) -> None:
        self.found.append((node.lineno, f"{what}: {ast.unparse(node)[:90]}"))

    def truth(self, node: ast.expr) -> None:
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self.truth(value)
        elif self.of(node) == ONE:
            self.ask(node, "truth")

    def visit_If(self, node: ast.If | ast.While | ast.IfExp | ast.Assert) -> None:
        self.truth(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_Assert = visit_If

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values[:-1]:
            self.truth(value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.truth(node.operand)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
            if isinstance(op, (ast.In, ast.NotIn)):
                if self.of(left) == ONE and not isinstance(right, (ast.Set, ast.SetComp)):
                    self.ask(node, "equality")
            elif not isinstance(op, (ast.Is, ast.IsNot)) and OTHER not in (self.of(left), self.of(right)):
                self.ask(node, "equality")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="filter"), args=[ast.Constant(value=None), each]) if (
                self.of(each) == EACH + ONE
            ):
                self.ask(node, "truth of each")
            case ast.Call(func=ast.Name(id=name), args=[one, *_]) if name in OF_ONE and self.of(one) == ONE:
                self.ask(node, name)
            case ast.Call(func=ast.Name(id=name), args=[each]) if name in OF_EACH and self.of(each) == EACH + ONE:
                if not node.keywords:
                    self.ask(node, f"{name} of each")
            case ast.Call(func=ast.Attribute(value=whole, attr="remove" | "index" | "count"), args=[one]):
                if self.of(whole) == EACH + ONE and self.of(one) == ONE:
                    self.ask(node, "equality")
        self.generic_visit(node)


def questions(tree: ast.Module, known: Known, module: str = "") -> list[tuple[int, str]]:
    scan = Scan(known, module)
    scan.visit(tree)
    return sorted(set(scan.found))


FILES = below("runtime", "disttensor")


def module(file: Source) -> str:
    return file.name.removesuffix(".py")


def asked() -> Iterator[tuple[str, str, str]]:
    known = Known({module(file): file.tree for file in FILES})
    for file in FILES:
        for line, what in questions(file.tree, known, module(file)):
            yield file.name, file.lines[line - 1].strip(), f"{file.at(line)}: {what}"


def test_no_code_asks_a_tensor_for_truth_length_or_equality() -> None:
    found = [(name, text, what) for name, text, what in asked()]
    meant = {(name, text) for name, text in MEANT if any(name == n and text in t for n, t, _ in found)}
    unmeant = [what for name, text, what in found if not any(name == n and t in text for n, t in MEANT)]
    unmeant += [f"{name}: nothing asks in {text!r}: take it from MEANT" for name, text in sorted(set(MEANT) - meant)]
    refuse(unmeant, "no code asks a tensor for its truth, its length, or whether it equals another one")


ASKING = {
    "table": "for k, t in table(entry).items():\n    if t: use(k)",
    "filter": "for t in filter(None, map(made, entries.values())): use(t)",
    "filter of several": "for t in filter(None, (*map(made, entries.values()), *others)): use(t)",
    "if": "if made(entry): use(entry)",
    "or": "t = made(entry) or other",
    "not": "t = made(entry)\nif not t: use(t)",
    "while": "while (t := made(entry)): use(t)",
    "comprehension": "use([t for t in several(entries) if t])",
    "any": "use(any(several(entries)))",
    "in": "use(made(entry) in several(entries))",
    "equal": "use(made(entry) == made(other))",
    "lists": "use(several(entries) == several(other))",
    "remove": "several(entries).remove(made(entry))",
    "length": "use(len(made(entry)))",
    "max": "use(max(several(entries)))",
}


@pytest.mark.parametrize("form", ASKING)
def test_each_form_of_the_question_is_found(form: str) -> None:
    functions = """
        def made(entry: object) -> torch.Tensor | None: ...
        def several(entries: object) -> list[torch.Tensor]: ...
        def use(value: object) -> None: ...
        def table(entry: object) -> dict[int, torch.Tensor]: ...
    """
    known = Known({"": ast.parse(textwrap.dedent(functions))})
    assert len(questions(ast.parse(ASKING[form]), known)) == 1
    innocent = [
        "if made(entry) is None: use(entry)",
        "if several(entries): use(entries)",
        "use(len(several(entries)))",
        "use(1 in table(2))",
    ]
    assert questions(ast.parse("\n".join(innocent)), known) == []


def test_the_code_of_gpus_is_scanned() -> None:
    scanned = {file.name for file in FILES}
    assert {"runtime/node/streams/scheduler.py", "runtime/node/streams/cuda_lane.py"} <= scanned
