"""Invitations: keys that two ends have in common, in files that are nobody else's."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from disttensor.runtime.launch.rendezvous import credentials as i
from disttensor.runtime.launch.rendezvous import torchrun, worker_cli
from disttensor.runtime.protocol.errors import StartError
from disttensor.runtime.protocol.keys import curve_pair_of

ADDRESSES = ("tcp://127.0.0.1:1",)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DISTTENSOR_SECRET", raising=False)
    monkeypatch.delenv("DISTTENSOR_SECRET_FILE", raising=False)
    return tmp_path / "home"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# ---- connection files ------------------------------------------------------------------------------------------------


def test_a_connection_file_is_read_as_it_was_written_and_then_removed(tmp_path: Path) -> None:
    made = i.invite(i.fresh(), ADDRESSES)
    path = tmp_path / "new" / "folder" / "job"
    file = i.ConnectionFile(path, made)
    assert i.read_connection_file(path, 0) == made
    assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o600, 0o700, 0o700)
    file.remove()
    file.remove()
    assert not path.exists()


def test_its_secret_is_not_shown() -> None:
    made = i.invite(i.fresh(), ADDRESSES)
    assert made.secret_key not in repr(made)


def test_a_guest_waits_for_the_file(tmp_path: Path) -> None:
    path, got = tmp_path / "job", []
    guest = threading.Thread(target=lambda: got.append(i.read_connection_file(path, 20)))
    guest.start()
    made = i.invite(i.fresh(), ADDRESSES)
    i.ConnectionFile(path, made)
    guest.join()
    assert got == [made]


def test_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"there is no connection file .*job after 0.1 s: has its job been started"):
        i.read_connection_file(tmp_path / "job", 0.1)


def test_a_file_that_is_there_is_an_error_that_says_whose_it_is(tmp_path: Path) -> None:
    made = i.invite(i.fresh(), ADDRESSES)
    i.ConnectionFile(tmp_path / "job", made)
    with pytest.raises(StartError, match=rf"is the connection file of process {os.getpid()} on host .*another path"):
        i.ConnectionFile(tmp_path / "job", made)


def no_process() -> int:
    """A number that no process can have."""
    return int(Path("/proc/sys/kernel/pid_max").read_text()) + 1


@pytest.mark.row("G5")
def test_a_file_that_was_left_over_says_so_to_both(tmp_path: Path) -> None:
    pid = no_process()
    left = msgspec.structs.replace(i.invite(i.fresh(), ADDRESSES), pid=pid)
    i.ConnectionFile(tmp_path / "job", left)
    expected = rf"job was left over by process {pid} on host .*, which has ended: remove it"
    with pytest.raises(StartError, match=expected):
        i.ConnectionFile(tmp_path / "job", left)
    with pytest.raises(StartError, match=expected):
        i.read_connection_file(tmp_path / "job", 20)


def test_a_process_of_another_machine_is_not_taken_for_dead() -> None:
    assert not msgspec.structs.replace(i.invite(i.fresh(), ADDRESSES), pid=no_process(), place="elsewhere").over


def test_what_is_no_connection_file(tmp_path: Path) -> None:
    path = tmp_path / "job"
    path.write_text("{}")
    path.chmod(0o600)
    with pytest.raises(StartError, match="is no connection file"):
        i.read_connection_file(path, 0.1)
    with pytest.raises(StartError, match=r"there is a file already where the connection file is to be: .* is no conn"):
        i.ConnectionFile(path, i.invite(i.fresh(), ADDRESSES))


def with_(**changes: object) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        return msgspec.json.encode(msgspec.json.decode(data) | changes)

    return change


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda data: data.replace(b'"addresses":["', b'"addresses":["\xff\xfe'),
            "this version of disttensor writes: .*(?i:utf-8)",  # Python's words up to msgspec 0.22, then its own
        ),
        (lambda data: data[:-20], "Input data was truncated"),
        (lambda data: b"", "it is empty"),
        (with_(addresses=[]), "0 addresses"),
        (with_(addresses=["tcp://localhost"]), "'tcp://localhost' is no address"),
        (with_(addresses=["tcp://localhost:99999"]), "Port out of range"),
        (with_(addresses=["tcp://a\x00b:1"]), r"'tcp://a\\x00b:1' is no address"),
        (with_(server_key="short"), "its server_key is no CURVE key of 40 characters"),
        (with_(secret_key="\u00e9" * 40), "its secret_key is no CURVE key"),
        (with_(host="a\x1b[2Jb"), r"its host is 'a\\x1b\[2Jb'"),
    ],
)
def test_a_damaged_connection_file_is_one_sentence(
    damage: Callable[[bytes], bytes], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job"
    i.ConnectionFile(path, i.invite(i.fresh(), ("tcp://127.0.0.1:1",)))
    path.write_bytes(damage(path.read_bytes()))
    assert worker_cli.main(["--connection-file", str(path), "--timeout", "0"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"dtrun worker: error: {path} is no connection file: .*{says}.*", line)
    with pytest.raises(StartError, match=r"there is a file already where the connection file is to be: .* is no conn"):
        i.ConnectionFile(path, i.invite(i.fresh(), ("tcp://127.0.0.1:1",)))


@pytest.mark.parametrize("wrong", [0o640, 0o604, 0o666])
def test_a_file_that_others_can_get_at_is_refused(tmp_path: Path, wrong: int) -> None:
    i.ConnectionFile(tmp_path / "job", i.invite(i.fresh(), ADDRESSES))
    (tmp_path / "job").chmod(wrong)
    with pytest.raises(StartError, match=f"has mode {wrong:04o}: others can get at it"):
        i.read_connection_file(tmp_path / "job", 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to somebody else")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    i.ConnectionFile(tmp_path / "job", i.invite(i.fresh(), ADDRESSES))
    os.chown(tmp_path / "job", 65534, 65534)
    with pytest.raises(StartError, match="belongs to user 65534, and this process to 0"):
        i.read_connection_file(tmp_path / "job", 0)


def test_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    i.ConnectionFile(tmp_path / "real", i.invite(i.fresh(), ADDRESSES))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, reason in (("link", "cannot be read"), ("pipe", "is no ordinary file")):
        with pytest.raises(StartError, match=reason):
            i.read_connection_file(tmp_path / name, 0)


def test_another_jobs_file_is_not_removed(tmp_path: Path) -> None:
    file = i.ConnectionFile(tmp_path / "job", i.invite(i.fresh(), ADDRESSES))
    (tmp_path / "job").rename(tmp_path / "mine")
    i.ConnectionFile(tmp_path / "job", i.invite(i.fresh(), ADDRESSES))
    file.remove()
    assert (tmp_path / "job").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"the folder .* cannot be made"):
        i.ConnectionFile(tmp_path / "file" / "below" / "job", i.invite(i.fresh(), ADDRESSES))


# ---- the shared secret -----------------------------------------------------------------------------------------------


def test_the_secret_is_made_once_and_is_nobody_elses(home: Path) -> None:
    first = i.shared_secret()
    path = home / ".config" / "disttensor" / "secret"
    assert len(first) == 64
    assert i.shared_secret() == first
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)


def test_who_comes_at_the_same_time_gets_the_same_secret() -> None:
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(i.shared_secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == 1
    assert len(got) == 8


def test_a_secret_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine"
    path.write_text("swordfish\n")
    path.chmod(0o600)
    monkeypatch.setenv("DISTTENSOR_SECRET_FILE", str(path))
    assert i.shared_secret() == b"swordfish"
    path.chmod(0o644)
    with pytest.raises(StartError, match=r"the secret file .* has mode 0644"):
        i.shared_secret()


def test_a_secret_in_the_environment_is_taken_out_of_it_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTENSOR_SECRET", "swordfish")
    with pytest.warns(UserWarning, match="DISTTENSOR_SECRET_FILE"):
        assert i.shared_secret() == b"swordfish"
    assert "DISTTENSOR_SECRET" not in os.environ


def test_a_secret_in_the_environment_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTENSOR_SECRET", os.fsdecode(b"\xff\xfe"))
    with pytest.warns(UserWarning, match="DISTTENSOR_SECRET_FILE"):
        assert i.shared_secret() == b"\xff\xfe"


@pytest.mark.parametrize("said", [b"\xff\xfe", b"", b"tcp://a:1 tcp://b", b"http://a:1", b"tcp://a:1 " * 65])
def test_what_anybody_writes_into_torchruns_store_is_one_sentence(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def wait(self, keys: list[str], timeout: object) -> None:
            pass

        def get(self, key: str) -> bytes:
            return said

    monkeypatch.setattr(torchrun, "_store", lambda *_: Store())
    with pytest.raises(StartError, match=r"what torchrun's store at h:1 says of where the master is are no addresses"):
        torchrun.look_up("h", 1, "run", 1.0)


def test_derived_keys_depend_on_the_secret_and_on_the_meeting_only() -> None:
    keys = i.derived(b"secret", "port 1")
    assert keys == i.derived(b"secret", "port 1")
    others = [i.derived(b"Secret", "port 1"), i.derived(b"secret", "port 2")]
    every = [pair[half] for k in (keys, *others) for pair in k for half in (0, 1)]
    assert len(set(every)) == len(every)
    assert all(len(key) == 40 for key in every)


def test_a_pair_comes_from_32_bytes() -> None:
    with pytest.raises(ValueError, match="32 bytes, not from 31"):
        curve_pair_of(bytes(31))
