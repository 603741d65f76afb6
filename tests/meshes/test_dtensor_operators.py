"""Every operator that torch's DTensor has a rule for, over ``mesh.torch``: each rank has what torchrun's rank has.

Cases are made by rule (tests/kit/dtensor_cases.py), and the program that torchrun runs has the same ones. `make slow`
runs all of them, `make test` those of every sixteenth entry of torch's database, in every eighth way. The lists can
only shrink: `make slow` fails for an entry that nothing is wrong with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import dtensor_cases
import pytest
import torch
from dtensor_cases import Case, Operand, Refused
from dtensor_kit import TORCHRUN, torchruns
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import disttensor as dt

#: Lists and database are those of the torch that `make test` runs on.
OLDER = torch.__version__ < (2, 13)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(OLDER, reason="lists and database are those of a newer torch"),
]

#: Of all cases that torchrun runs, so many have its values.
SHARE = 0.99
#: Operators of which some cases differ: why.
DIFFERS: dict[str, str] = {
    "aten._local_scalar_dense": "of a sum to come torch gives each rank its own part; the script has one value",
    "aten.geqrf": "torch has no rule for its shape, and runs it on zeros on a device of the type, in C++ alone",
    "prims.signbit": "torch's rule for its result has another dtype than the result",
}
MADE_OF_OTHERS = """
aten.adaptive_avg_pool1d.default aten.adaptive_max_pool1d.default aten.avg_pool1d.default
aten.max_pool1d_with_indices.default aten.reshape.default aten.to.dtype
"""
UNCALLED = """
aten.__lshift__.Scalar_out aten.__lshift__.Tensor_out aten.__rshift__.Scalar_out aten.__rshift__.Tensor_out
aten._batch_norm_with_update_functional.default aten._fused_adam.default aten._fused_adam.tensor_lr
aten._fused_adam_.default aten._fused_adam_.tensor_lr aten._fused_adamw.default aten._fused_adamw.tensor_lr
aten._fused_adamw_.default aten._fused_adamw_.tensor_lr aten._fused_rms_norm.default
aten._fused_rms_norm_backward.default aten._index_put_impl.out aten._index_put_impl_.default
aten._native_batch_norm_legit_functional.default aten._native_batch_norm_legit_no_training.default
aten._native_batch_norm_legit_no_training.out aten._scaled_dot_product_cudnn_attention.default
aten._scaled_dot_product_cudnn_attention_backward.default aten._scaled_dot_product_efficient_attention.default
aten._scaled_dot_product_efficient_attention_backward.default
aten._scaled_dot_product_flash_attention_backward.default aten._upsample_bicubic2d_aa.default
aten._upsample_bicubic2d_aa.out aten._upsample_bicubic2d_aa_backward.default
aten._upsample_bicubic2d_aa_backward.grad_input aten._upsample_bilinear2d_aa.default
aten._upsample_bilinear2d_aa.out aten._upsample_lanczos2d_aa.default aten._upsample_lanczos2d_aa.out
aten._upsample_lanczos2d_aa_backward.default aten._upsample_lanczos2d_aa_backward.grad_input
aten._upsample_nearest_exact3d.default aten._upsample_nearest_exact3d.out
aten._upsample_nearest_exact3d_backward.default aten._upsample_nearest_exact3d_backward.grad_input
aten.bitwise_and.Scalar_Tensor_out aten.bitwise_and.Scalar_out aten.bitwise_left_shift.Scalar_Tensor_out
aten.bitwise_left_shift.Tensor_Scalar_out aten.bitwise_or.Scalar_Tensor_out aten.bitwise_or.Scalar_out
aten.bitwise_right_shift.Scalar_Tensor_out aten.bitwise_right_shift.Tensor_Scalar_out
aten.bitwise_xor.Scalar_Tensor_out aten.bitwise_xor.Scalar_out aten.div.Scalar_mode aten.div.Scalar_mode_out
aten.div_.Scalar_mode aten.eye.m_out aten.geometric.out aten.native_dropout.default aten.native_dropout.out
aten.polygamma_.default aten.randint_like.low_dtype_out aten.view.dtype prims.convert_element_type.default
prims.prod.default prims.sum.default prims.var.default
"""
#: Operators that are in none of the cases: why.
WITHOUT: dict[str, str] = {
    **dict.fromkeys(MADE_OF_OTHERS.split(), "torch takes it apart before it comes to an operator's rule"),
    **dict.fromkeys(UNCALLED.split(), "no entry of the database calls it on CPUs, and it takes more than numbers"),
}


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # of calls that torch refuses
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with dt.init_master_worker(nodes=4, threads=1, launcher="inproc"), dt.node(grid().device):
        yield
    torch.set_num_threads(threads)


def grid() -> dt.meshes.Mesh:
    return dt.mesh(dp=2, tp=2)


def entries() -> list[Any]:
    """Those of torch's database."""
    import operator_database

    return list(operator_database.OPERATORS.values())


def packet(operator: str) -> str:
    return operator.rpartition(".")[0]


# ---- what both have


def own(cases: Iterable[Case]) -> Iterator[Any]:
    """What there is over the mesh."""
    m = grid()

    def make(v: Operand) -> DTensor:
        local = dt.meshes.from_shards(m, v.parts)
        return DTensor.from_local(
            local, m.torch, v.placements, run_check=False, shape=torch.Size(v.shape), stride=v.stride
        )

    def taken(x: Any) -> list[torch.Tensor]:
        x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        return [part.cpu() for part in x.shards()] if x.device.type == "node" else [x] * 4

    for case in cases:
        args, kwargs = tree_map(lambda v: m.device if isinstance(v, torch.device) else v, (case.args, case.kwargs))
        torch.manual_seed(0)
        try:
            found = dtensor_cases.answer(Case(case.operator, case.placements, args, kwargs), make, taken)
            dt.synchronize()
        except Exception as e:  # of a node, later
            found = Refused(f"{type(e).__name__}: {e}".split("\n")[0])
        yield found


def compared(cases: list[Case], theirs: list[list[Any]]) -> tuple[dict[str, str], int]:
    """What differs, by the names of cases, and how many torchrun runs."""
    found = {}
    for case, ours, ranks in zip(cases, own(cases), theirs, strict=True):
        if (how := dtensor_cases.difference(case, ours, ranks)) is not None:
            found[case.name] = how
    return found, sum(not isinstance(ranks[0], Refused) for ranks in theirs)


def by_operator(differences: dict[str, str]) -> set[str]:
    """The operators that differ; without what is refused as torchrun's ranks have parts of several sizes there."""
    return {packet(name.split()[0]) for name, how in differences.items() if dtensor_cases.UNEVEN not in how}


def refuse_unknown(differences: dict[str, str]) -> None:
    unknown = by_operator(differences) - DIFFERS.keys()
    told = [f"{name}: {how[:300]}" for name, how in differences.items() if packet(name.split()[0]) in unknown]
    assert not unknown, "\n".join(told)


# ---- some, and all


def drawn(name: str) -> bool:
    return crc32(name.encode()) % 16 == 0


def test_those_of_every_sixteenth_entry(tmp_path: Path) -> None:
    operators = dtensor_cases.operators()
    some = {name: op for name, op in operators.items() if drawn(packet(name))}
    found = dtensor_cases.calls([entry for entry in entries() if drawn(entry.name)], operators)
    found |= dtensor_cases.more_calls(found, some)
    cases = dtensor_cases.cases_of(found, every=8)
    differences, ran = compared(cases, torchruns(cases, tmp_path))
    refuse_unknown(differences)
    assert ran > len(cases) / 2 > 50


@pytest.fixture(scope="module")
def everything() -> dict[str, dtensor_cases.Call]:
    operators = dtensor_cases.operators()
    found = dtensor_cases.calls(entries(), operators)
    for _ in range(2):  # the second time with out= of those of the first
        found |= dtensor_cases.more_calls(found, operators)
    return found


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all(everything: dict[str, dtensor_cases.Call], tmp_path: Path) -> None:
    cases = dtensor_cases.cases_of(everything)
    differences, ran = compared(cases, torchruns(cases, tmp_path, *TORCHRUN))
    refuse_unknown(differences)
    assert len(differences) <= (1 - SHARE) * ran
    assert by_operator(differences) == DIFFERS.keys()
    assert {case.placements for case in cases} >= {*dtensor_cases.PAIRS}


@pytest.mark.slow
def test_each_operator_is_called(everything: dict[str, dtensor_cases.Call]) -> None:
    assert dtensor_cases.operators().keys() - everything.keys() == WITHOUT.keys()
