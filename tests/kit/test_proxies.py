"""Proxies of tests, when nobody listens where they lead any more."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from limits import HANG
from slow_wire import Wire, Wires
from transport_kit import Proxy


@pytest.mark.parametrize("kind", ["in the test", "slow wire"])
def test_a_caller_of_one_who_has_closed_is_hung_up_on(kind: str) -> None:
    """As by the kernel; a test that ends while a node still calls its hub fails for nothing otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with closing(Proxy(target)) as proxy, Wires(Wire()) as wires:
        address = proxy.address if kind == "in the test" else wires.to("it", target)
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        for _ in range(2):  # and the proxy is there for the next caller
            with socket.create_connection((host, int(port)), timeout=HANG) as caller:
                assert caller.recv(1) == b""
