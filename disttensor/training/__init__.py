"""Training on many nodes: ``dt.DataParallel``, ``Pipeline``, means over replicas. docs/DATA_PARALLEL.md, PIPELINE.md"""

from .averaging import average_parameters, reduce_gradients
from .data_parallel import DataParallel
from .parts import clip_grad_norm_, load_whole_state_dict, whole_state_dict
from .pipeline import Pipeline
from .replicas import assert_replicas_equal

__all__ = [
    "DataParallel",
    "Pipeline",
    "assert_replicas_equal",
    "average_parameters",
    "clip_grad_norm_",
    "load_whole_state_dict",
    "reduce_gradients",
    "whole_state_dict",
]
