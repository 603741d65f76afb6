"""dtrun: exit codes, signals, output, and nothing left behind. Real processes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from aftermath import children, within
from checkout import search_path
from limits import HANG
from output_kit import unfolded
from processes import alive_after
from variants import variants

import disttensor
from disttensor.cli.checked_options import parse
from disttensor.cli.main import _run_here, main
from disttensor.runtime.launch.tree.spawn import LAUNCHER_FD, inherited_server

#: dtrun without what it doesn't need: seconds less for each test.
DTRUN = """
import sys
from functools import partial
from disttensor.cli import main as cli
cli.spawn_server = partial(cli.spawn_server, ["stub_workers"])
sys.exit(cli.main())
"""

Dtrun = Callable[..., contextlib.AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def dtrun(tmp_path: Path) -> Dtrun:
    """Runs dtrun on a script with this text."""

    @contextlib.contextmanager
    def run(text: str, *arguments: str, options: tuple[str, ...] = (), **how: Any) -> Iterator[subprocess.Popen[str]]:
        script = tmp_path / "script.py"
        script.write_text(text)
        path = search_path()
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": ""}
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how
        command = [sys.executable, "-c", DTRUN, *options, str(script), *arguments]
        with subprocess.Popen(command, env=environment, cwd=tmp_path, **how) as process:
            try:
                yield process
            finally:
                process.kill()

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script was named"),
        (["nowhere.py"], "script 'nowhere.py' does not exist"),
        (["."], "script '.' is a directory"),
        (["-n", "0", "x.py"], "a whole number of at least 1 is needed, not '0'"),
        (["-n", "two", "x.py"], "a whole number of at least 1 is needed, not 'two'"),
        (["--simulate-cuda", "-1", "x.py"], "a whole number of at least 0 is needed, not '-1'"),
        (["--nodes", "2", "x.py"], "unrecognized arguments: --nodes; did you mean -n?"),
        (["-np", "2", "x.py"], "-np is mpiexec's; did you mean -n?"),
        (
            ["--join", "a:1", "x.py"],
            "unrecognized arguments: --join; did you mean dtrun worker --connection-file FILE?",
        ),
        (["--host", "a", "x.py"], "unrecognized arguments: --host; did you mean --hosts?"),
        (["--simulate-cude", "1", "x.py"], "did you mean --simulate-cuda?"),
        (["--zzz", "1", "x.py"], "unrecognized arguments: --zzz (see dtrun --help)"),
        (["--bind", "gpus", "x.py"], "did you mean 'gpu'?"),
        (["--launcher", "slrum", "x.py"], "did you mean 'slurm'?"),
        (["status"], "script 'status' does not exist, and dtrun has no command of that name"),
        ([__file__.replace("dtrun.py", "drtun.py")], "does not exist; did you mean test_dtrun.py?"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dtrun: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [("rdma", True), ("NCCL", True), ("tcp", False), ("my.module:Channel", False)],
)
def test_a_backend_that_nobody_has_is_noticed_before_the_script(dtrun: Dtrun, name: str, said: bool) -> None:
    """And no more than that: the script may make it known."""
    with dtrun("", options=("--backend", name)) as process:
        _, err = process.communicate(timeout=HANG)
    assert process.returncode == 0
    assert (f"dtrun: --backend {name}: here is no data channel of that name (known: auto, gloo" in err) is said
    assert ("did you mean 'nccl'?" in err) is (name == "NCCL")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [("print(1)", 0, True), ("1 / 0", 1, False), ("import disttensor as dt; dt.init_master_worker()", 0, False)],
)
def test_a_script_that_asks_for_no_nodes(dtrun: Dtrun, text: str, code: int, said: bool) -> None:
    with dtrun(text, options=("-n", "1")) as process:
        _, err = process.communicate(timeout=HANG)
    assert process.returncode == code
    assert ("never called disttensor.init_master_worker(): its nodes were started in vain" in err) is said, err


#: Limits of descriptors, dtrun's options, and what it says.
FEW = [
    (24, ("-n", "2"), "a session of 2 nodes takes 41"),
    (64, ("-n", "20"), "a session of 20 nodes takes 86"),
    (100, ("-n", "20"), "the fork server of 20 nodes takes 109"),
    (100, ("-n", "20", "--process-group"), "the fork server of 20 nodes takes 109"),
    (100, ("--hosts", "a:20,b:20"), "a session of 40 nodes takes 136"),
    (64, ("-n", "10", "--nnodes", "2", "--connection-file", "here"), "a session of 20 nodes takes 86"),
]


@pytest.mark.fault(44)
@pytest.mark.parametrize(("most", "options", "said"), FEW, ids=[" ".join(options) for _, options, _ in FEW])
def test_few_descriptors_are_told_before_anything_is_started(
    dtrun: Dtrun, most: int, options: tuple[str, ...], said: str
) -> None:
    """Scripts and fork servers inherit the limit; they would say so after they have imported torch."""
    limits = (most, most)
    with (
        within(5.0),
        dtrun(
            "print('begun')", options=options, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        ) as process,
    ):
        out, err = process.communicate(timeout=HANG)
    assert (process.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert line == (
        f"dtrun: error: Too many open files: {said} file descriptors at least; process {process.pid} may have {most} "
        f"open at once (RLIMIT_NOFILE): raise that with `ulimit -n 4096` (the hard limit is {most})"
    )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "dtrun -n 4 train.py --epochs 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("raise SystemExit(7)", 7),
        ("1 / 0", 1),
        ("import os; os._exit(200)", 200),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
    ],
)
def test_exit_code(dtrun: Dtrun, text: str, code: int) -> None:
    with dtrun(text, options=("-n", "2")) as process:
        process.communicate(timeout=HANG)
        assert process.returncode == code


SHOW = """
import json, os, sys
names = "NODES", "SIMULATE_CUDA", "BACKEND", "TRUSTED_NETWORK", "ENCRYPT", "CHECKSUM"
print(json.dumps([sys.argv[1:], [os.environ.get("DISTTENSOR_" + n) for n in names], sys.stdin.read(), __name__]))
"""


@pytest.mark.row("M22")
@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
def test_what_the_script_gets(dtrun: Dtrun, spelling: str) -> None:
    options = (spelling, "3", "--simulate-cuda=2", "--backend", "tcp", "--trusted-network", "--encrypt", "--checksum")
    with dtrun(SHOW, "-n", "9", "--help", options=options) as process:
        out, _ = process.communicate("typed", timeout=HANG)
    assert json.loads(out) == [["-n", "9", "--help"], ["3", "2", "tcp", "1", "1", "1"], "typed", "__main__"]


def test_module(tmp_path: Path, dtrun: Dtrun) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SHOW)
    with dtrun("", options=("-m", "package.train", "--x")) as process:
        out, _ = process.communicate("", timeout=HANG)
    assert json.loads(out)[:2] == [["--x", str(tmp_path / "script.py")], [None] * 6]


def test_no_python(tmp_path: Path, dtrun: Dtrun) -> None:
    program = tmp_path / "program"
    program.write_text("#!/nowhere")
    program.chmod(0o700)
    with dtrun("", options=("--no-python", str(program))) as process:
        _, err = process.communicate(timeout=HANG)
        cause = "cannot be run: No such file or directory"
        assert (process.returncode, err) == (1, f"dtrun: error: {str(program)!r} {cause}\n")
    program.write_text("#!/bin/sh\necho $DISTTENSOR_NODES $0 $*\nexit 3\n")
    with dtrun("", options=("-n", "2", "--no-python", str(program), "-x")) as process:
        out, _ = process.communicate(timeout=HANG)
        assert (process.returncode, out) == (3, f"2 {program} -x {tmp_path}/script.py\n")


WAIT_FOR_SIGNALS = """
import os, signal, sys
got = []
for s in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
    signal.signal(s, lambda number, frame: got.append(signal.Signals(number).name))
print("ready", flush=True)
shown = 0
while "SIGTERM" not in got[:shown]:
    if shown < len(got):
        print(got[shown], flush=True)
        shown += 1
    else:
        signal.sigtimedwait([], 0.02)
print(*got, flush=True)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.fault(43)
def test_signals_are_passed_on(dtrun: Dtrun) -> None:
    with dtrun(WAIT_FOR_SIGNALS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pids = children(process.pid)
        for number in (signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
            assert process.stdout.readline() == f"{number.name}\n"
        with within(5.0):
            process.terminate()
            assert process.stdout.readline() == "SIGTERM\n"
            assert process.stdout.readline() == "SIGINT SIGHUP SIGTERM\n"
            assert process.wait(HANG) == 143
            assert alive_after(HANG, pids) == []


@pytest.mark.fault(43)
def test_terminal(dtrun: Dtrun) -> None:
    ours, theirs = pty.openpty()
    tty = os.ttyname(theirs)

    def attach() -> None:
        os.close(os.open(tty, os.O_RDWR))  # the first terminal that a session's leader opens becomes its own

    with dtrun(WAIT_FOR_SIGNALS, stdin=theirs, start_new_session=True, preexec_fn=attach) as process:
        os.close(theirs)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.write(ours, b"\x03")
        assert process.stdout.readline() == "SIGINT\n"
        os.close(ours)  # a hang-up: the kernel tells only the session's leader, here dtrun
        assert process.stdout.readline() == "SIGHUP\n"
        pids = children(process.pid)
        with within(5.0):
            process.terminate()
            assert process.stdout.readline() == "SIGTERM\n"
            assert process.stdout.readline() == "SIGINT SIGHUP SIGTERM\n"  # once each
            assert process.wait(HANG) == 143
            assert alive_after(HANG, pids) == []


@pytest.mark.fault(43)
def test_a_terminal_that_is_gone(dtrun: Dtrun) -> None:
    """With nodes, of a script that heeds nothing: the kernel tells dtrun, which has a session of its own there."""
    ours, theirs = pty.openpty()
    tty = os.ttyname(theirs)

    def attach() -> None:
        os.close(os.open(tty, os.O_RDWR))

    with dtrun(NODES, "serve", "stubborn", stdin=theirs, start_new_session=True, preexec_fn=attach) as process:
        os.close(theirs)
        pids = pids_of(process)
        with within(5.0):
            os.close(ours)
            assert process.wait(HANG) == 129
            assert alive_after(HANG, pids) == []


def test_what_the_script_leaves_is_ended(dtrun: Dtrun) -> None:
    text = """
import subprocess
print(subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)
print(subprocess.Popen(["sleep 600 & echo $!"], shell=True, stdout=subprocess.PIPE).stdout.readline().decode())
"""
    with dtrun(text) as process:
        out, _ = process.communicate(timeout=HANG)
        assert process.returncode == 0
    assert len(out.split()) == 2
    assert alive_after(0, [int(pid) for pid in out.split()]) == []


NODES = """
import os, select, sys
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.launch.starters.local import LocalLauncher
launcher = LocalLauncher("stub_workers:act", ("stub_workers",))
assert launcher._server is None, "dtrun's server was not taken"
assert "DISTTENSOR_LAUNCHER_FD" not in os.environ and not os.get_inheritable(launcher.fileno())
jobs = sys.argv[1:]
launcher.start([Bundle(job=j, rank=k, address="none") for k, j in enumerate(jobs)])
pids = [os.getpid()]
while len(pids) <= len(jobs):
    select.select([launcher], [], [])
    pids += [e.pid for e in launcher.events()]
print(*pids, launcher._server_pid, flush=True)
sys.stdin.read(1)
if sys.stdin.read(1):
    launcher.stop(0)
    print("stopped", flush=True)
"""


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    """All processes of NODES with a stubborn node, whose two come last."""
    assert process.stdout is not None
    pids: dict[bool, list[int]] = {}
    for line in process.stdout:
        *_, said = line.rpartition("] children ")
        if line[0].isdigit() or said != line:
            pids[said != line] = [int(pid) for pid in said.split()]
        if len(pids) == 2:
            return [*pids[False], *children(process.pid), *pids[True]]
    pytest.fail(f"no pids came: {process.communicate()[1]}")


def lines_of(stream: IO[str], count: int) -> list[str]:
    """So many lines, as the nodes printed them, in alphabetical order."""
    lines: list[str] = []
    while len(lines) < count:
        lines += unfolded([stream.readline()])
    return sorted(lines)


def test_nodes_of_the_script(dtrun: Dtrun) -> None:
    with dtrun(NODES, "serve", "serve") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # whole lines to where they belong, in any order with those of the script
        assert lines_of(process.stderr, 2) == ["[node 0] as well\n", "[node 1] as well\n"]
        lines = lines_of(process.stdout, 3)
        assert lines[1:] == ["[node 0] serving\n", "[node 1] serving\n"]
        out, err = process.communicate("go", timeout=HANG)
        assert (process.returncode, out, err) == (0, "stopped\n", "")
        assert alive_after(0, [int(pid) for pid in lines[0].split()]) == []


ENDING = (
    NODES[: NODES.index("pids =")]
    + """
ended = 0
while ended < len(jobs):
    select.select([launcher], [], [])
    ended += sum("Exited" in repr(e) for e in launcher.events())
"""
)


@pytest.mark.row("T58")
def test_log_files(tmp_path: Path, dtrun: Dtrun) -> None:
    with dtrun(ENDING, "three", "leave", "three", options=("--log-dir", "logs", "-r", "0:3,1:1", "-t=1:2")) as process:
        out, err = process.communicate("go", timeout=HANG)
    assert (process.returncode, err) == (0, "[node 1] gone fishing\n")
    shown, *others = out.splitlines()[-2:]
    assert (shown, others) == ("[node 2] line 29", ["[node 2] unfinished"])
    assert "[node 0]" not in out
    logs = {str(path.relative_to(tmp_path / "logs")): path.read_text() for path in tmp_path.glob("logs/*/*.log")}
    assert logs.pop("0/stdout.log").startswith("line 0\nline 1\n")
    assert logs == {"0/stderr.log": "", "1/stdout.log": "", "1/stderr.log": "gone fishing\n"}
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob("logs/*/*.log")}
    assert (modes, (tmp_path / "logs").stat().st_mode & 0o777) == ({0o600}, 0o700)


@pytest.mark.row("M20")
@pytest.mark.fault(43)
@pytest.mark.parametrize("victim", ["dtrun", "script", "terminated", "terminal"])
def test_killed(dtrun: Dtrun, victim: str) -> None:
    """And no process is left: of nodes that heed no signal, and of what they have started, either."""
    with dtrun(NODES, "serve", "stubborn") as process:
        pids = pids_of(process)
        with within(10.0 if victim in ("dtrun", "script") else 5.0, victim):
            match victim:
                case "dtrun":
                    process.kill()
                case "script":
                    os.kill(pids[0], signal.SIGKILL)
                    assert process.wait(HANG) == 137
                case "terminated":
                    process.terminate()
                    assert process.wait(HANG) == 143
                case "terminal":
                    process.send_signal(signal.SIGHUP)
                    assert process.wait(HANG) == 129
            assert alive_after(HANG, pids) == []


@pytest.mark.row("M22")
@pytest.mark.cold  # what is read in /proc is a program's own
def test_the_real_thing(tmp_path: Path) -> None:
    """The installed command, real workers, and secrets that nobody sees."""
    script = tmp_path / "script.py"
    script.write_text("""
import glob, sys, torch, disttensor as dt
from disttensor.runtime.launch.starters.local import LocalLauncher
secrets, start = [], LocalLauncher.start
def spy(self, bundles):
    secrets.extend(b.secret_key.encode() for b in bundles)
    return start(self, bundles)
LocalLauncher.start = spy
def look():
    import disttensor
    print(disttensor.__version__, disttensor.factories.zeros.__name__)
with dt.init_master_worker():
    print("sum", (torch.ones(3, device="node:2") * 2).sum().item())
    dt.run(look, node=1)
    seen = b""
    for name in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try: seen += open(name, "rb").read()
        except OSError: pass
    # in one piece, as nodes' lines come between the pieces of a print where PYTHONUNBUFFERED is set
    print(f"secrets {len(secrets)} {any(s in seen for s in secrets)}\\n", end="")
""")
    command = [str(Path(sys.executable).with_name("dtrun")), "-n", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[node 1] {disttensor.__version__} zeros",
        "secrets 3 False",
        "sum 6.0",
    ]


def test_a_socket_of_somebody_else_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the script has the variable in its environment, but the descriptor is something else there."""
    first, second = socket.socketpair()
    with first, second, open(os.devnull) as file:
        for fd in (first.fileno(), file.fileno(), 9999, "x"):
            monkeypatch.setenv(LAUNCHER_FD, str(fd))
            assert inherited_server() is None
            assert LAUNCHER_FD not in os.environ
        first.send(b"still open")


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("import sys; assert sys.argv[1:] == ['a', '-b'] and __name__ == '__main__'", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('enough')", 1, "enough\n"),
        ("x = (", 1, "SyntaxError: '(' was never closed\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError: division by zero\n"),
        ("import beside", 0, ""),
    ],
)
def test_in_its_own_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    code: int,
    says: str,
) -> None:
    """As under mpiexec, where dtrun itself is the process that has to run the script."""
    script = tmp_path / "script.py"
    script.write_text(text)
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert _run_here(parse([str(script), "a", "-b"])) == code
    err = capsys.readouterr().err
    assert err.endswith(says)
    assert "runpy" not in err
    if "def f" in text:
        lines = err.splitlines()
        assert lines[1:5:2] == [f'  File "{script}", line 3, in <module>', f'  File "{script}", line 2, in f']


AGAIN = """
import os, torch, disttensor as dt
seen = []
for k in range(3):
    with dt.init_master_worker(nodes=2, threads=1):
        assert torch.full((2,), k, device="node:1").sum().item() == 2 * k
        seen.append(dt.run(os.getppid, node=[0, 1]))
        pids = dt.run(os.getpid, node=[0, 1])
        dt.run(print, "hello", node=1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
print("one server:", len(set(map(tuple, seen))) == 1, flush=True)
"""


@pytest.mark.parametrize("options", variants([["--launcher", "nearby", "--hosts", "a:1,b"], []]), ids=["root", "local"])
def test_sessions_of_one_script_share_what_dtrun_has_started(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(AGAIN)
    done = subprocess.run(
        [sys.executable, "-m", "dtrun", *options, "--log-dir", "logs", str(script)],
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[node 1] hello"] * 3 + ["one server: True"]
    assert (tmp_path / "logs/1/stdout.log").read_text() == "hello\n" * 3


@pytest.mark.cold
def test_it_starts_without_torch() -> None:
    """Which takes seconds; a worker by hand and whoever asks for help should not wait for it."""
    show = "import sys, dtrun; dtrun.main(['--help']); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=HANG, env=environment)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    asked = subprocess.run([sys.executable, "-m", "dtrun", "-n", "x"], capture_output=True, text=True, env=environment)
    assert (asked.returncode, asked.stderr[:13]) == (2, "dtrun: error:")
