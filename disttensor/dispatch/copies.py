"""Copies of tensors: master to node, node to master, node to node, all through the session's data channel.

A copy to a mesh goes to one of its nodes, and from node to node on a tree; a copy of a mesh's tensor to the master is
the one value that all its nodes have, or an error; one to another mesh goes from each rank to those with its
coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..proxy.meta import Handle, Lazy, Meta, contiguous, meta_of, meta_of_contiguous, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.channel.payload import is_plain
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import PoisonedError
from ..session.agreement import agreed_bytes
from ..session.current import session_of
from ..session.places import Groups, MeshPlace, NodePlace, Place, one_session
from . import seen_at
from .asking import make_room
from .call_site import here
from .first_call import layout_of, refuse_layout
from .lazy_views import materialise

#: Bytes up to which a tensor goes to each node of a mesh by itself, and is fetched whole from each to be compared.
SMALL = 4096
#: A copy of more bytes into a local tensor goes straight into its memory.
STRAIGHT = 64 << 10


def upload(tensor: torch.Tensor, place: Place, non_blocking: bool = False) -> DistributedTensor:
    """Returns a copy of a local tensor at ``place``, when the tensor may be changed again; if ``non_blocking``, at
    once.

    Raises NotImplementedError for a tensor that is not strided, NodeLost.
    """
    if layout_of(tensor) is not torch.strided:
        refuse_layout("a copy to a node", layout_of(tensor))
    meta = meta_of_contiguous(tensor.shape, tensor.dtype, place)
    handle = Handle(new_ref(), meta)
    _upload(tensor, meta, handle.ref, non_blocking)
    return proxy(handle)


def _upload(tensor: torch.Tensor, meta: Meta, ref: int, non_blocking: bool) -> None:
    """Uploads a tensor to ``ref`` at the place of ``meta``, which has its geometry."""
    place, site = meta.place, here()
    transfers = place.session.transfers
    # a mesh's nodes each get what the script has: by one command, over the script's link, or from each other
    if not isinstance(place, MeshPlace) or transfers.by_command(meta.nbytes, place):
        if type(tensor) is not torch.Tensor or tensor.requires_grad:
            tensor = tensor.detach()
        transfers.upload(tensor, place, ref, site, non_blocking)
        return
    transfers.link.check(place.outbox)
    each = tensor.numel() * tensor.element_size() <= SMALL
    for member in place.members if each else place.members[:1]:
        transfers.upload(tensor.detach(), member, ref, site, non_blocking)
    if not each:
        spread(meta, place.members, ref)


#: ``sums(tensor, groups)`` of a mesh's tensor and groups of its ranks.
Sums = Callable[[DistributedTensor, Groups], DistributedTensor]

#: Sums a mesh's tensor over groups of its ranks: set by collectives/, above.
_sums: list[Sums] = []


def sums_groups(fn: Sums) -> Sums:
    """Registers the function that returns the sums of a mesh's tensor over groups of ranks, on each of these."""
    _sums[:] = [fn]
    return fn


def gradient_of_a_copy(grad: DistributedTensor, place: Place) -> DistributedTensor:
    """Returns the gradient at ``place`` of what was copied from there to the mesh of ``grad``: the sum of the gradients
    of all ranks that got it."""
    source: Any = grad._place
    # to one place goes the sum of all ranks; to a mesh each of its ranks' own
    if not isinstance(place, MeshPlace):
        total = _sums[0](grad, (tuple(range(len(source.members))),))
        return move(seen_at.alias(total, source.members[0]), place)
    targets = _targets(place, source)
    total = _sums[0](grad, targets)
    return _copied(total, place, [(group[0], (rank,)) for rank, group in enumerate(targets)])


def spread(meta: Meta, members: Sequence[NodePlace], ref: int) -> None:
    """Copies ``ref`` of the first of these places to the same ref of the others, from node to node on a tree."""
    session = session_of(meta.place)
    nbytes, dtype, site = meta.numel * meta.dtype.itemsize, codec.dtype_id(meta.dtype), here()
    channel = 0
    if session.router.rules:
        device, ranks = "cuda" if meta.place.is_cuda() else "cpu", [member.node for member in members]
        channel = session.router.choose("send", device, nbytes, ranks)
    commands: list[tuple[int, c.Command, object]] = []
    have = 1
    while have < len(members):
        for source, target in zip(members, members[have : 2 * have], strict=False):
            session.router.introduce(channel, source.node, target.node)
            transfer = session.transfers.new()
            recv = c.Recv(transfer, ref, source.node, meta.shape, dtype, target.name, channel)
            commands += [
                (source.node, c.Send(transfer, ref, target.node, channel), site),
                (target.node, recv, site),
            ]
        have *= 2
    if commands:
        session.link.sender.together(commands)  # type: ignore[arg-type]


def fill(target: DistributedTensor, tensor: torch.Tensor, non_blocking: bool = False) -> bool:
    """Uploads ``tensor`` in place of ``target`` if that is an empty tensor which nothing has used yet, of the same
    shape and dtype and contiguous. Returns whether it did."""
    handle = target._h
    if not isinstance(handle, Lazy) or handle.ref or handle.base is not None:
        return False
    meta = handle.meta
    if meta.shape != tuple(tensor.shape) or meta.dtype != tensor.dtype or meta.stride != contiguous(meta.shape):
        return False
    with meta.place.home.lock:
        if handle.ref:
            return False
        ref = new_ref()
        _upload(tensor, meta, ref, non_blocking)
        handle.ref = ref
    return True


def fetch(tensor: DistributedTensor) -> torch.Tensor:
    """Returns a local, contiguous copy. Waits for the node; raises the error that made the tensor fail, or NodeLost."""
    handle = tensor._h
    place = handle.meta.place
    transfers = place.session.transfers
    ref = handle.ref
    if not ref:
        transfers.may_begin(place)
        ref = materialise(handle)
    # a mesh has a value only where all ranks have the same one, which they are asked for
    if isinstance(place, MeshPlace):
        return _fetch_agreed(tensor, place, ref)
    local: torch.Tensor = transfers.download(tensor, place, ref, here())
    return local


def fetch_into(target: torch.Tensor, tensor: DistributedTensor) -> None:
    """Copies a tensor into a local one, as ``copy_`` does: large ones straight into its memory. Waits and raises as
    ``fetch``; the target may have any contents then."""
    place = tensor._place
    transfers = session_of(place).transfers
    transfers.may_begin(place)
    member = place.members[0]
    if not (_is_like(target, tensor) and transfers.may_receive_into(target, member)):
        target.copy_(fetch(tensor))
        return
    ref, site = tensor._h.ref or materialise(tensor._h), here()
    # one node of a mesh sends what it has, once all have said that they have the same
    if isinstance(place, MeshPlace):
        place.session.ask(place, c.Digested, lambda id: c.Digest(id, ref), site)
    transfers.download_into(target.detach(), member, ref, site)


def _is_like(target: torch.Tensor, tensor: DistributedTensor) -> bool:
    """Returns whether a local tensor's memory is to hold just the bytes that come of ``tensor``, and they are many."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.nbytes > STRAIGHT
        and target.dtype == tensor.dtype
        and target.shape == tensor.shape
        and is_plain(target)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _fetch_agreed(tensor: DistributedTensor, place: MeshPlace, ref: int) -> torch.Tensor:
    """Returns the value that all nodes of a mesh have. Raises RanksDiffer where they have different ones."""
    session, site = session_of(place), here()
    transfers, nbytes = session.transfers, tensor._h.meta.nbytes
    transfers.may_begin(place)
    if nbytes > SMALL:
        place.session.ask(place, c.Digested, lambda id: c.Digest(id, ref), site)
        return transfers.download(tensor, place.members[0], ref, site)
    if transfers.by_reply(nbytes, place):
        return transfers.download(tensor, place, ref, site)
    arrivals = [transfers.fetch(tensor, member, ref, None, site) for member in place.members]
    causes: list[c.Poisoned | None] = []
    for member, arrival in zip(place.members, arrivals, strict=True):
        transfers.wait(arrival, member.node)
        try:
            arrival.wait(0)
            causes.append(None)
        except PoisonedError as e:
            causes.append(c.Poisoned(0, e.rank, e.seq))
        except Exception:
            transfers.wait_for_transfer(arrival, member.node)  # raises what broke it
            raise
    session.questions.raise_failures(place, causes)
    agreed_bytes(place, [arrival.tensor for arrival in arrivals])
    place.outbox.restart()
    return arrivals[0].tensor


def move(tensor: DistributedTensor, place: Place) -> DistributedTensor:
    """Returns a copy at another place, at once; between two nodes the bytes go directly.

    Raises NodeLost, DisttensorError if one of the two belongs to a session that was shut down.
    """
    source = tensor._place
    one_session(source, place)
    # a mesh's ranks may have different values: who copies them says which
    if isinstance(source, MeshPlace):
        return _from_mesh(tensor, source, place)
    # what a node has goes to every rank of a mesh
    if isinstance(place, MeshPlace):
        return _copied(tensor, place, [(0, tuple(range(len(place.members))))])
    if source.node == place.node:
        return _within(tensor, place)
    meta = meta_of_contiguous(tensor.shape, tensor.dtype, place)
    handle = Handle(new_ref(), meta)
    _pass(tensor, place, handle.ref)
    return proxy(handle)


def _pass(tensor: DistributedTensor, place: NodePlace, out: int) -> None:
    """Sends a tensor from its node to ``out`` on another one, where it arrives contiguous. Raises RuntimeError for a
    tensor that can't be copied."""
    codec.check_copy(tensor.shape, tensor.dtype)
    source, ref = tensor._place.one, tensor._h.ref or materialise(tensor._h)
    session = session_of(place)
    transfer, channel = session.transfers.new(), 0
    if session.router.rules:
        device = "cuda" if source.is_cuda() and place.is_cuda() else "cpu"
        nbytes = tensor.numel() * tensor.dtype.itemsize
        channel = session.router.choose("send", device, nbytes, (source.node, place.node))
    shape, dtype = tuple(tensor.shape), codec.dtype_id(tensor.dtype)
    site = here()
    session.router.introduce(channel, source.node, place.node)
    session.link.sender.together(
        [
            (source.node, c.Send(transfer, ref, place.node, channel), site),
            (place.node, c.Recv(transfer, out, source.node, shape, dtype, place.name, channel), site),
        ]
    )


def _from_mesh(tensor: DistributedTensor, source: MeshPlace, place: Place) -> DistributedTensor:
    """Returns a copy of a mesh's tensor on another device of its nodes, or on another mesh.

    Raises RuntimeError for other copies of a mesh's tensor: its ranks may differ, and nobody has said whose to take.
    """
    # one place could take one rank's values only, and nobody has said whose
    if not isinstance(place, MeshPlace):
        raise RuntimeError(
            f"can't copy {tuple(tensor.shape)} {tensor.dtype} on {source} to {place}: its ranks may differ. "
            f"x.at({source.where(0)}).to({place.written}) copies one of them"
        )
    targets = _targets(source, place)
    if source.ranks == place.ranks and all(group == (rank,) for rank, group in enumerate(targets)):
        return _within(tensor, place)
    return _copied(tensor, place, list(enumerate(targets)))


def _copied(tensor: Any, place: MeshPlace, ways: Sequence[tuple[int, Sequence[int]]]) -> DistributedTensor:
    """Returns a copy on a mesh. ``ways``: the rank of each source, and those of the mesh that get its values."""
    source: Place = tensor._place
    session_of(place).link.check(place.outbox)
    meta = meta_of_contiguous(tensor.shape, tensor.dtype, place)
    handle = Handle(new_ref(), meta)
    spreads = []
    for rank, group in ways:
        member = source.members[rank]
        members = sorted((place.members[i] for i in group), key=lambda each: each.node != member.node)
        put(seen_at.alias(tensor, member), members[0], handle.ref)
        spreads.append(members)
    for members in spreads:  # once all have begun
        spread(meta, members, handle.ref)
    return proxy(handle)


def _targets(source: MeshPlace, place: MeshPlace) -> Groups:
    """Returns for each rank of a mesh the ranks of another one that get its values: those with its coordinates in the
    dims that both have, or for the same nodes by other names their own. Raises RuntimeError where these do not tell
    its ranks apart, or have other sizes."""
    if source.ranks == place.ranks and set(source.axes).isdisjoint(place.axes):
        return tuple((rank,) for rank in range(len(source.members)))
    names = list(source.dims)
    if not all(name in place.axes for name in names):  # perhaps by the names of another view
        names = [name for name in place.dims if name in source.axes]
    here, there = source.along(names), place.along(names)
    ranks: dict[tuple[int, ...], list[int]] = {at: [] for at in here}
    for rank, at in enumerate(there):
        ranks.setdefault(at, []).append(rank)
    if len(set(here)) < len(here) or set(ranks) != set(here) or not all(ranks.values()):
        raise RuntimeError(
            f"can't copy from {source} to {place}: dims of one name have to be of one size, and no dim may be missing "
            "there, as ranks along it may differ; dt.all_reduce(x, 'avg', over=...) and x.at(...).to(...) are one "
            "value along a dim"
        )
    return tuple(tuple(ranks[at]) for at in here)


def put(tensor: Any, place: NodePlace, ref: int) -> None:
    """Copies a tensor, contiguously, to ``ref`` on a node: one on any node, or a local one. Returns as ``upload``."""
    session, site = session_of(place), here()
    if not isinstance(tensor, DistributedTensor):
        session.transfers.upload(tensor.detach(), place, ref, site)
        return
    if tensor._place.one.node != place.node:
        _pass(tensor, place, ref)
        return
    there: Any = tensor if tensor._place is place else move(tensor, place)
    plain = there.detach().contiguous()
    at = plain._h.ref or materialise(plain._h)
    make_room(place)
    # torch calls a tensor contiguous whatever the strides of dimensions of one element, and a clone would keep them
    contiguous_copy = (("memory_format", codec.to_spec(torch.contiguous_format)),)
    clone = place.define("aten::clone", (c.Hole(True),), contiguous_copy, 1, site)
    if place.outbox.add(c.Call(clone, ref, (ref - at,)), site):
        place.session.flush(place.outbox)


def _within(tensor: DistributedTensor, place: Place) -> DistributedTensor:
    """Returns a copy on another device of the same node, which the node makes by itself."""
    site = here()
    meta = meta_of(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype, place)
    if not is_dense(tensor):
        meta = meta_of_contiguous(tensor.shape, tensor.dtype, place)
    ref = tensor._h.ref or materialise(tensor._h)
    handle = Handle(new_ref(), meta)
    make_room(place)
    # an explicit copy, for two simulated devices are one memory
    empty = place.define(
        "aten::empty_strided",
        (codec.to_spec(meta.shape), codec.to_spec(meta.stride)),
        (("dtype", codec.to_spec(meta.dtype)), ("device", c.Device(place.name))),
        1,
        site,
    )
    copy = place.define("aten::copy_", (c.Hole(True), c.Hole(True)), (), 0, site)
    commands = place.outbox.commands
    commands += (c.Call(empty, handle.ref, ()), site, c.Call(copy, handle.ref, (0, handle.ref - ref)), site)
    if len(commands) >= place.outbox.limit:
        place.session.flush(place.outbox)
    return proxy(handle)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements fill their memory without gaps, each in a place of its own."""
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


def copy_strides(source: torch.Tensor, format: torch.memory_format | None = None) -> tuple[int, ...]:
    """Returns the strides that torch gives a copy of ``source``."""
    if format in (None, torch.preserve_format) and (source.is_contiguous() or is_dense(source)):
        return source.stride()  # the meta device would choose other strides for dimensions of one element
    # a tensor without elements costs nothing on the CPU either, and the meta device would forget its strides
    stand = torch.empty_strided(source.shape, source.stride(), device="meta" if source.numel() else "cpu")
    return torch.empty_like(stand, memory_format=format or torch.preserve_format).stride()
