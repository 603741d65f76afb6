"""Many nodes as one place: ``dt.mesh(dp=8)``, the tensors there, and their shards. docs/MESHES.md.

Collectives over the dims of a mesh are those of ``dt.collectives`` with ``over=``.
"""

from .agreeing import agree_
from .generators import Generators
from .making import from_shards, full_tensor, mean, replicate, shard
from .mesh import Mesh, mesh, varying

__all__ = [
    "Generators", "Mesh", "agree_", "from_shards", "full_tensor", "mean", "mesh", "replicate", "shard", "varying",
]  # fmt: skip
