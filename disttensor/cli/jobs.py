"""The commands of dtrun for jobs that run already: ps, status, top, stack, logs, trace, kill. The job itself answers.

    dtrun status --> the job's socket on this host (runtime/host/job_sockets.py) --> a thread of the script's

None of them imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ..runtime.host.job_sockets import (
    FoundJob,
    JobRequest,
    JobSocketError,
    JobSummary,
    Killed,
    OutputAnswer,
    OutputLine,
    StackAnswer,
    StatusAnswer,
    TraceAnswer,
    TraceBegun,
    find_jobs,
    pid_of,
)
from ..runtime.process import tables
from ..runtime.process.lifetime import process_stat
from .asking import NotDone, answer, clock
from .options import Parser

#: Seconds in which each job tells `dtrun ps` of itself.
PS = 2.0
#: Seconds between two looks for new output.
FOLLOW = 0.25
#: Seconds between two questions whether a timeline is there.
TRACED = 0.2
#: Seconds in which it is.
TRACE = 60.0
#: Seconds that a timeline takes unless another number is given.
SECONDS = 10.0
#: Seconds in which a job that is to end has ended.
END = 10.0
#: The exit code of a command that can't be done, and of a status with a lost node.
EX_NOT_DONE, EX_LOST = 2, 1


def main(argv: Sequence[str]) -> int:
    """Runs a command, whose name is the first argument, and returns its exit code."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as e:
        return int(e.code or 0)
    try:
        return int(options.run(options))
    except (NotDone, JobSocketError) as e:
        print(f"dtrun: error: {e}", file=sys.stderr)
        return EX_NOT_DONE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # of `dtrun logs | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def taken_by(word: str) -> str:
    """Returns what is in the way of a command: a script of its name in this folder; "" for none."""
    if not (os.path.isfile(word) or os.path.isfile(os.path.join(word, "__main__.py"))):
        return ""
    return (
        f"{word} is a command of dtrun, and a script in this folder: `dtrun ./{word}` runs the script; "
        "for the command, go to another folder"
    )


# ---- jobs ------------------------------------------------------------------------------------------------------------


def find(wanted: str | None) -> FoundJob:
    """Returns the job that is meant, by its pid or its name; None: the only one. Raises NotDone."""
    jobs = find_jobs()
    if not jobs:
        raise NotDone("no job of yours runs on this host")
    if wanted is None and len(jobs) == 1:
        return jobs[0]
    if found := [job for job in jobs if wanted == str(job.pid)]:
        return found[0]
    names = {job: _name(job) for job in jobs}
    meant = [job for job in jobs if wanted is None or wanted in (names[job], names[job].removesuffix(".py"))]
    if len(meant) == 1:
        return meant[0]
    there = ", ".join(f"{job.pid} ({names[job]})" for job in meant or jobs)
    if not meant:
        raise NotDone(f"no job {wanted} of yours runs on this host; there is {there}")
    raise NotDone(f"{len(meant)} jobs run on this host; say which, by its number: {there}")


def _name(job: FoundJob) -> str:
    with contextlib.suppress(JobSocketError):
        return answer(job, JobRequest("summary"), JobSummary, PS).name
    return "does not answer"


def _ps(options: argparse.Namespace) -> int:
    jobs = find_jobs()
    if not jobs:
        print("no job of yours runs on this host", file=sys.stderr)
        return 0
    rows = [("pid", "script", "nodes", "hosts", "up", "state"), *map(_row, jobs)]
    tables.show(rows)
    return 0


def _row(job: FoundJob) -> tuple[str, ...]:
    try:
        it = answer(job, JobRequest("summary"), JobSummary, PS)
    except (JobSocketError, NotDone):
        state = "does not answer"
        with contextlib.suppress(OSError):
            if process_stat(job.pid)[0] in "Tt":
                state = f"stopped: `kill -CONT {job.pid}` has it go on"
        return f"{job.pid}", "-", "-", "-", "-", state
    nodes = f"{it.nodes}" + (f", {it.lost} lost" if it.lost else "")
    hosts = ",".join(it.hosts) if len(it.hosts) < 3 else f"{len(it.hosts)}"
    return f"{it.pid}", it.name, nodes, hosts, clock(it.seconds), it.state


# ---- status, stacks, output ------------------------------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    it = answer(find(options.job), JobRequest("status"), StatusAnswer)
    print(msgspec.json.format(bytes(it.status)).decode() if options.json else it.text)
    return EX_LOST if it.lost else 0


def _stack(options: argparse.Namespace) -> int:
    spy = shutil.which("py-spy") if options.native else ""
    if spy is None:
        raise NotDone("--native needs py-spy: pip install py-spy")
    found = answer(find(options.job), JobRequest("stack", options.nodes, record=options.json), StackAnswer)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    blocks = []
    for it in found.processes:
        text = it.text
        if spy and it.pid:
            text = _native(spy, it.pid) if it.is_here else f"--native is for processes of this host, not of {it.host}"
        last = f"last messages:\n{it.messages}" if it.messages else ""
        blocks.append("\n\n".join(filter(None, (it.title, text, last))) + "\n")
    print("\n".join(blocks), end="")
    return 0


def _native(spy: str, pid: int) -> str:
    done = subprocess.run([spy, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.rstrip() if done.returncode == 0 else f"py-spy: {done.stderr.strip() or done.returncode}"


def _logs(options: argparse.Namespace) -> int:
    job = find(options.job)
    try:
        for it in lines(job, options.nodes, options.follow):
            print(f"[node {it.rank}] {it.text}", flush=options.follow)
    except JobSocketError:
        if not options.follow:
            raise
    return 0  # a job that is followed ends some time


def lines(job: FoundJob, nodes: tuple[int, ...], follow: bool) -> Iterator[OutputLine]:
    """Yields the lines that nodes have printed; with ``follow`` those to come as well, until the job ends."""
    after = 0
    while True:
        page = answer(job, JobRequest("output", nodes, after), OutputAnswer)
        yield from page.lines
        after = page.lines[-1].number if page.lines else after
        if not page.more:
            if not follow:
                return
            time.sleep(FOLLOW)


def _trace(options: argparse.Namespace) -> int:
    job, path = find(options.job), options.output
    part = f"{path}.part"
    # Made before the job records, as it can't be made perhaps; for this user alone, as it names the script's lines.
    try:
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        raise NotDone(f"{part} can't be written: {e.strerror}") from None
    try:
        with open(file, "wb") as sink:
            data = _record(job, options.seconds, path.endswith(".html"))
            sink.write(data if path.endswith(".gz") else gzip.decompress(data))
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise
    opens = "any browser" if path.endswith(".html") else "https://ui.perfetto.dev"
    print(f"{path}: {options.seconds:g} s of job {job.pid}; {opens} opens it")
    return 0


def _record(job: FoundJob, seconds: float, page: bool) -> bytes:
    """Has a job record its timeline, for so long or until Ctrl-C, and returns that, or a page about it, compressed."""
    number = answer(job, JobRequest("trace", seconds=seconds, page=page), TraceBegun).number
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(seconds)
    deadline = time.monotonic() + TRACE
    while time.monotonic() < deadline:
        found = answer(job, JobRequest("traced", after=number), TraceAnswer)
        if found.ready:
            return found.data
        time.sleep(TRACED)
    raise NotDone(f"job {job.pid} has not written its timeline within {TRACE:g} s")


# ---- the end ---------------------------------------------------------------------------------------------------------


def _kill(options: argparse.Namespace) -> int:
    job = find(options.job)
    if options.nodes:
        killed = answer(job, JobRequest("kill", options.nodes), Killed)
        print(f"job {job.pid}: killed node {', '.join(map(str, killed.nodes))}")
        return 0
    if not job.has_script:  # whose agent says where its script is
        answer(job, JobRequest("kill"), Killed)
    if not (pid := pid_of(job)):
        raise NotDone(
            f"job {job.pid} is in another space of process numbers, as a container's, and has to be ended there"
        )
    with contextlib.suppress(ProcessLookupError):
        script = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(script, signal.SIGTERM)
            poller = select.poll()
            poller.register(script, select.POLLIN)
            if not poller.poll(1000 * END):
                raise NotDone(f"job {pid} has not ended within {END:g} s; `kill -KILL {pid}` ends it whatever it is at")
        finally:
            os.close(script)
    find_jobs()  # which removes its socket
    print(f"job {pid} has ended")
    return 0


# ---- options ---------------------------------------------------------------------------------------------------------


def _ranks(text: str) -> tuple[int, ...]:
    """Converts 1,3-5 to (1, 3, 4, 5)."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"numbers of nodes are needed, such as 1,3 or 0-7, not {text!r}")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(found))


def _top(options: argparse.Namespace) -> int:
    from .top import watch

    return watch(find(options.job))


#: What each command is for, and what does it.
COMMANDS: dict[str, tuple[str, Callable[[argparse.Namespace], int]]] = {
    "ps": ("list the jobs of this user on this host", _ps),
    "status": ("print what the script and each node are at; the exit code is 1 where a node is lost", _status),
    "top": ("show that, redrawn twice a second", _top),
    "stack": ("print the stacks of the threads of the script and of nodes, those that work first", _stack),
    "logs": ("print the last 1,000 lines of each node", _logs),
    "trace": ("record a timeline of a job that runs, which Perfetto opens, or a page about it", _trace),
    "kill": ("end a job, or nodes of it", _kill),
}


def _parser() -> Parser:
    it = Parser(prog="dtrun", description="Look at jobs that run on this host.", allow_abbrev=False)
    commands = it.add_subparsers(required=True, metavar="command")
    for name, (what, run) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", allow_abbrev=False)
        command.set_defaults(run=run, nodes=())
        if name != "ps":
            command.add_argument("job", nargs="?", help="the script's pid or name; not needed where there is one job")
        if name in ("stack", "logs", "kill"):
            command.add_argument("-n", "--nodes", type=_ranks, default=(), metavar="1,3-5", help="only these nodes")
    commands.choices["status"].add_argument("--json", action="store_true", help="print all of it as JSON")
    how = commands.choices["stack"].add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print them as JSON, with the whole flight record")
    how.add_argument(
        "--native", action="store_true", help="with the frames of C code, by py-spy, where that is installed"
    )
    commands.choices["trace"].add_argument(
        "-o", "--output", required=True, metavar="FILE", help="the file: .gz is compressed, .html a page for people"
    )
    commands.choices["trace"].add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help=f"for how long (default: {SECONDS:g}); Ctrl-C ends it",
    )
    commands.choices["logs"].add_argument("-f", "--follow", action="store_true", help="go on with what is printed next")
    return it
