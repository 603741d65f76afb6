"""Training on many nodes: ``DataParallel``, ``fully_shard``, ``Pipeline``. docs/DATA_PARALLEL, SHARDED, PIPELINE.md"""

from typing import TYPE_CHECKING

from ..runtime.process.renamed import old_names
from .asynchronous import (
    EASGD,
    Downpour,
    History,
    LocalSGD,
    ParameterServer,
    Schedule,
    Strategy,
    TrainingEvent,
    Worker,
    drive,
)
from .averaging import average_parameters, reduce_gradients
from .data_parallel import DataParallel
from .initializing import initialize
from .parts import clip_grad_norm_, load_whole_state_dict, whole_state_dict
from .pipeline import Pipeline
from .replicas import assert_replicas_equal
from .safetensors_files import load_safetensors
from .sharding import FSDPModule, fully_shard

__all__ = [
    "EASGD",
    "DataParallel",
    "Downpour",
    "FSDPModule",
    "History",
    "LocalSGD",
    "ParameterServer",
    "Pipeline",
    "Schedule",
    "Strategy",
    "TrainingEvent",
    "Worker",
    "assert_replicas_equal",
    "average_parameters",
    "clip_grad_norm_",
    "drive",
    "fully_shard",
    "initialize",
    "load_safetensors",
    "load_whole_state_dict",
    "reduce_gradients",
    "whole_state_dict",
]

if not TYPE_CHECKING:  # to type checkers, any name would be there
    __getattr__ = old_names(__name__, {"Event": "TrainingEvent"})
