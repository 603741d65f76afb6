"""The home of a mesh's templates: each of its nodes knows them, by one number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..protocol import commands as c
from .command_queue import CommandQueue
from .home import Home
from .node import Node


class MeshHome(Home):
    """The nodes of a mesh, each of which knows each template. ``numbers`` are below 0, where no node has its own."""

    def __init__(self, outbox: CommandQueue, numbers: Iterator[int], nodes: Sequence[Node]) -> None:
        super().__init__(outbox, numbers)
        self.nodes = nodes

    def know(self, number: int, define: c.Define | None) -> None:
        super().know(number, define)
        for node in self.nodes:  # each tells by its own table what it was sent last
            node.know(number, define)
