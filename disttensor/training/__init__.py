"""Training on meshes: ``dt.DataParallel``, means over replicas, whether replicas are equal. docs/DATA_PARALLEL.md."""

from .averaging import average_parameters, reduce_gradients
from .data_parallel import DataParallel
from .replicas import assert_replicas_equal

__all__ = ["DataParallel", "assert_replicas_equal", "average_parameters", "reduce_gradients"]
