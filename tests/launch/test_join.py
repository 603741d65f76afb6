"""Who may join a job, and what is said to those who may not. Agents are stubs: they knock, and do as they are told."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname

import msgspec
import pytest
from aftermath import within
from join_kit import Agent, agent_hello, jobs
from limits import HANG
from ports import free_port
from test_launch import bundles, collect

from disttensor.runtime.launch import Exited, Started
from disttensor.runtime.launch.rendezvous.credentials import derived, fresh, invite, read_connection_file
from disttensor.runtime.launch.rendezvous.rendezvous import find_rendezvous
from disttensor.runtime.launch.starters.join import JoinLauncher
from disttensor.runtime.launch.tree.control import Began, Ended, Ready, Refuse, Start
from disttensor.runtime.protocol.bundle import PROTOCOL, VERSION
from disttensor.runtime.protocol.errors import BrokenError, StartError
from disttensor.runtime.transport.tunnel import TunnelClient

pytestmark = pytest.mark.cold  # stubs import no torch, and some of this is about imports

LIMIT = HANG
Job = Callable[..., JoinLauncher]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user of its own, who has no secret yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DISTTENSOR_SECRET", raising=False)
    monkeypatch.delenv("DISTTENSOR_SECRET_FILE", raising=False)
    return tmp_path


@pytest.fixture
def job() -> Iterator[Job]:
    with jobs() as start:
        yield start


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def asked(*jobs: str, nodes: int = 0) -> list:
    return [msgspec.structs.replace(bundle, nodes=nodes or len(jobs)) for bundle in bundles(*jobs)]


def seated(agent: Agent) -> tuple[int, int, int]:
    """What the next node is told of its place: rank, local rank, how many are on its host."""
    bundle = agent.hears(Start).bundle
    return bundle.rank, bundle.local_rank, bundle.local_size


def test_nodes_join_by_a_connection_file(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "job"
    launcher = job(f"file://{path}", 2)
    assert launcher.capacity == 2
    launcher.start(asked("x", "y"))
    invitation = read_connection_file(path, LIMIT)
    with (
        Agent(invitation, agent_hello("a", first_rank=0)) as first,
        Agent(invitation, agent_hello("b", first_rank=1)) as second,
    ):
        assert seated(first) == (0, 0, 1)
        assert seated(second) == (1, 0, 1)
        until(lambda: not path.exists())  # nobody else may come, so nobody needs it
        second.wire.send_message(Ready(1))
        second.wire.send_message(Began(1, 4712))
        second.wire.send_message(Ended(1, 4712, 3, "exit code 3", ("its last words",)))
        assert collect(launcher, 2) == [
            Started(1, 4712, "b"),
            Exited(1, 4712, "exit code 3", 3, ("its last words",), "b"),
        ]


def test_places_that_agents_know(job: Job, tmp_path: Path) -> None:
    """Whoever has started them says which of a host they are, also of the last one, with which nodes are dealt."""
    path = tmp_path / "job"
    launcher = job(f"file://{path}", 2)
    launcher.start(asked("x", "y"))
    invitation = read_connection_file(path, LIMIT)
    own = [msgspec.structs.replace(agent_hello("a", first_rank=k), local_rank=0, local_size=1) for k in range(2)]
    with Agent(invitation, own[0]) as first, Agent(invitation, own[1]) as second:
        assert seated(first) == (0, 0, 1)
        assert seated(second) == (1, 0, 1)


@pytest.mark.row("G5")
def test_the_file_goes_with_the_job(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "job"
    launcher = job(f"file://{path}", 2)
    read_connection_file(path, LIMIT)
    launcher.stop(0)
    assert not path.exists()


@pytest.mark.row("G5")
def test_a_file_that_is_there_already(job: Job, tmp_path: Path) -> None:
    job(f"file://{tmp_path}/job", 2)
    invitation = read_connection_file(tmp_path / "job", LIMIT)
    second = job(f"file://{tmp_path}/job", 2)
    with pytest.raises(StartError, match=f"no node can join: .*is the connection file of process {invitation.pid} on"):
        collect(second, 1)


def test_a_zombie_has_ended(job: Job, tmp_path: Path) -> None:
    """Where nobody waits for a job's processes, as in many containers, its file is told from that of one that runs."""
    job(f"file://{tmp_path}/job", 1)
    invitation = read_connection_file(tmp_path / "job", LIMIT)
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    seen = invitation.over, msgspec.structs.replace(invitation, pid=ended).over
    os.waitpid(ended, 0)
    assert seen == (False, True)


def test_nodes_join_by_the_users_secret(job: Job) -> None:
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 1)
    launcher.start(asked("x"))
    with Agent(find_rendezvous(url).invitation(LIMIT), agent_hello()) as agent:
        assert seated(agent) == (0, 0, 1)


def test_a_secret_in_the_environment_is_for_the_root_only(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    number = free_port()
    monkeypatch.setenv("DISTTENSOR_SECRET", "swordfish")
    launcher = job(f"tcp://localhost:{number}", 1)
    assert "DISTTENSOR_SECRET" not in os.environ
    launcher.start(asked("x"))
    mine = invite(derived(b"swordfish", f"port {number}"), (f"tcp://localhost:{number}",))
    with Agent(mine, agent_hello()) as agent:
        assert seated(agent) == (0, 0, 1)


@pytest.mark.row("M23")
@pytest.mark.parametrize("url", ["tcp://[::1]:{}", "tcp://127.0.0.1:{}"])
def test_addresses(job: Job, url: str) -> None:
    url = url.format(free_port())
    launcher = job(url, 1)
    launcher.start(asked("x"))
    with Agent(find_rendezvous(url).invitation(LIMIT), agent_hello()) as agent:
        assert agent.hears(Start).bundle.address == "none"


def test_ranks_go_to_those_who_wish_for_them(job: Job) -> None:
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 4)
    launcher.start(asked("w", "x", "y", "z"))
    invitation = find_rendezvous(url).invitation(LIMIT)
    with Agent(invitation, agent_hello("a", 2, 2)) as late, Agent(invitation, agent_hello("b", 2, 0)) as early:
        assert sorted(seated(late) for _ in range(2)) == [(2, 0, 2), (3, 1, 2)]
        assert sorted(seated(early) for _ in range(2)) == [(0, 0, 2), (1, 1, 2)]


def test_nodes_of_one_host_are_told_apart_whoever_started_them(job: Job) -> None:
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 3)
    launcher.start(asked("x", "y", "z"))
    invitation = find_rendezvous(url).invitation(LIMIT)
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(Agent(invitation, agent_hello("a", 1, first_rank))) for first_rank in (1, 0, 2)]
        assert sorted(seated(agent)[1:] for agent in agents) == [(0, 3), (1, 3), (2, 3)]


# ---- who may not -----------------------------------------------------------------------------------------------------


@pytest.mark.fault(39)
def test_another_protocol_is_refused_with_both_versions(job: Job) -> None:
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 1)
    launcher.start(asked("x"))
    invitation = find_rendezvous(url).invitation(LIMIT)
    with Agent(invitation, None) as agent, within(1.0):
        agent.wire.send_message(agent_hello("old", protocol=PROTOCOL + 1))
        why = agent.hears(Refuse).why
        mine = f"disttensor {VERSION} (protocol {PROTOCOL})"
        assert why.startswith(f"old has disttensor {VERSION} (protocol {PROTOCOL + 1}), and {gethostname()}, where ")
        assert why.endswith(f" has {mine}: install one version on both")
    [event] = collect(launcher, 1)
    assert event.cause == why
    assert event.host == "old"


def test_one_too_many(job: Job) -> None:
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 2)
    invitation = find_rendezvous(url).invitation(LIMIT)
    with Agent(invitation, agent_hello("a", 2)):
        assert vacant(launcher, 2)  # it is in
        with Agent(invitation, agent_hello("b")) as third:
            assert third.hears(Refuse).why == "the job has 2 of its 2 nodes already, so 1 more are too many"


def test_a_rank_that_is_there_already(job: Job) -> None:
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 4)
    invitation = find_rendezvous(url).invitation(LIMIT)
    with Agent(invitation, agent_hello("a", 2)), Agent(invitation, agent_hello("b", 1, 1)):
        assert vacant(launcher, 3)  # they are in
        with Agent(invitation, agent_hello("c", 1, 1)) as third:
            assert third.hears(Refuse).why == "node 1 has joined already, from process 4711 on b"


def test_another_secret_opens_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    number = free_port()
    url = f"tcp://localhost:{number}"
    job(url, 1)
    stranger = invite(derived(b"another secret", f"port {number}"), (f"tcp://127.0.0.1:{number}",))
    with (
        Agent(find_rendezvous(url).invitation(LIMIT), agent_hello()),  # so the job listens there
        pytest.raises(BrokenError, match="does not prove to know this job's secret"),
    ):
        TunnelClient(stranger.addresses, (stranger.public_key, stranger.secret_key), stranger.server_key, 0.5)


@pytest.mark.fault(39)
def test_another_jobs_guest_is_refused_and_counted(job: Job, tmp_path: Path) -> None:
    launcher = job(f"file://{tmp_path}/job", 1)
    mine = read_connection_file(tmp_path / "job", LIMIT)
    with within(1.0), pytest.raises(BrokenError, match="refused the key: it is another job's"):
        TunnelClient(mine.addresses, fresh().guest, mine.server_key, LIMIT)
    launcher.start(asked("x"))
    assert "1 refused for another job's key" in missing(launcher, "refused")


def missing(launcher: JoinLauncher, word: str) -> str:
    """What there is to say of the nodes that have not come, as soon as it has this word in it."""
    deadline = time.monotonic() + LIMIT
    while word not in (text := launcher.missing([0])):
        assert time.monotonic() < deadline, text
        select.select([launcher], [], [], 1)
        launcher.events()
    return text


def test_who_is_missing_is_said(job: Job) -> None:
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 3)
    launcher.start(asked("x", "y", "z"))
    assert "none of 3 have" in missing(launcher, "none of")
    with Agent(find_rendezvous(url).invitation(LIMIT), agent_hello("a", 1, 1)):
        text = missing(launcher, "1 on a of 3 have, of nodes 0,2 nothing was heard")
    missing(launcher, "none of 3 have")  # it is gone, or the next one would make them three, and they begin
    with Agent(find_rendezvous(url).invitation(LIMIT), agent_hello("a", 2)):
        text = missing(launcher, "2 on a of 3 have;")
    assert f"the job listens at tcp://127.0.0.1:{url[-5:].strip(':')}" in text


# ---- who leaves ------------------------------------------------------------------------------------------------------


def test_an_agent_that_hangs_up_loses_its_nodes(job: Job) -> None:
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 1)
    launcher.start(asked("x"))
    with Agent(find_rendezvous(url).invitation(LIMIT), agent_hello("a")) as agent:
        agent.hears(Start)
        agent.wire.send_message(Began(0, 4712))
        assert collect(launcher, 1) == [Started(0, 4712, "a")]
    [event] = collect(launcher, 1)
    assert (event.rank, event.pid, event.host) == (0, 4712, "a")
    assert event.cause == "the connection with its agent has ended"


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("bomb-went-off",)


PICKLE = pickle.dumps(Bomb())
#: What one says that has the key, and no agent does. FramedSocket's frames begin with their lengths.
NONSENSE = {
    "noise": b"\xff" * 8,
    "a pickle": PICKLE * 10,
    "a pickle in a frame": len(PICKLE).to_bytes(4, "little") + PICKLE,
}


@pytest.mark.fault(34)
@pytest.mark.parametrize("said", NONSENSE)
def test_one_that_says_nonsense_is_lost_and_hurts_nobody(
    said: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 2)
    launcher.start(asked("x", "y"))
    invitation = find_rendezvous(url).invitation(LIMIT)
    with Agent(invitation, agent_hello("a", 1, 0)) as good, Agent(invitation, agent_hello("b", 1, 1)) as bad:
        good.hears(Start), bad.hears(Start)
        with within(1.0):
            os.write(bad.wire.fileno(), NONSENSE[said])
            [event] = collect(launcher, 1)
        assert event.host == "b"
        assert event.cause.startswith("what came was not an agent's: ")
        good.wire.send_message(Began(0, 4712))
        assert collect(launcher, 1) == [Started(0, 4712, "a")]
    assert not list(Path().iterdir())


def test_a_seat_that_is_free_again_is_told(job: Job) -> None:
    url = f"tcp://localhost:{free_port()}"
    launcher = job(url, 2, least=1)
    launcher.start(asked("x"))
    invitation = find_rendezvous(url).invitation(LIMIT)
    with Agent(invitation, agent_hello("a")) as first:
        first.hears(Start)
        assert vacant(launcher, 0)
        with Agent(invitation, agent_hello("b")):
            assert vacant(launcher, 1)
        assert vacant(launcher, 0)


def vacant(launcher: JoinLauncher, count: int) -> bool:
    """Waits until so many nodes more could be started."""
    deadline = time.monotonic() + LIMIT
    while launcher.vacant != count:
        assert time.monotonic() < deadline, launcher.vacant
        select.select([launcher], [], [], 1)
        launcher.events()
    return True
