"""A thread has begun before anything that others see holds it: to join one that has not is a RuntimeError.

So a method starts a thread and then assigns it, and ``__init__``, whose object nobody has yet, does both.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sources import Source, below, refuse

#: Attributes with threads that start later, and why nobody joins them before.
LATER = {
    "runtime/transport/tunnel_io.py:_thread": "`start` comes before anybody gets the pump",
    "runtime/endpoints/wires.py:_thread": "`start` comes before anybody gets the wires",
    "runtime/node/process_groups.py:_watcher": "`end` asks whether it is alive",
}


def kept_too_early(file: Source) -> Iterator[tuple[int, str]]:
    """Yields the line and the attribute of each thread that something holds before it has begun."""
    if "Thread" not in file.text:
        return
    for function in file.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        inside = list(ast.walk(function))
        started = {
            ast.unparse(node.func.value)
            for node in inside
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "start"
        }
        for node in inside:
            match node:
                case ast.Assign(targets=targets, value=made) if _is_thread(made):
                    held = [target for target in targets if not isinstance(target, ast.Name)]
                case ast.AnnAssign(target=target, value=made) if made is not None and _is_thread(made):
                    held = [] if isinstance(target, ast.Name) else [target]
                case ast.Call(func=ast.Attribute(attr="append" | "add" | "put"), args=[made]) if _is_thread(made):
                    held = [made]
                case _:
                    continue
            for target in held:
                text = ast.unparse(target)
                if function.name != "__init__" or text not in started:
                    yield node.lineno, text.removeprefix("self.")


def _is_thread(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("threading.Thread", "Thread")


def test_a_thread_has_begun_before_others_see_it() -> None:
    early = [(file, line, what) for file in below("disttensor", "runtime") for line, what in kept_too_early(file)]
    found = [f"{file.at(line)}: {what}" for file, line, what in early if f"{file.name}:{what}" not in LATER]
    gone = LATER.keys() - {f"{file.name}:{what}" for file, _, what in early}
    found += [f"{each} starts no later: take it from LATER" for each in sorted(gone)]
    refuse(found, "a thread is started first, and assigned then")


def test_what_the_scan_finds() -> None:
    early = """
class A:
    def __init__(self):
        self.fine = Thread(target=f)
        self.fine.start()
        self.late = threading.Thread(target=f)
    def begin(self):
        self.seen = threading.Thread(target=f)
        self.seen.start()
        all.append(Thread(target=f))
        own = Thread(target=f)
        own.start()
        self.own = own
"""
    assert list(kept_too_early(Source("program.py", early))) == [(6, "late"), (8, "seen"), (10, "Thread(target=f)")]
