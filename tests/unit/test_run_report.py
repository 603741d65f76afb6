"""What a report says of records that nobody has run, against the table of the same record and against slow sums."""

from __future__ import annotations

import random
from dataclasses import replace
from types import CodeType
from typing import Any

import numpy as np
import pytest
from made_runs import LOST, STEP, made_run, site
from quick import inputs
from report_pages import Broken, Page, longest_in, read_page, shares_in, slices_in

from disttensor.runtime.master.looking_in import NodeEvent
from disttensor.runtime.process.observing import TransferDone
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.seeing import run_report
from disttensor.seeing.recording import Named, NodeRecord, ProfileRecord, SentMessage, Waited
from disttensor.seeing.report_page import page_of
from disttensor.seeing.run_report import MemorySample, PairTotals, RunReport, RunSeen, pairs_of, thinned
from disttensor.seeing.shares import Spans, both, joined, lines_of, only, seconds, shares_of, table
from disttensor.seeing.time_buckets import TimeBuckets
from disttensor.session.holdings import LineHolds

#: What a text may have in it to become a part of the page, or of its script.
HOSTILE = "</script><script>alert(1)</script><!-- <script> ]]> &lt; \u2028 \" ' \\ \0"


def page(record: ProfileRecord, seen: RunSeen | None = None, title: str = "train.py") -> Page:
    """The page of a record, as a browser takes it apart."""
    return read_page(page_of(RunReport(record, seen).to_dict(title, "1.2.3")))


def record_of(**nodes: list[NodeEvent]) -> ProfileRecord:
    """A record of ten seconds: the events of ``n0``, ``n1`` and so on."""
    made = {int(name[1:]): NodeRecord(int(name[1:]), "a", events=its, missing="") for name, its in nodes.items()}
    return ProfileRecord(0.0, 10.0, 0, [], [], [], [], [], [], made, {}, {})


def event(kind: str, began: float, at: float, what: str = "aten::mm", **more: Any) -> NodeEvent:
    given: dict[str, Any] = {"stream": "", "number": 0, "transfer": -1, "peer": 0, "bytes": 0, "failed": False}
    given |= {"site": None, **more}
    return NodeEvent(node=0, kind=kind, at=at, began=began, what=what, **given)


# ---- the same as elsewhere -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [4, 64])
def test_figures_are_those_of_the_table(nodes: int) -> None:
    record, seen = made_run(nodes, 80, lost=True)
    found = page(record, seen).values
    assert found["seconds"] == 60.0
    assert [node["rank"] for node in found["nodes"]] == [*range(nodes)]
    shown = table(record)
    for row, it in zip(found["nodes"], shares_of(record), strict=True):
        assert row["shares"] == [it.busy, it.script, it.nodes, it.idle]
        for share, name in zip(row["shares"], ("busy", "script", "nodes", "idle"), strict=True):
            assert sum(shares_in(row, name)) * 60 / found["buckets"] == pytest.approx(share, abs=0.2)
        if not it.missing:
            assert f"{row['shares'][0]:.3f} s" in shown
    assert found["lines"] == [[it.line, it.code, it.commands, it.seconds] for it in lines_of(record)]
    assert [line for line, *_ in found["lines"]] == ["train.py:12", "train.py:14", "train.py:13", "train.py:20"]
    for line, _, commands, took in found["lines"]:
        assert any(line in row and f"{commands:,}" in row and f"{took:.3f} s" in row for row in shown.splitlines())


def test_a_loss_in_the_middle() -> None:
    """Of the lost one is known when and why; what came from it its peers tell."""
    record, seen = made_run(4, 80, lost=True)
    found = page(record, seen).values
    *others, lost = found["nodes"]
    assert lost["lost"] == pytest.approx(LOST * 60)
    assert (lost["missing"], lost["shares"]) == ("node 3 is lost", [0, 0, 0, 0])
    assert [it["lost"] for it in others] == [None] * 3
    assert found["losses"] == [[lost["lost"], 3, "killed by SIGKILL"]]
    assert [it[:2] for it in found["pairs"] if 3 in it[:2]] == [[2, 3], [3, 0]]


def test_waits_by_line() -> None:
    record, one, other = record_of(n0=[], n1=[]), site(3), site(7)
    record.waits = [
        Waited(2.0, 1.0, 0, 1, one, 1), Waited(5.0, 3.0, 1, 2, one, 1), Waited(9.25, 5.25, 0, 3, other, 1),
        Waited(9.5, 9.25, 0, 4, None, 1),
    ]  # fmt: skip
    found = page(record).values
    rows = [(line, count, sums, longest, node) for line, _, count, sums, longest, node in found["waits"]]
    assert rows == [("train.py:7", 1, 4.0, 4.0, 0), ("train.py:3", 2, 3.0, 2.0, 1), ("", 1, 0.25, 0.25, 0)]
    assert found["script"]["shares"] == [2.75, 7.25]
    at = found["buckets"] * 4 // 10
    assert longest_in(found, found["script"])[at] == ("waits for node 1", "train.py:3")
    assert shares_in(found["script"], "nodes")[at] == 1


def test_transfers() -> None:
    """As the sender tells of them, whoever else does; seconds count once in which several were under way."""
    moved = {"peer": 1, "transfer": 5, "bytes": 100}
    record = record_of(
        n0=[event("sent", 1, 3, "tcp transfers", **moved), event("sent", 2, 4, "tcp transfers", **moved)],
        n1=[
            event("received", 1, 4, "tcp transfers", peer=0, bytes=100),
            event("received", 1, 4, "tcp transfers", peer=2, bytes=7),
            event("sent", 5, 6, "shm collectives", peer=-2, bytes=3),
            event("received", 5, 6, "shm collectives", peer=-2, bytes=4),
            event("sent", 7, 8, "tcp transfers", peer=-1, bytes=9),
        ],
        n2=[],
    )
    record.nodes[2].missing = "it is lost"
    record.transfers = [
        TransferDone(8.5, 7.5, -1, 1, False, 6, 9, "tcp", "transfers"),
        TransferDone(1.0, 0.5, -1, 2, True, 6, 50, "tcp", "transfers"),
    ]
    assert pairs_of(record) == [
        PairTotals(0, 1, "tcp transfers", 2, 200, 3.0),
        PairTotals(-1, 2, "tcp transfers", 1, 50, 0.5),
        PairTotals(1, -1, "tcp transfers", 1, 9, 1.0),
        PairTotals(2, 1, "tcp transfers", 1, 7, 3.0),
        PairTotals(-2, 1, "shm collectives", 1, 4, 1.0),
        PairTotals(1, -2, "shm collectives", 1, 3, 1.0),
    ]
    record.nodes[0].ahead = 2.0
    assert pairs_of(record)[0].seconds == 3.0
    row, *_ = page(record).values["nodes"]
    moving = shares_in(row, "moves")
    assert [moving[at] for at in (0, 399, 400, 1999)] == [1, 1, 0, 0]  # up to 4 s by the node's clock


def test_slices_are_what_happened() -> None:
    """With the line of a transfer, which the command knows that does it; what had not ended goes on to the end."""
    line = site(9)
    record = record_of(
        n0=[
            event("begun", 0, 1, site=line),
            event("done", 1, 4, site=line),
            event("begun", 5, 5, "step", number=1, site=line),
            event("function", 4, 4.5, "step()"),
            event("collective", 4, 4.2, "all_reduce", bytes=64),
            event("graph", 4, 4.1, "3"),
            event("sent", 2, 3, "tcp transfers", peer=1, transfer=5, bytes=100),
            event("sent", 2, 3.5, "tcp collectives", peer=1, transfer=6, bytes=10),
        ],
        n1=[event("received", 2, 3, "tcp transfers", peer=0, transfer=5, bytes=100)],
    )
    record.nodes[0].ahead = 1.0
    message = codec.encode(c.Batch(0, (c.Send(5, 1, 1),)))
    record.sent = [SentMessage(0.0, 0, 0, (line,), message)]
    record.regions = [Named(6.0, 5.0, "forward", 1)]
    found = page(record).values
    told = [
        (it["kind"], it["what"], it["line"], it["began"], round(it["took"], 6), it["bytes"])
        for it in slices_in(found, found["nodes"][0])
    ]
    assert told == [
        ("unfinished", "step", "train.py:9", 4, 6, -1),
        ("command", "aten::mm", "train.py:9", 0, 3, -1),
        ("function", "step()", "", 3, 0.5, -1),
        ("collective", "all_reduce", "", 3, 0.2, 64),
        ("graph", "graph 3", "", 3, 0.1, -1),
        ("sent", "to node 1, tcp collectives", "", 1, 1.5, 10),
        ("sent", "to node 1, tcp transfers", "train.py:9", 1, 1, 100),
    ]
    (received,) = slices_in(found, found["nodes"][1])
    assert (received["what"], received["line"]) == ("from node 0, tcp transfers", "train.py:9")
    assert [it["what"] for it in slices_in(found, found["script"])] == ["forward"]


def test_memory() -> None:
    samples = [MemorySample(float(n), 7 * n % 10, 100) for n in range(100)]
    assert [it.held for it in thinned(samples, 10)] == [9] * 10
    assert thinned(samples, 100) == samples
    assert thinned([], 10) == []
    record = record_of(n0=[], n1=[])
    record.began = 1.0
    one = LineHolds("train.py:5 in step", 2, 100, "float32 (5, 5)")
    seen = RunSeen({0: samples[:3]}, {0: [one], 1: [one, replace_line(one)]})
    found = page(record, seen).values
    assert found["nodes"][0]["memory"] == [[-1, 0, 100], [0, 7, 100], [1, 4, 100]]
    assert found["nodes"][1]["memory"] == []
    assert found["holds"] == [
        ["train.py:5 in step", 4, 200, 2, "float32 (5, 5)"], ["train.py:6 in step", 2, 100, 1, "float32 (5, 5)"],
    ]  # fmt: skip


def replace_line(it: LineHolds) -> LineHolds:
    return it._replace(line="train.py:6 in step")


# ---- buckets ---------------------------------------------------------------------------------------------------------


def test_buckets_are_what_slow_sums_say() -> None:
    chance = random.Random(5)
    for _ in range(inputs(100)):
        count = chance.randint(1, 12)
        buckets = TimeBuckets(10.0, 22.0, count)
        width = 12 / count
        bounds = [(10 + width * n, 10 + width * (n + 1)) for n in range(count)]
        spans = joined((at := chance.uniform(8, 24), at + chance.uniform(0, 4)) for _ in range(chance.randint(0, 8)))
        expected = [seconds(both(spans, [bound])) / width for bound in bounds]
        assert np.allclose(buckets.filled(spans), expected)
        events = [(at := chance.uniform(8, 24), at + chance.uniform(0, 4), chance.randint(0, 3)) for _ in range(9)]
        found = buckets.longest(*zip(*events, strict=True))
        for (first, last), name in zip(bounds, found, strict=True):
            sums = {n: 0.0 for n in range(4)}
            for began, ended, n in events:
                sums[n] += max(0.0, min(ended, last) - max(began, first))
            assert sums[name] == pytest.approx(max(sums.values())) if name >= 0 else max(sums.values()) == 0


class Counted(list[tuple[float, float]]):
    """Spans that count how often one is looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        found = super().__getitem__(at)
        self.looks += len(found) if isinstance(at, slice) else 0
        return found


def test_spans_of_a_million_commands_are_looked_at_a_few_times_each() -> None:
    for work in (both, only):
        one: Spans = [(n, n + 0.5) for n in range(1000)]
        other = Counted((n + 0.25, n + 0.75) for n in range(1000))
        work(one, other)
        assert other.looks <= 8 * len(other), work


# ---- bounds ----------------------------------------------------------------------------------------------------------


def many(nodes: int, commands: int) -> tuple[ProfileRecord, RunSeen]:
    """A run whose commands are of ever other operators and lines, and that has as much as can be of all else."""
    record, seen = made_run(nodes, commands)
    sites = [site(n + 1, "x" * 400) for n in range(200)]
    for node in record.nodes.values():
        node.events = [
            it._replace(what=f"{'y' * 400}{n}", site=sites[n % 200], peer=n % nodes) for n, it in enumerate(node.events)
        ]
        seen.memory[node.rank] *= 20
    record.waits = [it._replace(site=sites[n % 200]) for n, it in enumerate(record.waits)]
    return record, seen


@pytest.mark.parametrize("nodes", [1, 64])
def test_a_page_is_small(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there was."""
    record, seen = many(nodes, 6400 // nodes)
    values = RunReport(record, seen).to_dict("train.py", "1.2.3")
    assert len(page_of(values)) < 5 << 20
    rows = [values["script"], *values["nodes"]]
    assert sum(len(row["slices"]) for row in rows) <= 1.5 * run_report.SLICES
    assert max(len(row["slices"]) for row in rows) <= 1.5 * run_report.ROW_SLICES
    assert sum(len(node["memory"]) for node in values["nodes"]) <= run_report.ALL_MEMORY
    assert len(values["names"]) <= run_report.NAMES + 1
    assert max(len(text) for name in values["names"] for text in name) <= run_report.WIDE
    assert len(values["waits"]) == run_report.LINES or nodes == 64
    assert len(values["lines"]) == run_report.LINES
    with monkeypatch.context() as patch:
        patch.setattr(run_report, "PAIRS", 3)
        patch.setattr(run_report, "ALL_BUCKETS", 10)
        few = RunReport(record, seen).to_dict("train.py", "1.2.3")
    assert len(few["pairs"]) == min(3, len(values["pairs"]))
    assert few["buckets"] == run_report.FEWEST


@pytest.mark.slow
def test_a_million_commands() -> None:
    record, seen = made_run(64, 1_000_000 // 64)
    data = page_of(RunReport(record, seen).to_dict("train.py", "1.2.3"))
    assert len(data) < 5 << 20
    found = read_page(data).values
    assert sum(line[2] for line in found["lines"]) == 64 * (1_000_000 // 64 // len(STEP)) * len(STEP)


# ---- texts -----------------------------------------------------------------------------------------------------------


def texts_in(values: Any) -> list[str]:
    """All texts of values, in order."""
    match values:
        case str():
            return [values]
        case dict():
            return [text for each in values.values() for text in texts_in(each)]
        case list():
            return [text for each in values for text in texts_in(each)]
    return []


def hostile() -> tuple[ProfileRecord, RunSeen]:
    """A run in which each text that somebody else may choose is hostile."""
    record, seen = made_run(2, 40, lost=True)
    there: tuple[CodeType, int] = site(5, HOSTILE.replace("\0", ""))
    for node in record.nodes.values():
        node.host = node.device = HOSTILE
        node.missing = node.missing and HOSTILE
        node.events = [it._replace(what=HOSTILE, site=there) for it in node.events]
    record.losses = [it._replace(why=HOSTILE) for it in record.losses]
    record.waits = [it._replace(site=there) for it in record.waits]
    record.regions = [it._replace(name=HOSTILE) for it in record.regions]
    record.transfers = [it._replace(channel=HOSTILE) for it in record.transfers]
    seen = replace(
        seen, slow=[HOSTILE], output={0: [HOSTILE, "\udcff"]}, holds={0: [LineHolds(HOSTILE, 1, 1, HOSTILE)]}
    )
    return record, seen


def test_no_text_is_a_part_of_the_page() -> None:
    plain, found = page(*made_run(2, 40, lost=True)), page(*hostile(), title=HOSTILE)
    assert found.tags == plain.tags
    assert found.script == plain.script
    assert found.title == HOSTILE
    assert found.values["title"] == HOSTILE
    told = texts_in(found.values)
    assert sum(HOSTILE in text for text in told) >= 12
    assert found.values["output"]["0"] == [HOSTILE, "?"]


def test_a_page_that_loads_something_is_found() -> None:
    """The reader of pages of these tests is no blind one."""
    made = page_of(RunReport(*made_run(1, 8)).to_dict("train.py", "1.2.3"))
    for bad in (b"<img src=x>", b"<b>", b"</i>", b"<style>p { background: url(x) }</style>"):
        with pytest.raises((Broken, ValueError)):
            read_page(made.replace(b"<body>", b"<body>" + bad))
    with pytest.raises(Broken, match="policy"):
        read_page(made.replace(b'"use strict";', b'"use strict"; '))
