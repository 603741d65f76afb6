"""Kills the script, or a node, of a save at a system call that chance picks, by strace; after each the last complete
checkpoint has to load, whole, by torch itself, and the next save has to work and to leave nothing else.

    python tools/ci/checkpoint_kills.py --kills 60 [--seed 7]

`make kills` installs strace where it can be. Exit code 1 where something was lost; the seed and the call are printed.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp

import disttensor as dt

#: What a save asks the kernel for. Of each some calls, of a process's thread, from the first save on.
CALLS = {
    "openat": 12, "write": 12, "fsync": 4, "rename": 3, "unlink": 6, "unlinkat": 3, "mkdir": 2, "rmdir": 2, "flock": 2,
    "close": 20, "newfstatat": 20, "fstat": 12, "lseek": 8, "pread64": 3, "read": 20, "mmap": 8, "getdents64": 8,
    "fchmod": 2, "ftruncate": 2,
}  # fmt: skip

#: Seconds after which something hangs.
HANG = 120.0
SAVES = 3


def job(folder: str, value: float, launcher: str) -> None:
    """A script that saves whenever it is told to."""
    with dt.init_master_worker(nodes=2, threads=None if launcher == "inproc" else 1, launcher=launcher):
        state: dict[str, Any] = {
            "x": torch.full((5000,), value, device="node:0"),
            "y": torch.full((3000,), value, device="node:1"),
            "z": torch.full((2,), value),
            "step": value,
        }
        dt.checkpoint.save(state, folder)
        print("nodes", *{node["pid"] for node in dt.nodes()}, flush=True)
        for line in sys.stdin:
            if line == "check\n":
                check(Path(folder), state)
                return
            value += 1
            for name in "xyz":
                state[name].fill_(value)
            state["step"] = value
            if value % 2:
                dt.checkpoint.save(state, folder)
            else:
                dt.checkpoint.async_save(state, folder).wait()
            print(value, flush=True)


def check(folder: Path, state: dict[str, Any]) -> None:
    """What was saved is loaded again, and nothing else is there."""
    found: dict[str, Any] = {"x": torch.zeros(5000, device="node:0"), "step": 0.0}
    dt.checkpoint.load(found, folder)
    assert found["x"].unique().tolist() == [state["step"]], "the next save is not there"
    assert found["step"] == state["step"]
    names = os.listdir(folder)
    number = next(name for name in names if name.startswith("hashes_"))[7:15]
    left = [name for name in names if number not in name and name != ".metadata"]
    assert not left, f"it is left after the next save: {left}"


class Job:
    """A process that runs ``job``: a program, or a fork of this one, which has imported all."""

    def __init__(self, folder: Path, value: float, launcher: str) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(ours[1], "w"), os.fdopen(theirs[0], "rb", 0)
        arguments = [str(folder), str(value), launcher]
        if launcher != "inproc":
            command = [sys.executable, __file__, "--job", *arguments]
            self.pid = subprocess.Popen(command, stdin=ours[0], stdout=theirs[1]).pid
        else:
            self.pid = os.fork()
            if self.pid == 0:
                os.dup2(ours[0], 0)
                os.dup2(theirs[1], 1)
                for end in (*ours, *theirs):
                    os.close(end)
                code = 1
                try:
                    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
                    job(str(folder), value, launcher)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
        os.close(ours[0])
        os.close(theirs[1])
        self.end = os.pidfd_open(self.pid)

    def tell(self, text: str) -> bool:
        try:
            self.stdin.write(text)
            self.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def wait(self) -> int:
        """Returns its exit code."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        assert select.select([self.end], [], [], HANG)[0], "a script does not end"
        self.stdout.close()
        os.close(self.end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--threads", action="store_true", help="nodes are threads of the script, which is quick")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.job[0], float(options.job[1]), options.job[2])
        return 0
    launcher = "inproc" if options.threads else "local"
    seed = random.randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    chance, found = random.Random(seed), collections.Counter[str]()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_kills_"))
    with warnings.catch_warnings(action="ignore"):  # what it imports when it is used first, before forks
        dcp.save({"x": torch.zeros(1)}, checkpoint_id=folder / "first", no_dist=True)  # type: ignore[attr-defined]
    value, kills, tries, call, which = 0.0, 0, 0, "", 0
    try:
        while kills < options.kills:
            assert tries < 5 * options.kills + 10, f"only {kills} kills of {tries} tries: does strace trace here?"
            tries += 1
            call = chance.choice(list(CALLS))
            which = chance.randint(1, CALLS[call])
            value, who = killed(folder, value + 10, call, which, launcher)
            if who:
                kills += 1
                found[f"{who} at {call}"] += 1
                print(f"{kills:3} {who} at {call} {which}: the checkpoint of {value:g} loads", flush=True)
            after = Job(folder / "c", value + 5, launcher)
            after.tell("check\n")
            assert after.wait() == 0, "the next save does not work"
    except AssertionError as error:
        print(f"FAILED (seed {seed}, try {tries}, {call} {which}): {error}", flush=True)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{kills} kills of {tries} tries: " + ", ".join(f"{who} {count}" for who, count in found.most_common()))
    return 0


def killed(folder: Path, value: float, call: str, which: int, launcher: str) -> tuple[float, str]:
    """Saves again and again until a process is killed; returns what the checkpoint has, and who was killed: "" for
    nobody."""
    script = Job(folder / "c", value, launcher)
    nodes = {int(pid) for pid in line_of(script.stdout).split()[1:]} - {script.pid}
    ends = {pid: os.pidfd_open(pid) for pid in (script.pid, *nodes)}
    tracing = ["strace", "-f", "-o", str(folder / "trace"), "-e", f"trace={call}"]
    tracing += ["-e", f"inject={call}:signal=KILL:when={which}", *(f"-p{pid}" for pid in ends)]
    with subprocess.Popen(tracing, stderr=subprocess.PIPE, bufsize=0) as tracer:
        for _ in ends:
            while "attached" not in (said := line_of(tracer.stderr)):
                assert said, "strace can't attach"
        for _ in range(SAVES):
            if not script.tell("save\n"):
                break
            said = line_of(script.stdout)
            if not said:
                break
            value = float(said)
        code = script.wait()
        for end in ends.values():
            assert select.select([end], [], [], HANG)[0], "a node is left"
            os.close(end)
        tracer.terminate()
        tracer.communicate(timeout=HANG)
    has = read(folder / "c")
    assert has in (value, value + 1), f"{value:g} was saved, the checkpoint has {has:g}"
    dead = re.search(r"\+\+\+ killed by SIGKILL", (folder / "trace").read_text())
    return has, "" if dead is None else "the script" if code == -9 else "a node" if nodes else "nobody"


def line_of(stream: IO[bytes] | None) -> str:
    """The next line, without a wait for ever; "" at the end. ``stream`` has no buffer, whose lines nobody sees come."""
    assert stream is not None
    assert select.select([stream], [], [], HANG)[0], "it hangs"
    return stream.readline().decode()


def read(folder: Path) -> float:
    """What torch finds in the checkpoint: one value."""
    state: dict[str, Any] = {"x": torch.zeros(5000), "y": torch.zeros(3000), "z": torch.zeros(2), "step": 0.0}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
    values = {value for name in "xyz" for value in state[name].unique().tolist()} | {state["step"]}
    assert len(values) == 1, f"the checkpoint is of several saves: {values}"
    return float(values.pop())


if __name__ == "__main__":
    sys.exit(main())
