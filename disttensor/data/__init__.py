"""Batches on their way to nodes, or read there: each sample to one rank. docs/DATA.md."""

from .distributing import DistributedLoader, distribute
from .prefetching import prefetch

__all__ = ["DistributedLoader", "distribute", "prefetch"]
