"""Which nodes a master takes: those that speak as it does. What it says of a torch that no test has run on."""

from __future__ import annotations

import hashlib
import re
import tomllib
from platform import python_version
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from checkout import ROOT
from msgspec.structs import replace

from disttensor.runtime.endpoints import frames
from disttensor.runtime.host.capabilities import own
from disttensor.runtime.host.versions import PACKAGES, Versions, missing_package, refusal
from disttensor.runtime.host.versions import own as versions_here
from disttensor.runtime.launch.tree import control
from disttensor.runtime.master.node import Node
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol import shared_objects, side
from disttensor.runtime.protocol.bundle import PROTOCOL, VERSION, Bundle
from disttensor.runtime.protocol.errors import StartError
from disttensor.session.meeting import meet
from disttensor.torch_backend import tested_versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TORCH = str(torch.__version__)
HELLO = c.Hello(PROTOCOL, "a job", 1, "host", TORCH, python_version(), ("cpu",), False, c.Addresses(""), own())


def met(hello: c.Hello) -> None:
    """Meets a node that says this."""
    node = Node(0)
    node.connection.hello = hello
    link = SimpleNamespace(nodes=[node], losses=SimpleNamespace(errors=[]))
    meet(cast(Any, SimpleNamespace(link=link, job="a job", launcher=None)), [0], 1)


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (replace(HELLO, protocol=PROTOCOL + 1), rf"host has protocol {PROTOCOL + 1}, and .* \(protocol {PROTOCOL}\): "),
        (replace(HELLO, job="another job"), "it is of job another job, and this is job a job"),
        (replace(HELLO, torch="1.2.3+cpu"), rf"host has torch 1.2.3\+cpu, and .*, has torch {re.escape(TORCH)}: "),
        (replace(HELLO, python="3.99.1"), f"host has Python 3.99.1, and .*, has Python {python_version()}: "),
    ],
    ids=["protocol", "job", "torch", "python"],
)
def test_others_are_refused(hello: c.Hello, says: str) -> None:
    with pytest.raises(StartError, match=says):
        met(hello)


def test_another_build_of_the_same_torch_is_taken() -> None:
    met(replace(HELLO, torch=TORCH.partition("+")[0] + "+cu999"))


def test_another_patch_version_of_python_is_taken() -> None:
    met(replace(HELLO, python=".".join([*python_version().split(".")[:2], "99"])))


MINE = Versions("left", "3.11.7", 17, "0.1.0", "/l/python", {"torch": "2.13.0+cpu", "numpy": "2.4.6", "pyzmq": "27.1"})


def refused(**other: Any) -> str:
    """What is said of a host that has this and is otherwise as the one where the job was started."""
    return refusal(MINE, MINE._replace(host="right", executable="/r/python", **other))


def test_a_refusal_names_both_hosts_both_versions_and_what_to_do() -> None:
    here = "and left, where the job was started, has"
    assert refused() == ""
    assert refused(packages={}) == ""  # nothing is known of them
    assert refused(packages={"torch": "2.13.0+cu130", "numpy": "2.0.0", "pyzmq": "26"}) == ""
    assert refused(python="3.11.2") == ""
    # what else that Python has does not count
    assert refused(python="3.13.0", packages={"torch": "2.14.1"}) == (
        f"right has Python 3.13.0, {here} Python 3.11.7: functions are sent as bytecode, and each minor version has "
        "its own; dtrun --python names the Python there"
    )
    assert refused(protocol=18, disttensor="0.2.0", packages={"torch": "2.14.1"}) == (
        f"right has disttensor 0.2.0 (protocol 18), {here} disttensor 0.1.0 (protocol 17): install one version "
        f"on both; right has torch 2.14.1, {here} torch 2.13.0+cpu: install one version on both"
    )
    assert refused(packages={"torch": "", "pyzmq": ""}) == (
        f"right has no torch and pyzmq for /r/python, {here} torch 2.13.0+cpu and pyzmq 27.1: "
        "`/r/python -m pip install torch==2.13.0 pyzmq==27.1` there"
    )
    assert refused(packages={"numpy": "1.26.4"}) == (
        f"right has numpy 1.26.4, {here} numpy 2.4.6: arrays that are sent from here do not load there; "
        "`/r/python -m pip install numpy==2.4.6` there"
    )


@pytest.mark.parametrize(
    ("said", "package"),
    [
        ("/r/python: No module named dtrun", "disttensor"),
        ("ModuleNotFoundError: No module named 'disttensor.runtime'", "disttensor"),
        ("ModuleNotFoundError: No module named 'zmq'", "pyzmq"),
        ("ModuleNotFoundError: No module named 'helper'", ""),
        ("No such file or directory", ""),
    ],
)
def test_the_package_that_python_did_not_find(said: str, package: str) -> None:
    assert missing_package(said) == package


def test_this_process_has_all_that_a_node_needs() -> None:
    """And the table is the one that pip has."""
    assert (
        {re.split("[<>=]", need)[0] for need in PROJECT["dependencies"]}
        == set(PACKAGES)
        == set(versions_here().packages)
    )
    assert all(versions_here().packages.values())


def test_an_untested_torch_is_told_of_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DISTTENSOR_UNTESTED", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    tested_versions.print_untested()
    told = capsys.readouterr().err
    assert told.startswith("disttensor: torch 2.99.1+cpu is not among")
    assert told.count("\n") == 1
    monkeypatch.setenv("DISTTENSOR_UNTESTED", "1")
    tested_versions.print_untested()
    monkeypatch.delenv("DISTTENSOR_UNTESTED")
    for known in tested_versions.TORCH:
        monkeypatch.setattr(torch, "__version__", f"{known}.1+cu130")
        tested_versions.print_untested()
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


def form(info: Any, known: list[type]) -> object:
    """What a type is on the wire, where names of classes are tags or nothing, and an array's fields have no names."""
    if isinstance(info, msgspec.inspect.StructType):
        if info.cls in known:
            return "as", known.index(info.cls)
        known.append(info.cls)
        fields = ((info.array_like or it.encode_name, it.required, form(it.type, known)) for it in info.fields)
        return info.tag_field, info.tag, info.array_like, info.forbid_unknown_fields, *fields
    if isinstance(info, msgspec.inspect.Type):
        return type(info).__name__, *(form(getattr(info, name), known) for name in info.__struct_fields__)
    return tuple(form(each, known) for each in info) if isinstance(info, tuple) else info


#: All that crosses a process boundary as structs.
MESSAGES = (
    c.Batch, c.Report, side.Word, side.Answer, shared_objects.Request, shared_objects.ObjectAnswer, frames.Said,
    Bundle, control.Order, control.News,
)  # fmt: skip
#: What they are in the version of now.
DIGEST = "23752cff66068418"


def test_other_messages_have_another_protocol() -> None:
    """Two versions that take each other for one would lose nodes to messages that one of them does not understand."""
    digest = hashlib.sha256(repr([form(msgspec.inspect.type_info(kind), []) for kind in MESSAGES]).encode()).hexdigest()
    assert (PROTOCOL, digest[:16]) == (29, DIGEST), (
        "messages have changed: raise PROTOCOL (runtime/protocol/bundle.py; docs/SSH.md and docs/DOCTOR.md name it), "
        "and write both here"
    )


def test_one_version_is_named_everywhere() -> None:
    cited = re.findall(r"(?m)^version: (.*)$", (ROOT / "CITATION.cff").read_text())
    assert [PROJECT["version"], *cited] == [VERSION] * 2
