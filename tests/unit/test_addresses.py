"""Which address leads where."""

from __future__ import annotations

import re
import socket

import pytest

from disttensor.runtime.host.addresses import first_to_answer, interfaces_for, own_address, split, way_to


def test_split() -> None:
    assert split("tcp://10.0.0.1:41233") == ("10.0.0.1", 41233)
    assert split("tcp://[::1]:5") == ("::1", 5)
    for text in ("10.0.0.1:41233", "tcp://10.0.0.1", "tcp://:5", "ipc:///tmp/x"):
        with pytest.raises(ValueError, match="is no address such as"):
            split(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:9400", ("127.0.0.1", 9400)),
        ("127.3.4.5:1", ("127.3.4.5", 1)),
        ("localhost:9400", ("127.0.0.1", 9400)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses_of_this_machine_alone(text: str, found: tuple[str, int]) -> None:
    assert own_address(text) == found


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "[fe80::1]", "example.org", "127.0.0.1.example.org"])
def test_addresses_that_others_reach(host: str) -> None:
    name = re.escape(host.strip("[]"))
    with pytest.raises(ValueError, match=rf"^{name} is not this machine's alone, .*: name 127\.0\.0\.1:9400, "):
        own_address(f"{host}:9400")


@pytest.mark.parametrize("text", ["", "9400", ":9400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no address such as 127\.0\.0\.1:9400$"):
        own_address(text)


def test_way_to() -> None:
    assert way_to("127.0.0.1") == "127.0.0.1"
    assert way_to("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(OSError, match=r"."):
        way_to("no-such-host.invalid")


def test_the_first_that_answers() -> None:
    """Closed ports and networks that cannot be reached are passed over, in any order."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.2", 0)) as two:
        good = [f"tcp://{host}:{port}" for host, port in (one.getsockname(), two.getsockname())]
        with socket.create_server(("127.0.0.3", 0)) as closed:
            bad = [f"tcp://127.0.0.3:{closed.getsockname()[1]}", "tcp://[fe80::1]:9", "tcp://no-such-host.invalid:9"]
        assert first_to_answer(good, 5) == good[0]
        assert first_to_answer([*bad, *reversed(good)], 5) == good[1]
        assert first_to_answer([good[1], *bad], 5) == good[1]
    assert first_to_answer(bad[:2], 0.05) == bad[0]
    assert first_to_answer(bad[:1], 5) == bad[0]


def test_where_a_node_listens() -> None:
    near = ["tcp://127.0.0.1:5", "tcp://127.0.0.2:6"]
    assert interfaces_for(near[1], near) == ("127.0.0.2", "127.0.0.1")
    assert interfaces_for(near[0], near[:1]) == ("127.0.0.1",)
