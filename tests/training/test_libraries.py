"""accelerate and transformers' Trainer on a mesh, with the lines of docs/DATA_PARALLEL.md: one process's numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from library_programs import (
    Edit,
    accelerated,
    classifier,
    library,
    llama,
    logged,
    on_device,
    resumed,
    samples,
    saved,
    trained,
    trainer,
    unchanged,
)
from ports import free_port
from torch.utils.data import DataLoader

import disttensor as dt

library("accelerate")
library("transformers")

WHOLE = ("model = dt.DataParallel(model.to(mesh.device), mesh, whole=True)",)
OWN = (
    "model = dt.DataParallel(model.to(mesh.device), mesh)",
    "loader = dt.data.distribute(loader, mesh)",
    "number = dt.meshes.mean",
)

#: The rows of the page's table: what a program is, the lines that it adds, and the program.
PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[[Edit, Path], list[Any]]]] = {
    "accelerate: `prepare`, `backward`, `clip_grad_norm_`, `gather_for_metrics`": (
        WHOLE, lambda edit, folder: accelerated(edit, 11),
    ),
    "accelerate: `accumulate`": (WHOLE, lambda edit, folder: accelerated(edit, 11, accumulate=2)),
    "accelerate: each rank is sent its own samples only, and has its own loss": (
        OWN, lambda edit, folder: accelerated(edit, 12, evaluates=False),
    ),
    "Trainer: `train`, `evaluate`, `predict`": (WHOLE, trained),
    "Trainer: `gradient_accumulation_steps=2`": (
        WHOLE, lambda edit, folder: trained(edit, folder, gradient_accumulation_steps=2),
    ),
    "Trainer: `save_steps=2`, and `train(resume_from_checkpoint=...)`": (WHOLE, resumed),
    "`save_pretrained`, `from_pretrained`": ((*WHOLE, "model = model.module"), saved),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        yield


def adding(lines: tuple[str, ...], mesh: dt.meshes.Mesh) -> Edit:
    def edit(**names: Any) -> dict[str, Any]:
        found = {"dt": dt, "mesh": mesh, **names}
        exec("\n".join(lines), found)
        return found

    return edit


def agree(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6, check_dtype=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_numbers_are_those_of_one_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, program = PROGRAMS[name]
    with on_device("cpu", monkeypatch):
        wanted = program(unchanged, tmp_path / "local")
    mesh = dt.mesh(dp=2)
    with on_device(str(mesh.device), monkeypatch):
        agree(program(adding(lines, mesh), tmp_path / "mesh"), wanted)


@pytest.mark.slow
def test_the_trainers_losses_are_those_of_ddps_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes by gloo, with two samples of each batch for each."""
    program = [sys.executable, ROOT / "tests/kit/ddp_trainer.py", tmp_path / "ddp", str(free_port())]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
    mesh = dt.mesh(dp=2)
    with on_device(str(mesh.device), monkeypatch):
        it = trainer(adding(WHOLE, mesh), tmp_path, max_steps=3)
        it.train()
    agree(logged(it), json.loads(done.stdout.splitlines()[-1]))


def test_the_page_has_these_lines() -> None:
    rows = [f"| {name} | {'<br>'.join(f'`{line}`' for line in lines)} |" for name, (lines, _) in PROGRAMS.items()]
    page = (ROOT / "docs/DATA_PARALLEL.md").read_text()
    assert [row for row in rows if row not in page] == []


def test_each_rank_computes_its_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four samples are two for each, whether a loss comes out or answers."""
    mesh, seen = dt.mesh(dp=2), []
    with on_device(str(mesh.device), monkeypatch):
        it = trainer(adding(WHOLE, mesh), tmp_path)
        it.model.module.register_forward_hook(lambda module, inputs, out: seen.append(len(out.logits)))
        it.train()
        it.evaluate()
    assert seen == [2, 2, 2, 3, 2, 3]  # three do not divide


WITHOUT: dict[str, Callable[[dt.meshes.Mesh], Any]] = {
    "a model on the mesh": lambda mesh: classifier().to(mesh.device),
    "a DataParallel of own batches": lambda mesh: dt.DataParallel(classifier().to(mesh.device), mesh),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_warning_says_that_every_rank_computes_the_whole_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = dt.mesh(**{f"of_{list(WITHOUT).index(name)}": 2})
    with on_device(str(mesh.device), monkeypatch):
        model, loader = library("accelerate").Accelerator().prepare(WITHOUT[name](mesh), DataLoader(samples(8), 4))
        with pytest.warns(UserWarning, match=r"every rank computes all of it.*whole=True") as told:
            shapes = [model(x).shape for x, _ in loader]
    assert shapes == [(4, 3), (4, 3)]
    assert [warning.filename for warning in told] == [__file__]  # once


def test_the_trainer_is_warned_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mesh = dt.mesh(alone=2)
    with on_device(str(mesh.device), monkeypatch), pytest.warns(UserWarning, match="every rank computes") as told:
        trainer(unchanged, tmp_path).train()
    assert len(told) == 1


def test_other_copies_to_a_mesh_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ones(4, 2).to(dt.mesh(others=2).device)


def test_a_model_of_transformers_in_a_data_parallel_is_known_by_its_arguments() -> None:
    mesh = dt.mesh(dp=2)
    generic = library("transformers.utils.generic")
    model = dt.DataParallel(llama().to(mesh.device), mesh)
    assert generic.find_labels(type(model)) == ["labels"]
    assert model.config is model.module.config
