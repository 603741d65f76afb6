"""One copy down: the script reads large tensors where they lie in a node's own memory, by ``process_vm_readv``.

    script: once it has heard of the node's shared memory: asks for the mark, if its launcher has started the node here
    node:   allows the process to read that has asked (it has opened a segment of it), and says where the mark is
    script: reads the mark; if it is the one that has come over the connection, says that it can read
    node:   announces a large tensor by its address, and keeps it
    script: reads it to where it is to be, piece by piece, and behind each piece the mark; notes in the node's page that
            it has, and says so

The process that is read is the one that the launcher has started for the rank. No message names one, so no node has the
script read another process. The mark, a random number, shows that it is the node; the node voids it before it lets the
memory of an announced tensor change though nobody has said that it was read. The page is for a node that waits until a
tensor was read while its connection brings what it has still to receive, with the word behind that. Where the kernel
refuses the first read (containers, other pid namespaces, Yama, seccomp) nothing more is said, and all goes by segments.
Where it refuses a later one, the connection is begun anew, and what was announced comes by segments, as does all from
then on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import struct
from collections.abc import Callable

import torch

from ...protocol.errors import ProtocolError
from ..carrier import MissedError, Parcel, RefusedError, Say
from ..payload import is_plain
from .segments import DESCRIPTOR, Mapping, Segment, pack_descriptor, unpacked
from .sharing import TRY, Sharing

#: The size from which on a tensor is read where it lies, bytes. A smaller one is in a segment as soon.
LEAST = 128 << 10
#: The bytes of one read: between two reads the loss of the node is noticed. Reads of 8 MiB took an eighth longer
#: beside a load, whose other work comes in between and takes the caches.
PIECE = 32 << 20
#: Words between the two carriers: where is your mark? Here. I can read it.
_ASK, _HERE, _READ = b"@", b"#", b"="

#: The size of a mark, bytes.
_MARK = 16
_PLACE = struct.Struct(f"<Q{_MARK}s{DESCRIPTOR}s")
#: Where the page has the number of the last tensor that was read.
_DONE = 16
#: prctl's option: a process that may read this one, where Yama lets none but its ancestors.
_PR_SET_PTRACER = 0x59616D61


class _Span(ctypes.Structure):
    """Memory, as the kernel's ``struct iovec`` has it."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_Spans = _Span * 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
#: None: this system has no such call
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [ctypes.c_int, *[ctypes.POINTER(_Span), ctypes.c_ulong] * 2, ctypes.c_ulong]


def read_memory(pid: int, source: int, target: int, nbytes: int, mark_at: int) -> bytes:
    """Copies memory of another process to memory of this one; returns the mark that is there once all was copied.

    Raises OSError: PermissionError where the kernel refuses it, ProcessLookupError for a process that has ended.
    """
    mark = (ctypes.c_ubyte * _MARK)()
    here = _Spans(_Span(target, nbytes), _Span(ctypes.addressof(mark), _MARK))
    there = _Spans(_Span(source, nbytes), _Span(mark_at, _MARK))
    copied = -1
    if _readv is None:
        ctypes.set_errno(errno.ENOSYS)
    else:
        copied = _readv(pid, here, len(here), there, len(there), 0)
    if copied != nbytes + _MARK:
        number = ctypes.get_errno() if copied < 0 else errno.EFAULT
        raise OSError(number, os.strerror(number))
    return bytes(mark)


class NodeSharing(Sharing):
    """The node's end of its pair with the script, which may read the node's tensors where they lie."""

    def __init__(self, say: Say) -> None:
        super().__init__(say)
        self._script = 0  #: the script's process, once one of its segments was opened
        self._lends = False  #: the script can read
        self._over = False  #: it is not to read any more
        self._mark = (ctypes.c_ubyte * _MARK)(*secrets.token_bytes(_MARK))
        self._page: Segment | None = None
        self._done = ctypes.c_uint64()  #: in the page, once there is one
        self._number = 0  #: that of the last tensor that was announced

    def note_opened(self, pid: int) -> None:
        self._script = pid

    def hear(self, word: bytes) -> None:
        if word == _ASK:
            self._show_mark()
        elif word == _READ and self._page is not None:
            self._lends = not self._over
            self._page.forget_descriptor()
        else:
            super().hear(word)

    def _show_mark(self) -> None:
        """Allows the script to read this process, and says where the mark and the page are."""
        if not self._script or self._over or self._page is not None:
            return
        try:
            self._page = Segment(1)
        except OSError:  # without memory for it payloads go by segments, as before
            return
        self._done = ctypes.c_uint64.from_buffer(self._page.memory, _DONE)
        _libc.prctl(_PR_SET_PTRACER, self._script, 0, 0, 0)  # refused without Yama, where it is not needed
        place = _PLACE.pack(ctypes.addressof(self._mark), bytes(self._mark), self._page.describe())
        self.say(_HERE + place)

    def stage(self, tensor: torch.Tensor) -> bytes | None:
        if self._lends and tensor.numel() * tensor.element_size() >= LEAST and is_plain(tensor):
            self._number += 1
            return pack_descriptor(0, 0, tensor.data_ptr(), self._number)
        return super().stage(tensor)

    def lent(self, descriptor: bytes) -> int:
        pid, _, _, number = unpacked(descriptor)
        return 0 if pid else number

    def read_up_to(self) -> int:
        return self._done.value

    def stop_lending(self) -> None:
        self._lends, self._over = False, True

    def fail(self, why: str) -> None:
        self.stop_lending()
        ctypes.memset(self._mark, 0, _MARK)
        super().fail(why)

    def close(self) -> None:
        super().close()
        if self._page is not None:
            self._page.retire()
            self._page, self._done = None, ctypes.c_uint64()


class ScriptSharing(Sharing):
    """The script's end of its pair with a node. ``process()`` returns the node's process, 0 for none to be read."""

    def __init__(self, process: Callable[[], int], say: Say) -> None:
        super().__init__(say)
        self._process = process
        self._asked_for_mark = False
        self._pid = 0  #: the process that has been read
        self._mark_at, self._mark = 0, b""
        self._page: Mapping | None = None  #: the node's, where it looks for what was read
        self._ended = ""  #: why the connection has ended

    def hear(self, word: bytes) -> None:
        if word.startswith(_HERE):
            self._find_mark(word.removeprefix(_HERE))
            return
        super().hear(word)
        if word.startswith(TRY):
            self._ask()

    def _ask(self) -> None:
        """Asks for the node's mark, once its launcher has told which process it is. The probe shows it this one."""
        if not self._asked_for_mark and self._process():
            self._asked_for_mark = True
            self._probe()
            self.say(_ASK)

    def _find_mark(self, place: bytes) -> None:
        """Looks whether the mark is where the node says that it is, in the process that the launcher has started."""
        if len(place) != _PLACE.size:
            raise ProtocolError(f"the place of a mark has {_PLACE.size} bytes, and this one {len(place)}")
        pid, (mark_at, mark, page) = self._process(), _PLACE.unpack(place)
        if not pid or self._pid:
            return
        try:
            if read_memory(pid, 0, 0, 0, mark_at) != mark:
                return
            self._page = Mapping.of(page, 1)
        except (OSError, ProtocolError, MemoryError):
            return
        self._pid, self._mark_at, self._mark = pid, mark_at, mark
        self.say(_READ)

    def open(self, descriptor: bytes, nbytes: int) -> Parcel:
        pid, fd, address, number = unpacked(descriptor)
        if pid:
            self._ask()
            return super().open(descriptor, nbytes)
        if fd or not self._pid:
            raise ProtocolError(f"{nbytes} bytes in the memory of a process that was not found readable")
        return _InPlace(self, address, number)

    def read(self, address: int, memory: memoryview) -> None:
        """Reads memory of the node's. Raises RefusedError, MissedError, EOFError where the node has ended."""
        target = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        for start in range(0, len(memory), PIECE):
            if self._ended or self._process() != self._pid:
                raise EOFError(self._ended or "its process has ended")
            nbytes = min(PIECE, len(memory) - start)
            try:
                mark = read_memory(self._pid, address + start, target + start, nbytes, self._mark_at)
            except ProcessLookupError:
                raise EOFError("its process has ended") from None
            except OSError as error:
                if error.errno == errno.EFAULT:
                    raise MissedError(f"the memory is not there, at the sender or here: {error}") from None
                raise RefusedError(f"its memory can't be read any more: {error}") from None
            if mark != self._mark:
                raise MissedError("the sender does not keep it any more")

    def note_read(self, number: int) -> None:
        """Notes in the node's page that it need not keep a tensor any more."""
        if self._page is not None:
            ctypes.c_uint64.from_buffer(self._page.map, _DONE).value = number

    def fail(self, why: str) -> None:
        self._ended = self._ended or why
        super().fail(why)

    def close(self) -> None:
        super().close()
        self._page = None


class _InPlace(Parcel):
    """A payload in the node's own memory."""

    awaited = True

    def __init__(self, end: ScriptSharing, address: int, number: int) -> None:
        self._end, self._address, self._number = end, address, number

    def discard(self) -> None:
        self._end.note_read(self._number)

    def fill(self, memory: memoryview) -> None:
        self._end.read(self._address, memory)
        self._end.note_read(self._number)
