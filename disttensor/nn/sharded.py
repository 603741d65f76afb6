"""The base of tensor parallel modules: parameters are cut along a dim of a mesh, the state is the plain module's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..meshes import Mesh, replicate
from ..meshes.cut import Cut, mark
from ..proxy.proxy import where_is
from ..session.places import MeshPlace
from .operators import gather

#: The dimension in which each parameter is cut, by name; None where all ranks have all of it.
Cuts = Mapping[str, int | None]


class Sharded(nn.Module):
    """A module whose parameters are those of a plain one, cut along a dim of a mesh.

    Its state dict is the plain module's: ``state_dict()`` gathers the shards into whole tensors, alike on all ranks, so
    that ``torch.save`` writes what a local model would; ``load_state_dict`` takes whole tensors, local or on the mesh.
    """

    cuts: ClassVar[Cuts]

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, plain: nn.Module, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.training = plain.training
        for name in self.cuts:
            whole = getattr(plain, name)
            made = None if whole is None else nn.Parameter(self._cut(name, whole), whole.requires_grad)
            self.register_parameter(name, made)
        self._mark()

    def __setstate__(self, state: Any) -> None:  # of a copy, whose parameters are new ones
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _mark(self) -> None:
        for name, dim in self.cuts.items():
            parameter = getattr(self, name)
            if parameter is not None and dim is not None:
                mark(parameter, ((self.cut, dim),))

    @property
    def mesh(self) -> Mesh:
        """The mesh that the parameters are on."""
        return self.cut.mesh

    @property
    def over(self) -> str:
        """The name of the dim along which they are cut."""
        return self.cut.over

    @torch.no_grad()
    def _cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's shards; of one that is not cut the same values on all ranks."""
        dim = self.cuts[name]
        if dim is not None:
            return self.cut.shares(whole.detach(), dim)
        # what is on the mesh is on all ranks already
        if isinstance(where_is(whole), MeshPlace):
            return whole.detach().clone()
        return replicate(whole.detach(), self.mesh)

    @torch.no_grad()
    def _whole(self, name: str) -> torch.Tensor:
        """Returns a parameter as the plain module has it, on the mesh, alike on all ranks."""
        parameter, dim = getattr(self, name).detach(), self.cuts[name]
        return parameter if dim is None else gather(parameter, self.cut, dim)  # type: ignore[no-any-return]

    def _plain(self) -> nn.Module:
        """Returns a plain module of these sizes, with any values, local."""
        raise NotImplementedError

    def to_plain(self) -> Any:
        """Returns the plain module with these values, on the script's CPU. Waits for them.

        Raises RanksDiffer where the values differ along another dim of the mesh; NodeLost.
        """
        plain = self._plain().train(self.training)
        for name in self.cuts:
            parameter = getattr(self, name)
            if parameter is not None:
                made = nn.Parameter(self._whole(name).cpu(), parameter.requires_grad)
                setattr(plain, name, made)
        return plain

    # ---- state -------------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in self.cuts:
            if getattr(self, name) is not None:
                destination[prefix + name] = self._whole(name)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: Any, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        taken = dict(state_dict)  # torch's own function compares shapes, and copies: it gets the shards
        for name in self.cuts:
            value, parameter = taken.get(prefix + name), getattr(self, name)
            if value is None or parameter is None:
                continue
            if tuple(value.shape) == self._whole_shape(name):
                taken[prefix + name] = self._cut(name, value)
                continue
            errors.append(
                f"size mismatch for {prefix}{name}: {tuple(value.shape)} in the checkpoint, "
                f"{self._whole_shape(name)} is the whole parameter."
            )
            taken[prefix + name] = parameter.detach()  # it stays as it is, and is not called missing
        super()._load_from_state_dict(taken, prefix, metadata, strict, missing, unexpected, errors)

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        shape, dim = list(getattr(self, name).shape), self.cuts[name]
        if dim is not None:
            shape[dim] = self.cut.size
        return tuple(shape)

    # ---- inputs ------------------------------------------------------------------------------------------------------

    def _check_input(self, x: Any) -> None:
        """Raises TypeError for an input that is not on the mesh, RuntimeError where the module itself is not."""
        what, place = self.cut.what, self.cut.place
        moved = where_is(self.weight)
        if moved is not place:
            raise RuntimeError(
                f"this {what} was made on {place}, and its weight is on {moved or 'the script'} now; module.to_plain() "
                f"before it is moved, and {what}.from_plain(plain, mesh) make one elsewhere"
            )
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{what} takes a tensor on {place}, not {type(x).__name__}")
        there = where_is(x)
        if there is not place:
            raise TypeError(
                f"{what} is on {place}, and its input {tuple(x.shape)} on {there or 'the script'}: x.to(mesh.device) "
                "has the same values on all ranks, dt.shard(x, mesh, dp=0) a part of the batch on each along dp"
            )

    def _check_features(self, x: torch.Tensor, wanted: int, why: str) -> None:
        """Raises ValueError for an input whose last dimension has another size."""
        if not x.dim() or x.shape[-1] != wanted:
            raise ValueError(
                f"{self.cut.what}: the last dimension of the input {tuple(x.shape)} has to be {wanted}, {why}"
            )
