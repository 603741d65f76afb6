"""Which nodes a master takes: those that speak as it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace

from disttensor.init import meet
from disttensor.runtime import command as c
from disttensor.runtime.abilities import own
from disttensor.runtime.bundle import PROTOCOL
from disttensor.runtime.errors import StartError

HELLO = c.Hello(PROTOCOL, "a job", 1, "host", str(torch.__version__), "3", ("cpu",), False, "", own())


def met(hello: c.Hello) -> None:
    """Meets a node that says this."""
    link = SimpleNamespace(hellos={0: hello}, losses=[])
    meet(cast(Any, SimpleNamespace(link=link, job="a job", launcher=None)), [0], 1)


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (replace(HELLO, protocol=PROTOCOL + 1), f"speaks protocol {PROTOCOL + 1}, this master {PROTOCOL}"),
        (replace(HELLO, job="another job"), "speaks protocol"),
        (replace(HELLO, torch="1.2.3+cpu"), "has torch 1.2.3, this master "),
    ],
    ids=["protocol", "job", "torch"],
)
def test_others_are_refused(hello: c.Hello, says: str) -> None:
    with pytest.raises(StartError, match=says):
        met(hello)


def test_another_build_of_the_same_torch_is_taken() -> None:
    met(replace(HELLO, torch=str(torch.__version__).partition("+")[0] + "+cu999"))
