"""Makes "node" a device of torch: registration, backward passes, autocast, generators, compilation."""
