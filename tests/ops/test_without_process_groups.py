"""What of torch takes another branch without a process group, as in the script: on a mesh it is right, or refuses.

Torch's sources and its databases of modules, optimizers and operators are searched for what asks torch.distributed.
Each caller that is found is on a list, with what becomes of it on a mesh.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from operator_database import OPERATORS, samples
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from variants import chosen

import disttensor as dt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

TORCH = Path(torch.__file__).parent
OURS = torch.__version__.startswith("2.13.")
#: Folders of torch that are not part of an eager program, or are what is asked.
LEFT_OUT = {
    "distributed", "testing", "_dynamo", "_inductor", "_functorch", "_higher_order_ops", "_prims", "_subclasses",
    "_vendor", "_export", "export", "onnx", "ao", "fx", "jit",
}  # fmt: skip

SYNC = "test_sync_batch_norm.py: all ranks have the statistics of the whole batch"
DDP = "refused without a process group: REFUSED below"
NAMES = "names and types, and no ranks"
LOGS = "what is printed of a process: the script's own"
ONE = "the script reads for all ranks: no rank has samples of its own before dt.shard or dt.data.distribute"
#: The functions of torch 2.13 that name torch.distributed, and what that means on a mesh.
FUNCTIONS = {
    "__init__.py": {"": NAMES},
    "_jit_internal.py": {"": NAMES, "is_rref": NAMES},
    "_library/infer_schema.py": {"get_supported_param_types": NAMES},
    "_logging/_internal.py": {"emit": LOGS, "format": LOGS, "trace_structured": LOGS},
    "_utils.py": {"_chunk_or_narrow_cat": "whether it is traced, the same numbers"},
    "backends/xeon/run_cpu.py": {"launch": "a launcher"},
    "nn/modules/_functions.py": {"forward": SYNC, "backward": SYNC},
    "nn/modules/batchnorm.py": {"forward": SYNC},
    "nn/parallel/distributed.py": {"*": DDP},
    "overrides.py": {"get_testing_overrides": NAMES},
    "profiler/profiler.py": {"_get_distributed_info": LOGS, "_record_pg_config": LOGS},
    "utils/_debug_mode/_mode.py": {
        "__init__": NAMES, "__torch_dispatch__": NAMES, "module_tracker_setup": NAMES,
        "record_output_placements": NAMES,
    },
    "utils/_debug_mode/_utils.py": {
        "_stringify_dtensor_spec": NAMES, "_tensor_debug_string": NAMES, "hash_tensor_fn": NAMES, "to_str": NAMES,
    },
    "utils/cpp_extension.py": {"_get_cuda_arch_flags": LOGS},
    "utils/data/dataloader.py": {"__init__": ONE, "_get_distributed_settings": ONE, "_share_dist_seed": ONE},
    "utils/data/distributed.py": {"__init__": "refused unless rank and num_replicas are given: REFUSED below"},
    "utils/debug_log.py": {"_get_rank": LOGS},
}  # fmt: skip


def naming(path: Path) -> set[str]:
    """The functions of a file that name torch.distributed, or what is imported from it; "" is the module itself."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for found in ast.walk(tree):
        if isinstance(found, ast.Import):
            names |= {a.asname for a in found.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(found, ast.ImportFrom) and not found.level:
            imported = {a.asname or a.name: f"{found.module}.{a.name}" for a in found.names}
            names |= {name for name, what in imported.items() if what.startswith("torch.distributed")}
    functions: set[str] = set()

    def visit(found: ast.AST, function: str) -> None:
        if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = found.name
        named = isinstance(found, ast.Attribute) and ast.unparse(found).startswith("torch.distributed")
        if named or (isinstance(found, ast.Name) and found.id in names):
            functions.add(function)
        for child in ast.iter_child_nodes(found):
            visit(child, function)

    visit(tree, "")
    return functions


@pytest.mark.skipif(not OURS, reason="the list is that of torch 2.13's sources")
def test_each_function_of_torch_that_names_it_is_on_the_list() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(TORCH.rglob("*.py")):
        name = path.relative_to(TORCH)
        if name.parts[0] not in LEFT_OUT and b"distributed" in path.read_bytes() and (functions := naming(path)):
            found[name.as_posix()] = {"*"} if FUNCTIONS.get(name.as_posix(), {}).keys() == {"*"} else functions
    assert found == {name: set(functions) for name, functions in FUNCTIONS.items()}


# ---- what runs -------------------------------------------------------------------------------------------------------


@contextmanager
def asking(callers: set[tuple[str, str]]) -> Iterator[None]:
    """Adds (file, function) of each of torch's, outside of torch.distributed, that calls a function of that."""
    asked = str(TORCH / "distributed") + "/"

    def seen(frame: FrameType, event: str, _: object) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or not frame.f_code.co_filename.startswith(asked):
            return
        path = caller.f_code.co_filename
        if path.startswith(f"{TORCH}/") and not path.startswith(asked):
            callers.add((Path(path).relative_to(TORCH).as_posix(), caller.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        with suppress(Exception):  # what a sample is refused for is not looked at here
            yield
    finally:
        sys.setprofile(before)


def modules(every: bool) -> Iterator[Callable[[], Any]]:
    for info in module_db:
        for training in (True, False) if every or chosen(f"module {info.name}") else ():
            for given in info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )[: None if every else 2]:
                if given.forward_input is not None:
                    yield lambda info=info, given=given, training=training: _module(info, given, training)  # type: ignore[misc]


def _module(info: Any, given: Any, training: bool) -> None:
    made = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).train(training)
    out = made(*given.forward_input.args, **given.forward_input.kwargs)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.sum().backward()


def optimizers(every: bool) -> Iterator[Callable[[], Any]]:
    for info in optim_db:
        for given in info.optim_inputs_func(device="cpu")[: None if every else 2]:
            yield lambda info=info, given=given: _optimizer(info, given)  # type: ignore[misc]


def _optimizer(info: Any, given: Any) -> None:
    p = nn.Parameter(torch.ones(3, 3))

    def loss() -> torch.Tensor:
        p.grad = torch.ones(3, 3).to_sparse() if "Sparse" in info.optim_cls.__name__ else torch.ones(3, 3)
        return p.sum()

    optimizer = info.optim_cls([p], **given.kwargs)
    optimizer.step(loss)
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())


def operators(every: bool) -> Iterator[Callable[[], Any]]:
    for name, op in OPERATORS.items():
        if (every or chosen(f"operator {name}")) and torch.float32 in op.supported_dtypes("cpu"):
            for sample in samples(op, torch.float32, None if every else 1, False):
                yield lambda op=op, s=sample: op(s.input, *s.args, **s.kwargs)  # type: ignore[misc]


class Numbers(torch.utils.data.IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def by_hand(every: bool) -> Iterator[Callable[[], Any]]:
    """What no database has."""
    yield lambda: nn.SyncBatchNorm(2)(torch.ones(4, 2))
    yield lambda: list(DataLoader(range(3)))  # type: ignore[arg-type]
    yield lambda: list(DataLoader(Numbers()))
    yield lambda: DistributedSampler(range(3))  # type: ignore[arg-type]
    yield lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("programs", [modules, optimizers, operators, by_hand])
@pytest.mark.filterwarnings("ignore")
def test_each_caller_is_on_the_list(programs: Callable[[bool], Iterator[Callable[[], Any]]], every: bool) -> None:
    callers: set[tuple[str, str]] = set()
    count = 0
    for program in programs(every):
        count += 1
        with asking(callers):
            program()
    listed = {(file, function) for file, functions in FUNCTIONS.items() for function in functions}
    assert {(f, "*" if (f, "*") in listed else function) for f, function in callers} <= listed
    assert count > 4
    if programs is by_hand:  # that the callers are seen
        assert {f for f, _ in callers} == {
            "nn/modules/batchnorm.py", "nn/parallel/distributed.py", "utils/data/dataloader.py",
            "utils/data/distributed.py",
        }  # fmt: skip


# ---- what refuses ----------------------------------------------------------------------------------------------------

NO_GROUP = (ValueError, "Default process group has not been initialized")
REFUSED: dict[str, tuple[Callable[[Any], Any], tuple[type[Exception], str]]] = {
    "DistributedDataParallel": (
        lambda m: nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(m.device)),
        (TypeError, r"this model is on the mesh .*: dt\.DataParallel\(model, mesh\) is the same"),
    ),
    "DistributedSampler": (lambda m: DistributedSampler(range(4)), NO_GROUP),  # type: ignore[arg-type]
    "all_reduce": (
        lambda m: torch.distributed.all_reduce(torch.ones(2, device=m.device)),
        (TypeError, r"this tensor is on the mesh .*: dt\.all_reduce\(x, \.\.\., over='dp'\) does it"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_refuses(name: str) -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        m = dt.mesh(dp=2)
        program, (kind, text) = REFUSED[name]
        with pytest.raises(kind, match=text):
            program(m)
