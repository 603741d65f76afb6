"""A node's tensors: who else sees their memory."""

from __future__ import annotations

import torch

from disttensor.runtime.node.store import shared


def test_a_view_of_what_nobody_sees_is_not_shared() -> None:
    """A replay's output of that kind is put in the place of the last one's; one that is shared has to be copied."""
    base = torch.randn(3, 4)
    view = base.t()
    assert shared(view)
    assert shared(base)
    del base
    assert not shared(view)
    other = view[0]
    assert shared(view)
    del other
    base = view._base
    assert shared(view)
    del base
    assert not shared(view)
    assert not shared(torch.ones(3).to_sparse())
