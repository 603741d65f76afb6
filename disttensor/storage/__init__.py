"""The memory and identity of remote tensors: checkpoints, deep copies, ``.data =``, parameters of lazy modules."""
