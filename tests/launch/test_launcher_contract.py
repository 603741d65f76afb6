"""Every launcher does what ``Launcher`` promises: ``check_launcher``, check by check; and the checks find mistakes.

Local nodes, those of a root's agents, and such that join; and what dtrun has started. The same for launchers that need
a network or a scheduler is in their own files: test_ssh.py, test_launch_slurm.py, test_ray.py.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from checkout import search_path
from contract_kit import CONTRACT, LAUNCHERS, PRELOAD, UNDER_DTRUN, local, results
from limits import CONTRACT_HANG

from disttensor.runtime.contracts.launcher import CHECKS, ConformanceError, check_launcher, run_check
from disttensor.runtime.host.output_options import Output
from disttensor.runtime.launch import Exited, Started
from disttensor.runtime.launch.starters.local import LocalLauncher
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.protocol.errors import StartError

#: What differs little from another check, or, as any session has real workers, is shown by many other tests.
SLOW = {"master_terminated", "master_hung_up", "real_worker"}
#: Joined nodes hang below a root as others do: only how they come and go is another way.
JOINING = {"started", "places", "bundles", "end", "stop_by_force", "stop_early", "helpers_killed", "master_killed"}


def contract() -> Iterator[Any]:
    for launcher, check in itertools.product(LAUNCHERS, CHECKS):
        slow = check in SLOW or (launcher == "join" and check not in JOINING)
        yield pytest.param(launcher, check, marks=[pytest.mark.slow] * slow)


@pytest.mark.row("M20", "M22")
@pytest.mark.cold  # its workers import no torch, and it looks at command lines
@pytest.mark.parametrize(("launcher", "check"), [*contract()])
def test_contract(launcher: str, check: str) -> None:
    run_check(check, LAUNCHERS[launcher])


@pytest.fixture(scope="module", params=["local", pytest.param("nearby", marks=pytest.mark.slow)])
def under_dtrun(request: pytest.FixtureRequest) -> dict[str, str]:
    """What was wrong with what dtrun has started, by check."""
    options = ["-n", "3"] if request.param == "local" else ["--launcher", "nearby", "--hosts", "a:2,b"]
    command = [sys.executable, "-m", "dtrun", *options, CONTRACT, *DTRUN]
    environment = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONTRACT_HANG, env=environment)
    assert done.returncode == 0, done.stderr
    return results(done.stdout)


#: Nor the master's end, which is dtrun's affair (test_dtrun.py).
DTRUN = [name for name in UNDER_DTRUN if name != "master_killed"]


@pytest.mark.parametrize("check", DTRUN)
def test_under_dtrun(under_dtrun: dict[str, str], check: str) -> None:
    assert under_dtrun[check] == ""


# ---- that the checks find mistakes -----------------------------------------------------------------------------------


class Tailless(LocalLauncher):
    def events(self) -> list[Started | Exited]:
        return [replace(e, tail=()) if isinstance(e, Exited) else e for e in super().events()]


class Praising(LocalLauncher):
    def events(self) -> list[Started | Exited]:
        return [replace(e, code=0) if isinstance(e, Exited) else e for e in super().events()]


class Repeating(LocalLauncher):
    def events(self) -> list[Started | Exited]:
        return [event for event in super().events() for _ in range(2)]


class Reckless(LocalLauncher):
    def end_worker(self, rank: int) -> None:
        for each in (0, 1, 2):
            super().end_worker(each)


class Impatient(LocalLauncher):
    def stop(self, grace: float) -> None:
        super().stop(0)


class Tireless(LocalLauncher):
    """Ends nothing."""

    left: ClassVar[list[Tireless]] = []

    def stop(self, grace: float) -> None:
        self.left.append(self)


class Obliging(LocalLauncher):
    """Takes orders after its end."""

    def start(self, bundles: Sequence[Bundle]) -> None:
        with contextlib.suppress(StartError):
            super().start(bundles)


class Leaking(LocalLauncher):
    """Gives a descriptor away."""

    left: ClassVar[list[int]] = []

    def stop(self, grace: float) -> None:
        super().stop(grace)
        self.left.append(os.dup(2))


class Garbage:
    """Is in a circle, with a descriptor that ends with it."""

    def __init__(self) -> None:
        self.fd, self.itself = os.dup(2), self

    def __del__(self) -> None:
        os.close(self.fd)


class Littering(Leaking):
    """The same, where as many descriptors of garbage are closed meanwhile."""

    def start(self, bundles: Sequence[Bundle]) -> None:
        gc.collect()
        super().start(bundles)

    def stop(self, grace: float) -> None:
        super().stop(grace)
        if len(self.left) == 1:
            Garbage()


class Telling(LocalLauncher):
    """Has a helper who knows too much."""

    def start(self, bundles: Sequence[Bundle]) -> None:
        self.helper = subprocess.Popen(["sh", "-c", "read line", bundles[0].secret_key], stdin=subprocess.PIPE)
        super().start(bundles)

    def stop(self, grace: float) -> None:
        self.helper.communicate()
        super().stop(grace)


class Forgetful(LocalLauncher):
    """Has a helper who outlives the master."""

    def start(self, bundles: Sequence[Bundle]) -> None:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        super().start(bundles)


class Mute(LocalLauncher):
    def __init__(self, entry: str, preload: Sequence[str]) -> None:
        super().__init__(entry, preload)
        self.show(Output(log_dir=tempfile.gettempdir(), redirects="3"))


class Unwilling(LocalLauncher):
    def show(self, output: Output) -> None:
        pass


class Changing(LocalLauncher):
    def placed(self, bundle: Bundle) -> Bundle:
        return msgspec.structs.replace(super().placed(bundle), threads=1, local_rank=0)


class Wordless(LocalLauncher):
    def too_many(self, count: int) -> str:
        return ""


class Sharing(LocalLauncher):
    def key_pairs(self, count: int) -> list[tuple[str, str]]:
        return super().key_pairs(1) * count


MISTAKES = [
    (Tailless, "tails", "tail should have the last 20 lines"),
    (Praising, "exits", r"a worker ended by 'exit code 3' \(3\), told is 'exit code 3' \(0\)"),
    (Repeating, "started", "three Started should come"),
    (Reckless, "end", "the worker of node 0 has ended; it should go on"),
    (Impatient, "stop", "did not wait for workers that end by themselves"),
    (Obliging, "stop", "StartError was not raised"),
    (Tireless, "stop_by_force", r"nodes \[0, 1, 2\] should have ended: stop\(\) has returned"),
    (Leaking, "nothing_held", "1 more descriptors are open"),
    (Littering, "nothing_held", "1 more descriptors are open"),
    (Telling, "secrets", r"a secret key can be read in /proc/\d+/cmdline"),
    (Forgetful, "master_killed", r"these processes should have ended.* \(sleep 600\)"),
    (Mute, "output", "0 of 4001 lines were shown"),
    (Mute, "flush", r"before the last of 1 lines of nodes \[0, 1\] was shown"),
    (Unwilling, "logs", "the log files should be"),
    (Changing, "bundles", "threads arrived changed"),
    (Changing, "places", r"\(local_rank, local_size\) on host ''"),
    (Wordless, "words", r"too_many\(\) should say why"),
    (Sharing, "bundles", "two different keys"),
]


@pytest.mark.parametrize(("mistaken", "check", "says"), MISTAKES, ids=[f"{m[0].__name__}-{m[1]}" for m in MISTAKES])
def test_a_mistake_is_found(
    mistaken: type[LocalLauncher], check: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConformanceError, match=f"^{check}: .*{says}") as caught:
        run_check(check, lambda entry: mistaken(entry, PRELOAD))
    for launcher in Tireless.left:
        LocalLauncher.stop(launcher, 0)
    for fd in Leaking.left:
        os.close(fd)
    Tireless.left.clear()
    Leaking.left.clear()
    for pid in map(int, re.findall(r"(\d+) \(sleep 600", str(caught.value))):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_launcher_that_cannot_be_made() -> None:
    def make(entry: str) -> LocalLauncher:
        raise OSError("no power")

    with pytest.raises(ConformanceError, match=r"^started: unexpected OSError: no power"):
        check_launcher(make)


def test_what_is_left_out() -> None:
    made = []

    def make(entry: str) -> LocalLauncher:
        made.append(entry)
        return local(entry)

    check_launcher(make, without=[name for name in CHECKS if name not in ("words", "bad_entry")])
    assert len(made) == 3
    with pytest.raises(ValueError, match="there is no check 'moon'"):
        check_launcher(make, without=["moon"])
