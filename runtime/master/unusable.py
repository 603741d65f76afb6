"""Why nothing of a session can be used here: the script has ended it, or this process is a child that was forked."""

from __future__ import annotations

import sys

from ..process import role
from ..protocol.errors import DisttensorError, ForkError


def forked() -> ForkError:
    """Returns the error of a use in a forked child; a worker of a DataLoader is told what to return instead."""
    text = "this process was forked from the master; only the master can use its nodes"
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        text += (
            ". It is a worker of a DataLoader: let the dataset return local tensors, and "
            "disttensor.data.distribute(loader, mesh) sends the batches"
        )
    return ForkError(text)


def error_of_ended() -> DisttensorError:
    """Returns the error of a use after the session's end, which names the session that is to be used if there is
    one."""
    if role.has_session():
        return DisttensorError(
            "this is of an earlier session, which was shut down, and its tensors are gone: make it anew in the session "
            "that runs now"
        )
    return DisttensorError("the session was shut down; its tensors are gone (call init_master_worker again)")
