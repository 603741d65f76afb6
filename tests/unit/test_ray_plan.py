"""What is asked of Ray, as far as no Ray is needed to know."""

from __future__ import annotations

import json
import os
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from disttensor.runtime.host.launch_spec import LaunchSpec
from disttensor.runtime.launch.starters import ray
from disttensor.runtime.protocol.errors import StartError

THERE = {"address": "127.0.0.1:6379"}


def test_request(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LaunchSpec("ray", most=3, python="/opt/python", options={**THERE, "num_gpus": "0.5", "strategy": "spread"})
    asked = {"nodes": 3, "address": "127.0.0.1:6379", "python": "/opt/python"}
    assert ray.request(spec) == {**asked, "num_cpus": 1.0, "num_gpus": 0.5, "strategy": "SPREAD"}
    assert ray.listening(spec) == ("127.0.0.1",)
    assert ray.listening(LaunchSpec("ray", interface=("::1",))) == ("::1",)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray.cluster(LaunchSpec("ray")) == "10.0.0.1:6379"
    assert ray.cluster(spec) == "127.0.0.1:6379"


def test_its_driver_is_told_of_any_path() -> None:
    starter = ray.RayStarter.__new__(ray.RayStarter)
    stdin = BytesIO()
    starter._driver = SimpleNamespace(stdin=stdin)  # type: ignore[assignment]
    asked = ray.request(LaunchSpec("ray", most=1, python="/py \udcff", options=THERE))
    starter._send_to_driver(asked)
    assert json.loads(stdin.getvalue()) == asked


@pytest.mark.parametrize(
    "line",
    [b"\xff", b'{"doing": "\xff"}', b'{"x": ' + b"[" * 100_000, b"[", b'{"ended": 7, "code": 1}', b'{"hosts": [7]}'],
    ids=["no JSON", "text", "too deep", "cut off", "a host that is none", "no host"],
)
def test_what_its_driver_does_not_say(line: bytes) -> None:
    said: list[str] = []
    starter = ray.RayStarter.__new__(ray.RayStarter)
    starter.root = SimpleNamespace(give_up=lambda why, tail: said.append(why))  # type: ignore[assignment]
    starter._reasons = SimpleNamespace(lines=[])  # type: ignore[assignment]
    starter._hosts = []
    starter._hear([line, line])
    assert len(said) == 1
    assert said[0].startswith("what came was not said by the process that talks with Ray: ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "x"}, "strategy='X' is none of Ray's \\(known: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD\\)"),
        ({"num_cpus": "x"}, "num_cpus='x' is no number"),
    ],
)
def test_mistakes(options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ray.request(LaunchSpec("ray", most=1, options={**THERE, **options}))


def test_how_many() -> None:
    with pytest.raises(ValueError, match="launcher='ray' has to know how many nodes: nodes=4, or dtrun -n 4"):
        ray.request(LaunchSpec("ray", options=THERE))


def test_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    note = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(ray, "_CURRENT", str(note))
    with pytest.raises(StartError, match="no Ray cluster runs on this host"):
        ray.cluster(LaunchSpec("ray"))
    note.write_text("10.0.0.2:6379")
    assert ray.cluster(LaunchSpec("ray", options={"address": "auto"})) == "10.0.0.2:6379"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to somebody else")
def test_another_users_cluster_is_not_taken_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs a cluster runs code as those who connect to it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    note = tmp_path / "note"
    note.write_text("10.0.0.2:6379\n")
    monkeypatch.setattr(ray, "_CURRENT", str(note))
    assert ray.cluster(LaunchSpec("ray")) == "10.0.0.2:6379"
    os.chown(note, 65534, 65534)
    with pytest.raises(StartError, match="belongs to user 65534, and this process to 0: RAY_ADDRESS"):
        ray.cluster(LaunchSpec("ray"))
    assert ray.cluster(LaunchSpec("ray", options={"address": "10.0.0.2:6379"})) == "10.0.0.2:6379"
