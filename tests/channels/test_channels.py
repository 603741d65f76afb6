"""Several data channels in one session: ``dt.channels``, what is chosen, and that both ends follow."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest
import torch
from equal import same
from native_channel import NativeChannel
from telling import said

import disttensor as dt
from disttensor.runtime.channel import get_channel
from disttensor.runtime.channel.base import Capabilities, ChannelContext, Protection
from disttensor.runtime.channel.inproc import InprocChannel
from disttensor.runtime.channel.opened import maker
from disttensor.runtime.protocol.arguments import Addresses
from disttensor.session import channel_router, current

N = 3


class Watched(InprocChannel):
    """Notes what is sent by it."""

    name: ClassVar[str] = "watched"
    sent: ClassVar[list[tuple[int, int, int]]] = []

    def isend(self, tensor: torch.Tensor, peer: int, transfer: int):  # type: ignore[no-untyped-def]
        Watched.sent.append((self._rank, peer, tensor.numel()))
        return super().isend(tensor, peer, transfer)


class OnlyOnTheMaster(InprocChannel):
    """Nodes can't open it."""

    name: ClassVar[str] = "master-only"
    works: ClassVar[bool] = False

    @classmethod
    def unavailable(cls, rank: int) -> str:
        return "" if rank < 0 or cls.works else "nodes have no luck"


class Trusting(InprocChannel):
    """Authenticates nobody."""

    name: ClassVar[str] = "trusting"
    capabilities: ClassVar[Capabilities] = Capabilities(same_process=True)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    for cls in (Watched, OnlyOnTheMaster, Trusting, NativeChannel):
        dt.channels.register_channel(cls.name, cls)
    with dt.init_master_worker(nodes=N, launcher="inproc", simulate_cuda=2):
        yield


@pytest.fixture(autouse=True)
def afresh(session: None) -> Iterator[None]:
    Watched.sent.clear()
    yield
    dt.channels.reset()
    dt.synchronize()


def settled() -> list[tuple[int, int, int]]:
    dt.synchronize()
    found = sorted(Watched.sent)
    Watched.sent.clear()
    return found


def test_copies_go_by_what_was_selected() -> None:
    local = torch.arange(6.0)
    dt.channels.select("send", "watched")
    x = local.to("node:0")
    y = x.to("node:1")
    same(y, local)
    assert settled() == [(0, 1, 6)]
    dt.channels.select(["upload", "download"], "watched")
    x = local.to("node:2")
    assert settled() == [(-1, 2, 6)]
    same(x, local)
    assert torch.equal(dt.fetch(x.reshape(2, 3).t()).result(), local.reshape(2, 3).t())
    assert settled() == [(2, -1, 6)] * 2
    dt.channels.reset()
    same(local.to("node:0").to("node:1"), local)
    assert settled() == []


@pytest.mark.row("T19")
def test_by_size_and_device() -> None:
    dt.channels.select("send", "watched", min_bytes=32, max_bytes=64)
    for n in (7, 8, 15, 16):
        torch.ones(n, device="node:0").to("node:1")
    assert settled() == [(0, 1, 8), (0, 1, 15)]
    dt.channels.reset()
    dt.channels.select("send", "watched", device="cpu")
    for a, b in (("cpu", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:0")):
        torch.ones(len(a) + len(b), device=dt.device(0, a)).to(dt.device(1, b))
    assert settled() == [(0, 1, 6), (0, 1, 9), (0, 1, 9)]


@pytest.mark.row("T19")
def test_what_is_selected_later_counts_more() -> None:
    dt.channels.select("*", "watched")
    dt.channels.select("send", "inproc")
    same(torch.ones(3).to("node:0").to("node:1"), torch.ones(3))
    assert settled() == [(-1, 0, 3), (1, -1, 3)]


@pytest.mark.row("T19")
def test_by_span_and_by_whether_it_is_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 2 is on another host here, as far as its name goes."""
    away = current.session().nodes[2]
    monkeypatch.setattr(away.connection, "hello", msgspec.structs.replace(away.hello, host="another-host"))
    dt.channels.select("send", "watched", span="hosts")
    for source, target in ((0, 1), (0, 2), (2, 1)):
        torch.ones(3, device=f"node:{source}").to(f"node:{target}")
    assert settled() == [(0, 2, 3), (2, 1, 3)]
    dt.channels.select("send", "inproc")
    dt.channels.select(["upload", "send"], "watched", span="host")
    torch.ones(4).to("node:0").to("node:1")
    torch.ones(4).to("node:2")
    assert settled() == [(-1, 0, 4), (0, 1, 4)]
    dt.channels.reset()
    near, all_of_them = ([torch.ones(5, device=f"node:{k}") for k in ranks] for ranks in ((0, 1), range(N)))
    dt.channels.select("all_reduce", "watched", span="host", async_op=True)
    dt.all_reduce(near)
    dt.all_reduce(all_of_them, async_op=True)
    assert settled() == []
    dt.all_reduce(near, async_op=True)
    assert {(a, b) for a, b, _ in settled()} == {(0, 1), (1, 0)}
    dt.channels.select("broadcast", "watched", span="hosts", async_op=False)
    devices = [line.split("  ")[1].strip() for line in re.sub(" {2,}", "  ", repr(dt.channels.selected())).splitlines()]
    assert devices == ["device", "any, several hosts, sync", "any, one host, async", "any"]
    for words, options in (
        ("span is 'host', 'hosts' or None for both, not 'rack'", {"span": "rack"}),
        ("async_op is True, False or None for both, not 1", {"async_op": 1}),
        ("async_op is what collectives have; upload and send have none", {"async_op": True}),
    ):
        with pytest.raises(ValueError, match=words):
            dt.channels.select(["upload", "all_reduce", "send"], "watched", **options)  # type: ignore[arg-type]


@pytest.mark.row("T18", "T19", "T22")
def test_collectives_and_their_algorithms() -> None:
    xs = [torch.full((1000,), float(k), device=f"node:{k}") for k in range(N)]
    dt.channels.select("all_reduce", "watched", min_bytes=1000)
    dt.all_reduce(xs)
    assert settled()
    small = [torch.ones(2, device=x.device) for x in xs]
    dt.all_reduce(small)
    dt.broadcast(xs, src=0)
    assert settled() == []
    assert xs[1].tolist() == [3.0] * 1000
    dt.channels.select("all_reduce", algorithm="ring")
    dt.all_reduce(xs)
    ring = settled()
    assert {(a, b) for a, b, _ in ring} == {(0, 1), (1, 2), (2, 0)}
    dt.all_reduce(xs, algorithm="tree")
    assert settled() != ring
    dt.channels.reset()
    dt.channels.select("all_reduce", "watched", algorithm=dt.collectives.Way("tree", 1))  # both by one call
    dt.all_reduce(xs)
    assert {(a, b) for a, b, _ in settled()} == {(2, 1), (1, 0), (0, 1), (1, 2)}
    dt.channels.select("sendreceive", "watched")
    dt.collectives.sendreceive(xs, async_op=True).wait()  # its end is told by the session's own channel
    assert settled() == [(k, (k + 1) % N, 1000) for k in range(N)]


@pytest.mark.row("T22", "T29", "T30")
def test_without_a_word_collectives_go_within_hosts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 is on another host here, as far as its name goes; a split into one group is flat."""
    dt.channels.select("*", "watched")
    away = current.session().nodes[0]
    monkeypatch.setattr(away.connection, "hello", msgspec.structs.replace(away.hello, host="another-host"))
    group = dt.collectives.new_group()
    assert [part.nodes for part in group.by_host().values()] == [(0,), (1, 2)]
    assert [part.nodes for part in group.levels()["host"].values()] == [(0,), (1, 2)]
    xs = [torch.full((1001,), float(k), device=f"node:{k}") for k in range(N)]
    settled()
    pairs = []
    for call in (
        lambda: dt.all_reduce(xs),
        lambda: dt.broadcast(xs, 0),
        lambda: dt.all_reduce(xs, group=group.split([0] * N), algorithm="all"),
        lambda: dt.broadcast(xs, 0, group.split([0] * N)),
    ):
        call()
        pairs.append({(a, b) for a, b, _ in settled()})
    by_hosts = {(2, 1), (1, 0), (0, 1), (1, 2)}  # the first of each host talks for it
    flat = {(a, b) for a in range(N) for b in range(N) if a != b}
    assert pairs == [by_hosts, {(0, 1), (1, 2)}, flat, {(0, 1), (0, 2)}]
    assert [x[7].item() for x in xs] == [9.0] * N


@pytest.mark.row("T22")
def test_the_chunk_of_a_way_is_the_size_of_messages() -> None:
    dt.channels.select("*", "watched")
    for chunk, most in ((1 << 20, 334), (400, 100), (40, 10)):
        xs = [torch.full((1000,), float(k), device=f"node:{k}") for k in range(N)]
        settled()
        dt.all_reduce(xs, algorithm=dt.collectives.Way("ring", chunk=chunk))
        sizes = [n for _, _, n in settled()]
        assert most * 0.8 < max(sizes) <= most
        assert sum(sizes) == 2 * (N - 1) * 1000  # each part goes around the ring, less a step, twice
        assert xs[1].tolist() == [3.0] * 1000


def test_auto_takes_the_collectives_of_gpus_where_each_tensor_has_one_of_its_own(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    router = current.session().router
    monkeypatch.setattr(channel_router, "BEST", "native")
    monkeypatch.setattr(router, "automatic", True)
    xs = {(node, gpu): torch.ones(3, device=dt.device(node, gpu)) for node in range(2) for gpu in ("cuda:0", "cpu")}
    other = torch.ones(3, device=dt.device(1, "cuda:1"))
    for x in (*xs.values(), other):
        monkeypatch.setattr(x._place, "kernels", x._place.name.partition(":")[0])

    def native(*tensors: torch.Tensor, **more: object) -> bool:
        NativeChannel.calls.clear()
        dt.all_reduce(tensors, **more)
        dt.synchronize()
        return bool(NativeChannel.calls)

    assert native(xs[0, "cuda:0"], other)
    assert not native(xs[0, "cuda:0"], xs[1, "cuda:0"])  # of one host: they are one GPU
    assert not native(xs[0, "cpu"], other)
    assert not native(xs[0, "cpu"], xs[1, "cpu"])
    assert not native(xs[0, "cuda:0"], other, algorithm="ring")
    assert not native(xs[0, "cuda:0"].to(torch.int16), other.to(torch.int16))  # which that channel doesn't have
    dt.channels.select("all_reduce", "inproc")
    assert not native(xs[0, "cuda:0"], other)


def test_on_streams_and_in_order() -> None:
    """One peer, two channels, two streams: each transfer meets its own."""
    dt.channels.select("send", "watched", min_bytes=4096)
    streams = [dt.Stream(node=0), dt.Stream(node=0)]
    made = []
    for i in range(40):
        with dt.stream(streams[i % 2]):
            x = torch.full((2000 if i % 3 else 3,), float(i), device="node:0")
            made.append((x + 1).to(f"node:{1 + i % 2}"))
    for i, y in enumerate(made):
        assert y.eq(i + 1).all(), i
    assert len(settled()) == sum(1 for i in range(40) if i % 3)


def test_graphs_keep_what_was_chosen_at_the_recording() -> None:
    x = torch.ones(4, device="node:0")
    xs = [torch.full((5,), float(k), device=f"node:{k}") for k in range(N)]
    dt.channels.select("send", "watched")
    g = dt.Graph()
    with dt.graph(g):
        dt.channels.select("reduce", "watched")
        y = (x + 1).to("node:1") * 2
        dt.collectives.reduce(xs, dst=0)
    dt.channels.reset()
    for _ in range(3):
        g.replay()
    same(y, torch.full((4,), 4.0))
    assert xs[0].tolist() == [9.0] * 5
    found = settled()
    assert found.count((0, 1, 4)) == 3
    assert len(found) > 3
    dt.channels.select("send", "watched")  # and one that was recorded without stays without
    with dt.graph(h := dt.Graph()):
        z = y + 1
    h.replay()
    same(z, torch.full((4,), 5.0))


def test_poison_goes_by_any_channel() -> None:
    dt.channels.select("*", "watched")
    table = torch.ones(3, 2, device="node:0")
    bad = torch.nn.functional.embedding(torch.tensor([7]).to("node:0"), table)
    away = bad.to("node:1")
    with pytest.raises(IndexError):
        away.cpu()
    xs = [bad[0], *(torch.ones(2, device=f"node:{k}") for k in (1, 2))]
    ys = [torch.empty(2, device=f"node:{k}") for k in range(N)]
    dt.all_reduce(xs, out=ys)
    with pytest.raises(IndexError):
        ys[2].cpu()


def test_mistakes_are_raised_here() -> None:
    select = dt.channels.select
    for wrong, text in (
        (lambda: select("sned", "watched"), "no operation 'sned'; there are upload"),
        (lambda: select("send", "watched", device="tpu"), "'cpu', 'cuda'"),
        (lambda: select("send", "nonsense"), "unknown data channel 'nonsense'; known channels: auto, gloo, inproc"),
        (lambda: select("send", "watched", min_bytes=5, max_bytes=5), "no size"),
        (lambda: select("send"), "name a channel"),
        (lambda: select("send", algorithm="ring"), "send has no algorithm 'ring'"),
        (lambda: select("all_reduce", algorithm="rign"), "all_reduce has no algorithm 'rign'; it has all, doubling"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()
    assert len(dt.channels.selected()) == 0


def test_a_channel_that_nodes_cannot_open() -> None:
    for _ in range(2):
        with pytest.raises(dt.DisttensorError, match=r"'master-only' can't be used here: nodes have no luck") as error:
            dt.channels.select("send", "master-only")
        assert f"issued: {__file__}" in said(error.value)
        dt.synchronize()  # it is not told again
    assert not dt.channels.selected()
    OnlyOnTheMaster.works = True
    try:
        dt.channels.select("send", "master-only")
        same(torch.ones(3).to("node:0").to("node:1"), torch.ones(3))
    finally:
        OnlyOnTheMaster.works = False


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from disttensor.runtime.channel import registry

    monkeypatch.setitem(registry._BUILTIN, "mympi", "absent_library.channel:Channel")
    monkeypatch.setitem(registry._EXTRAS, "absent_library", "mpi")
    with pytest.raises(ImportError, match=r"'mympi' needs absent_library.*pip install 'disttensor\[mpi\]'"):
        dt.channels.select("send", "mympi")
    entry = dt.channels.available()["send", "cpu", "mympi"]
    assert entry.state == "unavailable"
    assert "absent_library" in entry.why
    current.session().router._unusable.pop("mympi")


@pytest.mark.row("T21", "G1")
def test_available() -> None:
    table = dt.channels.available()
    assert table["send", "cpu", "inproc"] == ("native", "")
    assert table["all_reduce", "cuda", "tcp"] == ("available", "")
    bad = table["barrier", "cpu", "master-only"]
    assert not bad
    assert bad == ("unavailable", "node 0: nodes have no luck")
    text = repr(table)
    assert text.splitlines()[0].split()[:3] == ["op", "device", "auto"]
    assert "master-only, cpu: node 0: nodes have no luck" in text


@pytest.mark.row("T20")
def test_selected_prints_as_a_table() -> None:
    dt.channels.select("send", "watched", device="cuda", min_bytes=1024)
    dt.channels.select("all_reduce", algorithm=dt.collectives.Way("tree", base=4), max_bytes=4096)
    assert repr(dt.channels.selected()).splitlines() == [
        "op          device  bytes        channel   algorithm",
        "all_reduce  any     below 4,096  as below  tree",
        "send        cuda    from 1,024   watched   by size",
        "*           any     any          inproc    by size",
    ]


def test_between_hosts_only_what_authenticates(monkeypatch: pytest.MonkeyPatch) -> None:
    router = current.session().router
    assert router.forbidden(Capabilities()) == ""
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    assert "trusted_network=True" in router.forbidden(Capabilities())
    assert "one host" in router.forbidden(Capabilities(same_host=True, authenticated=True))
    assert router.forbidden(Capabilities(authenticated=True, encrypted=True)) == ""
    assert "it cannot encrypt" in router.forbidden(Capabilities(authenticated=True))
    with pytest.raises(
        ValueError,
        match=r"'trusting' must not be used here: it authenticates nobody, and the nodes are on .*another-host",
    ):
        dt.channels.select("send", "trusting")
    monkeypatch.setattr(router, "protection", Protection(trusted=True))
    assert router.forbidden(Capabilities()) == ""


ENCRYPTS = Capabilities(authenticated=True, encrypted=True, checksums=True)
NAMES_BOTH = r"encrypt=True.*trusted_network=True"


def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")


def two_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cloned machines: their names are one, their addresses are not."""
    channel = current.session().router.data[0]
    monkeypatch.setattr(type(channel), "address", lambda self: "10.9.8.7:41", raising=False)
    for node in current.session().nodes:
        theirs = msgspec.structs.replace(node.hello, addresses=Addresses("10.9.8.6:42", ""))
        monkeypatch.setattr(node.connection, "hello", theirs)


@pytest.mark.parametrize("apart", [two_hosts, two_of_one_name])
@pytest.mark.parametrize(
    ("protection", "why"),
    [
        (Protection(), ""),
        (Protection(encrypt=True), ""),
        (Protection(encrypt=False), rf"in clear, as encrypt=False was asked for.*{NAMES_BOTH}"),
        (Protection(encrypt=False, trusted=True), ""),
        (Protection(trusted=True), ""),
        (Protection(encrypt=True, trusted=True), ""),
    ],
    ids=str,
)
def test_between_hosts_in_clear_only_on_a_trusted_network(
    monkeypatch: pytest.MonkeyPatch, apart: Callable[..., None], protection: Protection, why: str
) -> None:
    router = current.session().router
    monkeypatch.setattr(router, "protection", protection)
    assert router.forbidden(ENCRYPTS) == ""
    apart(monkeypatch)
    found = router.forbidden(ENCRYPTS)
    assert re.search(why, found)
    assert bool(found) == bool(why)


@pytest.mark.parametrize("protection", [Protection(), Protection(encrypt=True)], ids=str)
def test_whoever_cannot_encrypt_is_named(monkeypatch: pytest.MonkeyPatch, protection: Protection) -> None:
    router, node = current.session().router, current.session().nodes[1]
    monkeypatch.setattr(router, "protection", protection)
    two_hosts(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(
            node.connection, "hello", msgspec.structs.replace(node.hello, no_cipher="it is not installed there")
        )
        why = router.forbidden(ENCRYPTS)
        assert re.search(
            rf"has to be encrypted, and node 1 \(.*\) cannot: it is not installed there.*{NAMES_BOTH}", why
        )
        monkeypatch.setattr(socket, "gethostname", lambda: node.hello.host)
        assert bool(router.forbidden(ENCRYPTS)) == bool(protection.encrypt)
    two_hosts(monkeypatch)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    why = router.forbidden(ENCRYPTS)
    assert re.search(r"this process cannot: .*pip install 'disttensor\[encrypt\]'.*trusted_network=True", why)


@pytest.mark.parametrize("name", ["gloo", "mpi", "nccl"])
def test_libraries_cannot_protect_and_refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With one sentence, which says which channels can; on one host and on a trusted network too."""
    router = current.session().router
    for protection, lacks in ((Protection(encrypt=True), "encrypt what"), (Protection(checksum=True), "no checksums")):
        for trusted in (False, True):
            monkeypatch.setattr(router, "protection", replace(protection, trusted=trusted))
            with pytest.raises(ValueError, match=rf"{name!r} must not be used here: .*{lacks}.*'auto' and 'tcp'"):
                router.check(name)
            make = maker(ChannelContext(0, "job", "127.0.0.1", protection=router.protection))
            with monkeypatch.context() as patch:
                patch.setattr(get_channel(name), "unavailable", classmethod(lambda cls, rank: ""))
                with pytest.raises(dt.DisttensorError, match=rf"{name!r} can't be used here: .*{lacks}"):
                    make(name, 1, False)
    monkeypatch.setattr(current, "_session", None)
    monkeypatch.setattr(get_channel(name), "unavailable", classmethod(lambda cls, rank: ""))
    with pytest.raises(ValueError, match=rf"{name!r} must not be used here: encrypt=True .* cannot encrypt"):
        dt.init_master_worker(name, nodes=1, encrypt=True)


def test_the_extra_is_named_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_session", None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ImportError) as caught:
        dt.init_master_worker("tcp", nodes=1, encrypt=True)
    assert str(caught.value) == (
        "encrypt=True: the package cryptography is not installed: pip install 'disttensor[encrypt]'"
    )
    with dt.init_master_worker(nodes=1, launcher="inproc", encrypt=True):  # nothing leaves the process
        assert torch.ones(3).to("node:0").sum().item() == 3


def test_flags_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_session", None)
    for name in ("encrypt", "checksum", "trusted_network"):
        with pytest.raises(TypeError, match=f"{name} is True or False, not 'no'"):
            dt.init_master_worker(nodes=1, **{name: "no"})


def test_on_several_hosts_a_session_begins_with_trust_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_session", None)
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name.replace("MainThread", "node 0"))

    def start(trusted: bool | None = None) -> None:
        with dt.init_master_worker("trusting", nodes=2, launcher="inproc", trusted_network=trusted):
            same(torch.ones(3).to("node:0").to("node:1"), torch.ones(3))

    for trusted in (None, False):
        with pytest.raises(
            ValueError,
            match=r"'trusting' must not be used here: it authenticates nobody.* node 0, node 1.*trusted_network=True",
        ):
            start(trusted)
    start(True)
    monkeypatch.setenv("DISTTENSOR_TRUSTED_NETWORK", "1")
    start()
    with pytest.raises(ValueError, match="trusted_network"):
        start(False)


def test_a_backend_that_does_not_work_is_refused_before_nodes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_session", None)
    monkeypatch.setattr(Trusting, "unavailable", classmethod(lambda cls, rank: "it was not started by mpiexec"))
    with pytest.raises(dt.DisttensorError, match="'trusting' can't be used here: it was not started by mpiexec"):
        dt.init_master_worker("trusting", nodes=2)
    with pytest.raises(ValueError, match="'inproc' must not be used here: it is for nodes that are threads"):
        dt.init_master_worker("inproc", nodes=1)


def test_a_forked_child_opens_nothing() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            threads = threading.active_count()
            with pytest.raises(dt.errors.ForkError):
                dt.channels.select("send", "tcp")
            os.write(write, b"fine" if threading.active_count() == threads else b"a thread")
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert os.read(read, 9) == b"fine"
    os.close(read)


def test_without_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_session", None)
    table = dt.channels.available()
    assert table["send", "cpu", "tcp"]
    for call in (lambda: dt.channels.select("send", "tcp"), dt.channels.reset, dt.channels.selected):
        with pytest.raises(dt.DisttensorError, match="init_master_worker"):
            call()


@pytest.mark.row("T21", "G1")
def test_what_a_channel_of_gpus_only_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trusting, "capabilities", Capabilities(frozenset({"cuda"}), frozenset({"reduce"})))
    table = dt.channels.available()
    assert table["send", "cpu", "trusting"] == ("not implemented", "")
    assert not table["send", "cpu", "trusting"]
    assert table["reduce", "cuda", "trusting"].state == table["upload", "cuda", "trusting"].state == "native"
    assert table["all_reduce", "cuda", "trusting"].state == "available"
