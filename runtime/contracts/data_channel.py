"""``check_data_channel``: the contract of data channels, as a test that needs nothing but torch.

A channel of your own is tested in three lines:

    def make(n):    # n connected channels, of the ranks -1 (the master), 0, 1, ..., n - 2
        return [...]
    check_data_channel(make)

Each check makes its own channels, 2 to 8 of them, and closes them. It raises ConformanceError at the first thing that
is wrong.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

import torch

from ..channel.base import DataChannel
from ..channel.payload import DTYPES
from ..protocol.errors import BrokenError, BusyError
from .data_channel_ends import (
    check_callbacks,
    check_close_delivers,
    check_closed,
    check_forget,
    check_peer_closes,
    check_peer_closes_before_use,
    check_refusal,
)
from .data_channel_kit import LIMIT, ConformanceError, bits, move, need, raises, random, same
from .data_channel_peers import check_interlaced, check_many_at_once, check_peer_dies, check_ring, check_sums

__all__ = ["CHECKS", "CHECKS_OF_GROUPS", "ConformanceError", "Make", "check_data_channel"]

#: Makes that many connected channels, of the ranks -1, 0, 1, ...
Make = Callable[[int], Sequence[DataChannel]]

#: Long enough to see that something does not happen, seconds.
_MOMENT = 0.02


def check_data_channel(make: Make, peers: Sequence[int] = (2, 3, 4, 8)) -> None:
    """Runs all checks of a data channel, those of groups with each of these numbers of ``peers``, at least 2.

        def make(n):
            return [...]
        check_data_channel(make)

    ``make(n)`` returns n connected channels, of the ranks -1 (the master), 0, 1, ..., n - 2; the check closes them.
    Returns when all checks have passed; a transfer that does not end fails its check after 20 s.

    Raises ConformanceError, which names the check and what was wrong; the error of ``make``.
    """
    for check in CHECKS:
        _run(check, make, 3)
    for n in peers:
        for check in CHECKS_OF_GROUPS:
            _run(check, make, n)


def _run(check: Callable[[Sequence[DataChannel]], None], make: Make, n: int) -> None:
    channels = make(n)
    what = f"{check.__name__}, {n} peers"
    try:
        check(channels)
    except ConformanceError as error:
        raise ConformanceError(f"{what}: {error}") from error
    except Exception as error:
        raise ConformanceError(f"{what}: unexpected {type(error).__name__}: {error}") from error
    finally:
        for channel in channels:
            channel.close()


def check_every_dtype(channels: Sequence[DataChannel]) -> None:
    """Checks that bytes arrive unchanged, whatever they mean."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of complex32 that it is experimental
        for transfer, dtype in enumerate(DTYPES):
            source = random((5, 7), dtype)
            for k, target in enumerate((random((5, 7), dtype, seed=1), random((7, 5), dtype, seed=1).t())):
                move(channels, source, target, 2 * transfer + k)
                copied = target.view(torch.uint8) if dtype.itemsize == 1 else target  # torch cannot copy all of them
                need(bits(source) == bits(copied), f"{dtype} arrived changed")


def check_shapes(channels: Sequence[DataChannel]) -> None:
    """Checks tensors of zero size and of 0 dimensions, and another shape of as many elements."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        *(((), ()), ((0,), (0,)), ((3, 0, 2), (3, 0, 2)), ((1,), ()), ((2, 6), (3, 4)), ((2, 3, 4, 5), (120,)))
    ]
    for transfer, (sent, received) in enumerate(shapes):
        source, target = random(sent, torch.float32), torch.zeros(received)
        move(channels, source, target, transfer)
        need(bits(source) == bits(target), f"{sent} into {received} arrived changed")


def check_strides(channels: Sequence[DataChannel]) -> None:
    """Checks non-contiguous tensors at either side.

    The elements travel in row-major order, and nothing beside them is written.
    """
    serial = itertools.count()
    for n in (8, 400):  # small, and large enough to be handled otherwise
        plain = random((n, n), torch.int32)
        for source in (plain, plain.t(), plain[::2, 1::3], plain[0].expand(n, n)):
            rows, columns = source.shape
            for target in (
                torch.zeros((rows, columns), dtype=torch.int32),
                torch.zeros((columns, rows), dtype=torch.int32).t(),
                torch.zeros((rows, 2 * columns), dtype=torch.int32)[:, ::2],
            ):
                move(channels, source, target, next(serial))
                need(torch.equal(source, target), f"strides {source.stride()} to {target.stride()} arrived changed")
                if target._base is not None:
                    need(target._base.count_nonzero() == target.count_nonzero(), "bytes beside the tensor were written")
    lazy = random((4, 4), torch.complex64).nan_to_num()
    conjugate, negative = lazy.conj(), lazy.conj().imag
    for view in (conjugate, negative):
        target = torch.empty(view.shape, dtype=view.dtype)
        move(channels, view, target, next(serial))
        need(same(view, target), "a conjugated or negated view arrived as its base")
    target = random((4, 4), torch.float32)
    move(channels, torch._efficientzerotensor(4, 4), target, next(serial))
    need(not target.any(), "zeros without memory, as autograd makes them, arrived as something else")


def check_autograd_and_inference(channels: Sequence[DataChannel]) -> None:
    """Checks that neither the sender's nor the receiver's tensor has to be detached."""
    source, target = torch.arange(6.0, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
    move(channels, source, target, 0)
    need(torch.equal(source.detach(), target.detach().reshape(-1)), "values of leaves that require grad changed")
    with torch.inference_mode():
        frozen = torch.zeros(2, 3).t()
    move(channels, source, frozen, 1)
    need(torch.equal(source.detach().reshape(3, 2), frozen), "values of an inference tensor changed")


def check_big(channels: Sequence[DataChannel]) -> None:
    """Checks several MiB, received into tensors of ``empty``, more than once."""
    for transfer in range(3):
        source = random((3, 1 << 20), torch.float32, seed=transfer)
        target = channels[2].empty((3, 1 << 20), torch.float32)
        need(target.shape == source.shape and target.dtype == source.dtype, "empty() gave another shape or dtype")
        move(channels, source, target, transfer)
        need(torch.equal(source.view(torch.int32), target.view(torch.int32)), "a big tensor arrived changed")


def check_early_and_late(channels: Sequence[DataChannel]) -> None:
    """Checks receives that are announced long before, or after, their data is sent; and in another order."""
    sources = [random((300,), torch.float64, seed=i) for i in range(4)]
    targets = [torch.empty(300, dtype=torch.float64) for _ in sources]
    early = [channels[2].irecv(targets[i], 0, i) for i in (1, 0)]
    with raises(TimeoutError):
        early[0].wait(_MOMENT)
    need(not early[0].is_completed(), "a receive is completed before its data was sent")
    sends = [channels[1].isend(sources[i], 1, i) for i in range(4)]
    for one in early:
        one.wait(LIMIT)
    late = [channels[2].irecv(targets[i], 0, i) for i in (2, 3)]
    for one in late + sends:
        one.wait(LIMIT)
    need(all(map(torch.equal, sources, targets)), "data was delivered to another transfer's tensor")


def check_late_send_completes(channels: Sequence[DataChannel]) -> None:
    """Checks that waiting with a timeout changes nothing: the transfer ends well later."""
    source, target = torch.arange(9), torch.zeros(9, dtype=torch.int64)
    receive = channels[2].irecv(target, 0, 0)
    for timeout in (0, _MOMENT):
        with raises(TimeoutError):
            receive.wait(timeout)
    channels[1].isend(source, 1, 0).wait(LIMIT)
    receive.wait(LIMIT)
    receive.wait(0)  # any number of times
    need(receive.is_completed() and torch.equal(source, target), "a wait that timed out disturbed the transfer")


def check_mismatch(channels: Sequence[DataChannel]) -> None:
    """Checks another dtype or number of elements: the receive fails and names both; the pair goes on."""
    for transfer, n in enumerate((3, 500_000)):
        for k, target in enumerate((torch.zeros(n, dtype=torch.int32), torch.zeros(n + 1))):
            before = target.clone()
            receive = channels[2].irecv(target, 0, 10 * transfer + k)
            send = channels[1].isend(torch.ones(n), 1, 10 * transfer + k)
            dtype = str(target.dtype).removeprefix("torch.")
            with raises(BrokenError, "float32", str(n), dtype, str(target.numel())):
                receive.wait(LIMIT)
            try:
                send.wait(LIMIT)  # it may have ended before the receiver could object
            except BrokenError as error:
                need(dtype in str(error) and str(n) in str(error), f"the sender's error names not both: {error}")
            need(torch.equal(before, target), "a refused transfer wrote into the tensor")
    source, target = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    move(channels, source, target, 99)
    need(torch.equal(source, target), "after a mismatch the next transfer arrived changed")


def check_arguments(channels: Sequence[DataChannel]) -> None:
    """Checks the errors for unknown peers, ids in use, tensors that cannot travel."""
    tensor = torch.zeros(2)
    for start in (channels[0].isend, channels[0].irecv):
        with raises(ValueError, "77"):
            start(tensor, 77, 0)
        with raises(TypeError):
            start(torch.zeros(2).to_sparse(), 0, 0)
    first = channels[2].irecv(tensor, 0, 5)
    with raises(BusyError, "5"):
        channels[2].irecv(torch.zeros(2), 0, 5)
    channels[2].irecv(torch.zeros(2), -1, 5)  # the same id from another peer is another transfer
    channels[1].isend(torch.ones(2), 1, 5).wait(LIMIT)
    first.wait(LIMIT)
    need(torch.equal(tensor, torch.ones(2)), "a refused id disturbed the transfer that had it")


def check_take_back(channels: Sequence[DataChannel]) -> None:
    """Checks that a receive gives its tensor back while nothing has arrived, where the channel says that it does."""
    if not channels[2].capabilities.takes_back:
        return
    for transfer, numel in enumerate((3, 1 << 18)):
        target = torch.zeros(numel)
        receive = channels[2].irecv(target, 0, transfer)
        need(channels[2].take_back(0, transfer), "a receive of which nothing has arrived keeps its tensor")
        channels[1].isend(torch.ones(numel), 1, transfer).wait(LIMIT)
        receive.wait(LIMIT)
        need(not target.any(), "a tensor that was given back is written")
        need(not channels[2].take_back(0, transfer), "a receive that has ended gives its tensor back")


CHECKS: tuple[Callable[[Sequence[DataChannel]], None], ...] = (
    check_refusal,
    check_every_dtype,
    check_shapes,
    check_strides,
    check_autograd_and_inference,
    check_big,
    check_early_and_late,
    check_late_send_completes,
    check_mismatch,
    check_arguments,
    check_take_back,
    check_callbacks,
    check_forget,
    check_peer_closes,
    check_peer_closes_before_use,
    check_close_delivers,
    check_closed,
)

#: The checks with any number of peers.
CHECKS_OF_GROUPS = (check_many_at_once, check_sums, check_ring, check_interlaced, check_peer_dies)
