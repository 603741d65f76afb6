"""Which nodes a master takes: those that speak as it does. What it says of a torch that no test has run on."""

from __future__ import annotations

import re
import tomllib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkout import ROOT
from msgspec.structs import replace

from disttensor.runtime.host.capabilities import own
from disttensor.runtime.master.node import Node
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.bundle import PROTOCOL, VERSION
from disttensor.runtime.protocol.errors import StartError
from disttensor.startup.start import meet
from disttensor.torch_backend import tested_versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HELLO = c.Hello(PROTOCOL, "a job", 1, "host", str(torch.__version__), "3", ("cpu",), False, c.Addresses(""), own())


def met(hello: c.Hello) -> None:
    """Meets a node that says this."""
    node = Node(0)
    node.said_hello = hello
    link = SimpleNamespace(nodes=[node], losses=[])
    meet(cast(Any, SimpleNamespace(link=link, job="a job", launcher=None)), [0], 1)


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (replace(HELLO, protocol=PROTOCOL + 1), f"speaks protocol {PROTOCOL + 1}, this master {PROTOCOL}"),
        (replace(HELLO, job="another job"), "speaks protocol"),
        (replace(HELLO, torch="1.2.3+cpu"), "has torch 1.2.3, this master "),
    ],
    ids=["protocol", "job", "torch"],
)
def test_others_are_refused(hello: c.Hello, says: str) -> None:
    with pytest.raises(StartError, match=says):
        met(hello)


def test_another_build_of_the_same_torch_is_taken() -> None:
    met(replace(HELLO, torch=str(torch.__version__).partition("+")[0] + "+cu999"))


def test_an_untested_torch_is_told_of_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DISTTENSOR_UNTESTED", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    tested_versions.say()
    told = capsys.readouterr().err
    assert told.startswith("disttensor: torch 2.99.1+cpu is not among")
    assert told.count("\n") == 1
    monkeypatch.setenv("DISTTENSOR_UNTESTED", "1")
    tested_versions.say()
    monkeypatch.delenv("DISTTENSOR_UNTESTED")
    for known in tested_versions.TORCH:
        monkeypatch.setattr(torch, "__version__", f"{known}.1+cu130")
        tested_versions.say()
    assert capsys.readouterr().err == ""


def test_the_page_has_every_tested_torch() -> None:
    """A line of its table for each pair that the script runs; those of which all has run are the tested ones."""
    page = (ROOT / "docs/COMPATIBILITY.md").read_text()
    row = r"^\| (3\.\d+)\.\d+ \| (\d+\.\d+)\.\d+ \| [\d-]+ \| (complete|in part) \|"
    ran = re.findall(row, page, re.MULTILINE)
    assert {torch for _, torch, how in ran if how == "complete"} == set(tested_versions.TORCH)
    pairs = re.findall(r"(3\.\d+):(\d+\.\d+)?", (ROOT / "tools/ci/versions.sh").read_text().partition("set -- ")[2])
    newest = max((torch for _, torch, _ in ran), key=lambda release: int(release.partition(".")[2]))
    assert sorted((python, torch) for python, torch, _ in ran) == sorted((p, t or newest) for p, t in pairs)
    pythons = sorted({python for python, _, _ in ran}, key=lambda release: int(release.partition(".")[2]))
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    named = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert named == pythons
    (oldest,) = (need.partition(">=")[2] for need in PROJECT["dependencies"] if need.startswith("torch"))
    assert oldest == min(tested_versions.TORCH, key=lambda release: int(release.partition(".")[2]))


def test_one_version_is_named_everywhere() -> None:
    cited = re.findall(r"(?m)^version: (.*)$", (ROOT / "CITATION.cff").read_text())
    assert [PROJECT["version"], *cited] == [VERSION] * 2
