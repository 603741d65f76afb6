"""Which of this machine's addresses a name means."""

from __future__ import annotations

import socket

import pytest

from disttensor.runtime.host import interfaces as i

OWN = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1", "10.0.0.2", "fd00::1"], "ib0": ["10.9.0.1"]}
NAMES = {
    "localhost": ["::1", "127.0.0.1"],
    "node1": ["10.0.0.1"],
    "debian": ["127.0.1.1"],
    "other": ["10.0.0.77"],
    "both": ["10.0.0.77", "fd00::1"],
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with three interfaces."""

    def resolve(host: str, port: object, type: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        found = NAMES.get(host, [host] if host[0].isdigit() or ":" in host else [])
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(i, "interfaces", lambda: OWN)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_the_loopback_interface_is_there() -> None:
    assert "127.0.0.1" in i.interfaces()["lo"]
    assert i.addresses_of(["lo"])[0] == "127.0.0.1"


@pytest.mark.row("G14")
def test_each_name_is_an_interface_an_address_or_a_host(machine: None) -> None:
    assert i.addresses_of(["eth0"]) == ("10.0.0.1", "10.0.0.2", "fd00::1")
    assert i.addresses_of(["ib0", "10.0.0.2", "fd00::1"]) == ("10.9.0.1", "10.0.0.2", "fd00::1")
    assert i.addresses_of(["node1", "eth0"]) == ("10.0.0.1", "10.0.0.2", "fd00::1")
    assert i.addresses_of(["lo", "ib0"]) == ("10.9.0.1", "127.0.0.1", "::1"), "others reach the first one"


def test_what_is_not_this_machines_is_refused_with_what_is(machine: None) -> None:
    with pytest.raises(ValueError, match=r"'eth1' is no interface .*does not resolve .*; it has lo \(127.0.0.1, ::1\)"):
        i.addresses_of(["eth1"])
    with pytest.raises(ValueError, match=r"'other' is 10.0.0.77, which is not this machine; it has lo"):
        i.listening_as("other")


def test_of_a_names_addresses_those_that_are_here(machine: None) -> None:
    assert i.listening_as("both") == ("fd00::1",)


def test_loopback_is_what_a_name_means_only_if_it_says_so(machine: None) -> None:
    assert i.listening_as("localhost") == ("::1", "127.0.0.1")
    assert i.listening_as("127.0.0.1") == ("127.0.0.1",)
    assert i.listening_as("debian") == ("10.0.0.1", "10.0.0.2", "10.9.0.1", "fd00::1", "127.0.1.1")
