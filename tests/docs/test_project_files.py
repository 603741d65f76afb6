"""What hosts of repositories read: the workflow runs what .ci/run does, forms and the citation have what they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from limits import HANG

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
#: What the Makefile has.
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def targets(command: str) -> list[str]:
    """The targets of a line that calls make."""
    return [word for word in command.split()[1:] if re.fullmatch(r"[a-z]+(-[a-z]+)?", word)]


def test_the_workflow_runs_the_parts_of_ci() -> None:
    """And builds the pages, and leaves out what runs only where an environment was kept, as runners keep none. Targets
    that are gone are found, too."""
    lines = re.findall(r"^make .*?(?=  #|$)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    parts = {target for line in lines for target in targets(line)}
    assert {"check", "test", "ssh", "simcuda-smoke"} <= parts
    listed = {
        target for part in WORKFLOW["jobs"]["parts"]["strategy"]["matrix"]["part"] for target in targets(f"make {part}")
    }
    assert listed == parts - {"simcuda-smoke"} | {"docs"}
    assert listed | parts | {"versions"} <= TARGETS
    steps = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert [step for step in steps if step.startswith("make ")] == ["make ${{ matrix.part }}", "make versions"]


@pytest.mark.parametrize("status", [0, 3])
def test_the_last_line_of_ci_is_what_was_said_of_simulated_devices(tmp_path: Path, status: int) -> None:
    """Here, that there is no environment: nothing makes one of 2.5 GB on the way."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, does in (
        ("g++", "exit 1"),
        ("python3.13", "exit 0"),
        (
            "make",
            f"""case "$*" in
*simcuda-smoke*) exec {ROOT}/tools/ci/simcuda.sh {tmp_path / "venv"};;
*ssh*) echo "what other suites print"; exit {status};;
esac""",
        ),
    ):
        _program(programs / name, does)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=HANG)
    why = f"not run (there is no environment in {tmp_path / 'venv'}: make simcuda-smoke makes it, of 2.5 GB)"
    last = f"simcuda: {why}\n"
    assert (done.returncode, done.stdout) == (status, f"{last}what other suites print\n{last}")
    assert not (tmp_path / "venv").exists()


def _program(path: Path, does: str) -> None:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


def _simulated(folder: Path, **env: str) -> tuple[int, str]:
    """What tools/ci/simcuda.sh says of an environment in a folder with these programs on the path: exit code and last
    line, which is that of the file SIMCUDA_SAID."""
    for tool in ("bash", "dirname"):
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    said = folder / "said"
    done = subprocess.run(
        [ROOT / "tools" / "ci" / "simcuda.sh", folder / "venv"],
        env={"PATH": str(folder), "SIMCUDA_SAID": str(said), **env},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    last = done.stdout.splitlines()[-1]
    assert said.read_text() == f"{last}\n"
    return done.returncode, last


def test_who_can_have_no_simulated_devices_says_why_and_passes(tmp_path: Path) -> None:
    assert _simulated(tmp_path) == (0, "simcuda: not run (there is no g++)")


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("exit 9", "there is neither python3.13 nor python3.12 on the path"),  # as a shim of what is not installed
        ("[ $1 = -c ]", "python3.12 can't make an environment in {0}"),
        ('mkdir -p {0}/bin; echo "exit 1" > {0}/bin/pip; chmod +x {0}/bin/pip', "the packages can't be had"),
    ],
)
def test_what_keeps_the_environment_of_simulated_devices_from_being_made(tmp_path: Path, python: str, why: str) -> None:
    there = tmp_path / "venv"
    _program(tmp_path / "g++", "exit 1")
    _program(tmp_path / "python3.12", python.format(there))
    for tool in ("mkdir", "chmod"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    assert _simulated(tmp_path) == (0, f"simcuda: not run ({why.format(there)})")
    assert not (there / ".made").exists()


@pytest.mark.parametrize("status", [0, 1, 5])
def test_tests_on_simulated_devices_end_with_their_result(tmp_path: Path, status: int) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "venv" / ".made").touch()
    _program(tmp_path / "g++", "exit 1")
    _program(python, f'[ "$1" != -m ] || exit {status}')
    code, last = _simulated(tmp_path, SIMCUDA_MAKE="no")
    assert code == status
    assert re.fullmatch(rf"simcuda: {'failed' if status else 'passed'} in \d+ s", last)


def test_an_environment_of_simulated_devices_whose_python_is_gone_is_not_used(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "venv" / ".made").touch()
    python.symlink_to(tmp_path / "removed")
    _program(tmp_path / "g++", "exit 1")
    code, last = _simulated(tmp_path)
    assert (code, last.partition("venv was made with ")[2]) == (0, "is gone: remove it, it is made anew)")


def test_the_workflow_has_every_python() -> None:
    """Those that versions.sh asks for."""
    pairs = re.findall(r"(3\.\d+):", (ROOT / "tools/ci/versions.sh").read_text().partition("set -- ")[2])
    setup = next(
        step["with"] for step in WORKFLOW["jobs"]["versions"]["steps"] if "setup-python" in step.get("uses", "")
    )
    assert set(setup["python-version"].split()) == set(pairs)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_what_its_reader_wants(path) -> None:
    """Names, and fields with a label and an id each: others are refused as a whole."""
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert fields
    assert {part["type"] for part in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(part["attributes"]["label"] for part in fields)
    assert len({part["id"] for part in fields}) == len(fields)


def test_a_bug_report_has_what_the_doctor_prints() -> None:
    """And a whole traceback, as docs/DOCTOR.md asks for both."""
    (form,) = (path.read_text() for path in FORMS if path.name == "bug.yml")
    page = (ROOT / "docs" / "DOCTOR.md").read_text()
    for wanted in ("python -m disttensor.doctor", "DISTTENSOR_TRACEBACK=full"):
        assert f"`{wanted}`" in form
        assert wanted in page


def test_the_makefile_and_the_pages_name_one_torch() -> None:
    """PyPI's, which all of them call the build for CUDA; and one line for the build for CPUs."""
    makefile, readme, reference = (
        " ".join((ROOT / name).read_text().split()) for name in ("Makefile", "README.md", "docs/REFERENCE.md")
    )
    (default,) = re.findall(r" TORCH \?= (torch==[\d.]+) # So many processes", makefile)  # and no index of its own
    assert "PyPI has its build for CUDA: 2.5 GB to download" in makefile
    assert "take PyPI's, which is for CUDA: 2.5 GB" in readme
    assert "takes PyPI's, which is for CUDA on x86-64: 2.5 GB" in reference
    (cpus,) = re.findall(r'# make demo TORCH="(.+?)"', makefile)
    assert cpus == WORKFLOW["env"]["TORCH"]
    assert cpus.startswith(f"{default} --index-url https://")
    assert f"pip install torch{cpus.removeprefix(default)}`" in reference


def test_the_citation() -> None:
    """The fields that its format asks for."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["license"] == "BSD-3-Clause"
