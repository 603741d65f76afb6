"""What crosses the link between two hosts, and what happens when it is cut. For root, with iproute2: `make netns`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from two_hosts import run, why_not
from variants import variants

pytestmark = [pytest.mark.netns]

#: Bytes of each node's tensor.
N = 8 << 20

COUNTING = """
import json
import torch
import disttensor as dt
from two_hosts import crossed, hosts

BACKEND, NODES, N = {backend!r}, {nodes}, {N}
seen = {{}}

def count(name, call, *args, **kwargs):
    '''What crosses: the least of some runs, as a segment that the kernel drops is sent again.'''
    runs = []
    for _ in range(4):  # the first one makes connections
        dt.synchronize()
        before = *crossed(), crossed("lo")[0]
        call(*args, **kwargs)
        dt.synchronize()
        after = *crossed(), crossed("lo")[0]
        runs.append([b - a for a, b in zip(before, after)])
    seen[name] = [min(counts) for counts in zip(*runs)]

with hosts(NODES - 2, 2), dt.init_master_worker(BACKEND, nodes=NODES, threads=1):
    xs = [torch.full((N // 4,), float(k), device=f"node:{{k}}") for k in range(NODES)]
    ys = [torch.empty_like(x) for x in xs]
    count("all_reduce", dt.all_reduce, xs, out=ys)
    count("ring", dt.all_reduce, xs, out=ys, algorithm="ring")
    count("tree", dt.all_reduce, xs, out=ys, algorithm="tree")
    count("bfloat16", dt.all_reduce, xs, out=ys, transport=torch.bfloat16)
    total = NODES * (NODES - 1) / 2
    seen["sums"] = [bool(y.eq(total).all()) for y in ys]
    count("from the first", dt.broadcast, ys, 0)
    count("from the last", dt.broadcast, ys, NODES - 1)
    outs = [[torch.empty_like(x) for _ in xs] for x in xs]
    count("all_gather", dt.all_gather, outs, xs)
    hosts_of = dt.collectives.new_group().by_host()
    seen["hosts"] = {{name: list(group) for name, group in hosts_of.items()}}
    left = hosts_of["left"]
    count("on the left", dt.all_reduce, [xs[k] for k in left], out=[ys[k] for k in left])
print(json.dumps(seen))
"""

CROSSING = ("all_reduce", "ring", "tree", "from the first", "from the last", "all_gather", "on the left")

CUT = """
import torch
import disttensor as dt
from two_hosts import cut, hosts

with hosts(2, 1):
    dt.init_master_worker("tcp", nodes=3, threads=1, silence=(2, 4, 8))
    xs = [torch.ones(1000, device=f"node:{{k}}") for k in range(3)]
    dt.all_reduce(xs)
    dt.synchronize()
    cut("{end}")
    if {busy}:
        dt.all_reduce(xs)
    for k in (2, 0, 1):
        try:
            print(k, xs[k].sum().item())
        except dt.DisttensorError as error:
            print(k, type(error).__name__, str(error).splitlines()[0])
    rest = [torch.ones(1000, device=f"node:{{k}}") for k in (0, 1)]
    dt.all_reduce(rest)
    print(rest[0].sum().item(), [node["alive"] for node in dt.nodes()])
"""

CUT_MESH = """
import torch
import disttensor as dt
from two_hosts import cut, hosts

with hosts(2, 1):
    dt.init_master_worker("tcp", nodes=3, threads=1, silence=(2, 4, 8))
    mesh = dt.mesh(dp=3)
    rest = dt.mesh(dp=2, nodes=[0, 1])
    x = dt.meshes.from_shards(mesh, [torch.full((1000,), float(k)) for k in range(3)])
    y = dt.all_reduce(x, over="dp")
    print(y.sum().item())
    cut("{end}")
    if {busy}:
        z = dt.all_reduce(y, over="dp")
        y = y + 1
    try:
        print(y.sum().item())
    except dt.NodeLost as error:
        print("NodeLost", str(error).splitlines()[0], *error.__notes__)
    for rank in range(2):
        if {busy}:
            try:
                z.at(dp=rank).cpu()
            except dt.NodeLost as error:
                print("NodeLost", str(error).splitlines()[0])
        print(x.at(dp=rank).sum().item(), y.at(dp=rank).sum().item())
    print(dt.all_reduce(torch.ones(1000, device=rest.device), over="dp").sum().item(), [n["alive"] for n in dt.nodes()])
"""


MENDED = """
import time
import torch
import disttensor as dt
from two_hosts import cut, hosts, mend

with hosts(1, 1), dt.init_master_worker("tcp", nodes=2, threads=1):
    xs = [torch.ones(1 << 20, device=f"node:{k}") for k in range(2)]
    dt.all_reduce(xs)
    dt.synchronize()
    cut("right")
    for _ in range(3):
        dt.all_reduce(xs)
        xs[0].copy_(xs[1].to("node:0") - 1)
    time.sleep(2)  # this is how long it lasts
    mend("right")
    print([x.mean().item() for x in xs], [node["alive"] for node in dt.nodes()])
"""

CUT_FOR_A_WHILE = """
import threading, time
import torch
import disttensor as dt
from two_hosts import cut, hosts, mend

SECONDS, END, N = {seconds}, {end!r}, {n}
F = dt.collectives.functional

def twos():
    return [torch.full((N,), float(k + 1), device=f"node:{{k}}") for k in range(3)]
def far(x):
    return x.to("node:2")
def reduced_in_place():
    xs = twos()
    dt.all_reduce(xs, async_op=True)
    return xs
def permuted(x):
    return dt.collectives.permute_ranks(x, over="dp", by=1).shards()
def sent():
    target = torch.zeros(N, device="node:2")
    dt.collectives.send(twos()[1], target)
    return [target]
def said(channel, n):
    channel.put(n)
    return channel.get()
def through(node):
    return [dt.submit(said, dt.tasks.Channel(), node, node=node)]
def called(node):
    return [dt.submit(torch.add, torch.ones(N, device=f"node:{{node}}"), 1, node=node)]

#: Each begins something that needs the link, and waits for nothing; the values that it has to have.
WORK = {{
    "all_reduce": (lambda: F.all_reduce(twos()), [6] * 3),
    "all_reduce by a ring": (lambda: dt.all_reduce(twos(), algorithm="ring", out=twos()) or [], []),
    "all_reduce in place": (reduced_in_place, [6] * 3),
    "all_reduce of a mesh": (lambda: dt.all_reduce(dt.meshes.from_shards(mesh, twos()), over="dp").shards(), [6] * 3),
    "reduce": (lambda: [F.reduce(twos(), 2)], [6]),
    "broadcast": (lambda: F.broadcast(twos()[2], dt.collectives.new_group()), [3] * 3),
    "all_gather": (lambda: [x for row in F.all_gather(twos()) for x in row], [1, 2, 3] * 3),
    "gather": (lambda: F.gather(twos(), 0), [1, 2, 3]),
    "permuted": (lambda: permuted(dt.meshes.from_shards(mesh, twos())), [3, 1, 2]),
    "a copy there": (lambda: [far(twos()[0])], [1]),
    "a copy here": (lambda: [twos()[2].to("node:0")], [3]),
    "there and here": (lambda: [far(twos()[1]).mul(2).to("node:1")], [4]),
    "an upload": (lambda: [torch.full((N,), 7.0).to("node:2")], [7]),
    "a fetch": (lambda: [twos()[2].to("cpu", non_blocking=True)], [3]),
    "sent": (sent, [2]),
    "a channel": (lambda: through(2), [2]),
    "a function": (lambda: called(2), [2]),
}}

def value(made):
    if isinstance(made, torch.Tensor):
        return float(made.cpu().mean())
    result = made.result()
    return float(result.mean() if isinstance(result, torch.Tensor) else result)
def look(name, made, expected):
    try:
        found = [value(x) for x in made]
    except dt.NodeLost as error:
        return f"NodeLost {{error.rank}}"
    except Exception as error:
        return f"{{type(error).__name__}} {{str(error)[:300]}}"
    return "right" if found == [float(x) for x in expected] else f"{{found}}"
def seen(made):
    return {{name: look(name, made[name], expected) for name, (_, expected) in WORK.items()}}
def begun():
    return {{name: begin() for name, (begin, _) in WORK.items()}}

with hosts(2, 1):
    dt.init_master_worker({backend!r}, nodes=3, threads=1, **{options})
    mesh = dt.mesh(dp=3)
    print(sorted(set(seen(begun()).values())), flush=True)
    cut(END)
    threading.Timer(SECONDS, mend, (END,)).start()
    began = time.monotonic()
    try:
        made = begun()
    except dt.NodeLost:
        made = None
    wrong = {{name: how for name, how in seen(made).items() if how != "right"}} if made else "lost as it began"
    print(wrong, flush=True)
    while time.monotonic() < began + SECONDS + 0.5:
        time.sleep(0.1)
    alive = dt.nodes()[2]["alive"]
    print(alive, sorted(set(seen(begun()).values())) if alive else "", flush=True)
    dt.shutdown()  # raises no loss that it was told of
"""

CUT_IN_SILENCE = """
import time
import torch
import disttensor as dt
from two_hosts import cut, hosts, mend

with hosts(1, 1), dt.init_master_worker("tcp", nodes=2, threads=1, trusted_network=True):
    x, channel = torch.ones(3, device="node:1"), dt.tasks.Channel()
    y = x.to("node:0")
    dt.submit(dt.tasks.Channel.put, channel, 1, node=1).result()
    print(y.sum().item(), channel.get(), flush=True)
    time.sleep({before})  # nothing is under way, and the kernels have asked each other
    cut("{end}")
    time.sleep(13)  # this is how long it lasts
    mend("{end}")
    dt.submit(dt.tasks.Channel.put, channel, 2, node=1).result()
    print((x + 1).to("node:0").sum().item(), channel.get(), [node["alive"] for node in dt.nodes()])
"""

#: The left host's kernel resets its connections with the right one, again and again; not that for commands.
RESETS = """
import subprocess, threading, time
import torch
import disttensor as dt
from two_hosts import RIGHT, hosts

resets, over, N = 0, threading.Event(), {n}

def connections():
    listed = subprocess.run(["ss", "-Htn", "state", "established", "dst", RIGHT], capture_output=True, text=True)
    return {{tuple(line.split()[2:4]) for line in listed.stdout.splitlines()}}
def reset():
    global resets
    while not over.wait(0.2):
        for here, there in connections() - kept:
            done = subprocess.run(["ss", "-HtK", "src", here, "dst", there], capture_output=True, text=True)
            resets += bool(done.stdout.strip())

with hosts(2, 1), dt.init_master_worker("tcp", nodes=3, threads=1, trusted_network=True):
    kept = connections()  # that for commands: nothing has been copied yet
    assert kept
    thread = threading.Thread(target=reset)
    thread.start()
    wrong, rounds = [], 0
    while resets < 40 and rounds < {most}:
        rounds += 1
        xs = [torch.full((N,), float(k + rounds), device=f"node:{{k}}") for k in range(3)]
        sums = [torch.empty_like(x) for x in xs]
        dt.all_reduce(xs, out=sums)
        here = torch.full((N,), float(rounds))
        seen = xs[0].to("node:2"), here.to("node:2"), sums[2], xs[2].to("node:1"), xs[2]
        for x, expected in zip(seen, (rounds, rounds, 3 * rounds + 3, rounds + 2, rounds + 2)):
            try:
                if not bool(x.cpu().eq(expected).all()):
                    wrong.append((rounds, expected))
            except dt.DisttensorError as error:
                if "last bytes were on their way" not in str(error):
                    wrong.append(str(error))
    over.set()
    thread.join()
    print(resets, wrong, [node["alive"] for node in dt.nodes()])
"""

TRAINING = """
import runpy, sys
from two_hosts import hosts

sys.argv = [%r, "--nodes", "4"]
with hosts(2, 2):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

TRUST = """
import torch
import disttensor as dt
from two_hosts import hosts

with hosts(2, 2):
    for backend in ("gloo", "shm"):
        try:
            dt.init_master_worker(backend, nodes=4, threads=1)
        except ValueError as error:
            print(error)
    with dt.init_master_worker("gloo", nodes=4, threads=1, trusted_network=True):
        xs = [torch.full((100_000,), float(k)).to(f"node:{k}") for k in range(4)]
        dt.all_reduce(xs)
        dt.all_reduce(xs[1:3], algorithm="native")
        print([x.to("node:2").mean().item() for x in xs], xs[3].cpu().mean().item())
"""


LISTENED = """
import contextlib, socket, sys, threading
import torch
import disttensor as dt
from two_hosts import hosts

MARK = b"a tensor's bytes"

@contextlib.contextmanager
def listening():  # yields a list, which has in the end what crossed the link
    heard, ended = [], threading.Event()

    def listen():
        while True:
            try:
                heard.append(packets.recv(1 << 17))
            except TimeoutError:
                if ended.is_set():
                    return

    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as packets:
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        packets.bind(("left", 0))
        packets.settimeout(0.1)
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield heard
        finally:
            ended.set()
            thread.join()

with hosts(2, 1):
    for asked in ({}, {"encrypt": True}, {"checksum": True}, {"trusted_network": True}):
        with listening() as heard, dt.init_master_worker(nodes=3, threads=1, **asked):
            for n in (4, 8192):
                x = torch.tensor(list(MARK) * n, dtype=torch.uint8)
                moved = [x.to("node:2"), x.to("node:1").to("node:2"), x.to("node:0")]
                assert all(torch.equal(y.cpu(), x) for y in moved)
        print(asked, len(heard) > 50, any(MARK in packet for packet in heard))
    sys.modules["cryptography"] = None
    for asked in ({}, {"encrypt": False}):
        try:
            dt.init_master_worker(nodes=3, threads=1, **asked)
        except ValueError as error:
            print(error)
    with dt.init_master_worker(nodes=3, threads=1, encrypt=False, trusted_network=True):
        print(torch.ones(3, device="node:2").sum().item())
"""


@pytest.fixture(autouse=True, scope="module")
def possible() -> None:
    if missing := why_not():
        pytest.skip(f"no namespaces here: {missing}")


def counted(tmp_path: Path, **case: Any) -> dict[str, Any]:
    path = tmp_path / "program.py"
    path.write_text(COUNTING.format(**case, N=N))
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if " nodes share " not in line] == []
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def times(count: int) -> int:
    """How often N bytes; commands, messages' headers and what the kernel sent again are less than 2 % of it."""
    assert count % N < 0.02 * N, f"{count / N} times"
    return count // N


@pytest.mark.row("T30")
@pytest.mark.parametrize("backend", ["tcp", "auto"])
@pytest.mark.parametrize("right", variants([[3, 4], [2, 3]]), ids=["uneven", "even"])
def test_what_crosses_the_slow_link(tmp_path: Path, backend: str, right: tuple[int, int]) -> None:
    """Two nodes on the right, two or three on the left: an all_reduce moves as much as if each host were one node."""
    nodes = max(right) + 1
    seen = counted(tmp_path, backend=backend, nodes=nodes)
    left = nodes - 2
    assert seen["hosts"] == {"left": list(range(left)), "right": list(right)}
    assert seen["sums"] == [True] * nodes
    crossed = {name: tuple(map(times, seen[name][:2])) for name in CROSSING}
    assert crossed == {
        "all_reduce": (1, 1),
        "ring": (1, 1),
        "tree": (1, 1),
        "from the first": (1, 0),
        "from the last": (0, 1),
        "all_gather": (2 * left, 2 * left),  # not by hosts: every node has every other's from that one itself
        "on the left": (0, 0),
    }
    assert [times(2 * count) for count in seen["bfloat16"][:2]] == [1, 1]
    within = seen["on the left"][2]
    assert within < 0.05 * N if backend == "auto" else within >= N


CUTS = [("right", True), ("left", False), ("left", True), ("right", False)]


@pytest.mark.fault(23)
@pytest.mark.parametrize(("end", "busy"), variants(CUTS))
def test_the_link_is_cut(tmp_path: Path, busy: bool, end: str) -> None:
    """The node beyond it is lost; who waits for it gets an error, though no connection ends; the others go on."""
    path = tmp_path / "program.py"
    path.write_text(CUT.format(busy=busy, end=end))
    done = run(path)
    assert done.returncode == 0, done.stderr
    lost, *results, rest = done.stdout.splitlines()
    assert lost.startswith("2 NodeLost node 2 (host right, ")
    for k, line in enumerate(results):
        if busy:
            assert re.match(rf"{k} NodeLost node 2 ", line), line
        else:
            assert line == f"{k} 3000.0"
    assert rest == "2000.0 [True, True, False]"


@pytest.mark.fault(23)
@pytest.mark.parametrize(("end", "busy"), variants(CUTS))
def test_the_link_to_a_member_of_a_mesh_is_cut(tmp_path: Path, busy: bool, end: str) -> None:
    """The loss names its coordinates. The other ranks have what was issued before, and go on as a mesh of their own."""
    path = tmp_path / "program.py"
    path.write_text(CUT_MESH.format(busy=busy, end=end))
    done = run(path)
    assert done.returncode == 0, done.stderr
    before, lost, *ranks, rest = done.stdout.splitlines()
    assert before == "3000.0"
    if busy:
        waited = [line for line in ranks if line.startswith("NodeLost node 2 ")]
        assert len(waited) == 2
        ranks = [line for line in ranks if line not in waited]
    assert lost.startswith("NodeLost node 2 (host right, ")
    assert "it was dp=2 of the mesh (dp=3) of nodes 0, 1 and 2 cpu" in lost
    assert ranks == [f"{1000.0 * rank} {4000.0 if busy else 3000.0}" for rank in range(2)]
    assert rest == "2000.0 [True, True, False]"


@pytest.mark.fault(24)
def test_a_short_cut_harms_nobody(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(MENDED)
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[12.0, 13.0] [True, True]\n"


#: Cuts in seconds, and on which side of the limit of 15 s they are.
WHILES = [(1, "back"), (12, "back"), (5, "back"), (9, "back"), (11, "back"), (13, "back"), (16, "either"), (30, "lost")]


@pytest.mark.fault(23, 24)
@pytest.mark.parametrize(
    ("seconds", "then", "end", "backend", "options", "n"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if i > 1 else [], id=f"{case[0]} s-{name}")
        for i, (*case, name) in enumerate(
            [
                *((seconds, then, "right", "tcp", {"trusted_network": True}, 1000, "tcp") for seconds, then in WHILES),
                (12, "back", "left", "auto", {}, 1000, "encrypted"),
                (12, "back", "right", "auto", {"trusted_network": True}, 1 << 20, "large"),
                (12, "back", "left", "tcp", {"trusted_network": True}, 1 << 20, "large, at the script's end"),
                (12, "back", "right", "gloo", {"trusted_network": True}, 1000, "gloo"),
                (12, "back", "left", "gloo", {"trusted_network": True}, 1 << 20, "gloo, large"),
                (30, "lost", "right", "gloo", {"trusted_network": True}, 1 << 20, "gloo, large"),
            ]
        )
    ],
)  # fmt: skip
def test_a_link_that_is_back_before_the_limit_has_lost_nothing(
    tmp_path: Path, seconds: int, then: str, end: str, backend: str, options: dict[str, bool], n: int
) -> None:
    """Each collective, transfer and channel that is under way gives its value, or NodeLost; later ones work."""
    path = tmp_path / "program.py"
    path.write_text(CUT_FOR_A_WHILE.format(seconds=seconds, end=end, backend=backend, options=options, n=n))
    done = run(path)
    before, meanwhile, after = done.stdout.splitlines() or ["", "", ""]
    assert before == "['right']", done.stderr
    if then == "back":
        assert (meanwhile, after, done.returncode) == ("{}", "True ['right']", 0), done.stderr
        return
    assert set(re.findall(r"'(\w+) \d'|(lost as it began)", meanwhile)) <= {("NodeLost", ""), ("", "lost as it began")}
    assert "Error" not in meanwhile
    if then == "lost":
        assert "NodeLost 2" in meanwhile or "lost" in meanwhile
        assert after.startswith("False")
    assert after in ("False ", "True ['right']")
    assert done.returncode == 0, done.stderr


@pytest.mark.fault(24)
@pytest.mark.slow
@pytest.mark.parametrize(("end", "before"), [("right", 2.0), ("left", 4.6)])
def test_a_link_that_is_back_before_the_limit_costs_nobody_who_was_silent(
    tmp_path: Path, end: str, before: float
) -> None:
    """Not even where something was heard last just before the kernels would have asked each other."""
    path = tmp_path / "program.py"
    path.write_text(CUT_IN_SILENCE.format(end=end, before=before))
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3.0 1\n6.0 2 [True, True]\n"


@pytest.mark.fault(25)
@pytest.mark.parametrize("n", [1000, pytest.param(1_000_000, marks=pytest.mark.slow)], ids=["small", "large"])
def test_the_kernel_resets_data_connections(tmp_path: Path, n: int) -> None:
    """They come back; each copy and collective has its value, or says that its last bytes were on their way."""
    path = tmp_path / "program.py"
    path.write_text(RESETS.format(n=n, most=20_000))
    done = run(path)
    assert done.returncode == 0, done.stderr
    resets, rest = done.stdout.split(maxsplit=1)
    if resets == "0":
        pytest.skip("this kernel ends no connection for `ss -K`")
    assert rest == "[] [True, True, True]\n"


@pytest.mark.slow
def test_an_example_trains_on_both(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(TRAINING % str(ROOT / "examples" / "data_parallel.py"))
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "same losses: True"


def test_what_authenticates_nobody_needs_a_network_that_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(TRUST)
    done = run(path)
    assert done.returncode == 0, done.stderr
    gloo, shm, results = done.stdout.splitlines()
    for words in ("'gloo'", "authenticates nobody", "on left, right", "init_master_worker(trusted_network=True)"):
        assert words in gloo
    for words in ("'shm'", "for processes of one host", "on left, right"):
        assert words in shm
    assert results == "[6.0, 12.0, 12.0, 6.0] 6.0"


def test_tensors_cross_in_clear_on_a_trusted_network_only(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(LISTENED)
    done = run(path)
    assert done.returncode == 0, done.stderr
    *heard, missing, refused, result = done.stdout.splitlines()
    assert heard == [
        "{} True False",
        "{'encrypt': True} True False",
        "{'checksum': True} True False",
        "{'trusted_network': True} True True",
    ]
    switches = r".*encrypt=True.*init_master_worker\(trusted_network=True\)"
    assert re.match(rf"the data channel 'auto' must not .* left, right has to be .*\[encrypt\]{switches}", missing)
    assert re.match(rf"the data channel 'auto' must not .* left, right would be in clear{switches}", refused)
    assert result == "3.0"
