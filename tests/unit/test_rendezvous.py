"""What an init_method says."""

from __future__ import annotations

import pytest

from disttensor.runtime.launch.rendezvous.rendezvous import Rendezvous, find_rendezvous, url_of
from disttensor.startup.rendezvous import rendezvous_of

ENVIRONMENT = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "RANK": "2", "WORLD_SIZE": "5"}


def test_none_is_needed_for_local_nodes() -> None:
    assert find_rendezvous("local://") is None


@pytest.mark.parametrize(
    ("url", "host", "text"),
    [
        ("tcp://node1:29500", "node1", "tcp://node1:29500"),
        ("tcp://10.0.0.1:29500", "10.0.0.1", "tcp://10.0.0.1:29500"),
        ("tcp://[fd00::1]:29500", "fd00::1", "tcp://[fd00::1]:29500"),
    ],
)
def test_a_host_and_a_port(url: str, host: str, text: str) -> None:
    found = find_rendezvous(url, 1, 3)
    assert found == Rendezvous("tcp", host, 29500, rank=1, size=3)
    assert str(found) == text


@pytest.mark.row("G4", "G5")
def test_rank_and_size_as_torch_takes_them_in_the_url() -> None:
    assert find_rendezvous("tcp://node1:1?rank=1&world_size=2") == Rendezvous("tcp", "node1", 1, rank=1, size=2)
    file = Rendezvous("file", path="/a/b", rank=0, size=2)
    assert find_rendezvous("file:///a/b?rank=0&world_size=2") == file
    assert rendezvous_of("file:///a/b?rank=0&world_size=2", None, None, None) == file
    assert rendezvous_of("file:///a/b", 0, 2, None) == file


def test_a_path() -> None:
    found = find_rendezvous("file:///home/me/my%20job")
    assert found == Rendezvous("file", path="/home/me/my job")
    assert found.options == {"connection_file": "/home/me/my job"}


@pytest.mark.row("G3")
def test_the_environment() -> None:
    assert find_rendezvous("env://", environ=ENVIRONMENT) == Rendezvous("tcp", "node1", 29500, rank=2, size=5)
    assert find_rendezvous("env://", 0, 9, ENVIRONMENT) == Rendezvous("tcp", "node1", 29500, rank=0, size=9)


def test_the_environment_of_torchrun() -> None:
    run = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "0"}
    found = find_rendezvous("env://", environ=ENVIRONMENT | run | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert found == Rendezvous("torchrun", "node1", 29500, run="7 0", rank=2, size=5, local_rank=1, local_size=2)
    assert found.options["port"] == "0"
    assert found.name != find_rendezvous("env://", environ=ENVIRONMENT | run | {"TORCHELASTIC_RESTART_COUNT": "1"}).name


@pytest.mark.row("G6")
@pytest.mark.parametrize(
    ("url", "rank", "size", "text"),
    [
        ("tcp://node1", None, None, "names no host and port"),
        ("tcp://node1:99999", None, None, "names no host and port"),
        ("tcp://:29500", None, None, "names no host and port"),
        (
            "tcp://127.0.0.1:0",
            None,
            None,
            "port 0 is any that is free, and here all processes have to know which: name",
        ),
        ("tcp://node1:1", 1, None, "rank=1 without world_size"),
        ("tcp://node1:1", 3, 3, "rank=3 with world_size=3"),
        ("tcp://node1:1", -1, 3, "rank=-1"),
        ("tcp://node1:1?rank=x", None, None, "rank is 'x', which is no number"),
        ("file://job", None, None, "names no absolute path"),
        ("etcd://node1:1", None, None, "is unknown; it is one of 'local://', 'env://'"),
        ("", None, None, "is unknown"),
        ("multicast://239.255.0.1:29500", None, None, "is unknown"),
    ],
)
def test_what_says_too_little(url: str, rank: int | None, size: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        find_rendezvous(url, rank, size)
    with pytest.raises(ValueError, match=text):
        rendezvous_of(url, rank, size, None)


@pytest.mark.row("G3", "G6")
def test_without_a_word_a_script_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says: its nodes are its own."""
    for name, value in {**ENVIRONMENT, "RANK": "0"}.items():  # a process of another rank becomes a node
        monkeypatch.setenv(name, value)
    assert rendezvous_of(None, None, None, None) is None
    with pytest.raises(ValueError, match="go with an init_method"):
        rendezvous_of(None, 1, 3, None)
    assert rendezvous_of("env://", None, None, None) == Rendezvous("tcp", "node1", 29500, rank=0, size=5)
    assert rendezvous_of("env://", None, 9, None) == Rendezvous("tcp", "node1", 29500, rank=0, size=9)


@pytest.mark.parametrize("path", ["/home/Zoë/job", "/home/\udcff\n/job", "/a?b=1#c%41 d/job"])
def test_a_file_of_any_name(path: str) -> None:
    assert find_rendezvous(url_of("file", path)) == Rendezvous("file", path=path)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_an_environment_that_lacks_something(name: str) -> None:
    with pytest.raises(ValueError, match=f"'env://' needs {name} in the environment"):
        find_rendezvous("env://", environ={k: v for k, v in ENVIRONMENT.items() if k != name})


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="needs MASTER_ADDR and MASTER_PORT and RANK and WORLD_SIZE in"):
        find_rendezvous("env://", environ={})
