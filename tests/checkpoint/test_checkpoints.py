"""Checkpoints: what is saved from a node is what would be saved here, and loads anywhere."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from differential import Tied, batch, net
from equal import same
from homes import RANKS
from limits import HANG

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")


def model() -> torch.nn.Module:
    return net()


def tied() -> torch.nn.Module:
    torch.default_generator.manual_seed(5)
    return Tied()


def moved(make: Callable[[], torch.nn.Module]) -> Callable[[str], Any]:
    return lambda device: make().to(device)


def note(x: torch.Tensor) -> torch.Tensor:
    x.note = [1, "mine"]  # type: ignore[attr-defined]
    return x


def numbers(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(24.0).view(4, 6).to(dtype).to(device)


SAVED: dict[str, Callable[[str], Any]] = {
    "tensor": numbers,
    "scalar": lambda d: torch.tensor(2.5).to(d),
    "no elements": lambda d: [torch.empty(0).to(d), torch.empty(2, 0).to(d)],
    "part": lambda d: numbers(d)[1:3],
    "transposed": lambda d: numbers(d).t(),
    "expanded": lambda d: numbers(d)[:1].expand(5, 6),
    "channels last": lambda d: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).to(d),
    "shares memory": lambda d: (lambda x: {"x": x, "row": x[1], "column": x.t()[2:], "same": x})(numbers(d)),
    "bytes of another": lambda d: numbers(d).view(torch.uint8)[0, 3:10],
    "parameter": lambda d: torch.nn.Parameter(numbers(d)),
    "frozen parameter": lambda d: torch.nn.Parameter(numbers(d), requires_grad=False),
    "parameter with attributes": lambda d: note(torch.nn.Parameter(numbers(d))),
    "tensor with attributes": lambda d: note(numbers(d)),
    "leaf": lambda d: numbers(d).requires_grad_(),
    "bool": lambda d: numbers(d, torch.bool),
    "bfloat16": lambda d: numbers(d, torch.bfloat16),
    "complex": lambda d: numbers(d, torch.complex64),
    "conjugate": lambda d: (lambda x: [x.conj(), x, x.conj().t()[1:]])(numbers(d, torch.complex64) * (1 + 2j)),
    "negative": lambda d: (numbers(d, torch.complex64) * (1 + 2j)).conj().imag,
    "float8": lambda d: (lambda x: [x, x[1]])(numbers(d, torch.float8_e4m3fn)),
    "uint16": lambda d: numbers(d, torch.uint16),
    "state dict": lambda d: model().to(d).state_dict(),
    "tied state dict": lambda d: tied().to(d).state_dict(),
    "module": moved(model),
    "tied module": moved(tied),
}


def saved(value: object, new: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=new)
    return file.getvalue()


def loaded(data: bytes, **kwargs: Any) -> Any:
    return torch.load(io.BytesIO(data), **kwargs)


@pytest.mark.parametrize("name", SAVED)
def test_the_file_is_the_same(name: str) -> None:
    assert saved(SAVED[name]("node:1")) == saved(SAVED[name]("cpu"))


#: Torch can't load these from its older formats, wherever they were.
NEW = {"float8", "uint16"}


@pytest.mark.parametrize("name", [n for n in SAVED if n not in NEW])
def test_in_older_formats(name: str) -> None:
    local, remote = SAVED[name]("cpu"), SAVED[name]("node:1")
    assert saved(pickle.loads(pickle.dumps(remote))) == saved(pickle.loads(pickle.dumps(local)))
    back, expected = (loaded(saved(value, new=False), weights_only=False) for value in (remote, local))
    assert saved(back) == saved(expected)


LOCATIONS: dict[str, Callable[[], Any]] = {
    "name": lambda: "node:1",
    "device": lambda: torch.device("node:1"),
    "simulated": lambda: dt.device(1, "cuda:1"),
    "table": lambda: {"cpu": "node:1"},
    "current": lambda: "node",
    "function": lambda: lambda storage, location: storage.to(device="node:1"),
    "mesh": lambda: dt.mesh(rank=RANKS, device="cpu").device,
}


@pytest.mark.parametrize("where", LOCATIONS)
@pytest.mark.parametrize("safe", [True, False], ids=["weights_only", "any"])
def test_map_location(where: str, safe: bool) -> None:
    location = LOCATIONS[where]()
    for name, make in SAVED.items():
        if "module" in name and safe:
            continue
        data = saved(make("cpu"))
        with dt.node(1):
            got, local = loaded(data, map_location=location, weights_only=safe), loaded(data, weights_only=safe)
        if isinstance(local, torch.nn.Module):
            got, local = got.state_dict(), local.state_dict()
        same(got, local)
        tensors = torch.utils._pytree.tree_leaves(got)
        if where == "mesh":
            assert {t.device for t in tensors} == {location}, name
        else:
            assert {t.get_node() for t in tensors} == {1}, name
        if where == "simulated":
            assert {t.get_device() for t in tensors} == {1}, name
        assert saved(got) == saved(local), name


def test_loaded_tensors_share_memory_as_they_did() -> None:
    data = saved(SAVED["shares memory"]("node:0"))
    for location in ("node:1", "cpu"):
        got = loaded(data, map_location=location)
        got["x"].mul_(2)
        got["row"][0] = 77
        assert got["column"][:, 1].tolist() == [16, 18, 20, 22]
        assert got["x"][1, 0].item() == 77
        assert got["same"] is not None


def test_where_there_is_no_disttensor(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    trained = tied().to("node:1")
    torch.save({"model": trained.state_dict(), "x": torch.nn.Parameter(numbers("node:0"))}, path)
    script = (
        "import sys, torch\n"
        f"d = torch.load({str(path)!r}, weights_only=True)\n"
        "assert not any(m.startswith('disttensor') for m in sys.modules)\n"
        "print(d['x'].device, d['x'].sum().item(), d['x'].requires_grad, type(d['x']).__name__, *d['model'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG, check=True)
    assert done.stdout.split() == ["cpu", "276.0", "True", "Parameter", "embed.weight", "out.weight"]


@pytest.mark.parametrize("mmap", [False, True])
def test_from_a_file_that_is_mapped(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "model.pt"
    torch.save(SAVED["state dict"]("node:1"), path)
    same(
        dict(torch.load(path, map_location="node:0", mmap=mmap)),
        dict(torch.load(path)),
    )


SHAPES = {"transposed": lambda x: x.transpose(1, 2), "sliced": lambda x: x[:, 1:, ::2], "plain": lambda x: x}
KERNELS = {
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y),
    "huber_loss": lambda x, y: F.huber_loss(x, y),
    "logsigmoid": lambda x, y: F.logsigmoid(x).sum(),
    "elu": lambda x, y: F.elu(x).sum(),
    "hardswish": lambda x, y: F.hardswish(x).sum(),
}


@pytest.mark.parametrize(
    "shape", [lambda x: x.transpose(1, 2), lambda x: x[:, 1:, ::2], lambda x: x], ids=["transposed", "sliced", "plain"]
)
@pytest.mark.parametrize("name", KERNELS)
def test_a_layout_that_a_kernel_has_chosen(name: str, shape: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A gradient need not have the strides that torch's meta kernels say."""
    torch.manual_seed(0)
    local = torch.randn(2, 3, 4)
    found = []
    for device in ("cpu", "node:1"):
        x = shape(local.clone().to(device)).requires_grad_()
        y = torch.ones(x.shape, device=device) / 3
        (grad,) = torch.autograd.grad(KERNELS[name](x, y), x)
        KERNELS[name](x, y).backward()
        found.append((grad, x.grad))
    for here, there in zip(*found, strict=True):
        assert torch.equal(there.cpu(), here)
        for write, read in ((torch.save, torch.load), (pickle.dump, pickle.load)):
            file = io.BytesIO()
            write({"of": there, "again": there}, file)
            file.seek(0)
            loaded = read(file)
            assert torch.equal(loaded["of"], here)
            assert loaded["of"].data_ptr() == loaded["again"].data_ptr()
        assert torch.equal(copy.deepcopy(there).cpu(), here)


def test_one_storage_at_a_time_is_fetched() -> None:
    """A checkpoint of a large model must not need all of it in the master's memory."""
    x = numbers("node:1")
    values = [x, x[1], torch.ones(3, device="node:1")]
    dt.channels.reset_stats()
    with testing.MessageLog() as log:
        saved(values)
    assert sum(log[1].commands.count(kind) for kind in ("Send", "Download")) == 2
    received = sum(
        (row.received for row in dt.channels.stats() if row.at == "master"), type(dt.channels.stats().received)()
    )
    assert (received.calls, received.bytes) == (2, 96 + 12)


# ---- training goes on ------------------------------------------------------------------------------------------------


def train(network: torch.nn.Module, opt: torch.optim.Optimizer, device: str, steps: int = 3) -> list[float]:
    x, label = (t.to(device) for t in batch())
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x), label)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(("start", "end"), [("node:1", "node:0"), ("node:1", "cpu"), ("cpu", "node:1")])
@pytest.mark.parametrize("assign", [False, True])
def test_a_run_goes_on_elsewhere(optimizer: Any, start: str, end: str, assign: bool) -> None:
    def make(network: torch.nn.Module) -> torch.optim.Optimizer:
        kwargs = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        return optimizer(network.parameters(), lr=0.05, foreach=False, **kwargs)  # type: ignore[no-any-return]

    whole = net()
    expected = train(whole, make(whole), "cpu", 6)
    first = net().to(start)
    opt = make(first)
    losses = train(first, opt, start)
    file = io.BytesIO(saved({"model": first.state_dict(), "opt": opt.state_dict(), "epoch": 3}))
    state = torch.load(file, map_location=end)
    second = net() if assign else net().to(end)
    second.load_state_dict(state["model"], assign=assign)
    opt = make(second)
    opt.load_state_dict(state["opt"])
    assert losses + train(second, opt, end) == expected
    assert {p.device for p in second.parameters()} == {torch.device(end)}


def test_ties_after_assignment() -> None:
    """As locally: two parameters, of one memory."""
    for device in ("node:1", "cpu"):
        network = tied()
        network.load_state_dict(loaded(saved(tied().to("node:0").state_dict()), map_location=device), assign=True)
        with torch.no_grad():
            network.embed.weight.fill_(3)
        assert network.out.weight.unique().tolist() == [3]
        assert network.out.weight.requires_grad


def test_a_checkpoint_in_memory_is_a_snapshot() -> None:
    network = tied().to("node:1")
    best = copy.deepcopy(network.state_dict())
    expected = network.embed.weight.detach().cpu()
    with torch.no_grad():
        network.embed.weight.zero_()
    network.load_state_dict(best)
    same(network.out.weight.detach(), expected)


def test_errors() -> None:
    with pytest.raises(RuntimeError, match="node:9"):
        loaded(saved(torch.ones(2)), map_location="node:9")
    bad = torch.ones(3, device="node:1").gather(0, torch.tensor([7], device="node:1"))
    with pytest.raises(RuntimeError, match="aten::gather"):
        saved(bad)
    same(loaded(saved(torch.ones(2, device="node:1")), map_location="node:0"), torch.ones(2))


# ---- storages --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages() -> None:
    x, twin = numbers("node:1"), numbers("cpu")
    storage = x.untyped_storage()
    assert isinstance(storage, torch.UntypedStorage)
    assert storage is x[1:].untyped_storage()
    assert storage is not x.clone().untyped_storage()
    assert (storage.device, storage.nbytes(), len(storage)) == (x.device, 96, 96)
    assert storage.tolist() == twin.untyped_storage().tolist()
    assert x[1].data_ptr() - x.data_ptr() == 24
    assert storage.data_ptr() == x.data_ptr()
    assert x[:0].data_ptr() == 0
    assert storage.cpu().tolist() == storage.clone().tolist() == storage.to(device="node:0").tolist()
    assert storage.to(device="node:0").device == torch.device("node:0")
    assert storage[5] == twin.untyped_storage()[5]
    storage.fill_(0)
    same(x, torch.zeros(4, 6))
    storage.copy_(twin.untyped_storage())
    same(x, twin)
    with pytest.raises(TypeError, match=r"storage\.cpu"):
        saved(storage)
    assert loaded(saved({"it": x.storage()}))["it"].tolist() == x.flatten().tolist()


def resized(device: Any) -> object:
    """Makes memory smaller and larger; of the storage object the second part is another one."""
    x = torch.arange(6.0).to(device)
    part, found = x[2:4], []
    part.sum()
    for size in (16, 40, 24, 0):
        storage = x.untyped_storage().resize_(size)
        found += [storage.nbytes(), x.untyped_storage().nbytes(), part.untyped_storage() is storage]
        if size == 16:
            found.append(storage.tolist())
    del storage
    again = x.untyped_storage()
    found += [again.nbytes(), again.tolist(), again.resize_(24).nbytes(), len(again)]
    x.copy_(torch.arange(6.0).to(device))
    part.mul_(2)
    return found, x.tolist(), again.tolist()


def test_storages_are_made_smaller_and_larger() -> None:
    """As local torch has it, on a node and on a mesh."""
    wanted = resized("cpu")
    assert resized("node:1") == wanted
    mesh = dt.mesh(nodes=[0, 1], dp=2)
    assert resized(mesh.device) == wanted
    mesh.close()


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "read": lambda x, part: x.sum().item(),
    "download": lambda x, part: x.cpu(),
    "of a part": lambda x, part: part.tolist(),
    "written": lambda x, part: x.add_(1).sum().item(),
    "sent": lambda x, part: (x.to("node:0") + 1).sum().item(),
    "of a list": lambda x, part: torch.cat([part, x]).sum().item(),
    "function": lambda x, part: dt.run(torch.sum, x, node=1),
}


@pytest.mark.parametrize("streams", [False, True], ids=["one stream", "streams"])
@pytest.mark.parametrize("name", USES)
def test_a_tensor_without_its_memory_is_an_error(name: str, streams: bool) -> None:
    """Local torch ends the process, or reads what is not there. What still fits can be used."""
    x = torch.arange(1 << 14, dtype=torch.float32).to("node:1") + 0
    part, first = x[8:], x[:4]
    first.sum(), part.sum()
    side = dt.Stream(node=1) if streams else None
    if side is not None:
        with dt.stream(side):
            (x * 2).sum().item()
    x.untyped_storage().resize_(16)
    with pytest.raises(RuntimeError, match=r"data is not allocated: its storage has been made smaller.* to 16 bytes"):
        USES[name](x, part)
    assert first.tolist() == [0, 1, 2, 3]
    assert dt.run(os.getpid, node=1)


def test_a_storage_that_there_is_no_memory_for() -> None:
    """Its own error, though its tensor does not fit; and none is recorded."""
    storage, other = [torch.ones(4, device="node:1").untyped_storage().resize_(0) for _ in range(2)]
    storage.resize_(1 << 60)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        dt.synchronize()
    with dt.graph(dt.Graph()), pytest.raises(NotImplementedError, match="can't be recorded"):
        other.resize_(8)


@pytest.mark.parametrize("size", [8, [1, 2, 3]])
def test_new_storages(size: Any) -> None:
    storage = torch.UntypedStorage(size, device="node:1")
    assert storage.device == torch.device("node:1")
    assert len(storage) == (size if isinstance(size, int) else 3)
    assert torch.UntypedStorage(size).to(device="node:1").device == storage.device
    assert len(torch.UntypedStorage(size)) == len(storage)
    assert torch.UntypedStorage(size, device="meta").device.type == "meta"


SETS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "tensor": lambda x, y: y.set_(x),
    "part of a tensor": lambda x, y: y.set_(x, 3, (2, 2), (1, 4)),
    "contiguous part": lambda x, y: y.set_(x[1], 2, (2, 3)),
    "storage": lambda x, y: y.set_(x.untyped_storage()),
    "part of a storage": lambda x, y: y.set_(x.untyped_storage(), 1, (3,), (2,)),
    "nothing": lambda x, y: y.set_(),
}


@pytest.mark.parametrize("name", SETS)
def test_set(name: str) -> None:
    pairs = []
    for device in ("node:1", "cpu"):
        x, y = numbers(device), torch.zeros(1, device=device)
        assert SETS[name](x, y) is y
        y.add_(100)
        pairs.append((x, y, y * 2))
    same(*pairs)


@pytest.mark.parametrize("target", ["plain", "conjugate"])
@pytest.mark.parametrize("source", ["plain", "conjugate", "data", "data of a conjugate"])
def test_set_and_conjugates(target: str, source: str) -> None:
    pairs = []
    for device in ("node:1", "cpu"):
        x, y = (numbers(device, torch.complex64) * (1 + 2j) for _ in range(2))
        y = y.conj() if target == "conjugate" else y
        other = x.conj() if "conjugate" in source else x
        if "data" in source:
            y.data = other
        else:
            y.set_(other)
        y[0] = 7j
        pairs.append((x, y, y + 1, y.is_conj()))
    same(*pairs)


def test_set_to_another_place() -> None:
    y = torch.zeros(1, device="node:1")
    for source in (torch.ones(2), torch.ones(2, device="node:0")):
        with pytest.raises(RuntimeError, match="set_"):
            y.set_(source)
        with pytest.raises(RuntimeError, match="set_"):
            y.set_(source.untyped_storage())
    with pytest.raises(RuntimeError):
        torch.zeros(1).set_(y)
    same(y, torch.zeros(1))


# ---- safetensors -----------------------------------------------------------------------------------------------------


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    state = model().to("node:1").state_dict()
    safetensors.save_file(model().state_dict(), here)
    safetensors.save_file(state, there)
    assert Path(here).read_bytes() == Path(there).read_bytes()
    same({k: v.to("node:0") for k, v in safetensors.load_file(there).items()}, safetensors.load_file(here))
    network = net().to("node:0")
    with torch.no_grad():
        network.head.weight.zero_()
    network.load_state_dict(safetensors.load_file(there))
    same(dict(network.state_dict()), dict(model().state_dict()))


def test_safetensors_sees_ties(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    network, path = tied().to("node:1"), str(tmp_path / "model")
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save_file(network.state_dict(), path)
    safetensors.save_model(network, path)
    with torch.no_grad():
        network.embed.weight.zero_()
    assert safetensors.load_model(network, path) == (set(), [])
    same(dict(network.state_dict()), dict(tied().state_dict()))
