"""``dtrun --process-group``: a program of torch.distributed on every node, without a master."""
