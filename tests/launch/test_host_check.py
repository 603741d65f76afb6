"""``dtrun --check --hosts``: what it says of hosts that fit and of those that do not, with a program in ssh's place."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import disttensor as dt


def ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


#: Stands for ssh: `-G` says the address, other calls run here what would run there; "bad" refuses, others differ.
SSH = f"""#!{sys.executable}
import os, sys
host = sys.argv[sys.argv.index("--") + 1]
if "-G" in sys.argv:
    print("hostname ::1" if host == "six" else "hostname 127.0.0.1")
    sys.exit()
if host == "bad":
    sys.exit("me@bad: Permission denied (publickey).")
command = sys.argv[-1]
if host == "old":
    command = command.replace("import PROTOCOL, VERSION", "import VERSION; PROTOCOL = 1")
    command = command.replace("metadata.version(package)", '(metadata.version(package), "1.0")[package == "torch"]')
    command = command.replace('told["time"] = time.time()', 'told["time"] = time.time() - 900')
if host == "bare":
    command = command.replace("from disttensor.", 'raise ModuleNotFoundError("No module named disttensor"); from a.')
if host == "walled":
    command = command.replace('" ".join(map(str, ports))', '"9 11"')
if host == "narrow":
    command = command.replace('" ".join(map(str, ports))', '" ".join(map(str, ports[:-1] + [9]))')
os.execvp("/bin/sh", ["sh", "-c", command])
"""


def check(folder: Path, hosts: str, *more: str) -> tuple[int, list[str], str]:
    ssh = folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        [sys.executable, "-m", "dtrun", "--check", "--hosts", hosts, *more],
        env={**os.environ, "DISTTENSOR_SSH": str(ssh)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.row("S19")
def test_hosts_that_fit(tmp_path: Path) -> None:
    code, lines, errors = check(tmp_path, "a,b:2")
    assert (code, errors) == (0, ""), lines
    assert lines[0].split() == ["host", "python", "torch", "disttensor", "protocol", "clock", "what", "to", "do"]
    for name, line in zip("ab", lines[1:], strict=True):
        words = line.split()
        assert words[:2] == [name, "{}.{}.{}".format(*sys.version_info[:3])]
        assert words[3] == dt.__version__
        assert int(words[4]) > 1
        assert words[-1] == "ok"


@pytest.mark.row("S19")
def test_each_host_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    code, lines, errors = check(tmp_path, "a,old,bare,bad,walled")
    assert (code, errors) == (1, ""), lines
    a, old, bare, bad, walled = lines[1:]
    assert "it does not reach walled" in a
    assert "firewall" in a
    here, protocol = f"and {socket.gethostname()}, where the job was started, has", a.split()[4]
    for words in (
        f"has disttensor {dt.__version__} (protocol 1), {here} disttensor {dt.__version__} (protocol {protocol}): ",
        f"has torch 1.0, {here} torch ",
        " s behind that of ",
        "NTP",
    ):
        assert words in old
    assert (
        f"has no disttensor for {sys.executable}, {here} disttensor {dt.__version__}: `{sys.executable} -m pip" in bare
    )
    assert "Permission denied" in bad
    assert "`ssh -o BatchMode=yes bad true` must work" in bad
    assert "this host does not reach it (by IPv4: [Errno 111] Connection refused): nodes need all ports of " in walled


def test_ports_at_both_ends_of_what_a_job_takes(tmp_path: Path) -> None:
    """Where a firewall passes some of them only, the others are named."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    code, lines, errors = check(tmp_path, "a,narrow")
    assert (code, errors) == (1, ""), lines
    a, narrow = lines[1:]
    why = f"(by IPv4 at port 9: [Errno 111] Connection refused): nodes need all ports of {first}-{last} between hosts"
    assert f"it does not reach narrow {why}" in a
    assert f"this host does not reach it {why}" in narrow


@pytest.mark.skipif(not ipv6(), reason="no IPv6 here")
def test_hosts_of_ipv6(tmp_path: Path) -> None:
    code, lines, errors = check(tmp_path, "six,a")
    assert (code, errors) == (0, ""), lines
    assert [line.split()[-1] for line in lines[1:]] == ["ok", "ok"]


def test_hosts_are_needed() -> None:
    done = subprocess.run([sys.executable, "-m", "dtrun", "--check"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "--check needs hosts" in done.stderr
