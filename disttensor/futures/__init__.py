"""Values on their way to the script, and what is done when they have arrived."""

from .work import Work, as_completed, fetch

__all__ = ["Work", "as_completed", "fetch"]
