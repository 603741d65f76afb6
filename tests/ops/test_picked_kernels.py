"""Nodes compute with the kernels that their own torch would pick, also where the script's machine is another.

A lesser CPU is this one with ``ONEDNN_MAX_CPU_ISA``, which oneDNN heeds when it is first used, and torch asks oneDNN.
So scripts and nodes with two CPUs are processes here; other records are put into a place of nodes that compute as ever.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from equal import outcome, same
from sources import agree, below
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from variants import variants

import disttensor as dt
from disttensor import testing
from disttensor.dispatch import op_table
from disttensor.runtime.host import capabilities as abilities
from disttensor.runtime.protocol.commands import Abilities
from disttensor.session import current, kernel_choice
from disttensor.session.kernel_choice import KernelFacts

pytestmark = pytest.mark.usefixtures("nodes")

#: Operators by which one sees what was picked; others are the same either way, or local torch has them in parts.
PICKED = ("mkldnn_rnn_layer", "sigmoid", "_softmax", "_scaled_dot_product_", "native_batch_norm", "convolution")


class Seen(TorchDispatchMode):
    """The operators among those above that torch has come to, below its composites."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if name.startswith(PICKED):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def picked(run: Callable[[], Any]) -> list[str]:
    with Seen() as seen:
        run()
    return seen.names


# ---- as this CPU's torch ---------------------------------------------------------------------------------------------

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "LSTM, no biases": lambda: nn.LSTM(3, 4, bias=False, batch_first=True),
    "LSTM, projections": lambda: nn.LSTM(3, 4, proj_size=2),
    "GRU": lambda: nn.GRU(3, 4),
    "RNN": lambda: nn.RNN(3, 4),
    "batch norm": lambda: nn.BatchNorm1d(2),
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, batch_first=True),
    "convolution": lambda: nn.Conv1d(2, 2, 1),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", LAYERS)
def test_as_local_torch_picks(layer: str, dtype: torch.dtype, onednn: bool, graph: bool) -> None:
    local = LAYERS[layer]().to(dtype)
    x = torch.randn(2, 2, 3).to(dtype)
    remote, there = LAYERS[layer]().to(dtype).to("node:1"), x.to("node:1")
    with torch.backends.mkldnn.flags(enabled=onednn, allow_tf32=None), torch.set_grad_enabled(graph):
        assert picked(lambda: remote(there)) == picked(lambda: local(x))
    dt.synchronize()


FORMS = {
    "plain": ((2, 4, 5, 8), (2, 4, 5, 8), {}),
    "dropout": ((2, 4, 5, 8), (2, 4, 5, 8), {"dropout_p": 0.5}),
    "causal": ((2, 4, 5, 8), (2, 4, 7, 8), {"is_causal": True}),
    "groups": ((2, 4, 5, 8), (2, 2, 5, 8), {"enable_gqa": True}),
    "one head": ((2, 4, 5, 8), (2, 1, 5, 8), {}),
    "unbatched": ((4, 5, 8), (4, 5, 8), {}),
}


@pytest.mark.filterwarnings("ignore")  # torch tells why no kernel fits
@pytest.mark.parametrize("backends", [["MATH"], ["FLASH_ATTENTION"], ["MATH", "FLASH_ATTENTION"], []], ids="-".join)
@pytest.mark.parametrize("mask", [None, "plain", "learned"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_heeds_the_switches_of_the_script(form: str, mask: str | None, backends: list[str]) -> None:
    queries, keys, options = FORMS[form]
    operands = [torch.randn(queries), torch.randn(keys), torch.randn(keys)]
    if mask is not None and not options.get("is_causal"):
        operands.append(torch.randn(queries[-2], keys[-2]).requires_grad_(mask == "learned"))
    results = []
    for where in ("node:1", "cpu"):
        sent = [x.detach().to(where).requires_grad_(x.requires_grad) for x in operands]
        with sdpa_kernel([getattr(SDPBackend, name) for name in backends]):
            try:
                results.append(picked(lambda sent=sent: F.scaled_dot_product_attention(*sent, **options)))
            except RuntimeError as error:
                results.append(str(error).splitlines()[0])
    assert results[0] == results[1]
    dt.synchronize()


def test_a_switch_is_heeded_where_the_same_call_was_made_before() -> None:
    x = torch.randn(2, 4, 5, 8)
    for where in ("cpu", "node:1"):
        sent, found = x.to(where), []
        for name in ("FLASH_ATTENTION", "MATH", "FLASH_ATTENTION"):
            with sdpa_kernel(getattr(SDPBackend, name)):
                found.append(picked(lambda sent=sent: F.scaled_dot_product_attention(sent, sent, sent)))
        assert found[0] == found[2] != found[1]


def test_nodes_tell_what_they_can() -> None:
    session = current.session()
    for hello in (node.hello for node in session.nodes):
        assert hello.abilities == abilities.own(2)
        assert hello.abilities.capabilities == ((0, 0), (0, 0))
    for place in session.places.every:
        assert place.record == place.twin.record == kernel_choice.here()._replace(node=abilities.own(2))


# ---- with other records ----------------------------------------------------------------------------------------------

LSTMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "no biases, batch first": {"bias": False, "batch_first": True},
    "dropout": {"num_layers": 2, "dropout": 0.5},
}


def trained(options: dict[str, Any], dtype: torch.dtype, where: torch.device | str) -> list[torch.Tensor]:
    """What an LSTM gives, and its gradients."""
    torch.default_generator.manual_seed(1)
    layer = nn.LSTM(3, 4, **options).to(dtype)
    x = torch.randn(5, 2, 3).to(dtype)
    layer, x = layer.to(where), x.to(where).requires_grad_()
    dt.synchronize()
    torch.default_generator.manual_seed(2)
    out, (h, c) = layer(x * 1)  # of a leaf, autocast would keep the cast
    loss = out.square().sum() + h.sum() + c.square().sum()
    grads = torch.autograd.grad(loss, [x, *layer.parameters()])
    dt.synchronize()
    return [out.detach(), h.detach(), c.detach(), *grads]


def another(**abilities: bool) -> KernelFacts:
    here = kernel_choice.here()
    names = {name: getattr(here.node, name) for name in ("cpu", "onednn", "bfloat16", "float16")}
    return here._replace(node=Abilities(**{**names, **abilities}))


@pytest.mark.parametrize("options", LSTMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_that_can_less(options: str, dtype: torch.dtype) -> None:
    """It computes an LSTM as this machine's torch does without oneDNN."""
    place = current.session().places.at(1, "cpu")
    with testing.taken_for(place, another(onednn=dtype != torch.float32, bfloat16=False, float16=False)):
        got = trained(LSTMS[options], dtype, place.device)
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        expected = trained(LSTMS[options], dtype, "cpu")
    assert torch.backends.mkldnn.enabled
    same(got, expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", LSTMS)
def test_a_script_that_can_less(options: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes compute an LSTM as a script on their machine would."""
    device = dt.device(1, "cpu")
    with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        expected = outcome(lambda: trained(LSTMS[options], torch.float32, "cpu"))  # oneDNN may have no bfloat16
    none = another(onednn=False, bfloat16=False, float16=False)
    monkeypatch.setattr(kernel_choice, "here", lambda: none)
    with torch.autocast("node", enabled=autocast, dtype=torch.bfloat16):
        with Seen() as seen:
            outcome(lambda: nn.LSTM(3, 4).to(device)(torch.zeros(2, 1, 3, device=device)))
        assert "mkldnn_rnn_layer" in seen.names
        got = outcome(lambda: trained(LSTMS[options], torch.float32, device))
    same(got, expected, strides=False)


#: What is issued for a CUDA device with this capability; nodes here can't compute it.
CUDA: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "flash": ((8, 0), {}, "_scaled_dot_product_flash_attention"),
    "flash, padded": ((8, 0), {"width": 12}, "_scaled_dot_product_flash_attention"),
    "efficient": ((8, 0), {"mask": True}, "_scaled_dot_product_efficient_attention"),
    "cudnn": ((9, 0), {}, "_scaled_dot_product_cudnn_attention"),
    "cudnn, masked": ((9, 0), {"mask": True}, "_scaled_dot_product_cudnn_attention"),
    "parts": ((7, 0), {}, "_scaled_dot_product_attention_math"),
}


@pytest.mark.parametrize("case", CUDA)
def test_attention_for_cuda(case: str) -> None:
    """Which kernel a CUDA node is told to use, and the shape of what that gives. It has never run on one."""
    capability, options, name = CUDA[case]
    device = dt.device(1, "cuda:1")
    width = options.get("width", 64)
    q = torch.zeros(2, 4, 6, width, dtype=torch.bfloat16, device=device).requires_grad_()
    mask = torch.ones(6, 6, dtype=torch.bool, device=device) if options.get("mask") else None
    with testing.as_cuda(device, capability), Seen() as seen:
        try:
            out = F.scaled_dot_product_attention(q, q, q, mask)
        except NotImplementedError:
            assert mask is not None  # it is expanded, so that the node was asked
            out = None
    names = [n for n in seen.names if n.startswith("_scaled")]
    assert names == ([] if name.endswith("math") else [name])
    if out is None:
        return
    assert out.shape == (2, 4, 6, width)
    if names:
        with pytest.raises((RuntimeError, NotImplementedError)):
            dt.synchronize()


# ---- two CPUs --------------------------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """A tensor's facts."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


PICKS = """
import json
import torch
from disttensor.runtime.host import capabilities as abilities
from torch.utils._python_dispatch import TorchDispatchMode
names = []
class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names.append(func.name())
        return func(*args, **(kwargs or {}))
picks = {}
for dtype in ("float32", "float64", "bfloat16", "float16"):
    for graph in (True, False):
        layer = torch.nn.LSTM(3, 4).to(getattr(torch, dtype))
        x = torch.zeros(2, 1, 3, dtype=getattr(torch, dtype))
        names.clear()
        with torch.set_grad_enabled(graph), Seen():
            layer(x)
        picks[f"{dtype} {graph}"] = "onednn" if "aten::mkldnn_rnn_layer" in names else "parts"
told = abilities.cpu()
print(json.dumps([picks, [told.cpu, told.onednn, told.bfloat16, told.float16]]))
"""


@pytest.mark.parametrize("isa", variants(["AVX2", "ALL", "SSE41", "AVX512_CORE"]))
def test_an_lstm_on_cpus_as_torch_itself_chooses(
    isa: str, script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = script(PICKS, ONEDNN_MAX_CPU_ISA=isa)
    assert done.returncode == 0, done.stderr
    picks, told = json.loads(done.stdout)
    record = KernelFacts("cpu", (0, 0), kernel_choice.here().version, Abilities(*told))
    for key, expected in picks.items():
        dtype, _, graph = key.partition(" ")
        x = Fact((2, 1, 3), (3, 3, 1), 0, getattr(torch, dtype))
        assert kernel_choice.lstm(record, x, False, graph == "True") == expected, key
    if isa in ("SSE41", "AVX2"):
        assert picks["bfloat16 True"] == "parts"  # the variable is heeded, or this test would show less than it says


TWO = """
import os
import torch
SCRIPT, NODES = os.environ["SCRIPT"], os.environ["NODES"]
os.environ["ONEDNN_MAX_CPU_ISA"] = SCRIPT
from disttensor.runtime.host import capabilities as abilities
mine = abilities.cpu()  # from here on this process has this CPU
os.environ["ONEDNN_MAX_CPU_ISA"] = NODES
import disttensor as dt
from disttensor.session import current as state
torch.set_num_threads(1)
torch.manual_seed(0)
weights = torch.nn.LSTM(3, 4, 2, bidirectional=True).bfloat16().state_dict()
x = torch.randn(5, 2, 3).bfloat16()
def trained(weights, x):
    with torch.enable_grad():
        layer = torch.nn.LSTM(3, 4, 2, bidirectional=True).bfloat16()
        layer.load_state_dict(weights)
        layer.to(x.device)
        x = x.detach().requires_grad_()
        out, (h, c) = layer(x)
        (out.square().sum() + h.sum() + c.sum()).backward()
    return [t.detach().cpu() for t in (out, h, c, x.grad, *(p.grad for p in layer.parameters()))]
with dt.init_master_worker(nodes=1, threads=1):
    told = state.session().nodes[0].hello.abilities
    expected = dt.run(trained, weights, x, node=0)
    got = trained(weights, x.to("node:0"))
    assert [torch.equal(a, b.cpu()) for a, b in zip(got, expected, strict=True)] == [True] * len(got)
print(mine.bfloat16, told.bfloat16)
"""


ALL = """
from disttensor.runtime.host import capabilities as abilities
print(abilities.cpu().bfloat16)
"""


@pytest.mark.parametrize(("script_has", "nodes_have"), [("AVX2", "ALL"), ("ALL", "AVX2")])
def test_a_script_and_nodes_with_two_cpus(
    script_has: str, nodes_have: str, script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """An LSTM in bfloat16, which the node's own torch would compute so, too: to the bit, with its gradients."""
    done = script(TWO, SCRIPT=script_has, NODES=nodes_have)
    assert done.returncode == 0, done.stderr
    best = script(ALL, ONEDNN_MAX_CPU_ISA="ALL")  # the tests' own may be a lesser one
    assert done.stdout.split() == [
        {"AVX2": "False", "ALL": best.stdout.strip()}[who] for who in (script_has, nodes_have)
    ]


# ---- all overrides ---------------------------------------------------------------------------------------------------

#: What stands between an operator and what torch would do with it on our device -> the function of kernel_choice.py by
#: which it chooses, or why there is nothing to choose by a record. A new override needs its line.
SAME = "the kernel is one on every kind of device and CPU; "
OVERRIDES: dict[str, str] = {
    "scaled_dot_product_attention": "attention",
    **dict.fromkeys(("lstm.input",), "lstm"),
    **dict.fromkeys(("gru.input", "rnn_tanh.input", "rnn_relu.input"), "shown_a_cpu"),
    **dict.fromkeys(("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data"), "shown_a_cpu"),
    **dict.fromkeys(("lstm_cell", "gru_cell"), "shown_a_cpu"),
    **dict.fromkeys(("native_dropout", "native_dropout_backward"), "dropout"),
    "mkldnn_rnn_layer": "lstm",
    "linear": SAME + "Linear.cpp asks for layouts and strides only",
    **dict.fromkeys(("linalg_eig", "_linalg_eigh"), SAME + "a gradient's look at phases is added"),
    **dict.fromkeys(("linalg_svdvals", "linalg_eigvalsh", "linalg_eigvals"), SAME + "a gradient decides"),
    "ctc_loss.Tensor": SAME + "but cuDNN's, which wants targets on the CPU",
    "_pack_padded_sequence": SAME + "its lengths are local on CUDA, too",
    **dict.fromkeys(
        ("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta", "native_channel_shuffle"), SAME + "sent whole"
    ),
    "one_hot": SAME + "sent whole, for its checks",
    **dict.fromkeys(("quantile", "quantile.out", "nanquantile", "nanquantile.out"), "checks_quantiles"),
    **dict.fromkeys(
        [
            f"linalg_matrix_rank.{out}"
            for out in ("out", "out_tol_tensor", "atol_rtol_tensor_out", "atol_rtol_float_out")
        ],
        SAME + "what it gives is written into what is given",
    ),
    **dict.fromkeys(
        (
            "uniform_",
            "normal_",
            "exponential_",
            "cauchy_",
            "geometric_",
            "log_normal_",
            "random_.from",
            "random_.to",
            "bernoulli_.float",
        ),
        SAME + "its numbers are looked at before it is sent",
    ),
    "_embedding_bag_backward": SAME + "for sparse gradients its parts are torch's",
    "_amp_foreach_non_finite_check_and_unscale_": SAME + "sent whole, and ranks of a mesh agree afterwards",
    **dict.fromkeys(("silu_backward", "mish_backward", "_local_scalar_dense"), SAME + "sent whole"),
}
#: Handlers that make, move or alias tensors: nothing is computed.
NOT_COMPUTED = {
    *("_to_copy", "alias", "copy_", "detach", "lift", "lift_fresh", "is_pinned", "is_same_size", "record_stream"),
    *("empty.memory_format", "empty_strided", "empty_like", "full_like", "ones_like", "rand_like", "randn_like"),
    *("zeros_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "index.Tensor"),
    "_sparse_coo_tensor_with_dims_and_tensors",
    *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
}


def test_every_override_is_decided_by_a_record() -> None:
    """Or it says why not: what torch has registered for our device, and what has a handler."""
    named = {op.name() for op in op_table._handlers}
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        named.update(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    ours = {name.removeprefix("aten::") for name in named if name.startswith("aten::")}
    assert ours == OVERRIDES.keys() | NOT_COMPUTED
    by = {why for why in OVERRIDES.values() if not why.startswith(SAME)}
    assert all(callable(getattr(kernel_choice, name)) for name in by)
    python = {"foreach", "averages_at_once", "casts"}  # of foreach_optimizers.py, overrides.py, autocast.py
    decide = {n for n, f in vars(kernel_choice).items() if n.islower() and n[0] != "_" and _takes_a_record(f)}
    assert by | python == decide


def _takes_a_record(f: object) -> bool:
    return inspect.isfunction(f) and next(iter(inspect.signature(f).parameters), "") == "record"


#: Where else the front end asks which kernels a place has, and for what but a kernel.
ASKED = {
    "torch_backend/composites/as_cpu.py": "whether a cell that is traced is a CPU's, which computes it by parts",
    "torch_backend/composites/sdpa.py": "the name of the kernel that was chosen",
    "dispatch/rng_states.py": "the size of a generator's state",
    "collectives/issue.py": "which channels take the operands of a collective",
    "session/places.py": "where it is told",
    "verify/selfcheck.py": "how exact results have to be",
    "session/channel_router.py": "which channels take the operands of a collective",
    "torch_backend/composites/wider_dtypes.py": "what a CPU lacks and CUDA has",
    "testing/__init__.py": "where tests tell another one",
}


def test_no_kernel_is_chosen_elsewhere() -> None:
    asks = re.compile(r"\.kernels\b(?!\.| import)")
    asking = {file.name.removeprefix("disttensor/") for file in below("disttensor") if asks.search(file.text)}
    agree(asking - {"session/kernel_choice.py"}, ASKED, "kernel_choice.py alone asks for kernels")


def test_composites_with_kernels_of_their_own() -> None:
    """Torch takes these apart for our device, though a CPU or CUDA has one kernel: its own table says which."""
    from importlib.resources import files

    table = files("torchgen").joinpath("packaged/ATen/native/native_functions.yaml").read_text()
    found = set()
    for block in table.split("\n- func: ")[1:]:
        keys = re.search(r"\n  dispatch:\n((?:    .*\n?)+)", block)
        names = {k.strip() for line in (keys[1] if keys else "").splitlines() for k in line.split(":")[0].split(",")}
        if "CompositeImplicitAutograd" in names and names & {"CPU", "CUDA"}:
            found.add(block.partition("(")[0])
    assert found - {"_fused_rms_norm"} <= OVERRIDES.keys()
    # on CUDA torch has this one whole, and nodes compute its parts
    assert "_fused_rms_norm" in found
