"""Examples in docstrings print what stands below them."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from printed import as_shown
from sources import Source, below
from torch.utils.data import TensorDataset

import disttensor as dt

#: Those that show no output, and are parts of a program.
PARTS = {
    "disttensor.checkpoint.saving.save", "disttensor.runtime.endpoints.connection.connect",
    "disttensor.runtime.shared.channel_handles.select", "disttensor.runtime.shared.lock_handles.Lock",
    "disttensor.runtime.shared.work_queue_handles.WorkQueue", "disttensor.tasks.endpoint.Endpoint",
    "disttensor.training.pipeline.pipeline.Pipeline",
}  # fmt: skip

#: Those that need more than two nodes.
ON_FOUR = {
    "disttensor.nn.embedding.ParallelEmbedding", "disttensor.nn.linear.ColumnParallelLinear",
    "disttensor.nn.linear.RowParallelLinear", "disttensor.runtime.shared.table_handles.SharedDict",
    "disttensor.tasks.process_groups.device_mesh",
}  # fmt: skip

#: Names of which the texts around them say what they stand for.
NAMES: dict[str, Any] = {
    "dt": dt, "torch": torch, "dist": dist, "nn": torch.nn, "TensorDataset": TensorDataset,
}  # fmt: skip


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for file in with_examples():
        found = finder.find(importlib.import_module(file.module))
        yield from (test for test in found if test.examples)


def with_examples() -> list[Source]:
    return [file for file in below("disttensor", "runtime") if ">>> " in file.text]


EXAMPLES = {test.name: test for test in examples()}


class Checker(doctest.OutputChecker):
    def check_output(self, want: str, got: str, flags: int) -> bool:
        return super().check_output(want, as_shown(got, want), flags)


def run(test: doctest.DocTest, folder: Path, **given: Any) -> str:
    """What differs from what the docstring shows."""
    said: list[str] = []
    test.globs = NAMES | given
    for example in test.examples:
        example.source = example.source.replace('"/shared/', f'"{folder}/')
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(Checker(), verbose=False, optionflags=flags).run(test, out=said.append, clear_globs=False)
    return "".join(said)


@pytest.mark.parametrize("nodes", [2, 4])
def test_examples(nodes: int, tmp_path: Path) -> None:
    names = sorted(ON_FOUR if nodes == 4 else EXAMPLES.keys() - PARTS - ON_FOUR)
    with dt.init_master_worker(nodes=nodes):
        model = torch.nn.Linear(1, 1).to("node:0")
        optimizer = torch.optim.AdamW(model.parameters())
        dt.checkpoint.save({"model": model, "optim": optimizer, "step": 100}, tmp_path / "run1")
        given = {"model": model, "optimizer": optimizer, "train": lambda: None}
        assert {name: run(EXAMPLES[name], tmp_path, **given) for name in names} == dict.fromkeys(names, "")


def test_a_part_shows_no_output() -> None:
    """What shows output is run."""
    assert set(EXAMPLES) >= PARTS
    assert [name for name in sorted(PARTS) if any(example.want for example in EXAMPLES[name].examples)] == []


def test_examples_are_found() -> None:
    lines = [line for file in with_examples() for line in file.lines if line.lstrip().startswith(">>>")]
    assert len(lines) == sum(len(test.examples) for test in EXAMPLES.values())
