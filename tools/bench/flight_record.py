"""The share of the flight record in a loop that is bound by its launches: of opcodes, and of threads' time on cores.

    python tools/bench/flight_record.py

Messages are those of the loop as it runs; a record's opcodes are those of tests/transport/test_opcodes.py, and its time
is measured alone.
"""

from __future__ import annotations

import time
import timeit

import torch

import disttensor as dt
from disttensor.runtime.master.outbox import Outbox
from disttensor.runtime.process.clock import CLOCK
from disttensor.runtime.process.flight import SENT, Ring
from disttensor.runtime.protocol import commands as c
from disttensor.session import current

#: The opcodes of ``x * 2``, of a message to a node without the record, and of the record.
OPERATION, MESSAGE, RECORD = 187, 846, 79
#: How many operations the loop has: fewer messages than a trail has records.
TIMES = 10_000


def microseconds_of_records() -> tuple[float, float]:
    """Returns what a record takes in the script, and at a node."""
    box, ring, now = Outbox(0), Ring(), CLOCK.now
    box.add(c.Free(1, ()), None)
    box.pack()
    here = timeit.repeat(lambda: box.record_leaving(now()), number=5000, repeat=9)
    there = timeit.repeat(lambda: ring.write(ring.slot(), 1.5, 5, 700, 0.1, 3, SENT), number=5000, repeat=9)
    return min(here) / 5000 * 1e6, min(there) / 5000 * 1e6


def main() -> None:
    here, there = microseconds_of_records()
    print(f"a record takes {here:.2f} us in the script, {there:.2f} us at a node")
    with dt.init_master_worker(nodes=1, threads=1):
        x, outbox = torch.ones(4, device="node:0"), current.session().nodes[0].outbox
        for _ in range(TIMES):  # so that messages are as long as they will be
            x.mul(2)
        dt.synchronize()
        node, before = dt.run(time.thread_time, node=0), len(outbox.trail.records())
        script = time.thread_time()
        for _ in range(TIMES):
            x.mul(2)
        script = time.thread_time() - script
        messages = sum(it.kind == SENT for it, _ in outbox.trail.records()[before:])
        node = dt.run(time.thread_time, node=0) - node
    opcodes = RECORD * messages / (OPERATION * TIMES + (MESSAGE + RECORD) * messages)
    print(f"{TIMES:,} operations in {messages} messages: {100 * opcodes:.2f} % of the script's opcodes,")
    of_script, of_node = messages * here / 1e4 / script, messages * there / 1e4 / node
    print(f"{of_script:.2f} % of its thread's time, {of_node:.2f} % of the node's")


if __name__ == "__main__":
    main()
