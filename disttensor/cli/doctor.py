"""``python -m disttensor.doctor``: what a machine has for disttensor, whether it works, and what to do if it does not.

Each check is a row. What needs torch, nodes or data channels is tried by another process (self_test.py), which may
crash or hang without an end of this one. Nothing is secret in what is printed: of the environment names only, no
address, no user, no path at home.
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
#: How each of its rows begins.
MARK = "disttensor-row "

MIB, GIB = 1 << 20, 1 << 30
#: Below these a machine is short of something: nodes on a host, bytes of memory and of /dev/shm, processes, ports.
_NODES, _MEMORY, _SHM, _PROCESSES, _PORTS = 8, GIB, 128 * MIB, 256, 1_000

#: Variables that change what disttensor, or a library below it, does.
_HEEDED = re.compile(
    r"(DISTTENSOR|CUDA|NCCL|GLOO|OMP|MKL|KMP|TORCH|TORCHINDUCTOR|PYTORCH|SLURM_JOB|SLURM_NTASKS|OMPI_COMM|PMI|RAY)_?\w*"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|PYTHON(PATH|WARNINGS|HASHSEED|OPTIMIZE)|LD_(PRELOAD|LIBRARY_PATH)"
    r"|MALLOC_\w+|https?_proxy|HTTPS?_PROXY"
)


class Row(NamedTuple):
    """The outcome of one check, and what to do where it is not well."""

    name: str
    state: str
    found: str
    do: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each check, and returns 0 if all is well, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m disttensor.doctor",
        description="Look at this machine, start two nodes on it, and say what to do about what is not well.",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, for a bug report or a script")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for row in checks():
        rows.append(Row(*map(without_names, row)))
        if not options.json:
            put_out(shown(rows[-1]))
    wrong = [row.name for row in rows if row.state == WRONG]
    if options.json:
        put_out(json.dumps({"well": not wrong, "rows": [row._asdict() for row in rows]}, indent=2))
    else:
        put_out(f"\nNot well: {', '.join(wrong)}." if wrong else "\nAll is well.")
    return int(bool(wrong))


def shown(row: Row) -> str:
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


def checks() -> Iterator[Row]:
    """Yields a row for each check, as it is done."""
    yield of_versions(versions())
    yield memory()
    yield from limits()
    with contextlib.suppress(OSError):
        where = os.statvfs("/dev/shm")
        yield of_shm(where.f_blocks * where.f_frsize, where.f_bavail * where.f_frsize, os.access("/dev/shm", os.W_OK))
    yield ssh()
    yield ports()
    yield clock()
    names = sorted(name for name in os.environ if _HEEDED.fullmatch(name))
    yield Row("environment", OK, f"set: {', '.join(names)}" if names else "nothing that changes what disttensor does")
    yield from tried([sys.executable, "-m", "disttensor.cli.self_test"], PATIENCE)


def of_versions(found: dict[str, str]) -> Row:
    """Returns the row of the versions: a library that is missing is to be installed."""
    missing = [name for name, text in found.items() if text == "missing"]
    text = ", ".join(f"{name} {version}" for name, version in found.items() if name != "system")
    do = f"pip install {' '.join(missing)}" if missing else ""
    return Row("versions", WRONG if missing else OK, f"{text}; {found.get('system', '')}", do)


def size(count: int) -> str:
    """Returns a number of bytes in words."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def memory() -> Row:
    """Returns the row of the memory that this process and its nodes may take."""
    left, most = memory_limit.memory_left()
    group = memory_limit.memory_group()
    limits = group.limits() if group is not None else []
    kills = (group.kills() or 0) if group is not None else 0
    limit = min(limits, default=0)
    return of_memory(left, most, limit if limit <= most else 0, kills)  # one above is without effect


def of_memory(left: int, most: int, limit: int, kills: int) -> Row:
    """Returns the row of so many bytes that are left of so many, under a control group's limit (0: there is none)."""
    text = f"{size(left)} of {size(most)} are left; "
    text += f"the control group may have {size(limit)}" if limit else "no control group limits it"
    if kills:
        text += f"; for want of memory the kernel has killed {kills} process{'es' if kills > 1 else ''} of the group"
    if left < _MEMORY:
        return Row(
            "memory", WRONG, text, "a node takes 0.3 GiB before it has a tensor: end other programs, or ask for more"
        )
    return Row("memory", OK, text)


def limits() -> Iterator[Row]:
    """Yields the rows of the limits of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield of_descriptors(soft, hard, descriptors.shortage_below(_NODES, _NODES))
    most, taken = _processes()
    yield of_processes(most, taken)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield of_locked(locked, bool(list(Path("/sys/class/infiniband").glob("*"))))


def of_descriptors(soft: int, hard: int, shortage: str) -> Row:
    """Returns the row of the file descriptors. ``shortage``: why eight nodes would have too few."""
    text = f"{_limit(soft)} file descriptors at once, and {_limit(hard)} where a process asks for more"
    do = (
        f"raise the hard limit to 4096 (`ulimit -Hn`, limits.conf, docker --ulimit nofile=4096): {_NODES} nodes need it"
    )
    return Row("descriptors", WRONG if shortage else OK, text, do if shortage else "")


def of_processes(most: int, taken: int) -> Row:
    """Returns the row of how many processes and threads there may be (-1: any number), of which ``taken`` are there."""
    if most < 0:
        return Row("processes", OK, "any number of processes and threads")
    text = f"{most:,} processes and threads, of which {taken:,} are there"
    do = "a node has about ten threads, and as many again for each core: raise `ulimit -u`, or docker's --pids-limit"
    return Row("processes", WRONG if most - taken < _PROCESSES else OK, text, do if most - taken < _PROCESSES else "")


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


def of_locked(most: int, infiniband: bool) -> Row:
    """Returns the row of the memory that may be locked, which only devices for RDMA take."""
    do = "RDMA locks its buffers: `ulimit -l unlimited`, or docker --ulimit memlock=-1"
    low = infiniband and most != resource.RLIM_INFINITY
    text = "any amount" if most == resource.RLIM_INFINITY else size(most)
    text += " may be locked" + ("" if infiniband else "; nothing here needs more, as there is no device for RDMA")
    return Row("locked memory", WRONG if low else OK, text, do if low else "")


def _limit(count: int) -> str:
    return "any number of" if count == resource.RLIM_INFINITY else f"{count:,}"


def of_shm(most: int, left: int, writable: bool) -> Row:
    """Returns the row of /dev/shm, of so many bytes."""
    text = f"{size(left)} of {size(most)} are free"
    if not writable:
        return Row("/dev/shm", WRONG, f"{text}; this process may not write there", "mount it with mode 1777")
    if left < _SHM:
        do = "a DataLoader's workers, NCCL and Gloo pass tensors there: docker run --shm-size=2g, or remove files"
        return Row("/dev/shm", WRONG, text, do)
    return Row("/dev/shm", OK, text)


def ssh() -> Row:
    """Returns the row of the ssh client."""
    path = shutil.which("ssh")
    if path is None:
        return Row("ssh", NONE, "there is no ssh", "only --hosts needs it: install openssh-client for that")
    try:
        done = subprocess.run([path, "-V"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as e:
        return Row("ssh", WRONG, f"`ssh -V` does not run: {e}", "install openssh-client anew")
    said = (done.stderr + done.stdout).strip().splitlines() or ["it has not said its version"]
    do = "" if done.returncode == 0 else "install openssh-client anew"
    text = f"{said[0]}; `dtrun --check --hosts a,b` tries hosts"
    return Row("ssh", WRONG if done.returncode else OK, text, do)


def ports() -> Row:
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


def of_ports(first: int, last: int, failed: dict[str, str], others: Sequence[str]) -> Row:
    """Returns the row of a range of ports, of what has ``failed`` on loopback by kind of address, and of the other
    interfaces."""
    count = last - first + 1
    reached = [kind for kind in ("IPv4", "IPv6") if kind not in failed]
    text = f"{first} to {last}; loopback by {' and '.join(reached) or 'nothing'}"
    text += "".join(f", not by {kind} ({why})" for kind, why in failed.items())
    text += f"; other interfaces: {', '.join(others)}" if others else "; there is no other interface"
    if "IPv4" in failed:
        return Row(
            "ports", WRONG, text, "nodes reach the script by 127.0.0.1: bring lo up, or let the firewall pass it"
        )
    if count < _PORTS:
        return Row("ports", WRONG, text, 'sysctl net.ipv4.ip_local_port_range="32768 60999"')
    return Row("ports", OK, text)


def clock() -> Row:
    """Returns the row of the clock, as the kernel's clock discipline has it."""
    source = "unknown"
    with contextlib.suppress(OSError):
        folder = Path("/sys/devices/system/clocksource/clocksource0")
        source = (folder / "current_clocksource").read_text().strip()
    buffer = ctypes.create_string_buffer(512)  # a struct timex, whose first field says: change nothing
    state = ctypes.CDLL(None).adjtimex(buffer)
    return of_clock(None if state < 0 else state != 5, source, time.time())


def of_clock(kept: bool | None, source: str, now: float) -> Row:
    """Returns the row of a clock that NTP keeps, or does not, or of which that cannot be told."""
    text = {True: "kept by NTP", False: "not kept by NTP", None: "whether NTP keeps it cannot be told"}[kept]
    text += f"; source {source}"
    if now < 1.7e9:  # before 2024
        return Row(
            "clock", WRONG, f"{time.strftime('%Y-%m-%d', time.gmtime(now))}; {text}", "set it: tickets and logs need it"
        )
    do = "" if kept else "one host does not need it; for several let NTP keep it (chrony, systemd-timesyncd)"
    return Row("clock", OK if kept else NONE, text, do)


def tried(command: Sequence[str], patience: float) -> Iterator[Row]:
    """Yields the rows of a program that prints them, and one more where it does not come to its end."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + patience
    said, errors = b"", b""
    with process, selectors.DefaultSelector() as selector:
        try:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        errors = (errors + data)[-(1 << 16) :]
                    else:
                        *lines, said = (said + data).split(b"\n")
                        for line in lines:
                            if line.startswith(MARK.encode()):
                                yield Row(**json.loads(line[len(MARK) :]))
            ended = not selector.get_map()
        finally:
            if process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5.0 if time.monotonic() < deadline else 0.1)
            process.kill()
    if not ended or process.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or ["it has said nothing"])[-1]
        what = f"it has ended with exit code {process.returncode}" if ended else f"it has not ended in {patience:.0f} s"
        yield Row(
            "self-test", WRONG, f"{what}: {last}", f"run `python -m {command[-1]}` by itself, and send what it prints"
        )
