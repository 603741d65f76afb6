"""Trains by transformers' Trainer as two processes of torch's DDP over gloo do, and prints what the first one logs:
``python ddp_trainer.py FOLDER PORT``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import transformers.trainer  # type: ignore[import-untyped, unused-ignore]  # once, before the processes are forked
from library_programs import logged, trainer, unchanged


def main(folder: str, port: str) -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", OMP_NUM_THREADS="1")
    child = os.fork()
    rank = "1" if child == 0 else "0"
    os.environ.update(RANK=rank, LOCAL_RANK=rank, LOCAL_WORLD_SIZE="2")
    it = trainer(
        unchanged, Path(folder, rank), max_steps=3, per_device_train_batch_size=2, use_cpu=True, ddp_backend="gloo"
    )
    assert type(it.accelerator.prepare(it.model)).__name__ == "DistributedDataParallel"
    it.accelerator.free_memory()
    it.train()
    if child == 0:
        return 0
    print(json.dumps(logged(it)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    assert transformers.trainer
    sys.exit(main(*sys.argv[1:]))
