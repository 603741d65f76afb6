"""A node's tensors: who else sees their memory."""

from __future__ import annotations

import pytest
import torch

from disttensor.runtime.node.store import Outgrown, Store, shared


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


def test_what_outgrew_its_memory_and_was_freed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has come into its place, under the same key, is another one's."""
    monkeypatch.setattr("disttensor.runtime.node.store.FEW", 4)
    store = Store()
    for ref in range(1, 50):
        store.entries[ref] = torch.ones(4)
        store.resize(ref, 0)
        store.free(ref, ())
    assert len(store.outgrown) <= 5
    kept = torch.ones(4)
    store.entries[60], store.entries[61] = kept, kept[:2]
    store.resize(61, 8)
    assert isinstance(store.entries[60], Outgrown)
    assert store.entries[61].tolist() == [1, 1]  # type: ignore[union-attr]
    store.resize(60, 16)
    assert store.entries[60] is kept
