"""The geometry of tensors on a node, compared with what the master takes it to be; and the hash of their bytes."""

from __future__ import annotations

import hashlib

import torch

from ..channel.payload import has_memory
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import GeometryError
from ..protocol.flat import as_bytes


def of(tensor: torch.Tensor) -> c.Expected:
    """Returns the geometry of a tensor. Raises TypeError for a tensor that strides don't describe."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"a {tensor.layout} tensor can't have a proxy; only strided ones can (x.to_dense())")
    return expected(
        tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype,
        (tensor.is_conj(), tensor.is_neg()),
    )  # fmt: skip


def check_returned(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor of a user's function that can't have a proxy, and says what can in its place."""
    if tensor.is_nested:
        raise TypeError("a nested tensor can't have a proxy; return x.unbind(), the tensors in it")
    found = of(tensor)
    if tensor.is_quantized:
        raise TypeError(
            f"a quantized tensor ({tensor.dtype}) can't have a proxy; return x.dequantize() or x.int_repr()"
        )
    last = found.offset + sum((n - 1) * step for n, step in zip(found.shape, found.stride, strict=True))
    inside = tensor.untyped_storage().nbytes() >= (last + 1) * tensor.element_size() if tensor.numel() else True
    if not has_memory(tensor) or not (inside or tensor._is_zerotensor()):
        raise TypeError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)!s:.200} has no memory: its storage was freed, it "
            "is on the meta device, or its values are other tensors'; return a tensor that has values"
        )


def expected(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, bits: tuple[bool, bool]
) -> c.Expected:
    """Returns the geometry that these parts make up."""
    return c.Expected(shape, stride, offset, codec.dtype_id(dtype), bits[0] + 2 * bits[1])


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the same geometry, which the script has been told: a clone begins its memory, without gaps."""
    if tensor.is_conj():
        return copied(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(copied(torch._neg_view(tensor)))
    shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if tensor.numel() else 0
    if not offset and 0 < tensor.numel() == span:
        return tensor.clone()
    memory = tensor.new_empty(offset + span)
    memory[offset:].copy_(tensor.as_strided((span,), (1,), offset))
    return memory.as_strided(shape, stride, offset)


def plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor lies as one that was made lies: torch calls one contiguous whatever the strides of
    dimensions of one element, and a script that has not been told of any takes it to lie so."""
    step, strides = 1, []
    for n in reversed(tensor.shape):
        strides.append(step)
        step *= max(n, 1)
    return not tensor.storage_offset() and tensor.stride() == tuple(reversed(strides))


def digest(tensor: torch.Tensor) -> bytes:
    """Returns the hash of a tensor's bytes, as it lies when it is contiguous. Raises TypeError as ``of``."""
    of(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    hasher = hashlib.blake2b(digest_size=codec.DIGEST)
    if plain.numel():
        hasher.update(as_bytes(plain).numpy().data)
    return hasher.digest()


def wrong(op: str, found: c.Expected, expected: c.Expected) -> GeometryError:
    """Returns the error for an operator whose result has another geometry than the master takes it to have."""
    return GeometryError(
        f"{op} gave {_text(found)} on this node, where the script takes it to be {_text(expected)}: what it did with "
        "the proxy would be wrong. Give it operands that are contiguous, or call it on the node in a function with "
        "disttensor.run; and report it, please: torch's meta kernel does other than the node's"
    )


def _text(g: c.Expected) -> str:
    text = f"a tensor {g.shape} {codec.dtype_of(g.dtype)} with strides {g.stride}"
    if g.offset:
        text += f" and offset {g.offset}"
    return text + ("", ", conjugated", ", negated", ", conjugated and negated")[g.bits & 3]
