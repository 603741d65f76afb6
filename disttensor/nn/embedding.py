"""A table of embeddings cut along a dim of a mesh, by its vocabulary."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..meshes import Mesh
from ..meshes.cut import Cut
from .operators import leave
from .sharded import Cuts, Sharded


class ParallelEmbedding(Sharded):
    """A table of embeddings of which each rank along a dim of a mesh has some of the rows; the lookups are added.

    It computes what ``nn.Embedding`` does, with the same numbers for the same torch seed, and has its gradients where
    all ranks along the dim compute the same loss (docs/TENSOR_PARALLEL.md). After Megatron-LM (Shoeybi et al. 2019),
    whose VocabParallelEmbedding it is.

        >>> tokens = dt.nn.ParallelEmbedding(50257, 768, mesh=dt.mesh(dp=2, tp=2))

    Args:
        num_embeddings, embedding_dim: as of nn.Embedding. The ranks need not divide ``num_embeddings``: the last ones'
            shares are padded by zeros, which no index reaches.
        padding_idx: the index whose row has no gradient, as of nn.Embedding.
        mesh: the mesh that the table is on.
        over: the name of its dim along which it is cut; along others each rank has the same rows. Default: that
            of ``mesh["tp"]``, the only one of a mesh, or "tp".
        dtype: of the table; torch's default where none is given.

    The input is a tensor of indices on the mesh, alike on all ranks along ``over``; the output has one more dimension,
    embedding_dim, alike on all of them. ``weight`` is (``num_embeddings_per_rank``, embedding_dim).

    Nothing waits. An index out of range is an IndexError at the fetch. Raises TypeError for what is no mesh, or indices
    elsewhere; ValueError for an unknown dim; NodeLost.
    """

    cuts: ClassVar[Cuts] = {"weight": 0}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mesh: Mesh,
        over: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        cut = Cut(mesh, over, num_embeddings, "ParallelEmbedding")
        self._build(nn.Embedding(num_embeddings, embedding_dim, padding_idx, device="cpu", dtype=dtype), cut)

    def _build(self, plain: nn.Embedding, cut: Cut) -> None:
        Sharded.__init__(self, plain, cut)
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.num_embeddings_per_rank = cut.share
        self.padding_idx = plain.padding_idx

    @classmethod
    def from_plain(cls, module: nn.Embedding, mesh: Mesh, over: str | None = None) -> ParallelEmbedding:
        """Returns a parallel table with the values of an nn.Embedding, which is local, on a node or on the mesh.

        Raises TypeError for another module, or one on another mesh; ValueError for one with max_norm,
        scale_grad_by_freq or sparse, which a part of a table cannot have; else as the class.
        """
        if type(module) is not nn.Embedding:
            raise TypeError(f"{cls.__name__}.from_plain takes an nn.Embedding, not {type(module).__name__}")
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if value := getattr(module, name):
                raise ValueError(f"{cls.__name__} has no {name}, and this nn.Embedding has {name}={value}")
        made = cls.__new__(cls)
        made._build(module, Cut(mesh, over, module.num_embeddings, "ParallelEmbedding"))
        return made

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the indices, (..., embedding_dim)."""
        self._check_input(index)
        own = index - self.cut.rank * self.num_embeddings_per_rank
        valid = (index >= 0) & (index < self.num_embeddings)
        elsewhere = valid & ((own < 0) | (own >= self.num_embeddings_per_rank))
        # an index out of range stays one, on every rank: its error is that of the plain module
        rows = F.embedding(torch.where(valid, own.masked_fill(elsewhere, 0), index), self.weight)
        if self.padding_idx is not None:
            rows = torch.where((index == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
        return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.cut)  # type: ignore[no-any-return]

    def _plain(self) -> nn.Embedding:
        made: nn.Embedding = nn.utils.skip_init(
            nn.Embedding, self.num_embeddings, self.embedding_dim, self.padding_idx, dtype=self.weight.dtype
        )
        return made

    def extra_repr(self) -> str:
        """Returns the sizes, for the module's repr."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.cut}, {self.embedding_dim}{padding}"
