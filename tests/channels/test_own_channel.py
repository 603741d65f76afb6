"""A data channel of the user's: a class in a module of its own, registered by name, used by real nodes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import disttensor as dt
from disttensor.runtime.channel import name_for_nodes
from disttensor.runtime.channel.inproc import InprocChannel

MODULE = """
    from disttensor.runtime.channel.tcp.channel import TcpChannel

    class Counting(TcpChannel):
        name = "counting"
        sent = 0

        def isend(self, tensor, peer, transfer):
            Counting.sent += 1
            return super().isend(tensor, peer, transfer)
"""
SCRIPT = """
    import torch, disttensor as dt
    from mychannel import Counting

    def sent():
        import mychannel
        return mychannel.Counting.sent

    dt.channels.register_channel("counting", Counting)
    with dt.init_master_worker(backend="counting", nodes=2):
        x = torch.arange(20_000.0).to("node:0")
        print(x.to("node:1").cpu()[-1].item(), Counting.sent, dt.run(sent, node=0), dt.run(sent, node=1))
"""


@pytest.mark.row("M21", "G2")
def test_a_channel_of_the_users_own(script: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "mychannel.py").write_text(textwrap.dedent(MODULE))
    done = script(textwrap.dedent(SCRIPT))
    assert done.stdout == "19999.0 1 1 1\n", done.stderr  # type: ignore[attr-defined]


def test_a_class_that_nodes_cannot_import_is_refused() -> None:
    class Local(InprocChannel):
        name = "local-only"

    dt.channels.register_channel("local-only", Local)
    with pytest.raises(ValueError, match="module of its own"):
        name_for_nodes("local-only")
    with pytest.raises(ValueError, match="module of its own"):
        dt.init_master_worker(backend="local-only", nodes=1)
