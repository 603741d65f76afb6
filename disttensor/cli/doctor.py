"""``python -m disttensor.doctor``: what a machine has for disttensor, whether it works, and what to do if it does not.

Each check is a row. What needs torch, nodes or data channels is tried by another process (self_test.py, gpu_trial.py),
which may crash or hang without an end of this one. Nothing is secret in what is printed: of the environment names only,
no address, no user, no path at home.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import selectors
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..runtime.host import descriptors, memory_limit
from ..runtime.host.interfaces import interfaces
from .versions import put_out, versions

#: The states of a row: all is well; nothing of the kind is here, and that is not a fault; the user has to do something.
OK, NONE, WRONG = "ok", "-", "WRONG"

#: Seconds for the process that tries nodes and channels. It takes two; the first import of torch may take a minute.
PATIENCE = 120.0
#: Seconds for the end of a process that was killed: one that waits in a driver does not end.
_KILLED = 30.0
#: How each of its rows begins, and the line by which it says what it does next.
MARK, BEGINS = "disttensor-row ", "disttensor-begins "
#: The exit code of one that wants to be started again, for what comes after its last row.
AGAIN = 75

MIB, GIB = 1 << 20, 1 << 30
#: Below these a machine is short of something: nodes on a host, bytes of memory and of /dev/shm, processes, ports.
_NODES, _MEMORY, _SHM, _PROCESSES, _PORTS = 8, GIB, 128 * MIB, 256, 1_000

#: Variables that change what disttensor, or a library below it, does.
_HEEDED = re.compile(
    r"(DISTTENSOR|CUDA|NCCL|GLOO|OMP|MKL|KMP|TORCH|TORCHINDUCTOR|PYTORCH|SLURM_JOB|SLURM_NTASKS|OMPI_COMM|PMI|RAY)_?\w*"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|PYTHON(PATH|WARNINGS|HASHSEED|OPTIMIZE)|LD_(PRELOAD|LIBRARY_PATH)"
    r"|MALLOC_\w+|https?_proxy|HTTPS?_PROXY"
)


class CheckRow(NamedTuple):
    """The outcome of one check, and what to do where it is not well."""

    name: str
    state: str
    found: str
    do: str = ""


class Step(NamedTuple):
    """The check that another process has begun: the row's name, its limit in seconds, and what to do where it crashes
    or hangs."""

    name: str
    limit: float
    do: str


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each check, and returns 0 if all is well, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m disttensor.doctor",
        description="Look at this machine, start two nodes on it, and say what to do about what is not well.",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, for a bug report or a script")
    parser.add_argument("--gpu", action="store_true", help="try this machine's GPUs instead, which takes minutes")
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="N", help="wait N times as long before something is said to hang"
    )
    options = parser.parse_args(argv)
    rows: list[CheckRow] = []
    for row in (checks_of_gpus if options.gpu else checks)(options.patience):
        rows.append(CheckRow(*map(without_names, row)))
        if not options.json:
            put_out(shown(rows[-1]))
    wrong = [row.name for row in rows if row.state == WRONG]
    if options.json:
        put_out(json.dumps({"well": not wrong, "rows": [row._asdict() for row in rows]}, indent=2))
    else:
        put_out(f"\nNot well: {', '.join(wrong)}." if wrong else "\nAll is well.")
    return int(bool(wrong))


def shown(row: CheckRow) -> str:
    """Returns the lines of a row: what was found, and below it what to do."""
    head, space = f"{row.state:<6}{row.name:<18}", " " * 24
    lines = textwrap.wrap(row.found, 96, break_long_words=False, break_on_hyphens=False) or [""]
    if row.do:
        lines += textwrap.wrap(row.do, 94, initial_indent="> ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([head + lines[0], *(space + line for line in lines[1:])]).rstrip()


def without_names(text: str) -> str:
    """Returns a text without the user's name and home, this host's name and addresses, which errors may have."""
    home = os.path.expanduser("~")
    if home not in ("~", "/"):
        text = re.sub(rf"{re.escape(home)}(?=/|\W|$)", "~", text)
    host = re.escape(socket.gethostname().partition(".")[0])
    text = re.sub(rf"(\bhost |\bon |\[){host}(\.[\w-]+)*(?![\w-])", r"\1HOST", text)
    text = re.sub(r"(?<![\w.])(?!127\.|\[::1\])(\d+(\.\d+){3}|\[[0-9a-fA-F:]+\])(?=:\d)", "ADDRESS", text)
    return re.sub(r"/(home|Users)/[^/\s'\":]+", r"/\1/USER", text)


def checks(patience: float = 1.0) -> Iterator[CheckRow]:
    """Yields a row for each check, as it is done. ``patience``: how many times as long as usual something may take."""
    yield of_versions(versions())
    yield memory()
    yield from limits()
    with contextlib.suppress(OSError):
        where = os.statvfs("/dev/shm")
        yield of_shm(where.f_blocks * where.f_frsize, where.f_bavail * where.f_frsize, os.access("/dev/shm", os.W_OK))
    yield ssh()
    yield ports()
    yield clock()
    yield environment()
    yield from tried([sys.executable, "-m", "disttensor.cli.self_test"], PATIENCE, patience)


def checks_of_gpus(patience: float = 1.0) -> Iterator[CheckRow]:
    """Yields a row for each check of the GPUs, as it is done."""
    yield of_versions(versions())
    yield environment()
    yield from tried([sys.executable, "-m", "disttensor.cli.gpu_trial"], PATIENCE, patience)


def of_versions(found: dict[str, str]) -> CheckRow:
    """Returns the row of the versions: a library that is missing is to be installed."""
    missing = [name for name, text in found.items() if text == "missing"]
    text = ", ".join(f"{name} {version}" for name, version in found.items() if name != "system")
    do = f"pip install {' '.join(missing)}" if missing else ""
    return CheckRow("versions", WRONG if missing else OK, f"{text}; {found.get('system', '')}", do)


def environment() -> CheckRow:
    """Returns the row of the variables that are set."""
    names = sorted(name for name in os.environ if _HEEDED.fullmatch(name))
    return CheckRow(
        "environment", OK, f"set: {', '.join(names)}" if names else "nothing that changes what disttensor does"
    )


def size(count: int) -> str:
    """Returns a number of bytes in words."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def memory() -> CheckRow:
    """Returns the row of the memory that this process and its nodes may take."""
    left, most = memory_limit.memory_left()
    group = memory_limit.memory_group()
    limits = group.limits() if group is not None else []
    kills = (group.kills() or 0) if group is not None else 0
    limit = min(limits, default=0)
    return of_memory(left, most, limit if limit <= most else 0, kills)  # one above is without effect


def of_memory(left: int, most: int, limit: int, kills: int) -> CheckRow:
    """Returns the row of so many bytes that are left of so many, under a control group's limit (0: there is none)."""
    text = f"{size(left)} of {size(most)} are left; "
    text += f"the control group may have {size(limit)}" if limit else "no control group limits it"
    if kills:
        text += f"; for want of memory the kernel has killed {kills} process{'es' if kills > 1 else ''} of the group"
    if left < _MEMORY:
        return CheckRow(
            "memory", WRONG, text, "a node takes 0.3 GiB before it has a tensor: end other programs, or ask for more"
        )
    return CheckRow("memory", OK, text)


def limits() -> Iterator[CheckRow]:
    """Yields the rows of the limits of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield of_descriptors(soft, hard, descriptors.shortage_below(_NODES, _NODES))
    most, taken = _processes()
    yield of_processes(most, taken)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield of_locked(locked, bool(list(Path("/sys/class/infiniband").glob("*"))))


def of_descriptors(soft: int, hard: int, shortage: str) -> CheckRow:
    """Returns the row of the file descriptors. ``shortage``: why eight nodes would have too few."""
    text = f"{_limit(soft)} file descriptors at once, and {_limit(hard)} where a process asks for more"
    do = (
        f"raise the hard limit to 4096 (`ulimit -Hn`, limits.conf, docker --ulimit nofile=4096): {_NODES} nodes need it"
    )
    return CheckRow("descriptors", WRONG if shortage else OK, text, do if shortage else "")


def of_processes(most: int, taken: int) -> CheckRow:
    """Returns the row of how many processes and threads there may be (-1: any number), of which ``taken`` are there."""
    if most < 0:
        return CheckRow("processes", OK, "any number of processes and threads")
    text = f"{most:,} processes and threads, of which {taken:,} are there"
    do = "a node has about ten threads, and as many again for each core: raise `ulimit -u`, or docker's --pids-limit"
    return CheckRow(
        "processes", WRONG if most - taken < _PROCESSES else OK, text, do if most - taken < _PROCESSES else ""
    )


def _processes() -> tuple[int, int]:
    """Returns how many processes there may be, and how many there are, by whichever limit leaves the fewest."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        path = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "")
        for folder in (Path(f"/sys/fs/cgroup{path}"), Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")):
            with contextlib.suppress(OSError, ValueError):  # "max" is none
                found.append((int((folder / "pids.max").read_text()), int((folder / "pids.current").read_text())))
    own, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if own != resource.RLIM_INFINITY and os.geteuid() != 0:  # which root may exceed
        found.append((own, _threads_of(os.getuid())))
    return min(found, key=lambda each: each[0] - each[1], default=(-1, 0))


def _threads_of(user: int) -> int:
    """Returns the number of a user's threads, as far as this process sees them."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            if path.stat().st_uid == user:
                lines = (path / "status").read_text(errors="replace").splitlines()
                count += int(next(line for line in lines if line.startswith("Threads:")).split()[1])
    return count


def of_locked(most: int, infiniband: bool) -> CheckRow:
    """Returns the row of the memory that may be locked, which only devices for RDMA take."""
    do = "RDMA locks its buffers: `ulimit -l unlimited`, or docker --ulimit memlock=-1"
    low = infiniband and most != resource.RLIM_INFINITY
    text = "any amount" if most == resource.RLIM_INFINITY else size(most)
    text += " may be locked" + ("" if infiniband else "; nothing here needs more, as there is no device for RDMA")
    return CheckRow("locked memory", WRONG if low else OK, text, do if low else "")


def _limit(count: int) -> str:
    return "any number of" if count == resource.RLIM_INFINITY else f"{count:,}"


def of_shm(most: int, left: int, writable: bool) -> CheckRow:
    """Returns the row of /dev/shm, of so many bytes."""
    text = f"{size(left)} of {size(most)} are free"
    if not writable:
        return CheckRow("/dev/shm", WRONG, f"{text}; this process may not write there", "mount it with mode 1777")
    if left < _SHM:
        do = "a DataLoader's workers, NCCL and Gloo pass tensors there: docker run --shm-size=2g, or remove files"
        return CheckRow("/dev/shm", WRONG, text, do)
    return CheckRow("/dev/shm", OK, text)


def ssh() -> CheckRow:
    """Returns the row of the ssh client."""
    path = shutil.which("ssh")
    if path is None:
        return CheckRow("ssh", NONE, "there is no ssh", "only --hosts needs it: install openssh-client for that")
    try:
        done = subprocess.run([path, "-V"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as e:
        return CheckRow("ssh", WRONG, f"`ssh -V` does not run: {e}", "install openssh-client anew")
    said = (done.stderr + done.stdout).strip().splitlines() or ["it has not said its version"]
    do = "" if done.returncode == 0 else "install openssh-client anew"
    text = f"{said[0]}; `dtrun --check --hosts a,b` tries hosts"
    return CheckRow("ssh", WRONG if done.returncode else OK, text, do)


def ports() -> CheckRow:
    """Returns the row of the ports that a job takes, after a connection of this process to itself."""
    first, last = 32768, 60999
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    failed = {}
    for kind, family, address in (("IPv4", socket.AF_INET, "127.0.0.1"), ("IPv6", socket.AF_INET6, "::1")):
        try:
            with socket.socket(family) as door, socket.socket(family) as caller:
                door.bind((address, 0))
                door.listen(1)
                caller.settimeout(5.0)
                caller.connect(door.getsockname())
        except OSError as e:
            failed[kind] = e.strerror or str(e)
    return of_ports(first, last, failed, sorted(name for name in interfaces() if name != "lo"))


def of_ports(first: int, last: int, failed: dict[str, str], others: Sequence[str]) -> CheckRow:
    """Returns the row of a range of ports, of what has ``failed`` on loopback by kind of address, and of the other
    interfaces."""
    count = last - first + 1
    reached = [kind for kind in ("IPv4", "IPv6") if kind not in failed]
    text = f"{first} to {last}; loopback by {' and '.join(reached) or 'nothing'}"
    text += "".join(f", not by {kind} ({why})" for kind, why in failed.items())
    text += f"; other interfaces: {', '.join(others)}" if others else "; there is no other interface"
    if "IPv4" in failed:
        return CheckRow(
            "ports", WRONG, text, "nodes reach the script by 127.0.0.1: bring lo up, or let the firewall pass it"
        )
    if count < _PORTS:
        return CheckRow("ports", WRONG, text, 'sysctl net.ipv4.ip_local_port_range="32768 60999"')
    return CheckRow("ports", OK, text)


def clock() -> CheckRow:
    """Returns the row of the clock, as the kernel's clock discipline has it."""
    source = "unknown"
    with contextlib.suppress(OSError):
        folder = Path("/sys/devices/system/clocksource/clocksource0")
        source = (folder / "current_clocksource").read_text().strip()
    buffer = ctypes.create_string_buffer(512)  # a struct timex, whose first field says: change nothing
    state = ctypes.CDLL(None).adjtimex(buffer)
    return of_clock(None if state < 0 else state != 5, source, time.time())


def of_clock(kept: bool | None, source: str, now: float) -> CheckRow:
    """Returns the row of a clock that NTP keeps, or does not, or of which that cannot be told."""
    text = {True: "kept by NTP", False: "not kept by NTP", None: "whether NTP keeps it cannot be told"}[kept]
    text += f"; source {source}"
    if now < 1.7e9:  # before 2024
        return CheckRow(
            "clock", WRONG, f"{time.strftime('%Y-%m-%d', time.gmtime(now))}; {text}", "set it: tickets and logs need it"
        )
    do = "" if kept else "one host does not need it; for several let NTP keep it (chrony, systemd-timesyncd)"
    return CheckRow("clock", OK if kept else NONE, text, do)


def tried(command: Sequence[str], patience: float, times: float = 1.0) -> Iterator[CheckRow]:
    """Yields the rows of a program that prints them, and one more where it crashes, or does not come to its end.

    One that says what it begins has a limit for each of these steps instead of ``patience`` for all (``times`` all of
    these numbers). It is started again where a step goes wrong, with ``--after NAME``, for the steps after that.
    """
    words = list(command)
    while True:
        trial = _Trial(words, patience, times)
        yield from trial.rows()
        if not trial.again:
            return
        words = [*command, "--after", trial.last]


class _Trial:
    """One run of a program that prints rows."""

    def __init__(self, command: Sequence[str], patience: float, times: float) -> None:
        self._command, self._times = command, times
        alone = f"run `python {' '.join(command[1:])}` by itself, and send what it prints"
        self._step = self._first = Step("self-test", patience, alone)
        self._deadline = 0.0
        self._ended = False  #: whether the program has closed its output
        self._errors = b""  #: the end of what it has said on its standard error
        self.last = ""  #: the last step that it has named
        self.again = False  #: whether it has to run again, for the steps after that

    def rows(self) -> Iterator[CheckRow]:
        """Yields the program's rows, and one of its own where the program has not come to a good end."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
        try:
            self._begin_step(self._first)
            for line in self._lines(process):
                if line.startswith(BEGINS.encode()):
                    self._begin_step(Step(**json.loads(line[len(BEGINS) :])))
                    self.last = self._step.name
                elif line.startswith(MARK.encode()):
                    yield CheckRow(**json.loads(line[len(MARK) :]))
                    if self.last:
                        self._begin_step(self._first._replace(name=f"after {self.last}"))
        finally:
            stuck = not _over(process, 5.0 if self._ended else 0.1)
        if self._ended and process.returncode in (0, AGAIN):
            self.again = process.returncode == AGAIN
            return
        self.again = bool(self.last) and not stuck
        what = f"it has ended with exit code {process.returncode}"
        if not self._ended:
            what = f"it has not ended in {self._step.limit * self._times:.0f} s"
        if stuck:
            what += f", and the kernel can't end its process {process.pid}, so that nothing more is tried"
        said = (self._errors.decode(errors="replace").strip().splitlines() or ["it has said nothing"])[-1]
        yield CheckRow(self._step.name, WRONG, f"{what}: {said}", self._step.do)

    def _begin_step(self, step: Step) -> None:
        self._step, self._deadline = step, time.monotonic() + step.limit * self._times

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        """Yields what a program writes, until it has closed its output, or its time is over."""
        said = b""
        with selectors.DefaultSelector() as selector:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map() and (left := self._deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        self._errors = (self._errors + data)[-(1 << 16) :]
                    else:
                        *lines, said = (said + data).split(b"\n")
                        yield from lines
            self._ended = not selector.get_map()


def _over(process: subprocess.Popen[bytes], patience: float) -> bool:
    """Waits for the end of a process that may end by itself, then ends it. Returns whether it is gone: one that waits
    in a driver may not be."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    return process.poll() is not None
