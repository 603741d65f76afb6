"""Two hosts on this machine, to run commands on: namespaces with a name, a network, processes and shared memory each.

    left:  10.78.0.1, where users type commands        right:  10.78.0.2

They share the file system, as the hosts of a cluster do, and know each other by name. Everything ends with the first
processes of the namespaces, so nothing is left however a test ends. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from checkout import KIT, ROOT
from leaks import unmarked
from limits import HANG

ADDRESSES = {"left": "10.78.0.1", "right": "10.78.0.2"}
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"

#: Variables of whatever runs these tests, which are nothing to what they run.
_FOREIGN = ("DISTTENSOR_", "SLURM_", "PMI_", "OMPI_", "MPI")

_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]

#: The first process of a host: it reaps what others leave to it. Slurm wants something that looks like cgroups.
_FIRST = """\
set -e
echo {name} >/proc/sys/kernel/hostname
mount -t tmpfs none /dev/shm
mount -t sysfs none /sys
mount -t tmpfs none /sys/fs/cgroup
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs -o mode=755 none /run
mkdir /run/sshd
ip link set lo up
echo ready
sleep infinity &
wait
"""


def why_not(*tools: str) -> str:
    """What is missing for it on this machine, of these tools as well; empty if nothing is."""
    if os.getuid():
        return "this user is not root"
    for tool in ("unshare", "nsenter", "ip", *tools):
        if shutil.which(tool, path=PATH) is None:
            return f"there is no {tool}"
    probe = [*_UNSHARE, "ip", "link", "add", "name", "a", "type", "veth"]
    tried = subprocess.run(probe, capture_output=True, text=True)
    return tried.stderr.strip() or f"exit code {tried.returncode}" if tried.returncode else ""


class Hosts:
    """``folder`` is where commands run, and seen by both. ``daemons`` are what ``processes`` leaves out."""

    daemons: tuple[str, ...] = (
        "bash -c set -e",
        "sleep infinity",
        "ps -eo",
        "sshd: ",
        shutil.which("sshd", path=PATH) or "sshd",
    )

    def __init__(self, folder: Path, pids: dict[str, int]) -> None:
        self.folder = folder
        self._pids = pids
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)},
            "PATH": f"{_programs(folder)}:{PATH}",
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(KIT))),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # or a script's own lines come when it ends, after those of its nodes
        }

    def namespaces(self, host: str) -> list[str]:
        """What nsenter is told for a host, as seen from outside of all."""
        at = f"/proc/{self._pids[host]}/ns"
        return [f"--net={at}/net", f"--uts={at}/uts", f"--mount={at}/mnt", f"--pid={at}/pid_for_children"]

    def start(
        self, *command: str, host: str = "left", stdin: int = subprocess.DEVNULL, **environment: str
    ) -> subprocess.Popen[str]:
        """Starts a command in a session of its own."""
        return subprocess.Popen(
            ["nsenter", *self.namespaces(host), f"--wd={self.folder}", *command],
            env={**self.environment, **environment},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, *command: str, timeout: float = HANG, host: str = "left", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        with self.start(*command, host=host, **environment) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                signal_to(process, signal.SIGKILL)
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def processes(self, host: str) -> list[str]:
        """The command lines of what runs on a host, other than its daemons."""
        listed = self.run("ps", "-eo", "pid=,stat=,args=", host=host).stdout.splitlines()
        lines = [line.split(maxsplit=2) for line in listed]
        return [args for _, state, args in lines if state[0] != "Z" and not args.startswith(self.daemons)]

    def pids(self, host: str) -> list[int]:
        """What runs on a host other than its daemons, by the numbers that this process knows them by."""
        network, found = f"/proc/{self._pids[host]}/ns/net", []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                args = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if os.path.samefile(f"/proc/{name}/ns/net", network) and not args.startswith(self.daemons):
                    found.append(int(name))
        return found

    def over(self) -> bool:
        """Whether nothing is left of what was started."""
        return not any(self.processes(host) for host in ADDRESSES)

    def settle(self, within: float = HANG) -> None:
        """Waits until nothing is left on either host. Raises RuntimeError saying what is, after so many seconds."""
        self.wait_until(self.over, within, "not everything has ended")

    def await_nodes_end(self, host: str, within: float = HANG) -> None:
        """Raises RuntimeError if there is a node on the host for longer than so many seconds."""
        self.wait_until(
            lambda: self.run("pgrep", "^dt-node", host=host).returncode == 1, within, f"a node on {host} goes on"
        )

    def wait_until(self, true: Callable[[], bool], within: float, what: str) -> None:
        """Raises RuntimeError with ``what`` went wrong, and what runs, when it takes longer than so many seconds."""
        deadline = time.monotonic() + within
        while not true():
            if time.monotonic() > deadline:
                left = {host: self.processes(host) for host in ADDRESSES}
                raise RuntimeError(f"{what}; there are {left}\n{self.logs()}")
            time.sleep(0.05)

    @contextlib.contextmanager
    def daemon(self, host: str, *command: str, log: str = "") -> Iterator[None]:
        """Something that runs on a host meanwhile; what it says is in a file NAME-HOST.log, or LOG.log."""
        with open(self.folder / f"{log or f'{Path(command[0]).name}-{host}'}.log", "wb") as output:
            process = subprocess.Popen(
                ["nsenter", *self.namespaces(host), *command],
                env=unmarked(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield
        finally:
            process.kill()  # nsenter; what it has started ends with the host
            process.wait()

    def logs(self) -> str:
        """The last lines of what the daemons have to say."""
        return "\n".join("\n".join(log.read_text().splitlines()[-20:]) for log in sorted(self.folder.glob("*.log")))


def _programs(folder: Path) -> Path:
    """A folder with the programs that these tests are about, as they are installed elsewhere."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    dtrun = programs / "dtrun"
    dtrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m dtrun "$@"\n')
    dtrun.chmod(0o755)
    return programs


def signal_to(process: subprocess.Popen[str], number: int) -> None:
    """To the command that ``Hosts.start`` has started: nsenter, which waits for it, would not pass it on."""
    with contextlib.suppress(OSError, ValueError):  # it has ended
        os.kill(_child(process.pid), number)


def _child(pid: int) -> int:
    """The pid of the only child of a process that has one thread. Raises OSError or ValueError without."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[dict[str, int]]:
    """The hosts, as what ``Hosts`` wants to know."""
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in ADDRESSES.items()))
    with contextlib.ExitStack() as stack:
        pids = {name: stack.enter_context(_host(name, folder)) for name in ADDRESSES}
        link = f"ip link add name eth0 type veth peer name eth0 netns {pids['right']}"
        for name, pid in pids.items():
            commands = [f"ip address add {ADDRESSES[name]}/24 dev eth0", "ip link set eth0 up"]
            script = " && ".join([link, *commands] if name == "left" else commands)
            # pids are what they are outside of the namespaces, so only the network is entered
            subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "sh", "-c", script], check=True)
        yield pids


_SSHD = """\
ListenAddress {address}
HostKey {folder}/ssh/host
AuthorizedKeysFile {folder}/ssh/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
PermitUserEnvironment no
"""

_SSH = """\
#!/bin/sh
exec ssh -F none -i {folder}/ssh/user -o UserKnownHostsFile={folder}/ssh/known_hosts -o BatchMode=yes "$@"
"""


@contextlib.contextmanager
def ssh(hosts: Hosts) -> Iterator[Path]:
    """Debian's sshd on both hosts, for root without a password; gives the program that calls ssh with what it takes."""
    keys = hosts.folder / "ssh"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    public = (keys / "host.pub").read_text()
    (keys / "known_hosts").write_text("".join(f"{name},{address} {public}" for name, address in ADDRESSES.items()))
    client = keys / "client"
    client.write_text(_SSH.format(folder=hosts.folder))
    client.chmod(0o700)
    with contextlib.ExitStack() as daemons:
        for host, address in ADDRESSES.items():
            configuration = keys / f"sshd-{host}"
            configuration.write_text(_SSHD.format(address=address, folder=hosts.folder))
            program = shutil.which("sshd", path=PATH) or "sshd"
            daemons.enter_context(hosts.daemon(host, program, "-D", "-e", "-f", str(configuration)))

            def answers(host: str = host) -> bool:
                return hosts.run(str(client), host, "hostname").stdout == f"{host}\n"

            hosts.wait_until(answers, HANG, f"sshd on {host} does not answer")
        yield client


@contextlib.contextmanager
def another_host(hosts: Hosts, name: str, number: int, setup: str = "", settings: str = "") -> Iterator[None]:
    """A host more by ssh, beside the right one in its network: with a name and a view of the file system of its own.

    ``setup``: shell commands that mount what is different there, and whose umask its sshd has. ``settings``: of sshd,
    before those of the others. Who uses it waits until it answers.
    """
    keys, address = hosts.folder / "ssh", f"10.78.0.{number}"
    hosts.run("ip", "address", "add", f"{address}/24", "dev", "eth0", host="right")
    for file, line in (
        ("hosts", f"{address} {name}"),
        ("ssh/known_hosts", f"{name},{address} {(keys / 'host.pub').read_text()}"),
    ):
        with open(hosts.folder / file, "a") as lines:
            print(line.strip(), file=lines)
    configuration = keys / f"sshd-{name}"
    configuration.write_text(settings + _SSHD.format(address=address, folder=hosts.folder))
    program = shutil.which("sshd", path=PATH) or "sshd"
    start = f"echo {name} >/proc/sys/kernel/hostname\n{setup}\nexec {program} -D -e -f {configuration}"
    unshare = ["unshare", "--mount", "--uts", "--propagation", "private"]
    with hosts.daemon("right", *unshare, "bash", "-c", f"set -e\n{start}", log=name):
        yield


@contextlib.contextmanager
def hosts_by_ssh(folder: Path) -> Iterator[Hosts]:
    """Two hosts with sshd, which disttensor's ssh reaches."""
    with two_hosts(folder) as pids:
        hosts = Hosts(folder, pids)
        with ssh(hosts) as client:
            hosts.environment["DISTTENSOR_SSH"] = str(client)
            yield hosts


@contextlib.contextmanager
def _host(name: str, folder: Path) -> Iterator[int]:
    first = ["bash", "-c", _FIRST.format(name=name, folder=folder)]
    with subprocess.Popen([*_UNSHARE, *first], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"host {name} did not start")
            yield process.pid
        finally:
            # The first process of the namespace: with it all others there end, and unshare when they have.
            with contextlib.suppress(OSError, ValueError):
                os.kill(_child(process.pid), signal.SIGKILL)
                process.wait(HANG)
            process.kill()
