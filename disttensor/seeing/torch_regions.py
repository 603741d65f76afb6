"""``torch.profiler.record_function`` in the script names its parts for profiles, as ``dt.seeing.region`` does.

torch tells nobody in Python of them, so its methods are replaced with the first profile (torch_patches). torch's own
parts have such names, too: the steps of optimizers, and the batches of a DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from . import regions

#: The attribute that has the begin of one that is under way, while somebody listens.
_BEGAN = "_disttensor_began"


def entering(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a ``record_function.__enter__`` that notes the begin."""

    @wraps(original)  # TorchScript compiles the source that this leads to
    def __enter__(self: Any) -> Any:
        recorder = regions.recorder
        if recorder is not None:
            setattr(self, _BEGAN, recorder.note_edge())
        return original(self)

    return __enter__


def leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a ``record_function.__exit__`` that tells profiles of the part."""

    @wraps(original)
    def __exit__(self: Any, *error: Any) -> Any:
        began, recorder = vars(self).pop(_BEGAN, None), regions.recorder
        if began is not None and recorder is not None:
            recorder.note_region(began, self.name)
        return original(self, *error)

    return __exit__
