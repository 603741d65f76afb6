"""Comparison of a session's operations with local torch (``verify=``): docs/VERIFYING.md."""

from ..runtime.protocol.errors import VerifyError
from .selfcheck import Counts, counts

__all__ = ["Counts", "VerifyError", "counts"]
