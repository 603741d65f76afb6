"""What makes "node" a device of torch's: registration, backward passes, autocast, generators, compilation."""
