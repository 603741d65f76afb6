"""Records of runs that nobody has run: so many nodes, and so many commands of each, as a training loop has them."""

from __future__ import annotations

import random
from types import CodeType

from disttensor.runtime.master.looking_in import NodeEvent
from disttensor.runtime.process.observing import TransferDone
from disttensor.seeing.recording import Loss, Named, NodeRecord, ProfileRecord, Waited
from disttensor.seeing.run_report import MemorySample, RunSeen
from disttensor.session.holdings import LineHolds

#: What a step does on each node: operators, how long each takes in parts of the step, and their lines.
STEP = (("aten::mm", 0.30, 12), ("aten::relu", 0.06, 13), ("aten::mm", 0.24, 14), ("aten::add_", 0.04, 20))
#: When the last node is lost, as a part of the whole.
LOST = 0.6


def site(line: int, file: str = "train.py") -> tuple[CodeType, int]:
    """A line of a script."""
    return compile("\n" * (line - 1) + "f()", file, "exec"), 2


def made_run(nodes: int, commands: int, seconds: float = 60.0, lost: bool = False) -> tuple[ProfileRecord, RunSeen]:
    """A run in which each node does so many commands, each fourth step with an all_reduce around a ring.

    ``lost``: the last node is, in the middle.
    """
    chance = random.Random(7)
    lines = {line: site(line) for _, _, line in STEP} | {16: site(16), 18: site(18)}
    steps = max(1, commands // len(STEP))
    step = seconds / steps
    record = ProfileRecord(100.0, 100.0 + seconds, 1_795_985_307_000_000_000, [], [], [], [], [], [], {}, {}, {1: ""})
    waits, moves, regions = list[Waited](), list[TransferDone](), list[Named]()
    for n in range(min(steps, 2000)):
        at = 100.0 + n * step * steps / min(steps, 2000)
        waits.append(Waited(at + 0.5 * step, at + 0.2 * step, n % nodes, n, lines[18], 1))
        regions.append(Named(at + step, at, f"step {n}", 1))
        if n % 10 == 0:
            moves.append(TransferDone(at + 0.1 * step, at, -1, n % nodes, True, n, 4 << 20, "tcp", "transfers"))
    record.waits, record.transfers, record.regions = waits, moves, regions
    seen = RunSeen()
    for rank in range(nodes):
        node = NodeRecord(rank, f"host{rank // 8}", "cpu", missing="", shares_clock=rank < 8, within=2e-5)
        end = 100.0 + (LOST * seconds if lost and rank == nodes - 1 else seconds)
        events = node.events
        slow = 1.15 if rank == 1 else 1.0
        for n in range(steps):
            at = 100.0 + n * step + step * 0.02 * chance.random()
            for what, part, line in STEP:
                took = step * part * slow * chance.uniform(0.7, 1.0)
                if at + took < end:
                    events.append(NodeEvent(rank, "done", at + took, at, "", n, what, -1, 0, 0, False, lines[line]))
                at += took
            if n % 4 == 3 and at + 0.1 * step < end:
                for kind, peer in (("sent", (rank + 1) % nodes), ("received", (rank - 1) % nodes)):
                    events.append(
                        NodeEvent(
                            rank, kind, at + 0.1 * step, at, "", -1, "tcp collectives", n, peer, 1 << 20, False, None
                        )
                    )  # fmt: skip
                events.append(
                    NodeEvent(
                        rank, "collective", at + 0.1 * step, at, "", n, "all_reduce", -1, 0, 2 << 20, False, lines[16]
                    )
                )  # fmt: skip
        if lost and rank == nodes - 1:
            record.losses = [Loss(end, rank, "killed by SIGKILL")]
            node.missing, node.events = f"node {rank} is lost", []
        record.nodes[rank] = node
        held = [round((200 + 90 * (n % 7) + 5 * rank) * (1 << 20)) for n in range(120)]
        seen.memory[rank] = [MemorySample(100.0 + n * seconds / 120, it, it + (300 << 20)) for n, it in enumerate(held)]
        seen.holds[rank] = [
            LineHolds("train.py:9 in <module>", 4, 96 << 20, "float32 (1024, 512)"),
            LineHolds("train.py:22 in step", 8, 192 << 20, "float32 (1024, 512)"),
        ]
        seen.output[rank] = [f"epoch {n} loss {1 / (n + 1):.3f}" for n in range(3)]
    seen.slow = ["node 1 (dp=1, host host0) is 15% behind its mesh: its commands take longer"]
    return record, seen
