"""Refused connections in the log: the first at once, later ones ever more rarely, and none is forgotten."""

from __future__ import annotations

import itertools
import logging

import pytest

from disttensor.runtime.host.refusals import Refusals


def test_lines_are_ever_fewer_and_count_all(caplog: pytest.LogCaptureFixture) -> None:
    now = 0
    refusals = Refusals(logging.getLogger("disttensor"), lambda: now)
    lines = []
    for now in range(0, 24 * 3600, 10):
        refusals.note_refusal("10.0.0.9", "unknown key")
        lines += [(now, record.getMessage()) for record in caplog.records]
        caplog.clear()
    assert lines[0] == (0, "refused a connection from 10.0.0.9: unknown key; 1 refused so far")
    times = [when for when, _ in lines]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses == [10, 20, 40, 80, 160, 320, 640, 1280, 2560, *[3600] * 22]
    assert all(line.endswith(f" {when // 10 + 1} refused so far") for when, line in lines)
    assert refusals.count == 24 * 360
