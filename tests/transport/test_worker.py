"""When a worker reports to its master, whose window opens by reports only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from disttensor.runtime.master import command_queue, outbox
from disttensor.runtime.node import worker
from disttensor.runtime.node.worker import NodeWorker
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.transport.base import Spoke
from disttensor.runtime.transport.inproc import InprocHub


class Script(Spoke):
    """Gives messages one after the other; notes what was reported before each was taken."""

    def __init__(self, messages: list[bytes]) -> None:
        self.messages = messages
        self.done = 0
        self.told: list[int] = []

    def recv(self, timeout: float | None = None) -> bytes | None:
        self.told.append(self.done)
        return self.messages[len(self.told) - 1]

    def send(self, message: bytes) -> None:
        self.done = codec.decode_report(message).done

    def close(self) -> None: ...


def told(messages: int, commands: int, size: int) -> list[int]:
    """Serves so many messages of so many commands and bytes that need no answer; gives what was reported after each."""
    piece = c.Piece(b"key", bytes(size // commands), False)
    batches = [c.Batch(first, (piece,) * commands) for first in range(0, messages * commands, commands)]
    script = Script([*map(codec.encode, batches), codec.encode(c.Batch(messages * commands, (c.StopNode(),)))])
    bundle = Bundle(job=f"worker {messages} {commands} {size}", rank=0, address="", backend="inproc")
    thread = threading.Thread(target=NodeWorker(bundle, script).serve)
    thread.start()
    thread.join()
    return script.told[1:]


def test_it_reports_by_commands() -> None:
    assert told(5, worker.ACK_EVERY // 2, 10_000) == [0, 1024, 1024, 2048, 2048]


def test_it_reports_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "ACK_BYTES", 2 * 10_000)
    assert told(5, 10, 10_000) == [0, 20, 20, 40, 40]


def test_the_window_opens_before_it_is_full() -> None:
    """A node has said all but a part of the window's content, whatever measure fills it."""
    assert 2 * (worker.ACK_EVERY + command_queue.MAX_BATCH) < outbox.MAX_COMMANDS
    assert 2 * (worker.ACK_BYTES + codec.MAX_MESSAGE) < outbox.MAX_BYTES


def test_a_master_that_has_gone_before_the_hello() -> None:
    """As when another node has failed to start meanwhile: it ends as it does later, and says nothing."""
    hub = InprocHub(1)
    node = NodeWorker(Bundle(job="worker gone", rank=0, address="", backend="inproc"), hub.spoke(0))
    hub.close()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(node.serve).result() == worker.EX_MASTER_GONE
