"""States of generators that stay on the nodes: ``torch.utils.checkpoint`` saves and sets them without a round trip."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from .meta import Handle, meta_of, new_ref
from .placement import Place, one_session
from .runtime import command as c
from .site import here
from .tensor import DistributedTensor, proxy

#: Bytes of a CUDA generator's state: seed and offset.
_CUDA = 16


def keep(place: Place) -> DistributedTensor:
    """The state of the place's generator now, on its node's CPU."""
    size = _CUDA if place.kernels == "cuda" else torch.get_rng_state().numel()
    home = place.session.places.at(place.node, "cpu")
    out = new_ref()
    place.outbox.add(c.Keep(out, place.name, False), here())
    return proxy(Handle(out, meta_of((size,), (1,), 0, torch.uint8, home)))


def restore(place: Place, state: DistributedTensor) -> None:
    """Sets the generator to what was kept on the same node. Raises DisttensorError for a state of another session."""
    from .lazy import materialise

    one_session(place, state._place)
    place.outbox.add(c.Keep(state._h.ref or materialise(state._h), place.name, True), here())


def install() -> None:
    """Has checkpoints save the generators of the places that their arguments are on, as they do for CUDA."""
    module = torch.utils.checkpoint
    setattr(module, "get_device_states", _getting(module.get_device_states))  # noqa: B010 - mypy refuses the assignment
    setattr(module, "set_device_states", _setting(module.set_device_states))  # noqa: B010


def _getting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_device_states(*args: Any) -> Any:
        places = dict.fromkeys(t._place for t in tree_leaves(args) if isinstance(t, DistributedTensor))
        return (list(places), [keep(place) for place in places]) if places else original(*args)

    return get_device_states


def _setting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def set_device_states(devices: Any, states: Any, **kwargs: Any) -> None:
        if not any(isinstance(device, Place) for device in devices):
            return original(devices, states, **kwargs)  # type: ignore[no-any-return]
        for place, state in zip(devices, states, strict=True):
            restore(place, state)
        return None

    return set_device_states
