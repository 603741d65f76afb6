"""Strangers, who reach the ports of a job and have no secret: what they try, and what the job answers to the bit.

    with Job(process, fifo) as job:        the process is of any launcher, and its script is PROBE
        besiege(job, pids, marker)         attacks every port of these processes, and looks how the job takes it
        job.end()

Ports are found from outside, in what the kernel says of the job's processes, so one that comes new is attacked as well.
As a program it attacks from where it runs, such as another network namespace: ports in JSON on its standard input.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from checkout import ROOT
from limits import HANG

MEBI = 1 << 20

#: What no stranger may hear: it is in tensors, in the name of a function, and in what nodes are asked.
MARK = b"bytes-of-this-very-job"

#: A job that waits for lines of a FIFO (its first argument), computes on all of its nodes, and compares with local
#: torch to the bit. A second argument names the data channel.
PROBE = """
import os, sys
import torch
import disttensor as dt

fifo, *backend = sys.argv[1:]
dt.init_master_worker(*backend, threads=1)
torch.set_num_threads(1)
count = dt.session.node_count()
mark = torch.frombuffer(bytearray(b"bytes-of-this-very-job" * 20000), dtype=torch.uint8)

def same(there, here):
    if not torch.equal(dt.fetch(there).result(), here):  # .cpu() would be warned of where it waits for the 1,000th time
        raise SystemExit("a wrong result")

def probe(number):
    base = torch.randn(300, 300)
    there = base.to("node:0")
    for k in range(count):  # to each node, of bytes that a carrier takes, too
        there = ((there + number).to(f"node:{(k + 1) % count}") * 2).sin()
        base = ((base + number) * 2).sin()
    same(there, base)
    same(mark.to("node:0").to(f"node:{count - 1}"), mark)
    xs = [torch.full((200_000,), float(k + number), device=f"node:{k}") for k in range(count)]
    dt.all_reduce(xs)
    for x in xs:
        same(x, torch.full((200_000,), float(sum(k + number for k in range(count)))))
    pids = dt.run(os.getpid, node=range(count))
    return [os.getpid(), *pids]

print("ready", *probe(0), flush=True)
orders = open(fifo)  # once, so that what is open is the same whenever it is looked at
for number, _ in enumerate(iter(orders.readline, "end\\n"), 1):
    probe(number)
    print("same", number, flush=True)
dt.shutdown()
print("over", flush=True)
"""

#: The same as a program of torch.distributed, for what starts such.
RANKS = """
import os, sys
import torch
import torch.distributed as dist

fifo = sys.argv[1]
dist.init_process_group("gloo")
rank, size, number = dist.get_rank(), dist.get_world_size(), 0
orders = open(fifo) if rank == 0 else None
while True:
    x = torch.full((200_000,), float(rank + number))
    dist.all_reduce(x)
    if not torch.equal(x, torch.full((200_000,), float(sum(range(size)) + size * number))):
        raise SystemExit("a wrong result")
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        print(*(["same", number] if number else ["ready", *pids]), flush=True)
        word = [orders.readline()]
    else:
        word = [None]
    dist.broadcast_object_list(word, 0)
    if word[0] == "end\\n":
        break
    number += 1
if rank == 0:
    print("over", flush=True)
sys.stdout.flush()
os._exit(0)
"""


Address: TypeAlias = tuple[str, int]


class Port(NamedTuple):
    """A listening socket of a process."""

    ip: str
    number: int
    pid: int


class Heard(NamedTuple):
    """What a stranger was told at a port, and whether they hung up on it."""

    ip: str
    number: int
    what: str  #: which stranger
    said: bytes
    hung_up: bool
    took: int  #: the number of bytes that were taken from it


# ---- ports, from outside ---------------------------------------------------------------------------------------------


def ports(pids: Iterable[int]) -> list[Port]:
    """Where any of these processes listens, in whichever namespace it is."""
    found = set()
    for pid in pids:
        sockets = set()
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        for ip, number, inode in _listening(pid):
            if f"socket:[{inode}]" in sockets:
                found.add(Port(ip, number, pid))
    return sorted(found)


def _listening(pid: int) -> list[tuple[str, int, str]]:
    """(address, port, inode) of every listening socket of a process's network namespace."""
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    raw, _, number = fields[1].partition(":")
                    words = [bytes.fromhex(raw[at : at + 8])[::-1] for at in range(0, len(raw), 8)]
                    found.append((socket.inet_ntop(family, b"".join(words)), int(number, 16), fields[9]))
    return found


def children(pid: int) -> list[int]:
    """A process and all below it."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError):
            parents[int(name)] = int(
                Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            )
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def descriptors(pids: Iterable[int]) -> dict[tuple[int, str], str]:
    """What each descriptor of these processes is, by the process and its number."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    found[pid, number] = os.readlink(f"/proc/{pid}/fd/{number}")
    return found


def _more(now: dict[tuple[int, str], str], before: dict[tuple[int, str], str]) -> str:
    """The descriptors that are new, each with its process's name."""
    new = []
    for (pid, number), target in now.items():
        if before.get((pid, number)) != target:
            with suppress(OSError):
                new.append(
                    f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()} {pid}: {number} -> {target}"
                )
    return ", ".join(new)


def resident(pids: Iterable[int]) -> int:
    """The bytes of memory that these processes have beside what they share by files."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/statm").read_text().split()
            total += (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return total


# ---- what strangers try ----------------------------------------------------------------------------------------------

_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03%c%b\0" + bytes(31)
_CURVE, _NULL = (_GREETING % (0, name.ljust(20, b"\0")) for name in (b"CURVE", b"NULL"))
#: What a listener of ours says before a stranger has proved anything, and no more: ZeroMQ's greeting, the same wherever
#: it is used, ...
_OURS = _GREETING % (1, b"CURVE".ljust(20, b"\0"))
#: ... or a nonce of so many bytes, another one each time.
_NONCE = 32
#: How many silent strangers come to each port at once.
SILENT = 200
#: Seconds: for ours to speak first, and to hang up on whoever proves nothing; for others, who may do neither.
_SPEAKS, _HANGS_UP, _THEIRS = 5.0, 60.0, 0.5


def nonsense(marker: str) -> dict[str, bytes]:
    """What strangers say, by name. Who were to unpickle any of it would make the file ``marker``."""
    bomb = b"cposix\nsystem\n(S'touch " + marker.encode() + b"'\ntR."
    return {
        "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(80),
        "random bytes": os.urandom(3000),
        "NULL ZMTP": _NULL + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER" + b"\0\x05hello",
        "half a CURVE hello": _CURVE + b"\x04\xc8\x05HELLO" + bytes(100),
        "a CURVE hello without keys": _CURVE + b"\x04\xc8\x05HELLO" + bytes(194),
        "a hello of 1 GiB": _CURVE + b"\x06" + (1 << 30).to_bytes(8, "big") + bytes(64 * MEBI),
        "a frame of 1 GiB": (1 << 30).to_bytes(8, "little") * 100,
        "a pickle": b"\x80\x04" + bomb,
        "a pickle behind its length": len(bomb).to_bytes(4, "little") + bomb,
        "a pickle in ZMTP": _NULL + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER\0" + bytes([len(bomb)]) + bomb,
    }


def attack(where: Sequence[Address], marker: str, patience: float) -> list[Heard]:
    """All strangers at all ports; then the silent ones, all at once."""
    noise = nonsense(marker)
    heard = visit([(ip, number, name) for ip, number in where for name in noise], patience, noise)
    return heard + visit([(ip, number, "silence") for ip, number in where for _ in range(SILENT)], patience)


class _Visit:
    """One connection of a stranger's."""

    def __init__(self, where: tuple[str, int, str], words: bytes) -> None:
        self.where, self.left = where, memoryview(words)
        self.said, self.took, self.over = b"", 0, False
        self.sock = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET)
        self.sock.setblocking(False)
        with suppress(BlockingIOError):
            self.sock.connect(where[:2])

    def go_on(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                piece = self.sock.recv(65536)
                self.over = not piece
                self.said += piece
            if events & selectors.EVENT_WRITE and self.left:
                sent = self.sock.send(self.left[:MEBI])
                self.left, self.took = self.left[sent:], self.took + sent
        except BlockingIOError:
            pass
        except OSError:
            self.over = True

    @property
    def wants(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.left else 0)


def visit(
    where: Sequence[tuple[str, int, str]], patience: float, words: Mapping[str, bytes] = {}, until: int = MEBI
) -> list[Heard]:
    """Goes to all of these ports at once, each time as somebody, says what that one says, listens until they hang up.

    Or until each has said ``until`` bytes, or so many seconds are over.
    """
    deadline = time.monotonic() + patience
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        visits = []
        for one in where:
            guest = _Visit(one, words.get(one[2], b""))
            stack.callback(guest.sock.close)
            selector.register(guest.sock, guest.wants, guest)
            visits.append(guest)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, events in selector.select(left):
                guest = key.data
                guest.go_on(events)
                if guest.over or len(guest.said) >= until:
                    selector.unregister(guest.sock)
                elif guest.wants != key.events:
                    selector.modify(guest.sock, guest.wants, guest)
        return [Heard(*guest.where, guest.said, guest.over, guest.took) for guest in visits]


def check(heard: Iterable[Heard]) -> None:
    """Raises AssertionError unless these strangers were told nothing of the job, held little, and were sent away."""
    for one in heard:
        where = f"{one.what} at {one.ip}:{one.number}"
        assert _is_ours(one.said), f"{where} was told {one.said[:200]!r}"
        assert MARK not in one.said, where
        assert one.hung_up, f"{where} still holds its connection"
        assert one.took < 32 * MEBI, f"{where}: {one.took} bytes were taken from it"


def _is_ours(said: bytes) -> bool:
    return _OURS.startswith(said) or len(said) == _NONCE


# ---- the job ---------------------------------------------------------------------------------------------------------


class Job:
    """A job that runs PROBE or RANKS, as what has started it, and the FIFO that it listens to."""

    def __init__(self, process: subprocess.Popen[str], fifo: Path) -> None:
        self.process, self._number = process, 0
        self.besieged = 0  #: the number of its ports where strangers have been
        #: open at both ends, so that nobody waits for the other one to open it
        self._fifo = os.open(fifo, os.O_RDWR)
        #: the script's pid and the nodes', as they see them
        self.pids = [int(word) for word in self._line("ready").split()[1:]]

    def probe(self) -> None:
        """Has it compute on all nodes; it compares to the bit."""
        self._number += 1
        os.write(self._fifo, b"on\n")
        assert self._line("same").split() == ["same", str(self._number)]

    def end(self) -> None:
        os.write(self._fifo, b"end\n")
        self._line("over")

    def _line(self, begin: str) -> str:
        """The next line that begins so; raises AssertionError when the job ends before it."""
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            line = line.removeprefix("[node 0] ")
            if line.startswith(begin):
                return line
            seen += line
        errors = self.process.stderr.read() if self.process.stderr is not None else ""
        raise AssertionError(f"the job has ended: {seen}{errors}")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            os.write(self._fifo, b"end\n")  # else who has started it would wait for its end, and nobody hear why
        os.close(self._fifo)


def started(*command: str, folder: Path, home: Path, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """dtrun with these arguments, as a program of this checkout. ``before``: what starts it as another user."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", "dtrun", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def written(folder: Path, text: str = PROBE) -> tuple[Path, Path]:
    """The paths of a script with this text, and of a FIFO, in a folder."""
    script, fifo = folder / "probe.py", folder / "fifo"
    script.write_text(text)
    os.mkfifo(fifo)
    return script, fifo


def besiege(job: Job, pids: Collection[int], marker: Path, spared: bool = False) -> list[Port]:
    """Sends strangers to all ports of a job, of which these are the processes, while it goes on computing.

    Returns the ports that are another library's: theirs do not speak first, or not as ours do. Of these no more is
    asked than that no code runs; whose they are, and whether there may be any, is for the caller to say. ``spared``: no
    stranger goes there, where it is known that the other program does not stand it.

    Raises AssertionError when a promise of docs/SECURITY.md is not kept.
    """
    found = ports(pids)
    assert found, "the job listens nowhere: there is nothing for strangers"
    ours, others = [], []
    for there in _networks(found):
        spoken = {(one.ip, one.number): one.said for one in _sent(there, "", _SPEAKS)}
        for port in there:
            said = spoken[port.ip, port.number]
            (ours if said and _is_ours(said) else others).append(port)
    job.probe()
    job.besieged += len(ours)
    memory, opened = resident(pids), descriptors(pids)
    heard: list[Heard] = []
    thread = threading.Thread(target=lambda: heard.extend(_everywhere(ours, marker, _HANGS_UP)))
    thread.start()
    while thread.is_alive():
        job.probe()
    thread.join()
    assert len(heard) >= (len(nonsense("")) + SILENT) * len(ours), "not every stranger went"
    check(heard)
    job.probe()
    grown = resident(pids) - memory
    # the job's own work grows, too, while it is young: by 22 MiB for four nodes in 130 rounds, which are as many as the
    # strangers take time
    assert grown < 100 * MEBI, f"strangers were given {grown} bytes of memory"
    deadline = time.monotonic() + HANG
    while len(now := descriptors(pids)) > len(opened):
        more = f"{len(now)} descriptors are open, and {len(opened)} were; new are {_more(now, opened)}"
        assert time.monotonic() < deadline, more
        job.probe()  # a segment of shared memory that is new has its descriptor until the next transfer
    if not spared:
        _everywhere(others, marker, _THEIRS)
    assert not marker.exists(), "code of a stranger has run"
    return others


#: The line of the log about strangers at a port of ours; a node's comes with its name before it.
_REFUSED = re.compile(r"(\[[^]]+\] )?refused a connection from .+: .+; \d+ refused so far")
#: The most of these lines of one port. The pause before the next one doubles, so this is more than an hour's.
_LINES = 10


def check_told(job: Job, errors: str) -> None:
    """Raises AssertionError unless a job's standard error tells of strangers at its ports, in few lines, and of nothing
    else."""
    lines = errors.splitlines()
    assert all(_REFUSED.fullmatch(line) for line in lines), errors
    assert bool(lines) == bool(job.besieged), errors
    assert len(lines) <= job.besieged * _LINES, errors


def _everywhere(found: Sequence[Port], marker: Path, patience: float) -> list[Heard]:
    """Attacks ports from the network that each is in."""
    return [one for there in _networks(found) for one in _sent(there, str(marker), patience)]


def _networks(found: Sequence[Port]) -> list[list[Port]]:
    """Ports by the network namespace that they are in."""
    networks: dict[int, list[Port]] = {}
    for port in found:
        networks.setdefault(os.stat(f"/proc/{port.pid}/ns/net").st_ino, []).append(port)
    return list(networks.values())


def _sent(there: Sequence[Port], marker: str, patience: float) -> list[Heard]:
    """What strangers have heard at the ports of one network; without a marker one at each, who only listens."""
    asked = sorted({(port.ip, port.number) for port in there}), marker, patience
    network = f"/proc/{there[0].pid}/ns/net"
    if os.path.samefile(network, "/proc/self/ns/net"):
        return go(*asked)
    command = ["nsenter", f"--net={network}", sys.executable, __file__]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=280, check=True)
    return [
        Heard(ip, number, what, bytes.fromhex(said), *rest) for ip, number, what, said, *rest in json.loads(done.stdout)
    ]


def go(where: Sequence[Address], marker: str, patience: float) -> list[Heard]:
    """Attacks ports; without a marker it only listens for the first words of each."""
    if marker:
        return attack(where, marker, patience)
    return visit([(ip, number, "silence") for ip, number in where], patience, until=1)


def main() -> None:
    where, marker, patience = json.loads(sys.stdin.read())
    heard = go([(ip, number) for ip, number in where], marker, patience)
    print(json.dumps([[one.ip, one.number, one.what, one.said.hex(), one.hung_up, one.took] for one in heard]))


if __name__ == "__main__":
    main()
