"""What hosts of repositories read: the workflow runs what .ci/run does, forms and the citation have what they need."""

from __future__ import annotations

import re

import pytest
import yaml
from checkout import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
#: What the Makefile has.
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def targets(command: str) -> list[str]:
    """The targets of a line that calls make."""
    return [word for word in command.split()[1:] if re.fullmatch(r"[a-z]+", word)]


def test_the_workflow_runs_the_parts_of_ci() -> None:
    """And builds the pages. Targets that are gone are found, too."""
    lines = re.findall(r"^make .*?(?=  #|$)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    parts = {target for line in lines for target in targets(line)}
    assert {"check", "test", "ssh"} <= parts
    listed = {
        target for part in WORKFLOW["jobs"]["parts"]["strategy"]["matrix"]["part"] for target in targets(f"make {part}")
    }
    assert listed == parts | {"docs"}
    assert listed | {"versions"} <= TARGETS
    steps = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert [step for step in steps if step.startswith("make ")] == ["make ${{ matrix.part }}", "make versions"]


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
