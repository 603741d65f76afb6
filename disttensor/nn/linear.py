"""Linear layers cut along a dim of a mesh: by their outputs' features, or by their inputs'."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..meshes import Mesh
from ..meshes.cut import Cut
from .operators import enter, gather, leave, split
from .sharded import Cuts, Sharded


class _Linear(Sharded):
    """A linear layer that is cut: the sizes of the plain one, and the way back to it."""

    in_features: int
    out_features: int

    def _init_from(self, plain: nn.Linear, cut: Cut) -> None:
        Sharded.__init__(self, plain, cut)
        self.in_features, self.out_features = plain.in_features, plain.out_features

    def _plain(self) -> nn.Linear:
        made: nn.Linear = nn.utils.skip_init(
            nn.Linear, self.in_features, self.out_features, self.bias is not None, dtype=self.weight.dtype
        )
        return made


def _linear(module: Any, what: str) -> nn.Linear:
    """Returns a module that is an nn.Linear. Raises TypeError for others, subclasses too: they may compute more."""
    if type(module) is not nn.Linear:
        raise TypeError(f"{what}.from_plain takes an nn.Linear, not {type(module).__name__}")
    return module


class ColumnParallelLinear(_Linear):
    """A linear layer of which each rank along a dim of a mesh computes some of the outputs' features.

    It computes what ``nn.Linear`` does, with the same numbers for the same torch seed, and has its gradients where all
    ranks along the dim compute the same loss (docs/TENSOR_PARALLEL.md). After Megatron-LM (Shoeybi et al. 2019).

        >>> up = dt.nn.ColumnParallelLinear(512, 2048, gather_output=False, mesh=dt.mesh(dp=2, tp=2))

    Args:
        in_features, out_features, bias: as of nn.Linear. The ranks need not divide ``out_features``: the shares of
            the last ones are padded by zeros, which stay zeros in training.
        gather_output: whether all ranks get all features, (..., out_features). If not, each gets its own, (...,
            ``out_features_per_rank``), padding zero, for a ``RowParallelLinear`` with ``input_is_parallel``.
        mesh: the mesh that the parameters are on.
        over: the name of its dim along which they are cut; along others each rank has the same. Default: that of
            ``mesh["tp"]``, the only one of a mesh, or "tp".
        dtype: of the parameters; torch's default where none is given.

    The input is (..., in_features) on the mesh, alike on all ranks along ``over``. ``weight`` is
    (``out_features_per_rank``, in_features), on each rank its rows, ``bias`` (``out_features_per_rank``,).

    Nothing waits. Raises TypeError for what is no mesh, or an input elsewhere; ValueError for an unknown dim, or an
    input of another size; NodeLost.
    """

    cuts: ClassVar[Cuts] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        *,
        mesh: Mesh,
        over: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        cut = Cut(mesh, over, out_features, "ColumnParallelLinear")
        self._build(nn.Linear(in_features, out_features, bias, device="cpu", dtype=dtype), cut, gather_output)

    def _build(self, plain: nn.Linear, cut: Cut, gather_output: bool) -> None:
        self._init_from(plain, cut)
        self.out_features_per_rank = cut.share
        self.gather_output = gather_output

    @classmethod
    def from_plain(
        cls, module: nn.Linear, mesh: Mesh, over: str | None = None, *, gather_output: bool = True
    ) -> ColumnParallelLinear:
        """Returns a column parallel layer with the values of an nn.Linear, which is local, on a node or on the mesh.

        Raises TypeError for another module, or one on another mesh; else as the class.
        """
        made = cls.__new__(cls)
        plain = _linear(module, cls.__name__)
        made._build(plain, Cut(mesh, over, plain.out_features, "ColumnParallelLinear"), gather_output)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output, (..., out_features) or (..., out_features_per_rank)."""
        self._check_input(x)
        self._check_features(x, self.in_features, "in_features")
        y = F.linear(enter(x, self.cut), self.weight, self.bias)
        if self.gather_output:
            return gather(y, self.cut)  # type: ignore[no-any-return]
        return self.cut.without_padding(y)

    def extra_repr(self) -> str:
        """Returns the sizes, for the module's repr."""
        return (
            f"in_features={self.in_features}, out_features={self.cut}, bias={self.bias is not None}, "
            f"gather_output={self.gather_output}"
        )


class RowParallelLinear(_Linear):
    """A linear layer of which each rank along a dim of a mesh takes some of the inputs' features; all are added up.

    It computes what ``nn.Linear`` does, with the same numbers for the same torch seed, and has its gradients where all
    ranks along the dim compute the same loss (docs/TENSOR_PARALLEL.md). After Megatron-LM (Shoeybi et al. 2019).

        >>> down = dt.nn.RowParallelLinear(2048, 512, input_is_parallel=True, mesh=dt.mesh(dp=2, tp=2))

    Args:
        in_features, out_features, bias: as of nn.Linear. The ranks need not divide ``in_features``: the shares of
            the last ones are padded, and what is in the padding counts for nothing.
        input_is_parallel: whether each rank gets its own features only, (..., ``in_features_per_rank``), as
            ``ColumnParallelLinear(gather_output=False)`` gives them. If not, the input is (..., in_features), alike on
            all ranks along ``over``.
        mesh: the mesh that the parameters are on.
        over: the name of its dim along which they are cut; along others each rank has the same. Default: that of
            ``mesh["tp"]``, the only one of a mesh, or "tp".
        dtype: of the parameters; torch's default where none is given.

    The output is (..., out_features), alike on all ranks along ``over``. ``weight`` is (out_features,
    ``in_features_per_rank``), on each rank its columns; ``bias`` is (out_features,) on all.

    Nothing waits. Raises TypeError for what is no mesh, or an input elsewhere; ValueError for an unknown dim, or an
    input of another size; NodeLost.
    """

    cuts: ClassVar[Cuts] = {"weight": 1, "bias": None}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        *,
        mesh: Mesh,
        over: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        cut = Cut(mesh, over, in_features, "RowParallelLinear")
        self._build(nn.Linear(in_features, out_features, bias, device="cpu", dtype=dtype), cut, input_is_parallel)

    def _build(self, plain: nn.Linear, cut: Cut, input_is_parallel: bool) -> None:
        self._init_from(plain, cut)
        self.in_features_per_rank = cut.share
        self.input_is_parallel = input_is_parallel

    @classmethod
    def from_plain(
        cls, module: nn.Linear, mesh: Mesh, over: str | None = None, *, input_is_parallel: bool = False
    ) -> RowParallelLinear:
        """Returns a row parallel layer with the values of an nn.Linear, which is local, on a node or on the mesh.

        Raises TypeError for another module, or one on another mesh; else as the class.
        """
        made = cls.__new__(cls)
        plain = _linear(module, cls.__name__)
        made._build(plain, Cut(mesh, over, plain.in_features, "RowParallelLinear"), input_is_parallel)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output, (..., out_features)."""
        self._check_input(x)
        if self.input_is_parallel:
            why = f"a rank's part of in_features={self.cut}; input_is_parallel=False takes all of them"
            self._check_features(x, self.in_features_per_rank, why)
            part = self.cut.without_padding(x)  # an activation may have made something of the zeros
        else:
            self._check_features(x, self.in_features, "in_features; input_is_parallel=True takes a rank's part")
            part = split(x, self.cut)
        y = leave(F.linear(part, self.weight), self.cut)
        # once, and not once a rank; in the dtype of y, which is another one under autocast
        return y if self.bias is None else y + self.bias.to(y.dtype)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Returns the sizes, for the module's repr."""
        return (
            f"in_features={self.cut}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"input_is_parallel={self.input_is_parallel}"
        )
