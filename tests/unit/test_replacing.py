"""The product replaces none of its own functions: who wants to look in listens at a seam.

What sets an attribute whose name or owner is found while it runs is listed here, with what that is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sources import Source, agree, product

#: Where something else is set than a function of ours, and what.
OTHERS = {
    "disttensor/__init__.py::__getattr__": "a theme that is imported by its first use",
    "disttensor/cli/main.py::_run_by_mpi": "which launcher is the automatic one",
    "disttensor/dispatch/method_shortcuts.py::install": "methods of proxies, before there are any",
    "disttensor/futures/not_yet.py::": "methods of a class that is being made",
    "disttensor/meshes/as_torch/rank_numbers.py::refusing_operands.put": "an attribute of torch's operand",
    "disttensor/nn/sharded.py::Sharded.to_plain": "parameters of a module",
    "disttensor/proxy/proxy.py::method.give": "methods of proxies that files above give them, at import",
    "disttensor/seeing/recording.py::Recording._add_listeners": "which recording has the parts with names",
    "disttensor/seeing/recording.py::Recording.stop": "the same",
    "disttensor/seeing/torch_regions.py::entering.__enter__": "an attribute of torch's object for a part with a name",
    "disttensor/storage/set_data.py::become": "lists of a tensor's hooks",
    "disttensor/testing/__init__.py::limits": "numbers",
    "disttensor/torch_backend/naming.py::_there": "a module of torch's that was not there",
    "disttensor/torch_backend/register.py::register": "a method of proxies, before there are any",
    "disttensor/torch_patches/__init__.py::install": "functions of torch's",
    "disttensor/torch_patches/__init__.py::uninstall": "functions of torch's",
    "runtime/channel/gloo/group.py::_with": "options of gloo's",
    "runtime/launch/output/transient_line.py::TransientLine._guard": "a stream's write, while a line is shown",
    "runtime/launch/output/transient_line.py::TransientLine._unguard": "the same",
    "runtime/launch/tree/fork_child.py::become_worker": "a process's page",
    "runtime/node/graphs/engines/child.py::_compile": "functions of torch's",
    "runtime/node/own_draws.py::_watch_seeds": "functions of torch's",
    "runtime/process/renamed.py::old_methods": "methods of a class that is being made, which have an old name there",
}
#: Where functions of ours are replaced while something runs, and why that was decided.
DECIDED = {
    "disttensor/testing/__init__.py::_wrapped": "methods, for testing.at: its functions come before a moment and raise "
    "there, which no observer can, and looks at these moments would cost each message opcodes, for tests only",
    "disttensor/dispatch/whole_batches.py::watch": "the copy to a node or mesh, once accelerate is imported: a look "
    "whether a listener is there would cost each copy opcodes, for programs of one library",
}


def imported(file: Source) -> set[str]:
    """The names that a file imports from the product: its modules, classes and functions."""
    found = set()
    for each in file.nodes(ast.ImportFrom):
        if each.level or (each.module or "").split(".")[0] == "disttensor":
            found |= {alias.asname or alias.name for alias in each.names}
    return found


def replacing(file: Source) -> Iterator[str]:
    """The functions of a file that set what may be a function of ours: "runtime/node/state.py::NodeState.tell"."""
    names = imported(file)
    places = list[ast.expr]()
    for call in file.nodes(ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id in ("setattr", "delattr"):
            places.append(call)
    for target in (each for assigned in file.nodes(ast.Assign) for each in assigned.targets):
        match target:
            case ast.Attribute(value=ast.Name(id=name)) if name in names:
                places.append(target)
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars" | "globals"))):
                places.append(target)
    for place in places:
        yield f"{file.name}::{'.'.join(file.around(place))}"


def test_no_function_of_ours_is_replaced() -> None:
    found = (each for file in product() for each in replacing(file))
    agree(found, [*OTHERS, *DECIDED], "the product replaces none of its own functions")


def test_what_replaces_is_found() -> None:
    text = """
from ..dispatch import method_shortcuts as quick
from .hub import Hub
class Log:
    def begin(self, hub):
        setattr(hub, "send", self.send)
    def wrap(self):
        quick.issue = self.issue
    def end(self):
        delattr(self.hub, "send")
    def patch(self):
        vars(Hub)["send"] = self.send
    def keep(self, hub):
        self.hub, hub.log = hub, self
def undo():
    Hub.send = None
"""
    found = list(replacing(Source("disttensor/testing/log.py", text)))
    names = ("Log.begin", "Log.end", "undo", "Log.wrap", "Log.patch")
    assert sorted(found) == sorted(f"disttensor/testing/log.py::{name}" for name in names)
