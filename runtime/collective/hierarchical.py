"""Hierarchical algorithms: an all_reduce goes within each host first, then between hosts; a broadcast the other way.

The bytes between two hosts are as few as if each host were one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import direct, tree
from .cut import cut, pieces_of, slabs
from .exchange import Exchange, pipeline
from .reduction import ReduceOp

#: Reduces a tensor in place over all ranks of an exchange.
AllReduce = Callable[[Exchange, torch.Tensor, torch.Tensor, ReduceOp], None]


class Hosts:
    """The ranks of a group by their hosts. ``hosts[i]`` names the host of rank i."""

    def __init__(self, hosts: Sequence[object], me: int) -> None:
        by_host: dict[object, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        self.members = list(by_host.values())
        self.mine = by_host[hosts[me]]
        self.place = self.mine.index(me)
        self.even = len({len(members) for members in self.members}) == 1

        #: true where there is more than one host, and more than one rank on some: then the hierarchy helps
        self.helps = 1 < len(self.members) < len(hosts)


def all_reduce(
    exchange: Exchange,
    source: torch.Tensor,
    target: torch.Tensor,
    op: ReduceOp,
    who: Hosts,
    chunk: int,
    between: AllReduce,
) -> None:
    """Reduces within hosts, between them by ``between``, and within hosts again.

    Where all hosts have as many ranks, each rank reduces a part of its host's data with the ranks of the same place on
    the others; else the first rank of each host does.
    """
    inside = exchange.part(who.mine)
    inner = ReduceOp.SUM if op is ReduceOp.AVG else op  # the average is taken over all, once
    if who.even:
        given, wanted = pieces_of(source, inside.size), pieces_of(target, inside.size)
        mine, count = wanted[who.place], slabs(given, chunk)
        pipeline(
            direct.reduce_scatter(inside, cut(given, k, count), cut([mine], k, count)[0], inner) for k in range(count)
        )
        exchange.join(inside)
        _between(exchange, [members[who.place] for members in who.members], mine, op, between)
        inside.join(exchange)
        pipeline(direct.all_gather(inside, cut(wanted, k, count)) for k in range(count))
    else:
        count = slabs([source], chunk)
        pipeline(
            tree.reduce(inside, ours, theirs, inner, 0, inside.size)
            for ours, theirs in (cut([source, target], k, count) for k in range(count))
        )
        exchange.join(inside)
        if who.place == 0:
            _between(exchange, [members[0] for members in who.members], target, op, between)
        inside.join(exchange)
        pipeline(tree.broadcast(inside, cut([target], k, count)[0], 0, 1) for k in range(count))
    exchange.join(inside)


def _between(exchange: Exchange, ranks: Sequence[int], target: torch.Tensor, op: ReduceOp, between: AllReduce) -> None:
    across = exchange.part(ranks)
    across.contributors = exchange.contributors
    between(across, target, target, op)
    exchange.join(across)


def broadcast(exchange: Exchange, tensor: torch.Tensor, root: int, who: Hosts, chunk: int) -> None:
    """Sends the root's tensor to one rank of each other host first, then within each host."""
    heads = [root if root in members else members[0] for members in who.members]
    head = root if root in who.mine else who.mine[0]
    count = slabs([tensor], chunk)
    if exchange.me == head:
        across = exchange.part(heads)
        pipeline(tree.broadcast(across, cut([tensor], k, count)[0], heads.index(root), 1) for k in range(count))
        exchange.join(across)
    inside = exchange.part(who.mine)
    pipeline(tree.broadcast(inside, cut([tensor], k, count)[0], who.mine.index(head), 1) for k in range(count))
    exchange.join(inside)
