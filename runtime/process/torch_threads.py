"""How many threads torch computes with in a thread of ours."""

from __future__ import annotations

import torch


def compute_as_told() -> None:
    """Has the calling thread compute with as many threads as ``torch.set_num_threads`` has said; called at its begin.

    A new thread learns of that number only when it asks for it, as elementwise operators do and products of matrices do
    not: BLAS then takes a thread for each core, whose sums are others in the last bits.
    """
    torch.get_num_threads()
