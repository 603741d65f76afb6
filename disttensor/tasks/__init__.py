"""Functions of the user that run on nodes."""

from .functions import Each, run

__all__ = ["Each", "run"]
