"""Where torch takes another branch for subclasses, or off the CPU: the same values, and the same mistakes are told.

The lists of these places were made from the torch that `make test` runs on, and a newer one is held against them.
"""

from __future__ import annotations

import ast
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equal import same

import disttensor as dt

NODE = "node:0"
OURS = torch.__version__.startswith("2.13.")


@pytest.fixture(autouse=True, scope="module")
def node() -> Iterator[None]:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        yield


def _rank(m: Any, **options: Any) -> torch.Tensor:
    out = torch.empty(0, dtype=torch.int64, device=m.device)
    assert torch.linalg.matrix_rank(m, out=out, **options) is out
    return out


#: What is right, and what the CPU refuses by a look at the data: a program of ``t``, which makes a tensor of numbers.
PROGRAMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "one_hot": lambda t: F.one_hot(t(0, 2), 3),
    "one_hot, as many as there are": lambda t: F.one_hot(t(0, 2)),
    "one_hot, a class too many": lambda t: F.one_hot(t(0, 3), 2),
    "one_hot, the class after the last": lambda t: F.one_hot(t(0, 2), 2),
    "one_hot, an index to ignore": lambda t: F.one_hot(t(0, -1), 2),
    "one_hot, a class of -1": lambda t: F.one_hot(t(-1)),
    "one_hot of none": lambda t: F.one_hot(t(dtype=torch.int64)),
    "one_hot of none, classes": lambda t: F.one_hot(t(dtype=torch.int64), 3),
    "one_hot of floats": lambda t: F.one_hot(t(0.0), 3),
    "quantile": lambda t: torch.quantile(t(1.0, 2.0, 5.0), t(0.2, 0.9)),
    "quantile, 1.5": lambda t: torch.quantile(t(1.0, 2.0, 5.0), t(0.2, 1.5)),
    "quantile, -0.5": lambda t: torch.quantile(t(1.0, 2.0, 5.0), t(-0.5)),
    "nanquantile, -0.5": lambda t: torch.nanquantile(t(1.0, 2.0, 5.0), t(-0.5)),
    "rank": lambda t: _rank(t(1.0, 2.0).diag()),
    "rank, tol": lambda t: _rank(t(1.0, 2.0).diag(), tol=1.5),
    "rank, atol": lambda t: _rank(t(1.0, 2.0).diag(), atol=t(1.5)[0], rtol=t(0.0)[0]),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_local(name: str, inference: bool) -> None:
    def values(device: str) -> Any:
        with torch.inference_mode(inference):
            return PROGRAMS[name](lambda *numbers, **options: torch.tensor(numbers, device=device, **options))

    try:
        expected = values("cpu")
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            values(NODE).cpu()
    else:
        same(values(NODE), expected)


#: Losses of complex eigenvectors: torch refuses those that depend on the phases.
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "phases": lambda V: V.imag.sum(),
    "no phases": lambda V: V.abs().square().mul(torch.arange(9.0, device=V.device).view(3, 3).sin()).sum(),
    "nan": lambda V: (V.abs() * torch.tensor(torch.nan, device=V.device)).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["eig", "eigh"])
@pytest.mark.parametrize("again", [False, True])
def test_a_loss_that_depends_on_the_phases_of_eigenvectors(name: str, loss: str, again: bool) -> None:
    """``again``: with a derivative of the derivative."""
    at = torch.randn(2, 3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(3))
    hermitian = at + at.mH

    def gradient(device: str) -> torch.Tensor:
        x = (hermitian if name == "eigh" else at).to(device).requires_grad_()
        (found,) = torch.autograd.grad(LOSSES[loss](getattr(torch.linalg, name)(x)[1]), x, create_graph=again)
        return torch.autograd.grad(found.abs().sum(), x)[0] if again else found

    try:
        expected = gradient("cpu")
    except RuntimeError as error:
        assert loss != "no phases"
        with pytest.raises(RuntimeError, match=re.escape(str(error).split(" quantity")[0])):
            gradient(NODE).cpu()
    else:
        torch.testing.assert_close(gradient(NODE).cpu(), expected, rtol=1e-9, atol=1e-9)


def test_a_quantile_has_gradients() -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        x, q = (torch.tensor(v, device=device, requires_grad=True) for v in ([1.0, 2.0, 5.0], [0.3, 0.6]))
        torch.quantile(x, q).sum().backward()
        return [x.grad, q.grad]

    same(gradients(NODE), gradients("cpu"))


# ---- the lists -------------------------------------------------------------------------------------------------------

BITS = "the same numbers: what is in place for others is not for subclasses"
FORMULA = "another formula, right up to rounding: CLOSE in test_operator_database.py"
OWN = "torch_backend/composites has the branch of the node's kind of device"
BEYOND = "a forward derivative, or one of a derivative, by torch's formula for subclasses"
#: The functions of torch 2.13's C++ that ask whether a tensor is like a subclass, and what that means here.
CPP = {
    "quantile_compute": f"{OWN}: torch looks at q on the CPU only",
    "matrix_rank_impl": f"{OWN}: torch leaves `out=` as it is",
    "linalg_eigvals": OWN,
    "linalg_eigvalsh": OWN,
    "linalg_svdvals": OWN,
    "linear": OWN,
    "ctc_loss": OWN,
    "_scaled_dot_product_attention_math": OWN,
    "_embedding_bag_backward_symint": "a node does it whole",
    "_matmul_impl": "a fold that needs no gradient of the right operand: the same products",
    "cross_entropy_loss_symint": "the smoothed labels' weights: summed with zeros for those that are ignored",
    "max_pool1d": "the kernel that gives indices, too: the same numbers",
    "reshape_symint": "a view that is none of torch's alias",
    "resize_output": "asking.py: the node says what has become of it",
    "resize_output_symint": "asking.py: the node says what has become of it",
    "isclose": BITS,
    "hinge_embedding_loss": BITS,
    "margin_ranking_loss": BITS,
    "gather_backward": BITS,
    "index_select_backward_symint": BITS,
    "trace_backward_symint": BITS,
    "value_selecting_reduction_backward_symint": BITS,
    "masked_select_backward": BITS,
    "cumprod_backward": FORMULA,
    "prod_backward": FORMULA,
    "cummaxmin_backward": BITS,
    "can_accumulate_inplace": BITS,
    "accumulate": BITS,
    "aminmax_backward": BITS,
    "atan2_backward": BITS,
    "binary_cross_entropy_target_backward": BITS,
    "binary_cross_entropy_with_logits_backward": BITS,
    "binary_cross_entropy_with_logits_target_backward": BITS,
    "clamp_backward": BITS,
    "clamp_backward_min_max": BITS,
    "evenly_distribute_backward": BITS,
    "index_backward": BITS,
    "linalg_eig_backward": OWN,
    "linalg_det_backward": BITS,
    "householder_product_backward": "right up to rounding: ormqr of FAILS in test_operator_database.py",
    "masked_fill_backward": BITS,
    "take_backward": BITS,
    "binary_cross_entropy_double_backward": BEYOND,
    "binary_cross_entropy_double_backward_grad_output": BEYOND,
    "binary_cross_entropy_double_backward_target": BEYOND,
    "differential_analytic_matrix_function": "matrix_exp's derivative: the same numbers",
    "_affine_jvp": BEYOND,
    "_invstd_jvp": BEYOND,
    "_norm_jvp": BEYOND,
    "norm_jvp": BEYOND,
    "rms_norm_jvp": BEYOND,
    "rms_norm_rstd_jvp": BEYOND,
    "householder_product_jvp": BEYOND,
    "logcumsumexp_jvp": BEYOND,
    "logsumexp_jvp": BEYOND,
}
#: Those of torch's C++ that look at the Python key, or at the type of the device, themselves. They can't be found by a
#: scan of the library; test_operator_boundaries.py looks for what comes of them.
KEY = {"one_hot": f"{OWN}: torch does not look whether there are such classes"}


@pytest.mark.slow
@pytest.mark.skipif(not OURS, reason="the list is that of another torch")
def test_torchs_library_asks_for_subclasses_where_the_list_says() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    inlined = "_ZN2at20isTensorSubclassLike", "_ZN2at24areAnyTensorSubclassLike", "_ZN2at32areAnyOptionalTensorSub"
    asking = callers(library, ("_ZN3c104impl21dispatch_mode_enabledEv",)) | callers(library, inlined)
    asking = {name for name in asking if not any(text in name for text in ("SubclassLike",))}
    assert asking, "the scan has found nothing"
    # in a mangled name each part has its length before it
    unknown = {name for name in asking if not any(f"{len(known)}{known}" in name for known in CPP)}
    assert not unknown
    assert not {known for known in CPP if not any(f"{len(known)}{known}" in name for name in asking)}


def callers(library: Path, wanted: tuple[str, ...]) -> set[str]:
    """The mangled names of the functions of an x86-64 library that call functions whose names begin so."""
    data = np.memmap(library, np.uint8, "r")

    def of(kind: str, at: int) -> Any:
        return struct.unpack_from(kind, data[at : at + struct.calcsize(kind)])

    (offset,), (count, names) = of("<Q", 0x28), of("<HH", 0x3C)
    headers = [of("<IIQQQQIIQQ", offset + 64 * i) for i in range(count)]
    texts = headers[names][4]

    def text(at: int) -> str:
        end = at
        while data[end]:
            end += 1
        return bytes(data[at:end]).decode()

    sections = {text(texts + h[0]): h for h in headers}

    def symbols(table: str, strings: str) -> list[tuple[int, int, int]]:
        """(address, kind, where its name is)."""
        h, base = sections[table], sections[strings][4]
        kind = np.dtype([("name", "<u4"), ("info", "u1"), ("x", "u1"), ("y", "<u2"), ("at", "<u8"), ("n", "<u8")])
        rows = np.frombuffer(data[h[4] : h[4] + h[5]], kind)
        return list(zip(rows["at"].tolist(), (rows["info"] & 15).tolist(), (rows["name"] + base).tolist(), strict=True))

    own = sorted((at, name) for at, kind, name in symbols(".symtab", ".strtab") if kind == 2 and at)
    dynamic = symbols(".dynsym", ".dynstr")
    targets = {at for at, name in own if text(name).startswith(wanted)}
    plt = sections[".rela.plt"]
    rows = np.frombuffer(data[plt[4] : plt[4] + plt[5]], np.dtype([("at", "<u8"), ("info", "<u8"), ("x", "<i8")]))
    slots = {at for at, info in rows[["at", "info"]].tolist() if text(dynamic[info >> 32][2]).startswith(wanted)}
    _, _, _, address, start, size, *_ = sections[".plt"]
    for at in range(0, size, 16):
        if tuple(data[start + at : start + at + 2]) == (0xFF, 0x25):
            (distance,) = of("<i", start + at + 2)
            if address + at + 6 + distance in slots:
                targets.add(address + at)
    _, _, _, address, start, size, *_ = sections[".text"]
    found = set[str]()
    for at in range(0, size, 1 << 24):
        block = np.asarray(data[start + at : start + min(at + (1 << 24) + 5, size)])
        calls = np.nonzero((block[:-4] == 0xE8) | (block[:-4] == 0xE9))[0]
        parts = [block[calls + i + 1].astype(np.int64) << 8 * i for i in range(4)]
        distance = (parts[0] | parts[1] | parts[2] | parts[3]).astype(np.uint32).view(np.int32)
        for call in calls[np.isin(address + at + calls + 5 + distance, np.array(sorted(targets)))].tolist():
            found.add(text(own[bisect_right(own, (address + at + call, 1 << 62)) - 1][1]))
    return found


DEVICES = "a check of devices, or where a copy goes"
COUNT = (
    "a step count on the CPU, and kernels that take it: torch_backend/foreach_optimizers.py, graphs/optimizer_steps.py"
)
CUDA = "CUDA's own, which local CPU tensors do not take either"
#: The functions of torch's Python that ask for a tensor's class or kind of device, and what that means here.
PYTHON = {
    "functional.py": {"norm": "the name of the device is on the list"},
    "_lowrank.py": {"pca_lowrank": "for __torch_function__, which proxies do not have"},
    "nn/functional.py": {
        "max_pool3d_with_indices": CUDA,
        "interpolate": "deterministic algorithms: the formula of CUDA, whose gradients are the same up to rounding",
        "pad": CUDA,
    },
    "nn/modules/activation.py": {
        "_check_arg_device": "the name of the device is on the list",
        "_is_make_fx_tracing": "modes, not operands",
        "forward": "the name of the device is on the list",
    },
    "nn/modules/batchnorm.py": {"forward": "SyncBatchNorm: test_without_process_groups.py"},
    "nn/modules/container.py": {"extra_repr": DEVICES},
    "nn/modules/linear_cross_entropy.py": {
        "weight_grad_input": CUDA,
        "logits_upcast": CUDA,
        "div": "DEVICE of test_operator_database.py: gradients in another precision",
    },
    "nn/modules/module.py": {
        "_apply": "proxies are no wrappers: storage/set_data.py",
        "_load_from_state_dict": "proxies are tensors",
    },
    "nn/modules/rnn.py": {"flatten_parameters": CUDA},
    "nn/modules/transformer.py": {"forward": "the name of the device is on the list"},
    "nn/utils/_expanded_weights/expanded_weights_impl.py": {"is_cuda": CUDA},
    "nn/utils/convert_parameters.py": {"_check_param_device": DEVICES},
    "nn/utils/parametrize.py": {
        "_maybe_set": "proxies are no wrappers",
        "remove_parametrizations": "a Parameter's class, not a tensor's",
    },
    "nn/utils/rnn.py": {"_packed_sequence_init_args": DEVICES, "cuda": DEVICES, "cpu": DEVICES, "is_cuda": CUDA},
    **{
        f"optim/{name}.py": {f"{kind}_{name.lstrip('_')}": COUNT for kind in kinds.split()}
        for name, kinds in {
            "_adafactor": "_multi_tensor",
            "adagrad": "_multi_tensor",
            **dict.fromkeys(
                ("adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"),
                "_single_tensor _multi_tensor",
            ),
        }.items()
    },
    "optim/optimizer.py": {
        "_disable_dynamo_if_unsupported": "torch.compile",
        "_default_to_fused_or_foreach": "torch_patches: torch_backend/foreach_optimizers.py",
        "_device_dtype_check_for_fused": DEVICES,
        "_get_capturable_supported_devices": CUDA,
        "wrapper": "torch.compile",
        "maybe_fallback": "torch.compile",
    },
    "distributions/kl.py": {"_kl_expfamily_expfamily": "a distribution's class"},
    "distributions/utils.py": {"broadcast_all": "proxies are tensors"},
}
_ASKS = re.compile(
    r"is_traceable_wrapper_subclass|is_tensor_like|type\([\w.\[\]]+\) (is|==|in|is not|not in) |\.device\.type|"
    r"\.is_cuda\b|\.is_cpu\b|_get_privateuse|privateuse|_is_functional_tensor|is_fake\b"
)
#: What computes, and with the user's tensors.
_FILES = ("functional.py", "_lowrank.py", "nn/functional.py", "nn/modules", "nn/utils", "optim", "distributions")


@pytest.mark.skipif(not OURS, reason="the list is that of another torch")
def test_torchs_python_asks_for_classes_where_the_list_says() -> None:
    found: dict[str, set[str]] = {}
    root = Path(torch.__file__).parent
    for file in sorted(
        path for name in _FILES for path in ([root / name] if ".py" in name else root.glob(f"{name}/**/*.py"))
    ):
        source = file.read_text()
        if not _ASKS.search(source):
            continue
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                code = re.sub(r'"""[\s\S]*?"""|#.*', "", "\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if _ASKS.search(code):
                    found.setdefault(str(file.relative_to(root)), set()).add(node.name)
    assert found == {file: set(functions) for file, functions in PYTHON.items()}
