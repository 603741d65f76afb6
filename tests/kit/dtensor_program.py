"""A program of torchrun's: what its four ranks have of cases of DTensor's operators, which a file has.

``torchrun --nproc-per-node 4 dtensor_program.py CASES ANSWERS`` writes ANSWERS.0 to ANSWERS.3. Without torchrun's
environment it starts the ranks itself, by torchrun's own launcher, as forks of a process that has imported torch.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from typing import Any

import dtensor_cases
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor


def taken(x: Any) -> torch.Tensor:
    if isinstance(x, AsyncCollectiveTensor):
        x = x.wait()
    return x.detach().clone()  # type: ignore[no-any-return]


def main(cases: str, answers: str) -> None:
    """A rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", dtensor_cases.SHAPE, mesh_dim_names=("dp", "tp"))

    def make(v: dtensor_cases.Operand) -> DTensor:
        local = v.parts[rank].clone()
        return DTensor.from_local(
            local, mesh, v.placements, run_check=False, shape=torch.Size(v.shape), stride=tuple(v.stride)
        )

    found = []
    for i, case in enumerate(torch.load(cases, weights_only=False)):
        torch.manual_seed(0)
        found.append(dtensor_cases.answer(case, make, taken))
        count = torch.tensor([i, isinstance(found[-1], dtensor_cases.Refused)])
        dist.all_reduce(count)
        if count.tolist() not in ([4 * i, 0], [4 * i, 4]):
            raise RuntimeError(f"{case.name}: not all ranks have had the same end: {found[-1]}")
    torch.save(found, f"{answers}.{rank}", pickle_protocol=5)  # protocol 2 has no memory formats
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(*sys.argv[1:])
        os._exit(0)  # torch may abort while an interpreter with a process group ends (pytorch/pytorch#179291)
    else:
        how = LaunchConfig(
            1, 1, 4, run_id="cases", rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
            max_restarts=0,
        )  # fmt: skip
        elastic_launch(how, main)(*sys.argv[1:])
