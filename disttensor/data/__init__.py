"""Batches on their way to nodes."""

from .prefetching import prefetch

__all__ = ["prefetch"]
