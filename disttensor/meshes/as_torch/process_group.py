"""A process group without processes: torch.distributed's collectives, called in the script with tensors on a mesh.

Torch's functions are written for a rank, which has a tensor and is in one group along a dim. A tensor on a mesh is that
of all ranks, so a group here has all lines of ranks along a dim, and a collective is one command for all of them. What
torch writes into, is written; nothing waits, as what comes next on the nodes comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...collectives.issue import op_of
from ...collectives.over_dims import _Call, _Exchange, _Gather, _pieces, _reduce, _Scatter
from ...proxy.proxy import where_is
from ...session.places import Groups, MeshPlace
from .rank_numbers import INSTEAD, rank_number


class IssuedWork(dist.Work):
    """The work of a collective that is issued: its results are there for all that comes next."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.outs)
        return future

    def __init__(self, outs: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.outs = list(outs)

    def result(self) -> list[torch.Tensor]:
        return self.outs


#: Its stub has other signatures for the same methods in each version of torch.
_ProcessGroup: Any = dist.ProcessGroup


class MeshGroup(_ProcessGroup):  # type: ignore[misc]
    """The groups of ranks along a dim of a mesh, or several, as one process group of torch's."""

    def __init__(self, place: MeshPlace, lines: Groups, name: str) -> None:
        super().__init__(0, len(lines[0]))
        self.place, self.lines, self._named = place, lines, name
        at = [0] * len(place.members)
        for line in lines:
            for i, rank in enumerate(line):
                at[rank] = i
        self._rank = rank_number(place, at)

    def __repr__(self) -> str:
        return f"<process group of {self.size()} ranks along {self._dims()} of {self.place}>"

    def _dims(self) -> str:
        return ", ".join(self.over) or "several dims"

    @property
    def over(self) -> tuple[str, ...]:
        """The names of the dims that it goes along, as collectives of ours take them; none where no names say that."""
        for name, lines in self.place.axes.items():
            if lines == self.lines:
                return (name,)
        return tuple(self.place.dims) if len(self.lines) == 1 else ()

    # ---- what torch asks

    def rank(self) -> Any:
        """Returns each rank's number in its line: of ranks that differ a ``torch.SymInt``."""
        return self._rank

    def name(self) -> str:
        return "node"

    def getBackendName(self) -> str:
        return "node"

    @property
    def group_name(self) -> str:
        return self._named

    @property
    def group_desc(self) -> str:
        return self._dims()

    @property
    def bound_device_id(self) -> torch.device:
        return self.place.device

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("node")]

    def shutdown(self) -> None:
        """Does nothing: a group of a mesh has no connections."""

    # ---- collectives

    def allreduce(self, tensors: list[Any], opts: Any = None) -> IssuedWork:
        for x in self._mine("all_reduce", tensors):
            x.detach().copy_(self.reduced(x, _op(opts)))
        return IssuedWork(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Any], opts: Any) -> IssuedWork:
        """Reduces as all_reduce does: what the other ranks have afterwards torch leaves open."""
        for x in self._mine("reduce", tensors):
            x.detach().copy_(self.reduced(x, _op(opts)))
        return IssuedWork(tensors)

    def broadcast(self, tensors: list[Any], opts: Any) -> IssuedWork:
        for x in self._mine("broadcast", tensors):
            x.detach().copy_(self.of_root(x, int(opts.rootRank)))
        return IssuedWork(tensors)

    def allgather(self, outs: list[list[Any]], tensors: list[Any], opts: Any = None) -> IssuedWork:
        for into, x in zip(outs, self._mine("all_gather", tensors), strict=True):
            self._long(into, "all_gather")
            for out, part in zip(self._mine("all_gather", into), self.gathered(x), strict=True):
                out.detach().copy_(part)
        return IssuedWork([out for into in outs for out in into])

    def all_gather_single(self, out: Any, x: Any, opts: Any = None) -> IssuedWork:
        self._mine("all_gather_single", [out, x])
        flat = out.detach().view(-1)
        self._divides(flat.numel(), "all_gather_single")
        call = _Call(self.lines)
        call.issue("all_gather", [call.ready(x.detach().reshape(-1))], list(flat.chunk(self.size())))
        return IssuedWork([out])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outs: list[Any], tensors: list[Any], opts: Any = None) -> IssuedWork:
        for out, x in zip(outs, tensors, strict=True):
            self.all_gather_single(out, x)
        return IssuedWork(outs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outs: list[Any], lists: list[list[Any]], opts: Any = None) -> IssuedWork:
        for out, pieces in zip(self._mine("reduce_scatter", outs), lists, strict=True):
            self._long(pieces, "reduce_scatter")
            out.detach().copy_(self.scattered(self._mine("reduce_scatter", pieces), _op(opts)))
        return IssuedWork(outs)

    def reduce_scatter_single(self, out: Any, x: Any, opts: Any = None) -> IssuedWork:
        self._mine("reduce_scatter_single", [out, x])
        flat = x.detach().reshape(-1)
        self._divides(flat.numel(), "reduce_scatter_single")
        call = _Call(self.lines, op_of(_op(opts), x.dtype))
        call.issue("reduce_scatter", list(flat.chunk(self.size())), [out.detach().view(-1)])
        return IssuedWork([out])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outs: list[Any], tensors: list[Any], opts: Any = None) -> IssuedWork:
        for out, x in zip(outs, tensors, strict=True):
            self.reduce_scatter_single(out, x, opts)
        return IssuedWork(outs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outs: list[Any], tensors: list[Any], opts: Any = None) -> IssuedWork:
        self._long(tensors, "all_to_all")
        parts = self.exchanged(self._mine("all_to_all", tensors))
        for out, part in zip(self._mine("all_to_all", outs), parts, strict=True):
            out.detach().copy_(part)
        return IssuedWork(outs)

    def all_to_all_single(
        self, out: Any, x: Any, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any = None
    ) -> IssuedWork:
        self._mine("all_to_all_single", [out, x])
        out.detach().copy_(self.exchanged_single(x, out_sizes, in_sizes).view(out.shape))
        return IssuedWork([out])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> IssuedWork:
        """Has the ranks along the dim wait for each other; the script waits for none."""
        self.reduced(torch.zeros(1, device=self.place.device), "sum")
        return IssuedWork()

    # ---- calls that differ between ranks

    def send(self, *args: Any) -> NoReturn:
        self._refuse("send")

    def recv(self, *args: Any) -> NoReturn:
        self._refuse("recv")

    recv_anysource = recv

    def gather(self, *args: Any) -> NoReturn:
        self._refuse("gather")

    def scatter(self, *args: Any) -> NoReturn:
        self._refuse("scatter")

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("split_group")

    def _get_backend(self, device: torch.device) -> NoReturn:
        """Raises TypeError: the group has no backend. Torch asks for one to split a group, to make it smaller, or to
        give it memory of its own."""
        raise TypeError(
            "torch.distributed.split_group, and what else asks for the backend below a process group, such as for "
            f"memory of its own, is for one rank, and the script calls for all ranks of {self.place} at once: "
            f"{INSTEAD['split_group']}"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"torch.distributed.{what} is another call on one rank than on the others, and the script calls for "
            f"all ranks of {self.place} at once: {INSTEAD[what]}"
        )

    # ---- with results, for functional collectives

    def reduced(self, x: Any, op: Any) -> Any:
        """Returns the reduction of what the ranks in the line have."""
        return _reduce(x.detach(), _Call(self.lines, op_of(op, x.dtype)))

    def of_root(self, x: Any, root: int) -> Any:
        """Returns the tensor of one rank in the line."""
        out = x.detach().clone(memory_format=torch.contiguous_format)
        _Call(self.lines, root=root).issue("broadcast", [out], [out])
        return out

    def gathered(self, x: Any) -> Sequence[Any]:
        """Returns the tensors of all ranks in the line."""
        return _Gather.forward(x.detach(), _Call(self.lines))

    def scattered(self, pieces: Sequence[Any], op: Any) -> Any:
        """Returns the reduction of the piece that is each rank's."""
        return _Scatter.forward(_Call(self.lines, op_of(op, pieces[0].dtype)), *pieces)

    def scattered_single(self, x: Any, op: Any) -> Any:
        """Returns the reduction of each rank's part of the first dimension. Raises ValueError for one that the ranks do
        not divide."""
        self._divides(x.shape[0], "reduce_scatter")
        return self.scattered(_pieces(x.detach(), 0, self.size()), op)

    def scatter_parts(self, out: Any, pieces: Sequence[Any], root: int) -> None:
        """Writes to ``out`` the piece that one rank in the line has for this one."""
        self._mine("scatter", [out, *pieces])
        self._long(pieces, "scatter")
        call = _Call(self.lines, root=root)
        call.issue("scatter", list(map(call.ready, pieces)), [out.detach()])

    def exchanged(self, pieces: Sequence[Any]) -> Sequence[Any]:
        """Returns what all ranks have for this one."""
        return _Exchange.forward(_Call(self.lines), *pieces)

    def exchanged_single(self, x: Any, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> Any:
        """Returns what all ranks have for this one, joined in the first dimension, in which ``x`` is cut.

        Raises ValueError for parts of several sizes: each rank would get another shape.
        """
        if len({*out_sizes, *in_sizes}) > 1:
            raise ValueError(
                f"all_to_all_single with parts of the sizes {list(in_sizes)} and {list(out_sizes)}: all ranks of "
                f"{self.place} have one shape, so all parts have one size"
            )
        self._divides(x.shape[0], "all_to_all_single")
        return torch.cat(list(self.exchanged(_pieces(x.detach(), 0, self.size()))), 0)

    # ---- mistakes

    def _mine(self, what: str, tensors: Sequence[Any]) -> Sequence[Any]:
        """Returns tensors on the group's mesh. Raises TypeError for others, in words."""
        for x in tensors:
            self.check(what, x)
        return tensors

    def check(self, what: str, x: torch.Tensor) -> None:
        """Raises TypeError, in words, for a tensor that is not on the group's mesh."""
        place = where_is(x)
        if place is None:
            raise TypeError(
                f"torch.distributed.{what} with a {self!r}: this tensor is the script's own, and the script is none of "
                "the ranks. x.to(mesh.device) has it on all of them, dt.shard(x, mesh, ...) a part on each; a process "
                "group of this process and others can't be there at the same time: dist.destroy_process_group() ends "
                "that of the mesh"
            )
        # a mesh's twin, or view, is the same place; a node, and another mesh, are others
        if place.origin is not self.place:
            # lists are of tensors on single nodes
            one = "" if isinstance(place, MeshPlace) else "; dt.collectives takes lists of tensors on single nodes"
            raise TypeError(
                f"torch.distributed.{what} with a {self!r}: this tensor is on {place}; x.to(mesh.device) has it on all "
                f"ranks{one}"
            )

    def _long(self, tensors: Sequence[Any], what: str) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"torch.distributed.{what}: {len(tensors)} tensors for {self.size()} ranks of {self!r}")

    def _divides(self, entries: int, what: str) -> None:
        if entries % self.size():
            raise ValueError(f"torch.distributed.{what}: {self.size()} ranks do not divide {entries} entries")


def check_group(what: str, group: object, tensors: Sequence[Any]) -> MeshGroup:
    """Returns a process group of a mesh whose tensors these are. Raises TypeError, in words, for another group or
    others."""
    if not isinstance(group, MeshGroup):
        raise TypeError(
            f"torch.distributed.{what}: this process group is one of processes, and the tensor is on "
            f"{where_is(tensors[0])}: mesh.torch.get_group(dim) is that of a dim of a mesh"
        )
    for x in tensors:
        group.check(what, x)
    return group


def _op(opts: Any) -> Any:
    """Returns the name of the reduction that torch's options ask for."""
    return "sum" if opts is None else opts.reduceOp.op
