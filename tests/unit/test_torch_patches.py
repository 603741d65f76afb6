"""The one list of what is replaced in torch: it is complete, each row names what it replaces and why, and goes back."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from checkout import ROOT
from sources import Source, below, refuse, source

from disttensor import torch_patches
from disttensor.runtime.protocol.errors import DisttensorError
from disttensor.torch_patches import (
    COMPILING,
    DEVICE_MESH,
    ELSEWHERE,
    IMPORT,
    PATCHES,
    PROFILING,
    RECORDING,
    SESSION,
    SHARDING,
    Patch,
)

#: Assignments to what is torch's that are no patches: (file, target).
NO_PATCH = {
    ("disttensor/torch_backend/naming.py", "torch.node"): "the device module, as torch's own registration sets it",
    ("runtime/node/rng_lock.py", "torch.get_rng_state"): "for nodes that are threads; put back at the session's end",
    ("runtime/node/rng_lock.py", "torch.random.get_rng_state"): "the same function",
    (
        "runtime/node/own_draws.py",
        "torch.random.name",
    ): "in a node's process: seeds, in an actor's method, are the actor's",
    ("runtime/node/own_draws.py", "torch.name"): "the same functions",
    ("runtime/node/graphs/engines/child.py", "module.name"): "in the process that compiles, which ends then",
    ("disttensor/testing/__init__.py", "module.attribute"): "limits of ours",
    (
        "disttensor/meshes/as_torch/world.py",
        "distributed_c10d._world.default_pg",
    ): "the default process group, as init_process_group sets it; ended as any",
    (
        "runtime/node/process_groups.py",
        "dist.distributed_c10d._world.group_count",
    ): "a count by which ranks name their groups: nodes have made others before",
}


def is_whole(patch: Patch) -> bool:
    """Whether a row says when, why and what for, and names a function that is there."""
    module, _, function = patch.make.partition(":")
    there = callable(getattr(importlib.import_module(f"disttensor.{module}"), function, None))
    when = patch.when in (IMPORT, SESSION, COMPILING, SHARDING, ELSEWHERE, RECORDING, PROFILING, DEVICE_MESH)
    return there and when and len(patch.why) > 10 and bool(patch.wanted)


def test_a_row_says_what_and_why() -> None:
    refuse((patch.target for patch in PATCHES if not is_whole(patch)), "a row says when and why, and names a function")


def test_no_target_stands_twice() -> None:
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)


def test_a_session_looks_at_nothing_of_dynamos() -> None:
    """What is dynamo's changes with each torch; who compiles nothing does not depend on it."""
    of_dynamo = {patch.when for patch in PATCHES if patch.target.startswith("torch._dynamo")}
    assert of_dynamo == {COMPILING}


def assigned(file: Source) -> Iterator[tuple[int, str]]:
    """(line, what) of all that a file sets on names that it has imported from torch, or by setattr on whatever; and of
    each function, whosever, that it gives other code: no debugger shows that one."""
    torchs = {
        alias.asname or alias.name.partition(".")[0]
        for node in file.nodes(ast.Import, ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "torch" and not getattr(node, "level", 0)
    }
    for node in file.nodes(ast.Call, ast.Attribute):
        match node:
            case ast.Call(func=ast.Name(id="setattr"), args=[target, name, _]):
                text = ast.unparse(target)
                if text.partition(".")[0] in torchs or text == "module":
                    named = name.value if isinstance(name, ast.Constant) else ast.unparse(name)
                    yield node.lineno, f"{text}.{named}"
            case ast.Attribute(attr=attr, ctx=ast.Store()):
                text = ast.unparse(node)
                if text.partition(".")[0] in torchs or attr in ("__code__", "__defaults__", "__kwdefaults__"):
                    yield node.lineno, text


def test_nothing_is_replaced_outside_of_the_list() -> None:
    found = ((file, line, what) for file in below("disttensor", "runtime") for line, what in assigned(file))
    unlisted = (f"{file.at(line)}: {what}" for file, line, what in found if (file.name, what) not in NO_PATCH)
    refuse(unlisted, "what is replaced in torch stands in disttensor/torch_patches")


def test_the_scan_finds() -> None:
    program = Source(
        "program.py",
        "import torch\nfrom torch.optim import swa_utils\n"
        "torch.x = 1\nsetattr(swa_utils, 'y', 2)\nf = torch.f\nf.__code__, torch.z = g.__code__, 3\n",
    )
    assert sorted(what for _, what in assigned(program)) == ["f.__code__", "swa_utils.y", "torch.x", "torch.z"]


def test_exceptions_are_there() -> None:
    gone = [(name, what) for name, what in NO_PATCH if what not in [w for _, w in assigned(source(ROOT / name))]]
    refuse((f"{name}: {what}" for name, what in gone), "these are gone: take them from the list")


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bookkeeping of its own for a test."""
    monkeypatch.setattr(torch_patches, "_undo", [])
    monkeypatch.setattr(torch_patches, "_installed", set())


def test_it_all_goes_back(none_installed: None) -> None:
    def seen() -> list[object]:
        found = [(owner, name) for patch in PATCHES for owner, name in torch_patches._owners(patch)]
        return [vars(owner).get(name) for owner, name in found]

    before = seen()
    for when in (IMPORT, SESSION, COMPILING, SHARDING, ELSEWHERE, RECORDING, PROFILING, DEVICE_MESH):
        torch_patches.install(when)
    assert len(torch_patches._undo) == len(before)
    assert seen() != before
    torch_patches.uninstall()
    assert seen() == before


def test_it_is_done_once(none_installed: None) -> None:
    torch_patches.install(ELSEWHERE)
    once = torch.Tensor.to
    torch_patches.install(ELSEWHERE)
    assert torch.Tensor.to is once
    torch_patches.uninstall()
    assert torch.Tensor.to is not once


@pytest.mark.parametrize("target", ["torch.nothing.at_all", "torch.Tensor.not_there", "torch.optim.*.not_there"])
def test_a_target_that_is_gone_is_named(target: str, none_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(PATCHES[0], target=target, when="never")
    there = replace(PATCHES[0], target="torch.Tensor.to", make="session.node_context:following", when="never")
    monkeypatch.setattr(torch_patches, "PATCHES", (there, gone))
    before = torch.Tensor.to
    for _ in range(2):  # it is no installed moment: a second session hears the same
        with pytest.raises(DisttensorError) as caught:
            torch_patches.install("never")
        assert f"torch {torch.__version__} has no {target}" in str(caught.value)
        assert gone.why in str(caught.value)
        assert torch.Tensor.to is before  # and nothing of it is done


def test_an_optional_target_may_be_gone(none_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(PATCHES[0], target="torch.Tensor.not_there", when="never", optional=True)
    monkeypatch.setattr(torch_patches, "PATCHES", (gone,))
    torch_patches.install("never")
    assert not hasattr(torch.Tensor, "not_there")
