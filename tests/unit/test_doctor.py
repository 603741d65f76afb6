"""The doctor's rows: what is wrong with a machine, and what to do, from the numbers that it has found."""

from __future__ import annotations

import resource

import pytest

from disttensor.cli import doctor
from disttensor.cli.doctor import NONE, OK, WRONG

#: What is wrong, and a word of what is to be done.
WRONGS = {
    "a library that is missing": (doctor.of_versions({"torch": "missing", "pyzmq": "27"}), "pip install torch"),
    "little memory": (doctor.of_memory(100 << 20, 8 << 30, 0, 0), "ask for more"),
    "few descriptors": (doctor.of_descriptors(64, 64, "too few"), "ulimit -Hn"),
    "few processes": (doctor.of_processes(512, 400), "ulimit -u"),
    "RDMA without locked memory": (doctor.of_locked(8 << 20, True), "ulimit -l"),
    "docker's /dev/shm": (doctor.of_shm(64 << 20, 64 << 20, True), "--shm-size"),
    "a /dev/shm of root's": (doctor.of_shm(8 << 30, 8 << 30, False), "1777"),
    "a loopback that is down": (doctor.of_ports(32768, 60999, {"IPv4": "Network is unreachable"}, []), "127.0.0.1"),
    "few ports": (doctor.of_ports(32768, 32800, {}, ["eth0"]), "ip_local_port_range"),
    "a clock of 1970": (doctor.of_clock(False, "tsc", 1000.0), "set it"),
}


@pytest.mark.parametrize("name", WRONGS)
def test_what_is_wrong_has_a_remedy(name: str) -> None:
    row, remedy = WRONGS[name]
    assert row.state == WRONG
    assert remedy in row.do
    assert f"> {row.do[:20]}" in doctor.shown(row)


def test_what_is_well() -> None:
    rows = [
        doctor.of_versions({"torch": "2", "system": "Linux"}),
        doctor.of_memory(4 << 30, 8 << 30, 8 << 30, 2),
        doctor.of_descriptors(1024, resource.RLIM_INFINITY, ""),
        doctor.of_processes(-1, 0),
        doctor.of_processes(30_000, 200),
        doctor.of_locked(resource.RLIM_INFINITY, True),
        doctor.of_locked(64 << 10, False),
        doctor.of_shm(8 << 30, 8 << 30, True),
        doctor.of_ports(32768, 60999, {"IPv6": "Cannot assign requested address"}, []),
        doctor.of_clock(True, "tsc", 1.8e9),
    ]
    assert [row for row in rows if row.state != OK or row.do] == []
    assert "the control group may have 8.0 GiB; for want of memory the kernel has killed 2 processes" in rows[1].found
    assert doctor.of_clock(False, "tsc", 1.8e9).state == NONE  # no fault of a single host's


def test_names_and_homes_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/somebody")
    text = "No module at /srv/people/somebody/lib/x.py, nor /home/other/y.py: '/home/third'"
    assert doctor.without_names(text) == "No module at ~/lib/x.py, nor /home/USER/y.py: '/home/USER'"
