"""Comparison of a session's operations with local torch (``verify=``): docs/VERIFYING.md. What of a module will not run
on a node, before there is one (``check``): docs/CHECKING.md."""

from ..runtime.protocol.errors import VerifyError
from .module_check import check
from .selfcheck import Counts, counts

__all__ = ["Counts", "VerifyError", "check", "counts"]
