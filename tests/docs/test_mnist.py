"""The examples of examples/mnist have the losses of the sequential one, to 1e-6, and see each sample once an epoch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkout import ROOT
from test_readme import python
from variants import variants

MNIST = ROOT / "examples" / "mnist"
#: What a CPU profiler of torch's says where it begins and ends.
PROFILER = re.compile(r"\[node 0\] USDT:.*\n")


def losses(lines: list[str]) -> dict[int, float]:
    """The losses of the epochs that a program has told."""
    found = [re.fullmatch(r"epoch (\d): loss ([\d.]+)", line) for line in lines]
    return {int(m[1]): float(m[2]) for m in found if m}


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    lines = python(str(MNIST / "sequential.py"), cwd=tmp_path_factory.mktemp("mnist")).splitlines()
    assert len(lines) == 6
    return lines


@pytest.mark.row("T49")
def test_sequential(sequential: list[str]) -> None:
    told = losses(sequential)
    assert list(told) == [0, 1, 2, 3, 4]
    assert list(told.values()) == sorted(told.values(), reverse=True)
    assert told[0] < 2.303  # what guessing has, log 10
    assert float(sequential[5].removeprefix("accuracy ")) > 0.85


def as_one_process(lines: list[str], sequential: list[str]) -> None:
    assert losses(lines) == pytest.approx(losses(sequential), abs=1e-6)
    assert lines[5] == sequential[5]


@pytest.mark.row("T50", "T57")
def test_all_reduce(sequential: list[str], tmp_path: Path) -> None:
    """It is saved in the middle of an epoch and goes on with another number of nodes."""
    program = str(MNIST / "allreduce.py")
    lines = python(program, "--nodes", "2", "--save", "half.pt", "--after", "12", cwd=tmp_path).splitlines()
    assert list(losses(lines)) == [0, 1]
    lines += python(program, "--nodes", "3", "--resume", "half.pt", cwd=tmp_path).splitlines()
    as_one_process(lines, sequential)
    assert lines[6] == "each sample once an epoch: True"


@pytest.mark.row("T51")
@pytest.mark.parametrize("nodes", variants(["3", "4", "7"]))
def test_beside_the_backward_pass(nodes: str, sequential: list[str], tmp_path: Path) -> None:
    as_one_process(python(str(MNIST / "allreduce_async.py"), "--nodes", nodes, cwd=tmp_path).splitlines(), sequential)


@pytest.mark.row("T52")
@pytest.mark.parametrize("nodes", variants(["3", "4", "7"]))
def test_model_parallel(nodes: str, sequential: list[str], tmp_path: Path) -> None:
    as_one_process(python(str(MNIST / "model_parallel.py"), "--nodes", nodes, cwd=tmp_path).splitlines(), sequential)


@pytest.mark.row("T37")
def test_an_engine_with_hooks(sequential: list[str], tmp_path: Path) -> None:
    lines = python(str(MNIST / "engine.py"), "--nodes", "2", cwd=tmp_path, ignored=PROFILER).splitlines()
    as_one_process(lines, sequential)
    assert lines[6] == "steps 3 to 8 on node 0: 6 forward passes, 6 of a gradient"
    assert lines[7:] == ["the replicas were equal after 5 epochs"]


@pytest.mark.row("P10")
@pytest.mark.timeout(300)  # for tools/ci/mutants.py as well, whose limit is less
def test_a_batch_that_grows_with_the_nodes(tmp_path: Path) -> None:
    lines = python(str(MNIST / "scaled.py"), "--nodes", "3", cwd=tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    found = re.fullmatch(r"40 steps, loss ([\d.]+), accuracy ([\d.]+)", lines[3])
    assert float(found[2]) > 0.6
    assert float(lines[4].removeprefix("of one process ")) == pytest.approx(float(found[1]), abs=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["digits.pt"]


@pytest.mark.row("T53")
def test_sgd_by_a_parameter_server(sequential: list[str], tmp_path: Path) -> None:
    as_one_process(python(str(MNIST / "ps_dsgd.py"), "--nodes", "3", cwd=tmp_path).splitlines(), sequential)


def come_further(name: str, options: tuple[str, ...], end: str, sequential: list[str], folder: Path) -> None:
    """They come further in five epochs than plain SGD by one process."""
    lines = python(str(MNIST / name), *options, cwd=folder).splitlines()
    told = losses(lines)
    assert list(told) == [0, 1, 2, 3, 4]
    assert told[4] < losses(sequential)[4]
    right = re.match(r"accuracy ([\d.]+) of the (centre|server's values)", lines[5])
    assert float(right[1]) > 0.84
    assert re.fullmatch(end, lines[6])


@pytest.mark.row("T54")
def test_downpour(sequential: list[str], tmp_path: Path) -> None:
    end = r"other nodes' pushes between a pull and a push: \d+ at most"
    come_further("ps_downpour.py", (), end, sequential, tmp_path)


@pytest.mark.slow
@pytest.mark.row("T55")
@pytest.mark.parametrize("options", [(), ("--together",)], ids=str)
def test_elastic_averaging(options: tuple[str, ...], sequential: list[str], tmp_path: Path) -> None:
    come_further("ps_easgd.py", options, "the centre has moved: True", sequential, tmp_path)


@pytest.mark.slow
@pytest.mark.row("T56")
def test_elastic_averaging_between_groups(sequential: list[str], tmp_path: Path) -> None:
    end = "the replicas of each group are equal, to the bit"
    come_further("ps_easgd_dataparallel.py", (), end, sequential, tmp_path)
