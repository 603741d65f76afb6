"""Hosts by ssh that differ from the one where the job is started, in all that a host has of its own: each works, or the
start refuses in one sentence that names both sides, and ``dtrun --check`` has said it before. For root: `make ssh`.

Hosts have views of one file system: what differs is mounted. Of another version of Python or torch only what it says of
itself is other than here; docs/SSH.md says which were tried with real ones.
"""

from __future__ import annotations

import contextlib
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from checkout import ROOT
from host_kit import Hosts, another_host, hosts_by_ssh
from limits import HANG
from other_user import UID, uncovering

from disttensor.runtime.protocol.bundle import PROTOCOL, VERSION

pytestmark = [pytest.mark.ssh]

PACKAGES = Path(sysconfig.get_path("purelib"))
MINOR = platform.python_version().rpartition(".")[0]
PAGE = (ROOT / "docs" / "SSH.md").read_text()

#: The user of some of the hosts, who is nobody here: a home folder of their own, and no way into root's folders.
USER = f"""
{uncovering()}
mkdir -p /run/sshd /run/keys /run/home
cp $SSH/user.pub /run/keys/other
chown {UID} /run/home
echo 'umask 000' >/run/home/.bashrc
(cat /etc/passwd; echo other:x:{UID}:{UID}::/run/home:/bin/bash) >/run/passwd
(cat /etc/shadow; echo 'other:*:1:0:99999:7:::') >/run/shadow
mount --bind /run/passwd /etc/passwd
mount --bind /run/shadow /etc/shadow
"""
USERS_KEYS = "AuthorizedKeysFile /run/keys/%u\n"
#: An hour ahead, for programs in Python. (With libfaketime, that shifts all clocks, ``time.sleep`` fails there.)
AHEAD = "import time\nnow = time.time\ntime.time = lambda: now() + 3600\n"


@dataclass
class Other:
    """A host that differs."""

    setup: str = (
        ""  #: shell commands; $THERE: a folder of the import path, which is empty elsewhere, $SSH: that of keys
    )
    files: dict[str, str] = field(default_factory=dict)  #: files in $THERE
    settings: str = ""
    user: str = "root"
    says: str = ""  #: the sentence by which it is refused, behind its name


def says_python(said: str) -> dict[str, str]:
    return {"sitecustomize.py": f"import platform\nplatform.python_version = lambda: {said!r}\n"}


def says_package(name: str, said: str) -> dict[str, str]:
    return {f"{name}-{said}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {said}\n"}


HERE = "and left, where the job was started, has"
INSTALL = "`{executable} -m pip install"
REFUSED = {
    "python": Other(
        files=says_python("3.99.1"),
        says=f"has Python 3.99.1, {HERE} Python {{python}}: functions are sent as bytecode, and each minor version "
        "has its own; dtrun --python names the Python there",
    ),
    "torch": Other(
        files=says_package("torch", "99.1.0"),
        says=f"has torch 99.1.0, {HERE} torch {{torch}}: install one version on both",
    ),
    "disttensor": Other(
        f"sed 's/^PROTOCOL = .*/PROTOCOL = 99/; s/^VERSION = .*/VERSION = \"9.9\"/' {ROOT}/runtime/protocol/bundle.py "
        f">$THERE/bundle; mount --bind $THERE/bundle {ROOT}/runtime/protocol/bundle.py",
        says=f"has disttensor 9.9 (protocol 99), {HERE} disttensor {{disttensor}} (protocol {{protocol}}): install one "
        "version on both",
    ),
    "numpy": Other(
        files=says_package("numpy", "1.26.4"),
        says=f"has numpy 1.26.4, {HERE} numpy {{numpy}}: arrays that are sent from here do not load there; {INSTALL} "
        "numpy=={numpy}` there",
    ),
    "nothing": Other(
        f"mkdir -p $THERE/python; mount --bind {sys.prefix} $THERE/python; mount -t tmpfs none {ROOT}; "
        f"mkdir -p {sys.prefix}; mount --bind $THERE/python {sys.prefix}",
        says=f"has no disttensor for {{executable}}, {HERE} disttensor {{disttensor}}: {INSTALL} "
        "disttensor=={disttensor}` there",
    ),
    "cloudpickle": Other(
        f"mount -t tmpfs none {PACKAGES}/cloudpickle",
        says=f"has no cloudpickle for {{executable}}, {HERE} cloudpickle {{cloudpickle}}: {INSTALL} "
        "cloudpickle=={cloudpickle}` there",
    ),
    "bare": Other(
        f"mount -t tmpfs none {sys.prefix}/bin",
        says=f"has no {{executable}}, {HERE} Python {{python}}: dtrun --python names the Python there",
    ),
    "closed": Other(
        USER + f"chmod 755 /run; mount -t tmpfs -o mode=700 none {sys.prefix}/bin",
        settings=USERS_KEYS,
        user="other",
        says=f"may not run {{executable}}, {HERE} Python {{python}}: dtrun --python names a Python that this user may "
        "run",
    ),
}
#: Three hosts of one job. The first has all that a job gets along with at once.
WORKING = {
    "late": Other(
        "umask 077",
        {"sitecustomize.py": AHEAD + says_python(f"{MINOR}.99")["sitecustomize.py"]}
        | says_package("torch", f"{version('torch').partition('+')[0]}+cu999"),
    ),
    "open": Other("mount -t tmpfs none $DISK", settings='ForceCommand umask 000; eval "$SSH_ORIGINAL_COMMAND"\n'),
    "stranger": Other(USER, settings=USERS_KEYS, user="other"),
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_by_ssh(tmp_path_factory.mktemp("hosts")) as both, contextlib.ExitStack() as stack:
        there, disk = both.folder / "there", both.folder / "disk"
        there.mkdir()
        disk.mkdir()
        both.environment["PYTHONPATH"] = f"{there}:{both.environment['PYTHONPATH']}"
        for number, (name, other) in enumerate((REFUSED | WORKING).items(), 10):
            own = both.folder / "own" / name
            own.mkdir(parents=True)
            for file, text in other.files.items():
                (own / file).parent.mkdir(exist_ok=True)
                (own / file).write_text(text)
            setup = f"mount --bind {own} {there}\nSSH={both.folder}/ssh THERE={there} DISK={disk}\n{other.setup}"
            stack.enter_context(another_host(both, name, number, setup, other.settings))
        for name in REFUSED | WORKING:
            both.wait_until(partial(answers, both, name), HANG, f"sshd on {name} does not answer")
        yield both


def answers(hosts: Hosts, name: str) -> bool:
    return hosts.run(hosts.environment["DISTTENSOR_SSH"], at(name), "hostname").stdout == f"{name}\n"


def at(name: str) -> str:
    """A host as --hosts has it."""
    other = (REFUSED | WORKING)[name]
    return name if other.user == "root" else f"{other.user}@{name}"


@pytest.fixture(scope="module")
def checked(hosts: Hosts) -> dict[str, str]:
    """What ``dtrun --check`` says of each host, for which it has the code 1."""
    done = hosts.run("dtrun", "--check", "--hosts", ",".join(map(at, REFUSED | WORKING)))
    assert (done.returncode, done.stderr) == (1, "")
    hosts.settle(10)
    return {line.split()[0].rpartition("@")[2]: line for line in done.stdout.splitlines()}


START = """
import sys
import disttensor as dt
for host in sys.argv[1:]:
    try:
        dt.init_master_worker(hosts=host, threads=1)
    except dt.errors.StartError as error:
        print(host.rpartition("@")[2], error, sep="|", flush=True)
"""


@pytest.fixture(scope="module")
def started(hosts: Hosts) -> dict[str, str]:
    """The errors of the starts, by host."""
    (hosts.folder / "start.py").write_text(START)
    done = hosts.run(sys.executable, "start.py", *map(at, REFUSED))
    assert done.returncode == 0, done.stderr
    hosts.settle(10)
    errors = re.split(r"^(\w+)\|", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(errors[::2], errors[1::2], strict=True))


def sentence(name: str, host: str, **versions: object) -> str:
    return f"{host} {REFUSED[name].says.format(**versions)}"


@pytest.mark.fault(39)
@pytest.mark.parametrize("name", REFUSED)
def test_a_host_that_cannot_take_part_is_refused_in_one_sentence(
    name: str, hosts: Hosts, checked: dict[str, str], started: dict[str, str]
) -> None:
    """The one that ``dtrun --check`` has said before, and that docs/SSH.md has."""
    mine = {each: version(each) for each in ("torch", "numpy", "cloudpickle")}
    mine |= {"python": platform.python_version(), "protocol": str(PROTOCOL), "disttensor": VERSION}
    said = sentence(name, at(name), executable=sys.executable, **mine)
    named = said.replace(f"{at(name)} ", f"{name} ", 1)
    assert started[name] in (f"node 0 on {at(name)} did not start: {each}\n" for each in (said, named))
    assert said in checked[name] or named in checked[name]
    shown = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "cloudpickle": "3.1.3", "executable": "/opt/venv/bin/python"}
    assert sentence(name, "right", python="3.11.7", protocol=mine["protocol"], disttensor="0.1.0", **shown) in PAGE


def test_the_check_lets_those_pass_that_a_job_gets_along_with(checked: dict[str, str]) -> None:
    ends = {name: re.split(r" {2,}", checked[name])[-1] for name in WORKING}
    ahead = re.fullmatch(r"ok; the clock of late is (\d+) s ahead of that of left: a job works, .*", ends.pop("late"))
    assert ahead is not None, checked
    assert 3590 < int(ahead[1]) < 3610
    assert set(ends.values()) == {"ok"}


JOB = """
import os, pathlib, platform, socket, stat, sys, time
import torch
import disttensor as dt

def about(x):
    mask = os.umask(0o022)
    os.umask(mask)
    host, python, home = socket.gethostname(), platform.python_version(), os.path.expanduser("~")
    return f"{host} {python} {mask:03o} {os.getuid()} {home} {x.sum().item()}"

def ahead(now):
    return time.time() - now > 3500

def save(folder, nodes):
    mesh = dt.mesh(rank=len(nodes), nodes=nodes)
    state = {"x": mesh.coordinate("rank") * 0 + 1.5}
    try:
        dt.checkpoint.save(state, folder)
        state["x"].zero_()
        dt.checkpoint.load(state, folder)
    except OSError as error:
        return str(error)
    paths = [pathlib.Path(folder), *pathlib.Path(folder).iterdir()]
    return f"{state['x'].item()} {sorted({f'{stat.S_IMODE(path.stat().st_mode):03o}' for path in paths})}"

with dt.init_master_worker(hosts=sys.argv[1], threads=1):
    for node in range(4):
        print(dt.run(about, torch.ones(3, device=f"node:{node}"), node=node))
    print([dt.run(ahead, time.time(), node=node) for node in range(4)])
    xs = [torch.full((1 << 16,), float(node), device=f"node:{node}") for node in range(4)]
    dt.all_reduce(xs)
    print([x.to(f"node:{(node + 1) % 4}").sum().item() for node, x in enumerate(xs)])
    for nodes in ([0, 1], [0, 2], [0, 3]):
        print(save(f"shared{nodes[1]}", nodes))
    print(save("disk/run1", [0, 2]))
"""


@pytest.mark.fault(39)
def test_hosts_that_differ_work_together(hosts: Hosts) -> None:
    """Umasks, users and their homes, clocks, patch versions of Python, builds of torch. A checkpoint on a disk that one
    host has, or that another user may not read, is an error that names both."""
    (hosts.folder / "job.py").write_text(JOB)
    done = hosts.run("python", "job.py", ",".join(["left", *map(at, WORKING)]))
    assert done.returncode == 0, done.stderr
    hosts.settle(10)
    left, late, open_, stranger, clocks, sums, *saved = done.stdout.splitlines()
    assert left.split()[:3] == ["left", platform.python_version(), "022"]
    assert late.split()[:4] == ["late", f"{MINOR}.99", "077", "0"]
    assert open_.split()[:4] == ["open", platform.python_version(), "000", "0"]
    assert stranger == f"stranger {platform.python_version()} 000 {UID} /run/home 3.0"
    assert clocks == str([False, True, False, False])
    assert sums == str([6.0 * (1 << 16)] * 4)
    private = f"1.5 {['600', '700']}"
    assert saved[:2] == [private, private]
    folder = hosts.folder
    assert saved[2] == (
        f"[Errno 13] the user of host stranger (uid {UID}) may not enter {folder}/shared3, which the script has made: "
        "a checkpoint is written by the nodes themselves, as one user or one group that may (chmod)"
    )
    unseen = (
        "host {} does not see the folder {} that the script has made on host left: a checkpoint is written by the "
        "nodes themselves, into a folder on a file system that they and the script share"
    )
    assert saved[3:] == [unseen.format("open", f"{folder}/disk/run1")]
    assert unseen.format("right", "/scratch/run1") in PAGE
