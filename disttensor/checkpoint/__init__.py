"""Checkpoints of what is on meshes and nodes, which these write and read themselves, in the format of
torch.distributed.checkpoint: docs/CHECKPOINTS.md.
"""

from .loading import load
from .saving import async_save, save

__all__ = ["async_save", "load", "save"]
