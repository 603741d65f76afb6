"""Launch methods: a row each says all that code asks of them, and no code asks for one by its name."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sources import Source, below, product, refuse

import disttensor as dt
from disttensor.cli.checked_options import parse
from disttensor.runtime.host.launch_spec import LaunchSpec
from disttensor.runtime.launch import Launcher, LaunchMethod, launcher_names, register_launch_method, registry
from disttensor.runtime.launch.method import load
from disttensor.runtime.launch.starters.command import CommandLauncher, CommandStarter
from disttensor.runtime.launch.starters.local import LocalLauncher
from disttensor.runtime.launch.starters.ssh import SshStarter
from disttensor.runtime.launch.tree.host_starter import HostStarter
from disttensor.startup.settings import Settings

ROWS = registry._METHODS
NAMES = {row.name for row in ROWS}

#: Comparisons with a text that is a method's name too, and what else it is there.
OTHERS = {
    ("disttensor/cli/checked_options.py", "backend == 'mpi'"): "the data channel",
    ("runtime/launch/rendezvous/rendezvous.py", "case 'local'"): "the scheme of an init_method",
    ("runtime/launch/rendezvous/rendezvous.py", "case 'slurm'"): "the scheme of an init_method",
    ("runtime/launch/rendezvous/worker_cli.py", "found.kind == 'slurm'"): "the scheme of an init_method",
    ("runtime/launch/rendezvous/worker_cli.py", "where.kind == 'slurm'"): "the scheme of an init_method",
    ("runtime/launch/starters/ray_driver.py", "'ray' in sys.modules"): "the module",
}


def comparisons(file: Source) -> Iterator[tuple[ast.expr | int, str]]:
    """(where, text) of each comparison with a text that is the name of a launch method."""
    for node in file.nodes(ast.Compare):
        texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
        if any(isinstance(text, str) and text in NAMES for text in texts):
            yield node, ast.unparse(node)
    for case in file.nodes(ast.match_case):
        for pattern in ast.walk(case.pattern):
            match pattern:
                case ast.MatchValue(value=ast.Constant(value=str(text))) if text in NAMES:
                    yield pattern.value.lineno, f"case {text!r}"


def test_no_code_asks_for_a_launch_method_by_its_name() -> None:
    """It asks the row: so one of somebody else's is as good as ours."""
    found = [(file, at, text) for file in product() for at, text in comparisons(file)]
    refuse(
        (f"{file.at(at)}: {text}" for file, at, text in found if (file.name, text) not in OTHERS),
        "what a launch method can do is a field of its row (runtime/launch/method.py)",
    )
    assert {(file.name, text) for file, _, text in found} == set(OTHERS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("if spec.launcher == 'ssh': pass", ["spec.launcher == 'ssh'"]),
        ("x = launcher not in (None, 'local', 'mpi')", ["launcher not in (None, 'local', 'mpi')"]),
        ("match launcher:\n    case 'ray' | 'moon': pass", ["case 'ray'"]),
        ("launcher == other and kind == 'moon'", []),
    ],
)
def test_a_comparison_is_seen(text: str, found: list[str]) -> None:
    assert [each for _, each in comparisons(Source("an example", text))] == found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_names_what_is_there(row: LaunchMethod) -> None:
    assert registry.launch_method(row.name) is row
    assert (row.name in launcher_names()) is not (row.for_tests or row.in_process)
    if row.in_process:
        with pytest.raises(ValueError, match=f"launcher='{row.name}' starts no process"):
            registry.get_launcher(row.name)
    else:
        assert issubclass(registry.get_launcher(row.name), Launcher)
    if row.starter:
        assert issubclass(registry.get_starter(LaunchSpec(row.name)), HostStarter)
    else:
        with pytest.raises(ValueError, match=f"launcher='{row.name}' has no host starter"):
            registry.get_starter(LaunchSpec(row.name))
    for function in filter(None, (row.complete, row.guest)):
        assert callable(load(function))


def test_each_name_stands_for_one_row() -> None:
    assert len(NAMES) == len(ROWS)
    assert {registry.automatic, registry.BY_HOSTS, registry.BY_JOINING} <= NAMES
    assert registry.get_launcher("ssh") is CommandLauncher


def settings(**given: Any) -> Settings:
    from inspect import signature

    defaults = {name: each.default for name, each in signature(dt.init_master_worker).parameters.items()}
    return Settings.of({**defaults, **given}, {}, None)


@pytest.mark.parametrize("name", ["slurm", "ray", "mpi"])
def test_hosts_are_refused_where_they_are_known_from_elsewhere(name: str) -> None:
    """Slurm's and Ray's were left out without a word."""
    with pytest.raises(ValueError, match=f"hosts='a:2': launcher='{name}' knows its hosts from elsewhere"):
        settings(launcher=name, hosts="a:2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"launcher": "ssh", "hosts": "a", "launcher_options": {"ssh_option": "-v"}},
         r"launcher='ssh' has no option 'ssh_option' \(known: ssh, ssh_options\); did you mean 'ssh_options'\?"),
        ({"launcher": "ray", "nodes": 1, "launcher_options": {"gpus": "1"}},
         r"launcher='ray' has no option 'gpus' \(known: address, num_cpus, num_gpus, strategy\)"),
        ({"launcher_options": {"python": "/p"}}, r"launcher='local' has no option 'python' \(it has none\)"),
    ],
)  # fmt: skip
def test_an_option_that_a_method_does_not_have(given: dict[str, Any], message: str) -> None:
    """It was left out without a word."""
    with pytest.raises(ValueError, match=message):
        settings(**given)


def test_dtrun_refuses_it_too(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--launcher", "slurm", "--launcher-option", "partition=x"], "launcher='slurm' has no option 'partition'"),
        (["--launcher-option", "ssh=x"], "launcher='local' has no option 'ssh' (it has none)"),
        (["--launcher", "slurm", "--nnodes", "1:2"], "Slurm is asked for all nodes at once"),
        (["--launcher", "inproc"], "--launcher inproc is unknown (known: join, l"),
    ):
        with pytest.raises(SystemExit):
            parse([*words, __file__])
        assert message in capsys.readouterr().err


class PodStarter(CommandStarter):
    """Leads to a host by a command of its own."""

    @classmethod
    def reach(cls, spec: LaunchSpec, host: str, line: str) -> list[str]:
        return ["/usr/bin/pods", "exec", host, line]


PODS = LaunchMethod("pods", starter=PodStarter)


def test_a_method_of_the_script_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its root, another process, is told where the class is."""
    monkeypatch.setattr(registry, "_registered", {})
    for _ in range(2):
        register_launch_method(PODS)
    spec = settings(launcher="pods", hosts="a:2", launcher_options={"anything": 7, "python": "/p"}).spec
    assert (spec.starter, spec.options, spec.python) == (f"{__name__}:PodStarter", {"anything": "7"}, "/p")
    assert settings(hosts="a").spec.starter == ""
    registry._registered.clear()  # as in the root
    assert registry.get_starter(spec) is PodStarter
    starter = PodStarter(SimpleNamespace(loop=None, spec=spec))  # type: ignore[arg-type]
    (host,) = spec.hosts
    assert starter.command(host)[:3] == ["/usr/bin/pods", "exec", "a"]
    assert starter.command(host)[3].endswith("/p -P -m dtrun agent")
    assert starter.called(host) == "pods"
    assert PodStarter.addresses(LaunchSpec("pods", hosts=spec.hosts)) == {"a": "a"}


def test_what_is_no_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    class Hidden(PodStarter):
        pass

    for make, error, message in (
        (lambda: LaunchMethod("pods"), TypeError, "launch method 'pods' has neither a launcher nor a starter"),
        (lambda: LaunchMethod("pods", starter=7), TypeError, "starter of launch method 'pods' has to be a HostSt"),
        (lambda: register_launch_method("pods"), TypeError, "a launch method has to be a LaunchMethod, not 'pods'"),
        (lambda: register_launch_method(LaunchMethod("auto", starter=SshStarter)), ValueError, "'auto' is taken"),
        (lambda: register_launch_method(LaunchMethod("ssh", starter=PodStarter)), ValueError, "'ssh' is taken"),
        (lambda: register_launch_method(LaunchMethod("pods", starter=Hidden)), ValueError, "module of its own"),
    ):
        with pytest.raises(error, match=message):
            make()  # type: ignore[no-untyped-call]
    assert "pods" not in launcher_names()
    with pytest.raises(ValueError, match="launcher 'pod' is unknown \\(known: 'inproc', 'join', 'local', "):
        settings(launcher="pod")


def test_an_entry_point_brings_a_row_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [importlib.metadata.EntryPoint("pods", f"{__name__}:PODS", registry.ENTRY_POINTS)]
    points += [importlib.metadata.EntryPoint("cows", f"{__name__}:PODS", registry.ENTRY_POINTS)]
    points += [importlib.metadata.EntryPoint("local", f"{__name__}:PODS", registry.ENTRY_POINTS)]
    monkeypatch.setattr(
        registry, "entry_points", lambda group, name=None: [p for p in points if name in (None, p.name)]
    )
    assert {"pods", "cows"} < set(launcher_names())
    assert registry.launch_method("pods") is PODS
    assert registry.get_launcher("pods") is CommandLauncher
    assert registry.get_launcher("local") is LocalLauncher  # ours come first
    with pytest.raises(TypeError, match=r"entry point 'cows' of disttensor.launchers, .*:PODS, has to be LaunchMethod"):
        registry.launch_method("cows")


def test_the_page_for_developers_has_each_field_of_a_row() -> None:
    """docs/dev/launch.md says what each decides."""
    from dataclasses import fields

    page = next(iter(below("tests/unit"))).path.parents[2] / "docs" / "dev" / "launch.md"
    text = page.read_text(encoding="utf-8")
    assert [each.name for each in fields(LaunchMethod) if f"`{each.name}`" not in text] == []
