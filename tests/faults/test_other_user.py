"""Another user of the machine looks at a running job, with all that the system lets them: nothing can be read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aftermath import children
from ports import free_port

import disttensor as dt
from disttensor import testing
from disttensor.runtime.launch.starters.local import LocalLauncher

#: "nobody", on all systems.
NOBODY = 65534

#: Reads what it is told of as that user, and tells what it could read. It has imported what it needs before it changes.
SPY = """
import encodings.idna, glob, json, os, socket, stat, sys
user, pids, files, ports, marks = json.load(sys.stdin)
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
found = {}

def note(what, data):
    found[what] = [mark for mark in marks if mark.encode() in data]

def read(path):
    try:
        with open(path, "rb") as file:
            note(path, file.read(1 << 20))
    except OSError:
        pass

for pid in pids:
    for name in ("cmdline", "environ", "stat", "status", "auxv", "maps", "stack", "comm"):
        read(f"/proc/{pid}/{name}")
    for folder in ("fd", "map_files", "cwd", "root"):
        try:
            found.update({f"/proc/{pid}/{folder}/{name}": [] for name in os.listdir(f"/proc/{pid}/{folder}")})
        except OSError:
            pass
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
        found[f"/proc/{pid}/mem"] = []
    except OSError:
        pass
for path in files:
    read(path)
    if os.path.isdir(path):
        try:
            found[path] = os.listdir(path) and []
        except OSError:
            pass
for path in glob.glob("/dev/shm/*"):
    if any(mark in path for mark in ("disttensor", "dt-", "torch")):
        read(path)
for line in open("/proc/net/unix").read().splitlines()[1:]:
    path = line.split(maxsplit=7)[7:]
    if path and "disttensor" in path[0]:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(path[0].replace("@", chr(0), 1) if path[0][0] == "@" else path[0])
                found[path[0]] = []
            except OSError:
                pass
for port in ports:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n" * 20)
        said = b""
        try:
            while piece := sock.recv(4096):
                said += piece
        except OSError:
            pass
        note(f"port {port}", said)
json.dump(found, sys.stdout)
"""


def spy(user: int, *what: object) -> dict[str, list[str]]:
    """What a user could read, with the marks that were in it."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", SPY], input=json.dumps([user, *what]), capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def ports_of(pids: list[int]) -> list[int]:
    """The TCP ports at which these processes listen."""
    inodes = set()
    for pid in pids:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # by which the folder was read
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}")))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that all may enter, as pytest's own are not: the job's own modes have to keep others out."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.fault(40)
@pytest.mark.cold
def test_nothing_can_be_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a session whose nodes are local, and of one whose nodes come by a secret; root can read it the same way."""
    if os.getuid():
        pytest.skip("only root can become another user, and this test's is not root")
    monkeypatch.setenv("HOME", str(home))
    secrets: list[str] = []
    begin = LocalLauncher.start

    def start(self: LocalLauncher, bundles: Any) -> None:
        secrets.extend(key for bundle in bundles for key in (bundle.secret_key, bundle.side_secret_key))
        begin(self, bundles)

    monkeypatch.setattr(LocalLauncher, "start", start)
    url, logs = f"tcp://localhost:{free_port()}", home / "logs"
    (logs / "0").mkdir(parents=True)  # the user's own, which all may enter; the other node's folder is the job's
    for folder in (logs, logs / "0"):
        folder.chmod(0o755)
    worker = [sys.executable, "-m", "dtrun", "worker", "--init-method", url]
    for local in (True, False):
        options: dict[str, Any] = {"nodes": 2, "log_dir": str(logs)} if local else {"nodes": 1, "init_method": url}
        other = None if local else subprocess.Popen(worker, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with dt.init_master_worker(**options):
            x = torch.full((1 << 18,), 7.0, device="node:0")
            x.to(f"node:{options['nodes'] - 1}").cpu()
            dt.run(print, "a line of the log", node=0)
            testing.usage(0)
            if not local:
                secrets.append((home / ".config/disttensor/secret").read_text().strip())
            pids = sorted({os.getpid(), *children(os.getpid())})
            files = [str(path) for path in home.rglob("*")]
            ports = ports_of(pids)
            assert len(ports) >= 2
            assert len(secrets) >= (4 if local else 5)
            seen, by_root = (spy(user, pids, files, ports, secrets) for user in (NOBODY, 0))
        if other is not None:
            other.wait()
        assert [what for what, marks in seen.items() if marks] == []
        private = re.compile(r"/(environ|auxv|maps|mem|stack|fd/.*|map_files/.*)$|^" + re.escape(str(home)))
        users = {str(path) for path in (*home.iterdir(), logs / "0")}  # folders that the job did not make may be listed
        assert [what for what in seen if private.search(what) and what not in users] == []
        assert {f"/proc/{pid}/cmdline" for pid in pids} <= set(seen)  # it was there, and did look
        assert any(what.endswith("/environ") for what in by_root)
        if local:
            assert str(logs / "0" / "stdout.log") in by_root
        else:
            assert by_root[str(home / ".config/disttensor/secret")] == [secrets[-1]]
