"""A node: the worker's loop, the executor of commands, and the tensors that it holds."""
