"""Exceptions that are hard to tell arrive all the same, cut short, and their node goes on; real nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from aftermath import aftermath
from telling import said

import disttensor as dt
from disttensor import testing


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=1, threads=1):
        torch.ones(1 << 14, device="node:0").cpu()  # the data channel connects at the first transfer
        yield


def _raising(error: type[BaseException]) -> Any:
    def method(*args: Any) -> Any:
        raise error("hostile")

    return method


class _HostileType(type):
    def __getattribute__(cls, name: str) -> Any:
        raise ValueError("hostile")


def unpicklable() -> BaseException:
    error = ValueError("it holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


def long() -> BaseException:
    return ValueError("x" * (100 << 20))


def cyclic() -> BaseException:
    error, other = ValueError("a cycle"), ValueError("of causes")
    error.__cause__, other.__cause__ = other, error
    return error


def deep() -> BaseException:
    error = ValueError("the last of many")
    for _ in range(5000):
        following = ValueError("the last of many")
        following.__context__ = error
        error = following
    return error


def group() -> BaseException:
    return ExceptionGroup("some", [ValueError("one"), ExceptionGroup("more", [KeyError("two")])])


def noted() -> BaseException:
    error = ValueError("with notes")
    error.__notes__ = [3, object()]  # type: ignore[list-item]
    return error


def of(base: type[BaseException] = ValueError, meta: type = type, **methods: Any) -> Any:
    return lambda: meta("Hostile", (base,), methods)()


ERRORS: dict[str, Any] = {
    "unpicklable": unpicklable,
    "long": long,
    "cyclic": cyclic,
    "deep": deep,
    "group": group,
    "noted": noted,
    "text raises": of(__str__=_raising(ValueError)),
    "text and repr raise": of(__str__=_raising(ValueError), __repr__=_raising(ValueError)),
    "text interrupts": of(__str__=_raising(KeyboardInterrupt)),
    "text exits": of(__str__=_raising(SystemExit)),
    "text is none": of(__str__=lambda self: 3),
    "text recurses": of(__str__=lambda self: str(self)),
    "surrogates": lambda: ValueError("\ud800 \x00 \x1b[31m"),
    "module is none": of(__module__=None),
    "type is hostile": of(meta=_HostileType),
    "attributes raise": of(__getattribute__=_raising(ValueError)),
    "a base's text exits": of(GeneratorExit, __str__=_raising(SystemExit)),
    "interrupt": of(KeyboardInterrupt),
}


@pytest.mark.fault(13)
@pytest.mark.parametrize("name", ERRORS)
def test_it_arrives_and_the_node_goes_on(name: str) -> None:
    make = ERRORS[name]

    def program() -> None:
        raise make()

    with aftermath(0), pytest.raises((RuntimeError, ValueError, dt.DisttensorError)) as caught:
        dt.run(program, node=0)
    assert not isinstance(caught.value, dt.NodeLost)
    told = said(caught.value)
    assert "node 0" in told
    assert "test_hostile_errors.py" in told
    assert testing.limit("error") == 64 << 10
    longest = testing.limit("error") + 2000  # and the place where it was issued
    assert len(str(caught.value)) < longest
    assert sum(map(len, getattr(caught.value, "__notes__", []))) < longest
    assert (torch.ones(2, device="node:0") + 1).tolist() == [2, 2]
    dt.synchronize()
