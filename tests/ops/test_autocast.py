"""`torch.autocast("node")` casts as torch does on the node's kind of device; `GradScaler` scales as it does here."""

from __future__ import annotations

import contextlib
import functools
import gc
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from differential import as_local, batch, cases, evaluate, inputs, leaves, net, on_places
from equal import same, send
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import disttensor as dt
from disttensor import testing

Script = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.usefixtures("clean")

PROGRAMS = """
x @ w, torch.mm(x, w), x @ v, torch.einsum("ij,jk", x, w), torch.bmm(b, c), torch.linalg.vecdot(x, y)
F.linear(x, w.T), F.linear(h, w.T), F.conv2d(img, k2, bias), F.conv1d(seq, k1), F.conv3d(vol, k3)
F.conv_transpose2d(img, tk2)
F.prelu(x, s), torch.baddbmm(b @ c, b, c), torch.outer(v, v)
F.softmax(x, -1), F.log_softmax(h, -1), F.layer_norm(x, (5,)), F.layer_norm(h, (5,)), F.group_norm(img, 3), F.gelu(x)
F.relu(h)
F.mse_loss(h, y), F.l1_loss(x, h), F.cross_entropy(logits.bfloat16(), label)
F.nll_loss(F.log_softmax(logits, 1), label)
F.binary_cross_entropy_with_logits(h, u.abs()), F.smooth_l1_loss(h, y), F.kl_div(x, h, reduction="sum")
h.exp(), h.log(), x.exp(), h.pow(2), h.rsqrt(), h.sum(), h.sum(1), h.prod(), h.prod(1), h.cumsum(0), h.norm()
h.norm(2, 1), h.mean()
h.norm(p=1, dim=(0, 1)), torch.linalg.vector_norm(h), torch.linalg.matrix_norm(h), h.sum(dtype=torch.float64)
h.softmax(1, torch.float64)
torch.cat([x, h]), torch.stack([x, h]), torch.stack([h, h]), torch.addcmul(h, x, h), torch.atan2(h, x)
torch.cdist(h, h), torch.dot(v, v)
x + h, x * h, d @ d.T, h @ h.T, x.long() @ x.long().T, f * 2, F.avg_pool2d(img, 2)
F.interpolate(img.bfloat16(), scale_factor=2)
torch.trace(h), F.pad(img.bfloat16(), (1, 1, 1, 1), mode="reflect"), F.huber_loss(h, y)
torch.linalg.multi_dot([x, w, w.T])
"""
if torch.__version__ < (2, 13):
    PROGRAMS = PROGRAMS.replace("torch.trace(h), ", "")  # docs/COMPATIBILITY.md
#: What torch's stand-ins for CUDA tensors can't do.
ONLY_CPU = """
torch.addmm(m[:, :1], x, w), F.linear(x, w.T, w[0]), torch.mv(m, m[0]), F.cosine_embedding_loss(h, y, x[:, 0].sign())
torch.fft.rfft(h), torch.quantile(h, 0.5), torch.linalg.inv(spd.bfloat16()), torch.linalg.svd(h)[1], torch.polar(h, h)
F.scaled_dot_product_attention(q, kk, vv)
"""


@contextlib.contextmanager
def cuda() -> Iterator[None]:
    """An autocast region for CUDA, which torch's own refuses to be without one."""
    torch.set_autocast_enabled("cuda", True)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()


@on_places(PROGRAMS, ONLY_CPU, devices=["cpu"])
def test_as_local(program: str, name: str) -> None:
    """Bit for bit what ``torch.autocast("cpu")`` gives."""
    here, there = (functools.partial(torch.autocast, kind, dtype=torch.bfloat16) for kind in ("cpu", "node"))
    as_local(program, name, strides=False, modes=(here, there))


@pytest.fixture
def like_cuda() -> Iterator[torch.device]:
    """A place that is taken for one with CUDA's kernels: only dtypes can be compared."""
    device = dt.device(1, "cuda:1")
    with testing.as_cuda(device):
        yield device


def dtypes(values: Any) -> list[Any]:
    return [v.dtype for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


def expected_on_cuda(call: Any, values: Any) -> Any:
    """``call(values)`` with torch's stand-ins for CUDA tensors."""

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    with FakeTensorMode():
        values = tree_map(fake, values)
        with cuda():
            return call(values)


@pytest.mark.parametrize("program", cases(PROGRAMS))
def test_the_dtypes_of_cuda(program: str, like_cuda: torch.device) -> None:
    expected = expected_on_cuda(lambda values: evaluate(program, torch.device("cuda"), values), inputs(program))
    with torch.autocast("node", dtype=torch.bfloat16):
        got = evaluate(program, like_cuda, send(inputs(program), like_cuda))
    assert dtypes(got) == dtypes(expected)


def test_what_cuda_refuses(like_cuda: torch.device) -> None:
    p = torch.rand(3, device=like_cuda)
    with torch.autocast("node"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(p, p)


def _samples() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    cast = [
        n for kind in ("CPU", "CUDA") for n in torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{kind}")
    ]
    names = {n.removeprefix("aten::").partition(".")[0] for n in cast}
    chosen = []
    for op in op_db:
        if {op.name.replace(".", "_"), op.name.rpartition(".")[2]} & names and torch.float32 in op.dtypes:
            chosen.append(op)
    return chosen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_all_operators_of_the_database(kind: str, request: pytest.FixtureRequest) -> None:
    """Finds the rules that a new torch has changed: dtypes of each operator's results with its sample inputs."""
    device = request.getfixturevalue("like_cuda") if kind == "cuda" else dt.device(1, "cpu")
    wrong, compared = [], 0
    for op in _samples():
        for sample in list(op.sample_inputs("cpu", torch.float32))[:3]:

            def call(values: Any, op: Any = op) -> Any:
                return op(values[0], *values[1], **values[2])

            values = (sample.input, sample.args, sample.kwargs)
            try:
                if kind == "cuda":
                    expected = expected_on_cuda(call, values)
                else:
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        expected = call(values)
                with torch.autocast("node", dtype=torch.bfloat16):
                    got = call(send(values, device))
            except Exception:  # what torch can't run on stand-ins, and what nodes can't at all, is not asked here
                continue
            compared += 1
            if dtypes(got) != dtypes(expected):
                wrong.append((op.name, dtypes(got), dtypes(expected)))
    assert not wrong
    assert compared > 200


def test_casts_of_parameters_live_as_long_as_their_region() -> None:
    w = torch.nn.Parameter(torch.ones(2, 2, device="node:1"))
    gc.collect()
    before = testing.usage(w)
    with torch.autocast("node"):
        for _ in range(3):
            w @ w
        assert testing.usage(w).tensors == before.tensors + 1
    assert testing.usage(w) == before


def test_regions() -> None:
    x = torch.ones(2, 2, device="node:1")
    assert (x @ x).dtype == torch.float32
    with torch.autocast("node"):
        assert (x @ x).dtype == torch.bfloat16  # as on the CPUs that these nodes compute with
        with torch.autocast("node", enabled=False):
            assert (x @ x).dtype == torch.float32
        with torch.autocast("node", dtype=torch.float16):
            assert (x @ x).dtype == torch.float16
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            assert (x @ x).dtype == torch.bfloat16
            assert (x.cpu() @ x.cpu()).dtype == torch.float16
        seen = []
        thread = threading.Thread(target=lambda: seen.append((x @ x).dtype))  # a region is its thread's own
        thread.start()
        thread.join()
        assert seen == [torch.float32]
    with torch.autocast("cpu"):
        assert (x @ x).dtype == torch.float32
    assert torch.get_autocast_dtype("node") == torch.bfloat16

    @torch.autocast("node", dtype=torch.bfloat16)
    def decorated() -> torch.Tensor:
        return x @ x

    with torch.inference_mode():
        assert decorated().dtype == torch.bfloat16
    with torch.autocast(x.device.type), pytest.raises(RuntimeError, match="float16"):
        torch.cat([x, x.half()])


def test_a_weight_is_cast_once() -> None:
    """So the gradients of its uses are summed in bfloat16, as here."""
    results = []
    for where, kind in (("node:1", "node"), ("cpu", "cpu")):
        x, w = send(leaves(), where)
        for cached in (True, False):
            with torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=cached):
                y = sum((x * i) @ w.T for i in range(1, 6))
            y.float().sum().backward()
        with torch.autocast(kind, dtype=torch.bfloat16):
            with torch.no_grad():
                x @ w.T
            (x @ w.T).sum().backward()
        results.append((x.grad, y))
    same(*results)


def test_the_gradients_of_a_weights_uses_are_summed_in_bfloat16() -> None:
    sums: dict[tuple[str, bool], torch.Tensor] = {}
    for where, kind in (("node:1", "node"), ("cpu", "cpu")):
        for cached in (True, False):
            x, w = send(leaves(), where)
            with torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=cached):
                y = sum(F.linear(x.detach() * i, w) for i in range(1, 6))
            y.float().sum().backward()
            sums[kind, cached] = w.grad.cpu()
    assert not torch.equal(sums["cpu", True], sums["cpu", False]), "nothing can be told by these numbers"
    for cached in (True, False):
        assert torch.equal(sums["node", cached], sums["cpu", cached])


def test_transforms() -> None:
    results = []
    for where, kind in ((dt.device(1, "cpu"), "node"), ("cpu", "cpu")):
        x, w = (t.detach() for t in send(leaves(), where))
        with torch.autocast(kind, dtype=torch.bfloat16):
            results.append(
                (
                    torch.func.grad(lambda a, w=w: (a @ w.T).float().sum())(x),
                    torch.func.vmap(lambda a, w=w: w @ a)(x),
                    torch.func.vmap(torch.func.grad(lambda a, w=w: (w @ a).sum()))(x),
                )
            )
    same(*results)


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ x.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (grad + grad.T) @ x


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_custom_functions(cast: torch.dtype | None) -> None:
    results = []
    for where, kind in ((dt.device(1, "cpu"), "node"), ("cpu", "cpu")):
        forward = torch.amp.custom_fwd(Half.forward, device_type=kind, cast_inputs=cast)
        backward = torch.amp.custom_bwd(Half.backward, device_type=kind)
        function = type("H", (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": backward})
        x, _ = send(leaves(), where)
        with torch.autocast(kind, dtype=torch.bfloat16):
            y = function.apply(x)
        y.float().sum().backward()
        results.append((y, x.grad))
    same(*results)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training(optimizer: Any) -> None:
    """A network in bfloat16 with a scaler that meets an infinity on its way."""
    results = []
    for where, kind in ((dt.device(1, "cpu"), "node"), ("cpu", "cpu")):
        model = net().to(where)
        opt = optimizer(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=2)
        x, y = send(batch(), where)
        out: list[Any] = []
        for step in range(6):
            opt.zero_grad()
            with torch.autocast(kind, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * float("inf") if step == 3 else loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            out.append((loss.detach(), scaler.get_scale()))
        saved = scaler.state_dict()
        other = torch.amp.GradScaler(kind)
        other.load_state_dict(saved)
        results.append((out, saved, [p.detach() for p in model.parameters()], other.get_scale()))
    same(*results)


def test_a_scaler_over_two_nodes() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, device=f"node:{k}")) for k in range(2)]
    opt = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler("node", init_scale=8.0)
    for bad in (False, True):
        opt.zero_grad()
        loss = parameters[0].sum() + parameters[1].sum().to("node:0") * (float("nan") if bad else 2)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    same(parameters[0].detach(), torch.zeros(2))  # the second step was skipped on both
    same(parameters[1].detach(), -torch.ones(2))
    assert scaler.get_scale() == 4.0


def test_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("node", dtype=torch.bfloat16):
            torch.ones(2, 2, device="node:1") @ torch.ones(2, 2, device="node:1")


LIBRARY = """
import torch
lib = torch.library.Library("theirs", "DEF")
lib.define("twice(Tensor x) -> Tensor")
lib.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
def cast(x):
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return torch.ops.theirs.twice(x.float())
for key in "AutocastCPU", "AutocastCUDA":
    lib.impl("twice", cast, key)
"""
SESSION = """
import torch, disttensor as dt
dt.init_master_worker(nodes=1, launcher="inproc")
"""


@pytest.mark.parametrize("order", [LIBRARY + SESSION, SESSION + LIBRARY], ids=["before", "after"])
def test_a_library_with_rules_of_its_own(order: str, script: Script) -> None:
    """It may be imported at any time."""
    use = """
with torch.autocast("node", torch.bfloat16):
    x = torch.ones(2, 2, device="node:0")
    print(torch.ops.theirs.twice(x @ x).tolist(), (x @ x).dtype)
with torch.autocast("cpu", torch.bfloat16):
    print(torch.ops.theirs.twice(torch.ones(2, dtype=torch.bfloat16)).dtype)
"""
    done = script(order + use)
    assert done.stdout.splitlines() == ["[[4.0, 4.0], [4.0, 4.0]] torch.bfloat16", "torch.float32"], done.stderr
