"""The state of a job while it runs: what the script and each node are at. docs/SEEING.md.

``dt.seeing.status()`` prints as tables, and answers whatever the nodes are at. ``dt.seeing.profile()`` records a
timeline, ``dt.seeing.report()`` a page about a run. ``dt.seeing.whence(x)`` says where a tensor comes from.
"""

from __future__ import annotations

from .breakpoints import breakpoint as breakpoint  # not in __all__: Python has one, too
from .finite import check_finite
from .metrics import collector
from .origin import Origin, OriginCommand
from .profile import Profile, profile, report
from .reading import status
from .regions import Region, region
from .status import (
    ActorStatus,
    CompileStatus,
    CopyStatus,
    GpuStatus,
    JobStatus,
    LineStatus,
    MeshStatus,
    NodeStatus,
    QueueStatus,
    ScriptStatus,
    ScriptWait,
    SlowStatus,
    TransferStatus,
    UndertakingStatus,
)
from .whence import whence

__all__ = [
    "ActorStatus",
    "CompileStatus",
    "CopyStatus",
    "GpuStatus",
    "JobStatus",
    "LineStatus",
    "MeshStatus",
    "NodeStatus",
    "Origin",
    "OriginCommand",
    "Profile",
    "QueueStatus",
    "Region",
    "ScriptStatus",
    "ScriptWait",
    "SlowStatus",
    "TransferStatus",
    "UndertakingStatus",
    "check_finite",
    "collector",
    "profile",
    "region",
    "report",
    "status",
    "whence",
]
