"""``init_master_worker(verify=0.01)``: computes that share of operations by local torch as well, and compares values.

All that an operation can come by is surrounded while such a session runs, and at no other time: ``dispatch`` looks
operators up in another table (``op_table.surround``), and composites, copies and collectives ask whether there is a
check. That fetches an operation's operands before it runs (with the node's own strides, and with memory shared as
there), has local torch do the same, and compares results, and all memory that the operands lie in. A difference raises
VerifyError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import local
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from ..collectives.issue import CollectiveCall
from ..dispatch.call_site import here
from ..dispatch.copies import move
from ..dispatch.dispatch import handle, run
from ..dispatch.op_plan import OpEntry
from ..dispatch.op_table import surround
from ..proxy.meta import contiguous
from ..proxy.proxy import DistributedTensor, operand_name
from ..runtime.channel.base import Arrival
from ..runtime.channel.ticket import Ticket
from ..runtime.master.failures import Site, line_of
from ..runtime.master.route import route
from ..runtime.node.rng_lock import get_rng_state
from ..runtime.process.spelling import shown
from ..runtime.protocol import commands as c
from ..runtime.protocol.collective_kinds import KINDS
from ..runtime.protocol.errors import VerifyError
from ..session.places import MeshPlace, NodePlace, Place
from ..session.session import Session
from ..session.transfers import Transfers
from ..torch_backend.composites import overrides
from .agreement import geometry_differs, leaves, memory_differs, values_differ
from .images import Images, Name, local_sum, sum_of, under
from .references import SPARSE, collected, compute, draws, place_of, plain_torch, private_from, skipped, without_values

#: Errors that reading tensors never raises by itself.
_DEFECTS = (TypeError, AttributeError, NameError, LookupError, AssertionError)
T = TypeVar("T")
_NOTHING: Any = object()


@dataclass(frozen=True)
class Counts:
    """The numbers of operations that a session has compared, and has not."""

    operations: int  #: operations that could have been chosen
    compared: dict[str, int]  #: operations that were compared, by operator
    partly: dict[str, int]  #: those among them with dtypes and shapes compared only, by reason
    skipped: dict[str, int]  #: operations that were chosen, but not compared, by reason


#: Why an operation on a mesh is not compared.
_MESH = "each rank of a mesh has values of its own"


def _is_on_mesh(tensor: Any) -> bool:
    # local torch computes one result, and a mesh has one for each rank
    return isinstance(tensor, DistributedTensor) and isinstance(tensor._place, MeshPlace)


class SelfCheck:
    """The comparison of one session's operations with local torch."""

    def __init__(self, session: Session, share: float) -> None:
        self.session = session
        self.transfers = session.transfers
        self._limit = int(share * (1 << 64))
        self._numbers = count()
        self._issued = 0
        self._compared: Counter[str] = Counter()
        self._partly: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._inside = local()  #: whether this thread's operations are the check's own

    def counts(self) -> Counts:
        return Counts(self._issued, dict(self._compared), dict(self._partly), dict(self._skipped))

    # ---- where it stands ---------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Surrounds all that an operation can come by."""
        surround(self.entry, self.run)
        self.session.check = self
        self.session.transfers = CheckedTransfers(self, self.transfers)
        overrides.surround(self.composite)

    def remove(self) -> None:
        """Has operations be issued as without a check."""
        surround(None)
        self.session.check = None
        self.session.transfers = self.transfers
        overrides.surround(None)

    # ---- the ways ----------------------------------------------------------------------------------------------------

    def entry(self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Surrounds an operation on proxies."""
        return self.operation(entry.op, args, kwargs, partial(handle, entry, args, kwargs))

    def run(self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place | None) -> Any:
        """Surrounds a factory."""
        return self.operation(entry.op, args, kwargs, partial(run, entry, args, kwargs, place), place)

    def composite(self, op: OpOverload, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps the override of a composite of torch's. Its parts are operations as well."""
        return self.operation(op, args, kwargs, partial(function, *args, **kwargs), composite=True)

    def operation(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], T],
        place: Place | None = None,
        composite: bool = False,
    ) -> T:
        """Returns the result of ``call``, after a comparison with local ``op`` if the operation is chosen.

        Raises the errors of ``call``, VerifyError.
        """
        if not self._chosen():
            return call()
        place = place_of(args, kwargs, place)
        why = skipped(op, args, kwargs, composite) or ("" if place else "no operand is on a node")
        # local torch computes one result, and a mesh has one for each rank
        why = why or (_MESH if isinstance(place, MeshPlace) else "")
        if why or place is None:
            self._skipped[why] += 1
            return call()
        before = Images(args[0] if op is torch.ops.aten.copy_.default else None)
        seeded = draws(op) and place.kernels == "cpu"
        given = self._quiet(lambda: tree_map_only(torch.Tensor, before.of, (args, kwargs)))
        state = self._quiet(lambda: self._generator(place)) if seeded else None
        if given is _NOTHING or state is _NOTHING:
            return call()
        result = call()
        if any(isinstance(x, DistributedTensor) and x.layout is not torch.strided for x in tree_leaves(result)):
            self._skipped[SPARSE] += 1
            return result
        told = self._quiet(lambda: self._compare(op, before, given, result, place, state))
        if told is not _NOTHING:
            self._compared[op.name()] += 1
            self._raise_difference(told, op.name(), place, [x for x in leaves((args, tuple(kwargs.values())))])
        return result

    def move(self, tensor: DistributedTensor, place: Place) -> DistributedTensor:
        """Is called in the place of ``copies.move`` where users' functions are given tensors."""
        return self._copied("a copy between nodes", partial(move, tensor, place), tensor, place)

    def upload(
        self,
        original: Callable[..., None],
        tensor: torch.Tensor,
        place: Place,
        ref: int,
        site: Site | None,
        non_blocking: bool = False,
    ) -> None:
        """Wraps ``Transfers.upload``."""

        # all of a mesh's nodes get the same, by one command: one of them is looked at
        at = place.members[0] if isinstance(place, MeshPlace) else place

        def call() -> DistributedTensor:
            original(tensor, place, ref, site, non_blocking)
            return under(ref, tuple(tensor.shape), contiguous(tuple(tensor.shape)), tensor.dtype, at)  # type: ignore[no-any-return]

        self._copied("a copy to a node", call, tensor, at)

    def _copied(
        self, what: str, call: Callable[[], DistributedTensor], source: torch.Tensor, place: Place
    ) -> DistributedTensor:
        if not self._chosen():
            return call()
        # local torch computes one result, and a mesh has one for each rank
        if why := _unrun() or (_MESH if isinstance(place, MeshPlace) or _is_on_mesh(source) else ""):
            self._skipped[why] += 1
            return call()
        expected = self._quiet(lambda: Images().of(source).clone())
        result = call()
        if expected is not _NOTHING:
            actual = self._quiet(lambda: Images().of(result))
            if actual is not _NOTHING:
                self._compared[what] += 1
                told = geometry_differs(actual, expected, strides=False) or values_differ(actual, expected, "cpu")
                self._raise_difference(told and f"what has come: {told}", what, place, [("", source)])
        return result

    def download(
        self, original: Callable[..., torch.Tensor], tensor: Any, place: Place, ref: int, site: Site | None
    ) -> torch.Tensor:
        """Wraps ``Transfers.download``."""
        expected = self._sum(tensor)
        result = original(tensor, place, ref, site)
        self._arrived(expected, result, tensor)
        return result

    def fetch(
        self,
        original: Callable[..., Any],
        tensor: Any,
        place: Place,
        ref: int,
        strides: tuple[int, ...] | None,
        site: Site | None,
        ended: Ticket | None,
    ) -> Any:
        """Wraps ``Transfers.fetch``: a fetch that is chosen has arrived when it returns."""
        expected = self._sum(tensor)
        arrival = original(tensor, place, ref, strides, site, ended)
        if expected is not _NOTHING:
            result = self._quiet(lambda: arrival.tensor)
            if result is not _NOTHING:
                self._arrived(expected, result, tensor)
        return arrival

    def _sum(self, tensor: Any) -> Any:
        if not self._chosen():
            return _NOTHING
        why = _unrun() or ("a lazy conjugate or negative" if any(tensor._h.meta.bits) else "")
        if why:
            self._skipped[why] += 1
            return _NOTHING
        return self._quiet(lambda: sum_of(tensor) if tensor.numel() else 0)

    def _arrived(self, expected: Any, result: torch.Tensor, source: DistributedTensor) -> None:
        if expected is _NOTHING:
            return
        what = "a copy to the master"
        self._compared[what] += 1
        same = not result.numel() or local_sum(result) == expected
        told = "" if same else "what has come: its bytes are not those that the node has, by the checksums of both"
        self._raise_difference(told, what, source._place, [("", source)])

    def collective(self, collective: CollectiveCall, session: Session, async_op: bool) -> Any:
        """Is called in the place of ``CollectiveCall.issue``: an asynchronous collective that is chosen is done when it
        returns."""
        call = partial(collective.issue, session, async_op, checked=True)
        if not self._chosen():
            return call()
        kind = KINDS[collective.kind]
        why = _unrun() or ("" if kind.values else f"a {kind.users_name} has no values")
        if why:
            self._skipped[why] += 1
            return call()
        rows = self._quiet(lambda: [[Images().of(x) for x in part.inputs] for part in collective.parts])
        work = call()
        if rows is _NOTHING:
            return work
        outs = self._quiet(lambda: _outs(collective, work))
        if outs is _NOTHING:
            return work
        self._compared[collective.kind] += 1
        with plain_torch():
            expected = collected(collective, rows)
            terms = [x.double().abs().max() for row in rows for x in row if x.numel() and not x.is_complex()]
        size = float(torch.stack(terms).nan_to_num().sum()) if terms and kind.reduces else 0.0
        for node, part, got, wanted in zip(collective.group.nodes, collective.parts, outs, expected, strict=True):
            place = session.places.at(node)
            for i, (actual, right) in enumerate(zip(got, wanted, strict=True)):
                told = values_differ(actual, right.reshape(actual.shape), place.kernels, size, collective.transport)
                self._raise_difference(
                    told and f"tensor {i} of node {node}: {told}", collective.kind, place, [("", part.outs[i])]
                )
        return work

    # ---- comparing ---------------------------------------------------------------------------------------------------

    def _chosen(self) -> bool:
        if getattr(self._inside, "on", False):
            return False
        self._issued += 1
        return _mixed(next(self._numbers)) < self._limit

    @contextmanager
    def _own(self) -> Iterator[None]:
        self._inside.on = True
        try:
            yield
        finally:
            self._inside.on = False

    def _quiet(self, read: Callable[[], T]) -> T:
        """Returns the result of ``read``; _NOTHING if it raises, so that errors are raised where they would be without
        a check."""
        failures = self.session.link.failures
        seen = {key for key, failure in list(failures.items()) if failure.observed}
        with self._own(), plain_torch():
            try:
                return read()
            except Exception as e:
                if not failures and isinstance(e, _DEFECTS):
                    raise  # an error of the check itself: nothing on a node has failed
                why = f"something that has failed ({type(e).__name__})"
                for key, failure in list(failures.items()):
                    ours = failure.told.op == "Storage" and key not in seen
                    failure.observed = key in seen or ours
                    why = "a zero of autograd's own, which has no memory" if ours else why
                self._skipped[why] += 1
                return _NOTHING  # type: ignore[no-any-return]

    def _generator(self, place: Place) -> torch.Tensor:
        if self.session.shares_process:
            self.session.questions.sync_all()  # nodes share this process's generator: none may draw from it meanwhile
        self.session.places.draw(place)
        reply = self.session.ask(place, c.RngState, lambda id: c.Random(id, place.name, b""), here())
        return torch.frombuffer(bytearray(reply.state), dtype=torch.uint8)

    def _compare(
        self, op: OpOverload, before: Images, given: Any, result: Any, place: Place, state: torch.Tensor | None
    ) -> str:
        """Returns how the node's result and the memory that it has written differ from local torch's; "" if they
        don't."""
        unset = without_values(op, place.kernels)
        after = Images()
        parts = list(leaves(result))
        for _, x in parts if not unset else ():  # first, as a failed result needs no comparison
            if isinstance(x, torch.Tensor):
                after.of(x)
        drawn = None if state is None else self._generator(place)
        saved = get_rng_state()
        try:
            if state is not None:
                torch.default_generator.set_state(state)
            expected = compute(op, *given)
            state = get_rng_state()
        except NotImplementedError:
            self._partly["local torch has no kernel for it"] += 1
            return ""
        except Exception as e:
            return f"the node has computed it, and local torch raises {type(e).__name__}: {str(e).splitlines()[0]}"
        finally:
            torch.default_generator.set_state(saved)
        if unset:
            self._partly[unset] += 1
        wanted = list(leaves(expected))
        if [name for name, _ in parts] != [name for name, _ in wanted]:
            return f"it has {len(parts)} results, and with local torch {len(wanted)}"
        names = {} if unset else {name: after.name_of(memory.tensor) for name, memory in before.memories.items()}
        for i, ((name, x), (_, y)) in enumerate(zip(parts, wanted, strict=True)):
            told = ""
            if (private_from(op) or len(parts)) <= i:
                continue
            if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
                told = _plain_differ(x, y)
            elif unset:
                told = geometry_differs(x, y, place.kernels == "cpu")
            else:
                told = _tensors_differ(x, y, before, after, names, place)
            if told:
                return f"{name}: {told}"
        for i, (key, memory) in enumerate(before.memories.items()):
            if names and (told := _memory_told(memory, after, names[key], place)):
                return f"the memory of operand {i}, {operand_name(memory.tensor)}, after it: {told}"
        if drawn is not None and not torch.equal(drawn, state):
            return "the generator's state after it is not that of local torch: it has drawn more, or fewer, numbers"
        return ""

    def _raise_difference(self, told: str, name: str, place: Place, operands: list[tuple[str, Any]]) -> None:
        """Raises VerifyError with the text of a difference, if there is one."""
        if not told:
            return
        line = line_of(here())
        hello = place.hello
        tensors = [operand_name(x) for _, x in operands if isinstance(x, torch.Tensor)]
        raise VerifyError(
            f"{name}: a node's result is not that of local torch: {told}\n"
            f"  computed: on node {place.one.node} {place.name} (host {hello.host}, pid {hello.pid})\n"
            f"  issued: {line}\n"
            f"  operands: {'; '.join(tensors[:8]) or 'none'}{' ...' if len(tensors) > 8 else ''}\n"
            "  to do: run this line by itself with verify=1.0. If it differs on another machine too, it is a defect of "
            "disttensor or of a kernel: report it with this text. If not, suspect this one's memory and processor",
            operator=name,
            node=place.one.node,
            line=line,
        )


class CheckedTransfers(Transfers):
    """The copies of a session while it compares: it has them in the place of its own."""

    def __init__(self, check: SelfCheck, own: Transfers) -> None:
        vars(self).update(vars(own))  # their numbers, their lock, and what is under way
        self._check = check

    def upload(
        self, tensor: torch.Tensor, place: Place, ref: int, site: Site | None, non_blocking: bool = False
    ) -> None:
        self._check.upload(super().upload, tensor, place, ref, site, non_blocking)

    def download(self, tensor: torch.Tensor, place: Place, ref: int, site: Site | None) -> torch.Tensor:
        return self._check.download(super().download, tensor, place, ref, site)

    def fetch(
        self,
        tensor: torch.Tensor,
        place: NodePlace,
        ref: int,
        strides: tuple[int, ...] | None,
        site: Site | None,
        ended: Ticket | None = None,
    ) -> Arrival:
        return self._check.fetch(super().fetch, tensor, place, ref, strides, site, ended)  # type: ignore[no-any-return]


def _mixed(number: int) -> int:
    """Returns 64 bits that look random (SplitMix64), so that no generator is advanced, and all runs choose alike."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & _BITS
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _BITS
    return z ^ z >> 31


_BITS = (1 << 64) - 1


def _unrun() -> str:
    return "nothing runs while a graph is recorded" if route.get().recorder is not None else ""


def _outs(collective: CollectiveCall, work: Any) -> list[list[torch.Tensor]]:
    if work is not None:
        work.wait()
    return [[Images().of(x) for x in part.outs] for part in collective.parts]


def _plain_differ(x: Any, y: Any) -> str:
    """Returns how two results that are no tensors differ, "" if they don't."""
    if type(x) is type(y) and (x == y or (x != x and y != y)):
        return ""
    if type(x) is float and type(y) is float:
        return values_differ(torch.tensor([x]), torch.tensor([y]), "cpu")
    return f"the node has {x!r}, and local torch {y!r}"


def _tensors_differ(
    x: torch.Tensor, y: torch.Tensor, before: Images, after: Images, names: dict[Name, Name], place: Place
) -> str:
    image = after.of(x)
    alike = place.kernels == "cpu"  # a GPU's kernels may lay results out in another way
    if told := geometry_differs(image, y, alike):
        return told
    if told := geometry_differs(x, y if alike else image):
        return f"to the script {told}"
    if told := values_differ(image, y, place.kernels):
        return told
    owner = before.owner(y)
    if (
        x.numel()
        and (names.get(owner) if owner else None) != (found := after.name_of(x))
        and (owner or found in names.values())
    ):
        return "it shares memory with an operand" if owner is None else "it shares no memory with the operand it is of"
    return ""


def _memory_told(memory: Any, after: Images, name: Name, place: Place) -> str:
    return memory_differs(after.memories[name].storage, memory.storage, memory.dtype, place.kernels)


# ---- the session's ---------------------------------------------------------------------------------------------------

_now: SelfCheck | None = None
_newest = Counts(0, {}, {}, {})


def begin_comparing(session: Session, share: float) -> None:
    """Has a share (0 to 1) of the session's operations compared."""
    global _now
    if share:
        _now = SelfCheck(session, share)
        _now.install()


def end_comparing() -> None:
    """Ends all comparisons."""
    global _now, _newest
    if _now is not None:
        _newest = _now.counts()
        _now.remove()
        _now = None  # it keeps the session alive


def share_of(verify: Any) -> float:
    """Returns ``verify`` as a float. Raises TypeError or ValueError for what is not a share."""
    if isinstance(verify, bool) or not isinstance(verify, (int, float)):
        raise TypeError(f"verify={shown(verify)} is not a number: 0 compares nothing, 0.01 one operation of 100, 1 all")
    if not 0 <= verify <= 1:
        raise ValueError(f"verify={shown(verify)} is not a share: 0 compares nothing, 0.01 one operation of 100, 1 all")
    return float(verify)


def counts() -> Counts:
    """Returns the numbers of compared operations in the newest session with ``verify``, which may have ended. Does not
    wait."""
    return _newest if _now is None else _now.counts()


__all__ = ["Counts", "VerifyError", "begin_comparing", "counts", "end_comparing", "share_of"]
