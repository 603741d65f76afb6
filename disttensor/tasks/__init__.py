"""Functions of the user that run on nodes."""

from .functions import Each, interrupt, run

__all__ = ["Each", "interrupt", "run"]
