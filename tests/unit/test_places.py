"""Places: what a node and a mesh have in common is asked of either, and where they differ the code says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from sources import Source, product, refuse

from disttensor.session.places import MeshPlace, NodePlace, Place

KINDS = {"MeshPlace", "NodePlace"}


def unexplained(file: Source) -> Iterator[ast.Call]:
    """The questions whether a place is a node's or a mesh's that have no comment, in their line or the one above."""
    for call in file.nodes(ast.Call):
        if not (isinstance(call.func, ast.Name) and call.func.id == "isinstance" and len(call.args) == 2):
            continue
        if not KINDS & {each.id for each in ast.walk(call.args[1]) if isinstance(each, ast.Name)}:
            continue
        above, line = file.lines[call.lineno - 2], file.lines[call.lineno - 1]
        if not above.lstrip().startswith("# ") and "  # " not in line:
            yield call


def test_each_question_whether_a_place_is_a_mesh_says_why() -> None:
    """Where they do not differ there is nothing to ask: ``place.members``, ``place.ranks``, ``place.one``."""
    refuse(
        (f"{file.at(call)}: {ast.unparse(call)}" for file in product() for call in unexplained(file)),
        "a comment above says why a mesh is something else here",
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1\nif isinstance(place, MeshPlace): pass", 1),
        ("# a mesh has dims\nif isinstance(place, MeshPlace): pass", 0),
        ("x = 1\nif isinstance(place, (int, NodePlace)): pass  # why", 0),
        ("x = 1\nif isinstance(place, int) and kind is MeshPlace: pass", 0),
    ],
)
def test_a_question_is_seen(text: str, found: int) -> None:
    assert len(list(unexplained(Source("an example", text)))) == found


def test_only_a_node_has_a_number() -> None:
    """What is for one node asks for ``one``, which says what to write in place of a mesh."""
    assert hasattr(NodePlace, "node")
    assert not hasattr(MeshPlace, "node")
    assert {name for name in ("one", "members", "ranks", "host", "written") if not hasattr(MeshPlace, name)} == set()
    assert Place.__args__ == (NodePlace, MeshPlace)  # type: ignore[attr-defined]
