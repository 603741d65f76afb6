"""The nodes as a ``concurrent.futures.Executor``."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from typing import assert_type

import disttensor as dt


def power(x: int, by: int = 2) -> int:
    return int(x**by)


def anywhere(executor: Executor) -> int:
    return executor.submit(power, 3).result()


async def in_a_loop(executor: Executor) -> int:
    return await asyncio.get_running_loop().run_in_executor(executor, power, 3)


def main() -> None:
    with dt.tasks.Executor(per_node=1) as executor:
        future = executor.submit(power, 3, by=3)
        assert_type(future, Future[int])
        assert_type(future.result(), int)
        assert_type(list(executor.map(power, [1, 2])), list[int])
        assert_type(anywhere(executor), int)
        assert_type(asyncio.run(in_a_loop(executor)), int)
