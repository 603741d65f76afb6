"""When a worker reports to its master, whose window opens by reports only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import cloudpickle
import pytest

from disttensor.runtime.master import command_queue, outbox
from disttensor.runtime.node import chunks, worker
from disttensor.runtime.node.user_functions import key_of
from disttensor.runtime.node.worker import NodeWorker
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.transport.base import Spoke
from disttensor.runtime.transport.inproc import InprocHub

#: Seconds for what takes a moment; longer is a hang.
SOON = 20


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


GATE = threading.Event()


def pass_gate() -> None:
    assert GATE.wait(SOON)


class Asking(Script):
    """Notes the results of each report. The gate opens with the first one, and when all commands are taken; the node
    ends when it has told of so many."""

    def __init__(self, messages: list[bytes], due: int) -> None:
        super().__init__(messages)
        self.results: list[list[int]] = []
        self.due, self.ended = due, threading.Event()

    def recv(self, timeout: float | None = None) -> bytes | None:
        if len(self.told) == len(self.messages) - 1:
            GATE.set()
            assert self.ended.wait(SOON)
        return super().recv(timeout)

    def send(self, message: bytes) -> None:
        results = [it.request for it in codec.decode_report(message).replies if isinstance(it, c.Result)]
        if results:
            self.results.append(results)
            GATE.set()
        self.due -= len(results)
        if not self.due:
            self.ended.set()


def results(*batches: list[c.Command], due: int) -> list[list[int]]:
    """Serves batches; returns the requests that each report answers."""
    first, messages = 0, list[bytes]()
    for commands in (*batches, [c.StopNode()]):
        messages.append(codec.encode(c.Batch(first, tuple(commands))))
        first += len(commands)
    script = Asking(messages, due)
    thread = threading.Thread(
        target=NodeWorker(Bundle(job="asking", rank=0, address="", backend="inproc"), script).serve
    )
    GATE.clear()
    thread.start()
    thread.join()
    return script.results


def calls(function: Callable[..., object], *requests: int, args: tuple[object, ...] = (), on: int = 0) -> list[Any]:
    code, given = cloudpickle.dumps(function), cloudpickle.dumps((args, {}))
    runs = [c.Run(request, key_of(code), given, True, "it") for request in requests]
    return [c.Piece(key_of(code), code, True), *[c.On(on, run) if on else run for run in runs]]


def test_results_of_a_message_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one leaves at once, with those before it."""
    monkeypatch.setattr(chunks, "LATE", SOON)
    few = partial(calls, bytes, args=(9,))
    assert results(few(1, 2), few(3), due=3) == [[1, 2], [3]]
    assert results([*few(1), *calls(bytes, 2, args=(5000,)), *few(3)], due=3) == [[1, 2], [3]]


def test_results_of_a_streams_queue_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LATE", SOON)
    stream = c.MakeStream(5, "cpu", 0)
    assert results([stream, *calls(pass_gate, 1, on=5), *calls(bytes, 2, 3, on=5)], due=3) == [[1, 2, 3]]


def test_a_result_does_not_wait_long_for_those_behind_it() -> None:
    """The function behind it ends when the result was told."""
    assert results([*calls(bytes, 1), *calls(pass_gate, 2)], due=2) == [[1], [2]]


def test_a_result_does_not_wait_where_no_thread_would_see_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks.ChunkWatch, "_start_thread", lambda watch: None)
    assert results([*calls(bytes, 1), *calls(pass_gate, 2)], due=2) == [[1], [2]]


def test_a_master_that_has_gone_before_the_hello() -> None:
    """As when another node has failed to start meanwhile: it ends as it does later, and says nothing."""
    hub = InprocHub(1)
    node = NodeWorker(Bundle(job="worker gone", rank=0, address="", backend="inproc"), hub.spoke(0))
    hub.close()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(node.serve).result() == worker.EX_MASTER_GONE
