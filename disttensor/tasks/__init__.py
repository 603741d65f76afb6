"""Functions of the user that run on nodes."""
