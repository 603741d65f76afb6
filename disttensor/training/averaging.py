"""Means over the replicas of a module, when a program asks for them: of gradients, and of parameters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple, overload

import torch

from ..collectives import broadcast
from ..collectives.issue import Reduction
from ..collectives.over_dims import Over, groups, reduced_in_place
from ..errors.argument_checks import flag, seconds_of
from ..futures import Work
from ..futures.listening import EndOfAll
from ..meshes import agree_
from ..meshes.shards import together
from ..runtime.process.spelling import shown
from ..session.current import session_of
from ..session.places import MeshPlace
from .named import Named, limit_of, not_parts, on_a_mesh, packs, place_of, without


@overload
def reduce_gradients(
    module: torch.nn.Module,
    over: Over = "dp",
    op: Reduction = "avg",
    *,
    bucket_mb: float = 25.0,
    transport: torch.dtype | None = None,
    skip: Sequence[str] = (),
    contributors: Sequence[int] | None = None,
    async_op: Literal[False] = False,
) -> None: ...


@overload
def reduce_gradients(
    module: torch.nn.Module,
    over: Over = "dp",
    op: Reduction = "avg",
    *,
    bucket_mb: float = 25.0,
    transport: torch.dtype | None = None,
    skip: Sequence[str] = (),
    contributors: Sequence[int] | None = None,
    async_op: Literal[True],
) -> Work[torch.nn.Module]: ...


def reduce_gradients(
    module: torch.nn.Module,
    over: Over = "dp",
    op: Reduction = "avg",
    *,
    bucket_mb: float = 25.0,
    transport: torch.dtype | None = None,
    skip: Sequence[str] = (),
    contributors: Sequence[int] | None = None,
    async_op: bool = False,
) -> Work[torch.nn.Module] | None:
    """Reduces the gradients of a module on a mesh over a dim, in place. Returns at once; what comes next on the nodes
    waits.

    Args:
        module: a module on a mesh, after ``backward()``. Parameters without a gradient stay without.
        over: the name of a dim, or several.
        op: a reduction, as for ``dt.all_reduce``.
        bucket_mb: megabytes (2**20 bytes) of gradients that travel together.
        transport: torch.bfloat16 or torch.float16, as which floats of more bits travel.
        skip: names of parameters or submodules whose gradients stay as they are.
        contributors: for each rank of the mesh, in its order, whether its gradients count (True, or a number that is
            not 0): where some have no batch left, "avg" is the mean over the others, and "sum" their sum.
        async_op: return a Work. What comes next on the nodes runs beside the reduction; the gradients are to be left
            alone until ``wait()``, which writes the reduced ones. Its ``result()`` is the module.

    Raises TypeError for a parameter that is on no mesh, a gradient that is not strided, a dtype that ``op`` does not
    take; ValueError for an unknown dim or name, or a parameter that is cut along one of the dims; NodeLost.
    """
    flag("reduce_gradients: async_op", async_op)
    left_out = without(module, skip, "reduce_gradients")
    grads: list[Named] = []
    for name, parameter in on_a_mesh(module.named_parameters(), "reduce_gradients"):
        if parameter.grad is None or name in left_out:
            continue
        not_parts([(name, parameter)], over, "reduce_gradients")
        if parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"reduce_gradients: the gradient of {name!r} is {parameter.grad.layout}, and has to be strided; "
                f"sparse=False, or skip=[{name!r}]"
            )
        grads.append((name, parameter.grad))
    limit = limit_of(bucket_mb, "reduce_gradients")
    if contributors is not None and op not in ("avg", "sum"):
        raise ValueError(f"reduce_gradients: with contributors op is 'avg' or 'sum', not {op!r}")
    finish: Callable[[], None] = lambda: None  # noqa: E731
    if contributors is not None and grads:
        op, finish = _leave_out(contributors, grads, over, op)
    packed = [_reduced(pack, over, op, transport, async_op) for pack in packs(grads, limit)]

    def write() -> None:
        for pack in packed:
            pack.write()
        finish()

    if async_op:
        return _Reducing(session_of(_any_place(module)), packed, write, module)
    write()
    return None


def average_parameters(
    module: torch.nn.Module,
    over: Over = "dp",
    *,
    winner: int | Sequence[int] | None = None,
    buffers: bool = True,
) -> None:
    """Has all ranks along a dim have the mean of their parameters, and of their buffers, in place. Returns at once.

    Args:
        module: a module on a mesh.
        over: the name of a dim, or several.
        winner: all take the values of one rank, to the bit, in place of the mean: of the one with this index along
            ``over``; or, of a number for each rank of the mesh, in its order, such as the steps that it has done, of
            the one with the largest, the first of several.
        buffers: whether buffers take part. Of integers and bools, such as a count of batches, all take the first
            rank's where there is no winner.

    Raises TypeError for a parameter that is on no mesh, ValueError for an unknown dim, a parameter that is cut along
    it, or another winner; NodeLost.
    """
    named: list[Named] = on_a_mesh(module.named_parameters(), "average_parameters")
    not_parts(named, over, "average_parameters")
    if winner is not None:
        also = [(name, buffer) for name, buffer in module.named_buffers() if buffers and place_of(buffer) is not None]
        _broadcast_winner(winner, [*named, *also], over)
        return
    fractions = [(name, p) for name, p in named if p.is_floating_point() or p.is_complex()]
    for pack in packs(fractions, limit_of(25.0, "average_parameters")):
        _reduced(pack, over, "avg", None).write()
    if buffers:
        agree_([buffer for buffer in module.buffers() if place_of(buffer) is not None], "avg", over)


class _Pack(NamedTuple):
    """Tensors that are reduced as one, and the Work of an asynchronous reduction."""

    flat: torch.Tensor
    tensors: list[torch.Tensor]
    work: Any = None

    @torch.no_grad()
    def write(self) -> None:
        """Copies what was reduced to where it belongs."""
        if self.tensors[0] is self.flat:
            return
        parts = self.flat.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def _reduced(
    pack: Sequence[Named], over: Over, op: Reduction, transport: torch.dtype | None, async_op: bool = False
) -> _Pack:
    """Reduces tensors: one in place, several as a new flat one."""
    tensors = [tensor for _, tensor in pack]
    alone = len(tensors) == 1 and (tensors[0].is_contiguous() or not async_op)
    flat = tensors[0] if alone else torch.cat([tensor.reshape(-1) for tensor in tensors])
    work = reduced_in_place(flat, op, over, async_op, transport)  # type: ignore[arg-type]
    return _Pack(flat, tensors, work if async_op else None)


class _Reducing(Work[torch.nn.Module]):
    """Gradients that are being reduced: ``wait`` writes them where they belong, once."""

    def __init__(
        self, session: Any, packed: Sequence[_Pack], write: Callable[[], None], module: torch.nn.Module
    ) -> None:
        self._session, self._works, self._write, self._module = session, [p.work for p in packed], write, module
        self._node = self._works[0]._node if packed else 0
        self._text = f"gradients in {len(packed)} parts"
        self._lock, self._written = threading.Lock(), False
        self._transfer = self._ended = EndOfAll(session, self._node, [work.ended for work in self._works])

    def is_completed(self) -> bool:
        """Returns whether ``wait`` would return, or raise, at once. Does not wait."""
        return self._ended.has_ended()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Waits until all nodes have done their part, and has them write the gradients. Raises as any Work."""
        seconds = seconds_of(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        with self._lock:
            if not self._written:
                self._write()
                self._written = True
        return True

    def _value(self) -> Any:
        self.wait()  # which ``await`` has not called
        return self._module


@torch.no_grad()
def _leave_out(
    contributors: Sequence[int], grads: Sequence[Named], over: Over, op: Reduction
) -> tuple[Reduction, Callable[[], None]]:
    """Has the gradients of the ranks that do not contribute count as zeros. Returns the reduction, and what is done
    with its result."""
    place = _place(grads)
    counts = _each(contributors, place, "reduce_gradients: contributors")
    ranks = groups(place, over, "reduce_gradients")
    mine = [bool(count) for count in counts]
    many = [next(sum(mine[k] for k in group) for group in ranks if rank in group) for rank in range(len(counts))]
    if not all(mine):
        there = together(place, [torch.tensor(here) for here in mine])
        for _, grad in grads:
            grad.copy_(torch.where(there, grad, torch.zeros((), dtype=grad.dtype, device=grad.device)))

    @torch.no_grad()
    def divide() -> None:
        divisor = together(place, [torch.tensor(float(max(count, 1)), dtype=torch.float64) for count in many])
        for _, grad in grads:
            grad.div_(divisor.to(grad.real.dtype))

    return "sum", divide if op == "avg" else lambda: None


@torch.no_grad()
def _broadcast_winner(winner: int | Sequence[int], named: Sequence[Named], over: Over) -> None:
    """Gives all ranks the values of the winner of their group."""
    if not named:
        return
    place = _place(named)
    ranks = groups(place, over, "average_parameters")
    if isinstance(winner, int):
        if not 0 <= winner < len(ranks[0]):
            raise ValueError(
                f"average_parameters: winner={winner}, and there are {len(ranks[0])} ranks along {shown(over)}"
            )
        best = {winner}
    else:
        counts = _each(winner, place, "average_parameters: winner")
        best = {max(range(len(group)), key=lambda i: (counts[group[i]], -i)) for group in ranks}
    if len(best) > 1:
        raise ValueError(
            f"average_parameters: winner={list(winner)!r} has ranks {sorted(best)} along {shown(over)} win, in "  # type: ignore[arg-type]
            "different groups; mesh.slice(...) is one of these"
        )
    for _, tensor in named:
        tensor.copy_(broadcast(tensor, over=over, src=next(iter(best))))


def _any_place(module: torch.nn.Module) -> MeshPlace:
    return _place(list(on_a_mesh(module.named_parameters(), "reduce_gradients")))


def _place(named: Sequence[Named]) -> MeshPlace:
    place = place_of(named[0][1])
    if place is None:
        raise TypeError(f"{shown(named[0][0])} is on no mesh")
    return place


def _each(numbers: Sequence[int], place: MeshPlace, what: str) -> list[int]:
    """Returns a number for each rank. Raises ValueError for another number of them."""
    found = [int(number) for number in numbers]
    if len(found) != len(place.members):
        raise ValueError(f"{what}: {len(found)} numbers for the {len(place.members)} ranks of {place}")
    return found
