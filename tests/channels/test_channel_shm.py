"""The shm channel: what differs from tcp."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import socket
from contextlib import closing

import channel_kit
import leaks
import pytest
import torch

from disttensor.runtime.channel.base import DataChannel, Protection
from disttensor.runtime.channel.shm import segments as shm
from disttensor.runtime.channel.shm.channel import ShmChannel
from disttensor.runtime.channel.shm.segments import _DESCRIPTOR, FREE, HEAD, Mappings, Segment, Segments
from disttensor.runtime.channel.shm.sharing import AHEAD
from disttensor.runtime.channel.tcp.frames import EAGER
from disttensor.runtime.contracts.data_channel import check_data_channel
from disttensor.runtime.contracts.data_channel_kit import LIMIT
from disttensor.runtime.protocol.errors import BrokenError, ProtocolError

LARGE = EAGER  #: elements of float32: four times what goes over the connection


def connected(n: int, protection: Protection = Protection()) -> list[ShmChannel]:  # noqa: B008 - frozen
    return channel_kit.connected(ShmChannel, range(-1, n - 1), protection=protection)


_transfers = itertools.count(10**6)


def move(channels: list[ShmChannel], tensor: torch.Tensor) -> torch.Tensor:
    """From the master to node 0, into memory of the channel's choice."""
    transfer = next(_transfers)
    arrival = channels[1].iarrive(tuple(tensor.shape), tensor.dtype, -1, transfer)
    channels[0].isend(tensor, 0, transfer).wait(LIMIT)
    arrival.wait(LIMIT)
    return arrival.tensor


def probed(channels: list[ShmChannel]) -> list[ShmChannel]:
    """Every pair has found that it shares memory."""
    for (a, sender), (b, receiver) in itertools.permutations(enumerate(channels, -1), 2):
        carrier = sender._peers[b].carrier
        while not carrier.works:  # the answer to the first large tensor's probe comes before that of the second
            transfer = next(_transfers)
            receive = receiver.irecv(torch.zeros(LARGE), a, transfer)
            sender.isend(torch.ones(LARGE), b, transfer)
            receive.wait(LIMIT)
    return channels


@pytest.fixture(autouse=True)
def nothing_left():
    before = leaks.Held.now(memory=False, descriptors=True)
    yield
    leaks.check(before, "the test")


@pytest.fixture
def pair():
    channels = probed(connected(2))
    yield channels
    for channel in channels:
        channel.close()


@pytest.mark.parametrize(
    ("protection", "peers"),
    [(Protection(), (2, 3)), (Protection(encrypt=True, checksum=True), (2,))],
    ids=["plain", "protected"],
)
def test_conformance(protection, peers):
    """With pairs that share memory already."""
    check_data_channel(lambda n: probed(connected(n, protection)), peers)


def test_what_is_altered_in_shared_memory_is_an_error(monkeypatch):
    """With a checksum: in memory of the receiver's, where nothing has been written, and where the data lies."""
    pair = probed(connected(2, Protection(checksum=True, encrypt=True)))
    announce = Segment.announce

    def altered(segment):
        announce(segment)
        segment.memory[HEAD + 3] ^= 1

    monkeypatch.setattr(Segment, "announce", altered)
    source, target = torch.full((LARGE,), 7.0), torch.zeros(LARGE)
    with closing(pair[0]), closing(pair[1]):
        receive, arrival = pair[1].irecv(target, -1, 1), pair[1].iarrive((LARGE,), torch.float32, -1, 2)
        for transfer in (1, 2):
            pair[0].isend(source, 0, transfer).wait(LIMIT)
        for transfer, one in ((1, receive), (2, arrival)):
            with pytest.raises(BrokenError, match=f"transfer {transfer} from rank -1 to rank 0 .*its checksum is not"):
                one.wait(LIMIT)
        with pytest.raises(BrokenError, match="its checksum is not"):
            _ = arrival.tensor
        assert target.count_nonzero() == 0
        assert (source == 7).all()
        monkeypatch.undo()
        assert (move(pair, source) == 7).all()
        assert all(segment.state == FREE for segment in segments(pair[0], 0))


def test_with_a_checksum_no_collective_goes_by_pages_that_have_none():
    for checksum in (False, True):
        (channel,) = channel_kit.connected(ShmChannel, [0], protection=Protection(checksum=checksum))
        with closing(channel):
            assert channel.capabilities.shared_memory is not checksum
            assert ShmChannel.capabilities.shared_memory


def segments(channel: ShmChannel, peer: int) -> list:
    return [s for same in channel._peers[peer].carrier._segments._by_size.values() for s in same]


@pytest.mark.row("T24")
def test_a_large_tensor_is_used_where_it_arrived_and_its_memory_used_again(pair):
    first = move(pair, torch.arange(LARGE))
    used = len(segments(pair[0], 0))
    second = move(pair, torch.arange(LARGE) + 1)
    assert len(segments(pair[0], 0)) == used + 1, "a segment in use was written again"
    assert torch.equal(first, torch.arange(LARGE))
    assert torch.equal(second, torch.arange(LARGE) + 1)
    view = first[10:20]
    del first
    for n in range(5):  # the view keeps its memory
        assert torch.equal(move(pair, torch.full((LARGE,), n)), torch.full((LARGE,), n))
    assert view.tolist() == list(range(10, 20))
    del view, second
    for n in range(5):
        assert move(pair, torch.full((LARGE,), n))[0] == n
    assert len(segments(pair[0], 0)) <= used + 2


def test_the_receiver_may_write_and_the_sender_too(pair):
    source = torch.zeros(LARGE)
    there = move(pair, source)
    there.add_(1)
    source.add_(2)
    assert there.sum() == LARGE
    assert source.sum() == 2 * LARGE


def test_tensors_outlive_their_channels():
    channels = probed(connected(2))
    there = move(channels, torch.arange(LARGE))
    for channel in channels:
        channel.close()
    del channels, channel
    gc.collect()
    assert torch.equal(there, torch.arange(LARGE))


def test_without_common_memory_everything_takes_the_connection(monkeypatch):
    def blind(self, descriptor, nbytes):
        raise FileNotFoundError("another container")

    monkeypatch.setattr(Mappings, "open", blind)
    channels = connected(2)
    for n in range(3):
        assert torch.equal(move(channels, torch.full((LARGE,), n)), torch.full((LARGE,), n))
    assert not channels[0]._peers[0].carrier.works
    for channel in channels:
        channel.close()


@pytest.mark.fault(9)
def test_a_receiver_without_room_to_map_a_payload_loses_that_one_only(pair, monkeypatch):
    real = shm._mapped

    def full(fd, nbytes, inherited):
        if inherited:  # by the receiver
            raise OSError(errno.ENOMEM, "mmap")
        return real(fd, nbytes, inherited)

    kept = move(pair, torch.arange(LARGE))  # its segment is in use, so that the next payload takes another one
    with monkeypatch.context() as patch:
        patch.setattr(shm, "_mapped", full)
        with pytest.raises(BrokenError, match=r"rank 0 has no memory for it: \d+ bytes of .* cannot be mapped"):
            move(pair, torch.arange(LARGE))
    made = len(segments(pair[0], 0))
    assert torch.equal(move(pair, torch.arange(LARGE) + 1), torch.arange(LARGE) + 1)
    assert len(segments(pair[0], 0)) == made  # by the segment that was dropped
    assert torch.equal(kept, torch.arange(LARGE))


@pytest.mark.fault(44)
def test_without_memory_for_segments_everything_takes_the_connection(pair, monkeypatch):
    def full(self, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Segments, "take_segment", full)
    assert torch.equal(move(pair, torch.arange(LARGE)), torch.arange(LARGE))


def test_the_sender_keeps_no_descriptors(pair):
    before = len(os.listdir("/proc/self/fd"))
    kept = [move(pair, torch.full((LARGE,), n)) for n in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert [int(t[0]) for t in kept] == list(range(20))


def test_a_child_frees_nothing(pair):
    there = move(pair, torch.zeros(LARGE))
    pid = os.fork()
    if pid == 0:
        del there
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    for n in range(1, 4):
        move(pair, torch.full((LARGE,), float(n)))
    assert there.sum() == 0


def test_what_a_child_writes_is_not_the_scripts():
    """As with memory of its own: a DataLoader's workers may write into tensors that the master has fetched."""
    channels = probed(connected(2))
    transfer = next(_transfers)
    arrival = channels[0].iarrive((LARGE,), torch.float32, 0, transfer)
    channels[1].isend(torch.zeros(LARGE), -1, transfer).wait(LIMIT)
    here = arrival.tensor
    pid = os.fork()
    if pid == 0:
        here.numpy().fill(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert here.sum() == 0
    for channel in channels:
        channel.close()


@pytest.mark.row("T24")
def test_idle_memory_is_bounded(pair, monkeypatch):
    monkeypatch.setattr("disttensor.runtime.channel.shm.segments.MOST_IDLE", 1 << 20)
    for n in range(1, 12):
        move(pair, torch.zeros(n * LARGE))
    held = sum(s.nbytes for s in segments(pair[0], 0))
    assert held <= (1 << 20) + 2 * 12 * LARGE * 4
    assert len(pair[1]._peers[-1].carrier._mappings._known) <= len(segments(pair[0], 0)) + 2


def test_what_is_no_segment_is_refused(tmp_path):
    victim = tmp_path / "file"
    victim.write_bytes(bytes(1 << 16))
    mappings = Mappings()
    with open(victim, "r+b") as file, pytest.raises(ProtocolError, match="no shared memory"):
        mappings.open(segments_descriptor(file.fileno(), (1 << 16) - 4096), 1)
    fd = os.memfd_create("disttensor")
    os.ftruncate(fd, 1 << 16)
    with pytest.raises(ProtocolError, match="not sealed"):
        mappings.open(segments_descriptor(fd, (1 << 16) - 4096), 1)
    with pytest.raises(ProtocolError, match="a payload of"):
        mappings.open(segments_descriptor(fd, 1), 2)
    os.close(fd)
    assert victim.read_bytes() == bytes(1 << 16)


def test_the_segment_of_somebody_else_is_refused_and_not_touched():
    """Pids and descriptors come again in other containers: what they name there is another process's."""
    ours, theirs = Segments(), Segments()
    segment, other = ours.take_segment(1000), theirs.take_segment(1000)
    pid, _, id, size = _DESCRIPTOR.unpack(segment.describe())
    for segments in (Mappings(), Mappings()):
        with pytest.raises(ProtocolError, match="another one"):
            segments.open(_DESCRIPTOR.pack(pid, other.fd, id, size), 1000)
    theirs.take_segment(500)
    assert other.fd >= 0, "its owner thinks that its receiver has mapped it"
    assert Mappings().open(other.describe(), 1000).nbytes == size
    for segments in (ours, theirs):
        segments.close()


def segments_descriptor(fd: int, nbytes: int) -> bytes:
    import struct

    return struct.pack("<IIQQ", os.getpid(), fd, 1, nbytes)


def test_a_peer_that_dies_breaks_the_transfer(pair):
    receive = pair[1].iarrive((LARGE,), torch.float32, -1, 1)
    pair[0].abort()
    with pytest.raises(BrokenError):
        receive.wait(LIMIT)


def test_it_is_a_data_channel():
    assert issubclass(ShmChannel, DataChannel)
    assert ShmChannel.capabilities.same_host


def test_what_was_filled_in_shared_memory_is_not_copied_again(pair, monkeypatch):
    monkeypatch.setattr(Segment, "fill", lambda self, tensor: pytest.fail("a second copy"))
    for k in range(3):
        staged = pair[0].staging((2, LARGE), torch.int32, 0)
        staged.copy_(torch.arange(2 * LARGE, dtype=torch.int32).view(2, LARGE) + k)
        arrived = move(pair, staged)
        assert torch.equal(arrived, staged)
        del staged
        assert arrived[1, -1] == 2 * LARGE - 1 + k
        del arrived
    assert len([s for s in segments(pair[0], 0) if s.nbytes >= 8 * LARGE]) == 1


def test_staging_that_a_forked_child_drops_stays_its_parents(pair):
    """The child has none of the memory, which another process may have been given meanwhile."""
    staged = pair[0].staging((LARGE,), torch.int32, 0)
    staged.fill_(3)
    if (child := os.fork()) == 0:
        del staged
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(move(pair, staged), torch.full((LARGE,), 3, dtype=torch.int32))


def test_staging_that_is_not_sent_is_used_again(pair):
    address = pair[0].staging((LARGE,), torch.float64, 0).data_ptr()
    again = pair[0].staging((LARGE,), torch.float64, 0)
    assert again.data_ptr() == address
    assert pair[0].staging((LARGE,), torch.float64, 0).data_ptr() != address


def test_a_staging_tensor_may_be_sent_to_another_peer():
    channels = probed(connected(3))
    staged = channels[0].staging((LARGE,), torch.float32, 0).fill_(3)
    arrival = channels[2].iarrive((LARGE,), torch.float32, -1, 0)
    channels[0].isend(staged, 1, 0).wait(LIMIT)
    assert arrival.tensor.eq(3).all()
    for channel in channels:
        channel.close()
    assert arrival.tensor.eq(3).all()


def test_who_sends_to_a_peer_that_does_not_receive_is_held_back(pair):
    """As by a socket without room: a script that runs ahead of a busy node would fill the memory."""
    n = AHEAD // 8  # of float32: half of what may lie about
    sends = [pair[0].isend(torch.full((n,), float(i)), 0, i) for i in range(6)]
    for send in sends[:2]:
        send.wait(LIMIT)
    with pytest.raises(TimeoutError):
        sends[2].wait(0.05)
    assert not any(send.is_completed() for send in sends[2:])
    for i, send in enumerate(sends):
        target = torch.zeros(n)
        pair[1].irecv(target, -1, i).wait(LIMIT)
        assert target.eq(i).all()
        send.wait(LIMIT)


def test_who_is_held_back_comes_out_when_the_peer_is_lost(pair):
    sends = [pair[0].isend(torch.zeros(AHEAD // 4), 0, i) for i in range(3)]
    sends[0].wait(LIMIT)
    pair[0].mark_lost(0, "as we say")
    for send in sends[1:]:
        with pytest.raises(BrokenError, match="as we say"):
            send.wait(LIMIT)


@pytest.mark.parametrize("lives", [True, False], ids=["both live", "it dies"])
def test_who_is_held_back_comes_out_when_the_connection_breaks(pair, lives):
    """Whoever is held back makes the next connection, and hears whether the peer is there."""
    n = AHEAD // 8
    sends = [pair[0].isend(torch.full((n,), float(i)), 0, i) for i in range(6)]
    answer = torch.zeros(1)
    receive = pair[0].irecv(answer, 0, 99)
    for send in sends[:2]:
        send.wait(LIMIT)
    with pytest.raises(TimeoutError):
        sends[2].wait(0.05)
    if not lives:
        pair[1]._listener.stop()
        pair[1]._listener.thread.join()
        pair[1]._peers[-1]._sender.part_with_lock = lambda: None  # nobody says that it goes
        pair[1].abort()
        for one in (receive, *sends[2:]):
            with pytest.raises(BrokenError, match="closed its end or died"):
                one.wait(LIMIT)
        return
    pair[1]._peers[-1]._sock.shutdown(socket.SHUT_RDWR)
    for i, send in enumerate(sends):
        target = torch.zeros(n)
        pair[1].irecv(target, -1, i).wait(LIMIT)
        assert target.eq(i).all()
        send.wait(LIMIT)
    pair[1].isend(torch.ones(1), -1, 99).wait(LIMIT)
    receive.wait(LIMIT)
    assert answer.item() == 1
