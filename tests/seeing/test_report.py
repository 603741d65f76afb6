"""``dt.seeing.report``: what the page has of real nodes, and what its script shows. Unit tests have its figures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import made_run
from mesh_kit import connected
from page_script import WIDTH, run_script
from report_pages import Page, longest_in, read_page, slices_in

import disttensor as dt
from disttensor.seeing.report_page import page_of
from disttensor.seeing.run_report import RunReport
from disttensor.session import current

HERE = os.path.basename(__file__)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with connected(4):
        yield


def page_at(path: Path) -> Page:
    return read_page(path.read_bytes())


def line(function: Any, after: int) -> str:
    """The line of a function of this file, as rows have it."""
    return f"{HERE}:{function.__code__.co_firstlineno + after}"


def work(kept: list[torch.Tensor]) -> None:
    for _ in range(3):
        x = torch.ones(600, 600, device="node:1")
        kept.append(x @ x)
        (kept[-1]).to("node:2").sum().item()
        torch.ones(300, 300).to("node:0")
        dt.all_reduce([torch.ones(1000, device=f"node:{k}") for k in range(4)])
    dt.run(print, "<b>hello</b>", node=3)


def looks() -> list[Any]:
    """Those who are called by the thread that flushes."""
    return current.session().link.idle.looks


@pytest.mark.usefixtures("cluster")
def test_a_report(tmp_path: Path) -> None:
    kept, before = list[torch.Tensor](), looks()
    with dt.seeing.report(tmp_path / "run") as prof:
        assert len(looks()) == len(before) + 1
        work(kept)
    assert looks() == before
    page = page_at(tmp_path / "run")
    found = page.values
    assert [node["rank"] for node in found["nodes"]] == [0, 1, 2, 3]
    shown = [row.split() for row in prof.table().splitlines()[3:7]]
    for node, row in zip(found["nodes"], shown, strict=True):
        assert [f"{each:.3f}" for each in node["shares"]] == row[2::3]
        assert node["missing"] == ""
        assert node["lost"] is None
        assert all(0 <= at <= found["seconds"] + 1 and rss > 0 for at, _, rss in node["memory"])
        assert node["memory"][-1][1] >= (3 * 600 * 600 * 4 if node["rank"] == 1 else 0)
        assert ("aten::mm", line(work, 3)) in longest_in(found, node) or node["rank"] != 1
    (upload, *_) = (it for it in slices_in(found, found["script"]) if it["kind"] == "sent" and it["bytes"] == 360_000)
    assert (upload["line"], upload["what"].split(",")[0]) == (line(work, 5), "to node 0")
    assert {"aten::mm", "all_reduce", "print()"} <= {
        it["what"] for node in found["nodes"] for it in slices_in(found, node)
    }
    assert line(work, 4) in [wait[0] for wait in found["waits"]]
    totals = {(source, target, channel): (n, size) for source, target, channel, n, size, _ in found["pairs"]}
    assert totals[1, 2, "auto transfers"] == (3, 3 * 600 * 600 * 4)
    assert totals[-1, 0, "auto transfers"] == (3, 3 * 360_000)
    made = next(it for it in found["holds"] if f":{line(work, 3).partition(':')[2]} in work" in it[0])
    assert made[1:3] == [3, 3 * 600 * 600 * 4]
    assert found["output"]["3"][-1] == "<b>hello</b>"
    assert found["losses"] == found["slow"] == []
    assert found["dropped"] == {}
    prof.report(tmp_path / "again.html")
    assert page_at(tmp_path / "again.html") == page
    assert "aten::mm" in " ".join(run_script(page, *((0, x, 22 + 30 * 2 + 10) for x in range(160, 900, 4))).tips)


@pytest.mark.usefixtures("cluster")
def test_names_that_end_in_html_are_pages(tmp_path: Path) -> None:
    with dt.seeing.profile(tmp_path / "t.html") as prof:
        with pytest.raises(dt.DisttensorError, match="nothing is recorded yet"):
            prof.report(tmp_path / "early.html")
        torch.ones(3, device="node:0").neg_()
    assert len(page_at(tmp_path / "t.html").values["nodes"]) == 4
    with pytest.raises(FileNotFoundError):
        prof.report(tmp_path / "missing" / "t.html")
    before = looks()
    with pytest.raises(FileNotFoundError):
        dt.seeing.report(tmp_path / "missing" / "t.html").__enter__()
    assert looks() == before
    assert [each.name for each in tmp_path.iterdir()] == ["t.html"]


@pytest.mark.usefixtures("cluster")
def test_a_block_that_ends_by_an_error_has_its_report(tmp_path: Path) -> None:
    """Nodes are asked for nothing then that they would answer in its turn."""
    with pytest.raises(ZeroDivisionError), dt.seeing.report(tmp_path / "t.html"):  # noqa: PT012
        torch.ones(3, device="node:0").neg_().cpu()
        raise ZeroDivisionError
    found = page_at(tmp_path / "t.html").values
    assert "aten::neg_" in [what for what, _ in found["names"]]
    assert found["holds"] == []


# ---- the script of the page ------------------------------------------------------------------------------------------


def test_what_the_page_shows() -> None:
    """Figures of the values, in words; each row's pixels by its shares; and what the pointer is at."""
    record, seen = made_run(4, 80, lost=True)
    seen.output[0] = ["</pre><script>alert(1)</script>"]
    page = read_page(page_of(RunReport(record, seen).to_dict("train.py", "1.2.3")))
    found, node = page.values, page.values["nodes"][1]
    busy = next(it for it in slices_in(found, node) if it["kind"] == "command")
    moved = next(it for it in slices_in(found, node) if it["kind"] == "sent")

    def x_of(at: float) -> int:
        return round(150 + at / found["seconds"] * (WIDTH - 150 - 48))

    y = 22 + 2 * 30 + 12  # the script's row is the first
    shown = run_script(
        page,
        (0, x_of(busy["began"] + busy["took"] / 2), y),
        (0, x_of(moved["began"] + moved["took"] / 2), y),
        (0, x_of(1.0), 5),
        (1, 70 + 34 * 3 + 10, 30 + 34 * 2 + 10),
        (2, 500, 100),
    )
    text = "\n".join(shown.texts)
    assert "node 3 was lost after 36.00 s: killed by SIGKILL" in text
    assert "node 1 (dp=1, host host0) is 15% behind its mesh: its commands take longer" in text
    assert "[node 0] </pre><script>alert(1)</script>" in text
    assert {"train.py:12", "train.py:18", "not known: node 3 is lost", "train.py:22 in step", "768.00 MiB"} <= {
        *shown.texts
    }
    assert {"script", "node 0 · host0 cpu", "0 s", "60 s", "not known: node 3 is lost"} <= {*shown.drawn}
    command, transfer, above, pair, memory = shown.tips
    assert f"command: aten::mm, train.py:12\n    {busy['took']:.2f} s from {busy['began']:.2f} s on" in command
    assert "longest: aten::mm, train.py:12" in command
    assert "sends: to node 2, tcp collectives" in transfer
    assert "1.00 MiB" in transfer
    assert "MB/s" in transfer
    assert above == ""
    assert pair == "node 1 to node 2\ntcp collectives: 5 transfers, 5.00 MiB, 3.5 MB/s"
    assert memory.startswith("node ")
    assert next(tick for tick in shown.enlarged if tick.endswith(" s")) == "19 s"
    row = shown.pixels[2]
    parts = [row.get(str(n), 0) for n in (1, 3, 2, 4)]  # the colours of the shares' order
    assert [n / sum(row.values()) for n in parts] == pytest.approx([each / 60 for each in node["shares"]], abs=0.05)
    assert row["5"] > 0
    assert shown.pixels[4] == {"0": sum(row.values())}  # of the lost one nothing is known
