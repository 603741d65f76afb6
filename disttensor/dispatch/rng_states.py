"""Generators on nodes: states of the default ones, for checkpoints, and ``torch.Generator(device="node:1")``.

A state stays on its node, and takes no round trip to be kept or set. So a generator of the user's is just a state: for
a draw it replaces the state of the default generator, which is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from ..proxy.meta import Handle, meta_of, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.master.failures import Site
from ..runtime.master.route import route
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import GraphError
from ..session import current
from ..session.places import Place, one_session
from .call_site import here
from .first_call import place_of
from .lazy_views import materialise
from .op_plan import OpEntry

#: Bytes of a CUDA generator's state: seed and offset.
_CUDA = 16


def size_of_state(place: Place) -> int:
    """Returns how many bytes the state of a place's generator has."""
    return _CUDA if place.kernels == "cuda" else torch.get_rng_state().numel()


def keep(place: Place) -> DistributedTensor:
    """Returns the present state of the place's generator, a uint8 tensor on its node's CPU. Returns at once."""
    size, home, out = size_of_state(place), place.host, new_ref()
    with place.session.places.turn(place):
        place.outbox.add(c.Keep(out, place.name, False), here())
    return proxy(Handle(out, meta_of((size,), (1,), 0, torch.uint8, home)))


def restore(place: Place, state: DistributedTensor) -> None:
    """Sets the place's generator to a state that was kept on the same node. Returns at once.

    Raises DisttensorError for a state of another session.
    """
    one_session(place, state._place)
    with place.session.places.turn(place):
        place.outbox.add(c.Keep(state._h.ref or materialise(state._h), place.name, True), here())


def put(place: Place, state: torch.Tensor) -> None:
    """Sets the place's generator to a local state. Returns at once.

    The state goes with the command. By a data channel it could be lost on its way, and draws would go on from another.
    """
    link = place.session.link
    request = link.requests.new_to_all(place.outbox)
    with place.session.places.turn(place):
        place.outbox.add(c.Random(request.id, place.name, state.numpy().tobytes()), here())
    link.requests.withdraw(request)


def put_each(place: Place, states: Sequence[bytes], site: Site | None) -> None:
    """Sets the generator from which a place draws now to local states, one for each of its nodes. Returns at once, as
    ``put``."""
    link = place.session.link
    with place.session.places.turn(place):
        for member, state in zip(place.members, states, strict=True):
            request = link.requests.new_to_all(member.outbox)
            member.outbox.add(c.Random(request.id, member.name, state), site)
            link.requests.withdraw(request)


class NodeGenerator(torch._C.Generator):
    """A generator whose draws are made on a node. To C++ it is a local generator, which turns seeds into states.

    In an operation on local tensors, where torch would refuse a generator of a node, it draws as that local generator.
    """

    _place: Place
    #: the state: on the node after a draw, here as it was set; None while the local generator has it
    _kept: torch.Tensor | None

    def __new__(cls, place: Place) -> NodeGenerator:
        self: NodeGenerator = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        self._place, self._kept = place, None
        _ours[_address(self)] = self
        return self

    def __init__(self, place: Place) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._place.device

    def manual_seed(self, seed: int) -> NodeGenerator:
        super().manual_seed(seed)
        self._kept = None
        return self

    def seed(self) -> int:
        self._kept = None
        return super().seed()

    def get_state(self) -> torch.Tensor:
        """Returns the state as a local uint8 tensor. Waits for the node if the generator has drawn."""
        if self._kept is not None:
            return self._kept.cpu() if isinstance(self._kept, DistributedTensor) else self._kept.clone()
        if self._place.kernels == "cuda":  # a state is the seed, and the count of numbers drawn
            seed = self.initial_seed()
            return torch.tensor([seed - (1 << 64) if seed >= 1 << 63 else seed, 0]).view(torch.uint8)
        return super().get_state()

    def set_state(self, new_state: torch.Tensor) -> NodeGenerator:
        if self._place.kernels == "cuda":
            super().manual_seed(int(new_state[:8].cpu().view(torch.int64)))
            self._kept = new_state.cpu().clone()
        else:
            super().set_state(new_state.cpu())
            self._kept = None
        return self

    def clone_state(self) -> NodeGenerator:
        return NodeGenerator(self._place).set_state(self.get_state())

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (str(self.device), self.get_state())

    def borrow(self) -> DistributedTensor:
        """Makes this generator's state that of the place's default generator, and returns the state of before."""
        before, kept = keep(self._place), self._kept
        if isinstance(kept, DistributedTensor):
            restore(self._place, kept)  # type: ignore[arg-type]  # a metaclass of torch's hides it from mypy
        else:
            put(self._place, self.get_state())
        return before

    def give_back(self, before: DistributedTensor) -> None:
        self._kept = keep(self._place)
        restore(self._place, before)


#: The user's generators by the address of the C++ one: torch passes operators another Python object than the user's.
_ours: WeakValueDictionary[int, NodeGenerator] = WeakValueDictionary()


def _address(generator: torch._C.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def _restored(device: str, state: torch.Tensor) -> torch._C.Generator:
    return torch.Generator(device=device).set_state(state)


def drawn(run: Callable[..., Any], entry: OpEntry, args: Any, kwargs: Any, place: Place | None) -> Any:
    """Calls ``run`` with a generator of the user's among the arguments.

    Raises RuntimeError for a generator of another place, NotImplementedError for a local one, GraphError while a graph
    is recorded.
    """

    def without(value: Any) -> Any:
        if not isinstance(value, torch._C.Generator):
            return value
        given.append(value)
        return None

    given: list[torch._C.Generator] = []
    args, kwargs = tuple(map(without, args)), {name: without(value) for name, value in kwargs.items()}
    where = place_of(entry, args, kwargs, place)
    generator = _ours.get(_address(given[0]))
    if generator is None or generator._place is not where:
        there = given[0].device if generator is None else generator._place
        kind = RuntimeError if generator is not None else NotImplementedError
        raise kind(
            f"{entry.name}: expected a generator on {where} but found one on {there}; "
            f"make it with torch.Generator(device={where.written})"
        )
    if route.get().recorder is not None:
        raise GraphError(
            f"{entry.name}: a graph can't record the draws of a generator of one's own: each replay would draw the "
            "same; draw from the node's default generator, or outside of the graph"
        )
    before = generator.borrow()
    try:
        return run(entry, args, kwargs, place)
    finally:
        generator.give_back(before)


class _Class(type(torch._C.Generator)):  # type: ignore[misc]
    """The metaclass of ``torch.Generator``, whose instances are those of torch's own class, and NodeGenerators."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not torch.Generator:  # a user's subclass
            return super().__call__(*args, **kwargs)
        device = args[0] if args else kwargs.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "node":
            return NodeGenerator(current.session().places.of(torch.device(device)))
        return _original(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _original) if cls is torch.Generator else super().__instancecheck__(value)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _original) if cls is torch.Generator else super().__subclasscheck__(kind)


_original = torch._C.Generator


def generator_class(original: type) -> type:
    """Returns a ``torch.Generator`` that makes generators on nodes, too."""
    return _Class("Generator", (_original,), {"__doc__": _original.__doc__, "__module__": "torch"})


def getting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function by which checkpoints save the default generators of their arguments' places, as for CUDA."""

    @wraps(original)
    def get_device_states(*args: Any) -> Any:
        places = dict.fromkeys(t._place for t in tree_leaves(args) if isinstance(t, DistributedTensor))
        return (list(places), [keep(place) for place in places]) if places else original(*args)

    return get_device_states


def setting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function by which checkpoints set the saved generators again."""

    @wraps(original)
    def set_device_states(devices: Any, states: Any, **kwargs: Any) -> None:
        if not any(isinstance(device, Place) for device in devices):
            return original(devices, states, **kwargs)  # type: ignore[no-any-return]
        for place, state in zip(devices, states, strict=True):
            restore(place, state)
        return None

    return set_device_states
