"""Tensor parallel modules: the layers of a model, each cut along a dim of a mesh. docs/TENSOR_PARALLEL.md."""

from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .plans import parallelize

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "parallelize"]
