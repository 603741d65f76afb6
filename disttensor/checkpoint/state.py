"""A program's state as named tensors and values: those of modules and optimizers by torch's own names.

The names are those that ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives, so that a job of another form
finds them: the states of an optimizer have the names of the parameters, and a wrapper around a module adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..meshes.cut import Cuts, cut_of, whole_shape
from ..training import DataParallel
from ..training.sharding import reshard

#: The keys of a state dict that lead to a value.
Path = tuple[Any, ...]

_EXTRA = "_extra_state"


class StateEntry(NamedTuple):
    """A tensor or another value of a state, and how the tensor is a part of a whole one."""

    value: Any
    cuts: Cuts = ()


class State:
    """A program's state: the tensors and values behind what it has put into its state dict."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Raises TypeError for what is no dict, or has what no checkpoint can; ValueError for an optimizer of
        parameters that no module of the state dict has."""
        if not isinstance(given, MutableMapping):
            raise TypeError(
                "a state dict is a dict of tensors, values, modules and optimizers, such as "
                f"{{'model': model, 'optim': optimizer, 'step': 10}}, not {type(given).__name__}"
            )
        self._given = given
        self._cuts: dict[int, Cuts] = {}  #: of tensors that are parts, by id; ``nested`` keeps them alive
        self._names: dict[str, list[str]] = {}  #: of the optimizers' parameters, in their order
        self.nested: dict[str, Any] = {}
        modules = [value for value in given.values() if isinstance(value, torch.nn.Module)]
        for module in modules:
            reshard(module)  # a pass may have left it whole
        parameters = {
            id(value): (name, value) for module in reversed(modules) for name, value in reversed(list(named(module)))
        }
        for key, value in given.items():
            if isinstance(value, torch.nn.Module):
                self.nested[key] = self._of_module(value)
            elif isinstance(value, torch.optim.Optimizer):
                self.nested[key] = self._of_optimizer(str(key), value, parameters)
            elif isinstance(value, Stateful):
                self.nested[key] = value.state_dict()
            else:
                self.nested[key] = value
        #: the keys of each entry, by its name
        self.paths: dict[str, Path]
        flat, self.paths = flatten_state_dict(self.nested)
        for name, value in flat.items():
            _check(name, value)
        #: all entries, by name
        self.entries = {
            name: _entry(name, v, self._cuts.get(id(v)) or cut_of(v)) if isinstance(v, torch.Tensor) else StateEntry(v)
            for name, v in flat.items()
        }

    def _of_module(self, module: torch.nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in named(module):
            if isinstance(value, torch.Tensor):
                found[name] = self._part(value.detach(), cut_of(value))
            else:
                found[name] = value.get_extra_state()
        return found

    def _part(self, tensor: torch.Tensor, cuts: Cuts) -> torch.Tensor:
        if cuts:
            self._cuts[id(tensor)] = cuts
        return tensor

    def _of_optimizer(
        self, key: str, optimizer: torch.optim.Optimizer, parameters: Mapping[int, tuple[str, Any]]
    ) -> dict[str, Any]:
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        for p in owned:
            if id(p) not in parameters:
                raise ValueError(
                    f"{key!r} is an optimizer of a parameter {tuple(p.shape)} that no module of the state dict has. "
                    "Its states are saved by the names of the parameters: give the module too, as in "
                    "{'model': model, 'optim': optimizer}"
                )
        names = self._names[key] = [parameters[id(p)][0] for p in owned]
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ValueError(
                f"{key!r} is an optimizer of two parameters that are called {twice!r}, each in another module of the "
                "state dict: put these modules into one, such as torch.nn.ModuleDict"
            )
        state = optimizer.state_dict()
        states = {names[i]: values for i, values in state["state"].items()}
        for p, name in zip(owned, names, strict=True):
            for value in tree_leaves(states.get(name)):
                if isinstance(value, torch.Tensor) and value.shape == p.shape and value.device == p.device:
                    self._part(value, cut_of(p))
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
        return {**state, "state": states, "param_groups": groups}

    # ---- loading -----------------------------------------------------------------------------------------------------

    def prepare(self, metadata: Metadata) -> None:
        """Makes the optimizers' states that are in a checkpoint and not here yet, as those of an optimizer that has not
        made a step."""
        paths: Mapping[str, Path] = metadata.planner_data or {}
        parameters = {
            key: dict(zip(names, [p for g in self._given[key].param_groups for p in g["params"]], strict=True))
            for key, names in self._names.items()
        }
        for name, stored in metadata.state_dict_metadata.items():
            path = paths.get(name, (name,))
            if name in self.entries or len(path) < 4 or path[0] not in parameters:
                continue
            if path[1] == "param_groups":
                self._add_setting(name, path)
            elif path[1] == "state" and (parameter := parameters[path[0]].get(str(path[2]))) is not None:
                made = _fresh(parameter, str(path[-1]), stored)
                set_element(self.nested, path, made.value)
                self.paths[name] = path
                self.entries[name] = made if made.value is None else _entry(name, *made)

    def _add_setting(self, name: str, path: Path) -> None:
        """Makes room for a setting of a group that the optimizer here does not have yet, such as a scheduler's."""
        key, _, i, *_ = path
        groups = self.nested[key]["param_groups"]
        if int(i) >= len(groups):
            raise ValueError(
                f"the optimizer {key!r} has {len(groups)} groups of parameters here, and more in the checkpoint: make "
                "its groups as they were when it was saved"
            )
        set_element(self.nested, path, None)
        self.paths[name], self.entries[name] = path, StateEntry(None)

    def put(self, name: str, value: Any) -> None:
        """Puts a value that was read in its place. A tensor is filled where it is."""
        *path, last = self.paths[name]
        container: Any = self.nested
        for key in path:
            container = container[_key(container, key)]
        container[_key(container, last)] = value

    def give_back(self) -> None:
        """Gives what was read to the modules, optimizers and other objects, and to the program's dict.

        Raises ValueError for an optimizer whose groups have other parameters.
        """
        for key, value in self.nested.items():
            given = self._given[key]
            if isinstance(given, torch.nn.Module):
                for name, owner in named(given):
                    if isinstance(owner, torch.nn.Module):
                        owner.set_extra_state(value[name])
            elif isinstance(given, torch.optim.Optimizer):
                names = self._names[str(key)]
                given.load_state_dict(_by_number(str(key), value, names, given))
            elif isinstance(given, Stateful):
                given.load_state_dict(value)
            else:
                self._given[key] = value


def _entry(name: str, tensor: torch.Tensor, cuts: Cuts) -> StateEntry:
    """Returns the entry of a tensor; of a DTensor over a mesh that of its parts, which are read in their place."""
    if not _is_dtensor(tensor):
        return StateEntry(tensor, cuts)
    from ..meshes.as_torch.placements import cuts_of_dtensor, local_of

    return StateEntry(local_of(tensor), cuts_of_dtensor(tensor, f"{name!r}"))  # type: ignore[arg-type]


def _is_dtensor(value: Any) -> bool:
    if not is_traceable_wrapper_subclass(value):
        return False
    from ..meshes.as_torch.placements import is_dtensor  # whose module takes a moment to import

    return is_dtensor(value)


def _fresh(parameter: torch.Tensor, what: str, stored: object) -> StateEntry:
    """Returns a state of a parameter that is in a checkpoint, as an optimizer makes it at its first step."""
    if not isinstance(stored, TensorStorageMetadata):
        return StateEntry(None)
    dtype, cuts = stored.properties.dtype, cut_of(parameter)
    if what != "step" and tuple(stored.size) == whole_shape(parameter, cuts):
        return StateEntry(torch.zeros_like(parameter.detach(), dtype=dtype), cuts)
    return StateEntry(torch.zeros(stored.size, dtype=dtype, device="cpu"))  # where it belongs torch moves it


def _by_number(key: str, state: Mapping[str, Any], names: list[str], optimizer: torch.optim.Optimizer) -> Any:
    """Returns an optimizer's state with numbers in place of the parameters' names, as it takes it."""
    number, at = {name: i for i, name in enumerate(names)}, 0
    for i, (group, mine) in enumerate(zip(state["param_groups"], optimizer.param_groups, strict=True)):
        own = names[at : at + len(mine["params"])]
        at += len(own)
        if sorted(group["params"]) != sorted(own):
            others = sorted({*group["params"]} ^ {*own})
            raise ValueError(
                f"group {i} of the optimizer {key!r} has other parameters than in the checkpoint, such as "
                f"{', '.join(map(repr, others[:3]))}: make its groups as they were when it was saved"
            )
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {number[name]: values for name, values in state["state"].items()}, "param_groups": groups}


def named(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the parameters and persistent buffers of a module by name, those that are there twice twice; and the
    modules that have an extra state, by its name."""
    for name, value in [*module._parameters.items(), *module._buffers.items()]:
        if value is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, value
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        yield prefix + _EXTRA, module
    for name, child in module._modules.items():
        if child is not None:
            yield from named(child, prefix if _is_wrapper(module, name) else f"{prefix}{name}.")


def _is_wrapper(module: torch.nn.Module, name: str) -> bool:
    """Returns whether a module is only a wrapper around this child of it, so that names should not tell of it."""
    return name in ("_orig_mod", "_checkpoint_wrapped_module") or (
        isinstance(module, (DataParallel, DistributedDataParallel)) and name == "module"
    )


def _key(container: Any, key: str | int) -> Any:
    """Returns the key of a dict that is written as this text; torch's names have no numbers as keys of dicts."""
    if isinstance(container, Mapping) and key not in container:
        return next(other for other in container if str(other) == key)
    return key


def _check(name: str, value: Any) -> None:
    """Raises TypeError for what no checkpoint can have at this place."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        raise TypeError(
            f"{name!r} is a {type(value).__name__} within a dict or list: modules and optimizers stand in the state "
            "dict itself, as in {'model': model, 'optim': optimizer}"
        )
    if isinstance(value, torch.Tensor) and value.is_meta:
        raise TypeError(
            f"{name!r} is on the meta device, without values: model.to_empty(device=mesh.device) makes room"
        )
    if _is_dtensor(value):
        return
    if isinstance(value, torch.Tensor) and (hasattr(value, "__create_write_items__") or value.layout != torch.strided):
        what = type(value).__name__ if value.layout == torch.strided else f"tensor of layout {value.layout}"
        raise TypeError(f"{name!r} is a {what}: a checkpoint here has strided tensors, local, on nodes or on meshes")
