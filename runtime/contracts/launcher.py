"""``check_launcher``: the contract of launchers, as a test that needs nothing but torch.

A launcher of your own is tested in three lines (it is ``disttensor.testing.check_launcher``, too):

    def make(entry):    # a launcher whose workers run entry, "module:function"
        return MyLauncher(entry)
    check_launcher(make)

Each check makes its own launchers, asks them for 3 nodes at most, and stops them. It raises ConformanceError at the
first thing that is wrong. The function that workers run in place of the real one needs no torch, so a check takes as
long as launching does (launcher_worker.py, which has to be importable where the workers are).
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from ..host.launcher import Exited, Launcher, Started
from ..host.output_options import Output
from ..launch.output.lines import TAIL_LINES
from ..process.spelling import shown
from ..protocol.errors import StartError
from .conformance import ConformanceError, need
from .launcher_ends import (
    check_ctrl_c,
    check_helpers_killed,
    check_master_hung_up,
    check_master_killed,
    check_master_terminated,
    check_nothing_held,
    check_real_worker,
    check_stop,
    check_stop_by_force,
    check_stop_early,
)
from .launcher_stage import ENTRY, LIMIT, LauncherStage, Make, Shown
from .launcher_worker import digest, in_sight

__all__ = ["CHECKS", "ConformanceError", "Make", "check_launcher"]


def check_launcher(make: Make, without: Collection[str] = ()) -> None:
    """Runs all checks of ``CHECKS`` on a launcher, but for those that are named in ``without``.

        def make(entry):
            return MyLauncher(entry)
        check_launcher(make, without=["started"])

    ``make(entry)`` returns a launcher whose workers run ``entry``, "module:function". Each check starts up to 3
    workers. Returns when all checks have passed.

    Raises ConformanceError, which names the check and what was wrong, ValueError for an unknown name in ``without``.
    """
    if unknown := set(without) - set(CHECKS):
        raise ValueError(f"there is no check {shown(unknown.pop())} (there are {', '.join(CHECKS)})")
    for name in CHECKS:
        if name not in without:
            run_check(name, make)


def run_check(name: str, make: Make) -> None:
    """Runs one check. Raises ConformanceError, KeyError for an unknown name."""
    with Shown() as shown:
        try:
            CHECKS[name](make)
        except Exception as error:
            kind = "" if isinstance(error, ConformanceError) else f"unexpected {type(error).__name__}: "
            failed = ConformanceError(f"{name}: {kind}{error}")
            for line in [*shown.lines(1), *shown.lines(2)][-TAIL_LINES:]:
                failed.add_note(line)
            raise failed from error


def check_started(make: Make) -> None:
    """Checks that each worker is reported once, when it runs: its rank, its process, its host."""
    with LauncherStage(make) as stage:
        began = time.monotonic()
        need(stage.launcher.events() == [], "events() should have nothing to tell before anything is asked for")
        workers = stage.start(3)
        need(time.monotonic() - began < LIMIT, "it takes too long")
        need(stage.launcher.events() == [], "events() should tell each thing once, and not wait for the next one")
        started = {event.rank: event for event in stage.events if isinstance(event, Started)}
        need(len(stage.events) == 3 and sorted(started) == [0, 1, 2], f"three Started should come: {stage.events}")
        for worker in workers:
            told = started[worker.rank].pid
            need(told == worker.pid, f"Started says that node {worker.rank} is process {told}; it is {worker.pid}")


def check_places(make: Make) -> None:
    """Checks that the nodes of a host are numbered, and know how many they are."""
    with LauncherStage(make) as stage:
        workers = stage.start(3)
        hosts: dict[str, list[tuple[int, int]]] = {}
        for event, worker in zip(sorted(stage.events, key=lambda e: e.rank), workers, strict=True):
            place = worker.bundle["local_rank"], worker.bundle["local_size"]
            hosts.setdefault(event.host, []).append(place)
        for host, places in hosts.items():
            expected = [(place, len(places)) for place in range(len(places))]
            need(sorted(places) == expected, f"(local_rank, local_size) on host {host!r}: {places}, not {expected}")


def check_bundles(make: Make) -> None:
    """Checks that each worker's own bundle arrives, however large it is. A key pair is nobody else's."""
    with LauncherStage(make) as stage:
        pairs = stage.launcher.key_pairs(2)
        need(len({public for public, _ in pairs}) == 2, "key_pairs(2) should give two different keys")
        plain = stage.door.bundles(stage.launcher, 3)
        long = tuple(f"/nowhere/ü {i:05}" for i in range(40_000))  # nearly as much as there may be (protocol/bundle.py)
        bundles = [msgspec.structs.replace(bundle, sys_path=long, threads=7) for bundle in plain]
        stage.launcher.start(bundles)
        for sent, worker in zip(bundles, stage.workers(3), strict=True):
            for name, value in msgspec.to_builtins(sent).items():
                come = worker.bundle[name]
                if name == "secret_key":
                    need(not value or come == digest(value), f"the secret key of node {sent.rank} should arrive")
                elif name == "env":
                    need(value.items() <= come.items(), f"env arrived as {come}")
                elif not name.startswith("local_"):
                    need(come == list(value) if isinstance(value, tuple) else come == value, f"{name} arrived changed")


def check_secrets(make: Make) -> None:
    """Checks that no key is in a command line or an environment, on any host."""
    with LauncherStage(make) as stage:
        workers = stage.start(3)
        keys = [bundle.secret_key for bundle in stage.bundles if bundle.secret_key]
        seen = [*in_sight(keys), *(file for worker in workers for file in worker.ask("sight"))]
        need(not seen, f"a secret key can be read in {', '.join(seen)}")
        need(not any(key in repr(stage.launcher) for key in keys), "repr(launcher) shows a secret key")


def check_words(make: Make) -> None:
    """Checks the messages about too many nodes, and about nodes that have not come."""
    with LauncherStage(make) as stage:
        capacity = stage.launcher.capacity
        need(capacity is None or capacity >= 1, f"capacity={capacity} is neither None nor at least 1")
        said = stage.launcher.too_many((capacity or 0) + 1)
        need(said, "too_many() should say why")
        need(capacity is None or str(capacity) in said, f"too_many() should say how many there can be: {said!r}")
        stage.start(2)
        need(isinstance(stage.launcher.missing([0, 1]), str), "missing() should give a text")
        stage.launcher.flush(LIMIT)


def check_exits(make: Make) -> None:
    """Checks that a worker's end is reported, once: its exit code or the signal, as a number and in words."""
    with LauncherStage(make) as stage:
        well, badly, killed = stage.start(3)
        killed.send_order("kill", signal.SIGKILL)
        badly.send_order("exit", 3)
        well.send_order("exit", 0)
        for worker, code, cause in (
            (well, 0, "exit code 0"),
            (badly, 3, "exit code 3"),
            (killed, -9, "killed by SIGKILL"),
        ):
            event = stage.exited(worker.rank)
            told = f"{event.cause!r} ({event.code})"
            need((event.code, event.cause) == (code, cause), f"a worker ended by {cause!r} ({code}), told is {told}")
            need(event.pid == worker.pid, f"Exited names process {event.pid}; it was {worker.pid}")
        need(len(stage.events) == 6, f"three Started and three Exited should come: {stage.events}")
        for rank in range(3):
            order = [type(event) for event in stage.events if event.rank == rank]
            need(order == [Started, Exited], f"node {rank}: events() told of {order}")


def check_tails(make: Make) -> None:
    """Checks that the last lines of a worker come with its end: of both streams, 20 at most, without a prefix."""
    with LauncherStage(make) as stage:
        prints, leaves, fails = stage.start(3)
        prints.ask("show", "stdout", "".join(f"line {i}\n" for i in range(30)) + "unfinished")
        for worker, order, text in ((prints, "exit", 5), (leaves, "exit", "gone fishing"), (fails, "fail", "alas")):
            worker.send_order(order, text)
        tail, expected = stage.exited(0).tail, (*(f"line {i}" for i in range(31 - TAIL_LINES, 30)), "unfinished")
        need(tail == expected, f"tail should have the last {TAIL_LINES} lines as they were printed: {tail}")
        event = stage.exited(1)
        need((event.code, event.tail) == (1, ("gone fishing",)), f"sys.exit('gone fishing') was told as {event}")
        event = stage.exited(2)
        need(event.code == 1 and event.tail[-1:] == ("RuntimeError: alas",), f"an exception was told as {event}")


def check_output(make: Make) -> None:
    """Checks that workers' output comes out here by lines, complete and in order, with ``[node 1] `` before each."""
    with Shown() as shown, LauncherStage(make) as stage:
        workers = stage.start(2)
        texts = [[f"{worker.rank}:{i:05} {'x' * 40}" for i in range(4000)] for worker in workers]
        for worker, text in zip(workers, texts, strict=True):
            worker.send_order("show", "stdout", "\n".join(text) + f"\nunfinished {worker.rank}")
            worker.send_order("show", "stderr", f"oh {worker.rank}\n")
        for worker in workers:
            worker.ask("exit", 0)
            stage.exited(worker.rank)
        stage.stop(0)
        for worker, text in zip(workers, texts, strict=True):
            for fd, expected in ((1, [*text, f"unfinished {worker.rank}"]), (2, [f"oh {worker.rank}"])):
                prefix = f"[node {worker.rank}] "
                lines = [line.removeprefix(prefix) for line in shown.lines(fd) if line.startswith(prefix)]
                need(lines == expected, _difference(f"descriptor {fd}, {prefix}", lines, expected))


def _difference(where: str, found: list[str], expected: list[str]) -> str:
    at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), len(found))
    return f"{where}: {len(found)} of {len(expected)} lines were shown; from line {at} on: {found[at : at + 3]}"


def check_flush(make: Make) -> None:
    """Checks that after ``flush`` all earlier output of workers is shown."""
    with Shown() as shown, LauncherStage(make) as stage:
        workers = stage.start(2)
        for count in (1, 3000):
            for worker in workers:
                worker.ask("show", "stdout", "".join(f"{count}: {worker.rank} {i}\n" for i in range(count)))
            stage.launcher.flush(LIMIT)
            missing = [rank for rank in (0, 1) if f"[node {rank}] {count}: {rank} {count - 1}" not in shown.lines(1)]
            need(not missing, f"flush() returned before the last of {count} lines of nodes {missing} was shown")


def check_logs(make: Make) -> None:
    """Checks that ``show`` has workers' output put into files on this host, or raises StartError."""
    with tempfile.TemporaryDirectory() as folder, LauncherStage(make) as stage:
        try:
            stage.launcher.show(Output(log_dir=folder, redirects="0:3,1:1"))
        except StartError:
            return
        for worker in stage.start(2):
            worker.ask("show", "stdout", f"out {worker.rank}\nunfinished")
            worker.ask("show", "stderr", f"err {worker.rank}\n")
            worker.ask("exit", 0)
            stage.exited(worker.rank)
        stage.stop(0)
        files = {str(path.relative_to(folder)): path.read_text() for path in sorted(Path(folder).rglob("*.log"))}
        expected = {f"{rank}/stdout.log": f"out {rank}\nunfinished" for rank in (0, 1)} | {"0/stderr.log": "err 0\n"}
        need(expected.items() <= files.items(), f"the log files should be {expected}, and are {files}")


def check_bad_entry(make: Make) -> None:
    """Checks that a worker that cannot run its entry ends with the reason among its last lines."""
    for entry, word in (("no_such_module:main", "no_such_module"), (f"{ENTRY}_is_not_here", "main_is_not_here")):
        with LauncherStage(make, entry) as stage:
            stage.ask(1)
            event = stage.exited(0)
            need(event.code, f"a worker that can't run {entry} should not end with code 0")
            need(any(word in line for line in event.tail), f"tail should say that there is no {entry}: {event.tail}")


def check_end(make: Make) -> None:
    """Checks that ``end_worker`` ends a worker at once, whatever signals it ignores; the others go on."""
    with LauncherStage(make) as stage:
        first, second, third = stage.start(3)
        second.ask("stubborn", True)
        if type(stage.launcher).end_worker is Launcher.end_worker:
            second.send_order("kill", signal.SIGKILL)
        else:
            stage.launcher.end_worker(1)
            stage.gone([second], "end_worker(1) was called")
        event = stage.exited(1)
        need(event.code < 0, f"a worker that was killed should have minus the signal's number as code: {event}")
        stage.launcher.end_worker(1)  # of a worker that has ended
        for worker in (first, third):
            worker.ask("show", "stdout", "")
        need(len(stage.events) == 4, f"of the other workers nothing should be told: {stage.events}")


_ALL: tuple[Callable[[Make], None], ...] = (
    check_started,
    check_places,
    check_bundles,
    check_secrets,
    check_words,
    check_exits,
    check_tails,
    check_output,
    check_flush,
    check_logs,
    check_bad_entry,
    check_end,
    check_stop,
    check_stop_by_force,
    check_stop_early,
    check_nothing_held,
    check_helpers_killed,
    check_master_killed,
    check_master_terminated,
    check_master_hung_up,
    check_ctrl_c,
    check_real_worker,
)

#: The checks by name. Each takes a function that makes launchers.
CHECKS: dict[str, Callable[[Make], None]] = {check.__name__.removeprefix("check_"): check for check in _ALL}
