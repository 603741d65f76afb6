"""A child that was forked while other threads held the session's locks."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from limits import HANG


@pytest.mark.fault(21)
@pytest.mark.parametrize("meanwhile", ["", "session.link.losses.unexplained[0] = 'its connection ended', float('inf')"])
def test_a_forked_child_does_not_wait_for_a_thread_that_it_lacks(meanwhile: str) -> None:
    """Nor for the launcher, where the fork came while it was asked why a node is gone."""
    script = """
        import contextlib, os, signal, threading, torch, disttensor as dt
        from disttensor.session import current as state
        dt.init_master_worker(nodes=1)
        x, fresh = torch.ones(4, device="node:0"), torch.empty(3, device="node:0")
        session = state.session()
        held, done, found = threading.Event(), threading.Event(), []

        def values(holder):
            slots = [name for kind in type(holder).__mro__ for name in vars(kind).get("__slots__", ())]
            return [*getattr(holder, "__dict__", {}).values(), *(getattr(holder, n, None) for n in slots)]

        def hold():
            with contextlib.ExitStack() as locks:
                boxes = [node.outbox for node in session.nodes]
                for holder in (session, *values(session), *session.nodes, *boxes):
                    for value in values(holder):
                        if isinstance(value, type(threading.RLock())):
                            locks.enter_context(value)
                            found.append(holder)
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        assert {id(session.link), *(id(node.outbox) for node in session.nodes)} <= set(map(id, found))
        MEANWHILE
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            refused = 0
            for use in (
                lambda: x[0] + 1,
                lambda: x.cpu(),
                lambda: fresh.copy_(torch.ones(3)),
                lambda: torch.ones(3).to("node:0"),
                lambda: dt.device(0, "cpu") and x.sum().item(),
                lambda: dt.run(len, "abc"),
                lambda: dt.synchronize(),
                lambda: dt.shutdown(),
            ):
                try:
                    use()
                except dt.errors.ForkError:
                    refused += 1
            os._exit(refused)
        session.link.losses.unexplained.clear()
        done.set()
        thread.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (x + 1).sum().item())
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script).replace("MEANWHILE", meanwhile)],
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.stdout == "8 8.0\n", done.stderr
    assert done.stderr == ""
