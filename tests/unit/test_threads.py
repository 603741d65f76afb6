"""A thread has begun before anything that others see holds it: to join one that has not is a RuntimeError.

So a method starts a thread and then assigns it, and ``__init__``, whose object nobody has yet, does both.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from checkout import ROOT

#: Attributes with threads that start later, and why nobody joins them before.
LATER = {
    "runtime/transport/tunnel_io.py:_thread": "`start` comes before anybody gets the pump",
    "runtime/node/process_groups.py:_watcher": "`end` asks whether it is alive",
}


def kept_too_early(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the attribute of each thread that something holds before it has begun."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
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
    found, meant = [], set()
    for path in sorted([*(ROOT / "disttensor").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")]):
        if (ROOT / "disttensor" / "runtime") in path.parents:
            continue
        name = path.relative_to(ROOT).as_posix()
        for line, what in kept_too_early(path.read_text()):
            if f"{name}:{what}" in LATER:
                meant.add(f"{name}:{what}")
            else:
                found.append(f"{name}:{line}: {what}")
    assert not found, "start it first, and assign it then"
    assert meant == set(LATER)


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
    assert list(kept_too_early(early)) == [(6, "late"), (8, "seen"), (10, "Thread(target=f)")]
