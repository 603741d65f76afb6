"""Where tensors come to live: the current node, legacy type names, factories, `.to`, and what `.to` keeps."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
import torch
from equal import same
from homes import Home, anywhere

import disttensor as dt

Script = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.usefixtures("clean")


def placed(x: torch.Tensor) -> tuple[int, int]:
    return x.get_node(), x.get_device()  # type: ignore[attr-defined]


class TestIssue241:
    """The program that the project exists for, whose comments say where each tensor is."""

    TEXT = """\
import torch.distributed
torch.distributed.init_master_worker(backend='tcp')

x = torch.distributed.FloatTensor(20, 20).fill_(4)
y = torch.randn(20, 20).dist_send()
z = x + y
# z.get_node(), z.get_device() == 0, -1 (i.e. CPU)
cuda_x = x.cuda()
# cuda_x.get_node(), cuda_x.get_device() == 0, 0
with torch.distributed.node(1):
    a = torch.distributed.FloatTensor(10, device=1)
    # a.get_node(), a.get_device() == 1, 1
    cuda_y = y.cuda()
    # cuda_y.get_node(), cuda_y.get_device() == 0, 0
    q = cuda_x + cuda_y
    # q.get_node(), q.get_device() == 0, 0
"""

    @pytest.mark.row("M16")
    def test_the_text_as_it_stands(self, script: Script) -> None:
        """But for the name of the package. A warning is an error, and each comment a line of what it prints."""
        said = re.findall(r"# (\w+)\..* == (\d, -?\d)", self.TEXT)
        assert len(said) == 5
        text = re.sub(r"# (\w+)\.(.*?) == .*", r"print('\1', (\1.\2))", self.TEXT)
        done = script(
            text.replace("torch.distributed", "disttensor").replace("import disttensor", "import torch, disttensor"),
            DISTTENSOR_NODES="2",
            DISTTENSOR_SIMULATE_CUDA="2",
            PYTHONWARNINGS="error",
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert re.findall(r"(\w+) \((.*)\)\n", done.stdout) == said

    @pytest.mark.row("M16")
    def test_placement(self) -> None:
        x = dt.FloatTensor(20, 20).fill_(4)
        local_y = torch.randn(20, 20)
        y = local_y.dist_send()
        z = x + y
        assert placed(x) == placed(y) == placed(z) == (0, -1)
        cuda_x = x.cuda()
        assert placed(cuda_x) == (0, 0)
        with dt.node(1):
            a = dt.FloatTensor(10, device=1)
            assert placed(a) == (1, 1)
            cuda_y = y.cuda()
            assert placed(cuda_y) == (0, 0)
            q = cuda_x + cuda_y
            assert placed(q) == (0, 0)
        assert dt.session.current_node() == 0
        same(x, torch.full((20, 20), 4.0))
        same(y, local_y)
        same(z, local_y + 4)
        same(q, local_y + 4)
        assert a.shape == (10,)

    def test_values_come_back(self) -> None:
        x = dt.FloatTensor(2, 3).fill_(4)
        assert x.cpu().tolist() == [[4.0] * 3] * 2
        assert type(x.cpu()) is torch.Tensor
        assert x.sum().item() == 24.0


# ---- the current node ------------------------------------------------------------------------------------------------


@pytest.mark.row("M16")
def test_node_blocks_nest() -> None:
    assert dt.session.current_node() == 0
    with dt.node(1):
        assert dt.factories.zeros(1).get_node() == 1
        with dt.node(0):
            assert dt.factories.zeros(1).get_node() == 0
        assert torch.node.current_device() == 1
        with pytest.raises(KeyError), dt.node(0):
            raise KeyError
        assert dt.session.current_node() == 1
    assert dt.session.current_node() == 0


def test_node_object_is_reusable() -> None:
    one = dt.node(1)
    for _ in range(2):
        with one, one:
            assert dt.session.current_node() == 1
        assert dt.session.current_node() == 0


@pytest.mark.parametrize(
    ("k", "kind"), [(3, ValueError), (-1, ValueError), ("1", TypeError), (True, TypeError), (1.0, TypeError)]
)
def test_node_refuses(k: object, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        dt.node(k)


def test_device_without_index_is_the_current_node() -> None:
    assert placed(torch.zeros(2, device="node")) == (0, 0)
    with dt.node(1):
        assert placed(torch.zeros(2, device="node")) == (1, 0)


BARE: dict[str, Callable[[], torch.Tensor]] = {
    "local": lambda: torch.ones(2).to("node"),
    "device": lambda: torch.ones(2).to(torch.device("node")),
    "keyword": lambda: torch.ones(2).to(device="node", dtype=torch.float64),
    "with a dtype": lambda: torch.ones(2).to("node", torch.float64),
    "from another node": lambda: torch.ones(2, device="node:0").to("node"),
    "there already": lambda: torch.ones(2, device="node:1").to("node"),
    "module": lambda: torch.nn.Linear(2, 2).to("node").weight,
}


@pytest.mark.parametrize("name", BARE)
def test_to_a_device_without_index(name: str) -> None:
    with dt.node(1):
        assert placed(BARE[name]()) == (1, 0)
        assert placed(torch.ones(2).to("node:0")) == (0, 0)
        same(torch.ones(2).to(torch.float64).to("node"), torch.ones(2, dtype=torch.float64))
    assert placed(torch.ones(2, device="node:1").to("node")) == (0, 0)


def test_torch_device_context() -> None:
    with torch.device("node:1"):
        x = torch.zeros(2, 3)
        layer = torch.nn.Linear(3, 4)
        y = torch.tensor([1, 2])
        z = torch.arange(3)
    assert {placed(t) for t in (x, y, z, layer.weight, layer.bias)} == {(1, 0)}
    same(z, torch.arange(3))
    assert isinstance(layer.weight, torch.nn.Parameter)


# ---- naming devices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dev", "expected"),
    [(None, 0), ("cpu", -1), ("cuda", 0), ("cuda:1", 1), (1, 1), (0, 0), (-1, -1), (torch.device("cuda:1"), 1)],
)
@pytest.mark.parametrize("node", [0, 1])
def test_device(node: int, dev: object, expected: int) -> None:
    device = dt.device(node, dev)
    assert isinstance(device, torch.device)
    assert device.type == "node"
    assert placed(torch.zeros(1, device=device)) == (node, expected)
    assert torch.zeros(1, device=device).device == device
    assert dt.device(node, dev) == device


def test_device_refuses() -> None:
    with pytest.raises(ValueError, match="3 nodes"):
        dt.device(3)
    with pytest.raises(RuntimeError, match=r"no device cuda:2.*cuda:0, cuda:1"):
        dt.device(0, "cuda:2")
    with pytest.raises(ValueError, match="meta"):
        dt.device(0, "meta")


@anywhere
def test_new_tensors_are_where_the_tensor_is(home: Home) -> None:
    """Torch would make some of them on the current device."""
    x = home.send(torch.ones(3))
    made = [x.new_tensor([1.0]), x.new_tensor(2), x.new([1.0]), x.new(3), x.new_zeros(2), x.new_full((2,), 1.0)]
    made += [x.new_empty(2), x.new_ones(2), x.new_empty_strided((2,), (1,))]
    assert {y.device for y in made} == {home.device}
    assert x.new_tensor([1.0], device="node:2").device == torch.device("node:2")
    assert x.new_tensor([1], dtype=torch.int32, requires_grad=False).dtype == torch.int32
    home.same(x.new_tensor([1.5, 2.0], requires_grad=True), torch.tensor([1.5, 2.0], requires_grad=True))


@pytest.mark.parametrize("index", [100, -56, 127])
def test_a_slot_that_stands_for_nothing(index: int) -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(1, device=torch.device("node", index) if index >= 0 else f"node:{256 + index}")


# ---- factories -------------------------------------------------------------------------------------------------------

FACTORIES = {
    "zeros": lambda m: m.zeros(2, 3),
    "zeros_tuple": lambda m: m.zeros((2, 3)),
    "ones": lambda m: m.ones(2, 3, dtype=torch.int64),
    "empty": lambda m: m.empty(2, 3).fill_(2),
    "full": lambda m: m.full((2, 2), 3.5),
    "full_int": lambda m: m.full((2, 2), 3),
    "full_bool": lambda m: m.full((2,), True),
    "arange": lambda m: m.arange(7),
    "arange_float": lambda m: m.arange(0, 1, 0.25),
    "eye": lambda m: m.eye(3),
    "linspace": lambda m: m.linspace(0, 1, 5),
    "logspace": lambda m: m.logspace(0, 2, 4),
    "tensor": lambda m: m.tensor([[1, 2], [3, 4]]),
    "tensor_float": lambda m: m.tensor(1.5, dtype=torch.float64),
    "tensor_grad": lambda m: m.tensor([1.0], requires_grad=True),
    "randint_one": lambda m: m.randint(3, 4, (5,)),
    "from_numpy": lambda m: m.from_numpy(np.arange(6, dtype=np.int16).reshape(2, 3)),
}


@pytest.mark.row("M4")
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("node", [0, 1])
def test_factories(name: str, node: int) -> None:
    with dt.node(node):
        got = FACTORIES[name](dt.factories)
    assert placed(got) == (node, -1)
    same(got, FACTORIES[name](torch))


def test_factory_devices() -> None:
    with dt.node(1):
        assert placed(dt.factories.zeros(2, device="cuda:1")) == (1, 1)
        assert placed(dt.factories.zeros(2, device=0)) == (1, 0)
        assert placed(dt.factories.zeros(2, device="node:0")) == (0, 0)
        assert placed(dt.factories.zeros(2, device=dt.device(0, "cpu"))) == (0, -1)
    assert dt.factories.rand(3, requires_grad=True).requires_grad


def test_shapes_of_draws() -> None:
    assert dt.factories.rand(2, 3).shape == dt.factories.randn(2, 3).shape == (2, 3)
    assert sorted(dt.factories.randperm(5).tolist()) == [0, 1, 2, 3, 4]
    assert dt.factories.randint(0, 3, (4,)).dtype == torch.int64


LEGACY = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


@pytest.mark.row("M4")
@pytest.mark.parametrize("name", LEGACY)
def test_legacy(name: str) -> None:
    make, dtype = getattr(dt.factories, name), LEGACY[name]
    x = make(2, 3)
    assert x.shape == (2, 3)
    assert x.dtype == dtype
    assert placed(x) == (0, -1)
    same(make([[0, 1], [1, 0]]), torch.tensor([[0, 1], [1, 0]], dtype=dtype))
    assert make(torch.Size([4, 1])).shape == (4, 1)
    assert make().shape == (0,)
    with dt.node(1):
        assert placed(make(3, device="cuda:1")) == (1, 1)
        assert placed(make(3, device=-1)) == (1, -1)
    with pytest.raises(TypeError, match=name):
        make(2, "3")


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="NoTensor"):
        dt.NoTensor  # noqa: B018


# ---- .to -------------------------------------------------------------------------------------------------------------


@pytest.mark.row("M11")
@pytest.mark.parametrize("kind", ["there", "back", "node to node", "device to device", "same", "dtype too"])
def test_to(kind: str) -> None:
    local = torch.randn(3, 4).t()
    x = local.to("node:1")
    match kind:
        case "there":
            same(x, local)
        case "back":
            assert torch.equal(x.to("cpu"), local)
            assert x.to("cpu").stride() == local.stride()
        case "node to node":
            y = x.to("node:0")
            assert placed(y) == (0, 0)
            same(y, local)
        case "device to device":
            y = x.to(dt.device(1, "cuda:1"))
            assert placed(y) == (1, 1)
            x.zero_()  # simulated devices are one memory: this has to be a copy all the same
            same(y, local)
        case "same":
            assert x.to("node:1") is x
            assert x.to("node:1", copy=True) is not x
            same(x.to("node:1", copy=True), local)
        case "dtype too":
            for dtype in (torch.float64, torch.bfloat16, torch.int32):
                same(x.to("node:0", dtype), local.to(dtype))
                same(local.to("node:0", dtype), local.to(dtype))
                assert torch.equal(x.to("cpu", dtype), local.to(dtype))


@pytest.mark.row("M2")
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    local = torch.randint(0, 2, (3, 5)).to(dtype)
    x = local.to("node:0")
    same(x, local)
    same(x.to("node:1"), local)
    same(x.clone(), local)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1, 1), (70_000,), (300, 301)])
def test_every_shape_travels(shape: tuple[int, ...]) -> None:
    local = torch.randn(shape)
    same(local.to("node:1"), local)
    same(local.to("node:1").to("node:0"), local)


@pytest.mark.row("M11")
def test_strided_and_lazy_sources() -> None:
    local = torch.randn(6, 8)
    z = torch.randn(3, 4, dtype=torch.complex64)
    for view in (
        lambda x: x[::2],
        lambda x: x[:, 1::3],
        lambda x: x.t(),
        lambda x: x[2],
        lambda x: x[0].expand(3, 8),
        lambda x: x.unfold(1, 3, 2),
    ):
        same(view(local).to("node:1"), view(local).to("cpu", copy=True))
        same(view(local.to("node:0")).to("node:1"), view(local).to("cpu", copy=True))
        assert torch.equal(view(local.to("node:0")).cpu(), view(local))
    same(z.conj().to("node:1"), z.conj().resolve_conj())
    assert torch.equal(z.to("node:1").conj().cpu(), z.conj())
    assert torch.equal(z.to("node:1").conj().imag.cpu(), z.conj().imag)


def test_an_upload_may_be_changed_afterwards() -> None:
    for n in (10, 100_000):
        local = torch.ones(n)
        x = local.to("node:1")
        local.zero_()
        same(x, torch.ones(n))


def test_a_download_is_a_copy() -> None:
    x = torch.ones(3, device="node:1")
    y = x.cpu()
    x.zero_()
    assert y.tolist() == [1, 1, 1]


def test_pinned_sharing_and_local_work_is_as_before() -> None:
    x = torch.ones(3)
    assert x.is_pinned() is False
    assert x.cpu() is x
    assert torch.zeros(2).device.type == "cpu"
    assert copy.deepcopy(x).tolist() == [1, 1, 1]
    assert torch.get_default_device().type == "cpu"


@pytest.mark.row("M17")
def test_dist_send() -> None:
    local = torch.randn(3)
    assert placed(local.dist_send()) == (0, -1)
    assert placed(local.dist_send(1)) == (1, -1)
    assert placed(local.dist_send(node=1, device="cuda:1")) == (1, 1)
    with dt.node(1):
        assert placed(local.dist_send()) == (1, -1)
    x = local.to("node:0")
    assert placed(x.dist_send(1)) == (1, 0)
    assert placed(x.dist_send(1, device="cpu")) == (1, -1)
    same(x.dist_send(1), local)


PLACES = {
    "a text": ("node:1", None, (1, 0)),
    "a device": (torch.device("node", 1), None, (1, 0)),
    "a text for the device": (None, "node:1", (1, 0)),
    "a device for the device": (None, torch.device("node", 1), (1, 0)),
    "both": (1, "node:1", (1, 0)),
    "both, as texts": ("node:1", "node:1", (1, 0)),
    "a text, and a device there": ("node:1", "cpu", (1, -1)),
    "the current one": ("node", None, (2, 0)),
}


@pytest.mark.row("S5")
@pytest.mark.parametrize("of", ["local", "remote", "module"])
@pytest.mark.parametrize("name", PLACES)
def test_places_of_dist_send(name: str, of: str) -> None:
    """What names a place for `to` names it here: then the device is the node's default one."""
    node, device, there = PLACES[name]
    sent = {"local": torch.ones(3), "remote": torch.ones(3).to("node:0"), "module": torch.nn.Linear(2, 2)}[of]
    with dt.node(2):
        done = sent.dist_send(node, device=device)
    assert placed(done.weight if of == "module" else done) == there


def test_two_places_of_dist_send() -> None:
    for sent in (torch.ones(3), torch.ones(3).to("node:0"), torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=r"node=0, device='node:1'\).* two places"):
            sent.dist_send(0, device="node:1")
        with pytest.raises(TypeError, match="a node is an integer or a text such as 'node:1', not 'nowhere'"):
            sent.dist_send("nowhere")
        with pytest.raises(ValueError, match="a node is an integer or a text such as 'node:1', not 'cpu'"):
            sent.dist_send("cpu")
        with pytest.raises(ValueError, match="node 3 does not exist"):
            sent.dist_send(3)
        with pytest.raises(RuntimeError, match="node 1 has no device cuda:9"):
            sent.dist_send(1, device="cuda:9")


@pytest.mark.row("S5")
def test_dist_send_of_a_module() -> None:
    """A local program is one on a node by this word alone: the optimizer has the parameters that it had."""

    def trained(send: bool) -> list[float]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        before = list(net.parameters())
        x, y = torch.randn(16, 4), torch.randn(16, 1)
        if send:
            assert net.dist_send() is net
            x, y = x.dist_send(), y.dist_send()
            assert {placed(t) for t in (*net.parameters(), *net.buffers(), x, y)} == {(0, -1)}
        assert all(p is q for p, q in zip(net.parameters(), before, strict=True))
        losses = []
        for _ in range(3):
            loss = torch.nn.functional.mse_loss(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert trained(True) == trained(False)
    net = torch.nn.Linear(2, 2)
    with dt.node(1):
        assert placed(net.dist_send().weight) == (1, -1)
    assert placed(net.dist_send(2, device="cuda:1").bias) == (2, 1)
    assert placed(net.dist_send(0).bias) == (0, 0)  # on the same kind of device
    assert torch.nn.ReLU().dist_send(1).dist_send("node:0").inplace is False
    net.bias.data = net.bias.data.to(dt.device(0, "cpu"))
    with pytest.raises(ValueError, match="tensors of this Linear are on cpu and cuda; device= names one for all"):
        net.dist_send(1)
    assert {placed(t) for t in net.dist_send(1, device="cpu").parameters()} == {(1, -1)}


def test_dist_send_to_a_mesh() -> None:
    mesh = dt.mesh(dp=2, nodes=[1, 2])
    net = torch.nn.Linear(2, 2)
    expected = net.weight.detach().clone()
    for place in (mesh, mesh.device, str(mesh.device)):
        assert net.dist_send(place).weight.device == torch.ones(3).dist_send(place).device == mesh.device
        assert [x.get_node() for x in net.weight.shards()] == [1, 2]
    same(net.weight.at(dp=1), expected.requires_grad_())
    mesh.close()


def test_cuda_and_cpu() -> None:
    x = torch.randn(3).to(dt.device(1, "cpu"))
    assert placed(x.cuda()) == (1, 0)
    assert placed(x.cuda(1)) == (1, 1)
    assert x.cuda().cuda().device == x.cuda().device
    assert x.cuda(1).is_cuda is False  # torch's own word for its device type
    assert type(x.cuda().cpu()) is torch.Tensor


def test_copy_between() -> None:
    a, b, local = torch.zeros(3, device="node:0"), torch.ones(3, device="node:1"), torch.full((3,), 2.0)
    same(a.copy_(b), torch.ones(3))
    same(a.copy_(local), local)
    assert local.copy_(b).tolist() == [1, 1, 1]
    same(a.copy_(torch.full((3,), 3.0).to(dt.device(0, "cpu"))), torch.full((3,), 3.0))


# ---- copies and pickles ----------------------------------------------------------------------------------------------


def test_deepcopy() -> None:
    x = torch.randn(3, 4, device="node:1", requires_grad=True)
    x.grad = torch.ones_like(x)
    twin = copy.deepcopy(x)
    assert twin is not x
    assert twin.requires_grad
    same(twin.grad, torch.ones(3, 4))
    same(twin, x.detach().cpu().requires_grad_())
    with torch.no_grad():
        twin.zero_()
    assert x.abs().sum().item() > 0
    same(copy.copy(x.detach()), x.detach().cpu())


def test_numpy() -> None:
    x = torch.arange(3, device="node:1")
    with pytest.raises(TypeError, match=r"cpu\(\)"):
        x.numpy()
    assert x.numpy(force=True).tolist() == [0, 1, 2]
    assert x.cpu().numpy().tolist() == [0, 1, 2]
    with pytest.raises(TypeError):
        np.asarray(x)


# ---- the device module -----------------------------------------------------------------------------------------------


def test_device_module() -> None:
    assert torch.node.is_available()
    assert torch.node.device_count() == dt.session.node_count() == 3
    assert torch.node.current_device() == 0
    torch.node.synchronize()
    torch.node.synchronize("node:1")
    torch.node.synchronize(0)
    assert [n["rank"] for n in dt.nodes()] == [0, 1, 2]
    assert all(n["alive"] and n["devices"] == ["cpu", "cuda:0", "cuda:1"] for n in dt.nodes())


def test_memory() -> None:
    before = torch.node.memory_allocated("node:1")
    x = torch.zeros(1 << 18, device="node:1")
    view = x[1:]
    assert torch.node.memory_allocated("node:1") - before == 1 << 20
    del x
    assert torch.node.memory_allocated("node:1") - before == 1 << 20
    view.add_(1)
    del view
    assert torch.node.memory_allocated("node:1") == before


@pytest.mark.row("M1")
def test_a_second_session_is_refused() -> None:
    with pytest.raises(RuntimeError, match="already"):
        dt.init_master_worker(nodes=2, launcher="inproc")
    assert dt.session.is_initialized()


@pytest.mark.parametrize("device", [lambda: "node:0", lambda: "node:1", lambda: dt.device(1, "cuda:1")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_new_stays_on_the_device_of_its_tensor(device: Callable[[], torch.device | str], dtype: torch.dtype) -> None:
    """The way of before ``new_empty``, which torch.distributions still takes."""
    local = torch.arange(4).to(dtype)
    x = local.to(device())
    for size in ((), (3,), (2, 3), (torch.Size([2, 3]),), (np.int64(3),)):
        got, expected = x.new(*size), local.new(*size)
        assert (got.device, got.shape, got.dtype) == (x.device, expected.shape, expected.dtype)
    for data in ([1.0, 2.0], (2, 3), [[1], [2]], np.array([1.5, 2.5]), []):
        same(x.new(data), local.new(data))
    other = local.to("node:0")
    assert x.new(2, device="node:0").device == other.device
    for wrong in ((1.5,), ("a",), (2, "a"), ([1], [2])):
        with pytest.raises(TypeError):
            local.new(*wrong)
        with pytest.raises(TypeError):
            x.new(*wrong)
