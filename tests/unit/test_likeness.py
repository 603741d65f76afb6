"""Which process may be in the place of a lost node: by what both have said of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from fake_hub import HELLO
from msgspec.structs import replace

from disttensor.runtime.protocol.commands import Abilities, Hello
from disttensor.session.likeness import _value_in_words, unlike

GIB = 1 << 30
FORMER = replace(
    HELLO, devices=("cpu", "cuda:0"), memory=(64 * GIB, 80 * GIB),
    abilities=replace(HELLO.abilities, cpu="AVX2", onednn=True, cudnn=91002, capabilities=((9, 0),)),
)  # fmt: skip


def other(**abilities: Any) -> Hello:
    return replace(FORMER, abilities=replace(FORMER.abilities, **abilities))


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (FORMER, ""),
        (replace(FORMER, pid=7, host="another", gpus=("GPU-1",), numa=1), ""),
        (replace(FORMER, devices=("cpu",)), "its devices are cpu, and not cpu, cuda:0"),
        (replace(FORMER, devices=("cpu", "cuda:1")), "its devices are cpu, cuda:1, and not cpu, cuda:0"),
        (replace(FORMER, simulated=True), "its CUDA devices are simulated ones, and not real ones"),
        (replace(FORMER, torch="2.0+cu1"), "it has torch 2.0+cu1, and not 2.0"),
        (other(capabilities=((8, 0),)), "the compute capabilities of its GPUs: ((8, 0),), and not ((9, 0),)"),
        (other(cpu="AVX512"), "the instructions of its CPU: AVX512, and not AVX2"),
        (other(onednn=False), "oneDNN in its torch: missing, and not there"),
        (other(cudnn=90000), "its cuDNN: 90000, and not 91002"),
    ],
)  # fmt: skip
def test_what_differs(hello: Hello, why: str) -> None:
    assert unlike(FORMER, hello) == why


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        ((60 * GIB, 80 * GIB), ""),
        ((128 * GIB, 141 * GIB), ""),
        ((64 * GIB, 40 * GIB), "its cuda:0 has 40.00 GiB of memory, and not 80.00 GiB"),
        ((32 * GIB, 80 * GIB), "its cpu has 32.00 GiB of memory, and not 64.00 GiB"),
        ((), ""),
    ],
)
def test_less_memory(memory: tuple[int, ...], why: str) -> None:
    assert unlike(FORMER, replace(FORMER, memory=memory)) == why


def test_each_ability_has_words() -> None:
    for name in Abilities.__struct_fields__:
        assert unlike(FORMER, other(**{name: ()})).endswith(
            f": (), and not {_value_in_words(getattr(FORMER.abilities, name))}"
        )
