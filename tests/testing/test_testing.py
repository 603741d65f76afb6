"""``disttensor.testing``: each helper sees, breaks or changes what it says, and leaves all as it was."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import disttensor as dt
from disttensor import testing
from disttensor.runtime.process.gc_pause import no_collection

#: Seconds for what takes a moment; longer is a hang.
SOON = 20

started, release = threading.Event(), threading.Event()


def hold() -> None:
    """Keeps an in-process node busy."""
    started.set()
    assert release.wait(SOON)


@pytest.fixture
def busy(clean: None) -> Iterator[None]:
    """Node 1 does nothing of what is issued until ``release``."""
    started.clear()
    release.clear()
    thread = threading.Thread(target=dt.run, args=(hold,), kwargs={"node": 1})
    thread.start()
    assert started.wait(SOON)
    yield
    release.set()
    thread.join(SOON)
    dt.synchronize()


def use(x: torch.Tensor) -> None:
    """Until it raises; the test's time limit ends it otherwise."""
    while True:
        x.sum().item()


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clean")
def test_a_log_names_what_crosses_by_node() -> None:
    x = torch.ones(4, device="node:1")
    x + x, x.sum().item()  # the operators have their names on the node
    x.to("node:0")  # which have been introduced to each other
    with testing.MessageLog() as log:
        y = x + x
        assert log[1].commands == ["Call aten::add.Tensor"]
        assert (y.sum().item(), log[0].commands) == (8.0, [])
        z = x.to("node:0")
    issued = [name for name in log[1].commands if name != "Free"]  # those ride along
    assert issued == ["Call aten::add.Tensor", "Call aten::sum", "Ask aten::_local_scalar_dense", "Send"]
    assert z.get_node() == 0  # type: ignore[attr-defined]
    assert log[0].commands == ["Recv"]
    assert log.commands == log[0].commands + log[1].commands
    assert log.questions == log[1].questions == ["Ask aten::_local_scalar_dense"]
    assert log.replies == log[1].replies == ["Answer"]
    assert (log[0].replies, log[1].reports, log.reports) == ([], 1, 1)
    assert log.messages == log[0].messages + log[1].messages >= 2
    assert log.bytes_sent == log[0].bytes_sent + log[1].bytes_sent > 0
    assert log.bytes_received == log[1].bytes_received > 0


@pytest.mark.usefixtures("clean")
def test_garbage_of_earlier_code_is_in_no_log() -> None:
    gc.collect()
    cycle: list[object] = [torch.ones(4, device="node:1")]
    cycle.append(cycle)
    del cycle
    with testing.MessageLog() as log:
        with testing.MessageLog():
            pass
        [[] for _ in range(10 * gc.get_threshold()[0])]  # after so many the collector would come
        x = torch.ones(4, device="node:1")
        total = x.sum()  # both are kept, so that no command frees what is the log's own
        assert total.item() == 4
        assert "Free" not in log[1].commands
    assert gc.isenabled()


@pytest.mark.usefixtures("clean")
def test_the_collector_stays_off_in_a_log_where_a_node_held_it_off_at_its_start() -> None:
    """As a node that is a thread does while it reads the generator's state."""
    with contextlib.ExitStack() as node:
        node.enter_context(no_collection())
        with testing.MessageLog():
            node.close()
            assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("clean")
def test_a_log_ends_with_its_block_and_logs_may_be_nested() -> None:
    x = torch.ones(4, device="node:1")
    with testing.MessageLog() as outer:
        x.add_(1)
        with testing.MessageLog() as inner:
            x.mul_(2)
        x.sub_(3)
    x.div_(2)
    dt.synchronize()
    calls = [name for name in outer.commands if name.startswith("Call")]
    assert calls == ["Call aten::add_.Tensor", "Call aten::mul_.Tensor", "Call aten::sub_.Tensor"]
    assert [name for name in inner.commands if name.startswith("Call")] == ["Call aten::mul_.Tensor"]
    assert "Sync" not in inner.commands


@pytest.mark.usefixtures("clean")
def test_a_log_sees_commands_for_streams_and_collectives() -> None:
    s = dt.Stream(1)
    x = torch.ones(4, device="node:1")
    with testing.MessageLog() as log, dt.stream(s):
        x.neg_()
    assert "On Call aten::neg_" in log[1].commands
    xs = [torch.ones(2, device=f"node:{k}") for k in range(2)]
    dt.all_reduce(xs, algorithm="ring")
    with testing.MessageLog() as log:
        dt.all_reduce(xs, algorithm="ring")
    assert log[0].commands == log[1].commands == ["Collective all_reduce ring"]
    s.synchronize()


def test_a_log_of_a_node_that_is_busy(busy: None) -> None:
    x = torch.ones(4, device="node:1")
    with testing.MessageLog(settle=False) as log:
        x.neg_()
    assert "Call aten::neg_" in log[1].commands
    assert log.reports == 0


# ---- what breaks -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("end", [testing.stop, testing.resume, testing.kill])
def test_threads_of_this_process_are_not_stopped(end: Callable[[int], None]) -> None:
    with pytest.raises(dt.DisttensorError, match="node 1 is a thread of this process"):
        end(1)


# ---- what there is ---------------------------------------------------------------------------------------------------


def test_what_waits_is_counted(busy: None) -> None:
    before = testing.queued(1)
    x = torch.zeros(4).to("node:1")
    work = dt.fetch(x)
    after = testing.queued(1)
    assert (after.fetches, after.questions, after.full) == (before.fetches + 1, before.questions, False)
    assert after.in_flight >= before.in_flight + 2  # a Recv and a Send
    assert testing.queued(0).fetches == 0
    assert testing.queued().fetches == after.fetches
    release.set()
    assert work.result().tolist() == [0] * 4
    dt.synchronize()
    end = testing.queued()
    assert end == testing.Queued(0, end.in_flight, 0, 0, False, 0, 0, 0)
    assert end.in_flight <= dt.session.node_count()  # the answers to synchronize


def test_uploads_and_questions_are_counted(busy: None) -> None:
    asking = threading.Event()
    with testing.at("wait", asking.set):
        torch.ones(20_000).to("node:1")
        assert testing.queued().uploads == 80_000
        thread = threading.Thread(target=dt.synchronize)
        thread.start()
        assert asking.wait(SOON)
    assert testing.queued(1).questions >= 2  # and that of the function that keeps it busy
    release.set()
    thread.join(SOON)
    dt.synchronize()
    assert (testing.queued().questions, testing.queued().uploads) == (0, 0)


@pytest.mark.usefixtures("clean")
def test_what_graphs_hold_is_counted() -> None:
    x, g = torch.ones(3, device="node:1"), dt.Graph()
    with dt.graph(g):
        x.add_(1)
    assert testing.queued(1).held == 1
    assert testing.queued(0).held == 0


@pytest.mark.usefixtures("clean")
def test_usage_counts_tensors_and_their_memory() -> None:
    kept = torch.ones(10, device="node:1")
    gc.collect()
    before = testing.usage(1)
    more = [torch.ones(10, device="node:1") + 1 for _ in range(3)]
    views = [t[2:] + 0 for t in more]
    assert testing.usage("node:1") == testing.usage(kept) == (before.tensors + 6, before.bytes + 3 * 40 + 3 * 32)
    del more, views
    assert testing.usage(kept) == before


@pytest.mark.usefixtures("clean")
def test_plans_are_counted_by_operator() -> None:
    x = torch.ones(3, 5, 7, device="node:1")
    before = testing.plans().get("aten::atan2", 0)
    torch.atan2(x, x), torch.atan2(x, x)
    assert testing.plans()["aten::atan2"] == before + 1
    torch.atan2(x[0], x[0])
    assert testing.plans()["aten::atan2"] == before + 2


# ---- limits, moments, places -----------------------------------------------------------------------------------------


def test_limits_hold_in_their_block(busy: None) -> None:
    window = testing.limit("window")
    x, full = torch.zeros(1, device="node:1"), threading.Event()

    def issue() -> None:
        for _ in range(5000):
            x.add_(1)

    with testing.limits(window=2000, slow=SOON), testing.at("window", full.set):
        assert testing.limit("window") == 2000
        thread = threading.Thread(target=issue)
        thread.start()
        assert full.wait(SOON)
        assert testing.queued(1).full
        # beyond it are a message of the issuer's, and one of the thread that sends what lies about
        assert testing.queued(1).in_flight <= 2000 + 2 * testing.limit("message")
        release.set()
        thread.join(SOON)
    assert testing.limit("window") == window
    assert not testing.queued(1).full
    assert x.item() == 5000


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("point", ["wait", "ask", "pack", "bury", "send", "receive", "acknowledge", "upload"])
def test_what_is_called_at_a_point(point: str, after: bool) -> None:
    x, seen = torch.ones(20_000).to("node:1"), list[int]()

    def program() -> None:
        x.add_(torch.ones(20_000).to("node:1")).sum().item()
        dt.synchronize()

    with testing.at(point, lambda: seen.append(1), after=after):
        program()
    assert seen
    n = len(seen)
    program()
    assert len(seen) == n


@pytest.mark.usefixtures("clean")
def test_what_is_raised_at_a_point_is_raised_there() -> None:
    class Mine(Exception):
        pass

    def fail() -> None:
        raise Mine

    x = torch.ones(3, device="node:1")
    with testing.at("ask", fail), pytest.raises(Mine):
        x.sum().item()
    assert x.sum().item() == 3


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_place_that_is_taken_for_cuda(device: str) -> None:
    x = torch.ones(3, 3).to(dt.device(1, device))
    assert _autocast_dtype(x) == torch.float32  # as of a CPU, where a dot product is not cast
    with testing.as_cuda(x.device):
        assert _autocast_dtype(x) == torch.bfloat16
    assert _autocast_dtype(x) == torch.float32


def _autocast_dtype(x: torch.Tensor) -> torch.dtype:
    with torch.autocast("node", dtype=torch.bfloat16):
        return torch.mv(x, x[0]).dtype


# ---- bad input, and the price ----------------------------------------------------------------------------------------

WITH_SESSION: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "cut": (ValueError, "node 7 does not exist; there are 3 nodes", lambda: testing.cut(7)),
    "kill": (ValueError, "node 7 does not exist", lambda: testing.kill(7)),
    "queued": (ValueError, "node -1 does not exist", lambda: testing.queued(-1)),
    "queued of bytes": (TypeError, "a node is an integer", lambda: testing.queued(b"node:1")),  # type: ignore[arg-type]
    "usage of a node": (ValueError, "node 7 does not exist", lambda: testing.usage(7)),
    "usage of a device": (RuntimeError, "node:99", lambda: testing.usage("node:99")),
    "usage of what is here": (ValueError, "cpu is no device of a node", lambda: testing.usage("cpu")),
    "limit": (ValueError, "there is no limit 'x'; there are window, message", lambda: testing.limit("x")),
    "limits": (ValueError, "there is no limit 'x'", lambda: testing.limits(window=1, x=2).__enter__()),
    "at": (ValueError, "there is no point 'x'; there are window, wait", lambda: testing.at("x", print).__enter__()),
    "as_cuda": (ValueError, "cpu is no device of a node", lambda: testing.as_cuda(torch.ones(1)).__enter__()),
}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", WITH_SESSION)
def test_bad_input_is_named(name: str) -> None:
    error, message, call = WITH_SESSION[name]
    window = testing.limit("window")
    with pytest.raises(error, match=message):
        call()
    assert testing.limit("window") == window


WITHOUT_SESSION = """
import torch, disttensor as dt
from disttensor import testing
calls = (
    testing.MessageLog, lambda: testing.cut(0), lambda: testing.stop(0), lambda: testing.resume(0),
    lambda: testing.kill(0), testing.queued, lambda: testing.usage(0), lambda: testing.at("send", print).__enter__(),
    lambda: testing.as_cuda(0).__enter__(),
)
for call in calls:
    try:
        call()
    except dt.DisttensorError as e:
        assert "call disttensor.init_master_worker() first" in str(e), e
    else:
        print("no error")
print(len(calls), testing.plans(), testing.limit("window"))
"""


def test_without_a_session(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(WITHOUT_SESSION)
    assert done.stdout == "9 {} 10000\n", done.stderr


IMPORTS = """
import sys, disttensor
disttensor.run, disttensor.nodes, __import__("torch").node.is_available()  # the front end
before = set(sys.modules)
print("disttensor.testing" in before)
import disttensor.testing
print(sorted(set(sys.modules) - before))
from disttensor.testing import check_launcher
print(check_launcher.__name__)
"""


def test_who_does_not_import_it_pays_nothing(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(IMPORTS)
    own = [f"disttensor.testing{part}" for part in ("", ".breaking", ".message_log")]
    assert done.stdout == f"False\n{own}\ncheck_launcher\n", done.stderr


@pytest.mark.usefixtures("clean")
def test_nothing_stays_wrapped() -> None:
    """What was patched is as it was: the classes, and what else objects have of their own."""
    from disttensor.session import current

    session = current.session()
    link, box = session.link, session.nodes[0].outbox
    patched = [session.questions, link.sender, link.waiting, link.hub, session.channel, box]

    def found() -> list[object]:
        return [*(dict(vars(type(owner))) for owner in patched), *(set(getattr(o, "__dict__", ())) for o in patched)]

    before = found()
    points = ["window", "wait", "ask", "pack", "bury", "send", "receive", "acknowledge", "upload"]
    for point in points:
        with testing.at(point, int), testing.MessageLog():
            assert found() != before
    assert found() == before
    assert not link.seam.sent.listeners + link.seam.reported.listeners
    assert os.getpid() == dt.nodes()[0]["pid"]
