"""Objects that the script's process holds for itself and for functions on nodes: channels."""
