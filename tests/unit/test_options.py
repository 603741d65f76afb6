"""dtrun's options: what is understood, what contradicts, and that no mistake is more than a line."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from disttensor.cli.checked_options import parse, spec_of, worker_options_of
from disttensor.cli.options import parser
from disttensor.runtime.host.launch_spec import Host, LaunchSpec
from disttensor.runtime.host.precedence import for_script
from disttensor.runtime.launch.hosts import parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:4", [("a", 4), ("b", 4)]),
        ("a*4, b*2", [("a", 4), ("b", 2)]),
        ("a", [("a", 3)]),
        ("a:2,b,a:1", [("a", 3), ("b", 3)]),
        ("me@a.example.org:4,10.0.0.7:2", [("me@a.example.org", 4), ("10.0.0.7", 2)]),
        ("[fd00::1]:4,fd00::2,[fe80::3%eth0]", [("fd00::1", 4), ("fd00::2", 3), ("fe80::3%eth0", 3)]),
        ("me@[::1]*2,::1*2", [("me@::1", 2), ("::1", 2)]),
    ],
)
def test_hosts(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text, 3) == [Host(*host) for host in hosts]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no host"),
        ("a:4,,b", "'' is no host"),
        ("a:0", "'0' is no number of slots"),
        ("a:many", "'many' is no number of slots"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is no host"),
        ("me@-x:4", "'me@-x:4' is no host"),
        ("a b", "'a b' is no host"),
        ("a;reboot", "'a;reboot' is no host"),
    ],
)
def test_no_hosts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hosts(text)


@pytest.mark.row("T58")
def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("""
# Open MPI's way
a slots=4 max_slots=8
b slots = 2   # a comment
  c
fd00::1 slots=2
# MPICH's
d:4
e:2 binding=user:0,1
[fd00::2]:3
b
""")
    assert [(host.name, host.slots) for host in read_hostfile(str(file), 5)] == [
        *(("a", 4), ("b", 7), ("c", 5), ("fd00::1", 2), ("d", 4), ("e", 2), ("fd00::2", 3)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n\n", "hosts names no host"),
        ("a slots=4\nb slots=none\n", "hosts, line 2: 'none' is no number of slots"),
        ("a sluts=4", "hosts, line 1: 'sluts' is unknown; a line is `host slots=4` or `host:4`"),
        ("a 4", "hosts, line 1: '4' is unknown"),
        ("\n-x", "hosts, line 2: '-x' is no host"),
    ],
)
def test_no_hostfile(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_hostfile(str(file))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "x.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return "x.py"


TOGETHER = ["--nnodes", "2", "--master-addr", "a", "--master-port", "29500"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "a:0"], "'0' is no number of slots"),
        (["--hosts", "a", "--hostfile", "f"], "not allowed with argument"),
        (["--hostfile", "nowhere"], "No such file or directory: 'nowhere'"),
        (["--hosts", "a", "--launcher", "mpi"], "with --launcher mpi the hosts are known from elsewhere"),
        (["--hosts", "a,b,c", "--nnodes", "2"], "--nnodes 2 and 3 hosts"),
        (["--hosts", "a,b", "--node-rank", "1"], "leave --node-rank and --master-addr out"),
        (["--launcher", "ssh"], "--launcher ssh needs --hosts"),
        (["--launcher", "pbs"], "--launcher pbs is unknown (known: join, l"),
        (["--nnodes", "2"], "--nnodes needs --master-addr and --master-port"),
        (["--connection-file", "f"], "say how many there can be in all"),
        (["--nnodes", "2", "--connection-file", "f", "--node-rank", "1"], "joined by: dtrun worker --connection-file"),
        ([*TOGETHER, "--connection-file", "f"], "--connection-file and --master-addr both say how hosts join"),
        (["--nnodes", "3:2"], "a number of hosts or MIN:MAX is needed, not '3:2'"),
        (["--nnodes", "0"], "a number of hosts or MIN:MAX is needed, not '0'"),
        ([*TOGETHER, "--node-rank", "2"], "--node-rank 2: with --nnodes 2 ranks are 0 to 1"),
        (["--node-rank", "1"], "with --nnodes 1 ranks are 0 to 0"),
        ([*TOGETHER, "--standalone"], "--standalone is this machine only"),
        ([*TOGETHER, "--rdzv-endpoint", "a:1"], "says the same as --master-addr"),
        (["--nnodes", "2", "--rdzv-endpoint", "a"], "--rdzv-endpoint is HOST:PORT, not 'a'"),
        ([*TOGETHER[:-1], "70000"], "a port is 65535 at most"),
        (["--launcher", "ray", "--nnodes", "1:2"], "Ray is asked for all nodes at once"),
        (["--launcher", "ray", "-n", "2", "--spares", "1"], "--spares 1: launcher='ray' can't start a node later"),
        (["--spares", "1", "--process-group"], "--spares is for nodes with a master, and --process-group has none"),
        (["-n", "gpu"], "this machine has no GPU"),
        (["-n", "0"], "a whole number of at least 1 is needed, not '0'"),
        (["--env", "1=2"], "NAME or NAME=VALUE is needed, not '1=2'"),
        (["--python", "/x"], "--python is for hosts that dtrun reaches itself"),
        (["--ssh-options=-v"], "--ssh-options is for --hosts"),
        (["-m", "--no-python"], "-m is python's"),
        (["--no-python"], "there is no program 'x.py'"),
        (["--tee", "3"], "--tee and --redirects say what goes to the files of --log-dir"),
        (["--log-dir", "x.py"], "--log-dir x.py cannot be made: File exists"),
        (["--metrics", "0.0.0.0:9400"], "0.0.0.0 is not this machine's alone"),
        (["--metrics", "9400"], "'9400' is no address such as 127.0.0.1:9400"),
        (["--log-dir", "logs", "--tee", "out"], "'out' is neither a number from 0 to 3 nor"),
        (["--log-dir", "logs", "--redirects", "0:4"], "'4' names no streams"),
    ],
)
def test_contradictions(
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as end:
        parse([*arguments, script])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("dtrun: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_spares_are_places_more(script: str) -> None:
    """Where hosts are named or join, they are among these: the script begins without them, and is told how many."""
    for arguments, least, most in (
        (["-n", "3", "--spares", "1"], 0, 0),
        (["--hosts", "a:2,b:2", "--spares", "1"], 0, 0),
        (["--nnodes", "3", "-n", "2", "--spares", "2", "--master-addr", "a", "--master-port", "29500"], 4, 6),
    ):
        options = parse([*arguments, script])
        spec = spec_of(options)
        assert (spec.least, spec.most) == (least, most)
        assert for_script(options, spec)["DISTTENSOR_SPARES"] == str(options.spares)


def test_every_long_option_has_both_spellings() -> None:
    """As torchrun's: scripts that start jobs have either."""
    known = parser()._option_string_actions
    for name, action in known.items():
        if name.startswith("--"):
            assert known["--" + name[2:].replace("-", "_")].dest == action.dest


def test_torchruns_options_are_known() -> None:
    """Those that say which processes there are; what is about restarts and loggers is not for us."""
    from torch.distributed.run import get_args_parser

    theirs, ours = (set(p._option_string_actions) for p in (get_args_parser(), parser()))
    others = ("rdzv-backend", "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval", "start-method", "role")
    others += ("run-path", "local-ranks-filter", "local-addr", "logs-specs", "numa-binding", "signals-to-handle")
    others += ("event-log-handler", "duplicate-stdout-filters", "duplicate-stderr-filters", "shutdown-timeout")
    others += ("virtual-local-rank", "log-line-prefix-template", "print-completion")
    left = {name.replace("_", "-") for name in theirs - ours}
    assert left <= {f"--{name}" for name in others}


def test_settings(script: str) -> None:
    watched = ["--trace", "t.json", "--metrics", "127.0.0.1:9400"]
    options = parse(["--nproc_per_node", "3", "--simulate_cuda=2", "--backend", "tcp", *watched, script, "-n", "9"])
    assert for_script(options, spec_of(options)) == {
        "DISTTENSOR_NODES": "3",
        "DISTTENSOR_SIMULATE_CUDA": "2",
        "DISTTENSOR_BACKEND": "tcp",
        "DISTTENSOR_TRACE": os.path.abspath("t.json"),
        "DISTTENSOR_METRICS": "127.0.0.1:9400",
    }
    assert options.arguments == ["-n", "9"]
    assert parse(["-n", "cpu", script]).nodes == len(os.sched_getaffinity(0))
    assert parse(["-n", "auto", script]).nodes is None


@pytest.mark.row("T58", "G14")
def test_plan(script: str) -> None:
    assert spec_of(parse([script])) == LaunchSpec("local")
    options = parse(["--hosts", "a:3,b", "-n", "2", "--launcher", "nearby", "--interface", "eth0, ::1", script])
    hosts, ways = (Host("a", 3), Host("b", 2)), ("eth0", "::1")
    assert spec_of(options) == LaunchSpec("nearby", hosts=hosts, interface=ways, folder=os.path.realpath("."))
    assert spec_of(parse(["--hosts", "a", "--launcher", "nearby", "-m", "x"])).folder == os.getcwd()
    Path("hosts").write_text("a slots=3\nb  # as many as -n says\n")
    options = parse(["--hostfile", "hosts", "-n", "2", "--launcher", "nearby", script])
    assert spec_of(options) == LaunchSpec("nearby", hosts=hosts, folder=os.path.realpath("."))
    assert for_script(options, spec_of(options)) == {}  # how many there are, the spec knows
    assert spec_of(parse(["--timeout", "7", script])).timeout == 7
    reach = ["--python", "/opt/python", "--ssh-options=-p 2222", "--launcher-option", "ssh=slow ssh", script]
    assert spec_of(parse(["--hosts", "a", *reach])) == LaunchSpec(
        "ssh",
        hosts=(Host("a"),),
        python="/opt/python",
        options={"ssh": "slow ssh", "ssh_options": "-p 2222"},
        folder=os.getcwd(),
    )


def test_joining(script: str) -> None:
    """torchrun's way: the same command on every host, with its rank or without."""
    here = ["--nnodes", "2:3", "-n", "4", "--master-port", "29500", "--master-addr", "localhost", script]
    spec = spec_of(parse(here))
    assert (spec.launcher, spec.least, spec.most) == ("join", 8, 12)
    assert spec.hosts == (Host(socket.gethostname(), 4),)
    assert spec.options["host"] == "localhost"
    assert worker_options_of(parse(here)) is None
    there = ["--nnodes", "2:3", "-n", "4", "--rdzv-endpoint", "192.0.2.77:29500", "--timeout", "9"]
    asked = ["--nproc-per-node", "4", "--master-addr", "192.0.2.77", "--master-port", "29500"]
    assert worker_options_of(parse([*there, script])) == [*asked, "--timeout", "9"]
    assert worker_options_of(parse([*there, "--node-rank", "2"])) == [*asked, "--rank", "8", "--timeout", "9"]
    assert worker_options_of(parse([*there, "--node-rank", "0", script])) is None
    by_file = spec_of(parse(["--nnodes", "1:3", "--connection-file", "job", "-n", "2", script]))
    assert by_file.options == {"connection_file": os.path.abspath("job")}
