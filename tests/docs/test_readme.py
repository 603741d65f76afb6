"""What the README shows and the examples say, run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from checkout import ROOT
from limits import CONTRACT_HANG, HANG
from output_kit import SHARING
from printed import as_shown
from variants import variants

README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs" / "REFERENCE.md").read_text()


def python(*arguments: str, cwd: Path, ignored: re.Pattern[str] | None = None, limit: float = HANG) -> str:
    """What a program prints; it has to end well and say nothing on stderr, but that nodes share the cores."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DISTTENSOR_", "PYTHON"))}
    env["PYTHONPATH"] = str(ROOT)  # this tree, wherever it was copied to, and not one that is installed
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=limit, cwd=cwd, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    said = ignored.sub("", done.stderr) if ignored else done.stderr
    assert UNMET.sub("", SHARING.sub("", said)) == ""
    return done.stdout


#: What gloo says where two nodes have not met within 3 s, as on a machine with a load of 30; another channel is used.
UNMET = re.compile(r"\[E\d+ \S+ ProcessGroupGloo\.cpp:\d+\] Gloo connectFullMesh failed .*\n")
#: The hint for who waits often: the program waits for each actor, and so finds out which are lost.
WAITED = re.compile(r"\S+ in arrived has waited for values of nodes 1,000 times, .*\n")
SHOWN = re.compile(r"```python\n(.*?)```\s*prints\n\n((?:    [^\n]*\n)+)", re.DOTALL)


@pytest.mark.parametrize("flags", variants([[], ["-O"]]), ids=["plain", "-O"])
def test_the_first_program(flags: list[str], tmp_path: Path) -> None:
    """Pasted into a file of its own it prints what stands below it."""
    program, shown = SHOWN.search(README).groups()
    (tmp_path / "first.py").write_text(program)
    shown = textwrap.dedent(shown)
    assert as_shown(python(*flags, "first.py", cwd=tmp_path), shown) == shown


def test_the_memory_page(tmp_path: Path) -> None:
    """But for what is this machine's, and this process's in memory."""
    program, shown = SHOWN.search((ROOT / "docs/MEMORY.md").read_text()).groups()
    (tmp_path / "memory.py").write_text(program)
    varying = r"host \S+, pid \d+|reserved  .*|[\d.]+ .iB of [\d.]+ .iB are left"
    printed = python("memory.py", cwd=tmp_path).replace(f"{tmp_path}/", "")
    assert re.sub(varying, "...", printed) == re.sub(varying, "...", textwrap.dedent(shown))


def test_mesh_data_parallel() -> None:
    """The losses of one process; the program compares them, too."""
    lines = python(str(ROOT / "examples/mesh_data_parallel.py"), "--nodes", "4", cwd=ROOT).splitlines()
    assert [line.startswith(f"epoch {i}: loss ") for i, line in enumerate(lines[:5])] == [True] * 5
    assert float(lines[5].removeprefix("accuracy ")) > 0.93


def test_pipeline() -> None:
    """The losses of one process; the program compares them, too."""
    lines = python(str(ROOT / "examples/pipeline.py"), "--stages", "3", cwd=ROOT).splitlines()
    shown = [re.fullmatch(r"epoch \d: loss ([\d.]+) on 3 nodes, ([\d.]+) in one process", line) for line in lines[:4]]
    losses = [(float(found[1]), float(found[2])) for found in shown]
    assert all(abs(there - here) < 2e-3 for there, here in losses)
    assert losses[-1][1] < losses[0][1] / 2
    assert float(lines[4].removeprefix("accuracy ")) > 0.93
    assert lines[5].split() == ["stage", "node", "busy", "expected"]
    assert [line.split()[::3] for line in lines[6:]] == [[str(k), "80%"] for k in range(3)]


@pytest.mark.parametrize("rounds", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_rollouts(rounds: int) -> None:
    """It says so itself if a loss differs from one process's. The script has no tensor more, and no byte of theirs."""
    program, limit = str(ROOT / "examples/rollouts.py"), HANG if rounds < 100 else CONTRACT_HANG
    lines = python(program, "--rounds", str(rounds), cwd=ROOT, ignored=WAITED, limit=limit).splitlines()
    lost = [line for line in lines if line.startswith(f"round {rounds // 2}: node 3 is lost")]
    assert len(lost) == 2
    _, traffic, grown, *told = lines[1:]
    assert re.fullmatch(r"from node to node [\d.]+ MB, through the script 0 bytes", traffic)
    assert float(traffic.split()[4]) > 0
    assert float(re.fullmatch(r"the script has 0 tensors more than after 5 rounds, and ([\d.]+) MiB", grown)[1]) < 16
    assert [line.split()[:2] for line in told] == [["round", f"{step}:"] for step in range(0, rounds, 10)]


def test_sharded() -> None:
    """The losses of one process; the program compares them, too."""
    lines = python(str(ROOT / "examples/sharded.py"), cwd=ROOT).splitlines()
    assert lines[0] == "each node has (63, 64) of (250, 64), 20661 numbers in all"
    assert [line.startswith(f"epoch {i}: loss ") for i, line in enumerate(lines[1:6])] == [True] * 5
    assert float(lines[6].removeprefix("accuracy ")) > 0.93


def test_language_model() -> None:
    """The losses and the text of one process; the program compares the losses, too."""
    lines = python(str(ROOT / "examples/language_model.py"), "--nodes", "2", cwd=ROOT).splitlines()
    shown = [re.fullmatch(r"step \d+: loss ([\d.]+) on 2 nodes, ([\d.]+) in one process", line) for line in lines[:5]]
    assert [abs(float(found[1]) - float(found[2])) < 2e-3 for found in shown] == [True] * 5
    assert float(shown[-1][1]) < 0.3
    assert lines[5:] == [
        "it writes: the quick brown fox jumps over the lazy dog. ",
        "one process writes the same: True",
    ]


@pytest.mark.row("T52")
def test_tensor_parallel() -> None:
    """The losses and the weights of one process; the program compares them, too."""
    lines = python(str(ROOT / "examples/tensor_parallel.py"), cwd=ROOT).splitlines()
    assert lines[0].startswith("ColumnParallelLinear(in_features=16, out_features=65 over tp=2")
    shown = [re.fullmatch(r"step \d: loss ([\d.]+) on 4 nodes, ([\d.]+) in one process", line) for line in lines[1:7]]
    losses = [(float(found[1]), float(found[2])) for found in shown]
    assert all(abs(there - here) < 2e-4 for there, here in losses)
    assert losses[-1][1] < losses[0][1] - 0.5
    assert lines[7:] == ["a checkpoint of the plain shapes: True", "same losses: True", "same weights: True"]


def test_llama_3d() -> None:
    """The losses of one process, and so after it goes on in another shape; the program compares them, too."""
    program = ROOT / "examples/llama_3d.py"
    assert len(program.read_text().splitlines()) <= 120
    first, *lines = python(str(program), cwd=ROOT).splitlines()
    assert first == (
        "ColumnParallelLinear(in_features=32, out_features=32 over tp=2, bias=False, gather_output=False) "
        "on Mesh(dp=2, tp=2, nodes=[0, 1, 2, 3])"
    )
    shown = [re.fullmatch(r"step \d: loss ([\d.]+) on 8 nodes, ([\d.]+) in one process", line) for line in lines]
    losses = [(float(found[1]), float(found[2])) for found in shown]
    assert len(losses) == 6
    assert all(abs(there - here) < 2e-6 for there, here in losses)
    assert losses[-1][1] < losses[0][1] - 0.5


COLLECTIVES = re.split(r"^## ", (ROOT / "docs/COLLECTIVES.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("section", variants(COLLECTIVES), ids=lambda section: section.splitlines()[0])
def test_the_collectives_page(section: str, tmp_path: Path) -> None:
    program, shown = SHOWN.search(section).groups()
    (tmp_path / "program.py").write_text(program)
    shown = textwrap.dedent(shown)
    assert as_shown(python("program.py", cwd=tmp_path), shown) == shown


def test_it_is_a_screen_and_a_half() -> None:
    """Tables that grow are those of docs/REFERENCE.md."""
    assert len(README.splitlines()) <= 90


def test_the_figures_are_those_of_the_reference() -> None:
    """Five rows in one place, each with a program that is there."""
    rows = re.findall(r"^\| .* \| (.*[\d.]+x.*) \| .* \| `(\w+\.py)[^|]*` \|$", README, re.MULTILINE)
    assert len(rows) == 5
    assert [program for _, program in rows if not (ROOT / "tools" / "bench" / program).exists()] == []
    measured = REFERENCE.partition("\n## Speed\n")[2]
    assert [x for figures, _ in rows for x in re.findall(r"[\d.]+x", figures) if x not in measured] == []


def test_every_page_is_in_the_reference() -> None:
    """But for those of the site itself."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md", "REFERENCE.md"}
    linked = set(re.findall(r"\]\((\w+\.md)", REFERENCE))
    assert pages - linked == set()


def test_every_page_is_in_the_sites_index() -> None:
    listed = (ROOT / "docs" / "index.md").read_text().split()
    assert [path.stem for path in (ROOT / "docs").glob("*.md") if path.stem not in (*listed, "index")] == []


def test_every_example_is_in_the_reference_and_says_how_to_run_it() -> None:
    examples = sorted((ROOT / "examples").rglob("*.py"))
    assert examples
    for path in examples:
        name = path.relative_to(ROOT)
        beside = [p.read_text() for p in path.parent.glob("*.py")]
        if any(f"from {path.stem} import" in text or f"import {path.stem}\n" in text for text in beside):
            continue  # no program, but what those beside it share
        assert f"../{name})" in REFERENCE
        assert re.match(rf'"""(python|srun -n \d+ dtrun) {name}', path.read_text())


def test_one_line_change(tmp_path: Path) -> None:
    lines = python(str(ROOT / "examples/one_line_change.py"), cwd=tmp_path).splitlines()
    assert lines[-1] == "all 30 losses identical: True"


@pytest.mark.row("M16")
def test_quickstart(tmp_path: Path) -> None:
    lines = python(str(ROOT / "examples/quickstart.py"), cwd=tmp_path).splitlines()
    assert lines[:5] == [
        "z = x + y           is on node 0, CPU",
        "cuda_x = x.cuda()   is on node 0, its GPU 0 (simulated)",
        "a                   is on node 1, its GPU 1 (simulated)",
        "cuda_y = y.cuda()   is on node 0, its GPU 0 (simulated)",
        "q = cuda_x + cuda_y is on node 0, its GPU 0 (simulated)",
    ]
    accuracy = float(re.fullmatch(r"test accuracy (.*)%", lines[-4])[1])
    assert accuracy >= 95
    said = [re.match(r"(the script|node \d), process (\d+): (?:([\d.]+) KiB)?", line) for line in lines[-3:]]
    assert len({found[2] for found in said}) == 3
    held = [float(found[3]) for found in said[1:]]  # parameters, gradients and two states of Adam's, 4 bytes each
    sizes = [(64 * 128 + 128 + 128 * 64 + 64) / 64, (64 * 10 + 10) / 64]
    assert [size <= kib < size + 8 for size, kib in zip(sizes, held, strict=True)] == [True, True]
    assert [float(re.search(r"computed for ([\d.]+) s", line)[1]) > 0 for line in lines[-2:]] == [True, True]


def test_sweep(tmp_path: Path) -> None:
    lines = python(str(ROOT / "examples/sweep.py"), "2", cwd=tmp_path).splitlines()
    assert len(lines) == 3  # two trials, the better one, the verdict
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", lines[0])]
    assert losses == sorted(losses)
    assert len(losses) == 2
    assert lines[-1].startswith("best learning rate")


def test_parameter_server(tmp_path: Path) -> None:
    """Each worker has pushed all that it had to, and it has learned; in no more lines than Ray's program has."""
    path = ROOT / "examples/parameter_server.py"
    first, last = python(str(path), cwd=tmp_path).splitlines()
    assert first == "loss at first 0.648"
    loss, pushes = re.fullmatch(r"loss at the end ([\d.]+), pushes (.*)", last).groups()
    assert float(loss) < 0.1
    assert pushes == "{1: 100, 2: 100, 3: 100}"
    _, _, program = path.read_text().split('"""')  # its docstring is a comment
    code = [line for line in program.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= 38


def test_overlap(tmp_path: Path) -> None:
    lines = python(str(ROOT / "examples/overlap.py"), cwd=tmp_path).splitlines()
    times = [re.fullmatch(r"(\w[\w ]*\w) +(\d+) ms", line)[1] for line in lines[:4]]
    assert times == ["transfers", "computation", "one after the other", "overlapped"]
    assert lines[4:] == ["same results: True"]


def test_graph_training(tmp_path: Path) -> None:
    lines = python(str(ROOT / "examples/graph_training.py"), cwd=tmp_path).splitlines()
    assert [line for line in lines if "identical" in line] == [
        "all 75 losses identical: True",
        "all 60 losses identical: True",
    ]
    assert re.fullmatch(r"a step takes [\d.]+ ms in eager, [\d.]+ ms replayed", lines[-1])


@pytest.mark.parametrize("backend", variants(["auto", "gloo", "shm", "tcp"]))
def test_data_parallel(backend: str, tmp_path: Path) -> None:
    """The same script whatever the backend, and the same losses."""
    lines = python(str(ROOT / "examples/data_parallel.py"), "--backend", backend, cwd=tmp_path).splitlines()
    assert len(lines) == 7
    assert float(re.fullmatch(r"test accuracy (.*)%", lines[5])[1]) >= 90
    assert lines[6] == "same losses: True"
