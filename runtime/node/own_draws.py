"""Random numbers of an actor: what its methods draw comes from generators of its own.

A process has one default generator per device, which the commands of the default stream draw from meanwhile, and those
of a mesh have to find it in the same state on all nodes. So while a method runs, each operator that draws is given a
generator of the actor, and ``torch.manual_seed`` and its like (``torch.random``) mean that one. What an actor draws
depends on its seed and its calls, and on nothing else that the node does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..process import role

_running = threading.local()  #: ``draws``: those of the method that this thread runs


class OwnDraws(TorchDispatchMode):
    """The generators of one actor; as a context, what draws inside of it draws from them."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        _watch_seeds()

    def on(self, device: torch.device) -> torch.Generator:
        """Returns the generator of a device."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device)
            found.manual_seed(self.seed)
        return found

    def reseed(self, seed: int) -> torch.Generator:
        """Seeds the generators of all devices, as ``torch.manual_seed``; returns the CPU's."""
        self.seed = seed
        for generator in self._generators.values():
            generator.manual_seed(seed)
        return self.on(torch.device("cpu"))

    def __enter__(self) -> OwnDraws:
        super().__enter__()  # type: ignore[no-untyped-call]
        _running.depth = getattr(_running, "depth", 0) + 1
        _running.draws = self
        return self

    def __exit__(self, *exc: Any) -> None:
        _running.depth -= 1
        if not _running.depth:
            _running.draws = None
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        draw = _how(func)
        return func(*args, **(kwargs or {})) if draw is None else draw(self, args, dict(kwargs or {}))


_Draw = Callable[[OwnDraws, Sequence[Any], dict[str, Any]], Any]


@cache
def _how(func: OpOverload) -> _Draw | None:
    """Returns how an operator draws from an actor's generators; None for one that does not draw."""
    if torch.Tag.nondeterministic_seeded not in func.tags or func._schema.name == "aten::_fused_sdp_choice":
        return None
    twin = func if _index(func) is not None else _twin(func)
    if twin is not None:
        return _with_own_generator(twin)
    if func._schema.name == "aten::native_dropout":
        return _dropout
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return _in_parts(func)
    return _refused(func)


def _index(func: OpOverload) -> int | None:
    """Returns the position of an operator's argument for a generator."""
    return next((i for i, arg in enumerate(func._schema.arguments) if "Generator" in str(arg.type)), None)


def _twin(func: OpOverload) -> OpOverload | None:
    """Returns the overload that takes a generator besides."""
    names = [arg.name for arg in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        index = _index(other)
        arguments = other._schema.arguments
        if index is not None and [arg.name for i, arg in enumerate(arguments) if i != index] == names:
            return other  # type: ignore[no-any-return]
    return None


def _with_own_generator(func: OpOverload) -> _Draw:
    index = _index(func)
    assert index is not None
    name, keyword_only = func._schema.arguments[index].name, func._schema.arguments[index].kwarg_only

    def draw(draws: OwnDraws, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        positional = not keyword_only and index < len(args)
        if (args[index] if positional else kwargs.get(name)) is None:
            device = _device(args, kwargs)
            if device.type in ("cpu", "cuda"):
                if positional:
                    args = [*args[:index], draws.on(device), *args[index + 1 :]]
                else:
                    kwargs[name] = draws.on(device)
        return func(*args, **kwargs)

    return draw


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Returns the device on which an operator draws."""
    flat = [x for value in (*args, *kwargs.values()) for x in (value if isinstance(value, (list, tuple)) else [value])]
    tensor = next((value for value in flat if isinstance(value, torch.Tensor)), None)
    if tensor is not None:
        return tensor.device
    return torch.device(kwargs.get("device") or "cpu")


def _dropout(draws: OwnDraws, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, p, train = args
    if train is False or p == 0:
        return torch.ops.aten.native_dropout.default(x, p, train)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=draws.on(x.device))
    return (x * kept * (0.0 if p == 1 else 1 / (1 - p))), kept


def _in_parts(func: OpOverload) -> _Draw:
    """Returns a composite (whole only in inference mode) as its parts, which come here one by one."""

    def draw(draws: OwnDraws, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with draws:
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return draw


def _refused(func: OpOverload) -> _Draw:
    """Returns a kernel that draws inside, from no generator that could be given: fine without dropout."""
    names = [arg.name for arg in func._schema.arguments]

    def draw(draws: OwnDraws, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if any(given.get(name) for name in ("dropout_p", "dropout", "p")) or not {"dropout_p", "dropout"} & set(names):
            raise NotImplementedError(
                f"{func} in an actor's method: it draws from the device's default generator, which is not the actor's; "
                "without dropout (eval(), dropout_p=0) it works"
            )
        return func(*args, **kwargs)

    return draw


# ---- torch.manual_seed and its like ----------------------------------------------------------------------------------


def _watch_seeds() -> None:
    """Has ``torch.manual_seed`` and its like, in a method of an actor, mean the actor's generator.

    Not where nodes are threads of the script's process: these have one generator together.
    """
    if not role.is_node() or getattr(torch.random.manual_seed, "of_actors", False):
        return
    cpu = torch.device("cpu")
    for name, own in (
        ("manual_seed", lambda draws, seed: draws.reseed(int(seed))),
        ("seed", lambda draws: draws.reseed(torch.Generator().seed()).initial_seed()),
        ("initial_seed", lambda draws: draws.on(cpu).initial_seed()),
        ("get_rng_state", lambda draws: draws.on(cpu).get_state()),
        ("set_rng_state", lambda draws, new_state: draws.on(cpu).set_state(new_state) and None),
    ):
        aware = _aware(getattr(torch.random, name), own)
        setattr(torch.random, name, aware)
        setattr(torch, name, aware)


def _aware(default: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def either(*args: Any, **kwargs: Any) -> Any:
        draws = getattr(_running, "draws", None)
        return default(*args, **kwargs) if draws is None else own(draws, *args, **kwargs)

    either.of_actors = True  # type: ignore[attr-defined]
    return either
