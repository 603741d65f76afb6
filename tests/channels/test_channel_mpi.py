"""The data channel "mpi", with MPICH and with Open MPI: what every channel promises, and collectives that MPI does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from mpi_kit import KINDS, ROOT, Mpi, dedented
from variants import variants

pytestmark = pytest.mark.mpi


@pytest.fixture(params=KINDS)
def mpi(request: pytest.FixtureRequest, tmp_path: Path) -> Mpi:
    return Mpi(request.param, tmp_path)


def test_conformance(mpi: Mpi) -> None:
    """All peers in one process, which sends to itself by MPI."""
    text = """
    from channel_kit import ranked
    from disttensor.runtime.host import mpi_env as mpi
    from disttensor.runtime.contracts.data_channel import check_data_channel
    world = mpi.world()
    check_data_channel(lambda n: ranked("mpi", range(-1, n - 1)), (2, 3))
    if not world.abandoned:
        world.mpi.Finalize()
    print("done")
    """
    done = mpi.run(dedented(text), n=1, dtrun=False)
    assert done.stdout == "done\n", done.stderr


#: Every collective against local torch, by MPI and by our own algorithms, for all ranks and for some.
COLLECTIVES = """
    import torch
    import disttensor as dt
    from disttensor.runtime.channel.mpi.group import REDUCES

    dt.init_master_worker()
    n = dt.session.node_count()

    def random(k, size, dtype):
        return (torch.randn(size, generator=torch.Generator().manual_seed(k)) * 4).to(dtype)

    def everything(nodes, size, dtype, op):
        group = dt.collectives.new_group(nodes)
        here = [random(k, size, dtype) for k in nodes]
        there = lambda: [x.to(f"node:{k}") for k, x in zip(nodes, here)]
        empty = lambda k, sizes: [torch.zeros(s, dtype=dtype, device=f"node:{k}") for s in sizes]
        if op is not None:
            total = torch.stack(here).to(torch.float64 if dtype.is_floating_point else torch.int64)
            total = total.amax(0) if op == dt.collectives.ReduceOp.MAX else total.sum(0)
            total = (total / len(nodes) if op == dt.collectives.ReduceOp.AVG else total).to(dtype)
            xs = there()
            dt.all_reduce(xs, op, group)
            ys = there()
            dt.collectives.reduce(ys, nodes[-1], op, group)
            outs = [x[:0] for x in xs] if not size else empty(nodes[0], [size])
            for x in [*xs, ys[-1]]:
                torch.testing.assert_close(x.cpu(), total)
            assert torch.equal(ys[0].cpu(), here[0])
            lists = [[(random(10 * i + j, size, dtype)).to(f"node:{k}") for j in nodes] for i, k in enumerate(nodes)]
            outs = [empty(k, [size])[0] for k in nodes]
            dt.collectives.reduce_scatter(outs, lists, dt.collectives.ReduceOp.SUM, group)
            for j, out in enumerate(outs):
                want = torch.stack([random(10 * i + nodes[j], size, dtype) for i in range(len(nodes))]).sum(0)
                torch.testing.assert_close(out.cpu(), want.to(dtype))
        xs = there()
        dt.broadcast(xs, nodes[-1], group)
        assert all(torch.equal(x.cpu(), here[-1]) for x in xs)
        sizes = [size + k for k in range(len(nodes))]  # of other lengths
        here = [random(k, s, dtype) for k, s in zip(nodes, sizes)]
        lists = [empty(k, sizes) for k in nodes]
        dt.all_gather(lists, there(), group)
        for outs in lists:
            assert all(torch.equal(out.cpu(), x) for out, x in zip(outs, here))
        outs = empty(nodes[-1], sizes)
        dt.collectives.gather(there(), outs, nodes[-1], group)
        assert all(torch.equal(out.cpu(), x) for out, x in zip(outs, here))
        back = [empty(k, [s])[0] for k, s in zip(nodes, sizes)]
        dt.collectives.scatter(back, [x.to(f"node:{nodes[0]}") for x in here], nodes[0], group)
        assert all(torch.equal(out.cpu(), x) for out, x in zip(back, here))
        given = [[random(10 * i + j, size, dtype).to(f"node:{k}") for j in nodes] for i, k in enumerate(nodes)]
        lists = [empty(k, [size] * len(nodes)) for k in nodes]
        dt.collectives.all_to_all(lists, given, group)
        for i, outs in enumerate(lists):
            assert all(torch.equal(out.cpu(), given[j][i].cpu()) for j, out in enumerate(outs))
        dt.collectives.barrier(group)
"""


@pytest.mark.row("T18")
def test_collectives(mpi: Mpi) -> None:
    text = """
    for nodes in ([0, 1, 2], [2, 0]):
        for dtype, op in [(torch.float32, "SUM"), (torch.float64, "AVG"), (torch.int32, "MAX"), (torch.bfloat16, None)]:
            for size in (1, 1000, 70_001):
                everything(nodes, size, dtype, op and dt.collectives.ReduceOp[op])
    a, b = (torch.randn(3, 70_000, dtype=torch.complex128).mT.to(f"node:{k}") for k in range(2))
    dt.broadcast([a, b], 0)
    assert torch.equal(a.cpu(), b.cpu())
    xs = [torch.ones(5, device=f"node:{k}") for k in range(n)]
    dt.all_reduce(xs, algorithm="native")
    dt.all_reduce(xs, dt.collectives.ReduceOp.MAX)  # what MPI has not with NaN: ours
    print([x.cpu().tolist() for x in xs])
    try:
        dt.all_reduce(xs, dt.collectives.ReduceOp.MAX, algorithm="native")
    except ValueError as e:
        print(e)
    """
    done = mpi.run(dedented(COLLECTIVES + text), n=4, options=("--backend", "mpi"))
    assert done.returncode == 0, done.stderr
    numbers, says = done.stdout.splitlines()
    assert numbers == f"{[[3.0] * 5] * 3}"
    assert says.startswith("the channel 'mpi' has no all_reduce of its own for torch.float32")


def test_large_tensors_go_by_mpi(mpi: Mpi) -> None:
    text = """
    import torch
    import disttensor as dt
    from disttensor.runtime.host import mpi_env as mpi

    with dt.init_master_worker():
        def count():
            def spy(kind):
                real = getattr(mpi.world().data, kind)
                def counted(*args):
                    counts[kind] += 1
                    return real(*args)
                return counted
            from disttensor.runtime.channel.mpi import channel as channel
            channel.counts = counts = {"Isend": 0, "Irecv": 0}
            class Spy:
                Isend, Irecv = staticmethod(spy("Isend")), staticmethod(spy("Irecv"))
                Get_group, Create_group = mpi.world().data.Get_group, mpi.world().data.Create_group
            object.__setattr__(mpi.world(), "data", Spy)
        for k in range(2):
            dt.run(count, node=k)
        count()
        def counts():
            from disttensor.runtime.channel.mpi import channel as channel
            return channel.counts
        def has_met():
            found = [counts(), *(dt.run(counts, node=k) for k in range(2))]
            return all(c["Isend"] >= 2 and c["Irecv"] >= 2 for c in found)
        big = torch.randn(500, 1000)
        while not has_met():  # by tcp, until both ends have heard that the other one has MPI
            x = big.to("node:0")
            assert torch.equal(x.mT.to("node:1").cpu(), big.mT)
        small = torch.randn(3).to("node:0").to("node:1").cpu()
        print(counts()["Isend"] >= 2, counts()["Irecv"] >= 2)
        print([c["Isend"] >= 2 and c["Irecv"] >= 2 for c in [dt.run(counts, node=k) for k in range(2)]])
        bad = torch.zeros(200_000, device="node:0")[torch.tensor([300_000]).to("node:0")].expand(400_000).to("node:1")
        try:
            bad.cpu()
        except IndexError as e:
            print("IndexError")
        a = torch.ones(200_000, device="node:0", dtype=torch.complex64).conj()
        print(torch.equal(a.to("node:1").cpu(), torch.ones(200_000, dtype=torch.complex64)))
    """
    done = mpi.run(dedented(text), options=("--backend", "mpi"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True", "[True, True]", "IndexError", "True"], done.stderr


def test_trouble_in_a_collective(mpi: Mpi) -> None:
    """One rank's part raises before MPI is asked: the others come out of it, and the next one works."""
    text = """
    import torch
    import disttensor as dt

    with dt.init_master_worker():
        def stumble():
            from disttensor.runtime.channel.mpi.group import MpiGroup
            real = MpiGroup._all_reduce
            def fail(*args):
                MpiGroup._all_reduce = real
                raise MemoryError("no room")
            MpiGroup._all_reduce = fail
        for _ in range(2):
            dt.run(stumble, node=1)
            xs = [torch.ones(100_000, device=f"node:{k}") for k in range(2)]
            dt.all_reduce(xs)
            try:
                dt.synchronize()
            except Exception as e:
                print(type(e).__name__, str(e).splitlines()[0])
            xs = [torch.ones(100_000, device=f"node:{k}") for k in range(2)]
            dt.all_reduce(xs)
            print([x.sum().item() for x in xs])
    """
    done = mpi.run(dedented(text), options=("--backend", "mpi"))
    lines = done.stdout.splitlines()
    assert lines[1::2][:2] == ["[200000.0, 200000.0]"] * 2, done.stdout + done.stderr
    assert "no room" in lines[0]


def test_another_backend_for_an_operation(mpi: Mpi) -> None:
    text = """
    import torch
    import disttensor as dt

    with dt.init_master_worker():
        print(dt.channels.available()["all_reduce", "cpu", "mpi"].state)
        dt.channels.select("all_reduce", "mpi")
        xs = [torch.ones(10, device=f"node:{k}") for k in range(2)]
        dt.all_reduce(xs)
        print(xs[0].tolist() == [2.0] * 10)
    """
    done = mpi.run(dedented(text))
    assert (done.returncode, done.stdout.splitlines()) == (0, ["native", "True"]), done.stderr


def test_without_mpiexec(mpi: Mpi) -> None:
    script = mpi.folder / "script.py"
    script.write_text("import disttensor as dt\ndt.init_master_worker('mpi')")
    command = [mpi.bin / "python", script]
    done = subprocess.run(command, env=mpi.environment, cwd=os.getcwd(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "disttensor.runtime.protocol.errors.DisttensorError: the data channel 'mpi' can't be used here: no mpiexec has "
        "started its processes: `mpiexec -n 5 dtrun --backend mpi script.py` does"
    )


@pytest.mark.parametrize("backend", variants(["auto", "shm", "tcp", "gloo"]))
def test_one_script_for_all(backend: str, tmp_path: Path) -> None:
    """The example of data-parallel training, with only that word changed; ``test_examples_mpi`` has it with "mpi"."""
    text = (ROOT / "examples/data_parallel.py").read_text()
    done = Mpi("mpich", tmp_path).run(text, "--backend", backend, "--nodes", "2", options=("--launcher", "mpi"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("same losses: True\n")
