"""Programs of torch's DistributedDataParallel and torch.distributed.nn: as torchrun runs them, and on a mesh.

``python ddp_twin.py FILE``, under torchrun with gloo, writes each rank's tensors to ``FILE.RANK``. It imports torch
only. DDP looks at the annotations of hooks, which are no strings here.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.nn.functional as functional

RANKS = 2


def signs(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook as users write it: only the signs travel."""
    reduced = dist.all_reduce(bucket.buffer().sign(), group=group, async_op=True).get_future()
    return reduced.then(lambda it: it.value()[0] * 1e-2)


def halves(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that replaces the buffer, and takes its gradients one by one."""
    bucket.set_buffer(bucket.buffer() / dist.get_world_size(group))
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.shape == parameter.shape
        dist.all_reduce(gradient, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


#: By name: the hook's state, the hook, and megabytes of a bucket. With several buckets, PowerSGD's hook, which begins
#: collectives out of others' ends, hangs with gloo.
HOOKS: dict[str, tuple[Callable[[Any], Any], Callable[..., Any], float]] = {
    "allreduce": (lambda g: g, default_hooks.allreduce_hook, 5e-4),
    "fp16": (lambda g: g, default_hooks.fp16_compress_hook, 5e-4),
    "fp16 around allreduce": (lambda g: g, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 5e-4),
    "a user's": (lambda g: g, signs, 5e-4),
    "a user's, in place": (lambda g: g, halves, 5e-4),
    "PowerSGD": (lambda g: power.PowerSGDState(g, 1, 2), power.powerSGD_hook, 25),
    "fp16 around PowerSGD": (
        lambda g: power.PowerSGDState(g, 2, 2), default_hooks.fp16_compress_wrapper(power.powerSGD_hook), 25,
    ),
    "post-local SGD": (
        lambda g: post_localSGD_hook.PostLocalSGDState(g, g, 2), post_localSGD_hook.post_localSGD_hook, 25,
    ),
    "none": (lambda g: g, debugging_hooks.noop_hook, 5e-4),
}  # fmt: skip


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5))


def batch() -> torch.Tensor:
    return torch.arange(30.0 * 4 * RANKS).view(4 * RANKS, 30).sin()


def trained(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The weights after five steps, of which PowerSGD compresses three."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.module.parameters()]


#: The functions of torch.distributed.nn.functional: a call with a tensor and a function that makes empty ones.
FUNCTIONS: dict[str, Callable[[torch.Tensor, Callable[[], torch.Tensor]], Any]] = {
    "all_reduce": lambda x, empty: functional.all_reduce(x),
    "all_gather": lambda x, empty: functional.all_gather(x),
    "reduce": lambda x, empty: functional.reduce(x, 1),
    "reduce_scatter": lambda x, empty: functional.reduce_scatter(empty(), [x, x * 2]),
    "all_to_all": lambda x, empty: functional.all_to_all([empty(), empty()], [x, x * 2]),
    "all_to_all_single": lambda x, empty: functional.all_to_all_single(empty(), x),
    "broadcast": lambda x, empty: functional.broadcast(x, 0),
    "gather": lambda x, empty: functional.gather(x),
    "scatter": lambda x, empty: functional.scatter([x, x * 2]),
}


def start(rank: int) -> torch.Tensor:
    return torch.arange(4.0) * (rank + 1) + rank


def weights(rank: int) -> torch.Tensor:
    return torch.arange(4.0) * 3 - 5 * rank


def gradient(call: Callable[..., Any], x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor | None, list[Any]]:
    """The gradient of a tensor through a function's results, and the results."""
    found = call(x, lambda: torch.zeros_like(by))
    results: Sequence[Any] = found if isinstance(found, (tuple, list)) else [found]
    sum(((i + 1) * y * by).sum() for i, y in enumerate(results)).backward()  # type: ignore[union-attr]
    return x.grad, [y.detach() for y in results]


def main(path: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.group.WORLD
    found: dict[str, Any] = {}
    for name, (state, hook, size) in HOOKS.items():
        model = nn.parallel.DistributedDataParallel(module(), bucket_cap_mb=size)
        model.register_comm_hook(state(group), hook)
        found[name] = trained(model, batch().chunk(RANKS)[rank])
    for name, call in FUNCTIONS.items():
        found[name] = gradient(call, start(rank).requires_grad_(), weights(rank))
    torch.save(found, f"{path}.{rank}")
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # torch may abort while an interpreter with a process group ends (pytorch/pytorch#179291)
