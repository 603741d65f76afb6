"""Sessions whose tensors are protected on their way: what is altered poisons its destination, and nothing else."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aftermath import aftermath, within
from equal import same

import disttensor as dt
from disttensor.runtime.channel import cipher
from disttensor.runtime.channel.tcp import shield

#: Elements of float32: of a tensor that its sender writes itself, and of one that takes several chunks.
SIZES = (100, 300_000)


def altering_one(monkeypatch: pytest.MonkeyPatch, cls: type, method: str, alter: Callable[..., None]) -> list[str]:
    """The next payload is altered, once it is protected. Returns a list that is empty when that has happened."""
    left = ["one"]
    true = getattr(cls, method)

    def once(self: Any, *args: Any) -> Any:
        out = true(self, *args)
        if left:
            left.pop()
            alter(*args)
        return out

    monkeypatch.setattr(cls, method, once)
    return left


#: What is raised where a tensor was altered.
WORDS = r"from rank 0 to rank 1 .*(checksum is not|encryption is wrong)"


@pytest.mark.fault(28)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("ask", ["checksum", "encrypt"])
def test_what_is_altered_is_never_a_number(monkeypatch: pytest.MonkeyPatch, ask: str, n: int) -> None:
    """The error names both ranks; the source, what came before and the node's other tensors are as they were."""
    with dt.init_master_worker("tcp", nodes=2, launcher="inproc", **{ask: True}):
        x, other = torch.arange(float(n)).to("node:0"), torch.ones(3).to("node:1")
        before = x.to("node:1")
        dt.synchronize()
        with aftermath(0, 1):
            if ask == "encrypt":

                def flip(nonce: bytes, plain: memoryview, out: memoryview) -> None:
                    out[5] ^= 1

                left = altering_one(monkeypatch, cipher.Cipher, "seal", flip)
            else:
                left = ["one"]

                def crc32(data: Any, start: int = 0) -> int:  # the sender is the first to add up
                    return zlib.crc32(data, start) ^ (left.pop() == "one" if left else 0)

                monkeypatch.setattr(shield, "zlib", type("zlib", (), {"crc32": staticmethod(crc32)}))
            with within(1.0):
                after = x.to("node:1") + 1
                with pytest.raises(dt.DisttensorError, match=WORDS):
                    after.sum().item()
            del after
            assert not left
        same(x, torch.arange(float(n)))
        same(before, torch.arange(float(n)))
        assert (other + 1).sum().item() == 6
        if ask == "checksum":
            same(x.to("node:1"), torch.arange(float(n)))


@pytest.mark.parametrize("ask", ["checksum", "encrypt"])
def test_programs_give_the_same(ask: str) -> None:
    """Between processes, by all ways: copies both ways, collectives of few and many bytes, shared memory."""
    with dt.init_master_worker(nodes=2, threads=1, **{ask: True}):
        for n in SIZES:
            xs = [torch.full((n,), float(k + 1), device=f"node:{k}") for k in range(2)]
            for _ in range(2):  # the second time by shared memory
                dt.all_reduce(xs)
                same(xs[0].to("node:1"), xs[1].cpu())
            assert xs[0].sum().item() == 6 * n
        if ask == "encrypt":
            with pytest.raises(ValueError, match=r"'gloo' must not be used here: encrypt=True .* cannot encrypt"):
                dt.channels.select("send", "gloo")
            assert "cannot encrypt" in dt.channels.available()["send", "cpu", "gloo"].why
