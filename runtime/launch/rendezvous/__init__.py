"""The rendezvous of a job and nodes that it did not start: they find it, and prove that they may join."""
