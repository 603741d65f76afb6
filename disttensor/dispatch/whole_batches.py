"""Batches that a library sends whole to all ranks of a mesh: a warning says so, once for each mesh."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

import torch

from ..proxy.proxy import DistributedTensor
from ..session.places import MeshPlace, Place
from . import copies

#: The module of the function that sends a batch of accelerate's, and so of transformers' Trainer, to the device.
SENDER = "accelerate.utils.operations"
#: Modules that are not the program's own begin so.
_LIBRARIES = ("accelerate.", "transformers.", "torch.", "disttensor.")


#: What sends a tensor, without a look.
plain = copies.upload


def watch() -> None:
    """Has copies to meshes looked at from now on. The module of ``SENDER`` has been imported: programs without it do
    not pay for the look."""
    copies.upload = _upload


def _upload(tensor: torch.Tensor, place: Place, non_blocking: bool = False) -> DistributedTensor:
    # a batch that goes to one node is that node's
    if isinstance(place, MeshPlace) and not place.takes_whole and tensor.dim():
        _warn_of(place)
    return plain(tensor, place, non_blocking)


def _warn_of(place: MeshPlace) -> None:
    """Warns if a copy to a mesh that is being issued is accelerate's, of a batch, and nothing cuts that behind it."""
    frame: FrameType | None = sys._getframe(1)
    sends, level = False, 2
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        sends = sends or (name == SENDER and frame.f_code.co_name == "send_to_device")
        if not name.startswith(_LIBRARIES):
            break
        frame, level = frame.f_back, level + 1
    if sends:
        place.takes_whole = True
        warnings.warn(
            f"accelerate sends each batch to all ranks of {place}, and every rank computes all of it: right, and no "
            "faster than one; dt.DataParallel(model.to(mesh.device), mesh, whole=True) gives each its part "
            "(docs/DATA_PARALLEL.md)",
            stacklevel=level,
        )
