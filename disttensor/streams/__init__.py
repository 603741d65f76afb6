"""Streams and events of nodes, as torch.cuda's: docs/STREAMS.md."""

from .streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    stream,
    synchronize,
)

__all__ = ["Event", "Stream", "current_stream", "default_stream", "stream", "synchronize"]
