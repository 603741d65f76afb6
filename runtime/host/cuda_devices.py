"""The CUDA devices that this process uses, and the order of what their streams are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def in_use() -> list[int]:
    """Returns the indices of the CUDA devices that this process has used. Another one would take memory to be asked."""
    if not torch.cuda.is_initialized():
        return []
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def ends() -> list[Any]:
    """Returns events that are done when all is that this thread's current streams have been given."""
    events = []
    for index in in_use():
        events.append(torch.cuda.Event())
        events[-1].record(torch.cuda.current_stream(index))
    return events


def follow(events: Iterable[Any]) -> None:
    """Has this thread's current streams wait for events, on the devices."""
    for event in events:
        for index in in_use():
            torch.cuda.current_stream(index).wait_event(event)
