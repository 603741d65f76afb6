"""Works of functions: each knows what it gives, and stands for that among the arguments of the next one."""

from __future__ import annotations

import asyncio
from typing import assert_type

import disttensor as dt
from disttensor.futures import Work


def half(x: int) -> float:
    return x / 2


def name(x: float, digits: int = 1) -> str:
    return f"{x:.{digits}f}"


def shout(work: Work[str]) -> None:
    print(work.result().upper())


async def wait(work: Work[str]) -> str:
    return await work


def main() -> None:
    work = dt.submit(half, 3)
    assert_type(work, dt.tasks.Submitted[float])
    assert_type(work.result(), float)
    assert_type(work.result(timeout=1), float)
    text = dt.submit(name, work)
    assert_type(text.result(), str)
    assert_type(dt.submit(name, work, node=1).result(), str)
    assert_type(dt.submit(name, work, digits=2, node="any").result(), str)
    assert_type(dt.submit(name, 1.5, beside=True).result(), str)
    assert_type(dt.submit(name, 1.5, digits=3).result(), str)
    assert_type(dt.submit(print, "done").result(), None)
    text.add_done_callback(shout)
    assert_type(asyncio.run(wait(text)), str)
    assert_type(text.exception(), Exception | None)
    assert_type(text.cancel(), bool)
    for done in dt.futures.as_completed([dt.submit(half, k) for k in range(3)]):
        assert_type(done, dt.tasks.Submitted[float])
