"""What was issued to give tensors is not cancelled, as the script has them: the inside of disttensor.data's loops."""

from __future__ import annotations

import pytest
import torch
from stream_kit import held, hold, release, run_on, thread

import disttensor as dt
from disttensor.proxy.meta import new_ref
from disttensor.session import current
from disttensor.streams import default_stream
from disttensor.tasks.calls import Issued
from disttensor.tasks.targets import Targets


def given() -> tuple[list[str], list[torch.Tensor]]:
    return ["told"], [torch.ones(2)]


def heard() -> bool:
    """Waits on a node until it has heard of a cancel, which comes by another connection than commands."""
    import gc
    import time

    from disttensor.runtime.node.interruption import Interruption

    while not any(x._ahead for x in gc.get_objects() if type(x) is Interruption):
        time.sleep(0.001)
    return True


def test_a_batch_that_the_script_has_is_not_cancelled_with_its_loop() -> None:
    """It was, where a node had not begun to give it. What only tells of batches is cancelled."""
    with dt.init_master_worker(nodes=1, threads=1):
        session = current.session()
        beside = dt.Stream(0)  # so that the node hears of more while its default stream is held up
        holder = thread(run_on, default_stream(0), hold, "giving")
        assert run_on(beside, held, "giving")
        gives, tells = (Issued(session, Targets(session, [0]), given, (), [outs], None) for outs in ((new_ref(),), ()))
        tells.cancel()
        gives.cancel()
        assert run_on(beside, heard)
        assert run_on(beside, release, "giving")
        holder.join()
        assert gives.results()[0][0] == ["told"]
        with pytest.raises(dt.errors.CancelledError):
            tells.results()
