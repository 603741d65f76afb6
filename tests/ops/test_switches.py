"""Torch's switches (determinism, precision, kernels) as the script sets them: nodes follow in the order of issue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import disttensor as dt


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    """Two nodes that are processes: their switches are their own."""
    with dt.init_master_worker(nodes=2, launcher="local"):
        for node in range(2):
            torch.ones(1 << 14).to(f"node:{node}").cpu()  # connects the data channel, which stays
        yield


def assigned(path: str, value: object) -> Callable[[], object]:
    def assign() -> None:
        owner, _, name = path.rpartition(".")
        found: Any = torch
        for part in owner.split(".")[1:]:
            found = getattr(found, part)
        setattr(found, name, value)

    return assign


#: What a user writes, and what it changes, as the user reads it.
USES: dict[str, tuple[Callable[[], object], str]] = {
    "determinism": (lambda: torch.use_deterministic_algorithms(True), "torch.are_deterministic_algorithms_enabled()"),
    "determinism with warnings": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        "torch.is_deterministic_algorithms_warn_only_enabled()",
    ),
    "debug mode": (lambda: torch.set_deterministic_debug_mode("error"), "torch.get_deterministic_debug_mode()"),
    "fill": (
        assigned("torch.utils.deterministic.fill_uninitialized_memory", False),
        "torch.utils.deterministic.fill_uninitialized_memory",
    ),
    "matmul precision": (lambda: torch.set_float32_matmul_precision("medium"), "torch.get_float32_matmul_precision()"),
    "tf32 of matmul": (
        assigned("torch.backends.cuda.matmul.allow_tf32", True), "torch.backends.cuda.matmul.allow_tf32"
    ),
    "tf32 of cudnn": (assigned("torch.backends.cudnn.allow_tf32", False), "torch.backends.cudnn.allow_tf32"),
    "cudnn": (assigned("torch.backends.cudnn.enabled", False), "torch.backends.cudnn.enabled"),
    "cudnn deterministic": (assigned("torch.backends.cudnn.deterministic", True), "torch.backends.cudnn.deterministic"),
    "benchmark": (assigned("torch.backends.cudnn.benchmark", True), "torch.backends.cudnn.benchmark"),
    "fp16 sums": (
        assigned("torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction", False),
        "torch._C._get_cublas_allow_fp16_reduced_precision_reduction()",
    ),
    "bf16 sums": (
        assigned("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction", False),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    ),
    "oneDNN": (assigned("torch.backends.mkldnn.enabled", False), "torch.backends.mkldnn.enabled"),
    "oneDNN deterministic": (
        assigned("torch.backends.mkldnn.deterministic", True), "torch.backends.mkldnn.deterministic"
    ),
    "flash attention": (lambda: torch.backends.cuda.enable_flash_sdp(False), "torch.backends.cuda.flash_sdp_enabled()"),
    "attention by math": (lambda: torch.backends.cuda.enable_math_sdp(False), "torch.backends.cuda.math_sdp_enabled()"),
    "order of attention": (
        lambda: torch._C._set_sdp_priority_order([0, 1, 2, 3, 4]), "torch._C._get_sdp_priority_order()"
    ),
    "fast path of transformers": (
        lambda: torch.backends.mha.set_fastpath_enabled(False), "torch.backends.mha.get_fastpath_enabled()"
    ),
    "warnings each time": (lambda: torch.set_warn_always(True), "torch.is_warn_always_enabled()"),
    "sparse invariants": (
        torch.sparse.check_sparse_tensor_invariants.enable, "torch.sparse.check_sparse_tensor_invariants.is_enabled()"
    ),
    "quantized engine": (assigned("torch.backends.quantized.engine", "onednn"), "torch.backends.quantized.engine"),
    "kernels of ROCm": (
        lambda: torch.backends.cuda.preferred_rocm_fa_library("aotriton"),
        "int(torch.backends.cuda.preferred_rocm_fa_library())",
    ),
    "precision of all backends": (assigned("torch.backends.fp32_precision", "ieee"), "torch.backends.fp32_precision"),
    "precision of cuda's products": (
        assigned("torch.backends.cuda.matmul.fp32_precision", "tf32"), "torch.backends.cuda.matmul.fp32_precision"
    ),
    "precision of oneDNN's products": (
        assigned("torch.backends.mkldnn.matmul.fp32_precision", "bf16"), "torch.backends.mkldnn.matmul.fp32_precision"
    ),
}  # fmt: skip


def as_at_first() -> None:
    """Sets all of them to what an untouched torch has."""
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_float32_matmul_precision("highest")
    for module in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        module.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.enabled = torch.backends.mkldnn.enabled = True
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = torch.backends.mkldnn.deterministic = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    torch._C._set_sdp_priority_order([1, 2, 0, 3, 4])
    torch.backends.mha.set_fastpath_enabled(True)
    torch.set_warn_always(False)
    torch.sparse.check_sparse_tensor_invariants.disable()
    torch.backends.quantized.engine = ENGINE
    torch.backends.cuda.preferred_rocm_fa_library("default")


ENGINE = torch.backends.quantized.engine


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    as_at_first()


def read(source: str) -> object:
    found = eval(source)
    return list(found) if isinstance(found, (tuple, list)) else found


@pytest.mark.filterwarnings("ignore:.*TF32|.*fp32_precision|.*experimental:UserWarning")
@pytest.mark.parametrize("name", USES)
def test_nodes_have_what_the_script_sets(name: str, nodes: None) -> None:
    use, source = USES[name]
    before = read(source)
    assert dt.run(read, source, node=[0, 1]) == [before, before]
    use()
    after = read(source)
    assert after != before
    assert dt.run(read, source, node=[0, 1]) == [after, after]


def test_in_the_order_of_issue(nodes: None) -> None:
    """Nothing waits between them: each function sees the switches of its place."""
    source, seen, want = "torch.are_deterministic_algorithms_enabled()", [], []
    for on in (True, False, True, True, False):
        torch.use_deterministic_algorithms(on)
        with torch.backends.cudnn.flags(enabled=True, deterministic=on):
            seen.append(dt.submit(read, f"({source}, torch.backends.cudnn.deterministic)", node=1))
        seen.append(dt.submit(read, f"({source}, torch.backends.cudnn.deterministic)", node=1))
        want += [[on, on], [on, False]]
    assert [work.result() for work in seen] == want


def test_streams_do_what_came_before_under_the_old_ones(nodes: None) -> None:
    def late() -> bool:
        time.sleep(0.2)  # a switch that did not wait for this would be seen
        return torch.backends.cudnn.deterministic

    with dt.stream(dt.Stream("node:1")):
        before = dt.submit(late, node=1)
    torch.backends.cudnn.deterministic = True
    with dt.stream(dt.Stream("node:1")):
        after = dt.submit(late, node=1)
    assert [before.result(), after.result()] == [False, True]


def test_a_graph_sets_them_in_each_replay_and_leaves_them_as_they_were(nodes: None) -> None:
    source = "torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark"

    @dt.graphed
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.use_deterministic_algorithms(True)
        on_one = torch.empty(3, device="node:1") + x
        on_another = torch.empty(3, device="node:0").isnan()  # its node comes to the graph when they are set already
        torch.use_deterministic_algorithms(False)
        return on_one, on_another

    x = torch.ones(3).to("node:1")
    for benchmark in (False, True, False):
        torch.backends.cudnn.benchmark = benchmark
        for found in program(x):
            assert found.isnan().all() if found.is_floating_point() else found.all()
        assert dt.run(read, source, node=[0, 1]) == [[False, benchmark]] * 2
    torch.use_deterministic_algorithms(True)  # set outside: as it is at the replay, and afterwards
    program(x)
    torch.use_deterministic_algorithms(True)
    assert dt.run(read, source, node=[0, 1]) == [[True, False]] * 2


def test_the_number_of_threads_stays_the_scripts(nodes: None) -> None:
    before, here = dt.run(torch.get_num_threads, node=1), torch.get_num_threads()
    torch.set_num_threads(here + 1)
    try:
        assert dt.run(torch.get_num_threads, node=1) == before
    finally:
        torch.set_num_threads(here)


BEFORE = """
import torch

torch.backends.cudnn.deterministic = True  # before disttensor is there
torch.use_deterministic_algorithms(True, warn_only=True)
import disttensor as dt

torch.backends.cuda.matmul.allow_tf32 = True


def found():
    return (
        torch.backends.cudnn.deterministic, torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
    )


with dt.init_master_worker(nodes=1, launcher="local"):
    print(dt.run(found), found())
    torch.backends.cudnn.deterministic = False
with dt.init_master_worker(nodes=1, launcher="local"):
    print(dt.run(found), found())
"""


def test_those_of_before_the_session(script: Callable[..., CompletedProcess[str]]) -> None:
    done = script(BEFORE)
    assert done.stdout.splitlines() == [
        "(True, True, True) (True, True, True)",
        "(False, True, True) (False, True, True)",
    ], done.stderr


def test_attention_by_one_kernel(nodes: None) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert dt.run(read, "torch._C._get_flash_sdp_enabled(), torch._C._get_math_sdp_enabled()", node=1) == [
            False,
            True,
        ]
    assert dt.run(read, "torch._C._get_flash_sdp_enabled(), torch._C._get_math_sdp_enabled()", node=1) == [True, True]


def test_operations_follow(nodes: None) -> None:
    """An operation without a deterministic form fails while that is asked for, at its line, as it does locally."""
    at, one = torch.tensor([1]).to("node:1"), torch.ones(1).to("node:1")
    before, within, after = (torch.zeros(3).to("node:1") for _ in range(3))
    before.put_(at, one)
    torch.use_deterministic_algorithms(True)
    within.put_(at, one)
    empty = torch.empty(3, device="node:1")
    torch.use_deterministic_algorithms(False)
    after.put_(at, one)
    assert before.tolist() == after.tolist() == [0.0, 1.0, 0.0]
    assert empty.isnan().all()  # filled, though it is used later
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation") as caught:
        within.cpu()
    assert __file__ in "".join(caught.value.__notes__)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
