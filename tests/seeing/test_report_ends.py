"""Reports of sessions that lose nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from report_pages import read_page

import disttensor as dt
from disttensor import testing


def test_a_node_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole session's report, as `dtrun --trace run.html` has it."""
    monkeypatch.setenv("DISTTENSOR_TRACE", str(tmp_path / "run.html"))
    with dt.init_master_worker(nodes=2, threads=1):
        torch.ones(3, device="node:0").neg_().cpu()
        testing.kill(1)
        with pytest.raises(dt.NodeLost):
            torch.ones(3, device="node:1").cpu()
        torch.ones(3, device="node:0").abs_().cpu()
    found = read_page((tmp_path / "run.html").read_bytes()).values
    there, lost = found["nodes"]
    ((at, rank, why),) = found["losses"]
    assert (rank, at) == (1, lost["lost"])
    assert 0 < at < found["seconds"]
    assert "SIGKILL" in why
    assert lost["missing"]
    assert there["missing"] == ""
    assert sum(there["shares"]) == pytest.approx(found["seconds"])
    assert {"aten::neg_", "aten::abs_"} <= {what for what, _ in found["names"]}
