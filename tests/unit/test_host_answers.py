"""What ``dtrun --check`` takes of a host's answer for ports."""

from __future__ import annotations

from disttensor.cli import host_check


def test_ports_that_a_host_says() -> None:
    assert host_check.ports_of({"IPv4": "1 22 333 4444", "IPv6": ""}) == {"IPv4": [1, 22, 333]}
    assert host_check.ports_of({"IPv4": 7, "IPv6": "70000 \u0663 5"}) == {"IPv4": [7], "IPv6": [5]}
