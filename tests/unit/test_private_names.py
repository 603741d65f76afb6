"""Tests of behaviour keep to what users have: public names of disttensor, and ``disttensor.testing``.

So they survive a change of what lies inside. Tests of something internal may import it: they are listed, with why.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache

from sources import Source, below, refuse

import disttensor as dt
from disttensor import moved

#: Where tests of behaviour lie.
FOLDERS = (
    "ops",
    "autograd",
    "graphs",
    "streams",
    "collectives",
    "meshes",
    "training",
    "checkpoint",
    "data",
    "nn",
    "views",
    "verify",
    "tasks",
    "shared",
    "endpoints",
    "faults",
    "docs",
    "launch",
)
FILES = below(*(f"tests/{folder}" for folder in FOLDERS))

#: What users import: documented modules. Their own private names are private all the same.
PUBLIC = {
    "disttensor",
    "dtrun",
    *(f"disttensor.{name}" for name in dir(dt) if inspect.ismodule(getattr(dt, name))),
    "disttensor.checkpoint",
    "disttensor.collectives.functional",
    "disttensor.factories",
    "disttensor.nn",
    "disttensor.testing",
    "disttensor.training",
    "disttensor.verify",
    "disttensor.views",
    "disttensor.runtime.channel",
    "disttensor.runtime.launch",
    "disttensor.runtime.launch.starters.command",
}

#: Types of PyTorch 0.x, which are at the first level and not in its ``dir``.
TYPES = {name for name in dt.factories.__all__ if name.endswith("Tensor")}

#: Private names that are torch's, on tensors and on its DeviceMesh.
TORCHS = {"_base", "_flatten", "_unflatten", "_grad", "_indices", "_is_view", "_nnz", "_values", "_version"}

#: Files that reach inside: what internal thing each of them tests. The list only shrinks: one that reaches inside no
#: more has to leave it.
INTERNAL: dict[str, str] = {
    "faults/test_cancelled.py": "the moment at which a function has been sent behind another one",
    "ops/test_beside.py": "what stands between torch and its own functions: which backwards it takes for ours",
    "tasks/test_edited.py": "Modules: which modules have changed since nodes imported them",
    "tasks/test_map_chunks.py": "chunks, mapping: how many items go at once, however busy the machine is",
    "tasks/test_kept_pickles.py": "KeptPickles: the bytes that are kept against those that are made anew, and how many",
    "ops/test_metadata.py": "meta kernels that are wrong: what the script infers is replaced",
    "ops/test_picked_kernels.py": "kernel_choice.py, with records that no node tells, and the table of all overrides",
    "ops/test_shortcut_oracle.py": "the shortcuts' table, and the commands that they and the slow way issue",
    "ops/test_plans.py": "the tables of plans and templates: their bounds and their keys",
    "verify/test_selfcheck.py": "what stands in the ways of operations while they are compared, and seeded defects",
    "graphs/test_engine_build.py": "the process that compiles engines",
    "graphs/test_compiled_inputs.py": "what a compiled Program looks at of its inputs",
    "graphs/test_engine_cuda.py": "the engine of CUDA graphs, with a stand-in for a GPU",
    "graphs/test_engine_programs.py": "what engines make of a Program",
    "graphs/test_pieces.py": "the pieces in which an Interpreter compiles a Program",
    "docs/test_doctor_page.py": "what becomes of a trial that crashes or hangs, and the words of a row",
    "docs/test_seeing_page.py": "the seconds after which a wait is shown, and told of, which are a minute",
    "docs/test_gpu_page.py": "the steps of the doctor's trial of GPUs",
    "docs/test_docstring_examples.py": "the names of modules whose docstrings have examples, some of them internal",
    "checkpoint/test_checkpoint_kills.py": "when a wait for a save says so, and another job's claim",
    "launch/test_odd_names.py": "the frames of trees, which refuse texts that are no UTF-8",
    "streams/test_ahead.py": "Ahead: which receives may begin before their turn",
    "streams/test_stream_ends.py": "Session.synchronize with a time limit, which dt.synchronize has not",
    "streams/test_streams_cuda.py": "lanes of CUDA streams, with a stand-in for a GPU",
    "collectives/test_shared_pages.py": "boards in shared memory",
    "collectives/test_collective_failures.py": "algorithms over a wire whose ranks fail",
    "collectives/test_collectives.py": "algorithms as functions of ranks over a wire",
    "collectives/test_pairs.py": "which ranks of an algorithm send each other messages over a wire",
    "collectives/test_native_ends.py": "a channel's own collectives over a wire whose ranks fail",
    "training/test_dropout_of_ranks.py": "the seeds that a mesh's varying generators begin with",
    "data/test_given_batches.py": "what is issued to give batches, and that it is not cancelled as the script has them",
    "endpoints/test_endpoint_security.py": "the frames of strangers and liars, and what is held of their connections",
    "faults/test_attacked.py": "how long a wait is before it is explained, and workers that break the protocol",
    "faults/test_other_user.py": "the secrets of a session, to see that nobody else can",
    "faults/test_slow_wire.py": "the addresses that processes tell each other, to have slow wires between them",
    "faults/test_stale.py": "whether an ended session is still in memory",
    "faults/test_warm.py": "infer.warm, which a first session calls while its nodes start",
    "launch/test_binding.py": "which cores and GPUs a node is given, on hosts that are made up",
    "launch/test_dtrun.py": "dtrun's main, and the server that it hands down, without a process of its own",
    "launch/test_growing.py": "a session told to start what cannot start",
    "launch/test_hostile_agents.py": "frames that no agent of ours sends, and the root that gets them",
    "launch/test_imports.py": "whichever module is imported first, internal ones too",
    "launch/test_hosts_that_differ.py": "the versions that hosts compare",
    "launch/test_init_methods.py": "the keys that a meeting derives, to see that nobody else can",
    "launch/test_join.py": "the launcher for nodes that join, and its frames",
    "launch/test_launch.py": "the local launcher and its fork server, and their frames",
    "launch/test_launch_mpi.py": "the secrets of a session, to see that nobody else can",
    "launch/test_launcher_contract.py": "launchers that break their promises, made of parts of real ones",
    "launch/test_memory_limits.py": "Launcher.kill",
    "launch/test_output.py": "Launcher.flush",
    "launch/test_process_groups.py": "the moment between the choice of a process group and its commands",
    "launch/test_root.py": "the root's launcher and its rest between sessions",
    "launch/test_root_ends.py": "how the root's launcher ends",
    "launch/test_shipping.py": "which modules are shipped, and their frames",
    "launch/test_ssh.py": "hosts with another version of disttensor",
}


def reaches(file: Source) -> Iterator[tuple[int, str]]:
    """(line, what) of all that a program, or one that it has as text, uses of disttensor and a user does not."""
    ours, foreign = {"dt", "disttensor"}, {"self", "cls"}  #: names of our modules, and of what is others'
    for node in file.nodes(ast.Import):
        for alias in node.names:
            (ours if _is_ours(alias.name) else foreign).add(alias.asname or alias.name.split(".")[0])
            if _private_module(alias.name):
                yield node.lineno, alias.name
    for node in file.nodes(ast.ImportFrom):
        if not _is_ours(node.module or ""):
            foreign.update(alias.asname or alias.name for alias in node.names)
            continue
        for alias in node.names:
            if node.module and _private_name(node.module, alias.name):
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in file.nodes(ast.Attribute):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in ours:
                if _private_name("disttensor", attribute):
                    yield node.lineno, f"{name}.{attribute}"
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name), attr=theme), attr=attribute) if (
                name in ours and f"disttensor.{theme}" in PUBLIC and _private_name(f"disttensor.{theme}", attribute)
            ):
                yield node.lineno, f"{name}.{theme}.{attribute}"
            case ast.Attribute(attr=attribute) if _is_private(attribute) and attribute not in TORCHS:
                if _root(node) not in foreign:
                    yield node.lineno, ast.unparse(node)
    for node in file.nodes(ast.Constant):
        if isinstance(node.value, str):
            yield from ((node.lineno, what) for what in _in_text(node.value))


def _in_text(text: str) -> Iterator[str]:
    if text.startswith("disttensor.") and text.replace(".", "").replace("_", "").isalnum():
        # a name, such as monkeypatch.setattr takes
        module, _, name = text.rpartition(".")
        if name and _private_module(text) and _private_name(module, name):
            yield text
    elif re.search(r"(import|from) disttensor|\bdt\.\w", text):
        try:
            yield from (what for _, what in reaches(Source("a text", textwrap.dedent(text))))
        except SyntaxError:  # a sentence, or a part of a program
            return


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("disttensor", "dtrun")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _private_module(name: str) -> bool:
    return _is_ours(name) and name not in PUBLIC


@cache
def _private_name(module: str, name: str) -> bool:
    """Whether ``from module import name`` takes what users don't have."""
    if _private_module(module) or _is_private(name):
        return True
    if module != "disttensor":
        themes = getattr(importlib.import_module(module), "__all__", None) if _is_ours(module) else None
        return themes is not None and name not in themes and module.count(".") == 1
    if name in dir(dt) or name in TYPES or f"disttensor.{name}" in PUBLIC:
        return False
    if name in moved.NAMES:
        return True
    return hasattr(dt, name) and not name.startswith("__")


def _root(node: ast.expr) -> str:
    """The name that an expression begins with."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def reaching() -> dict[str, list[str]]:
    """Of each file, by its name below tests/, what it reaches inside for."""
    found: dict[str, list[str]] = {}
    for file in FILES:
        for line, what in reaches(file):
            found.setdefault(file.name.removeprefix("tests/"), []).append(f"{file.at(line)}: {what}")
    return found


def test_behaviour_is_tested_by_public_names() -> None:
    found = reaching()
    others = [each for name, reached in found.items() if name not in INTERNAL for each in reached]
    others += [f"tests/{name} does not reach inside: take it from INTERNAL" for name in INTERNAL if name not in found]
    refuse(others, "a test of behaviour uses public names and disttensor.testing")


REACHES = {
    "from disttensor.session import current": "disttensor.session.current",
    "from disttensor.dispatch.op_plan import OpEntry": "disttensor.dispatch.op_plan.OpEntry",
    "import disttensor.runtime.master.link": "disttensor.runtime.master.link",
    "import disttensor as dt\ndt.session.current.session()": "dt.session.current",
    "import disttensor as dt\nx = dt.factories.ones(1)\nx._place": "x._place",
    "import disttensor as dt\n(dt.factories.ones(1) + 1)._h.ref": "(dt.factories.ones(1) + 1)._h",
    "from disttensor import fetch\nfetch(x)._arrival": "fetch(x)._arrival",
    "from disttensor.testing import _place": "disttensor.testing._place",
    "monkeypatch.setattr('disttensor.dispatch.op_plan.MAX_PLANS', 3)": "disttensor.dispatch.op_plan.MAX_PLANS",
    'PROGRAM = """\nimport disttensor as dt\nfrom disttensor.session import current\n"""': "disttensor.session.current",
    "PART = 'print(dt.session.current.session())'": "dt.session.current",
    "import dtrun\ndtrun._main()": "dtrun._main",
}


def reached(program: str) -> list[str]:
    return [what for _, what in reaches(Source("a program", program))]


def test_the_scan_finds() -> None:
    refuse((program for program, what in REACHES.items() if what not in reached(program)), "these are found")


PASSES = [
    "import disttensor as dt\nfrom disttensor import testing\ndt.channels.reset(), dt.__version__",
    "from disttensor.collectives import functional as F",
    "import torch\ntorch.ones(1)._version, torch._foreach_mul([], 2), torch.utils._pytree.tree_leaves(1)",
    "from torch.library import _scoped_library\nimport os\nos._exit(1)",
    "class A:\n    def f(self):\n        return self._x",
    "'disttensor.runtime.protocol.errors.ProtocolError is what docs/ERRORS.md says; import disttensor to see it'",
    "from disttensor.runtime.channel import get_channel",
]


def test_the_scan_leaves_what_users_have() -> None:
    refuse((f"{program!r}: {reached(program)}" for program in PASSES if reached(program)), "these are left alone")
