"""Shared memory of CUDA devices as a carrier: tensors between processes of one host never leave their devices.

    sender's thread   copy into a buffer that the peer has mapped; say where it is
    reader's thread   copy out of it, to wherever the receive wants it; mark it as free

A buffer is exported by a CUDA IPC handle, and mapped once, which takes long. Beside it a page of the CPU's memory is
shared (``segments``), where the peer notes that it has mapped the buffer, and that it is free again. While no buffer is
to be had, and where the peer can't map one (in another container, or of a device that it doesn't see), tensors go by
the CPU's memory.
"""

from __future__ import annotations

import json
import secrets
import struct
import threading
from base64 import b64encode
from typing import Annotated, TypeAlias

import msgspec
import torch

from ...protocol.errors import ProtocolError
from ..carrier import Parcel, Say
from ..payload import store
from .segments import DESCRIPTOR, FREE, RETIRED, USED, Mapping, Segment
from .sharing import Sharing

#: A payload's descriptor: two numbers of which the first, a segment's process, is 0 here; the id of the buffer's page;
#: and the bytes.
_PAYLOAD = struct.Struct("<IIQQ")
#: The word that offers the peer a buffer.
_OFFER = b"+"
#: The size of the random sign that a buffer holds when it is offered, bytes.
_SIGN = 16
#: A number of bytes on a device.
_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
#: A buffer as another process maps it: the device's UUID, then what torch says; bytes travel as base64.
_Exported: TypeAlias = tuple[str, bytes, _Bytes, _Bytes, bytes, _Bytes, bytes, bool]
#: The most bytes of all buffers of a pair in one direction.
MOST = 1 << 30


def is_cuda(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def export(buffer: torch.Tensor) -> bytes:
    """Returns the bytes by which another process can map the buffer."""
    device, *rest = buffer.untyped_storage()._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return json.dumps([uuid, *(b64encode(x).decode() if isinstance(x, bytes) else x for x in rest)]).encode()


def imported(exported: bytes) -> torch.Tensor:
    """Maps another process's buffer. Raises RuntimeError, ValueError when this process can't map it."""
    uuid, handle, size, offset, counter, counter_offset, event, sync = msgspec.json.decode(exported, type=_Exported)
    devices = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    # CUDA 10.1 and later map the memory of a device that this process doesn't see, too
    device = devices.index(uuid) if uuid in devices else 0
    storage = torch.UntypedStorage._new_shared_cuda(device, handle, size, offset, counter, counter_offset, event, sync)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def finish(device: torch.device) -> None:
    """Waits for the work that this thread has given the device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _Buffer:
    """The sender's side of a buffer."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises OSError, RuntimeError when there is no memory."""
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.page = Segment(1)

    def offer(self) -> bytes:
        sign = secrets.token_bytes(_SIGN)  # the peer has to find it there
        self.memory[:_SIGN] = torch.tensor(list(sign), dtype=torch.uint8)  # waits for the device
        return _OFFER + self.page.describe() + sign + export(self.memory)

    def mapped(self) -> bool:
        self.page.forget_descriptor()  # if it is
        return self.page.fd < 0


class CudaSharing(Sharing):
    """Both directions of one pair, seen from one end: segments for CPU tensors, buffers for CUDA tensors."""

    def __init__(self, say: Say) -> None:
        super().__init__(say)
        self._buffers: list[_Buffer] = []
        self._choosing = threading.Lock()
        self._theirs: dict[int, tuple[Mapping, torch.Tensor]] = {}  #: the peer's buffers by their pages' ids

    def prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_cuda(tensor) or not self._fits(tensor):
            return super().prepare(tensor)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        finish(tensor.device)  # the sender's thread has another stream than the caller's
        return tensor

    def stage(self, tensor: torch.Tensor) -> bytes | None:
        nbytes = tensor.numel() * tensor.element_size()
        for buffer in self._fits(tensor) if is_cuda(tensor) else ():
            if buffer.page.state == FREE:
                store(buffer.memory[:nbytes].view(tensor.dtype).view(tensor.shape), tensor)
                finish(tensor.device)
                buffer.page.state = USED
                return _PAYLOAD.pack(0, 0, buffer.page.id, nbytes)
        return super().stage(tensor)

    def _fits(self, tensor: torch.Tensor) -> list[_Buffer]:
        """Returns the buffers that are large enough and that the peer has mapped. Offers one more if all are in use."""
        nbytes = tensor.numel() * tensor.element_size()
        with self._choosing:
            large = [b for b in self._buffers if b.nbytes >= nbytes and b.memory.device == tensor.device]
            found = [buffer for buffer in large if buffer.mapped()]
            if len(found) == len(large) and all(buffer.page.state != FREE for buffer in found):
                self._offer(1 << max(20, (nbytes - 1).bit_length()), tensor.device)
            return found

    def _offer(self, nbytes: int, device: torch.device) -> None:
        """Makes a buffer and offers it, in place of idle ones if there are many."""
        for old in [buffer for buffer in self._buffers if buffer.page.state == FREE and buffer.mapped()]:
            if sum(buffer.nbytes for buffer in self._buffers) + nbytes > MOST:
                self._buffers.remove(old)
                old.page.retire()
        if sum(buffer.nbytes for buffer in self._buffers) + nbytes > MOST:
            return
        try:
            buffer = _Buffer(nbytes, device)
            offer = buffer.offer()
        except (OSError, RuntimeError):  # no memory, or none that can be exported
            return
        self._buffers.append(buffer)
        self.say(offer)

    def hear(self, word: bytes) -> None:
        if not word.startswith(_OFFER):
            super().hear(word)
            return
        for id in [id for id, (mapping, _) in self._theirs.items() if mapping.map[0] == RETIRED]:
            del self._theirs[id]
        try:
            sign, exported = word[1 + DESCRIPTOR :][:_SIGN], word[1 + DESCRIPTOR + _SIGN :]
            memory = imported(exported)
            if bytes(memory[:_SIGN].tolist()) != sign:
                return
            mapping = Mapping.of(word[1 : 1 + DESCRIPTOR], 1)  # the other sees that it is mapped
        except (OSError, RuntimeError, ValueError):  # no answer means that it can't be used
            return
        self._theirs[mapping.id] = mapping, memory

    def open(self, descriptor: bytes, nbytes: int) -> Parcel:
        process, _, id, size = _PAYLOAD.unpack(descriptor)
        if process:
            return super().open(descriptor, nbytes)
        mapping, memory = self._theirs.get(id, (None, None))
        if mapping is None or memory is None or not 0 <= nbytes == size <= memory.numel():
            raise ProtocolError(f"a payload of {nbytes} bytes in the buffer {id}, which is not there or is smaller")
        return _Buffered(mapping, memory[:nbytes])

    def close(self) -> None:
        super().close()
        for buffer in self._buffers:
            buffer.page.retire()
        self._buffers.clear()
        self._theirs.clear()


class _Buffered(Parcel):
    """A payload in the peer's buffer."""

    def __init__(self, page: Mapping, memory: torch.Tensor) -> None:
        self._page, self._memory = page, memory

    def discard(self) -> None:
        self._page.free()

    def into(self, tensor: torch.Tensor) -> bool:
        try:
            store(tensor, self._memory.view(tensor.dtype))
            for device in {self._memory.device, tensor.device}:
                finish(device)
        finally:
            self._page.free()
        return True

    def fill(self, memory: memoryview) -> None:
        torch.frombuffer(memory, dtype=torch.uint8).copy_(self._memory)
        self._page.free()
