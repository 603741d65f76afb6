"""Graphs: the commands of a step are recorded once, and replayed by one command per node (docs/GRAPHS.md)."""

from .decorator import graphed
from .graphs import Graph, graph

__all__ = ["Graph", "graph", "graphed"]
