"""What init_master_worker decides by its arguments, the environment and dtrun: pure, and by one table."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError
from typing import Any

import msgspec
import pytest
from checkout import ROOT

import disttensor as dt
from disttensor.cli.options import parser
from disttensor.runtime.channel.base import Protection
from disttensor.runtime.host.launch_spec import Host, LaunchSpec
from disttensor.runtime.host.output_options import Output
from disttensor.runtime.host.precedence import SETTINGS, Setting
from disttensor.runtime.host.silence import Silence
from disttensor.runtime.launch.rendezvous.rendezvous import Rendezvous
from disttensor.startup.settings import Settings

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(dt.init_master_worker).parameters.items()}

SAID = LaunchSpec(
    "ssh",
    hosts=(Host("a", 2), Host("b", 2)),
    least=3,
    interface=("eth1",),
    env={"FROM": "dtrun"},
    timeout=7.0,
    silence=Silence(4, 5, 6),
    options={"python": "p"},
    output=Output(log_dir="/said"),
)


def of(environment: dict[str, str] | None = None, said: LaunchSpec | None = None, **given: Any) -> Settings:
    rest = {name: given.pop(name) for name in ("where", "automatic", "folder") if name in given}
    return Settings.of({**DEFAULTS, **given}, environment or {}, said, **rest)


#: Of each setting: an argument, its variable's text, and what Settings makes of these, of SAID and of nothing.
CASES: dict[str, tuple[Any, str, Any, Any, Any, Any]] = {
    "nodes": (5, "6", 5, 6, None, None),
    "spares": (1, "2", 1, 2, 0, 0),
    "backend": ("tcp", "shm", "tcp", "shm", "auto", "auto"),
    "simulate_cuda": (1, "2", 1, 2, 0, 0),
    "bind": ("none", "core", "none", "core", "", ""),
    "trusted_network": (True, "1", True, True, False, False),
    "encrypt": (False, "1", False, True, None, None),
    "checksum": (True, "1", True, True, False, False),
    "launcher": ("local", "", "local", None, "ssh", "local"),
    "hosts": ("x:1", "", (Host("x", 1),), None, SAID.hosts, ()),
    "interface": ("eth0", "", ("eth0",), None, ("eth1",), ()),
    "launcher_options": ({"ssh": "s"}, "", {"python": "p", "ssh": "s"}, None, {"python": "p"}, {}),
    "env": ({"TO": "here"}, "", {"FROM": "dtrun", "TO": "here"}, None, {"FROM": "dtrun"}, {}),
    "timeout": (9.0, "", 9.0, None, 7.0, 60.0),
    "silence": ((1, 2, 3), "", Silence(1, 2, 3), None, SAID.silence, Silence(10, 15, 60)),
}


def seen(settings: Settings, name: str) -> Any:
    if name in ("launcher", "hosts", "interface", "timeout", "silence"):
        return getattr(settings.spec, name)
    if name in ("trusted_network", "encrypt", "checksum"):
        return getattr(settings.protection, name.removesuffix("_network"))
    return (
        settings.spec.options
        if name == "launcher_options"
        else getattr(settings, {"backend": "channel"}.get(name, name))
    )


def test_all_rows_are_tested() -> None:
    """Those of output below, the rank where processes meet."""
    assert {row.argument for row in SETTINGS} - set(CASES) == {"log_dir", "tee", "redirects", "rank"}


@pytest.mark.row("G14")
@pytest.mark.parametrize("row", [row for row in SETTINGS if row.argument in CASES], ids=lambda row: row.argument)
def test_who_comes_first(row: Setting) -> None:
    """The argument, then the variable, then what dtrun has said, then the default."""
    argument, text, given, told, said, default = CASES[row.argument]
    environment = {row.variable: text} if row.variable else {}
    if row.argument == "hosts":  # of the script's own, which dtrun's spec is not for
        assert seen(of(hosts=argument), "hosts") == given
    elif row.argument == "launcher":
        assert seen(of({}, SAID, launcher=argument), "launcher") == given
    else:
        assert seen(of(environment, SAID, **{row.argument: argument}), row.argument) == given
    if row.variable:
        assert seen(of(environment, SAID), row.argument) == told
    assert seen(of({}, SAID), row.argument) == said
    assert seen(of(), row.argument) == default


def test_where_output_goes_is_the_argument_s_or_dtruns() -> None:
    """An own Output is shown by the launcher; without one dtrun's, which is in its spec, stands."""
    assert of({}, SAID).output == Output()
    assert of({}, SAID).spec.output == Output(log_dir="/said")
    assert of({}, SAID, log_dir="/mine", tee="1").output == Output(log_dir="/mine", tee="1")


def test_numbers_are_numbers() -> None:
    for row in SETTINGS:
        if row.number:
            with pytest.raises(ValueError, match=f"{row.variable}='many' is not a number"):
                of({row.variable: "many"})


def test_spares_are_places_more() -> None:
    """Of nodes that come by themselves as many more may come; who can start none later says so."""
    where = Rendezvous("tcp", "h", 4000, size=5)
    for given, least, most in (({}, 4, 4), ({"spares": 1}, 3, 4), ({"nodes": 2, "spares": 1}, 2, 3)):
        spec = of(where=where, **given).spec
        assert (spec.least, spec.most) == (least, most)
    assert of(where=where, nodes=(1, 3), spares=2).spec.most == 5
    for name in ("inproc", "mpi", "slurm", "ray"):
        with pytest.raises(ValueError, match=rf"spares=1: launcher='{name}' can't start a node later"):
            of(launcher=name, spares=1)
    with pytest.raises(ValueError, match="spares=-1"):
        of(spares=-1)


def test_not_to_encrypt_is_not_the_default() -> None:
    """Which encrypts between hosts: only what says so goes without."""
    for text, said in (("", None), ("0", False), ("1", True)):
        assert of({"DISTTENSOR_ENCRYPT": text}).protection == Protection(encrypt=said)
    with pytest.raises(TypeError, match="encrypt is True or False, not 'tls'"):
        of(encrypt="tls")


def test_it_is_pure_and_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in SETTINGS:
        if row.variable:
            monkeypatch.setenv(row.variable, "7")
    monkeypatch.setenv("DISTTENSOR_LAUNCH_BLOCKING", "1")
    settings = of()
    assert settings == of()
    assert (settings.nodes, settings.channel, settings.simulate_cuda, settings.blocking) == (None, "auto", 0, False)
    with pytest.raises(FrozenInstanceError):
        settings.bind = "core"  # type: ignore[misc]


def test_where_processes_meet_dtrun_has_no_say() -> None:
    where = Rendezvous("tcp", "h", 4000, size=4)
    settings = of({}, SAID, where=where, timeout=None)
    assert settings.spec == LaunchSpec("join", least=3, most=3, options=where.options)


def test_what_auto_stands_for() -> None:
    assert of(automatic="mpi").method.name == "mpi"
    assert of(automatic="mpi", hosts="a").method.name == "ssh"
    assert of({}, SAID, launcher="local", folder="/f").spec == LaunchSpec("local", folder="/f")
    assert of({}, SAID, hosts="x:1").spec.env == {}  # of the script's own: not what dtrun was asked for


def test_every_row_is_something_that_there_is() -> None:
    options = {o for action in parser()._actions for o in action.option_strings}
    destinations = {action.dest for action in parser()._actions}
    for row in SETTINGS:
        assert row.argument in DEFAULTS
        assert row.option in options
        assert row.dest in destinations
        assert not row.spec or row.spec in msgspec.structs.asdict(SAID)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "ENVIRONMENT.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)=` \| (.*?) \| (.*?) \| (.*?) \|$", page)
    expected = [
        (r.argument, *(f"`{text}`" if text else "" for text in (r.variable, r.option, r.worker))) for r in SETTINGS
    ]
    assert rows == expected


TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "none"}
BATCH = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
TASK = BATCH | {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        (TORCHRUN, "torchrun has started 3 processes of this script.*init_method=.env://."),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "something that sets RANK and WORLD_SIZE has started 2 processes.*env://"),
        (TASK, "srun has started 4 processes of this script.*`srun -n 4 dtrun script.py`.*slurm://"),
        (TASK | {"PMI_RANK": "0", "PMI_SIZE": "4"}, "srun has started 4"),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "5"}, "mpiexec has started 5.*`mpiexec -n 5 dtrun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpiexec has started 2"),
    ],
)
def test_one_of_several_copies_of_a_script(environment: dict[str, str], error: str) -> None:
    """Each would start a session of its own."""
    for given in ({}, {"hosts": "a:1"}):
        with pytest.raises(ValueError, match=error):
            of(environment, **given)
    assert of(environment, init_method="local://").method.name == "local"
    assert of(environment, launcher="inproc").method.name == "inproc"
    assert of(environment, SAID).method.name == "ssh"  # dtrun is one of them, and has started the script once
    where = Rendezvous("env", rank=0, size=2)
    assert of(environment, init_method="env://", where=where).method.name == "join"


@pytest.mark.parametrize(
    "environment",
    [
        BATCH, TASK | {"SLURM_STEP_NUM_TASKS": "1"}, TORCHRUN | {"WORLD_SIZE": "1"}, {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "many"},
    ],
)  # fmt: skip
def test_the_only_copy_of_a_script(environment: dict[str, str]) -> None:
    assert of(environment).method.name == "local"


@pytest.mark.parametrize(
    ("nodes", "environment", "said", "told"),
    [
        (3, {"DISTTENSOR_NODES": "2"}, None, "nodes=3 of the script counts, and not the 2 that dtrun -n, or"),
        ((3, 4), {"DISTTENSOR_NODES": "2"}, None, r"nodes=\(3, 4\) of the script counts, and not the 2"),
        (4, {}, SAID, "nodes=4 of the script counts, and not the 3"),
        (2, {"DISTTENSOR_NODES": "2"}, None, "^$"),
        ((1, 4), {"DISTTENSOR_NODES": "2"}, None, "^$"),
        (None, {"DISTTENSOR_NODES": "2"}, None, "^$"),
        (None, {}, SAID, "^$"),
        (2, {}, None, "^$"),
    ],
)
def test_a_number_that_does_not_count(nodes: Any, environment: dict[str, str], said: Any, told: str) -> None:
    assert re.search(told, of(environment, said, nodes=nodes).unheard(environment))


def test_hosts_of_the_scripts_own_are_not_those_that_dtrun_counts() -> None:
    assert of(said=SAID, nodes=4, hosts="c:4").unheard({}) == ""
